"""Processes, where accelerate's `PartialState` does not cover them: joining, errors of one process, locked folders.

torchrun and `accelerate launch` start N equal processes, and `join` makes them a group. If one process failed alone,
the others would wait for it in vain, so errors reach all:

    split_and_gather(items, work)    each process works on its share; all get all results, or all raise
    from_main(make)                  the main process makes a value; all get it, or all raise
    any_process(flag)                True in all where it is True in one
    locked(folder)                   one run writes into a folder; another one gets an error

Values are pickled and sent on the CPU, a flag as a number.
"""

import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from torch import distributed

from colar import progress

T = TypeVar("T")
R = TypeVar("R")


class OtherProcessError(RuntimeError):
    """Another process of this run has failed, and has reported why."""


def launched() -> int:
    """Number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(timeout_s: float) -> None:
    """Join the processes that a launcher started with this one; does nothing if it is alone, or has joined already.

    A process that waits for another one longer than `timeout_s` gets an error.
    """
    if launched() == 1 or distributed.is_initialized():
        return
    # Before accelerate does, with which Python values would be sent through the GPUs.
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_s)
    )
    # Without `cpu` accelerate would not recognise a group of CPU processes.
    PartialState(cpu=not on_gpu)


def leave() -> None:
    """Leave the group at the end of a run that succeeded."""
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def from_main(make: Callable[[], T]) -> T:
    """Call `make` in the main process, return its value in all. If it raises, the others raise OtherProcessError."""
    # The main process is the first one, and gets the only item.
    (value,) = split_and_gather([make], lambda share: [call() for call in share])
    return value


def split_and_gather(items: Sequence[T], work: Callable[[Sequence[T]], Iterable[R]]) -> list[R]:
    """`list(work(items))` with the work divided; all get all results. `work` yields a result for each item.

    If items fail, the first one's error is raised in the process that worked on it; the other processes raise
    OtherProcessError.
    """
    results: list[R] = []
    error: Exception | None = None
    state = PartialState()
    try:
        with state.split_between_processes(list(items)) as share:
            results.extend(work(share))
    except Exception as raised:
        error = raised
    errors: list[str | None] = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    # Shares are contiguous, so the first process with an error has the first item with one.
    failed = [place for place, message in enumerate(errors) if message is not None]
    if not failed:
        all_results: list[R] = gather_object(results)
        return all_results
    if error is not None and failed[0] == state.process_index:
        raise error
    raise OtherProcessError(errors[failed[0]])


def any_process(flag: bool) -> bool:
    """True in all processes if `flag` is True in any of them. All call it together."""
    state = PartialState()
    if state.num_processes == 1:
        return flag
    found = torch.tensor(int(flag))
    # On the CPU, without waiting for a GPU, unless a caller's own group has GPUs only.
    if "cpu:" not in distributed.get_backend_config():
        found = found.to(state.device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return bool(found)


def require_shared(folder: Path) -> None:
    """Raise ValueError unless all processes see this folder of the main process. All call it together."""
    # A new name, because a network file system may cache for a while that a name does not exist.
    token = folder / from_main(lambda: f".shared-{uuid.uuid4().hex}")
    state = PartialState()
    if state.is_main_process:
        token.touch()
    state.wait_for_everyone()
    seen: list[bool] = gather_object([token.exists()])
    if state.is_main_process:
        token.unlink()
    if not all(seen):
        raise ValueError(f"{folder} must lie on a file system that all machines of the run share")


NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that has no locks."""


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Keep other runs out of a folder, or off a file, inside the block; ValueError where one is writing there already.

    The main process holds the lock for all processes of its run (blocks may be nested). The lock ends with that
    process, also when it is killed. Logs a warning on a file system without locks.
    """
    place = Path(path).resolve()
    place = place / ".lock" if place.is_dir() else place.with_name(f".{place.name}.lock")
    lock = FileLock(place, thread_local=False, is_singleton=True)

    def acquire() -> None:
        try:
            lock_held.enter_context(lock.acquire(timeout=0))
        except Timeout:
            raise ValueError(
                f"another process is writing to {path}: let it end, or name another output"
            ) from None
        except (OSError, NotImplementedError) as error:
            # Any other error is a fault of the folder.
            if isinstance(error, OSError) and error.errno not in NO_LOCKS:
                raise
            progress.say(
                f"warning: {path} is on a file system without locks: start no second process that writes there"
            )

    with ExitStack() as lock_held:
        from_main(acquire)
        yield
