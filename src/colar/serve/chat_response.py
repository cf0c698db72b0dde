"""The response to a request: its samples as they are made, and these in OpenAI's format, whole or as events.

    engine     thought   thought   stop   token   token   EOS   finished
    pieces     thought   thought          text    text          end

Whole answers and streams are made of the same pieces: thoughts and text as they come, and how each sample ended.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from colar.engine.completion import AnswerText, Event
from colar.engine.engine import QueueFull
from colar.look.thought import NEIGHBOURS, ThoughtReader
from colar.serve.chat_request import ApiError
from colar.serve.served_model import ApiRequest

log = logging.getLogger("uvicorn.error")


@dataclass
class Sample:
    """One sample so far; complete with its last piece."""

    index: int
    text: str = ""
    reasoning: str = ""
    thoughts: list[dict[str, Any]] = field(default_factory=list)
    n_thoughts: int = 0
    n_tokens: int = 0
    forward_passes: int = 1
    """One for the question, one for each embedding fed after it."""
    finish: str = ""
    """"stop", or "length" where the answer met its limit."""
    cut: bool = False
    """True where a limit ended the answer or the thinking."""
    started: float = field(default_factory=time.perf_counter)
    answer_began: float | None = None
    last_event: float = 0.0
    """Time of the engine's last event, on the clock of `started`."""

    def details(self, api_request: ApiRequest) -> dict[str, Any]:
        """The key `colar` of docs/serve.md."""
        began = self.last_event if self.answer_began is None else self.answer_began
        fields = {
            "thoughts": self.thoughts,
            "forward_passes": self.forward_passes,
            "thinking_ms": round(1000 * (began - self.started), 3),
            "answer_ms": round(1000 * (self.last_event - began), 3),
            "finish": "length" if self.cut else "stop",
            "seed": api_request.requests[0].seed,
            "params": asdict(api_request.requests[0].params),
        }
        return fields | ({"warning": api_request.warning} if api_request.warning else {})


@dataclass(frozen=True)
class SamplePiece:
    """The news of a sample: a thought, some text, or its end."""

    sample: Sample
    text: str = ""
    reasoning: str = ""
    thought: dict[str, Any] | None = None
    last: bool = False
    """True for the last piece. `sample` itself may be ahead of pieces that wait."""


async def pieces(api_request: ApiRequest, samples: Sequence[Sample]) -> AsyncGenerator[SamplePiece, None]:
    """The pieces of all samples as they come. ApiError where one fails.

    Closing it, or cancelling its caller, cancels the engine's requests.
    """
    # Unbounded: the engine waits for no reader, and the limits of the requests bound what can pile up.
    queue: asyncio.Queue[SamplePiece | ApiError] = asyncio.Queue()
    tasks = [asyncio.create_task(_run(api_request, sample, queue.put_nowait)) for sample in samples]
    try:
        left = len(tasks)
        while left:
            piece = await queue.get()
            if isinstance(piece, ApiError):
                raise piece
            left -= piece.last
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    api_request: ApiRequest, sample: Sample, put: Callable[[SamplePiece | ApiError], None]
) -> None:
    """Put the pieces of one sample, or the error that ends them."""
    try:
        await _answer(api_request, sample, put)
    except QueueFull as error:
        words = f"the queue is full: {error}; try again later"
        put(ApiError(429, words, code="queue_full", type="rate_limit_error", headers={"Retry-After": "1"}))
    except Exception as error:
        # Before the first event the engine rejects the request: it may need more positions than its budget has.
        if isinstance(error, ValueError) and not sample.last_event:
            put(ApiError(400, str(error)))
            return
        log.exception("request %s failed", api_request.id)
        words = "the model failed to answer this request"
        put(ApiError(500, words, code="engine_error", type="server_error"))


async def _answer(api_request: ApiRequest, sample: Sample, put: Callable[[SamplePiece], None]) -> None:
    served, body = api_request.served, api_request.body
    request = api_request.requests[sample.index]
    reader = ThoughtReader(served.lm.template, request.params, NEIGHBOURS * body.return_thoughts)
    answer = AnswerText(served.lm.template, body.stop)
    stopped = False
    async with contextlib.aclosing(served.engine.stream(request)) as events:
        async for event in events:
            sample.last_event = event.at
            if event.kind == "thought":
                put(await _thought(api_request, sample, reader, event))
                continue
            stopped = stopped or event.kind == "stop"
            # The thinking is over: bytes that are no character yet will not become one.
            incomplete = reader.end()
            if incomplete:
                sample.reasoning += incomplete
                put(SamplePiece(sample, reasoning=incomplete))
            if event.kind == "token":
                put(_token(api_request, sample, answer, event))
                # Leaving this loop cancels the engine's request, so that its last event does not come.
                if answer.stopped:
                    sample.finish = "stop"
                    sample.cut = not stopped
                    break
            elif event.kind == "finished":
                if event.reason == "error":
                    raise FloatingPointError("the model's numbers are not finite")
                sample.finish, sample.cut = event.reason, event.truncated
    rest = answer.end()
    sample.text += rest
    put(SamplePiece(sample, text=rest, last=True))


async def _thought(
    api_request: ApiRequest, sample: Sample, reader: ThoughtReader, event: Event
) -> SamplePiece:
    """The piece of a thought; empty where thoughts are not shown."""
    sample.n_thoughts += 1
    sample.forward_passes += 1
    if not api_request.body.include_reasoning and not api_request.body.return_thoughts:
        return SamplePiece(sample)
    thought = await api_request.served.nearest.read(reader, event)
    sample.reasoning += thought["text"]
    if not api_request.body.return_thoughts:
        return SamplePiece(sample, reasoning=thought["text"])
    sample.thoughts.append(thought)
    return SamplePiece(sample, reasoning=thought["text"], thought=thought)


def _token(api_request: ApiRequest, sample: Sample, answer: AnswerText, event: Event) -> SamplePiece:
    """The piece of an answer's token; its text may be kept back."""
    # EOS counts too: each token comes out of one pass, the first out of the separator's.
    sample.forward_passes += 1
    if sample.answer_began is None:
        sample.answer_began = event.at
    if event.token_id == api_request.served.lm.template.eos_id:
        return SamplePiece(sample)
    sample.n_tokens += 1
    text = answer.add(event.token_id)
    sample.text += text
    return SamplePiece(sample, text=text)


# OpenAI's format


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
            # Each thought was in a delta of its own.
            details = sample.details(self.api_request)
            delta["colar"] = {key: value for key, value in details.items() if key != "thoughts"}
        if not delta and not piece.last:
            return []
        choice = _choice("delta", sample, delta, sample.finish if piece.last else None)
        # Where the usage is requested, chunks without it have the key too.
        return [self._chunk([choice], {"usage": None} if self.body.stream_options.include_usage else {})]

    def end(self) -> list[bytes]:
        """The last events of a stream."""
        events = [event("[DONE]")]
        if self.body.stream_options.include_usage:
            events.insert(0, self._chunk([], {"usage": self._usage()}))
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
