"""A Ray cluster of several machines on this one, whose workers do without their ten seconds of imports.

    test ------> `python ray_workers.py serve SOCKET`, which imports colar once   -> a fork for each worker
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOCKET = "COLAR_TEST_RAY_WORKERS"
"""The variable with the server's address."""
IMPORTS = (
    "colar.cli.generate",
    "colar.methods.pretrained",
    "colar.engine.async_engine",
    "colar.serve.app",
    "pandas",
    "pyarrow.dataset",
)
"""Not Ray, which reads a worker's environment when it is imported."""
MOST_BYTES = 2**17
"""Of a request: the arguments and the environment of a worker."""


@contextlib.contextmanager
def cluster(folder: Path, cpus: int, **others: Any) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of one machine, with `setup_worker_path=__file__` as those that are added may have."""
    from ray.cluster_utils import Cluster

    address = folder / "socket"
    server = subprocess.Popen([sys.executable, __file__, "serve", str(address)], stderr=subprocess.DEVNULL)
    os.environ[SOCKET] = str(address)
    running = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": cpus,
            "include_dashboard": False,
            "setup_worker_path": __file__,
            **others,
        },
    )
    try:
        yield running
    finally:
        running.shutdown()
        server.kill()
        server.wait()
        del os.environ[SOCKET]


def serve(address: str) -> None:
    """Fork a worker for each connection."""
    for name in IMPORTS:
        importlib.import_module(name)
    # Those who have ended leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        os.rename(f"{address}.new", address)
        while True:
            asking, _ = server.accept()
            asked, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 2)
            if os.fork() == 0:
                server.close()
                work(json.loads(asked), streams)
            asking.close()
            for stream in streams:
                os.close(stream)


def work(asked: dict[str, Any], streams: list[int]) -> None:
    """Run Ray's file with its arguments, as a process of its own. The connection stays open until it ends."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for place, stream in enumerate(streams, start=1):
        os.dup2(stream, place)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    # Ray brings one of its own, and no result of a task is stored where another one is imported.
    for name in [name for name in sys.modules if name.partition(".")[0] == "psutil"]:
        del sys.modules[name]
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
