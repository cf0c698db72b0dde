"""Is a stop probability, and a sigma, what it says? Both are compared with the truth after a right prefix.

    stop     of the positions at which the model stops with a probability of about p, a share of p are ends
    sigma    z = (e - mu) / sigma has standard deviation 1, if the true latent e is drawn from the head's Gaussian

mu, sigma and e are in units of sigma_e. The reliability bins of sigma group dimensions of latents by predicted sigma:
the root mean square error of a bin should be its sigma. That error contains the mean's own error too: a head with a
bad mean and an honest sigma says a large sigma.

Shape suffixes: N positions or thoughts, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colar.look.reference_chain import Measured, ReferencePass
from colar.methods.base import Method

BINS = 10


@dataclass(frozen=True)
class Bin:
    """Of `n` values from `low` to `high`: what was predicted and what was found, on average; None without any."""

    low: float
    high: float
    n: int
    predicted: float | None
    observed: float | None


@dataclass(frozen=True)
class StopCalibration(Measured):
    n: int
    """Positions: one before each thought, one behind the last."""
    brier: float
    """Mean squared difference of probability and truth."""
    error: float
    """Expected calibration error: the mean over positions of their bin's |predicted - observed|."""
    bins: list[Bin]
    """Of equal width."""


@dataclass(frozen=True)
class SigmaCalibration(Measured):
    n_thoughts: int
    n_values: int
    """Thoughts times width. Dimensions of one thought are not independent of each other."""
    z_mean: float
    z_std: float
    """1 where sigma is right, above 1 where it is too small."""
    within: dict[str, float]
    """Shares of |z| below 1, 2 and 3; a Gaussian's are `expected`."""
    expected: dict[str, float]
    deciles: list[int]
    """How many values lie in each tenth of the predicted Gaussian: equal numbers where it is right."""
    bins: list[Bin]
    """Ten bins of about equal counts, by predicted sigma; `observed` is the root mean square error."""


def stop_calibration(probability_N: Tensor, is_end_N: Tensor) -> StopCalibration:
    """Compare stop probabilities in 0..1 with where chains end. ValueError without any position."""
    n = len(probability_N)
    if n == 0:
        raise ValueError("stop calibration needs at least one position, got none")
    probability_N = probability_N.double()
    truth_N = is_end_N.double()
    # The last bin has 1 in it.
    place_N = (probability_N * BINS).long().clamp(max=BINS - 1)
    bins = []
    error = 0.0
    for b in range(BINS):
        here_N = place_N == b
        made = _bin(b / BINS, (b + 1) / BINS, probability_N[here_N], truth_N[here_N])
        if made.predicted is not None and made.observed is not None:
            error += made.n / n * abs(made.predicted - made.observed)
        bins.append(made)
    brier = (probability_N - truth_N).square().mean().item()
    return StopCalibration(n, brier, error, bins)


def sigma_calibration(mean_ND: Tensor, sigma_ND: Tensor, true_ND: Tensor) -> SigmaCalibration:
    """Compare a head's Gaussians with the true latents, in one unit. ValueError without any."""
    if mean_ND.numel() == 0:
        raise ValueError("sigma calibration needs at least one thought, got none")
    error_ND = true_ND.double() - mean_ND.double()
    sigma_ND = sigma_ND.double()
    z_ND = error_ND / sigma_ND
    within = {}
    expected = {}
    for k in (1, 2, 3):
        within[str(k)] = (z_ND.abs() < k).double().mean().item()
        expected[str(k)] = math.erf(k / math.sqrt(2))
    # Where each value lies in its own Gaussian, from 0 to 1.
    quantile_ND = torch.special.ndtr(z_ND)
    decile_ND = (quantile_ND * BINS).long().clamp(max=BINS - 1)
    deciles = torch.bincount(decile_ND.flatten(), minlength=BINS).tolist()
    return SigmaCalibration(
        n_thoughts=mean_ND.shape[0],
        n_values=mean_ND.numel(),
        z_mean=z_ND.mean().item(),
        # Not divided by n - 1: one value alone would give NaN.
        z_std=z_ND.std(correction=0).item(),
        within=within,
        expected=expected,
        deciles=deciles,
        bins=_by_sigma(sigma_ND.flatten(), error_ND.flatten()),
    )


def _by_sigma(sigma_M: Tensor, error_M: Tensor) -> list[Bin]:
    order_M = sigma_M.argsort(stable=True)
    bins = []
    for piece in order_M.tensor_split(BINS):
        if len(piece):
            low, high = sigma_M[piece[0]].item(), sigma_M[piece[-1]].item()
            rms = error_M[piece].square().mean().sqrt().item()
            bins.append(Bin(low, high, len(piece), sigma_M[piece].mean().item(), rms))
    return bins


def _bin(low: float, high: float, predicted_M: Tensor, found_M: Tensor) -> Bin:
    if len(predicted_M) == 0:
        return Bin(low, high, 0, None, None)
    return Bin(low, high, len(predicted_M), predicted_M.mean().item(), found_M.mean().item())


# Of a model


def stop_of(passes: Sequence[ReferencePass]) -> StopCalibration | None:
    """The calibration of a model's stops; None where its method gives them no probability."""
    if not passes or "stop_probability" not in passes[0].thought.info:
        return None
    probability = [each.thought.info["stop_probability"] for each in passes]
    is_end = []
    for each in passes:
        # The method is asked at K + 1 positions; only behind the last thought does the chain end.
        end_N = torch.zeros(each.n_thoughts + 1, dtype=torch.bool)
        end_N[-1] = True
        is_end.append(end_N)
    return stop_calibration(torch.cat(probability).cpu(), torch.cat(is_end))


def sigma_of(method: Method, passes: Sequence[ReferencePass]) -> SigmaCalibration | None:
    """The calibration of a model's sigma; None where its method has none, or never draws from it."""
    if not passes or "sigma" not in passes[0].thought.info:
        return None
    sigma_e = float(method.config.sigma_e)
    # At the last position the method should stop: no true latent is there to compare with.
    mean = [each.thought.info["mu"][:-1] for each in passes]
    sigma = [each.thought.info["sigma"][:-1] for each in passes]
    # mu and sigma are in units of sigma_e already, the latents are embeddings.
    true = [each.latents_KD.float() / sigma_e for each in passes]
    return sigma_calibration(torch.cat(mean), torch.cat(sigma), torch.cat(true))
