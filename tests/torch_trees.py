"""The tensors in the arguments and results of torch's operations, for tests that see every operation.

torch's own pytree asks a registry of types for each number and each tensor. Operations take and return tensors, Python's
values, and lists, tuples and dicts of them: to look for these alone takes a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, list | tuple):
        for each in tree:
            _collect(each, found)
    elif isinstance(tree, dict):
        for each in tree.values():
            _collect(each, found)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of a tree with `change` of each leaf. A named tuple becomes a tuple."""
    if isinstance(tree, list | tuple):
        values = [mapped(change, each) for each in tree]
        return values if isinstance(tree, list) else tuple(values)
    if isinstance(tree, dict):
        return {name: mapped(change, each) for name, each in tree.items()}
    return change(tree)
