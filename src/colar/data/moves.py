"""The numbers of an `arithmetic` problem: moves on a running total, drawn so that every result fits.

Of `random.Random` only `random()` is used: Python promises that it draws the same on every version.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from colar.checks import check_holds, check_range

OPERATIONS = "+-*/"
Equation = tuple[int, str, int, int]
"""a, operation, b, result"""


@dataclass(frozen=True)
class Sizes:
    """How long problems are and how large their numbers."""

    steps: tuple[int, int] = (3, 4)
    """Fewest and most equations in a chain; lengths between them are equally frequent."""
    max_number: int = 12
    """Largest number in a question (the smallest is 2)."""
    max_value: int = 40
    """Largest result of any step."""
    operations: str = OPERATIONS
    """Which of + - * / may occur."""

    def __post_init__(self) -> None:
        check_range("steps", self.steps)
        object.__setattr__(self, "steps", tuple(self.steps))  # YAML gives a list
        for key in ("max_number", "max_value"):
            value = getattr(self, key)
            check_holds(key, isinstance(value, int) and value >= 4, value, "a whole number, 4 or more")
        some = isinstance(self.operations, str) and self.operations != ""
        known = some and set(self.operations) <= set(OPERATIONS)
        check_holds("operations", known, self.operations, f"some of the characters {OPERATIONS}")


@dataclass(frozen=True)
class Move:
    """One clause of the story: its kind, the numbers that it names, the equations that it takes."""

    kind: str
    numbers: tuple[int, ...]
    equations: tuple[Equation, ...]
    total: int


# Kind -> the operations of its equations, in order. A start needs no total; an ending closes the story.
STARTS = {"count": "", "groups": "*"}
MOVES = {"add": "+", "sub": "-", "mul": "*", "div": "/", "add_groups": "*+", "sub_groups": "*-"}
ENDINGS = {"more": "++", "fewer": "-+", "times": "*+"}
KINDS = {**STARTS, **MOVES, **ENDINGS}
PRODUCTS = ("groups", "add_groups", "sub_groups")
"""The kinds that name two numbers, whose product is a step."""
LOSSES = ("sub", "sub_groups")
"""The kinds whose last equation takes something away."""


def draw_problem(sizes: Sizes, rng: random.Random) -> list[Move] | None:
    """Draw a problem, or None where the draw ran into a dead end (the caller draws again)."""
    steps_left = between(rng, *sizes.steps)
    moves: list[Move] = []
    total = 0
    # A chain of n steps is made of moves that take one or two each.
    while steps_left or not moves:
        kinds = _possible_kinds(sizes, first=not moves, steps_left=steps_left)
        # Kinds are tried in a random order until one has numbers that fit.
        move = None
        while kinds and move is None:
            kind = kinds.pop(between(rng, 0, len(kinds) - 1))
            move = _draw_move(kind, total, sizes, rng)
        if move is None:
            return None
        moves.append(move)
        total = move.total
        steps_left -= len(move.equations)
    return moves


def _possible_kinds(sizes: Sizes, first: bool, steps_left: int) -> list[str]:
    """The kinds that may stand here: their steps fit, and the sizes allow their operations."""
    if first:
        candidates = list(STARTS)
    elif steps_left == 2:
        # Every ending takes two steps, and nothing may follow it.
        candidates = [*MOVES, *ENDINGS]
    else:
        candidates = list(MOVES)
    allowed = set(sizes.operations)
    # A kind is spelled by its operations: the length of that text is the number of its steps.
    return [kind for kind in candidates if len(KINDS[kind]) <= steps_left and set(KINDS[kind]) <= allowed]


def _draw_move(kind: str, total: int, sizes: Sizes, rng: random.Random) -> Move | None:
    """Draw numbers for a move that keep every result within 2..max_value; None if there are none."""
    if kind == "count":
        number = between(rng, 2, min(sizes.max_number, sizes.max_value))
        return move_on(kind, (number,), total)
    if kind in PRODUCTS:
        return _draw_product(kind, total, sizes, rng)
    choices = _choices(kind, total, sizes)
    if not choices:
        return None
    number = choices[between(rng, 0, len(choices) - 1)]
    return move_on(kind, (number,), total)


def move_on(kind: str, numbers: tuple[int, ...], total: int) -> Move:
    """That move on that total."""
    if kind == "count":
        return Move(kind, numbers, (), numbers[0])
    if kind in PRODUCTS:
        first = equation(numbers[0], "*", numbers[1])
        if kind == "groups":
            return Move(kind, numbers, (first,), first[3])
        last = equation(total, KINDS[kind][1], first[3])
        return Move(kind, numbers, (first, last), last[3])
    first = equation(total, KINDS[kind][0], numbers[0])
    if kind in MOVES:
        return Move(kind, numbers, (first,), first[3])
    # An ending: the second person's number, then both people's together.
    both = equation(total, "+", first[3])
    return Move(kind, numbers, (first, both), both[3])


def _draw_product(kind: str, total: int, sizes: Sizes, rng: random.Random) -> Move | None:
    """Draw a move on a * b. Both are 2 or more, so that the product must have room for 4."""
    if kind == "groups":
        largest = sizes.max_value
    elif kind == "add_groups":
        largest = sizes.max_value - total
    else:
        largest = total - 2
    if largest < 4:
        return None
    # At most half of the room, so that there is always a b of 2 or more.
    a = between(rng, 2, min(sizes.max_number, largest // 2))
    b = between(rng, 2, min(sizes.max_number, largest // a))
    return move_on(kind, (a, b), total)


def _choices(kind: str, total: int, sizes: Sizes) -> Sequence[int]:
    """The numbers that a move of one number may name, given the total so far."""
    smallest = 2
    limit = sizes.max_value
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
    if kind == "fewer":
        # Both together have 2 * total - number.
        smallest = max(smallest, 2 * total - limit)
    within = range(smallest, min(sizes.max_number, largest) + 1)
    if kind == "div":
        return [number for number in within if total % number == 0]
    return within


def equation(a: int, op: str, b: int) -> Equation:
    results = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}
    return a, op, b, results[op]


def between(rng: random.Random, low: int, high: int) -> int:
    """Uniform over low..high, both included, from `random()` alone (see the module's docstring)."""
    return low + int(rng.random() * (high - low + 1))
