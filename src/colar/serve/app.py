"""The application: paths, keys, streams, metrics, and the handling of a request; and the server around it.

POST /v1/chat/completions        GET /v1/models   /v1/models/NAME   /health   /metrics   /   /static/NAME

body (protocol.py) -> engine's requests, and pieces of their answers (served_model.py) -> response (response.py)

The server is uvicorn. After SIGTERM or SIGINT no new connections are accepted, requests that run or wait are answered
for up to `drain` seconds, then the engines close. Limits on slow or numerous clients are left to a reverse proxy
(docs/serve.md).
"""

import asyncio
import contextlib
import copy
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

from colar import __version__, files
from colar.look.page import VIEWER
from colar.serve.protocol import MAX_BODY, ApiError, ChatRequest, first_mistake
from colar.serve.response import ChatResponse, SamplePiece, as_event
from colar.serve.served_model import ServedModel, begin, pieces

PAGE = {path.name: path for path in (*(Path(__file__).parent / "page").iterdir(), *VIEWER)}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page needs nothing from other sites, and no other site may frame it."""
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""The second one keeps nginx from buffering events."""
LEFT = 499
"""The status of a request whose client has left (nginx's)."""
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bounds of the histograms' buckets, in seconds."""

Pieces = AsyncGenerator[SamplePiece, None]
T = TypeVar("T")


def build(models: Sequence[ServedModel], keys: Sequence[str] = (), hosts: Sequence[str] = ()) -> FastAPI:
    """The ASGI application. One of `keys` is required, if any are given; only the `hosts` are answered, if any are."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        # Reached when all answers are sent or the drain is over: streams still open end with an error.
        for model in models:
            await model.engine.close()

    api = Api(models)
    app = FastAPI(
        lifespan=lifespan,
        exception_handlers=HANDLERS,
        max_body_size=MAX_BODY,
        # FastAPI's own documentation pages load scripts from other sites.
        openapi_url=None,
    )
    guard = [Depends(_guard(keys))] if keys else []
    app.post("/v1/chat/completions", dependencies=guard)(api.chat)
    app.get("/v1/models", dependencies=guard)(api.list_models)
    # `path`, because NAME=CHECKPOINT may give a name with slashes.
    app.get("/v1/models/{name:path}", dependencies=guard)(api.model)
    app.get("/metrics", dependencies=guard)(api.metrics_text)
    # The page itself needs no key; its requests do.
    app.get("/health")(api.health)
    app.get("/")(api.index)
    app.get("/static/{name}")(api.static)
    if hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    return app


class Api:
    """The endpoints over some models."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.name: model for model in models}
        self.metrics = Metrics(models)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        served = self._served(body.model)
        # In a thread: tokenising a text of a megabyte takes a second or two, and the streams of others would wait.
        response = await asyncio.to_thread(begin, served, body)
        answer = self.metrics.counted(response, pieces(served, response))
        try:
            if body.stream:
                # Awaited before any header is sent, so that a full queue is still a 429.
                first = await unless_gone(request.receive, anext(answer))
                return EventStream(_events(response, first, answer), headers=STREAM_HEADERS)
            await unless_gone(request.receive, _finish(answer))
            return JSONResponse(response.whole())
        except BaseException:
            # A generator that is not closed would cancel the engine's requests only when it is garbage-collected.
            await answer.aclose()
            raise

    def _served(self, name: str | None) -> ServedModel:
        """The model of that name, or the only one if none is named."""
        known = ", ".join(self.models)
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None:
            raise ApiError(400, f"model is missing: one of {known}", "model")
        if name not in self.models:
            raise ApiError(404, f"no model {name!r}; there are {known}", "model", "model_not_found")
        return self.models[name]

    async def list_models(self) -> Response:
        return JSONResponse({"object": "list", "data": [each.card() for each in self.models.values()]})

    async def model(self, name: str) -> Response:
        return JSONResponse(self._served(name).card())

    async def health(self) -> Response:
        # An engine that has stopped never starts again: 503 from then on, for as long as the process lives.
        closed = [name for name, each in self.models.items() if each.engine.closed]
        if closed:
            return JSONResponse({"status": "failed", "models": closed}, 503)
        return JSONResponse({"status": "ok", "models": list(self.models), "version": __version__})

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def index(self) -> Response:
        return await self.static("index.html")

    async def static(self, name: str) -> Response:
        if name not in PAGE:
            raise ApiError(404, f"the page has no file {name!r}", code="not_found")
        return FileResponse(PAGE[name], headers=PAGE_HEADERS)


# The numbers of /metrics, for Prometheus


class Metrics:
    """Counters, histograms and gauges over some models. No label comes from a client."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.engines = {model.name: model.engine.engine for model in models}
        # Not the global registry, which refuses the metrics of a second server in one process.
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "colar_requests", "Requests that reached a model, by status (499: the client left)",
            ["model", "status"], registry=self.registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "colar_request_seconds", "Seconds to the end of the answer",
            ["model"], registry=self.registry, buckets=BUCKETS,
        )  # fmt: skip
        self.first = Histogram(
            "colar_first_event_seconds", "Seconds to the first thought or token",
            ["model"], registry=self.registry, buckets=BUCKETS,
        )  # fmt: skip
        self.tokens = Counter(
            "colar_tokens", "Tokens: prompt, reasoning (thoughts), answer",
            ["model", "kind"], registry=self.registry,
        )  # fmt: skip
        self.running = Gauge(
            "colar_samples_running", "Samples that run in the engine", ["model"], registry=self.registry
        )
        self.waiting = Gauge(
            "colar_samples_waiting", "Samples that wait for a slot", ["model"], registry=self.registry
        )

    def text(self) -> bytes:
        for name, engine in self.engines.items():
            self.running.labels(name).set(len(engine.running) + len(engine.scheduler.in_prefill))
            self.waiting.labels(name).set(len(engine.scheduler.waiting))
        return generate_latest(self.registry)

    async def counted(self, response: ChatResponse, pieces: Pieces) -> Pieces:
        """Pass on the pieces of a response, and count the response when they end."""
        name, samples = response.model, response.samples
        started = time.perf_counter()
        status = LEFT
        try:
            async with contextlib.aclosing(pieces):
                first = await anext(pieces)
                self.first.labels(name).observe(time.perf_counter() - started)
                self.tokens.labels(name, "prompt").inc(response.prompt_tokens)
                yield first
                async for piece in pieces:
                    yield piece
            status = 200
            self.seconds.labels(name).observe(time.perf_counter() - started)
        except ApiError as error:
            status = error.status
            raise
        finally:
            self.requests.labels(name, str(status)).inc()
            self.tokens.labels(name, "reasoning").inc(sum(sample.n_thoughts for sample in samples))
            self.tokens.labels(name, "answer").inc(sum(sample.n_tokens for sample in samples))


# Keys

KEYS = "COLAR_API_KEYS"
"""Environment variable with the keys, separated by white space."""


def read_keys(path: str | None) -> list[str]:
    """The keys of a file, one a line (lines that begin with # are left out), else those of the environment.

    ValueError for a file or a variable without any key, because everyone could then use the server.
    """
    if path is not None:
        lines = [line.strip() for line in files.read_text(path).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
    elif KEYS in os.environ:
        keys = os.environ[KEYS].split()
    else:
        return []
    if not keys:
        raise ValueError(f"{path or f'the environment variable {KEYS}'} has no API key")
    return keys


def _guard(keys: Sequence[str]) -> Callable[..., Awaitable[None]]:
    """The FastAPI dependency that requires a key."""
    bearer = Depends(HTTPBearer(auto_error=False))

    async def check(authorization: HTTPAuthorizationCredentials | None = bearer) -> None:
        # Starlette decodes headers as Latin-1, so encoding a key as Latin-1 restores the bytes that were sent.
        sent = authorization.credentials.encode("latin-1") if authorization else b""
        if not any(secrets.compare_digest(sent, key.encode()) for key in keys):
            words = "no valid API key: send it as Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, words, code="invalid_api_key", type="authentication_error", headers=headers)

    return check


# Responses other than 2xx


async def error_response(request: Request, error: Exception) -> Response:
    """OpenAI's error object for an error before the response began."""
    if isinstance(error, RequestValidationError):
        error = first_mistake(error.errors())
    elif isinstance(error, HTTPException):
        # A path, a method or a body that Starlette or FastAPI rejects.
        words = f"{request.method} {request.url.path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else None
        error = ApiError(error.status_code, words, code=code, headers=error.headers)
    elif not isinstance(error, ApiError):
        # The client is not told the details of a defect; uvicorn logs it with its traceback.
        error = ApiError(500, "the server failed", code="engine_error", type="server_error")
    return Response(error.body(), error.status, error.headers, "application/json")


HANDLERS: dict[Any, Any] = dict.fromkeys(
    (ApiError, RequestValidationError, HTTPException, Exception), error_response
)


# Streams and clients that leave


class EventStream(StreamingResponse):
    """Server-sent events, whose generator is closed when the client has left."""

    media_type = "text/event-stream"
    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def _events(response: ChatResponse, first: SamplePiece, rest: Pieces) -> AsyncGenerator[bytes, None]:
    """The events of a stream; an error is the last one."""
    async with contextlib.aclosing(rest):
        try:
            for event in response.events(first):
                yield event
            async for piece in rest:
                for event in response.events(piece):
                    yield event
            for event in response.end():
                yield event
        except ApiError as error:
            yield as_event(error.body())


async def _finish(rest: Pieces) -> None:
    async for _ in rest:
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (ApiError 499, which no client reads)."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(LEFT, "the client closed the connection")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        # The caller closes the generator next, which must have stopped running by then.
        await asyncio.gather(working, leaving, return_exceptions=True)


# The server: a socket, logs, signals

MAX_CONNECTIONS = 1000
"""Most open connections and running requests; more get 503. Shells often limit processes to 1,024 open files."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; clients that connect before `run_server` wait. ValueError if the address is not free."""
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


def make_server(app: ASGIApp, drain: int = 60) -> uvicorn.Server:
    """uvicorn around an application; `drain` is the seconds that requests have to finish after a signal."""
    log_config = copy.deepcopy(LOGGING_CONFIG)
    # Only results go to stdout.
    log_config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config = uvicorn.Config(
        app,
        # Even if httptools is installed (by Ray Serve), because it accepts headers of any size.
        http="h11",
        ws="none",
        lifespan="on",
        log_config=log_config,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=drain,
    )
    return uvicorn.Server(config)


def run_server(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until a signal, and drain."""
    # uvicorn raises the signal again after shutdown, which would end the process with an error.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[bound])
