"""Inverse CDF over rows of weights: where a number falls when a row's weights are laid end to end.

Weights are float32, from 0 to 1. They are added up in blocks, and the blocks' sums in float64: errors do not grow along
the row.

    weights       3 0 1 | 0 0 2 | 1 1 0        total 8
    blocks        4       2       2
    u = 0.7       5.6 falls into the second block, 1.6 behind its beginning: its third token

Shape suffixes: B rows, V vocabulary, N blocks of it, G tokens of a block, X blocks or tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colar.ops import devices

BLOCK = 256
"""Tokens that are added up at a time."""


def first_above(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """(B,) the first index whose cumulated weight exceeds `uniform_B` (in [0, 1)) times the row's total.

    Never one of weight 0, while the row has another.
    """
    blocks_BNG = split(weights_BV, BLOCK)
    # First the block: `behind` is how far behind its beginning the number lies, as a share of the block's sum.
    sums_BN = devices.wide(blocks_BNG.sum(-1))
    block_B, behind_B = _find(sums_BN, uniform_B)
    row_B = torch.arange(len(block_B), device=block_B.device)
    place_B, _ = _find(devices.wide(blocks_BNG[row_B, block_B]), behind_B)
    index_B: Tensor = block_B * blocks_BNG.shape[2] + place_B
    return index_B


def _find(weights_BX: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF over a few weights, float64: the index (B,), and where in it the number fell, (B,) in [0, 1]."""
    cdf_BX = weights_BX.cumsum(-1)
    # Below the end, also by rounding: some weight above 0 then ends behind it, and none of 0 is the first to.
    end_B1 = torch.nextafter(cdf_BX[:, -1:], torch.zeros_like(cdf_BX[:, -1:]))
    at_B1 = torch.minimum(devices.wide(uniform_B)[:, None] * cdf_BX[:, -1:], end_B1)
    # The clamp is for a row of NaN, which has no such index.
    index_B1 = torch.searchsorted(cdf_BX, at_B1, right=True).clamp(max=weights_BX.shape[1] - 1)
    found_B1 = weights_BX.gather(1, index_B1)
    behind_B1 = at_B1 - (cdf_BX.gather(1, index_B1) - found_B1)
    return index_B1[:, 0], (behind_B1 / found_B1).clamp(0, 1)[:, 0]


def mass(weights_BV: Tensor) -> Tensor:
    """The sum of each row's weights, (B,) float64, taken in one fixed order."""
    return devices.wide(split(weights_BV, BLOCK).sum(-1)).sum(-1)


def split(weights_BV: Tensor, size: int) -> Tensor:
    """The weights in blocks of neighbours, (B, N, G), with zeros behind the last; G is `size`, or V if that is less."""
    V = weights_BV.shape[1]
    size = min(size, V)
    missing = -V % size
    # A copy only where the vocabulary is no multiple of the size.
    padded = nn.functional.pad(weights_BV, (0, missing)) if missing else weights_BV
    return padded.view(len(weights_BV), -1, size)
