"""Counter-based random numbers: a draw is a function of (seed, sample, step, stream, index) and of nothing else.

There is no generator state to share, so a request gets the same draws whoever its batch mates are, in
whatever order rows run, after a resume, and on every device. Each counter goes through the finaliser of
SplitMix64 (Steele, Lea and Flood 2014), in int64 arithmetic that wraps the same way everywhere.

Shape suffixes: B rows, N draws a row.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)

# Streams keep the draws of one step apart.
TOKEN, LATENT, LABEL, SNAP = 1, 2, 3, 4


def seed_from(*parts: object) -> int:
    """A 63-bit seed from any printable parts, the same on every machine (`hash()` is salted, this is not)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def keys(seed_B: Tensor, *counters: Tensor | int) -> Tensor:
    """Fold counters (sample, step, stream ...) into int64 seeds, (B,)."""
    key_B = _mix(seed_B.long() + GOLDEN)
    for counter in counters:
        key_B = _mix(key_B ^ _mix(torch.as_tensor(counter, device=key_B.device).long() + GOLDEN))
    return key_B


def uniform(key_B: Tensor, n: int) -> Tensor:
    """(B, n) float64 in [0, 1), 53 bits each."""
    index_N = torch.arange(1, n + 1, device=key_B.device, dtype=torch.int64)
    return _shift(_mix(key_B[:, None] + index_N * GOLDEN), 11).double() * 2.0**-53


def normal(key_B: Tensor, n: int) -> Tensor:
    """(B, n) float32 standard normals by Box-Muller."""
    half = (n + 1) // 2
    uniform_BN = uniform(key_B, 2 * half)
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform_BN[:, :half]))
    angle = 2.0 * math.pi * uniform_BN[:, half:]
    both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)
    return both[:, :n].float()


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)
