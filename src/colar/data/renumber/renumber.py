"""Rows by other numbers: a training row whose chain is equations is a program, and runs on other numbers, too.

    Ann has 20 bags of 5 pens and loses 8.      <<20*5=100>> <<100-8=92>>      92
    Ann has 34 bags of 7 pens and loses 9.      <<34*7=238>> <<238-9=229>>     229

| file | |
|---|---|
| `mentions.py` | finds the numbers in the words, and says which others could stand there |
| `program.py` | runs the chain |
| `origins.py` | says which number goes where in the chain, and which must stay |
| this one | draws numbers, and writes the row with them where its chain holds |

The new rows of a row are a pure function of the row's text, the seed and their number: the order of rows, other rows
and machines play no part. A row that cannot be renumbered stays alone. `rewrite` takes other numbers only where

- every operand with several candidates has one value by all of them (`origins.py`);
- every result is what it was in kind: above 0, whole where it was, no more decimals, at most one digit longer;
- numbers of one kind keep their order: a part stays smaller than its whole;
- results stay above or below the numbers that they may have been compared with in words, and the last result above or
  below the ones that no step uses;
- percentages that sum to at most 100 still do, to 100 exactly where they did; fractions likewise with 1.

The world is not checked: some new questions tell of odd amounts (a boat for $9, a bus at 21 miles an hour).
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from colar import progress
from colar.checks import check_number
from colar.data.catalogue import SOURCES
from colar.data.example import Example
from colar.data.formats import collapsed
from colar.data.judge.quantity import MAX_DIGITS
from colar.data.renumber import mentions as numbers_of
from colar.data.renumber import origins, program
from colar.data.renumber.mentions import Mention
from colar.data.renumber.origins import Origin, Origins
from colar.data.renumber.program import NotAProgram, Step, digits_like

TRIES = 400
"""Draws for one new row, after which there is none."""
MOST = 100
"""The largest number of new rows for each row."""
_DIGITS = re.compile(r"[\d.,]+")
_NUMBER = re.compile(r"-?[0-9,]*\.?[0-9]+")


@dataclasses.dataclass(frozen=True)
class Renumbered:
    """Result for the rows: the new rows, and the counts that are logged on stderr."""

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
    choices = {}
    for value in plan.free:
        # What every number of that value allows.
        allowed = [set(numbers_of.options(mention)) for mention in plan.mentions if mention.value == value]
        choices[value] = sorted(set.intersection(*allowed))
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
        # Without the row's cluster: where the row repeats a question, its new versions ask others.
        made.append(dataclasses.replace(new, id=f"{example.id}~{number}", cluster=""))
    if not made:
        raise NotAProgram("no other numbers fit")
    return made


def _draw(
    plan: RowProgram, choices: Mapping[Fraction, list[Fraction]], rng: random.Random, asked: Collection[str]
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
    plan: RowProgram, choices: Mapping[Fraction, list[Fraction]], rng: random.Random, keep: float
) -> dict[Fraction, Fraction] | None:
    """Other numbers, from the smallest of a kind to its largest, each above the one before; None where none is left.

    Each keeps its value with probability `keep`. Of Python's generators only random() is the same in all versions.
    """
    values = plan.values
    set_already: set[Fraction] = set()
    for ranked in plan.ranked:
        lowest = Fraction(0)
        for old in ranked:
            # A value of two kinds (5 bags, $5) is drawn once: numbers of one value stay equal.
            if choices.get(old) and old not in set_already and rng.random() >= keep:
                others = choices[old]
                first = bisect.bisect_right(others, lowest)
                if first == len(others):
                    return None
                values[old] = others[first + int(rng.random() * (len(others) - first))]
            set_already.add(old)
            lowest = values[old]
    return values


# --- one row ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """A row that can be renumbered: its numbers, its chain as a program, where each operand comes from."""

    example: Example
    mentions: list[Mention]
    steps: list[Step]
    origins: Origins
    free: list[Fraction]
    """The values that may change."""
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
    text = " ".join((example.question, *example.steps, example.answer))
    # Python makes no number of more than 4,300 digits: this leaves room for what a step makes of several.
    if any(len(digits) > MAX_DIGITS for digits in _DIGITS.findall(text)):
        raise NotAProgram("a number is too long")
    steps = program.parse(example.steps)
    if not _NUMBER.fullmatch(example.answer):
        raise NotAProgram("the answer is no number")
    answer = Fraction(example.answer.replace(",", ""))
    if answer != steps[-1].result:
        raise NotAProgram("the answer is not the last result")
    if digits_like(answer, example.answer) != example.answer:
        raise NotAProgram("a number is oddly spelled")
    found = numbers_of.find(example.question)
    traced, free = origins.trace(example.question, found, steps)
    every = [origin for of_step in traced for candidates in of_step for origin in candidates]
    numbers = {origin.number for origin in every}
    results = {origin.result for origin in every}
    counted = {
        mention.value
        for mention in found
        if _order_kind(mention) in ("count", "money") and mention.kind != "fixed"
    }
    unused = {value for value in counted if value not in numbers}
    loose = [index for index in range(len(steps) - 1) if index not in results]
    # Fixed numbers are ranked too: those that change keep their places among them.
    kinds: dict[str, set[Fraction]] = {}
    for mention in found:
        kinds.setdefault(_order_kind(mention), set()).add(mention.value)
    ranked = [sorted(values) for values in kinds.values()]
    return RowProgram(example, found, steps, traced, free, ranked, sorted(counted), unused, loose)


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
    except NotAProgram:  # a third has no end of decimals
        return None
    new_values = [values[mention.value] for mention in plan.mentions]
    question = numbers_of.write(plan.example.question, plan.mentions, new_values)
    answer = digits_like(results[-1], plan.example.answer)
    return dataclasses.replace(plan.example, question=question, steps=tuple(texts), answer=answer)


def _run(
    plan: RowProgram, values: Mapping[Fraction, Fraction]
) -> list[tuple[list[Fraction], Fraction]] | None:
    """Operands and result of every step; None where candidates disagree or a result changes its kind."""
    chain: list[tuple[list[Fraction], Fraction]] = []
    for step, of_step in zip(plan.steps, plan.origins, strict=True):
        operands: list[Fraction] = []
        for operand, candidates in zip(step.operands, of_step, strict=True):
            found = {_value(origin, operand, values, chain) for origin in candidates}
            if len(found) > 1:
                return None
            operands += found
        result = program.run(step, operands)
        if result is None or not program.same_kind(step.result, result):
            return None
        chain.append((operands, result))
    return chain


def _value(
    origin: Origin,
    operand: Fraction,
    values: Mapping[Fraction, Fraction],
    chain: Sequence[tuple[list[Fraction], Fraction]],
) -> Fraction:
    """The operand's new value by one of its candidates."""
    if origin.number is not None:
        return origin.form.of(values[origin.number])
    return operand if origin.result is None else origin.form.of(chain[origin.result][1])


def _in_order(plan: RowProgram, values: Mapping[Fraction, Fraction]) -> bool:
    """True if numbers of one kind are in the order that they were in, and different where they were."""
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, plan.ranked))
    return all(values[smaller] < values[larger] for smaller, larger in pairs)


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
