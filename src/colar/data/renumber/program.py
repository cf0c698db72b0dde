"""A chain of equations as a program: `<<20*5=100>> <<100-8=92>>` is parsed, and run again with other operands.

A step is `<<expression=result>>`, or the same without the brackets: numbers, + - * / and parentheses on the left,
one number on the right. Values are exact fractions. A chain is a program only where every stated result is the exact
value of its expression: a chain that rounds (10/3=3.33) is none, for no rule says how it would round other numbers.

`fill` writes a chain anew. Each number is spelled as the one before it in that place (3.00 stays a number with two
decimals), and all else, spaces and parentheses, is kept: the same numbers give the same text.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

_STEP = re.compile(r"(<<)?([0-9.+*/() -]+)=\s*([0-9]*\.?[0-9]+)\s*(>>)?")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")
_SIGNS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MOST_PLACES = 15


class NotAProgram(ValueError):
    """A chain that cannot be run again; the message is the reason, as it is counted."""


@dataclass(frozen=True)
class Step:
    """One equation, its numbers, and its expression as Python's parser reads it."""

    text: str
    operands: tuple[Fraction, ...]
    tree: ast.expr
    result: Fraction


def parse(steps: Sequence[str]) -> list[Step]:
    """The steps of a chain as a program. `NotAProgram` where one is no equation, rounds, or is not above 0."""
    if not steps:
        raise NotAProgram("no chain")
    return [_step(text) for text in steps]


def run(step: Step, operands: Sequence[Fraction]) -> Fraction | None:
    """The value of the step's expression with these operands; None where it divides by 0, or has a thousand of them."""
    try:
        return _value(step.tree, iter(operands))
    except (ZeroDivisionError, RecursionError):
        return None


def fill(step: Step, operands: Sequence[Fraction], result: Fraction) -> str:
    """The text of the step with other numbers, each in the spelling of the one that it replaces."""
    # The numbers of a step's text, from left to right: the operands in order, and last the result.
    values = iter([*operands, result])
    return _NUMBER.sub(lambda number: digits_like(next(values), number[0]), step.text)


def same_kind(before: Fraction, now: Fraction) -> bool:
    """True if a new result may stand for an old one: above 0, whole where it was, no more decimals, of like size.

    Of like size: at most one digit longer.
    """
    units: int = 10 ** places_of(before)
    # Not by its spelling: Python spells no number of more than 4,300 digits.
    return 0 < now < 10 ** (len(str(int(before))) + 1) and units % now.denominator == 0


def digits_like(value: Fraction, like: str, keep_places: bool = False) -> str:
    """Write `value` in digits as `like` is written: separators, a bare leading point, decimals padded with zeros.

    With `keep_places` it has at least as many decimals. `NotAProgram` where the value's decimals never end.
    """
    shown = len(like.partition(".")[2])
    # A zero at the end shows that decimals are padded: 2.50 becomes 4.00, where 2.5 becomes 4.
    padded = keep_places or (shown > 0 and like.endswith("0"))
    places = max(places_of(value), shown if padded else 0)
    # Exact: there are places enough for all of the value's decimals, so nothing is rounded.
    scaled = value.numerator * 10**places // value.denominator
    digits = str(scaled).rjust(places + 1, "0")
    whole, part = (digits[:-places], digits[-places:]) if places else (digits, "")
    if "," in like:
        whole = f"{int(whole):,}"
    if like.startswith(".") and whole == "0":
        whole = ""
    return f"{whole}.{part}" if part else whole


def places_of(value: Fraction) -> int:
    """Count the decimals of a value. `NotAProgram` where they never end."""
    for places in range(_MOST_PLACES + 1):
        if 10**places % value.denominator == 0:
            return places
    raise NotAProgram("a number has decimals without end")


def _step(text: str) -> Step:
    match = _STEP.fullmatch(text.strip())
    if match is None or (match[1] is None) != (match[4] is None):
        raise NotAProgram("a step is no equation")
    numbers = tuple(map(Fraction, _NUMBER.findall(match[2])))
    step = Step(text, numbers, _tree(match[2]), Fraction(match[3]))
    if step.result <= 0:
        raise NotAProgram("a result is not above 0")
    if run(step, numbers) != step.result:
        raise NotAProgram("a result is rounded or wrong")
    if len(numbers) == 1:
        raise NotAProgram("a step computes nothing")
    # Its own numbers must give its very text: not those of a number with twenty decimals.
    if fill(step, numbers, step.result) != text:
        raise NotAProgram("a number is oddly spelled")
    return step


def _tree(expression: str) -> ast.expr:
    """The expression by Python's own parser. `NotAProgram` for signs (`-3`), and for all but + - * / and numbers."""
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise NotAProgram("a step is no equation") from error
    allowed = (ast.Constant, ast.BinOp, *_SIGNS)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise NotAProgram("a step is no equation")
    return tree


def _value(node: ast.expr, operands: Iterator[Fraction]) -> Fraction:
    """The value of a node, whose numbers are the next of `operands`, from left to right."""
    if isinstance(node, ast.BinOp):
        left = _value(node.left, operands)
        return _SIGNS[type(node.op)](left, _value(node.right, operands))
    return next(operands)
