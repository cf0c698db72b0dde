"""Statistics against hand computation, published tables, exhaustive enumeration and simulation."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colar.evaluation import stats

proportions = st.lists(st.booleans(), min_size=2, max_size=30)
scores = st.lists(st.floats(-10, 10), min_size=2, max_size=20)


def test_mean_of_one_sample_per_question_is_the_textbook_standard_error() -> None:
    values = [1, 0, 0, 1, 1]
    estimate = stats.mean(values, list("abcde"))
    assert estimate.n == 5
    assert estimate.mean == pytest.approx(0.6)
    assert estimate.se == pytest.approx(math.sqrt(0.3 / 5))  # sd(ddof=1)^2 = (3 * 0.16 + 2 * 0.36) / 4 = 0.3
    low, high = estimate.interval or (0, 0)
    assert (low, high) == pytest.approx((0.6 - 1.95996 * 0.244949, 0.6 + 1.95996 * 0.244949), abs=1e-5)


def test_clustered_error_by_hand() -> None:
    # mean 0.5; cluster sums of deviations: a 1.0, b 0.0, c -1.0; var = 3/2 * (1 + 0 + 1) / 36
    estimate = stats.mean([1, 1, 1, 0, 0, 0], list("aabbcc"))
    assert estimate.se == pytest.approx(math.sqrt(3 / 2 * 2 / 36))


@given(proportions, st.integers(2, 4))
def test_repeating_the_same_samples_adds_no_precision(values: list[bool], times: int) -> None:
    once = stats.mean(values, range(len(values)))
    repeated = stats.mean(values * times, list(range(len(values))) * times)
    assert repeated.se == pytest.approx(once.se)
    assert repeated.n == len(values)


@given(scores, st.randoms())
def test_the_order_of_the_values_leaves_no_trace(values: list[float], shuffler: random.Random) -> None:
    pairs = [(value, index // 2) for index, value in enumerate([*values, 1.0, 2.0])]
    shuffled = list(pairs)
    shuffler.shuffle(shuffled)
    one, other = (stats.mean([v for v, _ in p], [c for _, c in p]) for p in (pairs, shuffled))
    assert one == other


def test_clustered_error_agrees_with_a_bootstrap_over_questions() -> None:
    generator = random.Random(0)
    groups = []
    for _ in range(120):
        chance = generator.random()  # what a question's samples share
        groups.append([float(generator.random() < chance) for _ in range(4)])
    values = [value for group in groups for value in group]
    clustered = stats.mean(values, [index for index, group in enumerate(groups) for _ in group]).se
    draws = [
        statistics.fmean(value for group in generator.choices(groups, k=len(groups)) for value in group)
        for _ in range(2000)
    ]
    assert clustered == pytest.approx(statistics.stdev(draws), rel=0.06)
    naive = stats.mean(values, range(len(values))).se
    assert naive is not None
    assert clustered is not None
    assert clustered > 1.25 * naive  # samples of one question are not independent


def test_one_question_has_no_standard_error() -> None:
    estimate = stats.mean([1, 0, 1], ["a", "a", "a"])
    assert (estimate.mean, estimate.se, estimate.interval) == (pytest.approx(2 / 3), None, None)


def test_paired_difference_by_hand() -> None:
    a, b = [1, 1, 0, 1], [1, 0, 0, 0]  # differences 0 1 0 1: mean 0.5, sd(ddof=1) = sqrt(1/3)
    estimate = stats.paired_difference(a, list("wxyz"), b, list("wxyz"))
    assert estimate.mean == 0.5
    assert estimate.se == pytest.approx(math.sqrt(1 / 3) / 2)
    assert estimate.n == 4


def test_paired_difference_uses_the_shared_questions_only() -> None:
    estimate = stats.paired_difference([1, 0, 0], ["x", "y", "only-a"], [0, 0, 1], ["y", "x", "only-b"])
    assert (estimate.mean, estimate.n) == (0.5, 2)
    with pytest.raises(ValueError, match="at least one question"):
        stats.paired_difference([1], ["x"], [1], ["y"])


@given(scores, st.floats(-3, 3))
def test_a_constant_difference_has_no_error(values: list[float], shift: float) -> None:
    ids = list(range(len(values)))
    estimate = stats.paired_difference([value + shift for value in values], ids, values, ids)
    assert estimate.mean == pytest.approx(shift, abs=1e-9)
    assert estimate.se == pytest.approx(0, abs=1e-9)


@given(st.lists(st.tuples(st.lists(st.booleans(), min_size=3, max_size=3),
                          st.lists(st.booleans(), min_size=2, max_size=2)), min_size=2, max_size=12))  # fmt: skip
def test_paired_difference_of_several_samples_is_that_of_the_questions_means(
    questions: list[tuple[list[bool], list[bool]]],
) -> None:
    ids = range(len(questions))
    estimate = stats.paired_difference(
        [value for a, _ in questions for value in a], [i for i in ids for _ in range(3)],
        [value for _, b in questions for value in b], [i for i in ids for _ in range(2)],
    )  # fmt: skip
    differences = [sum(a) / 3 - sum(b) / 2 for a, b in questions]
    assert estimate.mean == pytest.approx(statistics.fmean(differences))
    assert estimate.se == pytest.approx(statistics.stdev(differences) / math.sqrt(len(differences)), abs=1e-9)


@pytest.mark.parametrize("df", range(1, 31))
def test_t_quantile_inverts_the_integrated_density(df: int) -> None:
    t = stats.T95[df - 1]
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    steps = 4000
    heights = [scale * (1 + (t * i / steps) ** 2 / df) ** (-(df + 1) / 2) for i in range(steps + 1)]
    area = t / steps * (heights[0] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]) + heights[-1]) / 3
    assert 0.5 + area == pytest.approx(0.975, abs=1e-6)


def test_the_normal_quantile() -> None:
    assert statistics.NormalDist().inv_cdf(0.975) == pytest.approx(stats.Z95)


def test_t_interval_of_five_seeds() -> None:
    # mean 0.5, sd(ddof=1) = sqrt(0.001 / 4); the paper's 1.96 * sd(ddof=0) / sqrt(5) would be 1.58 times narrower
    accuracies = [0.48, 0.49, 0.5, 0.51, 0.52]
    half = stats.t_interval(accuracies)
    assert half == pytest.approx(2.7764451 * math.sqrt(0.001 / 4) / math.sqrt(5))
    assert half == pytest.approx(1.58 * 1.96 * statistics.pstdev(accuracies) / math.sqrt(5), rel=5e-3)
    assert stats.t_interval([0.5]) is None
    assert stats.t_interval([0.1, 0.1, 0.1]) == 0


def majority(answers: list[str | None], correct: list[bool]) -> float:
    """The share of one question."""
    numbers = [-1 if answer is None else answers.index(answer) for answer in answers]
    return float(stats.majorities(np.array([numbers]), np.array([correct]))[0])


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["3", "3", "4"], [True, True, False], 1.0),
        (["4", "3", "4"], [False, True, False], 0.0),
        (["3", "4"], [True, False], 0.5),
        (["3", "4", "5", None], [False, True, False, False], 1 / 3),
        ([None, None, "3"], [False, False, True], 1.0),  # unparsable never wins, however frequent
        ([None, None], [False, False], 0.0),
        # Right answers equal the gold, however they are spelt; wrong ones are told apart by their texts.
        (["3", "3.0", "4", "4"], [True, True, False, False], 0.5),
        (["3", "3.0", "4", "5"], [True, True, False, False], 1.0),
        (["0.333", "1/3", "0.3334", "4", "4"], [True, True, True, False, False], 1.0),
        (["3", "4", "4.0"], [True, False, False], 1 / 3),
        (["1/2", "0.5", None, None, None], [True, True, False, False, False], 1.0),
        (["3", "3", "4"], [True, False, False], 0.5),  # of a judge that called one answer both
    ],
)
def test_majorities(answers: list[str | None], correct: list[bool], expected: float) -> None:
    assert majority(answers, correct) == pytest.approx(expected)


@given(st.lists(st.sampled_from(["right", "wrong", "worse", None]), min_size=1, max_size=9))
def test_a_majority_is_the_expectation_over_random_tie_breaks(answers: list[str | None]) -> None:
    counts = {answer: answers.count(answer) for answer in answers if answer is not None}
    winners = [answer for answer in counts if counts[answer] == max(counts.values())]
    expected = winners.count("right") / len(winners) if winners else 0.0
    assert majority(answers, [answer == "right" for answer in answers]) == pytest.approx(expected)
