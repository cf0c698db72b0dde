"""Replicas of the server on a Ray cluster: `colar serve --ray N`.

    client -> uvicorn and Front (this process) -> Ray Serve's router -> Replica (an actor with the app of app.py)

Ray Serve starts replicas, replaces those that die, adds and removes some within bounds, and routes a request to the one
of two with the shorter queue. Its HTTP proxy is not used, because a stream whose replica dies would end without an
error event, and because it has one port for the whole cluster.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colar import progress
from colar.integrations import ray_cluster
from colar.integrations.ray_cluster import ray
from colar.serve.app import HANDLERS, LEFT, MAX_CONNECTIONS, unless_gone
from colar.serve.protocol import MAX_BODY, ApiError
from colar.serve.response import as_event

# The router asks a replica for its queue length if its cached value is old, and takes another replica unless the answer
# comes at once. A replica on a busy CPU answers too late, and would get no requests. All requests come from here, so
# the router's own count is right.
os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S", "3600")
os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1")
try:
    from ray import serve
except ImportError as error:
    raise ValueError(
        f"colar serve --ray needs {error.name}: from your clone of colar, pip install '.[ray]'"
    ) from error

CONTROL_SECONDS = 5.0
"""Time limit of /health and /metrics: without any replica they fail, while a question waits for a new one."""
HEALTH_PERIOD = 2.0
"""Seconds between two checks of a replica; a dead one is replaced at the next check."""
UPSCALE_SECONDS = 30.0
"""Time for which replicas have more requests than a batch each before another one is added."""
DOWNSCALE_SECONDS = 600.0
"""Time for which fewer replicas suffice before one is removed; long, because a model may take minutes to load."""

HEALTH: Scope = {
    "asgi": {"version": "3.0"}, "type": "http", "http_version": "1.1", "method": "GET", "scheme": "http",
    "path": "/health", "query_string": b"", "headers": [(b"host", b"localhost")],
}  # fmt: skip
"""A replica's request to itself, from a host that is always allowed."""

log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Replicas:
    """N replicas, or a number between two bounds that follows the load."""

    pool: ray_cluster.Pool
    """The cluster, and the lower bound."""
    maximum: int
    per_replica: int
    """Requests of each replica from which on another one is added."""

    @classmethod
    def parse(cls, text: str, address: str | None, cpus: int, per_replica: int) -> "Replicas":
        """From N or MIN:MAX. ValueError for anything else."""
        first, colon, last = text.partition(":")
        if not first.isdecimal() or (colon and not last.isdecimal()):
            raise ValueError(f"--ray is a number of replicas, N or MIN:MAX, got {text!r}; see --ray_address")
        low, high = int(first), int(last if colon else first)
        if not 1 <= low <= high:
            raise ValueError(f"--ray must be 1 or more replicas, and MIN at most MAX, got {text}")
        return cls(ray_cluster.Pool(address, low, cpus), high, per_replica)

    def options(self) -> dict[str, Any]:
        """Ray Serve's options for them."""
        low = self.pool.actors
        if low == self.maximum:
            return {"num_replicas": low}
        bounds = {"min_replicas": low, "max_replicas": self.maximum}
        delays = {"upscale_delay_s": UPSCALE_SECONDS, "downscale_delay_s": DOWNSCALE_SECONDS}
        return {"autoscaling_config": bounds | delays | {"target_ongoing_requests": self.per_replica}}


@contextlib.contextmanager
def running(
    make_app: Callable[[], ASGIApp],
    models: Mapping[str, str],
    replicas: Replicas,
    device: str | None,
    drain: int,
) -> Iterator[ASGIApp]:
    """An application in front of replicas, each of which calls `make_app`. `models`: folders or Hub ids by name.

    ValueError as of `ray_cluster.joined`, or if a replica cannot start.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    paths = list(models.values())
    with ray_cluster.joined(replicas.pool, device, paths, [], "--ray_address") as actors:
        progress.say(f"starting {actors.n} replicas on {len(ray_cluster.machines())} machines")
        # A name for each command, because an application of the same name would replace another's replicas.
        name = "-".join(["colar", *models, ray.get_runtime_context().get_job_id()])
        command = _actor_of_this_command()
        deployment = serve.deployment(
            Replica,
            # The engine has its own queue, and refuses requests beyond it.
            max_ongoing_requests=MAX_CONNECTIONS,
            ray_actor_options=dict(actors.reserved),
            graceful_shutdown_timeout_s=drain,
            graceful_shutdown_wait_loop_s=0.5,
            health_check_period_s=HEALTH_PERIOD,
            max_constructor_retry_count=1,
            **replicas.options(),
        )
        try:
            yield Front(_start(deployment.bind(make_app, name, command), name)).app
        finally:
            with contextlib.suppress(Exception):
                serve.delete(name)


def _start(application: Any, name: str) -> Any:
    """Ray Serve's handle of the replicas, once all have started. ValueError if one cannot."""
    try:
        # Without Ray Serve's proxies, which would listen on every machine.
        serve.start(proxy_location="Disabled")
        return serve.run(application, name=name, route_prefix=None)
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise ValueError(f"--ray: no replica could start: {ray_cluster.last_line(error)}") from error


def _actor_of_this_command() -> Any:
    """An actor that ends with this process, also by kill -9. Replicas belong to the cluster, and watch this actor."""

    # A local class, which Ray pickles by value, so that its process imports no colar.
    class Command:
        async def ended(self) -> None:
            await asyncio.Future()

    here = ray_cluster.only_on(ray.get_runtime_context().get_node_id())
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    return ray.remote(Command).options(**options).remote()


# In an actor


class Replica:
    """The application of one process, which exchanges messages instead of a socket's bytes."""

    def __init__(self, make_app: Callable[[], ASGIApp], name: str, command: Any) -> None:
        """`name` is that of all replicas together, which end when the actor `command` has ended."""
        self.app = make_app()
        self.name = name
        self.command = command
        self.watch: asyncio.Task[None] | None = None

    async def respond(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """The ASGI messages of a response, in lists of those available. Closing the generator cancels the request."""
        received: list[Message] = [{"type": "http.request", "body": body}]
        sent: list[Message] = []
        # Set while something is sent, and at the end.
        news = asyncio.Event()

        async def receive() -> Message:
            # A client that leaves cancels `respond`, so there is no message about it.
            return received.pop() if received else await asyncio.Future()

        async def send(message: Message) -> None:
            sent.append(message)
            news.set()

        answering = asyncio.ensure_future(self.app(scope, receive, send))
        answering.add_done_callback(lambda _: news.set())
        try:
            while sent or not answering.done():
                await news.wait()
                news.clear()
                messages = sent.copy()
                sent.clear()
                if messages:
                    yield messages
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def named(self, scope: Scope) -> tuple[str, Response]:
        """The replica's name, and its response to a request without a body."""
        return serve.get_replica_context().replica_id.unique_id, await self.whole(scope)

    async def whole(self, scope: Scope) -> Response:
        start, *rest = [message async for several in self.respond(scope, b"") for message in several]
        response = Response(b"".join(message.get("body", b"") for message in rest), start["status"])
        response.raw_headers = start["headers"]
        return response

    async def check_health(self) -> None:
        """Raise if /health is not 200; Ray Serve then replaces this replica."""
        if self.watch is None:
            self.watch = asyncio.create_task(self._end_with_command())
        found = await self.whole(HEALTH)
        if found.status_code != 200:
            raise RuntimeError(bytes(found.body).decode())

    async def _end_with_command(self) -> None:
        """End all replicas once their command has ended."""
        with contextlib.suppress(ray.exceptions.RayActorError):
            await self.command.ended.remote()
        await asyncio.to_thread(serve.delete, self.name, _blocking=False)


# In the process of the command


class Front:
    """Forwards requests to replicas."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.replicas = handle.options(stream=True)
        routes = [Route("/metrics", self.metrics_text), Mount("/", self.forward)]
        self.app = Starlette(routes=routes, exception_handlers=HANDLERS)

    async def metrics_text(self, request: Request) -> Response:
        """The metrics of all replicas, each labelled with the replica's name."""
        try:
            responses = self.handle.broadcast("named", _portable(request.scope))
            found = await responses.results_async(timeout_s=CONTROL_SECONDS, return_exceptions=True)
        except Exception as error:
            raise _failed(error) from error
        answers: dict[str, Response] = dict(each for each in found if not isinstance(each, BaseException))
        if not answers:
            raise _failed(found[0])
        for answer in answers.values():
            # Without a valid key, each replica rejects the request.
            if answer.status_code != 200:
                return answer
        texts = {replica: bytes(answer.body).decode() for replica, answer in answers.items()}
        return Response(with_replicas(texts), media_type=CONTENT_TYPE_LATEST)

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        try:
            async for part in Request(scope, receive).stream():
                body += part
                # The replica rejects a body that is too large.
                if len(body) > MAX_BODY:
                    break
        except ClientDisconnect:
            return
        try:
            await unless_gone(receive, self._forward(scope, body, send))
        except ApiError as error:
            # The client has left: an error response would have no reader, and one may have begun already.
            if error.status != LEFT:
                raise

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Have a replica answer. ApiError 503 if it fails and nothing is sent; a stream ends with that error."""
        seconds = CONTROL_SECONDS if scope["path"] == "/health" else None
        answer = self.replicas.respond.remote(_portable(scope), body)
        first: Message | None = None
        last: Message = {}
        try:
            async with asyncio.timeout(seconds):
                async for messages in answer:
                    for last in messages:
                        first = first or last
                        await send(last)
        except Exception as error:
            failed = _failed(error)
            if first is None:
                raise failed from error
            kind = dict(first["headers"]).get(b"content-type", b"")
            if kind.startswith(b"text/event-stream") and last.get("more_body", True):
                end = as_event(failed.body())
                await send({"type": "http.response.body", "body": end})
        except BaseException:
            answer.cancel()
            raise


def _failed(error: Exception) -> ApiError:
    # The whole traceback of a defect, but not the page of advice that Ray adds for a dead process.
    died = isinstance(error, ray.exceptions.RayActorError)
    log.error("a replica failed: %s", ray_cluster.last_line(error) if died else error)
    words = "the replica that had this request failed, or there is none: send it again"
    return ApiError(503, words, code="replica_failed", type="server_error", headers={"Retry-After": "1"})


def _portable(scope: Scope) -> Scope:
    """The parts of a request that can be sent to another process."""
    keys = (
        "type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server",
    )  # fmt: skip
    return {"asgi": {"version": "3.0"}, **{key: scope[key] for key in keys if key in scope}}


@dataclass(frozen=True)
class _Labelled(Collector):
    """The metrics of several texts of /metrics, each with the name of its replica as a label."""

    texts: Mapping[str, str]

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for one in text_string_to_metric_families(text):
                metric = merged.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                for sample in one.samples:
                    metric.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        return merged.values()


def with_replicas(texts: Mapping[str, str]) -> bytes:
    """One text of /metrics from those of several replicas, by name: the label `replica` tells them apart."""
    return generate_latest(_Labelled(texts))
