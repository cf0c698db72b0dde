"""The nucleus: the smallest set of likeliest tokens whose mass reaches p, at least one, equals by their ids.

A sort of the whole vocabulary would find it. Nearly always it is small, though, and a window holds it:

    weights, largest first    30  20  10  10 | 10   8   7 ...       window of 4, total 100
    mass before each           0  30  50  60
    p = 0.5                    *   *                                the window holds it
    p = 0.55                   *   *   *                            its last token equals one outside: not sure

A row whose window might not hold it has all of its weights sorted, for the smallest of those that stay. Either way the
nucleus is the same, and a function of the row alone.

Shape suffixes: B rows, V vocabulary, N groups of it, G tokens of a group, W tokens of the window.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from colar.ops import cdf, devices

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
    groups_BNG = cdf.split(weights_BV, GROUP)
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
        mass_B[at] = cdf.mass(in_all(weights_BV[at], goal_B[at]))
    return mass_B


def in_all(weights_BV: Tensor, goal_B: Tensor) -> Tensor:
    """The nucleus whose mass reaches `goal_B`, searched in the whole vocabulary: weights (B, V), 0 outside it."""
    smallest_B1 = _smallest_kept(weights_BV, goal_B)
    likelier_BV = above(weights_BV, smallest_B1)
    # Of the equals at the edge as many as are needed, by their ids. Bools as numbers here too.
    missing_B1 = goal_B[:, None] - cdf.mass(likelier_BV)[:, None]
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
    index_B = cdf.first_above(ascending_BV, 1 - goal_B / cdf.mass(weights_BV))
    return ascending_BV.gather(1, index_B[:, None])


def _ascending(weights_BV: Tensor) -> Tensor:
    """Each row's weights, sorted."""
    if weights_BV.device.type != "cpu":
        return weights_BV.sort(-1).values
    # numpy sorts with the processor's vector instructions, a hundred times as fast as torch does on a CPU.
    return torch.from_numpy(np.sort(weights_BV.numpy(), axis=-1))
