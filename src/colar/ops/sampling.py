"""Choosing tokens for all rows at once: temperature, then nucleus (top-p), each row with its own values.

Conventions of transformers and vLLM: temperature divides the logits, top-p keeps the smallest set of most
probable tokens whose mass reaches p (always at least one), temperature 0 is argmax.

A draw inverts the CDF over ids in ascending order: it is the id in whose weight a number falls, when a row's weights
are laid end to end. Weights are float32, from 0 to 1. They are added up in blocks, and the blocks' sums in float64, so
that errors do not grow along the row.

    weights       3 0 1 | 0 0 2 | 1 1 0        total 8
    blocks        4       2       2
    u = 0.7       5.6 falls into the second block, 1.6 behind its beginning: its third token

A sort of the whole vocabulary would find the nucleus, but it is nearly always small enough for a window to hold it:

    weights, largest first    30  20  10  10 | 10   8   7 ...       window of 4, total 100
    mass before each           0  30  50  60
    p = 0.5                    *   *                                the window holds it
    p = 0.55                   *   *   *                            its last token equals one outside: not sure

On a CPU, only rows whose window might not hold the nucleus are sorted; on a GPU all rows are, because finding these
rows would synchronise. The nucleus is the same either way, a function of the row alone.

Shape suffixes: B rows, V vocabulary, N blocks of it, G tokens of a block, W tokens of the window, K likeliest tokens, X
some of the rows; blocks or tokens in `_find`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from colar.ops import devices

BLOCK = 256
"""Tokens whose weights are added up at a time."""
WINDOW = 64
"""Tokens of the window: a trained model's nucleus at p = 0.9 is smaller."""


class DrawModes(NamedTuple):
    """True for each mode in which at least one row of a batch chooses its token; Python branches on these."""

    greedy: bool
    plain: bool
    """Drawn, with a top-p of 1."""
    nucleus: bool
    """Drawn, with a top-p below 1."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> "DrawModes":
        """The modes of rows with these temperatures and top-ps."""
        met = {(temperature > 0, temperature > 0 and top_p < 1) for temperature, top_p in pairs}
        return cls((False, False) in met, (True, False) in met, (True, True) in met)

    @property
    def drawn(self) -> bool:
        """True if any row draws."""
        return self.plain or self.nucleus


@torch.no_grad()
def sample_tokens(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    uniform_B: Tensor,
    modes: DrawModes | None = None,
) -> Tensor:
    """(B,) int64 ids drawn by `uniform_B` in [0, 1); rows of temperature 0 take the argmax.

    A row's token is a function of the row alone. A token of probability 0, or outside the nucleus, is never drawn.
    `modes` must include those of these rows; if they are given, nothing synchronises.
    """
    if modes is None:
        temperatures, top_ps = torch.stack([temperature_B, top_p_B]).tolist()
        modes = DrawModes.of(zip(temperatures, top_ps, strict=True))
    if not modes.drawn:
        return logits_BV.argmax(-1)
    weights_BV = _weights(logits_BV, temperature_B)
    ids_B = torch.zeros(len(logits_BV), dtype=torch.int64, device=logits_BV.device)
    if modes.plain:
        ids_B = first_above(weights_BV, uniform_B)
    if modes.nucleus:
        ids_B = torch.where(top_p_B < 1, _from_nucleus(weights_BV, top_p_B, uniform_B), ids_B)
    if modes.greedy:
        ids_B = torch.where(temperature_B > 0, ids_B, logits_BV.argmax(-1))
    return ids_B


def probability(token_id: int, logits_BV: Tensor) -> Tensor:
    """(B,) float32: the probability of one token at temperature 1."""
    weights_BV = _weights(logits_BV, torch.ones_like(logits_BV[:, 0]))
    return (weights_BV[:, token_id] / mass(weights_BV)).float()


def token_logps(logits_BV: Tensor, temperature_B: Tensor, ids_B: Tensor) -> Tensor:
    """(B,) float32: log-probs of these ids at each row's temperature (at 1 where it is 0), before any top-p."""
    scale_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    total_B = mass(_weights(logits_BV, scale_B))
    # Not the logarithm of the weight, which may underflow to 0 while the log-probability is finite.
    mine_B = devices.to_widest(logits_BV.gather(1, ids_B[:, None])[:, 0])
    behind_B = mine_B - devices.to_widest(logits_BV.amax(-1))
    return (behind_B / scale_B - total_B.log()).float()


def unlikely_logps(
    logits_BV: Tensor, temperature_B: Tensor, least_B: Tensor, allowed_BV: Tensor | None = None
) -> Tensor:
    """(B,) float32: log-probability of drawing a token that is less likely than `least_B`, or not allowed; -inf where
    there is none. It is at each row's temperature (at 1 where it is 0), before any top-p.
    """
    scale_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    weights_BV = _weights(logits_BV, scale_B)
    total_B = mass(weights_BV)
    # Their own sum, and not 1 - the others' sum, so that it is exact even if it is nearly 0.
    outside_BV = weights_BV < (least_B * total_B).float()[:, None]
    if allowed_BV is not None:
        outside_BV = outside_BV | ~allowed_BV
    unlikely_BV = torch.where(outside_BV, weights_BV, 0)
    return (mass(unlikely_BV) / total_B).log().float()


def _weights(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Probabilities up to a factor, (B, V) float32: 1 for the likeliest token."""
    # A temperature that is 0 in float32 would give 0 / 0.
    least = torch.finfo(torch.float32).tiny
    behind_BV = logits_BV.float() - logits_BV.amax(-1, keepdim=True).float()
    return behind_BV.div_(temperature_B.float().clamp(min=least)[:, None]).exp_()


def _from_nucleus(weights_BV: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """`sample_tokens` of rows with a temperature above 0 and a top-p below 1."""
    goal_B = top_p_B * mass(weights_BV)
    ids_BW, nucleus_BW, holds_B = in_window(weights_BV, goal_B)
    # Window and vocabulary are both in the order of ids, so that a uniform number draws the same token from either.
    place_B = first_above(nucleus_BW, uniform_B)
    ids_B = ids_BW.gather(1, place_B[:, None])[:, 0]

    def from_all(at: Any) -> Tensor:
        return first_above(in_all(weights_BV[at], goal_B[at]), uniform_B[at])

    return devices.where_rows(~holds_B & (top_p_B < 1), from_all, ids_B)


# Weights: mass, inverse CDF, nucleus


def first_above(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """(B,) the first index whose cumulated weight exceeds `uniform_B` (in [0, 1)) times the row's total.

    An index of weight 0 is returned only if the row has no other.
    """
    blocks_BNG = _blocks(weights_BV)
    # First the block: `behind_B` is the number's distance from the block's beginning, as a share of the block's sum.
    sums_BN = devices.to_widest(blocks_BNG.sum(-1))
    block_B, behind_B = _find(sums_BN, uniform_B)
    row_B = torch.arange(len(block_B), device=block_B.device)
    place_B, _ = _find(devices.to_widest(blocks_BNG[row_B, block_B]), behind_B)
    index_B: Tensor = block_B * blocks_BNG.shape[2] + place_B
    return index_B


def _find(weights_BX: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF over a few weights, float64: the index (B,), and the number's place in its weight, (B,) in [0, 1]."""
    cdf_BX = weights_BX.cumsum(-1)
    # Below the end even after rounding: then some weight ends behind it, and the first to do so is above 0.
    end_B1 = torch.nextafter(cdf_BX[:, -1:], torch.zeros_like(cdf_BX[:, -1:]))
    at_B1 = torch.minimum(devices.to_widest(uniform_B)[:, None] * cdf_BX[:, -1:], end_B1)
    # The clamp is for a row of NaN, which has no such index.
    index_B1 = torch.searchsorted(cdf_BX, at_B1, right=True).clamp(max=weights_BX.shape[1] - 1)
    weight_B1 = weights_BX.gather(1, index_B1)
    behind_B1 = at_B1 - (cdf_BX.gather(1, index_B1) - weight_B1)
    return index_B1[:, 0], (behind_B1 / weight_B1).clamp(0, 1)[:, 0]


def mass(weights_BV: Tensor) -> Tensor:
    """The sum of each row's weights, (B,) float64, taken in one fixed order."""
    return devices.to_widest(_blocks(weights_BV).sum(-1)).sum(-1)


def _blocks(weights_BV: Tensor) -> Tensor:
    """The weights in blocks of neighbours, (B, N, G), padded with zeros; a vocabulary smaller than a block is one."""
    V = weights_BV.shape[1]
    size = min(BLOCK, V)
    missing = -V % size
    # Copied only if the vocabulary is no multiple of the size.
    padded = nn.functional.pad(weights_BV, (0, missing)) if missing else weights_BV
    return padded.view(len(weights_BV), -1, size)


def in_window(weights_BV: Tensor, goal_B: Tensor, window: int = WINDOW) -> tuple[Tensor, Tensor, Tensor]:
    """The nucleus whose mass reaches `goal_B` among the likeliest tokens of each row.

    Returns their ids in ascending order (B, W), their weights (B, W) float64, 0 outside the nucleus, and (B,) bool:
    True if the window holds all of the nucleus. Where it is False, the row's weights are meaningless.
    """
    likeliest = weights_BV.topk(min(window, weights_BV.shape[1]), sorted=False)
    ids_BW, order_BW = likeliest.indices.sort(-1)
    values_BW = devices.to_widest(likeliest.values.gather(1, order_BW))
    # The window holds all tokens likelier than its least likely one. Of those equal to that, some may be outside.
    sure_BW = values_BW > values_BW.amin(-1, keepdim=True)
    holds_B = torch.where(sure_BW, values_BW, 0).sum(-1) >= goal_B
    if ids_BW.shape[1] >= weights_BV.shape[1]:
        holds_B = torch.ones_like(holds_B)

    # The mass before a token: of all likelier tokens, and of its equals with smaller ids.
    mine_BW1, other_B1W = values_BW[:, :, None], values_BW[:, None, :]
    place_W = torch.arange(ids_BW.shape[1], device=ids_BW.device)
    is_before_BWW = (other_B1W > mine_BW1) | ((other_B1W == mine_BW1) & (place_W < place_W[:, None]))
    before_BW = torch.where(is_before_BWW, other_B1W, 0).sum(-1)
    return ids_BW, torch.where(before_BW < goal_B[:, None], values_BW, 0), holds_B


def in_all(weights_BV: Tensor, goal_B: Tensor) -> Tensor:
    """The nucleus whose mass reaches `goal_B`, searched in the whole vocabulary: weights (B, V), 0 outside it."""
    # A stable sort, so that of equals those with the smaller ids come first.
    sorted_BV, ids_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    wide_BV = devices.to_widest(sorted_BV)
    before_BV = wide_BV.cumsum(-1) - wide_BV
    nucleus_BV = torch.where(before_BV < goal_B[:, None], sorted_BV, 0)
    return torch.zeros_like(weights_BV).scatter(1, ids_BV, nucleus_BV)
