"""The latent head: a Gaussian over the next latent, and the losses that train it (section 3.2).

Everything is in units of sigma_e, the standard deviation of the backbone's embeddings.

Shape suffixes: M positions, L thoughts, X rows of the vocabulary, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

Head = Literal["gaussian", "deterministic", "anchored", "sequential"]
LatentLoss = Literal["soft_mse", "nll"]
LOG_STD_RANGE = (-7.0, 2.0)
"""Clamp of log sigma (targets have unit scale): unclamped, the NLL blows up where a latent is predictable."""

PIECE = 4096
"""Rows of a half-precision vocabulary that are made float32 at a time."""


class LatentHead(nn.Module):
    """Hidden state -> mean and log standard deviation of the next latent in units of sigma_e, (..., D) each.

    "A three-layered MLP with hidden dimensions corresponding to the LLM backbone's" and two heads.
    """

    def __init__(self, width: int, correction: bool = False) -> None:
        """With `correction` the mean starts at 0 everywhere."""
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers.append(nn.Linear(width, width))
            layers.append(nn.GELU())
        self.body = nn.Sequential(*layers)
        self.mean = nn.Linear(width, width)
        self.log_std = nn.Linear(width, width)
        if correction:
            nn.init.zeros_(self.mean.weight)
            nn.init.zeros_(self.mean.bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # In its own precision, float32, under autocast too: a mean that is rounded to bfloat16 is off by 0.002, which
        # is much where sigma is small (it may be 0.001).
        with torch.autocast(hidden.device.type, enabled=False):
            features = self.body(hidden.to(self.mean.weight.dtype))
            mean = self.mean(features).float()
            log_std = self.log_std(features).float().clamp(*LOG_STD_RANGE)
        return mean, log_std


def without_separator(logits: Tensor, separator_id: int) -> Tensor:
    """The distribution of the next group's tokens, given that the thinking continues, (..., V)."""
    is_separator = torch.arange(logits.shape[-1], device=logits.device) == separator_id
    return logits.float().masked_fill(is_separator, -math.inf).softmax(-1)


def expected_embedding(probs: Tensor, vocabulary_VD: Tensor) -> Tensor:
    """Mean of the vocabulary's embeddings, weighed by `probs` (L, V), in float32 whatever dtype these have: (L, D)."""
    with torch.autocast(probs.device.type, enabled=False):
        if vocabulary_VD.dtype == torch.float32:
            return probs @ vocabulary_VD
        # In pieces: a copy of the whole table in float32 would take twice its memory.
        total_LD = probs.new_zeros(len(probs), vocabulary_VD.shape[1])
        for start in range(0, len(vocabulary_VD), PIECE):
            piece_XD = vocabulary_VD[start : start + PIECE].float()
            total_LD = total_LD + probs[:, start : start + PIECE] @ piece_XD
        return total_LD


def gaussian_logps(latent: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Elementwise log-density of N(mean, spread^2) at `latent`, in units of sigma_e; 0 where spread is 0."""
    drawn = spread > 0
    # A spread of 0 would make NaN, and NaN would pass through `where` into the gradient.
    safe = torch.where(drawn, spread, 1.0)
    squared = ((latent - mean) / safe).square()
    logps = -0.5 * squared - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(drawn, logps, 0.0)


def latent_loss(
    mean: Tensor,
    log_std: Tensor,
    target: Tensor,
    kind: Literal["mse", "soft_mse", "nll"],
    alpha: float = 0.0,
    nll_beta: float = 0.0,
) -> Tensor:
    """Elementwise loss of a prediction, in units of sigma_e squared; `mse` does not use the spread.

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
