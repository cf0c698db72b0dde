"""Logs as JSON lines on stderr: a line for each request, without its prompt and answer unless asked for.

    {"time": "2026-01-01T12:00:00.123Z", "level": "info", "event": "request", "id": "...", "status": 200, ...}

What a client has sent stands in JSON strings: it cannot begin a line.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colar.serve.metrics import OTHER, Metrics


class Log:
    """Writes lines to `stream` (the current stderr); `prompts`: with questions and answers."""

    def __init__(self, prompts: bool = False, stream: TextIO | None = None) -> None:
        self.prompts = prompts
        self.stream = stream

    def write(self, event: str, level: str = "info", **fields: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": now, "level": level, "event": event, **fields})
        # A disk that is full, or a pipe that nobody reads any more, is no reason to drop an answer.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=self.stream or sys.stderr, flush=True)


class LogHandler(logging.Handler):
    """Hands what libraries log to a `Log`."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage().strip()}
        if record.exc_info:
            fields["error"] = logging.Formatter().formatException(record.exc_info)
        self.log.write("log", record.levelname.lower(), **fields)


def take_over(log: Log) -> None:
    """Have uvicorn's messages written as lines of ours."""
    # uvicorn.access is not among them: `Observed` writes a line for each request.
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [LogHandler(log)]
        logger.propagate = False
    # Below this uvicorn says that it starts and stops, which `colar serve` logs itself.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


class Observed:
    """The application with a line and the metrics of each request.

    Endpoints put what they know into `scope["state"]["noted"]`: the model, counts, and errors.
    """

    def __init__(
        self, app: ASGIApp, log: Log, metrics: Metrics, endpoints: set[str], new_id: Callable[[], str]
    ) -> None:
        self.app = app
        self.log = log
        self.metrics = metrics
        # A path with a model's name in it is one of its template's.
        self.endpoints = [(path, compile_path(path)[0]) for path in endpoints]
        self.new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = self.new_id()
        noted: dict[str, Any] = {}
        scope.setdefault("state", {})["noted"] = noted
        scope["state"]["request_id"] = request_id
        # What is logged where no response begins: the end of the drain cancels a request, say.
        status = 500

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, observe)
        finally:
            seconds = time.perf_counter() - started
            # A stream that broke off was sent as 200: `noted` has the status that is true.
            self._note(scope, noted, noted.pop("status", status), seconds, request_id)

    def _note(
        self, scope: Scope, noted: dict[str, Any], status: int, seconds: float, request_id: str
    ) -> None:
        path = scope["path"]
        endpoint = next((name for name, fits in self.endpoints if fits.match(path)), OTHER)
        model = noted.get("model", OTHER)
        self.metrics.requests.labels(endpoint, model, str(status)).inc()
        self.metrics.seconds.labels(endpoint, model).observe(seconds)
        client = scope.get("client")
        self.log.write(
            "request",
            "error" if status >= 500 else "info",
            id=request_id,
            method=scope["method"],
            path=path[:200],
            status=status,
            ms=round(1000 * seconds, 1),
            client=client[0] if client else None,
            **noted,
        )
