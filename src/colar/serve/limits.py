"""What one client may ask of the server, and all of them together: sizes, times, and places in the queue."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from colar import checks
from colar.serve.errors import ApiError

RETRY_MOST = 60
"""Longest `Retry-After`, in seconds."""


@dataclass(frozen=True)
class Limits:
    """The limits of a server. All but `head_seconds` and `body_seconds` are options of `colar serve`."""

    max_body: int = 2**20
    """Bytes of a request's body."""
    max_prompt: int = 32768
    """Characters of a question; its tokens are bounded by the model's context."""
    max_samples: int = 16
    """Choices of one request: `n` times its prompts."""
    max_waiting: int = 256
    """Samples that wait beside those that run; more are refused with 429."""
    max_connections: int = 1024
    """Open connections; more are refused with 503."""
    max_unsent: int = 2**20
    """Bytes that wait for a client who reads too slowly; beyond, its request is cancelled."""
    deadline: float = 300.0
    """Seconds that a request may take in all."""
    head_seconds: float = 10.0
    """Seconds in which a client must have sent a request's head."""
    body_seconds: float = 30.0
    """Seconds in which it must have sent the body, and read some of what waits for it."""
    drain: float = 60.0
    """Seconds that requests have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        for name in ("max_body", "max_prompt", "max_samples", "max_connections", "max_unsent"):
            checks.check_number(name, getattr(self, name), 1, whole=True)
        checks.check_number("max_waiting", self.max_waiting, 0, whole=True)
        for name in ("deadline", "head_seconds", "body_seconds", "drain"):
            checks.check_number(name, getattr(self, name), 0.001)


class Admission:
    """Counts the samples of one model that run or wait: `slots` run, `waiting` more may wait."""

    def __init__(self, slots: int, waiting: int) -> None:
        self.slots = slots
        self.most = slots + waiting
        self.samples = 0
        self.seconds = 1.0
        """How long a request takes, averaged over the latest."""

    @contextlib.contextmanager
    def enter(self, n: int) -> Iterator[None]:
        """Hold `n` places inside the block. ApiError 429 where there are not as many."""
        # 400 and not 429: another try would fail as well.
        if n > self.most:
            raise ApiError(
                400, f"{n} choices are more than this server takes at once: {self.most}", param="n"
            )
        if self.samples + n > self.most:
            raise ApiError(
                429,
                f"the queue is full: {self.samples} samples run or wait; try again later",
                type="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after())},
            )
        self.samples += n
        try:
            yield
        finally:
            self.samples -= n

    def took(self, seconds: float) -> None:
        """Note how long a request took."""
        self.seconds += 0.1 * (seconds - self.seconds)

    def retry_after(self) -> int:
        """Seconds until the queue has probably moved on."""
        rounds = self.samples / self.slots
        return max(1, min(RETRY_MOST, math.ceil(self.seconds * rounds)))


class Visitors:
    """Who may ask a server that only this machine reaches, and that wants no key: not the pages of other sites.

    A browser on this machine reaches it, too. A site whose name is made to point here (DNS rebinding) is, to the
    browser, the server itself; but the request's Host is the site's name.
    """

    def __init__(self, *names: str) -> None:
        """`names` are accepted beside localhost and the loopback addresses: what the server was told to listen on."""
        self.names = {"localhost", *(name.lower() for name in names)}

    def check(self, headers: Headers) -> None:
        """ApiError 403 where the Host, or the Origin if there is one, is another machine's."""
        host = headers.get("host", "")
        if not self._is_here(f"//{host}"):
            raise _foreign("Host", host)
        origin = headers.get("origin")
        if origin is not None and not self._is_here(origin):
            raise _foreign("Origin", origin)

    def _is_here(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return name in self.names or is_loopback(name)


def is_loopback(address: str) -> bool:
    """Whether this is an address that only its own machine reaches; a name is none."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _foreign(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"{header} {value[:100]!r} is not this machine: without API keys this server answers localhost, 127.0.0.1 and "
        "[::1] alone (--api-key-file)",
        type="permission_error",
        code="foreign_host",
    )


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body. ApiError 415, 413 or 408 where it is no JSON, too large or too slow."""
    # A page of another site can send forms and plain text to a server on this machine, but no JSON.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, got {kind or 'none'}")
    too_large = ApiError(413, f"the body is larger than {limits.max_body} bytes")
    # A chunked body says no length: the loop below counts its bytes.
    length = request.headers.get("content-length", "0")
    # The length is checked by the HTTP library: digits.
    if int(length) > limits.max_body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive in {limits.body_seconds:g} s") from error
    except ClientDisconnect as error:
        raise left() from error
    return bytes(body)


def left() -> ApiError:
    """The client has gone: nobody reads this, but the log has its status."""
    return ApiError(499, "the client closed the connection", type="client_closed_request")
