"""The latent head: a Gaussian over the next latent, the losses that train it, and its log-density (section 3.2).

Everything is in units of sigma_e, the standard deviation of the backbone's embeddings.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

Body = Literal["gelu", "norm"]

LOG_STD_RANGE = (-7.0, 2.0)
"""Clamp of log sigma (targets have unit scale): unclamped, the NLL blows up where a latent is predictable."""


class LatentHead(nn.Module):
    """Hidden state -> mean and log standard deviation of the next latent in units of sigma_e, (..., D) each.

    "A three-layered MLP with hidden dimensions corresponding to the LLM backbone's" and two heads. The body `norm` is
    that of the authors' code, whose third layer is a LayerNorm and whose width is an option.
    """

    def __init__(self, width: int, body: Body = "gelu", body_width: int | None = None) -> None:
        super().__init__()
        inner = width if body_width is None else body_width
        layers = [nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, inner)]
        layers += [nn.LayerNorm(inner)] if body == "norm" else [nn.GELU(), nn.Linear(inner, inner), nn.GELU()]
        self.body = nn.Sequential(*layers)
        self.mean = nn.Linear(inner, width)
        self.log_std = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # In its own precision, float32, under autocast too: a mean that is rounded to bfloat16 is off by 0.002, which
        # is much where sigma is small (it may be 0.001).
        with torch.autocast(hidden.device.type, enabled=False):
            features = self.body(hidden.to(self.mean.weight.dtype))
            mean = self.mean(features).float()
            log_std = self.log_std(features).float().clamp(*LOG_STD_RANGE)
        return mean, log_std


def latent_loss(
    mean: Tensor,
    log_std: Tensor,
    target: Tensor,
    kind: Literal["mse", "soft_mse", "nll"],
    alpha: float = 0.0,
    nll_beta: float = 0.0,
) -> Tensor:
    """Elementwise loss of a prediction whose values are in units of sigma_e; `mse` does not use the spread.

    `nll_beta` weighs the NLL by sigma^(2 beta) without a gradient (beta-NLL, Seitzer et al. 2022, equation 5). At 0 the
    mean learns with (mean - target) / sigma^2, at 1 as by half of the squared error.
    """
    error = (mean - target).square()
    if kind == "mse":
        return error
    if kind == "nll":
        # Without the constant 0.5 log(2 pi), which has no gradient.
        nll = 0.5 * error * torch.exp(-2 * log_std) + log_std
        return nll if nll_beta == 0 else nll * torch.exp(2 * nll_beta * log_std.detach())
    # Soft-MSE: E[(mean + sigma eps - target)^2] = error + sigma^2, less alpha times the Gaussian's entropy.
    entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
    return error + torch.exp(2 * log_std) - alpha * entropy


def gaussian_logps(latent: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Elementwise log-density of N(mean, spread^2) at `latent`; 0 where spread is 0."""
    drawn = spread > 0
    # A spread of 0 would make NaN, and NaN would pass through `where` into the gradient.
    safe = torch.where(drawn, spread, 1.0)
    squared = ((latent - mean) / safe).square()
    logps = -0.5 * squared - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(drawn, logps, 0.0)


def gaussian_entropy(spread_LD: Tensor) -> Tensor:
    """The Gaussian's entropy per dimension, mean over the dimensions, (L,)."""
    # A spread of 0 is latent_temperature 0; the caller has nan in place of such rows.
    log_spread_LD = spread_LD.clamp(min=1e-30).log()
    return (log_spread_LD + 0.5 * math.log(2 * math.pi * math.e)).mean(-1)
