"""A device that is not there: computes on the CPU, and refuses what CUDA refuses.

    with fake_device.active():
        lm.to(fake_device.NAME)
        ...                        # RuntimeError for an operation on a tensor of each device

A tensor of the device wraps one of the CPU. Every operation comes through `_run`, which unwraps, computes and wraps
again. What CUDA accepts is accepted: a scalar of the CPU, an index of the CPU into a tensor of the device, a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch_trees import mapped, tensors_of

NAME = "elsewhere"
MIXED = {"copy_", "_to_copy", "index", "index_put_", "index_put"}
"""Operations that take tensors of both devices."""


class _Backend(backend_registration._DummyBackendModule):  # type: ignore[misc]
    def _lazy_init(self) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class DeviceTensor(Tensor):
    """A tensor of the device, `inner` on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.inner = inner
        return made

    # torch makes tensors of lists, and lists of tensors, below the place where operations can be seen.
    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        return super().__getitem__(tuple(torch.tensor(k) if isinstance(k, list) else k for k in keys))

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{NAME}({self.inner})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees operations without a tensor of the device too: those that make one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors = tensors_of((args, kwargs))
    ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    if not ours and kwargs.get("device") is None:
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    others = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0]
    first_is_ours = bool(tensors) and isinstance(tensors[0], DeviceTensor)
    if ours and others and (name not in MIXED or (name.startswith("index") and not first_is_ours)):
        raise RuntimeError(f"Expected all tensors to be on the same device, got {NAME} and cpu ({func})")
    here = bool(ours)
    if kwargs.get("device") is not None:
        here = torch.device(kwargs["device"]).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain_kwargs = mapped(_inner, (tuple(args), dict(kwargs)))
    found = func(*plain_args, **plain_kwargs)
    # An operation in place returns its own argument.
    known = {id(_inner(tensor)): tensor for tensor in tensors}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return DeviceTensor(value) if here else value

    return mapped(wrapped, found)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


@contextlib.contextmanager
def active() -> Iterator[str]:
    """Let the device be there inside the block."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    # torch.tensor(list, device=...) then makes its tensor on the CPU, and copies it by an operation that is seen.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        # autograd makes a queue for each device when it first runs, which may have been before this one was there.
        with _Mode(), torch.autograd.set_multithreading_enabled(False):
            yield NAME
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(swaps)
