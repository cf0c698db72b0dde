"""An ask's samples in OpenAI's formats, whole or as the events of a stream.

`Choices` is /v1/chat/completions and /v1/completions, `ResponseItems` is /v1/responses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from colar.serve.answer import AnswerPiece, Sample, TokenLogprob
from colar.serve.schema import ChatRequest, ResponseRequest, Sampled
from colar.serve.served import Ask


def of(ask: Ask) -> Choices | ResponseItems:
    """The form that an endpoint gives to samples."""
    return ResponseItems(ask, ask.body) if isinstance(ask.body, ResponseRequest) else Choices(ask)


def event(data: str, name: str | None = None) -> bytes:
    """A server-sent event."""
    line = "" if name is None else f"event: {name}\n"
    return f"{line}data: {data}\n\n".encode()


def usage(ask: Ask, samples: Sequence[Sample]) -> dict[str, Any]:
    """OpenAI's token counts: thoughts are reasoning tokens (#L), and completion tokens are these and the answer's."""
    reasoning = sum(sample.n_thoughts for sample in samples)
    completion = reasoning + sum(sample.n_tokens for sample in samples)
    return {
        "prompt_tokens": ask.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": ask.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class Choices:
    """/v1/chat/completions and /v1/completions: a choice for each sample."""

    def __init__(self, ask: Ask) -> None:
        assert isinstance(ask.body, Sampled)
        self.ask = ask
        self.body = ask.body
        self.chat = isinstance(ask.body, ChatRequest)
        self.begun: set[int] = set()
        """Samples that have had an event."""

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        choices = []
        for sample in samples:
            fields: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
            if self.body.include_reasoning:
                fields |= _reasoning(sample.reasoning)
            if self.body.return_thoughts:
                fields["colar"] = sample.details(self.ask)
            logprobs = None if self.body.likeliest is None else self._logprobs(sample.logprobs)
            choices.append(self._choice("message", sample, fields, logprobs, sample.finish))
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(self.ask, samples)}

    def events(self, piece: AnswerPiece) -> list[bytes]:
        sample = piece.sample
        fields: dict[str, Any] = {}
        if self.chat and sample.index not in self.begun:
            fields = {"role": "assistant", "content": ""}
        self.begun.add(sample.index)
        if self.chat and piece.reasoning and self.body.include_reasoning:
            fields |= _reasoning(piece.reasoning)
        if piece.thought is not None:
            fields["colar"] = {"thought": piece.thought}
        # A token may have a log-prob before it has text: bytes of a character that is not complete.
        if piece.text or piece.logprobs:
            fields["content"] = piece.text
        if piece.last and self.body.return_thoughts:
            fields["colar"] = sample.details(self.ask)
        if not fields and not piece.last:
            return []
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        finish = sample.finish if piece.last else None
        return [self._chunk([self._choice("delta", sample, fields, logprobs, finish)])]

    def end(self, samples: Sequence[Sample]) -> list[bytes]:
        found = [event("[DONE]")]
        if self.body.stream_options.include_usage:
            more: dict[str, Any] = {"usage": usage(self.ask, samples)}
            if self.body.return_thoughts and len(samples) == 1:
                more["colar"] = samples[0].details(self.ask)
            found.insert(0, self._chunk([], more))
        return found

    def _head(self, kind: str) -> dict[str, Any]:
        ask = self.ask
        return {"id": ask.id, "object": kind, "created": ask.created, "model": ask.served.name}

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        if more is None:
            # Where the usage is requested, chunks without it have the key too.
            more = {"usage": None} if self.body.stream_options.include_usage else {}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return event(_json({**self._head(kind), "choices": choices, **more}))

    def _choice(
        self, key: str, sample: Sample, fields: dict[str, Any], logprobs: Any, finish: str | None
    ) -> dict[str, Any]:
        """A choice with `fields` under `key`; /v1/completions has the text and the thoughts alone."""
        more = {"logprobs": logprobs, "finish_reason": finish}
        if self.chat:
            return {"index": sample.index, key: fields, **more}
        own = {"colar": fields["colar"]} if "colar" in fields else {}
        return {"index": sample.index, "text": fields.get("content", ""), **more, **own}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.chat:
            content = [
                {**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        # Likeliest last: where several tokens have one text, that of the likeliest stays.
        tops = [{other.text: other.logprob for other in reversed(token.top)} for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [token.offset for token in tokens],
        }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _reasoning(text: str) -> dict[str, str]:
    """The two names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


class ResponseItems:
    """/v1/responses: a reasoning item, if there are thoughts, and a message."""

    def __init__(self, ask: Ask, body: ResponseRequest) -> None:
        self.ask = ask
        self.body = body
        self.number = 0
        """Of the next event."""
        self.place = -1
        """Of the present item in the output."""
        self.part = ""
        """The type of the present item's text: "reasoning_text" or "output_text"."""
        self.text = ""
        """The text of the present item so far."""

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        (sample,) = samples
        output = [self._item("output_text", sample.text)]
        if self.body.include_reasoning and sample.n_thoughts:
            output.insert(0, self._item("reasoning_text", sample.reasoning))
        response = self._response("completed" if sample.finish == "stop" else "incomplete", output)
        counts = usage(self.ask, samples)
        response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }
        if sample.finish != "stop":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.body.return_thoughts:
            response["colar"] = sample.details(self.ask)
        return response

    def events(self, piece: AnswerPiece) -> list[bytes]:
        found = []
        if not self.number:
            opened = self._response("in_progress", [])
            found += [self._event("response.created", response=opened)]
            found += [self._event("response.in_progress", response=opened)]
        # The first thought opens its item even if it has no text, and the sample's end that of the message.
        answers = bool(piece.text) or piece.last
        thinks = not answers and not piece.sample.n_tokens and piece.sample.n_thoughts > 0
        if thinks and self.body.include_reasoning:
            found += self._open("reasoning_text")
        elif answers:
            found += self._open("output_text")
        text = piece.text or (piece.reasoning if self.body.include_reasoning else "")
        if text or piece.thought is not None:
            self.text += text
            more = (
                self._extra()
                if piece.thought is None
                else {**self._extra(), "colar": {"thought": piece.thought}}
            )
            found.append(self._part_event("delta", delta=text, **more))
        return found

    def end(self, samples: Sequence[Sample]) -> list[bytes]:
        response = self.whole(samples)
        return [*self._close(), self._event(f"response.{response['status']}", response=response)]

    def _open(self, part: str) -> list[bytes]:
        """The events that begin an item with a text of this type, unless it is the present one."""
        if part == self.part:
            return []
        found = self._close() if self.part else []
        self.place, self.part, self.text = self.place + 1, part, ""
        item = {**self._item(part, ""), "content": [], "status": "in_progress"}
        added = self._event("response.output_item.added", output_index=self.place, item=item)
        return [*found, added, self._at("response.content_part.added", part=self._part(part, ""))]

    def _close(self) -> list[bytes]:
        """The events that end the present item."""
        item = self._item(self.part, self.text)
        return [
            self._part_event("done", text=self.text, **self._extra()),
            self._at("response.content_part.done", part=self._part(self.part, self.text)),
            self._event("response.output_item.done", output_index=self.place, item=item),
        ]

    def _part_event(self, what: str, **fields: Any) -> bytes:
        return self._at(f"response.{self.part}.{what}", **fields)

    def _at(self, kind: str, **fields: Any) -> bytes:
        """An event of the present item's text."""
        item_id = self._item(self.part, "")["id"]
        return self._event(kind, item_id=item_id, output_index=self.place, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, **fields, "sequence_number": self.number}
        self.number += 1
        return event(_json(value), kind)

    def _extra(self) -> dict[str, Any]:
        """A field that the events of a message have beside the text."""
        return {"logprobs": []} if self.part == "output_text" else {}

    def _part(self, part: str, text: str) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if part == "output_text" else {}
        return {"type": part, "text": text, **more}

    def _item(self, part: str, text: str) -> dict[str, Any]:
        """A finished item of the output."""
        number = self.ask.id.partition("_")[2]
        shared = {"content": [self._part(part, text)], "status": "completed"}
        if part == "reasoning_text":
            return {"type": "reasoning", "id": f"rs_{number}", "summary": [], **shared}
        return {"type": "message", "id": f"msg_{number}", "role": "assistant", **shared}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        ask, body = self.ask, self.body
        decoding = ask.requests[0].decoding
        return {
            "id": ask.id,
            "object": "response",
            "created_at": ask.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions or None,
            "max_output_tokens": decoding.max_completion_length,
            "metadata": {},
            "model": ask.served.name,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": body.effort, "summary": body.reasoning.summary},
            "store": False,
            "temperature": decoding.temperature,
            "text": body.text.model_dump(),
            "tool_choice": "none",
            "tools": [],
            "top_p": decoding.top_p,
            "truncation": "disabled",
            "usage": None,
        }
