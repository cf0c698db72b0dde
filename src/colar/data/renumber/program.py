"""A chain of equations as a program: `<<20*5=100>> <<100-8=92>>` is parsed, and run again with other operands.

A step is `<<expression=result>>`, or the same without the brackets: numbers, + - * / and parentheses on the left,
one number on the right. Values are exact fractions. A chain is a program only where every stated result is the exact
value of its expression: a chain that rounds (10/3=3.33) is none, for no rule says how it would round other numbers.

`fill` writes a chain anew. Each number is spelled as the one before it in that place (3.00 stays a number with two
decimals), and all else, spaces and parentheses, is kept: the same numbers give the same text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from colar.data.renumber.spelling import digits_like, places_of

_STEP = re.compile(r"(<<)?([0-9.+*/() -]+)=\s*([0-9]*\.?[0-9]+)\s*(>>)?")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")
_TOKEN = re.compile(r"\s*(?:([0-9]*\.?[0-9]+)|([-+*/()]))")
_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2}


class NotAProgram(ValueError):
    """A chain that cannot be run again; the message is the reason, as it is counted."""


@dataclass(frozen=True)
class Step:
    """One equation. `code` is its expression in postfix: a number is the index of an operand, a text an operator."""

    text: str
    operands: tuple[Fraction, ...]
    code: tuple[int | str, ...]
    result: Fraction


def parse(steps: Sequence[str]) -> list[Step]:
    """The steps of a chain as a program. `NotAProgram` where one is no equation, rounds, or is not above 0."""
    if not steps:
        raise NotAProgram("no chain")
    return [_step(text) for text in steps]


def run(step: Step, operands: Sequence[Fraction]) -> Fraction | None:
    """The value of the step's expression with these operands; None where it divides by 0."""
    stack: list[Fraction] = []
    for item in step.code:
        if isinstance(item, int):
            stack.append(operands[item])
            continue
        right = stack.pop()
        left = stack.pop()
        if item == "/" and right == 0:
            return None
        stack.append(_apply(item, left, right))
    return stack.pop()


def fill(step: Step, operands: Sequence[Fraction], result: Fraction) -> str:
    """The text of the step with other numbers, each in the spelling of the one that it replaces."""
    # The numbers of a step's text, from left to right: the operands in order, and last the result.
    values = iter([*operands, result])

    def other(match: re.Match[str]) -> str:
        return digits_like(next(values), match[0])

    return _NUMBER.sub(other, step.text)


def same_kind(before: Fraction, now: Fraction) -> bool:
    """Whether a new result may stand for an old one: above 0, whole where it was, no more decimals, of like size.

    Of like size: at most one digit longer.
    """
    longest = len(str(int(before))) + 1
    # Not by its spelling: Python spells no number of more than 4,300 digits.
    if now <= 0 or now >= 10**longest:
        return False
    units: int = 10 ** places_of(before)
    return units % now.denominator == 0


def _step(text: str) -> Step:
    match = _STEP.fullmatch(text.strip())
    if match is None or (match[1] is None) != (match[4] is None):
        raise NotAProgram("a step is no equation")
    numbers = [Fraction(number) for number in _NUMBER.findall(match[2])]
    code = _postfix(match[2])
    result = Fraction(match[3])
    step = Step(text, tuple(numbers), code, result)
    if result <= 0:
        raise NotAProgram("a result is not above 0")
    if run(step, numbers) != result:
        raise NotAProgram("a result is rounded or wrong")
    if len(numbers) == 1:
        raise NotAProgram("a step computes nothing")
    if not _respelled(step):
        raise NotAProgram("a number is oddly spelled")
    return step


def _respelled(step: Step) -> bool:
    """Whether the step's own numbers give its very text: not 007, nor a number with twenty decimals."""
    try:
        return fill(step, step.operands, step.result) == step.text
    except ValueError:
        return False


def _postfix(expression: str) -> tuple[int | str, ...]:
    """The expression in postfix (Dijkstra's shunting yard). No signs: `-3` is no program here."""
    code: list[int | str] = []
    waiting: list[str] = []
    count = 0
    operand_next = True
    position = 0
    while expression[position:].strip():
        match = _TOKEN.match(expression, position)
        if match is None:
            raise NotAProgram("a step is no equation")
        position = match.end()
        number, sign = match[1], match[2]
        # Numbers and "(" stand where an operand is due; operators and ")" where one has been.
        if operand_next != (number is not None or sign == "("):
            raise NotAProgram("a step is no equation")
        if number is not None:
            code.append(count)
            count += 1
            operand_next = False
        elif sign == "(":
            waiting.append(sign)
        elif sign == ")":
            while waiting and waiting[-1] != "(":
                code.append(waiting.pop())
            if not waiting:
                raise NotAProgram("a step is no equation")
            waiting.pop()
        else:
            # At equal rank the earlier one binds first: 8-3-2 is (8-3)-2.
            while waiting and waiting[-1] != "(" and _BINDS[waiting[-1]] >= _BINDS[sign]:
                code.append(waiting.pop())
            waiting.append(sign)
            operand_next = True
    if operand_next or "(" in waiting:
        raise NotAProgram("a step is no equation")
    return (*code, *reversed(waiting))


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else left / right
