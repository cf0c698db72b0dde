"""An ask on its way back: within its places in the queue, counted and timed, whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from colar.serve.answering import Piece, Pieces, Sample, failed, pieces, usage
from colar.serve.ask import Ask
from colar.serve.errors import ApiError, json_response
from colar.serve.limits import Limits
from colar.serve.metrics import Metrics
from colar.serve.streaming import COMPLETE, EventStream, data_frame, too_late, unless_gone

LEFT_STATUS = 499
"""Logged for a stream that did not come to its end; its status was sent as 200 before."""


@dataclass(frozen=True)
class Shape:
    """How an endpoint shows an ask."""

    whole: Callable[[list[Sample]], dict[str, Any]]
    """The answer in one piece."""
    stream: Callable[[Pieces], AsyncGenerator[Any, None]]
    """The values of a stream."""
    frame: Callable[[Any], bytes]
    """A value as an event."""


class Delivery:
    """Answers asks for one server. With `prompts`, the log gets questions and answers."""

    def __init__(self, limits: Limits, metrics: Metrics, prompts: bool) -> None:
        self.limits = limits
        self.metrics = metrics
        self.prompts = prompts

    async def answer(self, request: Request, made: Ask, shape: Shape, stream: bool) -> Response:
        """The response; its status is known when the first piece is there."""
        found = self._observed(request.state.noted, made)
        deadline = request.state.deadline
        try:
            first = await unless_gone(request, deadline, anext(found))
            if not stream:
                samples = await unless_gone(request, deadline, _collect(first, found))
                return json_response(shape.whole(samples))
        except BaseException:
            # A generator that nobody closes holds its places in the queue until it is collected.
            await found.aclose()
            raise
        values = shape.stream(_after(first, found))
        frames = stream_frames(found, values, shape.frame, deadline, request.state.noted)

        def on_end(how: str) -> None:
            if how != COMPLETE:
                request.state.noted.update(ended=how, status=LEFT_STATUS)

        return EventStream(frames, self.limits, deadline, on_end)

    async def _observed(self, noted: dict[str, Any], made: Ask) -> Pieces:
        """The pieces of an ask, noted for the log."""
        served = made.served
        started = time.perf_counter()
        samples: dict[int, Sample] = {}
        if self.prompts:
            noted["prompts"] = sorted({each.question for each in made.requests})
        # Entered at the first `anext`, before any header is sent: a full queue is still a 429.
        with served.admission.enter(len(made.requests)):
            try:
                async with contextlib.aclosing(pieces(made)) as found:
                    async for piece in found:
                        if not samples:
                            self.metrics.first.labels(served.name).observe(time.perf_counter() - started)
                        samples[piece.sample.index] = piece.sample
                        yield piece
            except ApiError as error:
                # A stream has no status left to say it with.
                noted["error"] = str(error)
                if error.__cause__ is not None:
                    noted["cause"] = repr(error.__cause__)
                raise
            finally:
                served.admission.took(time.perf_counter() - started)
                self._count(noted, made, list(samples.values()))

    def _count(self, noted: dict[str, Any], made: Ask, samples: list[Sample]) -> None:
        """Count the tokens of an ask that has ended, however it did."""
        counts = usage(made, samples)
        reasoning = counts["completion_tokens_details"]["reasoning_tokens"]
        kinds = {
            "prompt": counts["prompt_tokens"],
            "reasoning": reasoning,
            "answer": counts["completion_tokens"] - reasoning,
        }
        for kind, count in kinds.items():
            self.metrics.tokens.labels(made.served.name, kind).inc(count)
            noted[f"{kind}_tokens"] = count
        if self.prompts:
            noted["answers"] = [sample.text for sample in samples]


async def _collect(first: Piece, rest: Pieces) -> list[Sample]:
    """All samples, once they have ended."""
    samples = {first.sample.index: first.sample}
    async for piece in rest:
        samples[piece.sample.index] = piece.sample
    return list(samples.values())


async def _after(first: Piece, rest: Pieces) -> Pieces:
    yield first
    async for piece in rest:
        yield piece


async def stream_frames(
    source: Pieces,
    values: AsyncGenerator[Any, None],
    frame: Callable[[Any], bytes],
    deadline: float,
    noted: dict[str, Any],
) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream; an error is its last event, and noted for the log with the status it would have had.

    `values` are made of `source`, which holds places in the queue: it is closed here, with the stream, and not when the
    generators between them are collected.
    """
    async with contextlib.aclosing(source), contextlib.aclosing(values):
        try:
            while True:
                # Not around the `yield`: the deadline would then interrupt whatever the consumer is doing.
                async with asyncio.timeout_at(deadline):
                    value = await anext(values)
                yield frame(value)
        except StopAsyncIteration:
            return
        except TimeoutError:
            yield _error_frame(too_late(), noted)
        except ApiError as error:
            yield _error_frame(error, noted)
        except Exception as error:
            # A defect of ours: the client is told that it is none of its own, and the log has it in full.
            logging.getLogger("uvicorn.error").exception("a stream failed")
            noted["cause"] = repr(error)
            yield _error_frame(failed(), noted)


def _error_frame(error: ApiError, noted: dict[str, Any]) -> bytes:
    noted.update(error=str(error), status=error.status)
    return data_frame(error.body())
