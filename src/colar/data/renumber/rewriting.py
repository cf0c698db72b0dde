"""One row as a program: read it, and write it with other numbers where its chain holds with them.

`rewrite` takes other numbers only where

- every operand with several candidates has one value by all of them (`origins.py`);
- every result is what it was in kind: above 0, whole where it was, no more decimals, at most one digit longer;
- numbers of one kind keep their order: a part stays smaller than its whole;
- results stay above or below the numbers that they may have been compared with in words, and the last result above or
  below the ones that no step uses;
- percentages that sum to at most 100 still do, to 100 exactly where they did; fractions likewise with 1.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from colar.data.example import Example
from colar.data.judge.quantity import MAX_DIGITS
from colar.data.renumber import mentions as numbers_of
from colar.data.renumber import origins, program
from colar.data.renumber.mentions import Mention
from colar.data.renumber.origins import Origin, Trace
from colar.data.renumber.program import NotAProgram, Step
from colar.data.renumber.spelling import digits_like

_DIGITS = re.compile(r"[\d.,]+")


@dataclass(frozen=True)
class RowProgram:
    """A row that can be renumbered: its numbers, its chain as a program, where each operand comes from."""

    example: Example
    mentions: list[Mention]
    steps: list[Step]
    trace: Trace
    ranked: list[list[Fraction]]
    """The values of each kind of number, in order of size."""
    counted: list[Fraction]
    """Numbers that are no percentages, fractions or factors, and not fixed."""
    unused: set[Fraction]
    """Those of them that the chain does not use."""
    loose: list[int]
    """Steps whose results no step uses, without the last."""

    @property
    def values(self) -> dict[Fraction, Fraction]:
        """The row's own numbers, each with itself."""
        return {mention.value: mention.value for mention in self.mentions}


def plan_of(example: Example) -> RowProgram:
    """Read a row as a program. `NotAProgram`, with the reason, where it is none."""
    _check_length(example)
    steps = program.parse(example.steps)
    answer = _number(example.answer)
    if answer != steps[-1].result:
        raise NotAProgram("the answer is not the last result")
    if digits_like(answer, example.answer) != example.answer:
        raise NotAProgram("a number is oddly spelled")
    found = numbers_of.find(example.question)
    trace = origins.trace(example.question, found, steps)
    every = [origin for of_step in trace.origins for candidates in of_step for origin in candidates]
    numbers = {origin.number for origin in every}
    results = {origin.result for origin in every}
    counted = {
        mention.value
        for mention in found
        if _order_kind(mention) in ("count", "money") and mention.kind != "fixed"
    }
    unused = {value for value in counted if value not in numbers}
    loose = [index for index in range(len(steps) - 1) if index not in results]
    return RowProgram(example, found, steps, trace, _ranked(found), sorted(counted), unused, loose)


def rewrite(plan: RowProgram, values: Mapping[Fraction, Fraction]) -> Example | None:
    """The row with `values[old]` in place of each number; None where its chain does not hold with them.

    With the row's own numbers (`plan.values`) this is the very row.
    """
    if not _in_order(plan, values) or not _shares_fit(plan, values):
        return None
    chain = _run(plan, values)
    if chain is None:
        return None
    results = [result for _, result in chain]
    if not _results_in_order(plan, values, results):
        return None
    try:
        texts = [
            program.fill(step, operands, result)
            for step, (operands, result) in zip(plan.steps, chain, strict=True)
        ]
    except ValueError:  # a third has no end of decimals
        return None
    new_values = [values[mention.value] for mention in plan.mentions]
    question = numbers_of.write(plan.example.question, plan.mentions, new_values)
    answer = digits_like(results[-1], plan.example.answer)
    return replace(plan.example, question=question, steps=tuple(texts), answer=answer)


def _check_length(example: Example) -> None:
    """`NotAProgram` where a number is longer than those that are read in answers.

    Python itself makes no number of more than 4,300 digits, and this leaves room for what a step makes of several.
    """
    for text in (example.question, *example.steps, example.answer):
        if any(len(digits) > MAX_DIGITS for digits in _DIGITS.findall(text)):
            raise NotAProgram("a number is too long")


def _number(answer: str) -> Fraction:
    """The value of an answer in digits. `NotAProgram` for words, for 100/0, and for powers of ten (1e999999999)."""
    digits = answer.replace(",", "")
    try:
        # A power of ten is no spelling that a new answer could have, and a large one would fill the memory.
        if "e" not in digits.lower():
            return Fraction(digits)
    except (ValueError, ZeroDivisionError):
        pass
    raise NotAProgram("the answer is no number")


def _run(
    plan: RowProgram, values: Mapping[Fraction, Fraction]
) -> list[tuple[list[Fraction], Fraction]] | None:
    """Operands and result of every step; None where candidates disagree or a result changes its kind."""
    chain: list[tuple[list[Fraction], Fraction]] = []
    results: list[Fraction] = []
    for step, of_step in zip(plan.steps, plan.trace.origins, strict=True):
        operands = []
        for operand, candidates in zip(step.operands, of_step, strict=True):
            value = _agreed(operand, candidates, values, results)
            if value is None:
                return None
            operands.append(value)
        result = program.run(step, operands)
        if result is None or not program.same_kind(step.result, result):
            return None
        chain.append((operands, result))
        results.append(result)
    return chain


def _agreed(
    operand: Fraction,
    candidates: Sequence[Origin],
    values: Mapping[Fraction, Fraction],
    results: Sequence[Fraction],
) -> Fraction | None:
    """The operand's new value, where all its candidates have the same."""
    found = set()
    for origin in candidates:
        if origin.number is not None:
            found.add(origin.form.of(values[origin.number]))
        elif origin.result is not None:
            found.add(origin.form.of(results[origin.result]))
        else:
            found.add(operand)
    return found.pop() if len(found) == 1 else None


def _in_order(plan: RowProgram, values: Mapping[Fraction, Fraction]) -> bool:
    """True if numbers of one kind are in the order that they were in, and different where they were."""
    for ranked in plan.ranked:
        new = [values[value] for value in ranked]
        if any(after <= before for before, after in itertools.pairwise(new)):
            return False
    return True


def _ranked(mentions: Sequence[Mention]) -> list[list[Fraction]]:
    """The values of each kind of number, from the smallest to the largest."""
    # Fixed numbers are ranked too: those that change keep their places among them.
    kinds: dict[str, set[Fraction]] = {}
    for mention in mentions:
        kinds.setdefault(_order_kind(mention), set()).add(mention.value)
    return [sorted(values) for values in kinds.values()]


def _order_kind(mention: Mention) -> str:
    """Money, percentages, fractions and factors are each compared among themselves, all else together."""
    if mention.kind in ("money", "percent", "fraction"):
        return mention.kind
    return "times" if mention.kind == "times" or mention.unit == "time" else "count"


def _shares_fit(plan: RowProgram, values: Mapping[Fraction, Fraction]) -> bool:
    """True if percentages that sum to at most 100 still do, and to 100 where they did; fractions with 1."""
    for kind, whole in (("percent", 100), ("fraction", 1)):
        # By mention, not by value: 20% and another 20% are 40% of the whole.
        old = [mention.value for mention in plan.mentions if mention.kind == kind]
        before = sum(old)
        now = sum(values[value] for value in old)
        if (before == whole and now != whole) or (before < whole < now):
            return False
    return True


def _results_in_order(
    plan: RowProgram, values: Mapping[Fraction, Fraction], results: Sequence[Fraction]
) -> bool:
    """True if results are on the same side as before of what they may have been compared with in words.

    That is any number of the question: five crates are broken of those that came, a discount begins at $40. And for the
    last result it is another one that no step uses: the chain may compute two prices, and answer with the lower one.
    """
    old = [step.result for step in plan.steps]
    for number in plan.counted:
        for before, now in zip(old, results, strict=True):
            side = _sign(before - number)
            # A used number that is equal to a result by chance may come on either side of it.
            if side != _sign(now - values[number]) and (side or number in plan.unused):
                return False
    loose_before = [_sign(old[index] - old[-1]) for index in plan.loose]
    loose_now = [_sign(results[index] - results[-1]) for index in plan.loose]
    return loose_before == loose_now


def _sign(value: Fraction) -> int:
    return (value > 0) - (value < 0)
