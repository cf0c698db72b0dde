"""uvicorn around the application: a socket, limits, signals.

SIGTERM or SIGINT: no new connections, requests that run or wait are answered (`drain` seconds), then the engines close.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from colar.serve.limits import Limits
from colar.serve.logs import Log, Observed, take_over
from colar.serve.protocol import HEAD_BYTES, protocol

SPARE_FILES = 256
"""Open files beside those of connections: models, libraries, pipes."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody can connect to before the server listens. OSError where the address cannot be had."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, number, _, address = found[0]
    bound = socket.socket(family, kind, number)
    try:
        # A server that is started again need not wait until the system forgets its old connections.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _allow_files(wanted: int) -> None:
    """Raise the number of files that the process may have open, where that is below and the system allows it.

    A connection is one. Shells often start processes with 1,024: one more could not even be told that it is too many.
    """
    # Not there on Windows.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's, which says when it listens."""

    def __init__(self, config: uvicorn.Config, say: Callable[[], None]) -> None:
        super().__init__(config)
        self.say = say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.say()


def make(app: Observed, limits: Limits, log: Log, say: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """The server; `say` is called once it listens."""
    take_over(log)
    _allow_files(limits.max_connections + SPARE_FILES)
    config = uvicorn.Config(
        app,
        http=protocol(limits),
        ws="none",
        lifespan="on",
        # `take_over` has set up the loggers: uvicorn's own configuration would undo that.
        log_config=None,
        access_log=False,
        server_header=False,
        # Whoever wants to know a client's address behind a proxy reads the proxy's log.
        proxy_headers=False,
        # A whole number to uvicorn; 0 would cut what still runs.
        timeout_graceful_shutdown=math.ceil(limits.drain),
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    return Server(config, say)


def run(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until a signal, and drain."""
    # uvicorn raises the signal again when all is done: nothing is left to be ended then.
    before = {number: signal.signal(number, _nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that has been handled."""
