"""`drill`: nothing but arithmetic. A question lists terms, its chain works them out one after another.

    Work out: 12*3 48/6 15+27
    <<12*3=36>> <<48/6=8>> <<15+27=42>>                                                     42

There is nothing to plan and little to read, so a row has more results for its length than a word problem. It is meant
for a model that can plan at a high c and not yet compute (docs/log.md: the one short trial on SmolLM2 did not help).

Numbers have any number of digits up to their largest, equally often: small ones are frequent, as in word problems.
Rows and splits are made as `logic.py` has it; a row's split is that of its terms, in whatever order.
"""

from __future__ import annotations

from dataclasses import dataclass

from colar.checks import check_holds, check_number, check_range
from colar.data.example import Example
from colar.data.logic import Dice, Problem
from colar.data.logic import generate as generate_rows

SOURCE = "drill"
OPERATIONS = "+-*/"


@dataclass(frozen=True)
class DrillConfig:
    """Which terms are drawn: `<number><operation><number>`, with a whole result of 1 or more."""

    terms: tuple[int, int] = (8, 16)
    """Fewest and most terms of a question, all numbers between equally often."""
    operations: str = OPERATIONS
    """Which operations, equally often."""
    max_factor: int = 99
    """Largest factor of a product, divisor, and quotient."""
    max_value: int = 999
    """Largest number and result."""

    def __post_init__(self) -> None:
        check_range("terms", self.terms)
        object.__setattr__(self, "terms", tuple(self.terms))  # YAML gives a list
        known = isinstance(self.operations, str) and set(self.operations) <= set(OPERATIONS)
        check_holds("operations", known and bool(self.operations), self.operations, f"some of {OPERATIONS}")
        check_number("max_factor", self.max_factor, 2, whole=True)
        # Room for a sum of the smallest numbers, and for a product of them.
        check_number("max_value", self.max_value, 4, whole=True)


def generate(config: DrillConfig, split: str, n: int, seed: int) -> list[Example]:
    """Make the first `n` rows of that split and seed. ValueError for an unknown split or a negative n."""

    def draw(dice: Dice) -> Problem:
        return draw_problem(config, dice)

    return generate_rows(SOURCE, draw, "number", split, n, seed, frozenset())


def draw_problem(config: DrillConfig, dice: Dice) -> Problem:
    """One question, with its chain."""
    fewest, most = config.terms
    terms, steps, facts = [], [], []
    result = 0
    for _ in range(fewest + int(dice.chance() * (most - fewest + 1))):
        a, operation, b, result = draw_term(config, dice)
        terms.append(f"{a}{operation}{b}")
        steps.append(f"<<{terms[-1]}={result}>>")
        # 3*4 and 4*3 are one term.
        low, high = (min(a, b), max(a, b)) if operation in "+*" else (a, b)
        facts.append(f"{low}{operation}{high}")
    return Problem(f"Work out: {' '.join(terms)}", tuple(steps), str(result), tuple(facts))


def draw_term(config: DrillConfig, dice: Dice) -> tuple[int, str, int, int]:
    """(a, operation, b, result), all of them from 1 to `max_value`."""
    operation = dice.pick(config.operations)
    most = config.max_value
    if operation in "+-":
        # Of two parts and their sum, either the sum or a part is what is asked for.
        total = number(dice, 2, most)
        part = number(dice, 1, total - 1)
        return (part, "+", total - part, total) if operation == "+" else (total, "-", part, total - part)
    # The smallest product is 4. No factor is so large that its product with 2 would be too large.
    a = number(dice, 2, min(config.max_factor, most // 2))
    b = number(dice, 2, min(config.max_factor, most // a))
    return (a, "*", b, a * b) if operation == "*" else (a * b, "/", a, b)


def number(dice: Dice, low: int, high: int) -> int:
    """A number from `low` to `high`: first how many digits it has, then which number of so many."""
    lengths = range(len(str(low)), len(str(high)) + 1)
    digits = dice.pick(lengths)
    smallest: int = 10 ** (digits - 1)
    least = max(low, smallest)
    most = min(high, 10 * smallest - 1)
    return least + int(dice.chance() * (most - least + 1))
