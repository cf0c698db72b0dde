"""Starts processes that work alone, or together as torchrun does, without their seconds of imports.

A fork server imports the libraries once and forks every process from there: none inherits anything from the tests. The
test holds the store by which they find each other, as torchrun's agent does: it outlives any of them.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["preloaded"])


@dataclass
class Outcome:
    """What became of a process: its exit code (-9: killed), what it returned, what it wrote to stderr."""

    code: int
    value: Any
    stderr: str


class Group:
    """N processes that call `call(*arguments)` each. Their results go through files in `folder`."""

    def __init__(self, n: int, folder: Path, call: Callable[..., Any], *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = []
        for rank in range(n):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n),
                "LOCAL_WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "OMP_NUM_THREADS": "1",
            }
            self.processes.append(_start(environment, folder / f"rank{rank}", call, arguments))

    def wait(self, seconds: float = 120) -> list[Outcome]:
        """Until all have ended; TimeoutError, and the end of them, where one has not."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in self.processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        if late:
            texts = [_text(self.folder / f"rank{rank}.err") for rank in range(len(self.processes))]
            raise TimeoutError(f"{len(late)} processes did not end in {seconds} s: {texts}")
        return [_outcome(process, self.folder / f"rank{rank}") for rank, process in enumerate(self.processes)]


def alone(folder: Path, call: Callable[..., Any], *arguments: Any, seconds: float = 180) -> Outcome:
    """A process that works by itself; TimeoutError, and its end, where it takes longer."""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / "alone"
    process = _start({"OMP_NUM_THREADS": "1"}, name, call, arguments)
    process.join(seconds)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"it did not end in {seconds} s: {_text(Path(f'{name}.err'))}")
    return _outcome(process, name)


def run_file(words: list[str], environment: dict[str, str]) -> None:
    """Run a file as `python FILE ...` does, in the folder above the file's own."""
    path = Path(words[0])
    os.environ.update(environment)
    if "torch._dynamo" in sys.modules:
        # It has read its variable when it was imported.
        sys.modules["torch._dynamo"].config.disable = bool(environment.get("TORCH_COMPILE_DISABLE"))  # type: ignore[attr-defined]
    os.chdir(path.parent.parent)
    sys.argv = words
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def together(n: int, folder: Path, call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `call(*arguments)` returns in each of N processes; an assertion shows what they wrote where one fails."""
    outcomes = Group(n, folder, call, *arguments).wait()
    assert [outcome.code for outcome in outcomes] == [0] * n, "\n".join(each.stderr for each in outcomes)
    return [outcome.value for outcome in outcomes]


def _start(
    environment: dict[str, str], name: Path, call: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    process = SERVER.Process(target=_child, args=(environment, name, call, arguments), daemon=True)
    # The server finds `preloaded` here: until Python 3.14 it is not told sys.path, and goes on without what it lacks.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        process.start()
    return process


def _child(
    environment: dict[str, str], name: Path, call: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    # The descriptor too: libraries in C write there.
    stream = open(f"{name}.err", "w", buffering=1)  # noqa: SIM115  # stays open until the process ends
    os.dup2(stream.fileno(), 2)
    sys.stderr = stream
    torch.set_num_threads(1)
    try:
        assert "preloaded" in sys.modules, "the fork server could not import tests/preloaded.py"
        value = call(*arguments)
    except BaseException:
        traceback.print_exc()
        stream.flush()
        os._exit(1)
    with open(f"{name}.pickle", "wb") as out:
        pickle.dump(value, out)
    stream.flush()
    os._exit(0)


def _outcome(process: Any, name: Path) -> Outcome:
    found = Path(f"{name}.pickle")
    value = pickle.loads(found.read_bytes()) if found.exists() else None
    return Outcome(process.exitcode, value, _text(Path(f"{name}.err")))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
