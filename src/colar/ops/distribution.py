"""Rows of token weights as distributions: their mass, their inverse CDF, their nucleus.

Weights are float32, from 0 to 1. They are added up in blocks, and the blocks' sums in float64: errors do not grow along
the row. The inverse CDF is where a number falls when a row's weights are laid end to end:

    weights       3 0 1 | 0 0 2 | 1 1 0        total 8
    blocks        4       2       2
    u = 0.7       5.6 falls into the second block, 1.6 behind its beginning: its third token

The nucleus is the smallest set of likeliest tokens whose mass reaches p, at least one, equals by their ids. A sort of
the whole vocabulary would find it. Nearly always it is small, though, and a window holds it:

    weights, largest first    30  20  10  10 | 10   8   7 ...       window of 4, total 100
    mass before each           0  30  50  60
    p = 0.5                    *   *                                the window holds it
    p = 0.55                   *   *   *                            its last token equals one outside: not sure

A row whose window might not hold it has all of its weights sorted, for the smallest of those that stay. Either way the
nucleus is the same, and a function of the row alone.

Shape suffixes: B rows, V vocabulary, N blocks or groups of it, G tokens of one, W tokens of the window, X blocks or
tokens.
"""

from __future__ import annotations

import numpy as np
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


WINDOW = 64
"""Tokens of the window: a trained model's nucleus at p = 0.9 is smaller."""
GROUP = 32
"""Tokens of which only the likeliest is compared when the window is filled."""


def in_window(weights_BV: Tensor, goal_B: Tensor, window: int = WINDOW) -> tuple[Tensor, Tensor, Tensor]:
    """The nucleus whose mass reaches `goal_B` among the likeliest tokens of each row.

    Returns their ids in ascending order (B, W), their weights (B, W) float64, 0 outside the nucleus, and whether the
    window holds all of the nucleus, (B,) bool. Where it does not, the row's weights mean nothing.
    """
    ids_BW, values_BW = _likeliest(weights_BV, window)
    # All tokens that are likelier than the window's last are in it. Of those equal to the last some may be outside.
    sure_BW = values_BW > values_BW.amin(-1, keepdim=True)
    holds_B = torch.where(sure_BW, values_BW, 0).sum(-1) >= goal_B
    if ids_BW.shape[1] >= weights_BV.shape[1]:
        holds_B = torch.ones_like(holds_B)

    # The mass before a token: of those that are likelier, and of its equals with smaller ids.
    mine_BW1, other_B1W = values_BW[:, :, None], values_BW[:, None, :]
    place_W = torch.arange(ids_BW.shape[1], device=ids_BW.device)
    is_before_BWW = (other_B1W > mine_BW1) | ((other_B1W == mine_BW1) & (place_W < place_W[:, None]))
    before_BW = torch.where(is_before_BWW, other_B1W, 0).sum(-1)
    return ids_BW, torch.where(before_BW < goal_B[:, None], values_BW, 0), holds_B


def _likeliest(weights_BV: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The tokens of the largest weights: ids in ascending order (B, W), and weights (B, W) float64.

    No token outside has a larger weight than one inside. Ids from V on are padding, and weigh nothing.
    """
    # The W largest weights lie in the W groups with the largest weights: few of all tokens are compared.
    groups_BNG = split(weights_BV, GROUP)
    n, size = groups_BNG.shape[1:]
    group_BW = groups_BNG.amax(-1).topk(min(window, n), sorted=False).indices
    row_B1 = torch.arange(len(weights_BV), device=weights_BV.device)[:, None]
    candidates = groups_BNG[row_B1, group_BW].flatten(1)
    place = torch.arange(size, device=weights_BV.device)
    candidate_ids = (group_BW[..., None] * size + place).flatten(1)

    found = candidates.topk(min(window, candidates.shape[1]), sorted=False)
    ids_BW, order_BW = candidate_ids.gather(1, found.indices).sort(-1)
    return ids_BW, devices.wide(found.values.gather(1, order_BW))


def kept_mass(weights_BV: Tensor, goal_B: Tensor) -> Tensor:
    """The mass of the nucleus whose mass reaches `goal_B`, (B,) float64."""
    _, kept_BW, holds_B = in_window(weights_BV, goal_B)
    mass_B = kept_BW.sum(-1)
    at = (~holds_B).nonzero()[:, 0]
    if len(at):
        mass_B[at] = mass(in_all(weights_BV[at], goal_B[at]))
    return mass_B


def in_all(weights_BV: Tensor, goal_B: Tensor) -> Tensor:
    """The nucleus whose mass reaches `goal_B`, searched in the whole vocabulary: weights (B, V), 0 outside it."""
    smallest_B1 = _smallest_kept(weights_BV, goal_B)
    likelier_BV = above(weights_BV, smallest_B1)
    # Of the equals at the edge as many as are needed, by their ids. Bools as numbers here too.
    missing_B1 = goal_B[:, None] - mass(likelier_BV)[:, None]
    needed_B1 = torch.ceil(missing_B1 / devices.wide(smallest_B1)).clamp(min=1).float()
    equal_BV = equal(weights_BV, smallest_B1)
    rank_BV = equal_BV.cumsum(-1)
    needed_BV = torch.le(rank_BV, needed_B1, out=rank_BV)
    return likelier_BV.add_(equal_BV.mul_(needed_BV).mul_(smallest_B1))


def above(weights_BV: Tensor, edge_B1: Tensor) -> Tensor:
    """The weights that are larger than the row's edge, 0 in the place of the others, (B, V)."""
    # A comparison written as numbers, and a product: on a CPU ten times as fast as a choice by bools.
    larger_BV = torch.gt(weights_BV, edge_B1, out=torch.empty_like(weights_BV))
    return larger_BV.mul_(weights_BV)


def equal(weights_BV: Tensor, edge_B1: Tensor) -> Tensor:
    """1 where a weight is the row's edge, 0 elsewhere, (B, V)."""
    return torch.eq(weights_BV, edge_B1, out=torch.empty_like(weights_BV))


def _smallest_kept(weights_BV: Tensor, goal_B: Tensor) -> Tensor:
    """The smallest weight that stays, (B, 1)."""
    # From below, tokens are left out while their mass is not more than what the goal can do without.
    ascending_BV = _ascending(weights_BV)
    index_B = first_above(ascending_BV, 1 - goal_B / mass(weights_BV))
    return ascending_BV.gather(1, index_B[:, None])


def _ascending(weights_BV: Tensor) -> Tensor:
    """Each row's weights, sorted."""
    if weights_BV.device.type != "cpu":
        return weights_BV.sort(-1).values
    # numpy sorts with the processor's vector instructions, a hundred times as fast as torch does on a CPU.
    return torch.from_numpy(np.sort(weights_BV.numpy(), axis=-1))
