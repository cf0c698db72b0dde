"""The engine for servers: many callers on one event loop, one thread that steps.

    engine = AsyncEngine(Engine(lm, method, max_batch=32, max_waiting=256))
    async for event in engine.stream(request): ...
    completion = await engine.generate(request)
    await engine.close()

    callers, on the event loop                         worker thread
    stream  --submit, cancel, close-->  _orders  -->   between two steps: carry out the orders
            <--events--------- a queue for each  <--   step

Callers come and go at any time; leaving a stream early (or a cancelled task) cancels its request and leaves the others
untouched. Only the worker touches the engine and its model; `run` has it do other things with the model.

On a CPU the worker should be the only thread that computes. Each thread that has done so keeps OpenMP threads of its
own, and if all of these are more than the cores, they sleep instead of waiting actively: steps of SmolLM2-135M then
take half as long again on two cores. So load a model that is served in a thread that ends (`run_in_temporary_thread`).
"""

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from colar.engine.completion import Completion, Event, completions_of
from colar.engine.engine import Engine
from colar.engine.request import Request

T = TypeVar("T")
Subscriber = asyncio.Queue[Event | Exception]
"""The queue in which a caller waits for events, or for the error that ends the stream."""


class AsyncEngine:
    """Serves one `Engine`, which nothing else may use until `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Work of the worker between two steps, which raises nothing; None ends it."""
        self._subscribers: dict[int, Subscriber] = {}
        """Those of unfinished requests, by the engine's number. Only the worker changes them."""
        self._loop: asyncio.AbstractEventLoop
        """That of all callers, known from the first one on."""
        self._lock = threading.Lock()
        """Held to give an order: none is given to a worker that has ended."""
        self.closed = False
        """True once it takes no more requests."""
        self._worker = threading.Thread(target=self._work, name="colar-engine", daemon=True)
        self._worker.start()

    async def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request as they happen.

        Raises ValueError if it cannot be run, QueueFull if too many wait, what a step of this request raised, and
        RuntimeError once closed.
        """
        # An object of its own: to cancel it must not cancel another caller's.
        request = dataclasses.replace(request)
        loop = asyncio.get_running_loop()
        if self._subscribers and loop is not self._loop:
            raise RuntimeError("an AsyncEngine answers callers of one event loop at a time")
        self._loop = loop
        subscriber: Subscriber = asyncio.Queue()
        # Set by the worker: this task may be cancelled before it would learn its number.
        number = -1

        def submit() -> None:
            nonlocal number
            number = self.engine.submit(request)
            self._subscribers[number] = subscriber

        def cancel() -> None:
            # Nothing is left to cancel of a request that was refused, or has finished.
            if self._subscribers.pop(number, None) is not None:
                # There is no caller to tell of an error: the request runs on, and nothing receives its events.
                with contextlib.suppress(Exception):
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
            with contextlib.suppress(RuntimeError):
                self._order(cancel)

    async def generate(self, request: Request) -> Completion:
        """Answer one request. Raises as `stream` does."""
        events = [event async for event in self.stream(request)]
        (completion,) = completions_of(self.engine.lm, events)
        return dataclasses.replace(completion, request=request)

    async def close(self) -> None:
        """Stop after the present step; streams that are still open end with RuntimeError."""
        with self._lock:
            self.closed = True
            self._orders.put(None)
        await asyncio.to_thread(self._worker.join)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which the worker does between two steps. Raises what it raises."""
        done: Future[T] = Future()
        # Its caller may be cancelled while it waits: the worker still sets a result.
        done.set_running_or_notify_cancel()

        def order() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._order(order)
        return await asyncio.wrap_future(done)

    def _order(self, order: Callable[[], None]) -> None:
        """Have the worker carry out an order. RuntimeError once closed."""
        with self._lock:
            if self.closed:
                raise RuntimeError("the engine is closed")
            self._orders.put(order)

    # The worker's side

    def _work(self) -> None:
        """Step until there is the order to stop. However the worker ends, no caller waits for it after that."""
        try:
            while self._obey():
                try:
                    self._deliver(self.engine.step())
                except Exception as error:
                    # Not a request has failed, but the engine. It is as new after it, and serves the next requests.
                    self._fail(error)
        finally:
            with self._lock:
                self.closed = True
            # Those that submit succeed, and their streams end with the others.
            while not self._orders.empty():
                if (order := self._orders.get()) is not None:
                    order()
            self._fail(RuntimeError("the engine is closed"))

    def _obey(self) -> bool:
        """Carry out all orders that are there; wait for one if there is nothing to step. False to stop."""
        wait = not self.engine.busy
        while True:
            try:
                order = self._orders.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            # There may be something to step now.
            wait = False

    def _deliver(self, events: list[Event]) -> None:
        """Put events into the queues of those who wait for them."""
        items: list[tuple[Subscriber, Event | Exception]] = []
        for event in events:
            subscriber = self._subscribers.get(event.number)
            # None: the caller left, and its order to cancel is on the way.
            if subscriber is not None:
                items.append((subscriber, event))
            if event.kind == "finished":
                self._subscribers.pop(event.number, None)
        self._put(items)

    def _fail(self, error: Exception) -> None:
        """Remove all requests and end their streams with this error."""
        items = [(subscriber, error) for subscriber in self._subscribers.values()]
        self._subscribers.clear()
        try:
            self.engine.clear()
        finally:
            self._put(items)

    def _put(self, items: Sequence[tuple[Subscriber, Event | Exception]]) -> None:
        """Put items into their queues, by one call: each call wakes the event loop's thread."""

        def put() -> None:
            for subscriber, item in items:
                subscriber.put_nowait(item)

        if items:
            # The loop may be closed, and its callers gone with it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(put)


def run_in_temporary_thread(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread that then ends, its OpenMP threads with it. Raises what it raises."""
    with ThreadPoolExecutor(max_workers=1) as one:
        return one.submit(work).result()
