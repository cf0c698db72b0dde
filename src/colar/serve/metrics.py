"""/metrics, in the words of Prometheus. No label comes from a client: names and counts are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from colar.serve.served import Served

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
OTHER = "other"
"""Endpoint of a path that is none of ours, and model of a request that reached none."""


class Metrics:
    """The numbers of one server."""

    def __init__(self, served: Iterable[Served]) -> None:
        # Its own: the global registry refuses a second server's metrics of the same names in one process.
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "colar_requests",
            "Requests that have ended, by HTTP status (499: the client left)",
            ["endpoint", "model", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "colar_request_seconds",
            "Seconds from a request's head to the end of its answer",
            ["endpoint", "model"],
            registry=self.registry,
            buckets=SECONDS,
        )
        self.first = Histogram(
            "colar_first_event_seconds",
            "Seconds to the first thought or token",
            ["model"],
            registry=self.registry,
            buckets=SECONDS,
        )
        self.tokens = Counter(
            "colar_tokens",
            "Tokens read and made: prompt, reasoning (thoughts), answer",
            ["model", "kind"],
            registry=self.registry,
        )
        running = self._gauge("colar_samples_running", "Samples that run in the engine")
        waiting = self._gauge("colar_samples_waiting", "Samples that wait for a slot")
        for each in served:
            running.labels(each.name).set_function(_reader(each, "running"))
            waiting.labels(each.name).set_function(_reader(each, "waiting"))

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, ["model"], registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _reader(served: Served, name: str) -> Callable[[], float]:
    return lambda: float(getattr(served, name))
