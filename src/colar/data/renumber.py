"""Rows by other numbers: a training row whose chain is equations is a program, and runs on other numbers, too.

    Ann has 20 bags of 5 pens and loses 8.      <<20*5=100>> <<100-8=92>>      92
    Ann has 34 bags of 7 pens and loses 9.      <<34*7=238>> <<238-9=229>>     229

`mentions.py` finds the numbers in the words, `program.py` runs the chain, `origins.py` says which number goes where
and which must stay. This file draws. A draw of other numbers is taken only where

- every operand with several candidates has one value by all of them;
- every result is what it was in kind: above 0, whole where it was, no more decimals, at most one digit longer;
- numbers of one kind keep their order, and so do results and the numbers that the chain does not use: a part stays
  smaller than its whole, a threshold stays reached or not;
- percentages that sum to at most 100 still do, to 100 exactly where they did; fractions likewise with 1.

The new rows of a row are a pure function of the row's text, the seed and their number: the order of rows, other rows
and machines play no part. A row that cannot be renumbered stays alone. What is checked is arithmetic and order, not
the world: some new questions tell of odd amounts (a boat for $9, an uncle of 14).
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from colar import progress
from colar.checks import check_number
from colar.data import mentions as numbers_of
from colar.data import origins, program
from colar.data.catalogue import SOURCES
from colar.data.example import Example
from colar.data.formats import collapsed
from colar.data.mentions import Mention
from colar.data.origins import Origin, Trace
from colar.data.program import NotAProgram, Step
from colar.data.spelling import digits_like

TRIES = 400
"""Draws for one new row, after which there is none."""
MOST = 100
"""The largest number of new rows for each row."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A row that can be renumbered: its numbers, its chain as a program, where each operand comes from."""

    example: Example
    mentions: list[Mention]
    steps: list[Step]
    trace: Trace
    ranked: list[list[Fraction]]
    """The values of each kind of number, in order of size."""

    @property
    def values(self) -> dict[Fraction, Fraction]:
        """The row's own numbers, each with itself."""
        return {mention.value: mention.value for mention in self.mentions}


@dataclasses.dataclass(frozen=True)
class Renumbered:
    """What came of the rows: the new rows, and the counts that are said on stderr."""

    examples: list[Example]
    alone: Counter[str]
    """Rows that stay alone, by reason."""
    held_out: int
    """New rows that were dropped because validation or test ask their question."""
    repeated: int
    """New rows that were dropped because another training row asks their question."""


def check(key: str, versions: object, source: str, split: str) -> None:
    """Reject a number of new rows out of range, a source whose steps are no equations, and rows that are tested on."""
    check_number(key, versions, 0, MOST, whole=True)
    if not versions:
        return
    if source == "arithmetic":
        raise ValueError(f"{key}: arithmetic is generated; ask for more rows of it instead")
    if source in SOURCES and not SOURCES[source].equations:
        able = ", ".join(name for name, entry in SOURCES.items() if entry.equations)
        raise ValueError(
            f"{key} is for sources whose steps are equations ({able}, or a file of your own), got {source}"
        )
    if split in ("validation", "test"):
        raise ValueError(f"{key} is for training rows, got split {split}")


def renumbered(
    rows: Sequence[Example], versions: int, seed: int, held_out: Collection[str] = ()
) -> Renumbered:
    """Up to `versions` new rows for each row. `held_out`: questions of validation and test, none of which comes out."""
    forbidden = {collapsed(question) for question in held_out}
    taken = {collapsed(row.question) for row in rows}
    alone: Counter[str] = Counter()
    made: list[Example] = []
    for row in progress.track(rows, "renumber"):
        try:
            made += versions_of(row, versions, seed)
        except NotAProgram as reason:
            alone[str(reason)] += 1
    # By id: which of two equal rows is dropped does not depend on their order.
    kept: set[str] = set()
    n_held_out = 0
    for example in sorted(made, key=lambda example: example.id):
        question = collapsed(example.question)
        if question in forbidden:
            n_held_out += 1
        elif question not in taken:
            taken.add(question)
            kept.add(example.id)
    examples = [example for example in made if example.id in kept]
    return Renumbered(examples, alone, n_held_out, len(made) - len(kept) - n_held_out)


def say(found: Renumbered, n_rows: int) -> None:
    """Say on stderr how many new rows there are, and how many rows stay alone and why."""
    n_alone = found.alone.total()
    reasons = ", ".join(f"{reason}: {count}" for reason, count in found.alone.most_common())
    progress.say(
        f"renumber: {len(found.examples)} new rows from {n_rows - n_alone} of {n_rows}; "
        f"dropped {found.held_out} held-out and {found.repeated} repeated questions; "
        f"{n_alone} rows stay alone ({reasons or 'none'})"
    )


def versions_of(example: Example, versions: int, seed: int) -> list[Example]:
    """Up to `versions` different new rows, `ID~1` and on. `NotAProgram`, with the reason, where there is none."""
    made: list[Example] = []
    plan = plan_of(example)
    asked = {example.question}
    choices = {value: _choices(plan, value) for value in plan.trace.free}
    if not any(choices.values()):
        raise NotAProgram("no number may change")
    for number in range(1, versions + 1):
        key = f"renumber/{seed}/{number}/{example.question}/{' '.join(example.steps)}"
        digest = hashlib.sha256(key.encode()).digest()
        rng = random.Random(int.from_bytes(digest[:8], "big"))
        new = _draw(plan, choices, rng, asked)
        if new is None:
            continue
        asked.add(new.question)
        made.append(dataclasses.replace(new, id=f"{example.id}~{number}", cluster=""))
    if not made:
        raise NotAProgram("no other numbers fit")
    return made


def plan_of(example: Example) -> Plan:
    """Read a row as a program. `NotAProgram`, with the reason, where it is none."""
    steps = program.parse(example.steps)
    try:
        answer = Fraction(example.answer.replace(",", ""))
    except ValueError:
        raise NotAProgram("the answer is no number") from None
    if answer != steps[-1].result:
        raise NotAProgram("the answer is not the last result")
    if digits_like(answer, example.answer) != example.answer:
        raise NotAProgram("a number is oddly spelled")
    found = numbers_of.find(example.question)
    trace = origins.trace(example.question, found, steps)
    return Plan(example, found, steps, trace, _ranked(found))


def rewrite(plan: Plan, values: Mapping[Fraction, Fraction]) -> Example | None:
    """The row with `values[old]` in place of each number; None where its chain does not hold with them.

    With the row's own numbers (`plan.values`) this is the very row.
    """
    if not _in_order(plan, values) or not _shares_fit(plan, values):
        return None
    chain = _run(plan, values)
    if chain is None:
        return None
    results = [result for _, result in chain]
    if not _thresholds_hold(plan, results):
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
    return dataclasses.replace(plan.example, question=question, steps=tuple(texts), answer=answer)


def _run(plan: Plan, values: Mapping[Fraction, Fraction]) -> list[tuple[list[Fraction], Fraction]] | None:
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


def _draw(
    plan: Plan, choices: Mapping[Fraction, list[Fraction]], rng: random.Random, asked: Collection[str]
) -> Example | None:
    """The first draw that holds and asks something new; None after TRIES.

    The more draws have failed, the more numbers keep their values: a hard chain changes in some of them at least.
    """
    own = plan.values
    for attempt in range(TRIES):
        values = _drawn(plan, choices, rng, keep=0.9 * attempt / TRIES)
        if values is None or values == own:
            continue
        new = rewrite(plan, values)
        if new is not None and new.question not in asked:
            return new
    return None


def _drawn(
    plan: Plan, choices: Mapping[Fraction, list[Fraction]], rng: random.Random, keep: float
) -> dict[Fraction, Fraction] | None:
    """Other numbers, from the smallest of a kind to its largest, each above the one before; None where none is left.

    Each keeps its value with probability `keep`. Of Python's generators only random() is the same in all versions.
    """
    values = plan.values
    set_already: set[Fraction] = set()
    for ranked in plan.ranked:
        lowest = Fraction(0)
        for old in ranked:
            if choices.get(old) and old not in set_already and rng.random() >= keep:
                others = choices[old]
                first = bisect.bisect_right(others, lowest)
                if first == len(others):
                    return None
                values[old] = others[first + int(rng.random() * (len(others) - first))]
            set_already.add(old)
            lowest = values[old]
    return values


def _choices(plan: Plan, value: Fraction) -> list[Fraction]:
    """The values that may come for this one: those that every number of that value allows."""
    mentions = [mention for mention in plan.mentions if mention.value == value]
    shared = set(numbers_of.options(mentions[0]))
    for mention in mentions[1:]:
        shared &= set(numbers_of.options(mention))
    return sorted(shared)


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


def _in_order(plan: Plan, values: Mapping[Fraction, Fraction]) -> bool:
    """Whether numbers of one kind are in the order that they were in, and different where they were."""
    for ranked in plan.ranked:
        new = [values[value] for value in ranked]
        if any(after <= before for before, after in itertools.pairwise(new)):
            return False
    return True


def _ranked(mentions: Sequence[Mention]) -> list[list[Fraction]]:
    """The values of each kind of number, from the smallest to the largest."""
    kinds: dict[str, set[Fraction]] = {}
    for mention in mentions:
        kinds.setdefault(_order_kind(mention), set()).add(mention.value)
    return [sorted(values) for values in kinds.values()]


def _order_kind(mention: Mention) -> str:
    """Money, percentages, fractions and factors are each compared among themselves, all else together."""
    if mention.kind in ("money", "percent", "fraction"):
        return mention.kind
    return "times" if mention.kind == "times" or mention.unit == "time" else "count"


def _shares_fit(plan: Plan, values: Mapping[Fraction, Fraction]) -> bool:
    """Whether percentages that sum to at most 100 still do, and to 100 where they did; fractions with 1."""
    for kind, whole in (("percent", 100), ("fraction", 1)):
        old = [mention.value for mention in plan.mentions if mention.kind == kind]
        before = sum(old)
        now = sum(values[value] for value in old)
        if (before == whole and now != whole) or (before < whole < now):
            return False
    return True


def _thresholds_hold(plan: Plan, results: Sequence[Fraction]) -> bool:
    """Whether results and the numbers that the chain does not use are in the order that they were in."""
    used = set()
    for of_step in plan.trace.origins:
        for candidates in of_step:
            used |= {origin.number for origin in candidates}
    for mention in plan.mentions:
        if mention.value in used or mention.kind not in ("integer", "decimal", "money"):
            continue
        for step, result in zip(plan.steps, results, strict=True):
            if _sign(step.result - mention.value) != _sign(result - mention.value):
                return False
    return True


def _sign(value: Fraction) -> int:
    return (value > 0) - (value < 0)
