"""Means and their intervals: clustered by question, paired differences, t intervals, majorities.

Three sources of noise, three intervals, never mixed:
  questions       the benchmark is a sample of questions: standard error clustered by question (`mean`,
                  `paired_difference`), after Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640
  decoding seeds  the same questions sampled again: `t_interval` over the seeds' accuracies
  training seeds  the same recipe trained again: `t_interval` over the runs' accuracies

The clustered variance is CR1. With N values x in G clusters and their mean m,
    var(m) = G / (G - 1) * sum over clusters of (sum of (x - m) within the cluster)^2 / N^2.
Miller's clustered formula differs: it corrects the squared terms for small samples (n / (n - 1)) but not the products
within a cluster; here the whole sum is corrected. With one value per cluster both are sd(ddof=1) / sqrt(N). Intervals
use the normal quantile 1.96: below some 30 questions they are too narrow, and reports warn.

Sums are exact before their last rounding (`math.fsum`), so that results do not depend on the order of the values; numpy
only sorts and subtracts.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Z95 = 1.959963984540054  # 97.5% quantile of the standard normal distribution
# 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom. The last is used for more: a little too wide.
T95 = (
    12.706204736174696, 4.302652729749458, 3.182446305283707, 2.776445105197791, 2.570581835636314,
    2.446911851144968, 2.364624251592783, 2.3060041352041662, 2.2621571627982044, 2.2281388519862744,
    2.2009851600916392, 2.1788128296672262, 2.1603686564627904, 2.1447866879178026, 2.1314495455597737,
    2.1199052992212537, 2.1098155778333165, 2.1009220402410356, 2.093024054408311, 2.085963447265865,
    2.07961384472768, 2.0738730679040227, 2.0686576104190473, 2.0638985616280223, 2.059538552753297,
    2.0555294386428713, 2.051830516480287, 2.0484071417952454, 2.0452296421327043, 2.0422724563012413,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error over `n` clusters. `se` is None where n < 2."""

    mean: float
    se: float | None
    n: int

    @property
    def interval(self) -> list[float] | None:
        """95% interval [low, high], mean ± 1.96 se (not clipped to any range); None without a standard error."""
        if self.se is None:
            return None
        return [self.mean - Z95 * self.se, self.mean + Z95 * self.se]


def mean(values: Sequence[float] | Array, clusters: Sequence[Any] | Array) -> Estimate:
    """Mean of `values` with the standard error clustered by `clusters`: a number or a text for each value.

    Every value weighs the same, so a question sampled twice as often weighs twice as much. Raises ValueError if there
    is no value.
    """
    centre, residuals = _residuals(np.asarray(values), np.asarray(clusters))
    return Estimate(centre, _clustered_se(residuals), len(residuals))


def paired_difference(
    a: Sequence[float] | Array,
    a_clusters: Sequence[Any] | Array,
    b: Sequence[float] | Array,
    b_clusters: Sequence[Any] | Array,
) -> Estimate:
    """mean(a) - mean(b) over the clusters that both have, its standard error clustered by them.

    A question's contributions to the two means are subtracted before they are squared (Miller's paired analysis), so a
    question that is easy for both systems costs no precision. With one value per question on either side this is the
    paired-difference error sd(ddof=1)(a - b) / sqrt(n). Raises ValueError if no cluster is shared.
    """
    a_clusters, b_clusters = np.asarray(a_clusters), np.asarray(b_clusters)
    a_shared = np.isin(a_clusters, b_clusters)
    b_shared = np.isin(b_clusters, a_clusters)
    if not a_shared.any():
        raise ValueError("paired_difference needs at least one question that both systems answered")
    a_mean, a_residuals = _residuals(np.asarray(a)[a_shared], a_clusters[a_shared])
    b_mean, b_residuals = _residuals(np.asarray(b)[b_shared], b_clusters[b_shared])
    residuals = a_residuals - b_residuals
    return Estimate(a_mean - b_mean, _clustered_se(residuals), len(residuals))


def average(means: Sequence[float], errors: Sequence[float | None]) -> Estimate:
    """Plain mean of independent means, one per dataset.

    Datasets of different questions are independent. GSM-Hard is not: it has GSM8k's questions with other numbers. The
    covariance, which is left out here, would raise ± of results/smollm2/mathematics by 0.04 points of 1.3.
    """
    return Estimate(math.fsum(means) / len(means), average_error(errors), len(means))


def average_error(errors: Sequence[float | None]) -> float | None:
    """Standard error of a plain mean of independent means, root of the summed variances / their number.

    None if one of `errors` is None.
    """
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    return math.sqrt(math.fsum(error**2 for error in known)) / len(known)


def half_interval(se: float | None) -> float | None:
    """Half of a 95% interval, 1.96 standard errors."""
    return None if se is None else Z95 * se


def t_interval(values: Sequence[float]) -> float | None:
    """Half width of the 95% t interval of the mean of `values`: t(n - 1) * sd(ddof=1) / sqrt(n).

    None for fewer than two values. Five decoding seeds: t(4) = 2.776, where the paper uses 1.96 and ddof=0.
    """
    n = len(values)
    if n < 2:
        return None
    return T95[min(n - 1, len(T95)) - 1] * statistics.stdev(values) / math.sqrt(n)


def majorities(answers_QK: Array, correct_QK: Array) -> Array:
    """Expected correctness of the majority answer of each question's K samples, (Q,).

    Equal answers have equal numbers. All right answers count as one answer, however they are spelt, because each equals
    the gold. -1, an answer that could not be parsed, has no vote; a question without votes gets 0. A tie is broken at
    random, so the value is the share of right samples among those with a most frequent answer. If the judge called one
    answer both right and wrong, its share counts.
    """
    same_QKK = answers_QK[:, :, None] == answers_QK[:, None, :]
    same_QKK |= correct_QK[:, :, None] & correct_QK[:, None, :]
    votes_QK = np.where(answers_QK < 0, 0, same_QKK.sum(axis=2))
    # `initial=1`: if no answer could be parsed, none wins.
    wins_QK = votes_QK == votes_QK.max(axis=1, initial=1, keepdims=True)
    right_Q = (wins_QK & correct_QK).sum(axis=1)
    share_Q: Array = right_Q / np.maximum(wins_QK.sum(axis=1), 1)
    return share_Q


def _residuals(values: Array, clusters: Array) -> tuple[float, Array]:
    """The mean, and each cluster's sum of deviations from it divided by the number of values, in order of cluster."""
    n = len(values)
    if not n:
        raise ValueError("a mean needs at least one value")
    centre = math.fsum(values.tolist()) / n
    # Sorted by cluster, each cluster is a slice. A stable sort is fast if the questions are in order already.
    order = np.argsort(clusters, kind="stable")
    deviations = values[order] - centre
    _, starts = np.unique(clusters[order], return_index=True)
    # With one value per cluster, as in most reports, no sums are needed.
    if len(starts) == n:
        return centre, deviations / n
    parts = deviations.tolist()
    sums = [math.fsum(parts[start:end]) for start, end in itertools.pairwise([*starts.tolist(), n])]
    return centre, np.array(sums) / n


def _clustered_se(residuals: Array) -> float | None:
    """CR1 from the clusters' residuals; None for a single cluster, which has no spread."""
    n = len(residuals)
    if n < 2:
        return None
    # Not numpy's squares: one in a thousand differs in its last bit, so reports would differ from older ones.
    squares = [residual**2 for residual in residuals.tolist()]
    return math.sqrt(n / (n - 1) * math.fsum(squares))
