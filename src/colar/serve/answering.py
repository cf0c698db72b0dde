"""An ask becomes pieces: thoughts and text as they come, and how each sample ended.

    engine     thought   thought   stop   token   token   EOS   finished
    pieces     thought   thought          text    text          end

Answers in one piece are folds over the same pieces, so that both forms say the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from colar.engine.request import Event, Request
from colar.serve.ask import Ask
from colar.serve.errors import ApiError
from colar.serve.text import AnswerText, token_bytes
from colar.serve.thoughts import ThoughtReader
from colar.template.template import Template

RULED_OUT = -9999.0
"""The log-prob of a token of probability 0, in OpenAI's words."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer, and its log-prob at the request's temperature, before top-p."""

    text: str
    logprob: float
    utf8: bytes
    """What it adds to the answer: part of a character, maybe."""
    offset: int = 0
    """Where it begins in the answer's text."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in its place, likeliest first."""


@dataclass
class Sample:
    """What one sample has said so far; complete with its last piece."""

    index: int
    text: str = ""
    reasoning: str = ""
    thoughts: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    n_thoughts: int = 0
    n_tokens: int = 0
    forward_passes: int = 1
    """One for the question, one for each embedding fed after it."""
    finish: str = ""
    """"stop", or "length" where the answer met its limit."""
    cut: bool = False
    """Whether the answer or the thinking met its limit."""
    started: float = field(default_factory=time.perf_counter)
    answer_began: float | None = None
    finished: float = 0.0
    """When the engine made its last event."""

    def details(self, ask: Ask) -> dict[str, Any]:
        """The key `colar` of docs/serve.md."""
        began = self.finished if self.answer_began is None else self.answer_began
        found = {
            "thoughts": self.thoughts,
            "forward_passes": self.forward_passes,
            "thinking_ms": _ms(began - self.started),
            "answer_ms": _ms(self.finished - began),
            "finish": "length" if self.cut else "stop",
            "seed": ask.seed,
        }
        return found | ({"warning": ask.warning} if ask.warning else {})


@dataclass(frozen=True)
class Piece:
    """Something new of a sample: a thought, some text, or its end."""

    sample: Sample
    text: str = ""
    reasoning: str = ""
    thought: dict[str, Any] | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    last: bool = False
    """Whether the sample ends with it. The sample itself is no witness: it may be ahead of pieces that wait."""


Pieces = AsyncGenerator[Piece, None]


async def pieces(ask: Ask) -> Pieces:
    """All samples' pieces as they come. Closing it, or cancelling its caller, cancels the engine's requests."""
    if len(ask.requests) == 1:
        async with contextlib.aclosing(_sample(ask, 0)) as alone:
            async for piece in alone:
                yield piece
        return

    # Unbounded: the engine waits for no reader, and the limits of the requests bound what can pile up.
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(ask, i, queue)) for i in range(len(ask.requests))]
    try:
        left = len(tasks)
        while left:
            said = await queue.get()
            if isinstance(said, Exception):
                raise said
            if said is None:
                left -= 1
            else:
                yield said
    finally:
        # Waited for, so that the engine is told to cancel before the ask gives its places in the queue back.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(ask: Ask, index: int, queue: asyncio.Queue[Piece | Exception | None]) -> None:
    try:
        async with contextlib.aclosing(_sample(ask, index)) as mine:
            async for piece in mine:
                queue.put_nowait(piece)
        queue.put_nowait(None)
    # Not BaseException: a pump is cancelled by `pieces`, which reads the queue no more.
    except Exception as error:
        queue.put_nowait(error)


async def _sample(ask: Ask, index: int) -> Pieces:
    """The pieces of one sample."""
    served = ask.served
    request = ask.requests[index]
    sample = Sample(index)
    reader = ThoughtReader(served.lm, served.nearest, request.params, ask.wants.thoughts)
    answer = AnswerText(served.lm.template, ask.stop)
    # Those that are not read yet.
    thoughts: list[Event] = []
    async with contextlib.aclosing(_events(ask, request)) as events:
        async for event in events:
            sample.finished = event.at
            if event.kind == "thought":
                sample.n_thoughts += 1
                sample.forward_passes += 1
                thoughts.append(event)
                # An answer of one piece has its thoughts read together: that is one look at the vocabulary.
                if not ask.stream:
                    # Said although it is empty: the time to the first event is measured at the first piece.
                    yield Piece(sample)
                    continue
            for piece in await _read(ask, sample, reader, thoughts):
                yield piece
            thoughts.clear()
            if event.kind == "thought":
                continue
            # The thinking is over: bytes that are no character yet will not become one.
            kept = reader.end()
            if kept:
                sample.reasoning += kept
                yield Piece(sample, reasoning=kept)
            if event.kind == "token":
                said = _say(ask, sample, answer, event)
                if said is not None:
                    yield said
                # The engine's request is cancelled where this loop ends early: its last event, which says how it
                # ended, does not come. Thinking is cut where it has come to its limit (`engine/step.py`).
                if answer.stopped:
                    sample.finish = "stop"
                    sample.cut = sample.n_thoughts >= request.decoding.max_latents
                    break
            elif event.kind == "finished":
                _check(event)
                sample.cut = event.truncated
                sample.finish = event.reason
    rest = answer.end()
    sample.text += rest
    yield Piece(sample, text=rest, last=True)


async def _events(ask: Ask, request: Request) -> AsyncGenerator[Event, None]:
    """The engine's events. ApiError 400 where it cannot run the request, 500 where it fails."""
    begun = False
    try:
        async with contextlib.aclosing(ask.served.engine.stream(request)) as events:
            async for event in events:
                begun = True
                yield event
    except ValueError as error:
        # Checked already, but for what the engine alone knows: its budget of positions.
        if begun:
            raise failed() from error
        raise ApiError(400, str(error)) from error
    except Exception as error:
        raise failed() from error


async def _read(ask: Ask, sample: Sample, reader: ThoughtReader, thoughts: Sequence[Event]) -> list[Piece]:
    """The pieces of these thoughts."""
    if not ask.wants.reasoning and not ask.wants.thoughts:
        return [Piece(sample) for _ in thoughts]
    pieces = []
    for text, thought in await reader.read(thoughts):
        sample.reasoning += text
        if thought is not None:
            sample.thoughts.append(thought)
        pieces.append(Piece(sample, reasoning=text, thought=thought))
    return pieces


def _say(ask: Ask, sample: Sample, answer: AnswerText, event: Event) -> Piece | None:
    """The piece of an answer's token; None where it says nothing (yet)."""
    # EOS counts too: each token comes out of one pass, the first out of the separator's.
    sample.forward_passes += 1
    if sample.answer_began is None:
        sample.answer_began = event.at
    template = ask.served.lm.template
    if event.token_id == template.eos_id:
        return None
    sample.n_tokens += 1
    offset = answer.offset
    text = answer.add(event.token_id)
    sample.text += text
    logprobs: tuple[TokenLogprob, ...] = ()
    if ask.wants.logprobs:
        logprobs = (_logprob(template, event, offset),)
        sample.logprobs += logprobs
    return Piece(sample, text=text, logprobs=logprobs) if text or logprobs else None


def _logprob(template: Template, event: Event, offset: int) -> TokenLogprob:
    top: list[TokenLogprob] = []
    if "top_ids" in event.info:
        pairs = zip(event.info["top_ids"].tolist(), event.info["top_logps"].tolist(), strict=True)
        # JSON has no infinity: a model may rule tokens out.
        top = [_of_token(template, each, max(logp, RULED_OUT)) for each, logp in pairs]
    chosen = _of_token(template, event.token_id, float(event.info["logp"]))
    return replace(chosen, offset=offset, top=tuple(top))


def _of_token(template: Template, token_id: int, logprob: float) -> TokenLogprob:
    return TokenLogprob(template.token(token_id), logprob, token_bytes(template, token_id))


def _check(event: Event) -> None:
    """ApiError 500 for a request that has failed."""
    if event.reason == "error":
        raise failed()


def failed() -> ApiError:
    """What a client is told of an error that is not its own: the log has the rest."""
    return ApiError(500, "the model failed to answer this request", type="server_error", code="engine_error")


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


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
