"""Failures in a step: whom they concern.

    rows       a b c d e f g h          the step of all of them raises
               a b c d | e f g h        the halves: the first is well
                         e f | g h
                             g | h      g raises alone: it ends with its error, all others have their results

A step that failed changed nothing, and a row's draws are a function of its seed and its step. So a part that is tried
again gives what the whole would have given. Memory that ran out is nobody's fault: that error passes, and the engine
makes room (`core.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
"""What torch says where it raises no error of its own for it: allocators of CPUs, and cuBLAS."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def memory_error(error: Exception) -> Exception:
    """The error, where it says that memory ran out; any other one is raised again."""
    if not out_of_memory(error):
        raise error
    # Its frames hold tensors: the very memory that is needed now.
    return error.with_traceback(None)


@dataclass
class Parts(Generic[T]):
    """What came of rows that were tried apart, in their order."""

    results: list[tuple[range, T]] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    """Of the rows that fail alone."""


def apart(rows: range, run: Callable[[range], T], parts: Parts[T] | None = None) -> Parts[T]:
    """Run over all `rows`; where that fails, over halves of them, until what fails is alone.

    Raises where memory runs out.
    """
    parts = Parts() if parts is None else parts
    try:
        parts.results.append((rows, run(rows)))
        return parts
    except Exception as error:
        if out_of_memory(error):
            raise
        failed = error
    # Outside of the `except`: what is raised below is not said to come of this error.
    if len(rows) == 1:
        parts.errors[rows[0]] = failed
        return parts
    half = len(rows) // 2
    apart(rows[:half], run, parts)
    return apart(rows[half:], run, parts)
