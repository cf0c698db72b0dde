"""The latent head: a Gaussian over the next latent, and what it is trained by (section 3.2).

Everything is in units of sigma_e, the standard deviation of the backbone's embeddings.

Shape suffixes: M positions, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

Head = Literal["gaussian", "deterministic", "anchored"]
LatentLoss = Literal["soft_mse", "nll"]
LOG_STD_RANGE = (-7.0, 2.0)
"""Clamp of log sigma (targets have unit scale): unclamped, the NLL blows up where a latent is predictable."""


class LatentHead(nn.Module):
    """Hidden state -> mean and log standard deviation of the next latent in units of sigma_e, (..., D) each.

    "A three-layered MLP with hidden dimensions corresponding to the LLM backbone's" and two heads.
    """

    def __init__(self, width: int, correction: bool = False) -> None:
        """With `correction` the mean starts at 0 everywhere."""
        super().__init__()
        layers = [module for _ in range(3) for module in (nn.Linear(width, width), nn.GELU())]
        self.body = nn.Sequential(*layers)
        self.mean = nn.Linear(width, width)
        self.log_std = nn.Linear(width, width)
        if correction:
            nn.init.zeros_(self.mean.weight)
            nn.init.zeros_(self.mean.bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(hidden.to(self.mean.weight.dtype))
        return self.mean(features).float(), self.log_std(features).float().clamp(*LOG_STD_RANGE)


def continued(logits: Tensor, separator_id: int) -> Tensor:
    """(..., V): the distribution of the next group's tokens, given that the thinking goes on."""
    stop = torch.arange(logits.shape[-1], device=logits.device) == separator_id
    return logits.float().masked_fill(stop, -math.inf).softmax(-1)


def gaussian_logps(latent: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Elementwise log-density of N(mean, spread^2) at `latent`, all in units of sigma_e; nothing where spread is 0."""
    drawn = spread > 0
    safe = torch.where(drawn, spread, 1.0)
    logps = -0.5 * ((latent - mean) / safe).square() - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(drawn, logps, 0.0)


def latent_loss(
    mean: Tensor,
    log_std: Tensor,
    target: Tensor,
    kind: Literal["mse", "soft_mse", "nll"],
    alpha: float = 0.0,
    nll_beta: float = 0.0,
) -> Tensor:
    """Elementwise loss of a prediction, in units of sigma_e squared; `mse` has no use for the spread.

    `nll_beta` weighs the NLL by sigma^(2 beta) without a gradient (beta-NLL, Seitzer et al. 2022, equation 5): at 0 the
    mean learns with (mean - target) / sigma^2, at 1 as by half of the squared error.
    """
    error = (mean - target).square()
    if kind == "mse":
        return error
    if kind == "nll":
        nll = 0.5 * error * torch.exp(-2 * log_std) + log_std
        return nll if nll_beta == 0 else nll * torch.exp(2 * nll_beta * log_std.detach())
    entropy = log_std + 0.5 * math.log(2 * math.pi * math.e)
    return error + torch.exp(2 * log_std) - alpha * entropy
