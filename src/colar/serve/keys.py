"""API keys, from a file or the environment. Without any, everybody who reaches the port may ask."""

from __future__ import annotations

import hashlib
import hmac
import os

from starlette.datastructures import Headers

from colar import files
from colar.serve.errors import ApiError

VARIABLE = "COLAR_API_KEYS"


class Keys:
    """The keys that are accepted, as digests."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    @classmethod
    def read(cls, path: str | None) -> Keys:
        """Keys of a file, one a line (empty lines and those that begin with # are left out), else of the environment.

        ValueError for a file without any: it would let everybody in.
        """
        if path is None:
            return cls(os.environ.get(VARIABLE, "").split())
        lines = [line.strip() for line in files.read_text(path).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{path} has no API key")
        return cls(keys)

    def check(self, headers: Headers) -> None:
        """ApiError 401 unless the request has one of the keys, or none is wanted."""
        if not self:
            return
        # Starlette reads headers as Latin-1: encoded so again, a key is the bytes that were sent.
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # All are compared, in a time that does not depend on what they are: it says nothing about a key.
        digest = _digest(given.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "no valid API key: send it as Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    # Of one length: a comparison ends early where lengths differ.
    return hashlib.sha256(key).digest()
