"""Means and their intervals: clustered by question, paired differences, t intervals, pass@k, maj@k.

Three sources of noise, three intervals, never mixed:
  questions       the benchmark is a sample of questions: standard error clustered by question (`mean`,
                  `paired_difference`), after Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640
  decoding seeds  the same questions sampled again: `t_interval` over the seeds' accuracies
  training seeds  the same recipe trained again: `t_interval` over the runs' accuracies

The clustered variance is CR1. With N values x in G clusters and their mean m,
    var(m) = G / (G - 1) * sum over clusters of (sum of (x - m) within the cluster)^2 / N^2.
Departure from Miller's clustered formula: it corrects the squared terms for small samples (n / (n - 1)) but not the
products within a cluster; here the whole sum is corrected. With one value per cluster both are sd(ddof=1) / sqrt(N).
The normal quantile 1.96 goes with it: below some 30 questions the interval is too narrow, and reports say so.

No torch and no scipy: the t distribution has a closed form for whole degrees of freedom.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054  # 97.5% quantile of the standard normal distribution


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error over `n` clusters and `samples` values. `se` is None where n < 2."""

    mean: float
    se: float | None
    n: int
    samples: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval, mean ± 1.96 se (not clipped to any range); None where there is no standard error."""
        if self.se is None:
            return None
        return self.mean - Z95 * self.se, self.mean + Z95 * self.se


def mean(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Mean of `values` with the standard error clustered by `clusters` (one label per value).

    Every value weighs the same, so a question sampled twice as often weighs twice as much.
    Raises ValueError when the lengths differ or there is no value.
    """
    centre, residuals = _residuals(values, clusters)
    return Estimate(centre, _clustered_se(list(residuals.values())), len(residuals), len(values))


def paired_difference(
    a: Sequence[float],
    a_clusters: Sequence[Hashable],
    b: Sequence[float],
    b_clusters: Sequence[Hashable],
) -> Estimate:
    """mean(a) - mean(b) over the clusters that both have, its standard error clustered by them.

    The share that one question adds to both means is subtracted before it is squared (Miller's paired analysis).
    So a question that is easy for both systems costs no precision. With one value per question on either side
    this is the paired-difference error sd(ddof=1)(a - b) / sqrt(n). `samples` counts both sides. Raises ValueError
    when no cluster is shared.
    """
    _same_length(a, a_clusters)
    _same_length(b, b_clusters)
    shared = set(a_clusters) & set(b_clusters)
    if not shared:
        raise ValueError("paired_difference needs at least one question that both systems answered")
    a_kept, a_ids = _within(a, a_clusters, shared)
    b_kept, b_ids = _within(b, b_clusters, shared)
    a_mean, a_residuals = _residuals(a_kept, a_ids)
    b_mean, b_residuals = _residuals(b_kept, b_ids)
    # Subtracted cluster by cluster: an easy question lifts both residuals alike and cancels.
    residuals = [a_residuals[cluster] - b_residuals[cluster] for cluster in a_residuals]
    return Estimate(a_mean - b_mean, _clustered_se(residuals), len(shared), len(a_kept) + len(b_kept))


def average(means: Sequence[float], errors: Sequence[float | None]) -> Estimate:
    """Plain mean of independent means (one per dataset): se = root of the summed variances / their number.

    The standard error is None where one of `errors` is. Raises ValueError when there is none.
    """
    _same_length(means, errors)
    if not means:
        raise ValueError("an average needs at least one mean")
    n = len(means)
    return Estimate(math.fsum(means) / n, average_error(errors), n, n)


def average_error(errors: Sequence[float | None]) -> float | None:
    """The standard error of a plain mean of independent means; None where one of `errors` is."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    # Independent errors: their variances add up.
    return math.sqrt(math.fsum(error**2 for error in known)) / len(known)


def wilson(estimate: Estimate) -> tuple[float, float]:
    """95% Wilson score interval of a proportion, with the sample size that its clustered error amounts to.

    Unlike mean ± 1.96 se it stays within 0..1 and keeps a width when every answer is right (or wrong). The
    effective size is p (1 - p) / var (Kish's design effect; var without the small-sample factor, so that one value
    per question gives the textbook interval), at most the number of values, and the number of questions
    where that is undefined. Wilson 1927; the effective size as in Korn and Graubard 1998.
    """
    p = estimate.mean
    if not 0 <= p <= 1:
        raise ValueError(f"wilson needs a proportion in 0..1, got {p}")
    spread = p * (1 - p)

    # The effective sample size n_eff solves var = p (1 - p) / n_eff.
    size = float(estimate.n)
    if estimate.se is not None and spread > 0:
        variance = estimate.se**2 * (estimate.n - 1) / estimate.n
        size = min(spread / variance, estimate.samples) if variance > 0 else float(estimate.samples)

    # Wilson's formula, with z^2 / n_eff as a name of its own.
    z2 = Z95**2 / size
    centre = (p + z2 / 2) / (1 + z2)
    half = Z95 * math.sqrt(spread / size + z2 / (4 * size)) / (1 + z2)
    low = max(0.0, centre - half)
    high = min(1.0, centre + half)
    # At p = 0 or 1 rounding could leave p a hair outside.
    return min(p, low), max(p, high)


def t_interval(values: Sequence[float]) -> float | None:
    """Half width of the 95% t interval of the mean of `values`: t(n - 1) * sd(ddof=1) / sqrt(n).

    None for fewer than two values. Five decoding seeds: t(4) = 2.776, where the paper uses 1.96 and ddof=0.
    """
    n = len(values)
    if n < 2:
        return None
    return t_quantile(0.975, n - 1) * statistics.stdev(values) / math.sqrt(n)


def t_quantile(p: float, df: int) -> float:
    """The `p` quantile (0 < p < 1) of Student's t with `df` >= 1 whole degrees of freedom, to about 1e-12."""
    if not 0 < p < 1:
        raise ValueError(f"p must be between 0 and 1, got {p}")
    if df < 1 or df != int(df):
        raise ValueError(f"df must be a whole number from 1, got {df}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    # Bisection in theta = atan(t / sqrt(df)), where every quantile is finite: 60 halvings are a double's precision.
    wanted = 2 * p - 1  # P(|T| < t)
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        if _central_mass(theta, df) < wanted:
            low = theta
        else:
            high = theta
    return math.tan((low + high) / 2) * math.sqrt(df)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of `k` samples is right where `correct` of all `n` are: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1), in exact integers.
    """
    if not 0 <= correct <= n:
        raise ValueError(f"correct must be in 0..{n}, got {correct}")
    if not 1 <= k <= n:
        raise ValueError(f"k must be in 1..{n} (the samples there are), got {k}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def avg_at_k(correct: Sequence[bool]) -> float:
    """Share of one question's samples that are right."""
    if not correct:
        raise ValueError("avg_at_k needs at least one sample")
    return sum(correct) / len(correct)


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Expected correctness of the majority answer of one question's samples.

    None, an answer that could not be parsed, has no vote; no votes at all is 0. A tie is broken at random, so the
    value is the share of the tied answers that are right. Answers are compared as strings: `parsed` is the
    judge's normalised form. If the judge called one string both right and wrong, its share counts.
    """
    _same_length(answers, correct)
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    right = Counter(answer for answer, ok in zip(answers, correct, strict=True) if ok)
    most = max(votes.values())
    tied = [answer for answer, count in votes.items() if count == most]
    # `right` of a string is its number of votes or 0, unless the judge called it both.
    return sum(right[answer] / most for answer in tied) / len(tied)


def _residuals(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[float, dict[Hashable, float]]:
    """The mean, and each cluster's sum of deviations from it divided by the number of values."""
    _same_length(values, clusters)
    if not values:
        raise ValueError("a mean needs at least one value")
    # fsum is exact before its last rounding: reports do not depend on the order of the records.
    n = len(values)
    centre = math.fsum(values) / n
    groups: defaultdict[Hashable, list[float]] = defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        groups[cluster].append(value - centre)
    return centre, {cluster: math.fsum(group) / n for cluster, group in groups.items()}


def _clustered_se(residuals: Sequence[float]) -> float | None:
    """CR1 from the clusters' residuals; None for a single cluster, which says nothing about the others."""
    n = len(residuals)
    if n < 2:
        return None
    return math.sqrt(n / (n - 1) * math.fsum(residual**2 for residual in residuals))


def _within(
    values: Sequence[float], clusters: Sequence[Hashable], shared: set[Hashable]
) -> tuple[list[float], list[Hashable]]:
    """The values whose cluster is in `shared`, and their clusters."""
    kept: list[float] = []
    kept_clusters: list[Hashable] = []
    for value, cluster in zip(values, clusters, strict=True):
        if cluster in shared:
            kept.append(value)
            kept_clusters.append(cluster)
    return kept, kept_clusters


def _central_mass(theta: float, df: int) -> float:
    """P(|T| < t) with theta = atan(t / sqrt(df)): Abramowitz and Stegun 26.7.3 (odd df) and 26.7.4 (even df)."""
    # Both are finite sums of cosines:
    #   odd   2/pi (theta + sin theta (cos theta + 2/3 cos^3 theta + ... ))   powers up to df - 2
    #   even  sin theta (1 + 1/2 cos^2 theta + (1 3)/(2 4) cos^4 theta + ...)   powers up to df - 2
    odd = df % 2 == 1
    cosine = math.cos(theta)
    term = cosine if odd else 1.0
    total = 0.0
    first = 2 if odd else 1
    for k in range(first, df, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    if odd:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total


def _same_length(a: Sequence[object], b: Sequence[object]) -> None:
    if len(a) != len(b):
        raise ValueError(f"lengths differ: {len(a)} and {len(b)}")
