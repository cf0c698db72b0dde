"""Chat completions in OpenAI's format, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from colar.serve.samples import Sample, SamplePiece
from colar.serve.served_model import ApiRequest


def event(data: str) -> bytes:
    """A server-sent event."""
    return f"data: {data}\n\n".encode()


class ChatResponse:
    """The response to one request: a choice for each sample."""

    def __init__(self, api_request: ApiRequest, samples: Sequence[Sample]) -> None:
        self.api_request = api_request
        self.body = api_request.body
        self.samples = samples
        self.begun: set[int] = set()
        """Samples that have had an event."""

    def whole(self) -> dict[str, Any]:
        """The response in one piece."""
        choices = []
        for sample in self.samples:
            message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
            if self.body.include_reasoning:
                message |= _reasoning(sample.reasoning)
            if self.body.return_thoughts:
                message["colar"] = sample.details(self.api_request)
            choices.append(_choice("message", sample, message, sample.finish))
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def events(self, piece: SamplePiece) -> list[bytes]:
        """The events of a piece, none where it has nothing to show."""
        sample = piece.sample
        delta: dict[str, Any] = {}
        if sample.index not in self.begun:
            delta = {"role": "assistant", "content": ""}
        self.begun.add(sample.index)
        if piece.reasoning and self.body.include_reasoning:
            delta |= _reasoning(piece.reasoning)
        if piece.thought is not None:
            delta["colar"] = {"thought": piece.thought}
        if piece.text:
            delta["content"] = piece.text
        if piece.last and self.body.return_thoughts:
            delta["colar"] = sample.details(self.api_request)
        if not delta and not piece.last:
            return []
        choice = _choice("delta", sample, delta, sample.finish if piece.last else None)
        # Where the usage is requested, chunks without it have the key too.
        return [self._chunk([choice], {"usage": None} if self.body.stream_options.include_usage else {})]

    def end(self) -> list[bytes]:
        """The last events of a stream."""
        events = [event("[DONE]")]
        if self.body.stream_options.include_usage:
            more: dict[str, Any] = {"usage": self._usage()}
            if self.body.return_thoughts and len(self.samples) == 1:
                more["colar"] = self.samples[0].details(self.api_request)
            events.insert(0, self._chunk([], more))
        return events

    def _usage(self) -> dict[str, Any]:
        """OpenAI's token counts: thoughts are reasoning tokens; completion tokens are these and the answer's."""
        reasoning = sum(sample.n_thoughts for sample in self.samples)
        completion = reasoning + sum(sample.n_tokens for sample in self.samples)
        return {
            "prompt_tokens": self.api_request.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.api_request.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        api_request = self.api_request
        return {
            "id": api_request.id,
            "object": kind,
            "created": api_request.created,
            "model": api_request.served.name,
        }

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices, **more}
        return event(json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def _choice(key: str, sample: Sample, fields: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": sample.index, key: fields, "logprobs": None, "finish_reason": finish}


def _reasoning(text: str) -> dict[str, str]:
    """The two names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}
