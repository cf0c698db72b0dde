"""A Ray cluster of several machines on this one, whose workers do without their ten seconds of imports.

    test ------> `python ray_workers.py serve SOCKET`, which imports colar once for all tests of a folder
                   -> a fork for each machine, which imports Ray, and colar where its own differs   -> a fork for each worker
    raylet ----> `python ray_workers.py default_worker.py ...` in place of Ray's setup_worker.py, which asks for one

The workers are processes as ever: each has an id under which it is killed, and ends with its raylet. A machine that is
added without `setup_worker_path` starts them as Ray does.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
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
    "colar.recipe.run",
    "colar.methods.pretrained",
    "colar.engine.async_engine",
    "colar.serve.app",
    "pandas",
    "pyarrow.dataset",
    # Half of the time that Ray's own import takes.
    "grpc",
    "jsonschema",
    "requests",
)
RAY_IMPORTS = ("ray.data", "ray.serve")
READ = ("RAY_RAYLET_PID", "PYTHONPATH")
"""What is read of a worker's environment when Ray and colar are imported, and never again; beside the job."""
NO_JOB = "ffffffff"
"""Ray's id of no job: a worker that a machine starts ahead has it, and becomes one of the job whose task it gets first."""
DEATHS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
}
"""Ray notices that a machine is dead after a second, not after 15; one that is only slow still has 10."""
MOST_BYTES = 2**17
"""Of a request: the arguments and the environment of a worker."""


@contextlib.contextmanager
def cluster(folder: Path, cpus: int, **others: Any) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of one machine, with `setup_worker_path=__file__` as those that are added may have.

    Clusters of several processes at a time share what is imported, if they are given one folder.
    """
    from unittest import mock

    from ray.cluster_utils import Cluster

    address = str(folder / "socket")
    # A process may have two clusters, one begun and ended within the other.
    outer = os.environ.get(SOCKET)
    os.environ[SOCKET] = address
    with open(f"{address}.users", "ab") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        subprocess.run([sys.executable, __file__, "serve", address], check=True)
        # Each start waits for the dashboard's server, and Ray does without where it cannot start.
        with mock.patch("ray._private.services.start_api_server", return_value=(None, None)):
            running = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": cpus,
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
            if outer is None:
                del os.environ[SOCKET]
            else:
                os.environ[SOCKET] = outer


def serve(address: str) -> None:
    """Have a worker forked for each connection, in a process of its own, unless there is one. It ends after its users."""
    own = f"{address}.{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(own)
        server.listen()
        try:
            os.link(own, address)
        except FileExistsError:
            return
        finally:
            os.unlink(own)
        # Requests wait while that one imports.
        if os.fork() > 0:
            return
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        # Workers look for garbage only among what is their own: to look at all that is imported would copy it.
        gc.disable()
        for name in IMPORTS:
            importlib.import_module(name)
        gc.freeze()
        # Those who have ended leave nothing behind.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        server.settimeout(1)
        parents: dict[tuple[str, ...], socket.socket] = {}
        while True:
            try:
                asking, _ = server.accept()
            except TimeoutError:
                if has_users(address):
                    continue
                return
            request, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 2)
            environment = json.loads(request)["environment"]
            key = tuple(environment.get(name, "") for name in READ)
            if key not in parents:
                parents[key], parent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for other in (server, asking, *parents.values()):
                        other.close()
                    for stream in streams:
                        os.close(stream)
                    fork_workers(parent, environment)
                parent.close()
            # A worker has the connection, which stays open until it ends.
            socket.send_fds(parents[key], [request], [asking.fileno(), *streams])
            asking.close()
            for stream in streams:
                os.close(stream)


def has_users(address: str) -> bool:
    """Where a server has none, the next one may take its address."""
    with open(f"{address}.users", "ab") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        os.unlink(address)
        return False


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
    os.environ.update(environment | {"RAY_JOB_ID": NO_JOB})
    import_ray()
    gc.freeze()
    while True:
        request, files, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            work(json.loads(request), files[1:])
        for file in files:
            os.close(file)


def import_ray() -> None:
    """Import Ray, but leave its random generator as it is before its first draw, which seeds it.

    A process that is forked after that draws the same ids as its siblings. Two workers that then start at the same time
    put the same object into their machine's store; one aborts, and the driver that waits for both waits for ever.
    """
    from unittest import mock

    import ray

    def from_the_system() -> Any:
        return ray.ActorClassID(os.urandom(ray.ActorClassID.size()))

    # The actors that Ray itself defines draw ids while they are imported.
    with mock.patch("ray.actor.ActorClassID", mock.Mock(from_random=from_the_system)):
        for name in RAY_IMPORTS:
            importlib.import_module(name)


def work(asked: dict[str, Any], streams: list[int]) -> None:
    """Run Ray's file with its arguments, as a process of its own."""
    gc.enable()
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


def slow_application(*arguments: Any) -> Any:
    """The server's application in a replica, with a pause of 30 ms before each step: a request takes seconds anywhere."""
    from colar.cli import serve
    from colar.engine.engine import Engine

    step = Engine.step

    def after_a_pause(engine: Engine) -> Any:
        time.sleep(0.03)
        return step(engine)

    Engine.step = after_a_pause  # type: ignore[method-assign]
    return serve._application(*arguments)


def ask(words: list[str]) -> None:
    """Have the server start a worker, and wait until that has ended."""
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
