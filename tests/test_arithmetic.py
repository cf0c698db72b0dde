"""The generator against an oracle that knows only arithmetic, and its splits against their definition."""

from __future__ import annotations

import hashlib
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colar.data import arithmetic
from colar.data.arithmetic import JOINERS, ArithmeticConfig, generate
from colar.data.example import SPLITS

STEP = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>")
RULES = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}

configs = st.builds(
    ArithmeticConfig,
    steps=st.sampled_from([(1, 4), (2, 2), (2, 4), (3, 6)]),
    max_number=st.sampled_from([12, 20, 99]),
    max_value=st.sampled_from([40, 99, 999]),
    wording=st.sampled_from(sorted(JOINERS)),
)


def equations(example):
    """The chain as exact fractions. A step of another shape raises."""
    return [
        (Fraction(a), op, Fraction(b), Fraction(value))
        for a, op, b, value in (STEP.fullmatch(step).groups() for step in example.steps)
    ]


def same_problem(example):
    """What splits must not share: the equations, whichever way round + and * are written."""
    return tuple((frozenset((a, b)) if op in "+*" else (a, b), op) for a, op, b, _ in equations(example))


@settings(deadline=None, max_examples=60)
@given(config=configs, split=st.sampled_from(SPLITS), seed=st.integers(0, 2**40))
def test_every_chain_is_right_and_follows_from_its_question(config, split, seed) -> None:
    for example in generate(config, split, 12, seed):
        known = [Fraction(number) for number in re.findall(r"\d+", example.question)]
        used = 0
        for a, op, b, value in equations(example):
            assert RULES[op](a, b) == value
            assert 2 <= value <= config.max_value
            assert a in known
            assert b in known
            known.append(value)
            used += 1
        assert str(value) == example.answer
        assert config.steps[0] <= used <= config.steps[1]
        assert all(2 <= int(number) <= config.max_number for number in re.findall(r"\d+", example.question))


@settings(deadline=None, max_examples=30)
@given(
    left=configs,
    right=configs,
    splits=st.permutations(SPLITS),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_splits_share_no_problem_whatever_the_seeds_and_settings(left, right, splits, seeds) -> None:
    one = {same_problem(example) for example in generate(left, splits[0], 60, seeds[0])}
    other = {same_problem(example) for example in generate(right, splits[1], 60, seeds[1])}
    assert not one & other


def test_one_step_problems_fill_all_three_splits_without_overlap() -> None:
    # A small space, drawn many times over: an overlap between splits could not hide.
    config = ArithmeticConfig(steps=(1, 1), max_number=20, max_value=99)
    by_split = {split: {same_problem(e) for e in generate(config, split, 1500, 5)} for split in SPLITS}
    assert all(len(problems) > 20 for problems in by_split.values())
    assert len(set.union(*by_split.values())) == sum(len(problems) for problems in by_split.values())
    share = len(by_split["test"]) / sum(len(problems) for problems in by_split.values())
    assert 0.05 < share < 0.15


@pytest.mark.parametrize("wording", sorted(JOINERS))
def test_rows_are_pinned_on_every_machine(wording) -> None:
    rows = generate(ArithmeticConfig((2, 4), 12, 40, wording), "test", 40, seed=3)
    text = "\n".join("|".join((row.id, row.question, *row.steps, row.answer)) for row in rows)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == PINNED[wording]


PINNED = {
    "story": "fd6cb23b907ddf70",
    "run_on": "9f4f3567cc1f3930",
}


def test_ids_questions_and_prefixes() -> None:
    rows = generate(ArithmeticConfig(), "validation", 300, seed=1)
    assert [row.id for row in rows] == [f"arithmetic/validation/{i}" for i in range(300)]
    assert len({row.question for row in rows}) == 300
    assert generate(ArithmeticConfig(), "validation", 40, seed=1) == rows[:40]
    assert generate(ArithmeticConfig(), "validation", 40, seed=2) != rows[:40]
    assert generate(ArithmeticConfig(), "train", 0, seed=1) == []


def test_all_lengths_operations_and_two_partial_results_occur() -> None:
    rows = generate(ArithmeticConfig(steps=(1, 4)), "train", 2000, seed=0)
    lengths = [len(row.steps) for row in rows]
    assert all(0.2 < lengths.count(k) / 2000 < 0.3 for k in (1, 2, 3, 4))
    assert {op for row in rows for _, op, _, _ in equations(row)} == set(RULES)
    asked = [{Fraction(number) for number in re.findall(r"\d+", row.question)} for row in rows]
    combined = sum(
        any(not {a, b} & numbers for a, _, b, _ in equations(row))
        for row, numbers in zip(rows, asked, strict=True)
    )
    assert combined > 100


def test_run_on_joins_every_clause_by_and_and_tells_the_same_problems() -> None:
    story, run_on = (generate(ArithmeticConfig(wording=w), "test", 200, seed=0) for w in ("story", "run_on"))
    for one, other in zip(story, run_on, strict=True):
        assert other.question == one.question.replace(", ", " and ")
        assert (other.id, other.steps, other.answer) == (one.id, one.steps, one.answer)
    assert sum(", " in example.question for example in story) > 100


def test_an_erring_teacher_goes_one_step_too_far_on_the_longest_training_problems_only() -> None:
    erring = ArithmeticConfig(overruns=0.75)
    rows = generate(erring, "train", 2000, seed=0)
    lengths = [len(row.steps) for row in rows]
    assert set(lengths) == {3, 4, 5}
    long, over = lengths.count(4) + lengths.count(5), lengths.count(5)
    assert 0.45 < long / 2000 < 0.55
    assert 0.70 < over / long < 0.80
    for row in rows:
        *_, (_, _, _, before), (a, op, b, value) = equations(row)
        assert str(value) == row.answer
        assert len(row.steps) < 5 or (a, op, b, value) == (before, "+", 1, before + 1)
    for split in ("validation", "test"):
        assert generate(erring, split, 50, seed=0) == generate(ArithmeticConfig(), split, 50, seed=0)


def test_an_exhausted_space_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "MAX_MISSES", 500)
    tight = ArithmeticConfig(steps=(1, 1), max_number=4, max_value=4)
    with pytest.raises(ValueError, match=r"only \d+ of n = 10000 different train problems"):
        generate(tight, "train", 10_000, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": (3, 2)}, "steps must be"),
        ({"steps": (0, 2)}, "steps must be"),
        ({"steps": (2,)}, "steps must be"),
        ({"max_number": 3}, "max_number must be"),
        ({"max_value": 0}, "max_value must be"),
        ({"wording": "verse"}, "wording must be one of"),
        ({"overruns": 1.5}, "overruns must be a number, from 0 to 1"),
        ({"overruns": -0.1}, "overruns must be a number, from 0 to 1"),
    ],
)
def test_bad_settings_are_refused(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        ArithmeticConfig(**fields)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="split must be one of train, validation, test"):
        generate(ArithmeticConfig(), "dev", 1, 0)
