"""The engine for servers: many callers on one event loop, one thread that steps.

    engine = AsyncEngine(Engine(lm, method, max_batch=32, max_waiting=256))
    async for event in engine.stream(request): ...
    completion = await engine.generate(request)
    await engine.close()

    callers, on the event loop                         worker thread
    stream  --submit, cancel, close-->  _orders  -->   between two steps: carry out what was ordered
            <--events--------- a queue for each  <--   step

Callers come and go as they like; leaving a stream early (or a cancelled task) cancels its request and leaves the
others untouched. Only the worker touches the engine and its model; `run` has it do other things with the model.

On a CPU the worker should be the only thread that computes. Each thread that has done so keeps OpenMP threads of its
own, and where all of these are more than the cores, they sleep instead of waiting awake: steps of SmolLM2-135M then
take half as long again on two cores. So whoever loads a model to serve it does that in a thread that ends (`apart`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from colar.engine.engine import Engine
from colar.engine.request import Completion, Event, Request, fold

Order = Callable[[], None]
"""Something that the worker does between two steps."""
Said = Event | Exception
"""What a caller is told: an event, or the error that ends the stream."""
T = TypeVar("T")


@dataclass(frozen=True)
class Reader:
    """Where a caller waits: a queue of its event loop."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Said]


class AsyncEngine:
    """Serves one `Engine`, which nobody else may use until `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._readers: dict[int, Reader] = {}
        """Those of unfinished requests, by the engine's number. The worker's alone."""
        self._lock = threading.Lock()
        """Whoever gives an order holds it: none is given to a worker that has ended."""
        self._over: Exception | None = None
        """Why the worker takes no more orders."""
        self._worker = threading.Thread(target=self._work, name="colar-engine", daemon=True)
        self._worker.start()

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._over is not None

    async def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request as they happen.

        Raises ValueError where it cannot be run, QueueFull where too many wait, what a step of this request raised, and
        RuntimeError once closed.
        """
        # An object of its own: to cancel it must not cancel another caller's.
        request = dataclasses.replace(request)
        events: asyncio.Queue[Said] = asyncio.Queue()
        reader = Reader(asyncio.get_running_loop(), events)
        # Set by the worker: this task may be cancelled before it would learn its number.
        number = -1

        def submit() -> None:
            nonlocal number
            number = self.engine.submit(request)
            self._readers[number] = reader

        def cancel() -> None:
            # Nothing is left to cancel of a request that was refused, or has finished.
            if self._readers.pop(number, None) is not None:
                self.engine.cancel(request)

        try:
            await self.run(submit)
            while True:
                event = await events.get()
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
                self._give(cancel)

    async def generate(self, request: Request) -> Completion:
        """Answer one request. Raises as `stream` does."""
        events = [event async for event in self.stream(request)]
        (completion,) = fold(self.engine.lm, events)
        return dataclasses.replace(completion, request=request)

    async def close(self) -> None:
        """Stop after the present step; streams that are still open end with RuntimeError."""
        with self._lock:
            self._over = self._over or RuntimeError("the engine is closed")
            self._orders.put(None)
        await asyncio.to_thread(self._worker.join)

    def _give(self, order: Order) -> None:
        """Have the worker carry out an order. RuntimeError where it takes none any more."""
        with self._lock:
            if self._over is not None:
                raise RuntimeError("the engine is closed") from self._over
            self._orders.put(order)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which the worker does between two steps. Raises what it raises."""
        done: Future[T] = Future()

        def order() -> None:
            try:
                result = work()
            except Exception as error:
                done.set_exception(error)
            except BaseException as error:
                done.set_exception(_told(error))
                raise
            else:
                done.set_result(result)

        self._give(order)
        # Shielded: the caller may be cancelled while it waits, and the worker still sets a result.
        return await asyncio.shield(asyncio.wrap_future(done))

    # The worker's side

    def _work(self) -> None:
        """Step until there is the order to stop. However it ends, nobody waits for it after that."""
        ended: Exception = RuntimeError("the engine was closed")
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            ended = _told(error)
        self._end(ended)

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception as error:
            # No request of its own failed, but the engine. It is as new after it, and serves the next requests.
            self._fail(error)
            return
        self._tell(self._addressed(events))

    def _obey(self) -> bool:
        """Carry out all orders that are there; wait for one where there is nothing to step. False to stop."""
        wait = not self.engine.busy
        while True:
            try:
                order = self._orders.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            # An order that somebody waits for hands its exception on. One to cancel has nobody to tell: the request
            # runs on, and nobody reads it.
            with contextlib.suppress(Exception):
                order()
            # There may be something to step now, and orders that are already there are carried out before it.
            wait = False

    def _addressed(self, events: Sequence[Event]) -> list[tuple[Reader, Said]]:
        """The events with those who read them."""
        found: list[tuple[Reader, Said]] = []
        for event in events:
            reader = self._readers.get(event.number)
            # None: the caller left, and its order to cancel is on the way.
            if reader is not None:
                found.append((reader, event))
            if event.kind == "finished":
                self._readers.pop(event.number, None)
        return found

    @staticmethod
    def _tell(told: Sequence[tuple[Reader, Said]]) -> None:
        """Put what was said into the callers' queues: one call for each event loop.

        A call for each event would wake the loop's thread again and again, and this one would wait for it each time.
        """
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Reader, Said]]] = {}
        for reader, said in told:
            by_loop.setdefault(reader.loop, []).append((reader, said))
        for loop, pairs in by_loop.items():
            # The loop may be closed, and its callers gone with it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_put, pairs)

    def _fail(self, error: Exception) -> None:
        """Forget all requests and end their streams with this error."""
        readers = list(self._readers.values())
        self._readers.clear()
        try:
            self.engine.clear()
        finally:
            self._tell([(reader, error) for reader in readers])

    def _end(self, error: Exception) -> None:
        """Take no more orders, carry out those that are there, so that nobody waits for them, and end all streams."""
        with self._lock:
            self._over = self._over or error
        # Those that submit succeed, and their streams end with the others.
        while not self._orders.empty():
            order = self._orders.get()
            if order is not None:
                with contextlib.suppress(BaseException):
                    order()
        with contextlib.suppress(BaseException):
            self._fail(error)


def _put(pairs: Sequence[tuple[Reader, Said]]) -> None:
    for reader, said in pairs:
        reader.events.put_nowait(said)


def apart(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread that has ended then, its OpenMP threads with it. Raises what it raises."""
    with ThreadPoolExecutor(max_workers=1) as one:
        return one.submit(work).result()


def _told(error: BaseException) -> Exception:
    """The error as callers are told: one that ends a thread would end their event loop too."""
    if isinstance(error, Exception):
        return error
    told = RuntimeError(f"the engine stopped: {error!r}")
    told.__cause__ = error
    return told
