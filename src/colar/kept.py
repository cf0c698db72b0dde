"""Results that take long to compute and follow from their inputs alone, kept in the user's cache folder.

    kept("row-lengths", digest(rows, tokenizer, ...), compute)        first: computes and writes;  then: reads

A file's name has the digest of everything that its content depends on, this package's code among it. So nothing in the
cache is ever out of date, and all of it may be deleted at any time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from colar import __version__, files, processes, progress

WORTH_S = 5.0
"""What is computed faster than this is not written."""


def digest(*parts: object) -> str:
    """16 hex digits of the parts, by their `repr`; bytes as they are."""
    found = hashlib.sha256(_code())
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode())
        # "ab" + "c" and "a" + "bc" differ.
        found.update(b"\x1f")
    return found.hexdigest()[:16]


@functools.cache
def _code() -> bytes:
    """This package's version and the state of its files: in a checkout the version stays while the code changes."""
    states = [__version__]
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        state = path.stat()
        states.append(f"{path.name} {state.st_size} {state.st_mtime_ns}")
    return "\n".join(states).encode()


def kept(name: str, key: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `compute` returns (tensors on the CPU), read where an earlier call has written it.

    All processes call it together: the main process reads and writes, and `compute` may divide the work.
    """
    path = files.cache_folder() / "computed" / f"{name}-{key}.safetensors"
    found = processes.from_main(lambda: _read(path))
    if found is not None:
        return found
    started = time.monotonic()
    made = compute()
    if processes.is_main() and time.monotonic() - started >= WORTH_S:
        _write(path, made)
    return made


def _read(path: Path) -> dict[str, Tensor] | None:
    """The tensors in a file; None where there is none, or a damaged one."""
    try:
        found: dict[str, Tensor] = load_file(path)
        return found
    except (OSError, SafetensorError):
        return None


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file in one step. A cache that cannot be written to is no error: the next run computes again."""
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
        os.close(handle)
        save_file(tensors, partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        # A full disk is an error of safetensors' own.
        progress.say(f"not kept for the next run: {path}: {getattr(error, 'strerror', None) or error}")
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
