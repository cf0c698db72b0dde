"""Responses other than 2xx: OpenAI's error object, for mistakes of a client and for defects of ours."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response


class ApiError(Exception):
    """A response other than 2xx: the HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.type = type
        self.headers = dict(headers or {})

    def body(self) -> str:
        """JSON in ASCII: a name that a client sent may hold half of a surrogate pair."""
        fields = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": fields})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def first_mistake(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One line for the first of pydantic's errors, with the name of the field."""
    mistake = errors[0]
    kind = mistake["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body must be JSON: {mistake['ctx']['error']}")
    # FastAPI's places begin with "body".
    place = ".".join(str(part) for part in mistake["loc"][1:])
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {place!r}", place, "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{place or 'the body'} is missing", place or None, "missing_required_parameter")
    # Our own checks' words without pydantic's "Value error, ".
    words = mistake["ctx"]["error"] if kind == "value_error" else mistake["msg"]
    return ApiError(400, f"{place}: {words}", place)


async def _api_error(request: Request, error: Any) -> Response:
    response: Response = error.response()
    return response


async def _invalid(request: Request, error: Any) -> Response:
    return first_mistake(error.errors()).response()


async def _http_error(request: Request, error: Any) -> Response:
    """A path, a method or a body that Starlette or FastAPI rejects."""
    words = f"{request.method} {request.url.path}: {error.detail}"
    code = "not_found" if error.status_code == 404 else None
    return ApiError(error.status_code, words, code=code, headers=error.headers).response()


async def _defect(request: Request, error: Any) -> Response:
    """The client learns nothing of a defect of ours; uvicorn logs it with its traceback."""
    return ApiError(500, "the server failed", code="engine_error", type="server_error").response()


HANDLERS: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
    ApiError: _api_error,
    RequestValidationError: _invalid,
    HTTPException: _http_error,
    Exception: _defect,
}
