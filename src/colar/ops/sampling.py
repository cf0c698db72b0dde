"""Choosing tokens for all rows at once: temperature, then nucleus (top-p), each row with its own values.

Conventions of transformers and vLLM: temperature divides the logits, top-p keeps the smallest set of most
probable tokens whose mass reaches p (always at least one), temperature 0 is argmax.

A draw is the inverse CDF over ids in ascending order (`distribution.py`). Nothing is sorted for it, unless a nucleus is
too large for its window.

Shape suffixes: B rows, V vocabulary, N blocks of it, W tokens of a block, K likeliest ones, X some of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from colar.ops import devices, distribution

BLOCK = 256
"""Tokens that `likeliest` compares at a time."""


Known = tuple[Tensor, Tensor]
"""Temperature and top_p on the CPU, (B,) each."""


@torch.no_grad()
def sample_tokens(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    uniform_B: Tensor,
    known: Known | None = None,
) -> Tensor:
    """(B,) int64 ids drawn by `uniform_B` in [0, 1); rows of temperature 0 take the argmax.

    A row's token is a function of the row alone. One of probability 0, or outside the nucleus, is never drawn. With
    `known` the device is not looked at, unless rows have a top-p below 1.
    """
    known_temperature_B, known_top_p_B = (temperature_B, top_p_B) if known is None else known
    drawn_B = known_temperature_B > 0
    cut_B = drawn_B & (known_top_p_B < 1)
    ways: tuple[tuple[Tensor, Callable[..., Tensor]], ...] = (
        (~drawn_B, lambda logits_XV, *_: likeliest(logits_XV)),
        (drawn_B & ~cut_B, _drawn),
        (cut_B, _drawn_from_nucleus),
    )
    # One look at the columns, which is free where they are on the CPU.
    counts = torch.stack([rows_B.sum() for rows_B, _ in ways]).tolist()
    ids_B = torch.zeros(len(logits_BV), dtype=torch.int64, device=logits_BV.device)
    for (rows_B, choose), count in zip(ways, counts, strict=True):
        if count == len(logits_BV):
            return choose(logits_BV, temperature_B, uniform_B, top_p_B)
        if count:
            at = devices.send(rows_B.nonzero()[:, 0], logits_BV.device)
            ids_B[at] = choose(logits_BV[at], temperature_B[at], uniform_B[at], top_p_B[at])
    return ids_B


def likeliest(logits_BV: Tensor) -> Tensor:
    """(B,) the first of the largest logits' indices, as `argmax` gives them, in a fifth of its time on a CPU."""
    # argmax looks at one number after another; the largest of each block is found many at a time.
    n = logits_BV.shape[1] // BLOCK
    if n < 2:
        return logits_BV.argmax(-1)
    blocks_BNW = logits_BV[:, : n * BLOCK].view(-1, n, BLOCK)
    largest_BN = blocks_BNW.amax(-1)
    block_B = largest_BN.argmax(-1)
    row_B = torch.arange(len(block_B), device=block_B.device)
    index_B: Tensor = block_B * BLOCK + blocks_BNW[row_B, block_B].argmax(-1)

    # Behind the last whole block: only a larger one comes before what was found.
    rest_BV = logits_BV[:, n * BLOCK :]
    if rest_BV.shape[1] == 0:
        return index_B
    rest = rest_BV.max(-1)
    return torch.where(rest.values > largest_BN.amax(-1), n * BLOCK + rest.indices, index_B)


@torch.no_grad()
def is_drawn(
    token_id: int,
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    uniform_B: Tensor,
    known: Known | None = None,
) -> Tensor:
    """(B,) bool: whether this one token is drawn, at temperatures above 0, where it does not matter which other is.

    As probable as `sample_tokens` draws it, by other uniform numbers. All that it takes is the token's probability.
    """
    weights_BV = _weights(logits_BV, temperature_B)
    total_B = distribution.mass(weights_BV)
    mine_B = devices.wide(weights_BV[:, token_id])
    drawn_B = uniform_B * total_B < mine_B
    if known is not None and bool((known[1] >= 1).all()):
        return drawn_B
    # Below a top-p of 1 the total is the nucleus's mass, which is no less than its goal: most rows are decided by that.
    cut_B = top_p_B < 1
    goal_B = top_p_B * total_B
    at = (cut_B & (uniform_B * goal_B < mine_B)).nonzero()[:, 0]
    drawn_B &= ~cut_B
    if len(at):
        weights_XV, goal_X, mine_X = weights_BV[at], goal_B[at], mine_B[at]
        edge_X1 = weights_XV[:, token_id, None]
        equals_X = distribution.equal(weights_XV[:, :token_id], edge_X1).sum(-1)
        before_X = distribution.mass(distribution.above(weights_XV, edge_X1)) + mine_X * equals_X
        kept_X = distribution.kept_mass(weights_XV, goal_X)
        drawn_B[at] = (before_X < goal_X) & (uniform_B[at] * kept_X < mine_X)
    return drawn_B


def probability(token_id: int, logits_BV: Tensor) -> Tensor:
    """(B,) float32: the probability of one token at temperature 1."""
    weights_BV = _weights(logits_BV, torch.ones_like(logits_BV[:, 0]))
    return (weights_BV[:, token_id] / distribution.mass(weights_BV)).float()


def token_logps(logits_BV: Tensor, temperature_B: Tensor, ids_B: Tensor) -> Tensor:
    """(B,) float32: log-probabilities of these ids at each row's temperature, before any top-p.

    At temperature 0, where there is nothing to draw, those of temperature 1.
    """
    return _logps(logits_BV, temperature_B, ids_B[:, None])[:, 0]


def unlikely_logps(
    logits_BV: Tensor, temperature_B: Tensor, least_B: Tensor, allowed_BV: Tensor | None = None
) -> Tensor:
    """(B,) float32: log-probability that a token is drawn which is less likely than `least`, or not allowed; -inf where
    there is none.

    At each row's temperature, before any top-p; at temperature 0 as at 1.
    """
    scale_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    weights_BV = _weights(logits_BV, scale_B)
    total_B = distribution.mass(weights_BV)
    # By their own sum, not as 1 - the others': exact where hardly anything is left.
    outside_BV = weights_BV < (least_B * total_B).float()[:, None]
    if allowed_BV is not None:
        outside_BV = outside_BV | ~allowed_BV
    unlikely_BV = torch.where(outside_BV, weights_BV, 0)
    return (distribution.mass(unlikely_BV) / total_B).log().float()


def top_logps(logits_BV: Tensor, temperature_B: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` likeliest ids, likeliest first, and their log-probabilities as `token_logps` has them, (B, K) each.

    All of the vocabulary where that is smaller.
    """
    ids_BK = logits_BV.topk(min(k, logits_BV.shape[1])).indices
    return ids_BK, _logps(logits_BV, temperature_B, ids_BK)


def _logps(logits_BV: Tensor, temperature_B: Tensor, ids_BK: Tensor) -> Tensor:
    scale_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    total_B = distribution.mass(_weights(logits_BV, scale_B))
    # Not the logarithm of the weight, which may be 0 where the log-probability is a number.
    mine_BK = devices.wide(logits_BV.gather(1, ids_BK))
    behind_BK = mine_BK - devices.wide(logits_BV.amax(-1, keepdim=True))
    return (behind_BK / scale_B[:, None] - total_B.log()[:, None]).float()


def _weights(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Probabilities but for a factor, (B, V) float32: 1 for the likeliest token."""
    # A temperature that is 0 in float32 would make 0 / 0.
    least = torch.finfo(torch.float32).tiny
    behind_BV = logits_BV.float() - logits_BV.amax(-1, keepdim=True).float()
    return behind_BV.div_(temperature_B.float().clamp(min=least)[:, None]).exp_()


def _drawn(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor, top_p_B: Tensor) -> Tensor:
    """`sample_tokens` of rows with a temperature above 0 and a top-p of 1."""
    return distribution.first_above(_weights(logits_BV, temperature_B), uniform_B)


def _drawn_from_nucleus(
    logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor, top_p_B: Tensor
) -> Tensor:
    """`sample_tokens` of rows with a temperature above 0 and a top-p below 1."""
    weights_BV = _weights(logits_BV, temperature_B)
    goal_B = top_p_B * distribution.mass(weights_BV)
    ids_BW, kept_BW, holds_B = distribution.in_window(weights_BV, goal_B)
    # Both in the order of the ids: a uniform number draws the same token either way.
    place_B = distribution.first_above(kept_BW, uniform_B)
    ids_B = ids_BW.gather(1, place_B[:, None])[:, 0]
    at = (~holds_B).nonzero()[:, 0]
    if len(at):
        kept_XV = distribution.in_all(weights_BV[at], goal_B[at])
        ids_B[at] = distribution.first_above(kept_XV, uniform_B[at])
    return ids_B
