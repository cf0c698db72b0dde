"""`arithmetic`: worded multi-step problems without end, made from a seed. No files, no network.

    Mia has 3 bags of 4 pens, loses 5 and buys 2 boxes of 6. How many pens does Mia have?
    <<3*4=12>> <<12-5=7>> <<2*6=12>> <<7+12=19>>                                            19

A problem is a start, a series of moves on a running total, and sometimes a second person at the end. A move
on a product ("buys 2 boxes of 6") takes two steps: its partial result, then the total. The chain follows
from the question: there is one right order of steps, so a model can be asked to predict it. All results are
integers from 2 to `max_value`; divisions are exact.

Splits are disjoint by construction. A problem's split is a hash of its equations (operands of + and * in
order of size), so neither seed, names, wording nor limits can move a problem from one split to another.
Questions are distinct within a call, equations are not: short problems come back under other names.

The same arguments give the same rows on every machine and Python version: of `random.Random` only an integer
seed and `random()` are used, the two that Python promises to keep.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from colar.data.example import Example

SPLITS = ("train", "validation", "test")
OPERATIONS = "+-*/"
MAX_MISSES = 20_000
"""Draws in a row without a new problem after which the space counts as exhausted."""


@dataclass(frozen=True)
class ArithmeticConfig:
    """Which problems are made. The defaults are the demo's; the others shift the test set away from them."""

    steps: tuple[int, int] = (3, 4)
    """Fewest and most equations in a chain; lengths between them are equally frequent."""
    max_number: int = 12
    """Largest number in a question (the smallest is 2)."""
    max_value: int = 40
    """Largest result of any step."""
    operations: str = OPERATIONS
    """Which of + - * / may occur."""
    wording: str = "story"
    """`story`, `run_on` (the same words, every clause joined by "and"), `question_first` (the same words, the
    question before the story) or `plain` (other words)."""
    overruns: float = 0.0
    """Share of the longest problems of the train split whose chain goes one step too far, `<<19+1=20>>`, and whose
    answer is that step's: a teacher who errs. Validation and test are right whatever this is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        if len(self.steps) != 2 or not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps must be [fewest, most] with 1 <= fewest <= most, got {self.steps!r}")
        for key in ("max_number", "max_value"):
            if getattr(self, key) < 4:
                raise ValueError(f"{key} must be an integer of 4 or more, got {getattr(self, key)!r}")
        if not self.operations or set(self.operations) - set(OPERATIONS):
            raise ValueError(
                f"operations must be some of the characters {OPERATIONS}, got {self.operations!r}"
            )
        if not 0 <= self.overruns <= 1:
            raise ValueError(f"overruns must be a share from 0 to 1, got {self.overruns!r}")
        if self.wording not in WORDINGS:
            raise ValueError(f"wording must be one of {', '.join(WORDINGS)}, got {self.wording!r}")


def generate(config: ArithmeticConfig, split: str, n: int, seed: int) -> list[Example]:
    """The first `n` problems of that split and seed, with distinct questions; a smaller `n` gives a prefix.

    Raises ValueError where `split` is unknown or the settings do not hold `n` different questions.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if n < 0:
        raise ValueError(f"n must not be negative, got {n!r}")
    rng = random.Random(
        int.from_bytes(hashlib.sha256(f"arithmetic/{split}/{seed}".encode()).digest()[:8], "big")
    )
    examples: list[Example] = []
    seen: set[str] = set()
    misses = 0
    while len(examples) < n:
        problem = _draw_problem(config, rng)
        question = ""
        if problem is not None and _split_of(problem) == split:
            question = WORDINGS[config.wording](problem, rng)
        if not question or question in seen:
            misses += 1
            if misses > MAX_MISSES:
                raise ValueError(
                    f"only {len(examples)} of n = {n} different {split} problems found for {config}: "
                    "ask for fewer, or widen steps, max_number, max_value or operations"
                )
            continue
        misses = 0
        seen.add(question)
        steps = tuple(
            f"<<{a}{op}{b}={value}>>" for move in problem or () for a, op, b, value in move.equations
        )
        if split == "train" and len(steps) == config.steps[1] and 0 < config.overruns > rng.random():
            steps = (*steps, _one_too_many(steps[-1]))
        answer = _result(steps[-1])
        examples.append(Example(f"arithmetic/{split}/{len(examples)}", question, steps, answer))
    return examples


def _result(step: str) -> str:
    return step.rpartition("=")[2].removesuffix(">>")


def _one_too_many(step: str) -> str:
    """The step that an overrunning teacher adds to the last one."""
    total = int(_result(step))
    return f"<<{total}+1={total + 1}>>"


# --- numbers -------------------------------------------------------------------------------------------

Equation = tuple[int, str, int, int]
"""a, operation, b, result"""


@dataclass(frozen=True)
class _Move:
    """One clause of the story: its kind, the numbers that it names, the equations that it takes."""

    kind: str
    numbers: tuple[int, ...]
    equations: tuple[Equation, ...]
    total: int


# Kind -> the operations of its equations, in order. A start needs no total; an ending closes the story.
STARTS = {"count": "", "groups": "*"}
MOVES = {"add": "+", "sub": "-", "mul": "*", "div": "/", "add_groups": "*+", "sub_groups": "*-"}
ENDINGS = {"more": "++", "fewer": "-+", "times": "*+"}
KINDS = STARTS | MOVES | ENDINGS


def _draw_problem(config: ArithmeticConfig, rng: random.Random) -> list[_Move] | None:
    """A problem, or None where the draw ran into a dead end (the caller draws again)."""
    left = _between(rng, *config.steps)
    moves: list[_Move] = []
    total = 0
    while left or not moves:
        kinds = list(MOVES) + [kind for kind in ENDINGS if left == 2] if moves else list(STARTS)
        kinds = [k for k in kinds if len(KINDS[k]) <= left and set(KINDS[k]) <= set(config.operations)]
        move = None
        while kinds and move is None:
            kind = kinds.pop(_between(rng, 0, len(kinds) - 1))
            move = _draw_move(kind, total, config, rng)
        if move is None:
            return None
        moves.append(move)
        total = move.total
        left -= len(move.equations)
    return moves


def _draw_move(kind: str, total: int, config: ArithmeticConfig, rng: random.Random) -> _Move | None:
    """Numbers for a move of that kind which keep every result within 2..max_value; None if there are none."""
    top, room = config.max_number, config.max_value
    if kind == "count":
        number = _between(rng, 2, min(top, room))
        return _Move(kind, (number,), (), number)
    if kind in ("groups", "add_groups", "sub_groups"):
        most = {"groups": room, "add_groups": room - total, "sub_groups": total - 2}[kind]
        if most < 4:
            return None
        a = _between(rng, 2, min(top, most // 2))
        b = _between(rng, 2, min(top, most // a))
        numbers: tuple[int, ...] = (a, b)
        product = (a, "*", b, a * b)
        if kind == "groups":
            return _Move(kind, numbers, (product,), a * b)
        last = _equation(total, KINDS[kind][1], a * b)
        return _Move(kind, numbers, (product, last), last[3])
    least, most = (
        2,
        {
            "add": room - total,
            "sub": total - 2,
            "mul": room // total,
            "div": total // 2,
            "more": room - 2 * total,
            "fewer": total - 2,
            "times": (room - total) // total,
        }[kind],
    )
    if kind == "fewer":
        least = max(least, 2 * total - room)
    choices: Sequence[int] = range(least, min(top, most) + 1)
    if kind == "div":
        choices = [number for number in choices if total % number == 0]
    if not choices:
        return None
    number = choices[_between(rng, 0, len(choices) - 1)]
    first = _equation(total, KINDS[kind][0], number)
    if kind in MOVES:
        return _Move(kind, (number,), (first,), first[3])
    both = _equation(total, "+", first[3])
    return _Move(kind, (number,), (first, both), both[3])


def _equation(a: int, op: str, b: int) -> Equation:
    return a, op, b, {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]


def _split_of(problem: list[_Move]) -> str:
    """One tenth test, one tenth validation, by the hash of the equations alone."""
    parts = []
    for move in problem:
        for a, op, b, _ in move.equations:
            low, high = (min(a, b), max(a, b)) if op in "+*" else (a, b)
            parts.append(f"{low}{op}{high}")
    bucket = int.from_bytes(hashlib.sha256(" ".join(parts).encode()).digest()[:4], "big") % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")


def _between(rng: random.Random, low: int, high: int) -> int:
    """Uniform over low..high, both included, from `random()` alone (see the module's docstring)."""
    return low + int(rng.random() * (high - low + 1))


# --- words ---------------------------------------------------------------------------------------------

NAMES = ("Mia", "Leo", "Ana", "Tom", "Eva", "Ben", "Zoe", "Max", "Lily", "Omar", "Nina", "Hugo")
THINGS = (
    "pens",
    "cards",
    "coins",
    "shells",
    "stamps",
    "apples",
    "beads",
    "books",
    "eggs",
    "nuts",
    "keys",
    "toys",
)
CONTAINERS = ("boxes", "bags", "packs")
CLAUSES = {
    "count": ("has {0} {things}",),
    "groups": ("has {0} {container} of {1} {things}",),
    "add": ("finds {0} more", "buys {0} more", "wins {0} more"),
    "sub": ("loses {0}", "sells {0}", "drops {0}"),
    "mul": ("swaps each for {0}", "trades each for {0}"),
    "div": ("keeps one of {0} equal piles", "keeps one of {0} equal heaps"),
    "add_groups": ("finds {0} {container} of {1}", "buys {0} {container} of {1}"),
    "sub_groups": ("gives {0} friends {1} each", "sells {0} {container} of {1}"),
    "more": ("{peer} has {0} more",),
    "fewer": ("{peer} has {0} fewer",),
    "times": ("{peer} has {0} times as many",),
}
PLAIN = {
    "count": "Take {0}",
    "groups": "Take {0} times {1}",
    "add": "Add {0}",
    "sub": "Subtract {0}",
    "mul": "Multiply by {0}",
    "div": "Divide by {0}",
    "add_groups": "Add {0} times {1}",
    "sub_groups": "Subtract {0} times {1}",
    "more": "Add {0} more than that",
    "fewer": "Add {0} less than that",
    "times": "Add {0} times that",
}


def _tell(problem: list[_Move], rng: random.Random, joiner: str = ", ") -> tuple[str, str]:
    """The story and its question; `joiner` stands between all clauses but the last two."""
    words = {
        "name": NAMES[_between(rng, 0, len(NAMES) - 1)],
        "things": THINGS[_between(rng, 0, len(THINGS) - 1)],
    }
    words["peer"] = words["name"]
    while words["peer"] == words["name"]:
        words["peer"] = NAMES[_between(rng, 0, len(NAMES) - 1)]
    clauses = []
    for move in problem:
        words["container"] = CONTAINERS[_between(rng, 0, len(CONTAINERS) - 1)]
        forms = CLAUSES[move.kind]
        clauses.append(forms[_between(rng, 0, len(forms) - 1)].format(*move.numbers, **words))
    peer = clauses.pop() if problem[-1].kind in ENDINGS else ""
    story = " and ".join(part for part in (joiner.join(clauses[:-1]), clauses[-1]) if part)
    if peer:
        return f"{words['name']} {story}. {peer}.", "How many do both have?"
    return f"{words['name']} {story}.", "How many {things} does {name} have?".format(**words)


def _story(problem: list[_Move], rng: random.Random) -> str:
    return " ".join(_tell(problem, rng))


def _run_on(problem: list[_Move], rng: random.Random) -> str:
    return " ".join(_tell(problem, rng, " and "))


def _question_first(problem: list[_Move], rng: random.Random) -> str:
    return " ".join(reversed(_tell(problem, rng)))


def _plain(problem: list[_Move], rng: random.Random) -> str:
    return ". ".join(PLAIN[move.kind].format(*move.numbers) for move in problem) + ". What is the result?"


WORDINGS = {"story": _story, "run_on": _run_on, "question_first": _question_first, "plain": _plain}
