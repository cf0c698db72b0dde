"""Server-sent events, to clients that read slowly, leave, or never read at all.

    frames --fill--> unsent (at most `max_unsent` bytes) --send--> socket        three tasks
                                             client leaves --watch-->            whichever ends first ends all

Whatever ends the response closes the frames, which cancels the engine's requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from colar.serve.errors import ApiError, to_json
from colar.serve.limits import Limits, left

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""The last one keeps nginx from collecting events."""

Frames = AsyncGenerator[bytes, None]
T = TypeVar("T")


COMPLETE, LEFT, TOO_SLOW, FAILED = "complete", "left", "too slow", "failed"
"""How a stream ends."""


class TooSlow(Exception):
    """The client has left too much unread."""


class EventStream(Response):
    """Sends `frames`, made until `deadline` (of the event loop's clock); they say their own errors."""

    def __init__(
        self, frames: Frames, limits: Limits, deadline: float, on_end: Callable[[str], None]
    ) -> None:
        super().__init__(headers=HEADERS)
        # Nobody knows how long it will be.
        del self.headers["content-length"]
        self.frames = frames
        self.limits = limits
        self.deadline = deadline
        self.on_end = on_end
        self._unsent: deque[bytes] = deque()
        self._bytes = 0
        self._more = asyncio.Event()
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        filling = asyncio.create_task(self._fill())
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(gone(receive))
        try:
            # What was made before the deadline may still be read after it, for a while.
            async with asyncio.timeout_at(self.deadline + self.limits.body_seconds):
                await asyncio.wait({filling, sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if filling.done() and filling.exception() is None:
                    await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            # After the connection was dropped, all is sent at once: into nothing.
            ended = TOO_SLOW if scope["state"]["unread"]() else _how(filling, sending)
        except TimeoutError:
            ended = TOO_SLOW
        finally:
            for task in (filling, sending, leaving):
                task.cancel()
            # Awaited first: a generator cannot be closed while `_fill` is inside it.
            await asyncio.gather(filling, sending, leaving, return_exceptions=True)
            await self.frames.aclose()
            self._unsent.clear()
        self.on_end(ended)
        if ended != COMPLETE:
            # A socket that is closed still waits for what was written to it.
            scope["state"]["abort"]()
            # Lets the loop drop the connection: else uvicorn would log a response that was not completed.
            await asyncio.sleep(0)

    async def _fill(self) -> None:
        async for frame in self.frames:
            self._unsent.append(frame)
            self._bytes += len(frame)
            if self._bytes > self.limits.max_unsent:
                raise TooSlow
            self._more.set()
        self._complete = True
        self._more.set()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while True:
            await self._more.wait()
            self._more.clear()
            while self._unsent:
                # All that is there at once: a packet, not one for each event.
                body = b"".join(self._unsent)
                self._unsent.clear()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                # After `send`, which waits while the socket is full: what waits there counts as unsent.
                self._bytes -= len(body)
            if self._complete:
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _how(filling: asyncio.Task[None], sending: asyncio.Task[None]) -> str:
    """How a stream has ended, by the tasks that are done."""
    if sending.done() and sending.exception() is None:
        return COMPLETE
    if filling.done() and filling.exception() is not None:
        return TOO_SLOW if isinstance(filling.exception(), TooSlow) else FAILED
    return FAILED if sending.done() else LEFT


def data_frame(value: Any) -> bytes:
    """An event without a name."""
    text = value.encode() if isinstance(value, str) else to_json(value)
    return b"data: " + text + b"\n\n"


def named_frame(value: Mapping[str, Any]) -> bytes:
    """An event with the name of its type."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data_frame(value)


async def gone(receive: Receive) -> None:
    """Return when the client has left."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def unless_gone(request: Request, deadline: float, work: Awaitable[T]) -> T:
    """The work's result. ApiError 504 after the deadline, 499 when the client leaves: the work is cancelled then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(gone(request.receive))
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise left()
            return working.result()
    except TimeoutError as error:
        raise too_late() from error
    finally:
        for task in (working, leaving):
            task.cancel()
        # Awaited: the caller closes the generator next, which must not run any more.
        await asyncio.gather(working, leaving, return_exceptions=True)


def too_late() -> ApiError:
    return ApiError(504, "the request took longer than its deadline", type="timeout_error", code="deadline")
