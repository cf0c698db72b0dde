"""`drill`: every equation is right, numbers stay in their bounds, splits are disjoint."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colar.data import sources
from colar.data.drill import DrillConfig, draw_term, generate, number
from colar.data.logic import Dice

COMPUTE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


@given(st.integers(0, 10**6), st.sampled_from("+-*/"), st.integers(2, 200), st.integers(4, 3000))
def test_every_term_is_right_and_within_its_bounds(seed, operation, max_factor, max_value):
    config = DrillConfig(operations=operation, max_factor=max_factor, max_value=max_value)
    a, drawn, b, result = draw_term(config, Dice(str(seed)))
    assert drawn == operation
    assert result == COMPUTE[operation](a, b)
    assert operation != "/" or a % b == 0
    assert all(1 <= value <= max_value for value in (a, b, result))
    if operation == "*":
        assert max(a, b) <= max_factor


@given(st.integers(0, 10**6), st.integers(1, 500), st.integers(0, 5000))
def test_numbers_lie_between_their_bounds(seed, low, more):
    assert low <= number(Dice(str(seed)), low, low + more) <= low + more


def test_lengths_of_numbers_are_equally_frequent():
    drawn = [len(str(number(Dice(str(seed)), 1, 999))) for seed in range(3000)]
    # 1,000 of each are expected; 5 standard deviations are 130.
    assert all(870 < drawn.count(digits) < 1130 for digits in (1, 2, 3))


def test_a_chain_works_out_what_the_question_lists():
    config = DrillConfig(terms=(2, 4))
    rows = generate(config, "train", 60, seed=0)
    lengths = set()
    for row in rows:
        terms = row.question.removeprefix("Work out: ").split(" ")
        lengths.add(len(terms))
        results = []
        for term, step in zip(terms, row.steps, strict=True):
            a, operation, b, result = re.fullmatch(r"<<(\d+)([-+*/])(\d+)=(\d+)>>", step).groups()
            assert term == f"{a}{operation}{b}"
            assert int(result) == COMPUTE[operation](int(a), int(b))
            results.append(result)
        assert row.answer == results[-1]
    assert lengths == {2, 3, 4}


def test_rows_are_those_of_their_place_and_splits_are_disjoint():
    config = DrillConfig(terms=(1, 2), max_value=60)
    long, short = generate(config, "train", 40, seed=3), generate(config, "train", 10, seed=3)
    assert long[:10] == short
    assert generate(config, "train", 10, seed=4) != short
    sets = {split: generate(config, split, 200, seed=0) for split in ("train", "validation", "test")}
    seen = {split: {tuple(sorted(row.steps)) for row in rows} for split, rows in sets.items()}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["test"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"terms": [3, 2]}, r"terms must be \[fewest, most\]"),
        ({"terms": 4}, r"terms must be \[fewest, most\]"),
        ({"operations": "+^"}, r"operations must be some of \+-\*/"),
        ({"operations": ""}, r"operations must be some of \+-\*/"),
        ({"max_factor": 1}, "max_factor must be a whole number, 2 or more"),
        ({"max_value": 3}, "max_value must be a whole number, 4 or more"),
        ({"steps": [1, 2]}, "unknown drill option 'steps'"),
    ],
)
def test_mistakes_in_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sources.load("drill", "train", limit=2, options=options)


def test_it_is_a_source():
    rows = sources.load("drill", "test", limit=3, seed=1)
    assert [row.id for row in rows] == ["drill/test/0", "drill/test/1", "drill/test/2"]
