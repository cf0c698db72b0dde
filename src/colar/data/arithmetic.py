"""`arithmetic`: unlimited multi-step word problems, generated from a seed. No files, no network.

    Mia has 3 bags of 4 pens, loses 5 and buys 2 boxes of 6. How many pens does Mia have?
    <<3*4=12>> <<12-5=7>> <<2*6=12>> <<7+12=19>>                                            19

A problem is a start, a series of moves on a running total, and sometimes a second person at the end. A move
with a product ("buys 2 boxes of 6") takes two steps: the product, then the new total. The question determines
the chain: there is one right order of steps, so a model can be asked to predict it. All results are integers
from 2 to `max_value`; divisions are exact. `overruns` simulates a teacher who errs, in training rows only: the chain
has one step too many, whose result may exceed `max_value` by 1.

Splits are disjoint by construction. A problem's split follows from a hash of its equations (operands of + and *
sorted), so neither seed, names, wording nor limits can move a problem from one split to another.
Questions are distinct within a call; equations are not, because short problems recur under other names.

The same arguments give the same rows on every machine and Python version, because `random.Random` is used
only through an integer seed and `random()`, which Python promises to keep.
"""

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from colar.checks import check_choice, check_holds, check_number
from colar.data.example import SPLITS, Example

MAX_MISSES = 20_000
"""Consecutive draws without a new problem after which the space counts as exhausted."""
T = TypeVar("T")
Equation = tuple[int, str, int, int]
"""a, operation, b, result"""

# Kind of a move -> the operations of its equations, in order. A start needs no total; an ending closes the story.
STARTS = {"count": "", "groups": "*"}
MOVES = {"add": "+", "sub": "-", "mul": "*", "div": "/", "add_groups": "*+", "sub_groups": "*-"}
ENDINGS = {"more": "++", "fewer": "-+", "times": "*+"}
KINDS = {**STARTS, **MOVES, **ENDINGS}
PRODUCTS = ("groups", "add_groups", "sub_groups")
"""The kinds that name two numbers, whose product is a step."""

NAMES = ("Mia", "Leo", "Ana", "Tom", "Eva", "Ben", "Zoe", "Max", "Lily", "Omar", "Nina", "Hugo")
THINGS = ("pens", "cards", "coins", "shells", "stamps", "apples", "beads", "books", "eggs", "nuts", "keys",
          "toys")  # fmt: skip
CONTAINERS = ("boxes", "bags", "packs")
# Wordings of each move. {0} and {1} are its numbers; if there are several, one is drawn.
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
JOINERS = {"story": ", ", "run_on": " and "}
"""Wording -> the text between the clauses of a story, except the last two, which "and" always joins."""


@dataclass(frozen=True)
class Move:
    """One clause of the story: its kind, the numbers it names, its equations, and the total after it."""

    kind: str
    numbers: tuple[int, ...]
    equations: tuple[Equation, ...]
    total: int


@dataclass(frozen=True)
class ArithmeticConfig:
    """Settings of the problems. The defaults are the demo's; other values make a test set with a distribution shift."""

    steps: tuple[int, int] = (3, 4)
    """Fewest and most equations in a chain; lengths between them are equally frequent."""
    max_number: int = 12
    """Largest number in a question (the smallest is 2)."""
    max_value: int = 40
    """Largest result of any step."""
    wording: str = "story"
    """`story`, or `run_on`, a run-on sentence: the same clauses, all of them joined by "and"."""
    overruns: float = 0.0
    """Share of the longest problems of the train split whose chain goes one step too far, `<<19+1=20>>`, and whose
    answer is that step's: a teacher who errs. Validation and test are right for any value."""

    def __post_init__(self) -> None:
        is_range = len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1]
        check_holds("steps", is_range, self.steps, "[fewest, most] with 1 <= fewest <= most")
        check_number("max_number", self.max_number, 4, whole=True)
        check_number("max_value", self.max_value, 4, whole=True)
        check_choice("wording", self.wording, tuple(JOINERS))
        check_number("overruns", self.overruns, 0, 1)


def generate(config: ArithmeticConfig, split: str, n: int, seed: int) -> list[Example]:
    """Generate the first `n` problems of a split and seed, with distinct questions; a smaller `n` gives a prefix.

    Raises ValueError if `split` is unknown or the settings allow fewer than `n` different questions.
    """
    check_choice("split", split, SPLITS)
    digest = hashlib.sha256(f"arithmetic/{split}/{seed}".encode()).digest()
    rng = random.Random(int.from_bytes(digest[:8], "big"))
    examples: list[Example] = []
    seen: set[str] = set()
    misses = 0
    while len(examples) < n:
        # A draw is discarded if it is a dead end, belongs to another split, or repeats a question.
        problem = _draw_problem(config, rng)
        fits = problem and _split_of(problem) == split
        question = _told(problem, rng, JOINERS[config.wording]) if fits else ""
        if not question or question in seen:
            misses += 1
            if misses > MAX_MISSES:
                raise ValueError(
                    f"only {len(examples)} of n = {n} different {split} problems found for {config}: "
                    "ask for fewer, or widen steps, max_number or max_value"
                )
            continue
        misses = 0
        seen.add(question)
        chain = _chain(problem)
        # A number is drawn only if this row may overrun, so that settings without `overruns` keep their rows.
        may_err = split == "train" and len(chain) == config.steps[1] and config.overruns > 0
        if may_err and rng.random() < config.overruns:
            chain.append(_equation(chain[-1][3], "+", 1))
        steps = tuple(f"<<{a}{op}{b}={value}>>" for a, op, b, value in chain)
        examples.append(Example(f"arithmetic/{split}/{len(examples)}", question, steps, str(chain[-1][3])))
    return examples


def _chain(problem: list[Move]) -> list[Equation]:
    return list(itertools.chain.from_iterable(move.equations for move in problem))


def _split_of(problem: list[Move]) -> str:
    """The split of a problem, by the hash of its equations alone: a tenth test, a tenth validation, the rest train."""
    parts = []
    for a, op, b, _ in _chain(problem):
        # 3*4 and 4*3 are the same problem, and must not fall into two splits.
        low, high = sorted((a, b)) if op in "+*" else (a, b)
        parts.append(f"{low}{op}{high}")
    # Not `hash()`: Python salts it anew in every process.
    digest = hashlib.sha256(" ".join(parts).encode()).digest()
    return {0: "test", 1: "validation"}.get(int.from_bytes(digest[:4], "big") % 10, "train")


# --- the numbers: moves on a running total, drawn so that every result fits ------------------------------


def _draw_problem(config: ArithmeticConfig, rng: random.Random) -> list[Move]:
    """Draw a problem; [] if the draw ran into a dead end (the caller draws again)."""
    steps_left = _between(rng, *config.steps)
    moves: list[Move] = []
    total = 0
    # A chain of n steps is made of moves that take one or two each.
    while steps_left or not moves:
        candidates = STARTS
        if moves:
            # Every ending takes two steps, and nothing may follow it.
            candidates = MOVES | ENDINGS if steps_left == 2 else MOVES
        # KINDS has one character per operation of a kind, so that its length is the number of steps.
        kinds = [kind for kind in candidates if len(KINDS[kind]) <= steps_left]
        # Kinds are tried in a random order until one has numbers that fit.
        numbers: tuple[int, ...] = ()
        while kinds and not numbers:
            kind = kinds.pop(_between(rng, 0, len(kinds) - 1))
            numbers = _draw_numbers(kind, total, config, rng)
        if not numbers:
            return []
        move = _move(kind, numbers, total)
        moves.append(move)
        total = move.total
        steps_left -= len(move.equations)
    return moves


def _draw_numbers(kind: str, total: int, config: ArithmeticConfig, rng: random.Random) -> tuple[int, ...]:
    """Draw numbers for a move that keep every result within 2..max_value; () if there are none."""
    if kind == "count":
        return (_between(rng, 2, min(config.max_number, config.max_value)),)
    if kind in PRODUCTS:
        # At a start the total is 0.
        room = total - 2 if kind == "sub_groups" else config.max_value - total
        # Both numbers are 2 or more.
        if room < 4:
            return ()
        # At most half of the room, so that there is always a b of 2 or more.
        a = _between(rng, 2, min(config.max_number, room // 2))
        return a, _between(rng, 2, min(config.max_number, room // a))
    choices = _choices(kind, total, config)
    return (_pick(choices, rng),) if choices else ()


def _move(kind: str, numbers: tuple[int, ...], total: int) -> Move:
    """Make a move on a total, with one equation for each of its operations."""
    if kind == "count":
        return Move(kind, numbers, (), numbers[0])
    operations = KINDS[kind]
    equations = [_equation(numbers[0] if kind in PRODUCTS else total, operations[0], numbers[-1])]
    if len(operations) == 2:
        # The second equation combines the total with the product or, in an ending, the second person's number.
        equations.append(_equation(total, operations[1], equations[0][3]))
    return Move(kind, numbers, tuple(equations), equations[-1][3])


def _choices(kind: str, total: int, config: ArithmeticConfig) -> Sequence[int]:
    """The numbers that a move of one number may name, given the total so far."""
    limit = config.max_value
    # The largest number after which the move's last result is still within 2..limit.
    largest = {
        "add": limit - total,
        "sub": total - 2,
        "mul": limit // total,
        "div": total // 2,
        "more": limit - 2 * total,
        "fewer": total - 2,
        "times": (limit - total) // total,
    }[kind]
    # Both people together have 2 * total - number, at most `limit`.
    smallest = max(2, 2 * total - limit) if kind == "fewer" else 2
    within = range(smallest, min(config.max_number, largest) + 1)
    if kind == "div":
        return [number for number in within if total % number == 0]
    return within


def _equation(a: int, op: str, b: int) -> Equation:
    results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}
    return a, op, b, results[op]


def _between(rng: random.Random, low: int, high: int) -> int:
    """Uniform over low..high, both included, from `random()` alone (see the module's docstring)."""
    return low + int(rng.random() * (high - low + 1))


# --- the words ---------------------------------------------------------------------------------------------


def _told(problem: list[Move], rng: random.Random, joiner: str) -> str:
    """The story and its question."""
    # The order of the draws must not change, so that the same seed gives the same story.
    words = {"name": _pick(NAMES, rng), "things": _pick(THINGS, rng)}
    # Drawn again until the second person differs from the first.
    words["peer"] = words["name"]
    while words["peer"] == words["name"]:
        words["peer"] = _pick(NAMES, rng)
    clauses = []
    for move in problem:
        words["container"] = _pick(CONTAINERS, rng)
        clause = _pick(CLAUSES[move.kind], rng)
        clauses.append(clause.format(*move.numbers, **words))
    # An ending is a sentence of its own.
    peer = clauses.pop() if problem[-1].kind in ENDINGS else ""
    story = clauses[-1]
    if len(clauses) > 1:
        story = joiner.join(clauses[:-1]) + " and " + story
    if peer:
        return f"{words['name']} {story}. {peer}. How many do both have?"
    return f"{words['name']} {story}. How many {words['things']} does {words['name']} have?"


def _pick(among: Sequence[T], rng: random.Random) -> T:
    return among[_between(rng, 0, len(among) - 1)]
