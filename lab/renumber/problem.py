"""`Problem`: a row as a function of its numbers. `problem_of(row)` reads it, `with_numbers` writes it with others.

    Ann has 20 bags of 5 pens and loses 8.      <<20*5=100>> <<100-8=92>>      92
    {20: 34, 5: 7, 8: 9}
    Ann has 34 bags of 7 pens and loses 9.      <<34*7=238>> <<238-9=229>>     229

The story must hold with the new numbers, and the chain must compute what it did. So `with_numbers` accepts only those
with which

- numbers of one kind keep their order: a part stays smaller than its whole;
- percentages that sum to at most 100 still do, to 100 exactly where they did; fractions likewise with 1;
- an operand with several origins has one value by all of them;
- every result is what it was in kind: above 0, whole where it was, no more decimals, at most one digit longer;
- results stay above or below the numbers that they may have been compared with in words, and the last result above or
  below the ones that no step uses.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property

from colar.data.example import Example
from renumber import equations, mentions
from renumber.equations import CannotRenumber, Step
from renumber.mentions import Mention
from renumber.operands import FORMS, Operand, Origin, cued_constants, pinned, trace

_NUMBER = re.compile(r"-?[0-9,]*\.?[0-9]+")
Numbers = Mapping[Fraction, Fraction]
"""A new value for each value of the question's numbers: numbers of one value stay equal."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A row whose chain can be run with other numbers."""

    example: Example
    mentions: list[Mention]
    steps: list[Step]
    operands: list[Operand]
    free: list[Fraction]
    """The values that may change."""

    @property
    def numbers(self) -> dict[Fraction, Fraction]:
        """The row's own numbers, each with itself."""
        return {mention.value: mention.value for mention in self.mentions}

    @cached_property
    def ranked(self) -> list[list[Fraction]]:
        """The values of each kind of number, in order of size, fixed ones among them."""
        by_quantity: dict[str, set[Fraction]] = {}
        for mention in self.mentions:
            by_quantity.setdefault(_quantity(mention), set()).add(mention.value)
        return [sorted(values) for values in by_quantity.values()]

    @cached_property
    def amounts(self) -> set[Fraction]:
        """Counts and sums of money that are not fixed: those that a result may be compared with in words."""
        return {
            mention.value
            for mention in self.mentions
            if mention.kind != "fixed" and _quantity(mention) in ("count", "money")
        }

    def with_numbers(self, numbers: Numbers) -> Example | None:
        """The row with `numbers[old]` in place of each number; None if its chain or its story would not hold.

        With the row's own numbers this is the very row.
        """
        if not self._in_order(numbers) or not self._shares_fit(numbers):
            return None
        try:
            chain = self._run(numbers)
            results = [result for _, result in chain]
            if not self._compares_as_before(numbers, results):
                return None
            steps = tuple(equations.write(step, *new) for step, new in zip(self.steps, chain, strict=True))
        except CannotRenumber:
            return None
        values = [numbers[mention.value] for mention in self.mentions]
        question = mentions.write(self.example.question, self.mentions, values)
        answer = equations.digits_like(results[-1], self.example.answer)
        return dataclasses.replace(self.example, question=question, steps=steps, answer=answer)

    def _in_order(self, numbers: Numbers) -> bool:
        """True if numbers of one kind are in the order that they were in, and different where they were."""
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self.ranked))
        return all(numbers[smaller] < numbers[larger] for smaller, larger in pairs)

    def _shares_fit(self, numbers: Numbers) -> bool:
        """True if percentages that sum to at most 100 still do, and to 100 where they did; fractions with 1."""
        for kind, whole in (("percent", 100), ("fraction", 1)):
            # By mention, not by value: 20% and another 20% are 40% of the whole.
            values = [mention.value for mention in self.mentions if mention.kind == kind]
            before = sum(values)
            now = sum(numbers[value] for value in values)
            if (before == whole and now != whole) or (before < whole < now):
                return False
        return True

    def _run(self, numbers: Numbers) -> list[tuple[list[Fraction], Fraction]]:
        """Operands and result of each step; `CannotRenumber` if origins disagree or a result changes its kind."""
        chain: list[tuple[list[Fraction], Fraction]] = []
        operands = iter(self.operands)
        for step in self.steps:
            results = [result for _, result in chain]
            values = [_value(next(operands), numbers, results) for _ in step.operands]
            result = equations.run(step, values)
            if result is None or not equations.may_become(step.result, result):
                raise CannotRenumber("a result changes its kind")
            chain.append((values, result))
        return chain

    def _compares_as_before(self, numbers: Numbers, results: Sequence[Fraction]) -> bool:
        """True if results are on the same side as before of what they may have been compared with in words.

        That is any amount of the question: five crates are broken of those that came, a discount begins at $40. And for
        the last result it is another one that no step uses: the chain may compute two prices, and answer with the lower
        one.
        """
        before = [step.result for step in self.steps]
        used = {value for operand in self.operands for value in operand.numbers}
        for amount in self.amounts:
            for old, new in zip(before, results, strict=True):
                side = _sign(old - amount)
                # An amount that a step uses may equal a result by chance, and come on either side of it.
                if side != _sign(new - numbers[amount]) and (side or amount not in used):
                    return False
        used_results = {index for operand in self.operands for index in operand.results}
        return all(
            _sign(before[index] - before[-1]) == _sign(results[index] - results[-1])
            for index in range(len(results) - 1)
            if index not in used_results
        )


def problem_of(example: Example) -> Problem:
    """Read a row as a function of its numbers. `CannotRenumber`, with the reason, if it is none."""
    # Earlier turns would keep the old numbers. A system message without numbers fits every question.
    if any(role != "system" or mentions.find(text) for role, text in example.context):
        raise CannotRenumber("an earlier turn may have numbers")
    steps = equations.parse(example.steps)
    _check_answer(example.answer, steps[-1].result)
    numbers = mentions.find(example.question)
    cued = cued_constants(example.question, numbers)
    operands = trace(numbers, steps, cued)
    used = {value for operand in operands for value in operand.numbers}
    free = used - pinned(example.question, numbers, operands, cued)
    if not free:
        raise CannotRenumber("no number may change")
    return Problem(example, numbers, steps, operands, sorted(free))


def _check_answer(answer: str, result: Fraction) -> None:
    """`CannotRenumber` unless the answer is the last result, in a spelling that another number can have."""
    if not _NUMBER.fullmatch(answer):
        raise CannotRenumber("the answer is no number")
    value = Fraction(answer.replace(",", ""))
    if value != result:
        raise CannotRenumber("the answer is not the last result")
    if equations.digits_like(value, answer) != answer:
        raise CannotRenumber("a number is oddly spelled")


def _value(operand: Operand, numbers: Numbers, results: Sequence[Fraction]) -> Fraction:
    """The operand's new value, if all its origins agree on it."""

    def by(origin: Origin) -> Fraction:
        if origin.number is not None:
            return FORMS[origin.form](numbers[origin.number])
        return operand.value if origin.result is None else FORMS[origin.form](results[origin.result])

    values = {by(origin) for origin in operand.origins}
    if len(values) > 1:
        raise CannotRenumber("origins disagree")
    return values.pop()


def _quantity(mention: Mention) -> str:
    """Money, percentages, fractions and factors are each compared among themselves, all else as counts."""
    if mention.kind in ("money", "percent", "fraction"):
        return mention.kind
    return "times" if mention.kind == "times" or mention.unit == "time" else "count"


def _sign(value: Fraction) -> int:
    return (value > 0) - (value < 0)
