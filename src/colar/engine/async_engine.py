"""The engine for servers: many callers on one event loop, one thread that steps.

    engine = AsyncEngine(Engine(lm, method, max_batch=32, max_waiting=256))
    async for event in engine.stream(request): ...
    completion = await engine.generate(request)
    await engine.close()

    callers, on the event loop                         worker thread
    submit, cancel, run, close   ---its queue--->      order  order  step  order  step ...
    stream    <---events: a queue for each caller---   each step queues the next one behind the orders

Callers come and go at any time. Closing a stream early, or cancelling its task, cancels its request and no other. Only
the worker uses the engine and its model; `run` executes other work on the model in the worker.

On a CPU the worker should be the only thread that computes. Each thread that has computed keeps OpenMP threads of its
own, and if all of these outnumber the cores, they sleep instead of waiting actively: steps of SmolLM2-135M then take
1.5 times as long on two cores. Therefore load a served model in a temporary thread (`run_in_temporary_thread`).
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from colar.engine.completion import Completion, Event, completions_of
from colar.engine.engine import Engine
from colar.engine.request import Request

T = TypeVar("T")
Subscriber = asyncio.Queue[Event | Exception]
"""The queue from which a caller receives events, or the error that ends its stream."""

log = logging.getLogger(__name__)


class EngineClosed(RuntimeError):
    """The engine was closed, or has failed for good; it accepts no more requests."""

    def __init__(self, message: str = "the engine is closed") -> None:
        super().__init__(message)


class AsyncEngine:
    """Serves one `Engine`, which nothing else may use until `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        """True once no more requests are accepted."""
        self._worker = ThreadPoolExecutor(1, "colar-engine")
        self._step_is_queued = False
        self._subscribers: dict[int, Subscriber] = {}
        """The queues of unfinished requests, by the engine's number. Only the worker changes this dict."""
        self._loop: asyncio.AbstractEventLoop
        """The event loop of all callers; unset until the first `stream`."""

    def check(self, request: Request) -> tuple[int, ...]:
        """`Engine.check`. It reads only the tokenizer and fixed limits, so any thread may call it."""
        return self.engine.check(request)

    async def stream(
        self, request: Request, ids: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events of one request as they happen. `ids` are those of `check`, if the caller has checked it.

        Raises ValueError if the request cannot be run, QueueFull if too many wait, the error of a step of this request,
        and EngineClosed once the engine is closed.
        """
        # A copy, because requests are cancelled by identity: another caller may have passed the same object.
        request = dataclasses.replace(request)
        loop = asyncio.get_running_loop()
        if self._subscribers and loop is not self._loop:
            raise RuntimeError("an AsyncEngine answers callers of one event loop at a time")
        self._loop = loop
        subscriber: Subscriber = asyncio.Queue()
        # Set by the worker, because this task may be cancelled before `run` returns.
        number = -1

        def submit() -> None:
            nonlocal number
            number = self.engine.submit(request, ids)
            self._subscribers[number] = subscriber
            self._queue_step()

        def cancel() -> None:
            # A request that was refused or has finished has no subscriber, and nothing to cancel. If cancelling raises,
            # no caller is left to receive the error: the request runs on and its events are dropped.
            if self._subscribers.pop(number, None) is not None:
                self.engine.cancel(request)

        try:
            await self.run(submit)
            while True:
                event = await subscriber.get()
                if isinstance(event, Exception):
                    raise event
                if event.error is not None:
                    raise event.error
                yield event
                if event.kind == "finished":
                    return
        finally:
            # Once closed there is nothing to cancel.
            with contextlib.suppress(EngineClosed):
                self._order(cancel)

    async def generate(self, request: Request) -> Completion:
        """Answer one request. Raises as `stream` does."""
        events = [event async for event in self.stream(request)]
        (completion,) = completions_of(self.engine.lm, events)
        return dataclasses.replace(completion, request=request)

    async def close(self) -> None:
        """Stop after the current step; streams that are still open end with EngineClosed."""
        # Not by `run`: a caller that is cancelled meanwhile would cancel the order.
        self.closed = True
        with contextlib.suppress(RuntimeError):
            self._worker.submit(self._end)
        await asyncio.to_thread(self._worker.shutdown)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the worker between two steps, and return its result. Raises what `work` raises."""
        return await asyncio.wrap_future(self._order(work))

    def _order(self, work: Callable[[], T]) -> Future[T]:
        """Have the worker do something. EngineClosed once closed."""

        def order() -> T:
            if self.closed:
                raise EngineClosed
            return work()

        try:
            return self._worker.submit(order)
        except RuntimeError as error:
            raise EngineClosed from error

    # The worker's side

    def _queue_step(self) -> None:
        """Have the worker step, after the orders that wait."""
        if not self._step_is_queued:
            self._step_is_queued = True
            # Once `close` has shut the worker down, `_end` is its last order, and ends all streams.
            with contextlib.suppress(RuntimeError):
                self._worker.submit(self._step)

    def _step(self) -> None:
        self._step_is_queued = False
        try:
            self._deliver(self.engine.step())
        except Exception as error:
            # The engine itself has failed, not a request. It is cleared, and serves the next requests.
            self._fail(error)
        except BaseException:
            log.exception("the engine has stopped")
            self._end()
            raise
        if self.engine.busy and not self.closed:
            self._queue_step()

    def _end(self) -> None:
        """Accept no more requests, and end all streams."""
        self.closed = True
        self._fail(EngineClosed())

    def _deliver(self, events: Sequence[Event]) -> None:
        """Put events into the queues of their subscribers."""
        items: list[tuple[Subscriber, Event | Exception]] = []
        for event in events:
            # No subscriber: the caller has left, and cancelling its request failed (see `stream`).
            if event.number in self._subscribers:
                items.append((self._subscribers[event.number], event))
            if event.kind == "finished":
                self._subscribers.pop(event.number, None)
        self._put(items)

    def _fail(self, error: Exception) -> None:
        """Remove all requests and end their streams with this error. An engine that cannot be cleared is closed."""
        items = [(subscriber, error) for subscriber in self._subscribers.values()]
        self._subscribers.clear()
        try:
            self.engine.clear()
        except Exception:
            self.closed = True
            log.exception("the engine has stopped")
        self._put(items)

    def _put(self, items: Sequence[tuple[Subscriber, Event | Exception]]) -> None:
        """Put items into their queues in one call, because each call wakes the event loop's thread."""

        def put() -> None:
            for subscriber, item in items:
                subscriber.put_nowait(item)

        if items:
            # The loop may be closed, and its callers gone with it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(put)


def run_in_temporary_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that then ends together with its OpenMP threads. Returns or raises what `work` does."""
    with ThreadPoolExecutor(max_workers=1) as one:
        return one.submit(work).result()
