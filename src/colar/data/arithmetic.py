"""`arithmetic`: worded multi-step problems without end, made from a seed. No files, no network.

    Mia has 3 bags of 4 pens, loses 5 and buys 2 boxes of 6. How many pens does Mia have?
    <<3*4=12>> <<12-5=7>> <<2*6=12>> <<7+12=19>>                                            19

A problem is a start, a series of moves on a running total, and sometimes a second person at the end. A move
on a product ("buys 2 boxes of 6") takes two steps: its partial result, then the total. The chain follows
from the question: there is one right order of steps, so a model can be asked to predict it. All results are
integers from 2 to `max_value`; divisions are exact. (Rows with `slips` and `overruns` go a little beyond.)

Splits are disjoint by construction. A problem's split is a hash of its equations (operands of + and * in
order of size), so neither seed, names, wording nor limits can move a problem from one split to another.
Questions are distinct within a call, equations are not: short problems come back under other names.

The same arguments give the same rows on every machine and Python version: of `random.Random` only an integer
seed and `random()` are used, the two that Python promises to keep.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from colar.checks import check_choice, check_holds, is_number
from colar.data.example import Example, split_by_hash
from colar.data.moves import LOSSES, Move, Sizes, draw_problem, equation, move_on
from colar.data.wording import WORDINGS

SPLITS = ("train", "validation", "test")
MAX_MISSES = 20_000
"""Draws in a row without a new problem after which the space counts as exhausted."""
LARGEST_SLIP = 99
"""Largest result of a chain with a slip: the two digits of the default `max_value`."""


@dataclass(frozen=True)
class ArithmeticConfig(Sizes):
    """Which problems are made. The defaults are the demo's; other values shift the test set away from them."""

    wording: str = "story"
    """`story`, `run_on` (the same words, every clause joined by "and"), `question_first` (the same words, the
    question before the story) or `plain` (other words)."""
    overruns: float = 0.0
    """Share of the longest problems of the train split whose chain goes one step too far, `<<19+1=20>>`, and whose
    answer is that step's: a teacher who errs. Validation and test are right whatever this is."""
    slips: float = 0.0
    """Share of the train split's problems with a loss whose first loss is added, `<<9+4=13>>` for `<<9-4=5>>`, with all
    that follows from it: a teacher who errs inside the chain. Validation and test are right whatever this is, and so
    are the few problems on which the slip would end in an inexact division or a number of three digits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("overruns", "slips"):
            share = getattr(self, key)
            check_holds(key, is_number(share) and 0 <= share <= 1, share, "a share from 0 to 1")
        check_choice("wording", self.wording, tuple(WORDINGS))


def generate(config: ArithmeticConfig, split: str, n: int, seed: int) -> list[Example]:
    """Make the first `n` problems of that split and seed, with distinct questions; a smaller `n` gives a prefix.

    Raises ValueError where `split` is unknown or the settings do not hold `n` different questions.
    """
    check_choice("split", split, SPLITS)
    if n < 0:
        raise ValueError(f"n must not be negative, got {n!r}")
    digest = hashlib.sha256(f"arithmetic/{split}/{seed}".encode()).digest()
    rng = random.Random(int.from_bytes(digest[:8], "big"))
    examples: list[Example] = []
    seen: set[str] = set()
    misses = 0
    while len(examples) < n:
        # A draw is thrown away where it is a dead end, another split's, or a question that came before.
        problem = draw_problem(config, rng)
        question = ""
        if problem is not None and _split_of(problem) == split:
            question = WORDINGS[config.wording](problem, rng)
        if problem is None or not question or question in seen:
            misses += 1
            if misses > MAX_MISSES:
                raise ValueError(
                    f"only {len(examples)} of n = {n} different {split} problems found for {config}: "
                    "ask for fewer, or widen steps, max_number, max_value or operations"
                )
            continue
        misses = 0
        seen.add(question)
        # Only where a teacher may err is a number drawn for it: other settings keep their rows.
        slipped = _slipped(problem) if split == "train" and config.slips > 0 else None
        if slipped is not None and rng.random() < config.slips:
            problem = slipped
        steps = _chain(problem)
        longest = len(steps) == config.steps[1]
        if split == "train" and longest and config.overruns > 0 and rng.random() < config.overruns:
            steps.append(_one_too_many(steps[-1]))
        answer = _result(steps[-1])
        examples.append(Example(f"arithmetic/{split}/{len(examples)}", question, tuple(steps), answer))
    return examples


def _chain(problem: list[Move]) -> list[str]:
    """The reasoning steps: an equation each, `<<3*4=12>>`."""
    steps = []
    for move in problem:
        for a, op, b, value in move.equations:
            steps.append(f"<<{a}{op}{b}={value}>>")
    return steps


def _slipped(problem: list[Move]) -> list[Move] | None:
    """The problem as a teacher takes it who adds the first loss; None where there is none, or no such chain."""
    moves: list[Move] = []
    total = 0
    slip_due = True
    for move in problem:
        # Computed anew on the teacher's own total: what follows a slip carries its error on.
        taken = move_on(move.kind, move.numbers, total)
        if slip_due and move.kind in LOSSES:
            # The loss is the last equation of its move: its product, if it has one, is right.
            _, _, lost, _ = taken.equations[-1]
            slip = equation(total, "+", lost)
            taken = Move(move.kind, move.numbers, (*taken.equations[:-1], slip), slip[3])
            slip_due = False
        for a, op, b, value in taken.equations:
            # `equation` rounds a quotient down: a remainder must be looked for here.
            inexact = op == "/" and a % b != 0
            if inexact or not 1 <= value <= LARGEST_SLIP:
                return None
        moves.append(taken)
        total = taken.total
    return None if slip_due else moves


def _result(step: str) -> str:
    """The number to the right of the equals sign."""
    return step.rpartition("=")[2].removesuffix(">>")


def _one_too_many(step: str) -> str:
    """The step that an overrunning teacher adds to the last one."""
    total = int(_result(step))
    return f"<<{total}+1={total + 1}>>"


def _split_of(problem: list[Move]) -> str:
    """The split of a problem: by the hash of its equations alone."""
    parts = []
    for move in problem:
        for a, op, b, _ in move.equations:
            # 3*4 and 4*3 are one problem, and must not stand in two splits.
            if op in "+*" and a > b:
                a, b = b, a
            parts.append(f"{a}{op}{b}")
    return split_by_hash(" ".join(parts))
