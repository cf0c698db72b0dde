"""Rows by other numbers: a training row whose chain is equations is a program, and runs on other numbers, too.

    Ann has 20 bags of 5 pens and loses 8.      <<20*5=100>> <<100-8=92>>      92
    Ann has 34 bags of 7 pens and loses 9.      <<34*7=238>> <<238-9=229>>     229

| file | |
|---|---|
| `mentions.py` | finds the numbers in the words, and says which others could stand there |
| `program.py` | runs the chain |
| `origins.py` | says which number goes where in the chain, and which must stay |
| `rewriting.py` | writes the row with other numbers, where its chain holds with them |
| this one | draws numbers, for one row and for all |

The new rows of a row are a pure function of the row's text, the seed and their number: the order of rows, other rows
and machines play no part. A row that cannot be renumbered stays alone. What is checked is arithmetic and order, not
the world: some new questions tell of odd amounts (a boat for $9, a bus at 21 miles an hour).
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from colar import progress
from colar.checks import check_number
from colar.data.catalogue import SOURCES
from colar.data.example import Example
from colar.data.formats import collapsed
from colar.data.renumber import mentions
from colar.data.renumber.program import NotAProgram
from colar.data.renumber.rewriting import RowProgram, plan_of, rewrite

TRIES = 400
"""Draws for one new row, after which there is none."""
MOST = 100
"""The largest number of new rows for each row."""


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
    for value in plan.trace.free:
        # What every number of that value allows.
        allowed = [set(mentions.options(mention)) for mention in plan.mentions if mention.value == value]
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
