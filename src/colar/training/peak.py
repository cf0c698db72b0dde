"""Peak memory of a piece of work: the most that the tensors which it makes hold at one time.

On CUDA the allocator says it. Elsewhere tensors are counted as they come and go, so the number does not depend on what
the process freed before, and is the same for tensors that have shapes and no values (`planning`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorPeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that are made inside the block: `live` now, `peak` at most.

    Two tensors of one storage count once; one that is a view of an older tensor does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What was there before the block comes back from views and from work in place: it is not new.
        old = {_key(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            key = _key(tensor)
            if key not in old and key not in self._known:
                self._add(key, tensor.untyped_storage())
        return result

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Peak:
    """The result of `measured`: bytes that were held at most, beside what was there before."""

    bytes: int = 0


@contextlib.contextmanager
def measured(device: torch.device) -> Iterator[Peak]:
    """Measure the block's peak on this device; `Peak.bytes` is there when it has ended."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with TensorPeak() as counted:
        yield peak
    peak.bytes = counted.peak


def bytes_of(tensors: Any) -> int:
    """Bytes of some tensors, those that share a storage once."""
    sizes = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def held(model: nn.Module) -> int:
    """Bytes of a model's weights and buffers."""
    return bytes_of([*model.parameters(), *model.buffers()])


def trained(model: nn.Module) -> int:
    """Bytes of the weights that take a gradient."""
    return bytes_of([weight for weight in model.parameters() if weight.requires_grad])


ADAM_MOMENTS = 2
"""Tensors of a weight's size that AdamW keeps."""
