"""uvicorn's HTTP/1.1 protocol, with time limits for clients that do not send or do not read, and errors that are JSON.

    head      a client who sends a header a minute would keep a connection for ever
    answer    so would one who reads nothing: a connection that is closed waits until all that was written is taken

An application finds `scope["state"]["abort"]`, which drops the connection with all that was not read from it, and
`scope["state"]["unread"]()`, whether that has happened because nothing was read.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from colar.serve.errors import ApiError, to_json
from colar.serve.limits import Limits

HEAD_BYTES = 64 * 1024
"""Most of a request's head."""
TOO_LARGE = 431


class Protocol(H11Protocol):
    """What stands here are the defaults of `Limits`: `protocol` sets those of a server."""

    head_seconds = 10.0
    unread_seconds = 30.0
    max_connections = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner = self.app
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread = False
        """Whether the connection was dropped because its client did not read."""

        # One for each connection: only its protocol object has the transport that `abort` drops.
        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"]["abort"] = self.transport.abort
            scope["state"]["unread"] = lambda: self._unread
            # uvicorn's own limit is told in plain text, and is one less.
            if len(self.connections) > self.max_connections:
                self.logger.warning("refused: %d connections are open", len(self.connections))
                await _crowded().response()(scope, receive, send)
                return
            await inner(scope, receive, send)

        self.app = app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self._forget_unread()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next head is on time where its first byte comes within the keep-alive's.
        self._forget_timer()
        self._watch_unread()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        # Most of it has been read.
        self._forget_unread()
        super().resume_writing()

    def _watch_unread(self) -> None:
        """Start the clock where something is left that the client has not read, and nothing more is written."""
        self._forget_unread()
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._unread_timer = self.loop.call_later(self.unread_seconds, self._look_again, unread)

    def _look_again(self, before: int) -> None:
        """Drop the connection, unless some was read since the clock was started."""
        if self.transport.get_write_buffer_size() < before:
            self._watch_unread()
            return
        self._unread = True
        self.transport.abort()

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _watch_head(self) -> None:
        """Start the clock where a head is to come, stop it where one has come."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._refuse(ApiError(408, f"no request within {self.head_seconds:g} s"))

    def send_400_response(self, msg: str) -> None:
        # Called while h11's error is handled: it knows a better status for a head that is too large.
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if hint == TOO_LARGE:
            self._refuse(ApiError(TOO_LARGE, f"the request's head is larger than {HEAD_BYTES} bytes"))
        else:
            self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer without a request, and close."""
        if self.transport.is_closing():
            return
        body = to_json(error.body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        try:
            head = self.conn.send(h11.Response(status_code=error.status, headers=headers))
            self.transport.write(head or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.conn.send(h11.EndOfMessage())
            self.transport.close()
        except h11.LocalProtocolError:
            # In the middle of an answer there is no place for another one.
            self.transport.abort()


def _crowded() -> ApiError:
    return ApiError(
        503,
        "too many connections are open; try again later",
        type="overloaded_error",
        code="too_many_connections",
        # This one makes room.
        headers={"Retry-After": "1", "Connection": "close"},
    )


def protocol(limits: Limits) -> type[Protocol]:
    """The class for a server."""
    changed = {
        "head_seconds": limits.head_seconds,
        "unread_seconds": limits.body_seconds,
        "max_connections": limits.max_connections,
    }
    # A class, not an instance: uvicorn makes an object of it for each connection.
    return type("Protocol", (Protocol,), changed)
