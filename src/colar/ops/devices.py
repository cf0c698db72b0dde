"""Requirements of devices other than the CPU: few synchronisations, no float64 on Apple's, memory that is cached.

A GPU runs asynchronously to Python. Code that reads a number (`item`, `tolist`, `nonzero`, an `if` over a tensor)
synchronises: it waits until all work queued on the GPU is done, and then the GPU waits for Python. Sending numbers to
the GPU does not block.
"""

import functools
import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

WITHOUT_FLOAT64 = ("mps",)
"""Types of devices that have no float64."""


def best() -> str:
    """The name of the GPU if there is one, else of the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def requests_at_once(device: str | torch.device) -> int:
    """The default number of requests that run at once: a GPU's step takes hardly longer for 256 rows than for 32."""
    return 256 if str(device).startswith("cuda") else 32


def computes_bfloat16(device: torch.device) -> bool:
    """True if the device has bfloat16 arithmetic.

    A CPU without it computes it in software, many times slower, and a GPU older than Ampere emulates it. A device that
    is not in this machine is assumed to have it.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def usable(device: str | torch.device) -> torch.device:
    """The device. ValueError if it is unknown, or not in this machine."""
    # Tested with a tensor: torch raises different errors for a device that is unknown, not built in, or absent.
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device} cannot be used: {str(error).splitlines()[0]}") from error


def inference_dtype(device: str | torch.device) -> str:
    """The dtype of weights for inference: bfloat16 on a CUDA GPU that computes in it, float32 on any other device."""
    is_cuda = str(device).startswith("cuda") and torch.cuda.is_available()
    return "bfloat16" if is_cuda and computes_bfloat16(torch.device(device)) else "float32"


def can_compile(device: torch.device) -> bool:
    """True if torch.compile has its requirements: a C++ compiler on a CPU; on a GPU a C compiler, and Triton."""
    variable, *names = {"cpu": ("CXX", "g++", "clang++")}.get(device.type, ("CC", "gcc", "clang"))
    has_compiler = any(name and shutil.which(name) for name in (os.environ.get(variable), *names))
    return has_compiler and (device.type == "cpu" or importlib.util.find_spec("triton") is not None)


def widest_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums and temperatures on this device: float64, or float32 if it has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_widest(tensor: Tensor) -> Tensor:
    """The tensor in the widest dtype of its device."""
    return tensor.to(widest_dtype(tensor.device))


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if its device has none."""
    return (tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor).double()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, sent without synchronising; float64 becomes `widest_dtype`."""
    if tensor.dtype == torch.float64:
        tensor = tensor.to(widest_dtype(device))
    # GPU memory cannot be pinned.
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def beside(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor on the device of another one; see `send`."""
    return send(tensor, other.device)


def numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Python integers as int64 on the device, sent without synchronising."""
    return send(torch.tensor(values, dtype=torch.int64), device)


@functools.lru_cache(maxsize=256)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 numbers on the device, sent once: `torch.tensor(values, device=device)` would synchronise each time.

    All callers share the tensor, which must not be written to.
    """
    # An inference tensor could not be saved for a later backward pass.
    with torch.inference_mode(False):
        return numbers(values, device)


def is_asynchronous(device: torch.device) -> bool:
    """True if reading a number from the device synchronises, which is not so on a CPU."""
    return device.type != "cpu"


def where_rows(chosen_B: Tensor, values_of: Callable[[Any], Tensor], others_B: Tensor) -> Tensor:
    """`values_of(rows)` in the rows that are chosen, `others_B` elsewhere; each value is a function of its row alone.

    A CPU computes only the chosen rows. A GPU computes all rows, because finding the chosen ones would synchronise, and
    because a CUDA graph has one shape.
    """
    if is_asynchronous(chosen_B.device):
        return torch.where(chosen_B, values_of(slice(None)), others_B)
    rows = chosen_B.nonzero()[:, 0]
    return others_B.index_copy(0, rows, values_of(rows)) if len(rows) else others_B


def room(device: torch.device) -> float:
    """Bytes that can still be allocated on a GPU; infinity elsewhere."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def memory(device: torch.device) -> float:
    """Bytes of a GPU's memory in all; infinity elsewhere."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else math.inf


def empty_cache(device: torch.device) -> None:
    """Release the memory that torch caches on the device, if it caches any."""
    module = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random state of the CPU and of the device after the block."""
    others = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(others, device_type=device.type)
