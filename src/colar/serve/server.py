"""uvicorn around the application: a socket, logs, signals.

SIGTERM or SIGINT: no new connections, requests that run or wait are answered for up to `drain` seconds, then the
engines close. Limits on slow or numerous clients are a reverse proxy's (docs/serve.md).
"""

from __future__ import annotations

import copy
import math
import signal
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG

MAX_CONNECTIONS = 1000
"""Open connections and running requests; more get 503. Shells often start processes with 1,024 files at most."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; clients that connect before `run` wait for it. ValueError where the address is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {host}:{port} ({error.strerror or error}): give another --port, or 0 for a free one"
        ) from error


def url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make(app: ASGIApp, drain: float = 60, log_config: str | None = None) -> uvicorn.Server:
    """The server. `log_config`: a file for `logging.config`, in place of uvicorn's own lines on stderr."""
    default = copy.deepcopy(LOGGING_CONFIG)
    # Results alone go to stdout.
    default["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config = uvicorn.Config(
        app,
        # Also where httptools is installed (by Ray Serve), which takes headers of any size.
        http="h11",
        ws="none",
        lifespan="on",
        log_config=log_config or default,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        # A whole number to uvicorn; 0 would cut what still runs.
        timeout_graceful_shutdown=math.ceil(drain),
    )
    return uvicorn.Server(config)


def run(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until a signal, and drain."""
    # uvicorn raises the signal again when all is done, which would end the process with an error.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[bound])
