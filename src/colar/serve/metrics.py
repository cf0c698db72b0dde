"""The numbers of /metrics, for Prometheus. No label comes from a client."""

import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from colar.engine.engine import Engine
from colar.serve.chat_response import Sample, SamplePiece
from colar.serve.errors import ApiError
from colar.serve.served_model import ApiRequest, ServedModel

LEFT = 499
"""The status of a request whose client has left (nginx's)."""
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters, histograms and gauges over some models."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        # Its own: the global registry refuses the metrics of a second server in one process.
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
            "colar_tokens",
            "Tokens: prompt, reasoning (thoughts), answer",
            ["model", "kind"],
            registry=self.registry,
        )
        running = Gauge(
            "colar_samples_running", "Samples that run in the engine", ["model"], registry=self.registry
        )
        waiting = Gauge(
            "colar_samples_waiting", "Samples that wait for a slot", ["model"], registry=self.registry
        )

        def watch(name: str, engine: Engine) -> None:
            running.labels(name).set_function(lambda: len(engine.running))
            waiting.labels(name).set_function(lambda: len(engine.scheduler.waiting))

        for model in models:
            watch(model.name, model.engine.engine)

    async def counted(
        self, api_request: ApiRequest, samples: Sequence[Sample], pieces: AsyncGenerator[SamplePiece, None]
    ) -> AsyncGenerator[SamplePiece, None]:
        """The same pieces, those of all `samples` of a request, which is counted when they end."""
        name = api_request.served.name
        started = time.perf_counter()
        status = LEFT
        begun = False
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if not begun:
                        self.first.labels(name).observe(time.perf_counter() - started)
                        begun = True
                    yield piece
            status = 200
        except ApiError as error:
            status = error.status
            raise
        finally:
            self.requests.labels(name, str(status)).inc()
            self.seconds.labels(name).observe(time.perf_counter() - started)
            self.tokens.labels(name, "prompt").inc(api_request.prompt_tokens)
            self.tokens.labels(name, "reasoning").inc(sum(sample.n_thoughts for sample in samples))
            self.tokens.labels(name, "answer").inc(sum(sample.n_tokens for sample in samples))


@dataclass(frozen=True)
class _Labelled(Collector):
    """The families of several texts of /metrics, each with the name of its replica as a label."""

    texts: Mapping[str, str]

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
                ]
        return families.values()


def with_replicas(texts: Mapping[str, str]) -> bytes:
    """One text of /metrics from those of several replicas, by name: the label `replica` tells them apart."""
    return generate_latest(_Labelled(texts))
