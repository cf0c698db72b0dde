"""The application: paths, and what happens to a request on its way to the engine and back.

POST /v1/chat/completions   /v1/completions   /v1/responses        GET /v1/models   /v1/models/NAME
GET  /health   /metrics   /   /static/NAME

body (limits.py) -> fields (schema.py) -> ask (ask.py) -> pieces (answering.py) -> choices.py, responses.py
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from colar import __version__
from colar.methods import registry
from colar.serve import choices, responses
from colar.serve.answering import failed
from colar.serve.ask import Ask, ask, question_of
from colar.serve.choices import Form
from colar.serve.delivery import Delivery, Shape
from colar.serve.errors import ApiError, json_response
from colar.serve.keys import Keys
from colar.serve.limits import Limits, Visitors, read_body
from colar.serve.logs import Log, Observed
from colar.serve.metrics import Metrics
from colar.serve.page_files import Page
from colar.serve.schema import ChatRequest, CompletionRequest, ResponseRequest, Sampled, parse
from colar.serve.served import Served
from colar.serve.streaming import data_frame, named_frame


class Api:
    """The endpoints over some models."""

    def __init__(self, served: Sequence[Served], limits: Limits, log: Log) -> None:
        self.served = {each.name: each for each in served}
        self.limits = limits
        self.metrics = Metrics(served)
        self.delivery = Delivery(limits, self.metrics, log.prompts)
        self.page = Page()

    # POST

    async def chat(self, request: Request) -> Response:
        asked, params = parse(ChatRequest, await self._body(request), registry.param_names())
        served = self._served(request, asked.model)
        # max_tokens is OpenAI's old name for the same limit: the new name goes before it.
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        made = ask(
            served,
            asked,
            params,
            [question_of(asked.messages, asked.question_field)],
            self.limits,
            _id("chatcmpl-"),
            max_answer=most,
            effort=asked.reasoning_effort,
            n=asked.n,
            stop=asked.stop,
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
        )
        return await self._choices(request, choices.Chat(), asked, made)

    async def completions(self, request: Request) -> Response:
        asked, params = parse(CompletionRequest, await self._body(request), registry.param_names())
        served = self._served(request, asked.model)
        made = ask(
            served,
            asked,
            params,
            asked.prompt,
            self.limits,
            _id("cmpl-"),
            max_answer=asked.max_tokens,
            effort=asked.reasoning_effort,
            n=asked.n,
            stop=asked.stop,
            logprobs=asked.logprobs is not None,
            top_logprobs=asked.logprobs or 0,
        )
        return await self._choices(request, choices.Completions(), asked, made)

    async def responses(self, request: Request) -> Response:
        asked, params = parse(ResponseRequest, await self._body(request), registry.param_names())
        served = self._served(request, asked.model)
        if asked.instructions and asked.instructions.strip():
            raise ApiError(400, "instructions: these models read a question alone", param="instructions")
        made = ask(
            served,
            asked,
            params,
            [question_of(asked.input, asked.question_field)],
            self.limits,
            _id("resp_"),
            max_answer=asked.max_output_tokens,
            effort=asked.effort,
        )

        shape = Shape(
            whole=lambda samples: responses.whole(asked, made, samples[0]),
            stream=lambda found: responses.events(asked, made, found),
            frame=named_frame,
        )
        return await self.delivery.answer(request, made, shape, asked.stream)

    async def _choices(self, request: Request, form: Form, asked: Sampled, made: Ask) -> Response:
        include_usage = asked.stream_options.include_usage
        shape = Shape(
            whole=lambda samples: choices.whole(form, made, samples),
            stream=lambda found: choices.chunks(form, made, found, include_usage),
            frame=data_frame,
        )
        return await self.delivery.answer(request, made, shape, asked.stream)

    # What all of them share

    async def _body(self, request: Request) -> bytes:
        # Set before the body is read: a body that comes slowly spends its request's time.
        request.state.deadline = asyncio.get_running_loop().time() + self.limits.deadline
        return await read_body(request, self.limits)

    def _served(self, request: Request, name: str | None) -> Served:
        """The model of that name; the only one, where none is named."""
        if name is None and len(self.served) == 1:
            (name,) = self.served
        if name is None:
            raise ApiError(400, f"model is missing: one of {', '.join(self.served)}", param="model")
        if name not in self.served:
            known = ", ".join(self.served)
            raise ApiError(
                404, f"no model {name!r}; there are {known}", param="model", code="model_not_found"
            )
        # Noted once it is known to exist: the name becomes a label of the metrics.
        request.state.noted["model"] = name
        return self.served[name]

    # GET

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [each.card() for each in self.served.values()]})

    async def model(self, request: Request) -> Response:
        return json_response(self._served(request, request.path_params["name"]).card())

    async def health(self, request: Request) -> Response:
        # An engine that has stopped never starts again: 503 from then on, for as long as the process lives.
        closed = [name for name, each in self.served.items() if each.engine.closed]
        if closed:
            return json_response({"status": "failed", "models": closed}, 503)
        return json_response({"status": "ok", "models": list(self.served), "version": __version__})

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def index(self, request: Request) -> Response:
        return self.page.response("index.html")

    async def static(self, request: Request) -> Response:
        return self.page.response(request.path_params["name"])


def build(
    served: Sequence[Served], limits: Limits, keys: Keys, log: Log, visitors: Visitors | None = None
) -> Observed:
    """The ASGI application. `visitors`: whom it answers; None for everybody who reaches it."""
    api = Api(served, limits, log)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        # Reached when all answers are sent or the drain is over: streams still open end with an error.
        for each in served:
            await each.engine.close()

    # The pages of FastAPI's own load scripts from elsewhere.
    app = FastAPI(title="colar", version=__version__, lifespan=lifespan, openapi_url=None)
    guarded = {
        "/v1/chat/completions": ("POST", api.chat),
        "/v1/completions": ("POST", api.completions),
        "/v1/responses": ("POST", api.responses),
        "/v1/models": ("GET", api.models),
        # `path`, because NAME=CHECKPOINT may give a name with slashes.
        "/v1/models/{name:path}": ("GET", api.model),
        "/metrics": ("GET", api.metrics_text),
    }
    # The page holds nothing that needs a key; what it asks does.
    free = {
        "/health": ("GET", api.health),
        "/": ("GET", api.index),
        "/static/{name}": ("GET", api.static),
    }
    for path, (method, endpoint) in guarded.items():
        app.add_route(path, _behind(visitors, keys, endpoint), methods=[method])
    for path, (method, endpoint) in free.items():
        app.add_route(path, _behind(visitors, None, endpoint), methods=[method])
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _told_by_http)
    app.add_exception_handler(Exception, _told_nothing)
    return Observed(app, log, api.metrics, {*guarded, *free}, lambda: _id("req_"))


def _behind(
    visitors: Visitors | None, keys: Keys | None, endpoint: Callable[[Request], Any]
) -> Callable[[Request], Any]:
    async def checked(request: Request) -> Response:
        if visitors is not None:
            visitors.check(request.headers)
        if keys is not None:
            keys.check(request.headers)
        response: Response = await endpoint(request)
        return response

    return checked


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    noted = getattr(request.state, "noted", {})
    noted["error"] = str(error)
    if error.__cause__ is not None and error.status >= 500:
        noted["cause"] = repr(error.__cause__)
    return error.response()


async def _told_by_http(request: Request, error: Exception) -> Response:
    """What Starlette refuses: a path, or a method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    text = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else None
    return ApiError(error.status_code, text, code=code, headers=headers).response()


async def _told_nothing(request: Request, error: Exception) -> Response:
    """A defect of ours: the log has it, the client is told that it is none of its own."""
    # Starlette raises the error again behind this answer, and uvicorn logs it with its traceback.
    return failed().response()


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
