"""A Ray cluster of several machines on this one, whose workers do without their ten seconds of imports.

    test ------> `python ray_workers.py serve SOCKET`, which imports colar once
                   -> a fork for each job on each machine, which imports Ray, and colar where its own differs   -> a fork for each worker
    raylet ----> `python ray_workers.py default_worker.py ...` in place of Ray's setup_worker.py, which asks for one

The workers are processes as ever: each has an id under which it is killed, and ends with its raylet. A machine that is
added without `setup_worker_path` starts them as Ray does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOCKET = "COLAR_TEST_RAY_WORKERS"
"""The variable with the server's address."""
IMPORTS = (
    "colar.cli.generate",
    "colar.recipe.run",
    "colar.methods.pretrained",
    "colar.engine.async_engine",
    "colar.serve.app",
    "pandas",
    "pyarrow.dataset",
)
RAY_IMPORTS = ("ray.data", "ray.serve")
READ = ("RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONPATH")
"""What is read of a worker's environment when Ray and colar are imported, and never again."""
DEATHS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
}
"""Ray notices that a machine is dead after a second, not after 15; one that is only slow still has 10."""
MOST_BYTES = 2**17
"""Of a request: the arguments and the environment of a worker."""
LEFT_BYTES = 2**31
"""Memory of a machine that `limit_memory` leaves, at first."""


@contextlib.contextmanager
def cluster(folder: Path, cpus: int, **others: Any) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of one machine, with `setup_worker_path=__file__` as those that are added may have."""
    from ray.cluster_utils import Cluster

    address = folder / "socket"
    server = subprocess.Popen([sys.executable, __file__, "serve", str(address)], stderr=subprocess.DEVNULL)
    # A process may have two clusters, one begun and ended within the other.
    outer = os.environ.get(SOCKET)
    os.environ[SOCKET] = str(address)
    running = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": cpus,
            "include_dashboard": False,
            "setup_worker_path": __file__,
            "no_monitor": True,
            "include_log_monitor": False,
            "_system_config": DEATHS,
            **others,
        },
    )
    try:
        yield running
    finally:
        running.shutdown()
        server.kill()
        server.wait()
        if outer is None:
            del os.environ[SOCKET]
        else:
            os.environ[SOCKET] = outer


@contextlib.contextmanager
def limit_memory() -> Iterator[None]:
    """Machines that are added in this block have 2 GiB left: once it is used, Ray kills the largest of their workers."""
    import psutil

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


def serve(address: str) -> None:
    """Have a worker forked for each connection."""
    for name in IMPORTS:
        importlib.import_module(name)
    # Those who have ended leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parents: dict[tuple[str, ...], socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        os.rename(f"{address}.new", address)
        while True:
            asking, _ = server.accept()
            request, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 2)
            environment = json.loads(request)["environment"]
            key = tuple(environment.get(name, "") for name in READ)
            if key not in parents:
                parents[key], own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for other in (server, asking, *parents.values()):
                        other.close()
                    for stream in streams:
                        os.close(stream)
                    fork_workers(own, environment)
                own.close()
            # A worker has the connection, which stays open until it ends.
            socket.send_fds(parents[key], [request], [asking.fileno(), *streams])
            asking.close()
            for stream in streams:
                os.close(stream)


def fork_workers(requests: socket.socket, environment: dict[str, str]) -> None:
    """Import Ray in the environment of workers, and fork one for each request until the server ends."""
    # Ray brings a psutil of its own, and no result of a task is stored where another one is imported.
    again = {"psutil"}
    path = environment.get("PYTHONPATH", "")
    if path != os.environ.get("PYTHONPATH", ""):
        sys.path[:0] = path.split(os.pathsep)
        again.add("colar")
    for name in [name for name in sys.modules if name.partition(".")[0] in again]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    for name in RAY_IMPORTS:
        importlib.import_module(name)
    while True:
        request, files, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            work(json.loads(request), files[1:])
        for file in files:
            os.close(file)


def work(asked: dict[str, Any], streams: list[int]) -> None:
    """Run Ray's file with its arguments, as a process of its own."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for place, stream in enumerate(streams, start=1):
        os.dup2(stream, place)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["words"]
    code: Any = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def ask(words: list[str]) -> None:
    """Have the server start a worker, and wait until that has ended."""
    # The first workers may be asked for while the server imports.
    deadline = time.monotonic() + 120
    while not os.path.exists(os.environ[SOCKET]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    asked = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        socket.send_fds(server, [json.dumps(asked).encode()], [1, 2])
        server.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    # Those of Ray's setup_worker.py, for environments that no test has.
    ask(
        [
            word
            for word in sys.argv[1:]
            if not word.startswith(("--serialized-runtime-env-context", "--language"))
        ]
    )
