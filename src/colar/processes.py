"""The processes of one run: which one this is, what they tell each other, and how all end when one is gone.

torchrun and `accelerate launch` start N equal processes; each is told its number, its rank (0: the main process, which
writes and speaks). `join` makes them a group. Without it, or alone, every function here does what one process does.

    split(items, work)      process 0: items 0, 2, 4 ...    process 1: items 1, 3, 5 ...     all get all results
    from_main(make)         the main process makes it, all get it
    owns(folder)            who writes into a folder: one process for each disk that is not shared
    mirror(folder)          what the main process has in a folder, on every such disk

What is exchanged are Python values, on the CPU: no folder needs to be seen by all.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT_S = 1800
"""Seconds that a process waits for the others, where nobody says otherwise."""
PIECE = 1 << 26
"""Bytes of a file that are sent at once."""
GONE = ("gloo", "NCCL", "Connection reset", "Connection closed", "Broken pipe")
"""Words in the errors that torch raises where another process does not answer."""
LATE = ("Timed out", "timeout", "timed out")
"""Words in those of them that come after a wait."""


class OtherProcessError(RuntimeError):
    """Another process of this run has failed, and has said why."""


# The group


def join(timeout_s: float = TIMEOUT_S) -> None:
    """Join the processes that a launcher started with this one; does nothing where it is alone, or has joined.

    A process that waits for another one longer than `timeout_s` gets an error.
    """
    if launched() == 1 or distributed.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Gradients go between GPUs; Python values stay on the CPU.
        backend = "cpu:gloo,cuda:nccl"
    # Here and not by transformers, which gives a group on the CPU no timeout.
    distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def launched() -> int:
    """How many processes the launcher started; they may not have joined yet."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave() -> None:
    """Leave the group at the end of a run that went well."""
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def size() -> int:
    """How many processes have joined; 1 without a group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """The number of this one."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def is_main() -> bool:
    """Whether this is the process that writes and speaks."""
    return rank() == 0


# What they tell each other


def everyones(value: T) -> list[T]:
    """The value of every process, by rank; all call it together."""
    if size() == 1:
        return [value]
    found: list[Any] = [None] * size()
    distributed.all_gather_object(found, value)
    # Pickled and back, but for this process's own: the very objects that it had.
    found[rank()] = value
    return found


def wait() -> None:
    """Wait until all processes are here."""
    everyones(None)


def from_main(make: Callable[[], T]) -> T:
    """What `make` returns in the main process, in all. Where it raises there, the others raise OtherProcessError."""
    if size() == 1:
        return make()
    told: list[Any] = [None, None]
    error: Exception | None = None
    if is_main():
        try:
            told[0] = make()
        except Exception as raised:
            error = raised
            told[1] = f"{type(raised).__name__}: {raised}"
    distributed.broadcast_object_list(told)
    if error is not None:
        raise error
    if told[1] is not None:
        raise OtherProcessError(told[1])
    value: T = told[0]
    return value


def mine(items: Sequence[T]) -> Sequence[T]:
    """This process's share: every N-th item, beginning at its rank, so that neighbours go to different ones."""
    return items[rank() :: size()]


def in_order(shares: Sequence[Sequence[T]]) -> list[T]:
    """The items of all shares in the order that they had before `mine` took them apart."""
    items: list[Any] = [None] * sum(map(len, shares))
    for start, share in enumerate(shares):
        items[start :: len(shares)] = share
    return items


def split(items: Sequence[T], work: Callable[[Sequence[T]], Iterable[R]]) -> list[R]:
    """`list(work(items))` with the work divided; all get all results. `work` yields a result for each item.

    A ValueError is that of the first item that has one, raised where it was found. The other processes raise
    OtherProcessError.
    """
    results: list[R] = []
    error: ValueError | None = None
    try:
        for result in work(mine(items)):
            results.append(result)
    except ValueError as raised:
        error = raised
    place = rank() + len(results) * size()
    failed = [told for told in everyones(None if error is None else (place, str(error))) if told is not None]
    if not failed:
        return in_order(everyones(results))
    first, message = min(failed)
    if error is not None and first == place:
        raise error
    raise OtherProcessError(message)


def spread(tensors: Iterable[Tensor]) -> None:
    """Overwrite these tensors by those of the main process, in place."""
    if size() == 1:
        return
    for tensor in tensors:
        distributed.broadcast(tensor.data, 0)


# Folders


def owns(folder: Path) -> bool:
    """Whether this process is the first of those that see this folder: of all, or of those on its disk.

    All call it together. The main process owns its own folder in any case.
    """
    if size() == 1:
        return True
    # A name that nobody has looked up: a network file system may remember for a while that a name is not there.
    token = from_main(lambda: uuid.uuid4().hex)
    own = folder / f".seen-{token}-{rank()}"
    own.touch()
    wait()
    first = next(i for i in range(rank() + 1) if (folder / f".seen-{token}-{i}").exists())
    wait()
    own.unlink()
    return first == rank()


def mirror(folder: Path, owner: bool) -> None:
    """Write the files of the main process's `folder` into that of every other owner (`owns`), piece by piece.

    Other files that lie there stay. All call it together.
    """
    # Nobody else has a disk of its own: nothing needs to be read.
    if sum(everyones(owner)) == 1:
        return
    names = from_main(lambda: sorted(path.name for path in folder.iterdir() if path.is_file()))
    for name in names:
        _send(folder / name, writes=owner and not is_main())


def _send(path: Path, writes: bool) -> None:
    """Copy one file of the main process to those that write."""
    pieces = from_main(lambda: -(-path.stat().st_size // PIECE))
    partial = path.with_name(f".{path.name}.partial")
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(b"")
    for number in range(pieces):
        piece = from_main(lambda number=number: _piece(path, number))  # type: ignore[misc]
        if writes:
            with open(partial, "ab") as stream:
                stream.write(piece)
    if writes:
        os.replace(partial, path)


def _piece(path: Path, number: int) -> bytes:
    with open(path, "rb") as stream:
        stream.seek(number * PIECE)
        return stream.read(PIECE)


# The end


def is_lost(error: BaseException) -> bool:
    """Whether this is torch's way to say that another process does not answer."""
    # By the launcher's number: an error may come while they join.
    if launched() == 1 or not isinstance(error, RuntimeError):
        return False
    known = isinstance(error, distributed.DistError | OtherProcessError)
    return known or any(word in str(error) for word in GONE)


def explain(error: BaseException) -> str:
    """One line for an error of which `is_lost` is true."""
    if isinstance(error, OtherProcessError):
        return f"another process of this run failed: {error}"
    this = f"process {os.environ.get('RANK', '0')} of {launched()}"
    if any(word in str(error) for word in LATE):
        reason = "it hangs, is gone, or works longer than the timeout"
        return f"{this} waited for another one in vain ({reason}); the same command resumes"
    return f"{this} lost another one, which was killed or failed; the same command resumes"


def first_to_say() -> bool:
    """True in the first process that asks, False in all that ask later: of many errors one is said, the first."""
    if launched() == 1:
        return True
    # A restart by the launcher may fail again, and say so again.
    key = f"colar/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        return int(_store().add(key, 1)) == 1
    except Exception:
        # Nobody is left who could be asked.
        return True


def _store() -> Any:
    """The store of keys that the launcher keeps, which outlives any process of the run; else the group's own."""
    # The launcher's first: an error may come before this process has joined.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return distributed.TCPStore(*place, timeout=timedelta(seconds=10))  # type: ignore[attr-defined]
    return distributed.distributed_c10d._get_default_store()
