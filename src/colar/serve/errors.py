"""What a client is told when something is wrong: OpenAI's error objects, and the JSON that all answers are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An answer other than 2xx: the HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        fields = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def refused(error: ValueError, param: str | None = None) -> ApiError:
    """A value that one of the checks below the server rejects: 400, in the check's own words."""
    return ApiError(400, str(error), param=param)


def to_json(value: Any) -> bytes:
    """JSON without white space. Half a surrogate pair, which UTF-8 cannot have, is escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, dict(headers or {}), media_type="application/json")
