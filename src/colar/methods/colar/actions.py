"""CoLaR's thoughts as actions: going on, and where the latent was drawn, its density.

With p the LM head's softmax at the row's temperature, and mu, sigma of the latent head:

    log(1 - p[###]) + log N(l / sigma_e; mu, (latent_temperature * sigma)^2)

The density is a mean over the D dimensions (`latent_logprob: mean`, of the size of a token's log-prob) or their sum
(the true one). It is left out where latents are not drawn: a deterministic head, latent_temperature 0.

Shape suffixes: B rows, K steps of one request, L thoughts of all rows, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from colar.methods.colar.heads import gaussian_logps
from colar.methods.rollouts import LatentLogprob


def go_on_logps(logits_LV: Tensor, temperature_L: Tensor, separator_id: int) -> Tensor:
    """log(1 - p[###]) of each thought, (L,)."""
    scaled_LV = logits_LV / temperature_L[:, None]
    # As the mass of all other tokens, without the 1 - p: exact where stopping is nearly certain, too.
    separator = torch.tensor([separator_id], device=logits_LV.device)
    others_LV = scaled_LV.index_fill(1, separator, -math.inf)
    return others_LV.logsumexp(-1) - scaled_LV.logsumexp(-1)


def density(latents_LD: Tensor, mean_LD: Tensor, spread_LD: Tensor, latent_logprob: LatentLogprob) -> Tensor:
    """Log-density of each latent, (L,), all in units of sigma_e."""
    density_LD = gaussian_logps(latents_LD, mean_LD, spread_LD)
    return density_LD.mean(-1) if latent_logprob == "mean" else density_LD.sum(-1)


def entropy(spread_LD: Tensor) -> Tensor:
    """The Gaussian's entropy per dimension (in units of sigma_e), mean over the dimensions, (L,)."""
    # A spread of 0 is latent_temperature 0; the caller has nan in place of such rows.
    log_spread_LD = spread_LD.clamp(min=1e-30).log()
    return (log_spread_LD + 0.5 * math.log(2 * math.pi * math.e)).mean(-1)


def sampled_logps(info: Mapping[str, Tensor], stopped: Tensor, latent_logprob: LatentLogprob) -> Tensor:
    """Log-probs of what `think` chose at the steps of one request, (K,), from what it said of them."""
    stop_K = info["stop_logp"]
    # `latent_logp` is the mean over the dimensions: the sum is that many times as large.
    dimensions = info["mu"].shape[-1] if latent_logprob == "sum" else 1
    # log(1 - p[###]) from log p[###]: `expm1` keeps the digits that 1 - exp would lose where p is nearly 1.
    thought_K = torch.log(-torch.expm1(stop_K)) + dimensions * info["latent_logp"]
    return torch.where(stopped, stop_K, thought_K)
