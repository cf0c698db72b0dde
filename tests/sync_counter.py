"""Counts looks: whatever makes Python wait for a GPU. On a CPU they cost nothing, and can be counted all the same.

A tensor that was made of numbers which Python had, by `torch.tensor` without a device, and all that is computed of such tensors alone,
stays on the CPU where a GPU computes: to look at it is free.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_trees import tensors_of

LOOKS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.nonzero,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__contains__,
    Tensor.masked_select,
    Tensor.unique,
    torch.nonzero,
    torch.masked_select,
    torch.unique,
    torch.equal,
    torch.allclose,
    torch.isin,
    torch.repeat_interleave,
}
"""What reads numbers, or makes a tensor whose size depends on them."""
SENDS = {torch.tensor, torch.as_tensor, torch.asarray}
"""What makes a tensor of Python's numbers, on a device where one is named."""


class Looks(TorchFunctionMode):
    """Where looks were taken: the line of our code that took each."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in (Tensor.__getitem__, Tensor.__setitem__) and _has_mask_or_list(args[1])
        # Python's numbers lie in memory that is not pinned: to send them waits for the copy, and all that came before.
        sent = func in SENDS and not isinstance(args[0], Tensor) and (kwargs or {}).get("device") is not None
        sent = sent and args[0] != []
        moved = func is Tensor.to and _is_moved_by_us(args, kwargs or {})
        if sent or moved or ((func in LOOKS or by_mask) and not _is_known(args[0])):
            frames = traceback.extract_stack()[:-1]
            own = [frame for frame in frames if "/src/colar/" in frame.filename] or frames
            self.lines.append(f"{own[-1].filename}:{own[-1].lineno} {own[-1].line}")
        result = func(*args, **(kwargs or {}))
        if moved or func is Tensor.cpu:
            # A copy, for the tensor itself may stay on the GPU.
            result = result.clone()
            result._known = not moved or not _is_known(args[0])
            return result
        # Made of numbers that Python has, and of no other tensor: on a GPU's side this is another tensor.
        made_here = tensors_of(result)
        if made_here:
            read = tensors_of((args, kwargs))
            made = not read and (kwargs or {}).get("device") is None
            # `arange` and `zeros` on a device: on the side of what they meet, for operands of two sides fail on a GPU.
            sides = {getattr(tensor, "_known", False) for tensor in read} - {None}
            for each in made_here:
                each._known = made or (None if not sides else sides == {True})
        return result


def _has_mask_or_list(index: Any) -> bool:
    """A mask's number of True is read; a list is sent, and not from pinned memory."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, list) or (isinstance(part, Tensor) and part.dtype == torch.bool) for part in parts
    )


def _is_moved_by_us(args: Any, kwargs: dict[str, Any]) -> bool:
    """To another device, by our code itself: `devices.send` does it without waiting."""
    if not any(isinstance(each, torch.device) for each in (*args[1:], *kwargs.values())):
        return False
    caller = traceback.extract_stack(limit=3)[0].filename
    return "/src/colar/" in caller and not caller.endswith("/ops/devices.py")


def _is_known(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or bool(getattr(tensor, "_known", False))


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The looks of the block, one a line."""
    with Looks() as mode:
        yield mode.lines


def uncounted() -> contextlib.AbstractContextManager[None]:
    """Inside `counted`, for what may wait: nothing is seen, which is faster. Tensors made here are as on a GPU."""
    disabled: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled
