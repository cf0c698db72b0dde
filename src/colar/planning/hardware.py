"""Cards, by the numbers of their makers, and what of these a training run gets.

Peak numbers are of dense bfloat16 products. The shares below are assumptions: `colar train RECIPE --check` measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from colar.checks import check_choice, check_number

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One card."""

    name: str
    memory_gib: float
    teraflops: float
    """Dense bfloat16, at the peak."""
    memory_gb_per_s: float
    link_gb_per_s: float
    """To the other cards of its node, one way."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 79.2, 312, 2039, 300),
        Gpu("a100-40gb", 39.4, 312, 1555, 300),
        Gpu("h100", 79.2, 989, 3350, 450),
        Gpu("h200", 139.8, 989, 4800, 450),
        Gpu("b200", 179.1, 2250, 8000, 900),
        Gpu("l40s", 44.5, 362, 864, 32),
        Gpu("rtx4090", 23.6, 165, 1008, 32),
    )
}
PER_NODE = 8
"""Cards that the fast link joins."""
NETWORK_GB_PER_S = 50.0
"""Between nodes, for each card: 400 Gbit/s."""
USABLE = 0.92
"""Share of the memory that tensors get: the rest is CUDA's, the allocator's gaps and libraries' workspaces."""
TRAINING_SHARE = 0.35
"""Of the peak products a second, in training."""
READING_SHARE = 0.6
"""Of the memory's bandwidth, in decoding."""
LAYER_SECONDS = 4e-4
"""Of a decode step, for each layer: kernels are launched one by one."""


def find(name: str, count: int) -> Gpu:
    """The card of that name. ValueError for one that is not known, or for a wrong number of them."""
    check_choice("--gpu", name, sorted(GPUS))
    check_number("--count", count, 1, whole=True)
    return GPUS[name]


def all_reduce_seconds(gpu: Gpu, count: int, size: float) -> float:
    """A ring's all-reduce of `size` bytes: each card sends and receives 2 (n - 1) / n of them."""
    if count == 1:
        return 0.0
    # All cards of a ring send at once: its slowest link sets the pace.
    slowest = gpu.link_gb_per_s if count <= PER_NODE else min(gpu.link_gb_per_s, NETWORK_GB_PER_S)
    return 2 * (count - 1) / count * size / (slowest * 1e9)
