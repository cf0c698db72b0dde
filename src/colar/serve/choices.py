"""/v1/chat/completions and /v1/completions: what an ask's samples look like in each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from colar.serve.answering import Piece, Pieces, Sample, TokenLogprob, usage
from colar.serve.ask import Ask

DONE = "[DONE]"
"""The last frame of a stream."""


class Form(Protocol):
    """How an endpoint shows samples and pieces."""

    object: str
    chunk_object: str

    def choice(self, ask: Ask, sample: Sample) -> dict[str, Any]:
        """A finished sample, in an answer of one piece."""

    def opening(self, ask: Ask, sample: Sample) -> dict[str, Any] | None:
        """A sample's first chunk, before its first piece."""

    def piece(self, ask: Ask, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None where there is nothing to show."""

    def closing(self, ask: Ask, sample: Sample) -> dict[str, Any]:
        """A sample's last chunk."""


class Chat:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, ask: Ask, sample: Sample) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        if ask.wants.reasoning:
            message |= _reasoning(sample.reasoning)
        if ask.wants.thoughts:
            message["colar"] = sample.details(ask)
        logprobs = _logprobs(sample.logprobs) if ask.wants.logprobs else None
        return {
            "index": sample.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": sample.finish,
        }

    def opening(self, ask: Ask, sample: Sample) -> dict[str, Any] | None:
        return self._chunk(sample, {"role": "assistant", "content": ""})

    def piece(self, ask: Ask, piece: Piece) -> dict[str, Any] | None:
        delta: dict[str, Any] = {}
        if piece.reasoning and ask.wants.reasoning:
            delta |= _reasoning(piece.reasoning)
        if piece.thought is not None:
            delta["colar"] = {"thought": piece.thought}
        # A token may have a log-prob before it has text: bytes of a character that is not complete.
        if piece.text or piece.logprobs:
            delta["content"] = piece.text
        logprobs = _logprobs(piece.logprobs) if piece.logprobs else None
        return self._chunk(piece.sample, delta, logprobs) if delta else None

    def closing(self, ask: Ask, sample: Sample) -> dict[str, Any]:
        delta = {"colar": sample.details(ask)} if ask.wants.thoughts else {}
        return self._chunk(sample, delta, finish=sample.finish)

    def _chunk(
        self, sample: Sample, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": sample.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


class Completions:
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, ask: Ask, sample: Sample) -> dict[str, Any]:
        logprobs = _old_logprobs(sample.logprobs) if ask.wants.logprobs else None
        choice = self._chunk(sample, sample.text, logprobs, sample.finish)
        if ask.wants.thoughts:
            choice["colar"] = sample.details(ask)
        return choice

    def opening(self, ask: Ask, sample: Sample) -> dict[str, Any] | None:
        return None

    def piece(self, ask: Ask, piece: Piece) -> dict[str, Any] | None:
        logprobs = _old_logprobs(piece.logprobs) if piece.logprobs else None
        chunk = self._chunk(piece.sample, piece.text, logprobs)
        if piece.thought is not None:
            chunk["colar"] = {"thought": piece.thought}
        return chunk if piece.text or piece.logprobs or piece.thought is not None else None

    def closing(self, ask: Ask, sample: Sample) -> dict[str, Any]:
        chunk = self._chunk(sample, "", finish=sample.finish)
        if ask.wants.thoughts:
            chunk["colar"] = sample.details(ask)
        return chunk

    def _chunk(
        self, sample: Sample, text: str, logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": sample.index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def whole(form: Form, ask: Ask, samples: Sequence[Sample]) -> dict[str, Any]:
    """An answer in one piece."""
    # Samples are collected in the order of their first pieces, which differs from run to run.
    choices = [form.choice(ask, sample) for sample in sorted(samples, key=lambda sample: sample.index)]
    return {**_head(ask, form.object), "choices": choices, "usage": usage(ask, samples)}


async def chunks(
    form: Form, ask: Ask, pieces: Pieces, include_usage: bool
) -> AsyncGenerator[dict[str, Any] | str, None]:
    """The frames of a stream, with the usage in front of the last one where it is wanted."""
    head = _head(ask, form.chunk_object)
    # With the usage asked for, chunks without it have the key too.
    more: dict[str, Any] = {"usage": None} if include_usage else {}
    samples: dict[int, Sample] = {}
    async for piece in pieces:
        sample = piece.sample
        found: list[dict[str, Any] | None] = []
        if sample.index not in samples:
            samples[sample.index] = sample
            found.append(form.opening(ask, sample))
        found.append(form.piece(ask, piece))
        if piece.last:
            found.append(form.closing(ask, sample))
        for choice in found:
            if choice is not None:
                yield {**head, "choices": [choice], **more}
    if include_usage:
        last: dict[str, Any] = {**head, "choices": [], "usage": usage(ask, list(samples.values()))}
        if ask.wants.thoughts and len(samples) == 1:
            last["colar"] = samples[0].details(ask)
        yield last
    yield DONE


def _head(ask: Ask, kind: str) -> dict[str, Any]:
    return {"id": ask.id, "object": kind, "created": ask.created, "model": ask.served.name}


def _reasoning(text: str) -> dict[str, str]:
    """Under the two names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = []
    for token in tokens:
        content.append({**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top]})
    return {"content": content, "refusal": None}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def _old_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """As /v1/completions has them."""
    tops = []
    for token in tokens:
        # Likeliest last: where several tokens have one text, that of the likeliest stays.
        tops.append({other.text: other.logprob for other in reversed(token.top)})
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": [token.offset for token in tokens],
    }
