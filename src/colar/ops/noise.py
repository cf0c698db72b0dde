"""Counter-based random numbers: a draw is a function of (seed, sample, step, stream, index) and of nothing else.

There is no generator state to share: a request gets the same draws with any batch mates, in any order in which rows
run, after a resume, and on every device (Apple's mps has them rounded to float32). Each counter goes through the
finaliser of SplitMix64 (Steele, Lea and Flood 2014), in int64 arithmetic that wraps the same way everywhere.

Shape suffixes: B rows, N draws a row.
"""

import functools
import hashlib
import math

import torch
from torch import Tensor

from colar.ops import devices

# SplitMix64's constants are unsigned 64-bit numbers; torch has no such type, so each is written as the int64 with
# the same bits. Sums, products and xors of these agree with the unsigned ones modulo 2^64.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)

# Streams separate the draws of one step. 1 to 8 are taken (4, 5 and 8 by earlier results): a new stream takes 9.
TOKEN = 1
LATENT = 2
LABEL = 3
GROUP = 6
PHASE = 7


def seed_from(*parts: object) -> int:
    """A 63-bit seed from any printable parts, the same on every machine (`hash()` is salted, this is not)."""
    # Joined by a character that parts do not use, so that ("a", "b") and ("ab",) are different texts.
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # One bit less than 64, so that the seed fits an int64 column without a sign.
    return int.from_bytes(digest, "big") >> 1


def keys(seed_B: Tensor, *counters: Tensor | int) -> Tensor:
    """Fold counters (sample, step, stream ...) into int64 seeds, (B,)."""
    key_B = _mix(seed_B.long() + GOLDEN)
    for counter in counters:
        # Each counter is mixed by itself first, so that neighbouring counters do not make neighbouring keys. A Python
        # integer is mixed on the CPU, because sending it would synchronise with a GPU.
        if isinstance(counter, Tensor):
            key_B = _mix(key_B ^ _mix(counter.long() + GOLDEN))
        else:
            key_B = _mix(key_B ^ _mixed(counter))
    return key_B


@functools.cache
def _mixed(counter: int) -> int:
    return int(_mix(torch.tensor(counter) + GOLDEN))


def uniform(key_B: Tensor, n: int) -> Tensor:
    """(B, n) float64 in [0, 1), 53 bits each; float32 on a device without float64, made on the CPU."""
    if key_B.device.type in devices.WITHOUT_FLOAT64:
        # Rounding to float32 could turn the largest values into 1.
        drawn_BN = _uniform(key_B.cpu(), n).float().clamp(max=1 - 2.0**-24)
        return drawn_BN.to(key_B.device)
    return _uniform(key_B, n)


def _uniform(key_B: Tensor, n: int) -> Tensor:
    # SplitMix64 itself: draw i is the mix of the state after i steps, and a step adds GOLDEN.
    index_N = torch.arange(1, n + 1, device=key_B.device, dtype=torch.int64)
    bits_BN = _mix(key_B[:, None] + index_N * GOLDEN)
    # The upper 53 bits fill a float64's mantissa exactly.
    return _shift(bits_BN, 11).double() * 2.0**-53


def normal(key_B: Tensor, n: int) -> Tensor:
    """(B, n) float32 standard normals by Box-Muller, made on the CPU where the device has no float64."""
    if key_B.device.type in devices.WITHOUT_FLOAT64:
        return _normal(key_B.cpu(), n).to(key_B.device)
    return _normal(key_B, n)


def _normal(key_B: Tensor, n: int) -> Tensor:
    # Two uniforms make two normals, so an odd n draws one more and drops it.
    half = (n + 1) // 2
    uniform_BN = _uniform(key_B, 2 * half)
    # log(1 - u) where the textbook has log(u): u may be 0 and is never 1.
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform_BN[:, :half]))
    angle = 2.0 * math.pi * uniform_BN[:, half:]
    both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)
    return both[:, :n].float()


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every bit of the input changes about half of the output's."""
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)
