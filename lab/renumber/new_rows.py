"""Rows by other numbers: a training row whose chain is equations is a program, and runs on other numbers, too.

    Ann has 20 bags of 5 pens and loses 8.      <<20*5=100>> <<100-8=92>>      92
    Ann has 34 bags of 7 pens and loses 9.      <<34*7=238>> <<238-9=229>>     229

The pipeline, with what each stage makes of the row above:

| stage | file | result |
|---|---|---|
| find the numbers in the words | `mentions.py` | 20, 5 and 8 are whole numbers |
| parse the chain | `equations.py` | a * b, then c - d |
| trace each operand, pin the numbers that must stay | `operands.py` | a is 20, b is 5, c is the first result, d is 8 |
| draw others of like size and kind | this one | 34, 7 and 9 |
| run the chain, check the story, write the row | `problem.py` | the second row |

The new rows of a row are a pure function of the row's text, the seed and their number: the order of rows, other rows
and machines play no part. A row that cannot be renumbered stays alone. The world is not checked: some new questions
tell of odd amounts (a boat for $9, a bus at 21 miles an hour).
"""

import bisect
import dataclasses
import hashlib
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from colar import progress
from colar.data.example import Example, collapsed
from renumber.equations import CannotRenumber
from renumber.mentions import options
from renumber.problem import Problem, problem_of

TRIES = 400
"""Draws for one new row, after which there is none."""
Choices = Mapping[Fraction, Sequence[Fraction]]
"""Value of a number -> the others that could stand in its place, from the smallest."""


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

    def say(self, n_rows: int) -> None:
        """Log how many new rows there are of `n_rows`, and how many rows stay alone and why."""
        n_alone = self.alone.total()
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.alone.most_common())
        progress.say(
            f"renumber: {len(self.examples)} new rows from {n_rows - n_alone} of {n_rows}; "
            f"dropped {self.held_out} held-out and {self.repeated} repeated questions; "
            f"{n_alone} rows stay alone ({reasons or 'none'})"
        )


def renumbered(rows: Sequence[Example], n_new: int, seed: int, held_out: Collection[str] = ()) -> Renumbered:
    """Up to `n_new` new rows for each row. `held_out`: questions of validation and test.

    A new question that one of these or of `rows` asks already is dropped.
    """
    forbidden = {collapsed(question) for question in held_out}
    taken = {collapsed(row.question) for row in rows}
    alone: Counter[str] = Counter()
    drawn: list[Example] = []
    for row in progress.track(rows, "renumber"):
        try:
            drawn += new_rows_of(row, n_new, seed)
        except CannotRenumber as reason:
            alone[str(reason)] += 1
    # By id: which of two equal rows is dropped does not depend on their order.
    ids: set[str] = set()
    n_held_out = 0
    for example in sorted(drawn, key=lambda example: example.id):
        question = collapsed(example.question)
        if question in forbidden:
            n_held_out += 1
        elif question not in taken:
            taken.add(question)
            ids.add(example.id)
    examples = [example for example in drawn if example.id in ids]
    return Renumbered(examples, alone, n_held_out, len(drawn) - len(ids) - n_held_out)


def new_rows_of(example: Example, n_new: int, seed: int) -> list[Example]:
    """Up to `n_new` different new rows, `ID~1` and on. `CannotRenumber`, with the reason, if there is none."""
    problem = problem_of(example)
    choices = _choices(problem)
    if not any(choices.values()):
        raise CannotRenumber("no number may change")
    rows: list[Example] = []
    questions = {example.question}
    for number in range(1, n_new + 1):
        key = f"renumber/{seed}/{number}/{example.question}/{' '.join(example.steps)}"
        digest = hashlib.sha256(key.encode()).digest()
        rng = random.Random(int.from_bytes(digest[:8], "big"))
        new = _new_row(problem, choices, rng, questions)
        if new is not None:
            questions.add(new.question)
            # Without the row's cluster: where the row repeats a question, the new rows ask others.
            rows.append(dataclasses.replace(new, id=f"{example.id}~{number}", cluster=""))
    if not rows:
        raise CannotRenumber("no other numbers fit")
    return rows


def _choices(problem: Problem) -> Choices:
    """The other values of each free number; where it stands several times, those that fit in all places."""
    choices = {}
    for value in problem.free:
        allowed = [set(options(mention)) for mention in problem.mentions if mention.value == value]
        choices[value] = sorted(set.intersection(*allowed))
    return choices


def _new_row(
    problem: Problem, choices: Choices, rng: random.Random, questions: Collection[str]
) -> Example | None:
    """The first draw with which the row holds and asks none of `questions`; None after TRIES.

    The more draws have failed, the more numbers keep their values: a hard chain changes in some of them at least.
    """
    for attempt in range(TRIES):
        numbers = _draw(problem, choices, rng, keep=0.9 * attempt / TRIES)
        if numbers is None or numbers == problem.numbers:
            continue
        new = problem.with_numbers(numbers)
        if new is not None and new.question not in questions:
            return new
    return None


def _draw(
    problem: Problem, choices: Choices, rng: random.Random, keep: float
) -> dict[Fraction, Fraction] | None:
    """Other numbers, from the smallest of a kind to its largest, each above the one before; None where none is left.

    Each keeps its value with probability `keep`. Of Python's generators only random() is the same in all versions.
    """
    numbers = problem.numbers
    drawn: set[Fraction] = set()
    for ranked in problem.ranked:
        lowest = Fraction(0)
        for old in ranked:
            # A value of two kinds (5 bags, $5) is drawn once: numbers of one value stay equal.
            if choices.get(old) and old not in drawn and rng.random() >= keep:
                others = choices[old]
                first = bisect.bisect_right(others, lowest)
                if first == len(others):
                    return None
                numbers[old] = others[first + int(rng.random() * (len(others) - first))]
            drawn.add(old)
            lowest = numbers[old]
    return numbers
