"""Choosing tokens for all rows at once: temperature, then nucleus (top-p), each row with its own values.

Conventions of transformers and vLLM: temperature divides the logits, top-p keeps the smallest set of most
probable tokens whose mass reaches p (always at least one), temperature 0 is argmax.

Shape suffixes: B rows, V vocabulary, N blocks of it, W tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Tokens that `likeliest` compares at a time."""


def sample_tokens(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """(B,) int64 ids by inverse CDF from `uniform_B` in [0, 1); rows of temperature 0 take the argmax."""
    greedy_B = temperature_B == 0
    # The sort below is the slow part: rows that are greedy have none of it.
    if bool(greedy_B.all()):
        return likeliest(logits_BV)
    if not bool(greedy_B.any()):
        return _drawn(logits_BV, temperature_B, top_p_B, uniform_B)
    ids_B = likeliest(logits_BV)
    at = (~greedy_B).nonzero()[:, 0]
    ids_B[at] = _drawn(logits_BV[at], temperature_B[at], top_p_B[at], uniform_B[at])
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


def _drawn(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """`sample_tokens` of rows with a temperature above 0."""
    probs_BV = (logits_BV.float() / temperature_B[:, None]).softmax(-1)
    sorted_BV, order_BV = torch.sort(probs_BV, dim=-1, descending=True, stable=True)

    # A token stays while the mass before it is less than p: the one that crosses p is the last to stay.
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    kept_BV = torch.where(before_BV < top_p_B[:, None], sorted_BV, 0)
    kept_BV[:, 0] = sorted_BV[:, 0]  # at least one, whatever p is

    # The CDF ends at the kept mass, not at 1: scaling the uniform instead saves a division of all of it.
    cdf_BV = kept_BV.double().cumsum(-1)
    threshold_B1 = uniform_B.double()[:, None] * cdf_BV[:, -1:]
    # The first index whose CDF exceeds the threshold; a zero-probability token is never it.
    rank_B1 = torch.searchsorted(cdf_BV, threshold_B1, right=True).clamp(max=logits_BV.shape[1] - 1)
    return order_BV.gather(1, rank_B1)[:, 0]


def token_logps(logits_BV: Tensor, temperature_B: Tensor, ids_B: Tensor) -> Tensor:
    """(B,) float32: log-probabilities of these ids at each row's temperature, before any top-p.

    At temperature 0, where there is nothing to draw, those of temperature 1.
    """
    scale_B1 = torch.where(temperature_B == 0, 1.0, temperature_B)[:, None]
    scaled_BV = logits_BV.float() / scale_B1.float()
    chosen_B = scaled_BV.gather(-1, ids_B[:, None])[:, 0]
    return chosen_B - scaled_BV.logsumexp(-1)
