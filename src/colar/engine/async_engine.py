"""The engine for servers: many callers on one event loop, one thread that steps.

    engine = AsyncEngine(Engine(lm, method, max_batch=32, max_waiting=256))
    async for event in engine.stream(request): ...
    completion = await engine.generate(request)
    await engine.close()

Callers come and go as they like; leaving a stream early (or a cancelled task) cancels its request and leaves the
others untouched. The model is touched by the worker thread alone, between two steps or in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from colar.engine.engine import Engine
from colar.engine.request import Completion, Event, Request, fold


class AsyncEngine:
    """Serves one `Engine`, which nobody else may use until `close`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers: dict[int, Callable[[Event | BaseException], None]] = {}
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="colar-engine", daemon=True)
        self._worker.start()

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Events of one request as they happen.

        Raises ValueError where it cannot be run, QueueFull where too many wait, and RuntimeError once closed.
        """
        request = dataclasses.replace(request)  # an object of its own: events name it
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | BaseException] = asyncio.Queue()

        def deliver(event: Event | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone, and the caller with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            self.engine.submit(request)
            self._readers[id(request)] = deliver

        def cancel() -> None:
            if self._readers.pop(id(request), None) is not None:
                self.engine.cancel(request)

        try:
            await self._order(submit)
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.kind == "finished":
                    return
        finally:
            if not self._closed:
                self._orders.put(cancel)

    async def generate(self, request: Request) -> Completion:
        """One request, from its question to its answer."""
        events = [event async for event in self.stream(request)]
        (completion,) = fold(self.engine.lm, events)
        return dataclasses.replace(completion, request=request)

    async def close(self) -> None:
        """Stop after the present step; streams that are still open end with RuntimeError."""
        self._closed = True
        self._orders.put(None)
        await asyncio.to_thread(self._worker.join)

    async def _order(self, what: Callable[[], None]) -> None:
        """Have the worker do something between two steps; its exception is ours."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        done: Future[Any] = Future()

        def run() -> None:
            try:
                what()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._orders.put(run)
        await asyncio.shield(asyncio.wrap_future(done))

    # The worker's side

    def _work(self) -> None:
        while self._obey(wait=not self.engine.busy):
            try:
                for event in self.engine.step():
                    self._deliver(event)
            except BaseException as error:  # of a step: nobody's answer comes any more
                self._fail(error)
        self._fail(RuntimeError("the engine was closed"))

    def _obey(self, wait: bool) -> bool:
        """Do what was ordered; False when told to stop."""
        while True:
            try:
                order = self._orders.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            wait = False

    def _deliver(self, event: Event) -> None:
        key = id(event.request)
        reader = self._readers.get(key)
        if reader is None:
            return
        if event.kind == "finished":
            del self._readers[key]
        reader(event)

    def _fail(self, error: BaseException) -> None:
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader(error)
        self.engine.clear()
