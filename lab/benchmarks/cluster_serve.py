"""`colar serve --ray` under load while something is killed: a part of `cluster.py`."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

import httpx2 as httpx
import psutil
import ray_workers
from benchmarks.cluster_driver import SECONDS, Driver, workers
from prometheus_client.parser import text_string_to_metric_families

LIMITS = ["--max_latents", "900", "--max_completion_length", "40", "--decoding", "sampled"]
CLIENTS = 4
CLIENT_SECONDS = 120
"""Time without a byte after which a request hangs."""
KINDS = ("replica", "both replicas", "machine", "memory", "command")
ENDS = ("answered", "failed")
"""The two ends that a request may have: its answer, or exactly one error."""


LEFT_BYTES = 2**31
"""Memory of a machine that `limit_memory` leaves, at first."""


class Ended(NamedTuple):
    """The end of a request: one of ENDS, or what it had in place of it; and its times."""

    name: str
    began: float
    ended: float


def ask(client: httpx.Client, stream: bool, thoughts: int) -> str:
    """Have a question answered. Returns one of ENDS; else "hung", "cut" or "torn" with what came."""
    body = {"model": "toy", "messages": [{"role": "user", "content": "What is 2 plus 3?"}], "stream": stream}
    body |= {"thinking_token_budget": thoughts}
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    except httpx.TimeoutException:
        return "hung"
    except httpx.HTTPError as error:
        return f"cut: {error!r}"
    end, status = lines[-1] if lines else "", response.status_code
    errors = [line for line in lines if '"error": ' in line]
    if status == 200 and lines and not errors and (end == "[DONE]") == stream:
        return "answered"
    if errors == [end] and "server_error" in end and (len(lines) == 1 if status >= 500 else stream):
        return "failed"
    return f"torn: {status} {lines[-3:]}"


class Load:
    """Clients that ask one question after another, each third one without a stream, inside the block."""

    def __init__(self, client: httpx.Client, clients: int = CLIENTS, thoughts: int = 100) -> None:
        self.client, self.thoughts = client, thoughts
        self.ends: list[Ended] = []
        self.enough = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(clients)]

    def _ask(self, number: int) -> None:
        while not self.enough.is_set():
            began = time.monotonic()
            name = ask(self.client, number % 3 > 0, self.thoughts)
            self.ends.append(Ended(name, began, time.monotonic()))
            number += 1
            if name not in ENDS:
                # Not thousands of them.
                time.sleep(0.2)

    def answered_since(self, moment: float) -> float | None:
        """Seconds from a moment until the first answer to a question that was asked after it."""
        ends = [end.ended for end in list(self.ends) if end.name == "answered" and end.began > moment]
        return min(ends) - moment if ends else None

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.enough.set()
        for thread in self.threads:
            thread.join()


def replicas(client: httpx.Client) -> set[str]:
    """The names of those that answer."""
    response = client.get("/metrics")
    if response.status_code != 200:
        return set()
    families = text_string_to_metric_families(response.text)
    return {sample.labels["replica"] for family in families for sample in family.samples}


def wait_for(holds: Callable[[], Any], what: str) -> float:
    """The seconds until it holds."""
    started = time.monotonic()
    while not holds():
        if time.monotonic() > started + SECONDS:
            raise SystemExit(f"after {SECONDS} s: not {what}")
        time.sleep(0.1)
    return time.monotonic() - started


@contextlib.contextmanager
def limit_memory() -> Iterator[None]:
    """Machines that are added in this block have 2 GiB left: once it is used, Ray kills the largest of their workers.

    Nothing beside it may need memory: Ray measures that of all processes.
    """
    memory = psutil.virtual_memory()
    used = memory.total - memory.available
    name = "RAY_memory_usage_threshold"
    os.environ[name] = str((used + LEFT_BYTES) / memory.total)
    try:
        yield
    finally:
        del os.environ[name]


def use_memory(until: Callable[[], Any]) -> None:
    """Take memory until something is so, at most as much as `limit_memory` left twice over; then give it back."""
    taken = []
    while not until():
        if len(taken) < 16:
            # Not zeros: a page of them costs nothing until it is written.
            taken.append(b"." * (LEFT_BYTES // 8))
        time.sleep(0.1)


def serve_words(checkpoint: Path, address: str, n: str) -> list[str]:
    words = ["serve", f"toy={checkpoint}", *LIMITS, "--port", "0", "--batch_size", "2"]
    return [*words, "--ray", n, "--ray_address", address]


def serve_kill_runs(
    cluster: Any, checkpoint: Path, work: Path, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """What became of the requests of each kill, and the times until the replicas answered again and were two again."""
    rng = Random(args.seed)

    def machine() -> Any:
        return cluster.add_node(num_cpus=1, setup_worker_path=ray_workers.__file__)

    def replace(old: Any) -> Any:
        cluster.remove_node(old)
        return machine()

    second = machine()
    server = Driver(work / "serve", serve_words(checkpoint, cluster.address, "2"))
    with httpx.Client(base_url=server.first_line(), timeout=CLIENT_SECONDS) as client:
        for kind in KINDS[:-1]:
            if kind == "memory" and kind in args.kinds:
                with limit_memory():
                    second = replace(second)
            for _ in range(args.kills if kind in args.kinds else 0):
                wait_for(lambda: len(replicas(client)) == 2, "two replicas")
                before, moment = replicas(client), rng.uniform(0.5, 4)
                n = 2 if kind == "both replicas" else 1
                with Load(client) as load:
                    time.sleep(moment)
                    killed = time.monotonic()
                    if kind == "machine":
                        second.kill_raylet()
                        second = replace(second)
                    elif kind == "memory":
                        there = {each.pid for each in workers("ServeReplica")}
                        use_memory(lambda there=there: there - {each.pid for each in workers("ServeReplica")})
                    else:
                        for replica in rng.sample(workers("ServeReplica"), n):
                            replica.kill()
                    wait_for(
                        lambda before=before, n=n: (
                            len(replicas(client)) == 2 and len(replicas(client) - before) == n
                        ),
                        "as many replicas as before",
                    )
                    replaced = time.monotonic() - killed
                    wait_for(lambda load=load, killed=killed: load.answered_since(killed), "an answer")
                ends = Counter(end.name for end in load.ends)
                longest = max(end.ended - end.began for end in load.ends)
                yield {
                    "killed": kind,
                    "after_seconds": round(moment, 2),
                    **{name: ends.pop(name, 0) for name in ENDS},
                    "wrong": sum(ends.values()),
                    "wrong_ends": dict(ends),
                    "seconds_until_answered": round(load.answered_since(killed) or -1, 2),
                    "seconds_until_replaced": round(replaced, 2),
                    "longest_request_seconds": round(longest, 2),
                }
    second = replace(second)
    for i in range(args.kills if KINDS[-1] in args.kinds else 0):
        if i > 0:
            server = Driver(work / f"serve-{i}", serve_words(checkpoint, cluster.address, "2"))
            server.first_line()
        server.kill()
        gone = wait_for(lambda: not workers("ServeReplica"), "the end of all replicas")
        yield {"killed": "command", "wrong": 0, "seconds_until_replicas_ended": round(gone, 2)}
