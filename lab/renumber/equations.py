"""A chain of equations as a program: `<<20*5=100>> <<100-8=92>>` is parsed, and run again with other operands.

A step is `<<expression=result>>`, or the same without the brackets: numbers, + - * / and parentheses on the left,
one number on the right. Values are exact fractions. A chain can be run again only if every stated result is the exact
value of its expression: for a chain that rounds (10/3=3.33) no rule says how it would round other numbers.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from colar.data import programs
from colar.data.judge import numbers

_STEP = re.compile(r"(<<)?([0-9.+*/() -]+)=\s*([0-9]*\.?[0-9]+)\s*(>>)?")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")
_MOST_DECIMALS = 15


class CannotRenumber(ValueError):
    """A row that has no new rows; the message is the reason, as it is counted and logged."""


@dataclass(frozen=True)
class Step:
    """One equation: its text, the numbers of its expression, the expression as parsed by Python, the stated result."""

    text: str
    operands: tuple[Fraction, ...]
    tree: ast.expr
    result: Fraction


def parse(steps: Sequence[str]) -> list[Step]:
    """The steps of a chain. `CannotRenumber` if one is no equation, rounds, or has a result that is not above 0."""
    if not steps:
        raise CannotRenumber("no chain")
    return [_step(text) for text in steps]


def run(step: Step, operands: Sequence[Fraction]) -> Fraction | None:
    """The value of the step's expression with these operands; None if it divides by 0.

    `20*5` with 36 and 7 is 252.
    """
    try:
        return _value(step.tree, iter(operands))
    except ZeroDivisionError:
        return None


def write(step: Step, operands: Sequence[Fraction], result: Fraction) -> str:
    """The text of the step with other numbers, each spelled like the one that it replaces.

    `<<(3.00 + .5) * 2 = 7.00>>` with 4, 1/4, 3 and 12.75 is `<<(4.00 + .25) * 3 = 12.75>>`.
    """
    values = iter([*operands, result])
    return _NUMBER.sub(lambda number: digits_like(next(values), number[0]), step.text)


def may_become(before: Fraction, now: Fraction) -> bool:
    """True if a result may become another: above 0, with no more decimals, and at most one digit longer.

    92 may become 7 or 999, but neither 0 nor 7.5 nor 9999; 7.5 may become 8 but not 8.25.
    """
    limit: int = 10 ** (len(str(int(before))) + 1)
    units: int = 10 ** finite_decimals(before)
    return 0 < now < limit and units % now.denominator == 0


def digits_like(value: Fraction, like: str, keep_decimals: bool = False) -> str:
    """Write `value` in digits as `like` is written; with `keep_decimals` with at least as many decimals.

    950 like "1,200" is "950", and 11000 is "11,000"; 1/4 like ".5" is ".25"; 4 like "2.50" is "4.00", but like "2.5"
    it is "4". `CannotRenumber` if the value's decimals never end.
    """
    shown = len(like.partition(".")[2])
    # A zero at the end shows that decimals are padded.
    padded = keep_decimals or (shown > 0 and like.endswith("0"))
    places = max(finite_decimals(value), shown if padded else 0)
    whole, _, part = numbers.decimal_text(value).partition(".")
    part = part.ljust(places, "0")
    if "," in like:
        whole = f"{int(whole):,}"
    if like.startswith(".") and whole == "0":
        whole = ""
    return f"{whole}.{part}" if part else whole


def finite_decimals(value: Fraction) -> int:
    """Number of decimals: 2 of 0.25. `CannotRenumber` if they never end."""
    places = numbers.decimals_of(value)
    if places is None or places > _MOST_DECIMALS:
        raise CannotRenumber("a number has decimals without end")
    return places


def _step(text: str) -> Step:
    match = _STEP.fullmatch(text.strip())
    if match is None or (match[1] is None) != (match[4] is None):
        raise CannotRenumber("a step is no equation")
    operands = tuple(map(Fraction, _NUMBER.findall(match[2])))
    step = Step(text, operands, _tree(match[2]), Fraction(match[3]))
    if step.result <= 0:
        raise CannotRenumber("a result is not above 0")
    if run(step, operands) != step.result:
        raise CannotRenumber("a result is rounded or wrong")
    if len(operands) == 1:
        raise CannotRenumber("a step computes nothing")
    if write(step, operands, step.result) != text:  # 007, or twenty decimals
        raise CannotRenumber("a number is oddly spelled")
    return step


def _tree(expression: str) -> ast.expr:
    """The expression as parsed by Python. `CannotRenumber` for signs (`-3`) and anything but + - * / and numbers."""
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise CannotRenumber("a step is no equation") from error
    allowed = (ast.Constant, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise CannotRenumber("a step is no equation")
    return tree


def _value(node: ast.expr, operands: Iterator[Fraction]) -> Fraction:
    """The value of a node; its numbers are the next of `operands`, from left to right."""
    if isinstance(node, ast.BinOp):
        left = _value(node.left, operands)
        _, compute = programs.OPERATORS[type(node.op)]
        return compute(left, _value(node.right, operands))
    return next(operands)
