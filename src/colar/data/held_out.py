"""The questions of a user's rows that are held out of training: for validation, and for the test at the end."""

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from colar.data.example import Example, question_hash
from colar.data.judge.numbers import folded

FEWEST = 20
"""Fewest rows that can be divided: of fewer, nothing is left to train on once some are held out."""
HELD_OUT = 0.05
"""Share of the questions held out for validation, and again for the test."""
FEWEST_HELD_OUT, MOST_HELD_OUT = 50, 500
"""Bounds on the number of questions held out for each."""
SPACE = re.compile(r"(?<!\d) | (?!\d)")
"""A space that is not between two digits."""


@dataclass(frozen=True)
class Divided:
    """Rows for training, for validation, and for the test at the end."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    also_held_out: int
    """Number of rows left out because a validation or test row has their question."""
    without_chain: int
    """Number of training rows left out because they have no reasoning."""


def question_key(row: Example) -> str:
    """A key that spellings of one question share: without case, white space but between digits, and the choice among
    Unicode's look-alikes (a composed or a decomposed accent, a straight or a curly quote)."""
    return SPACE.sub("", " ".join(folded(row.conversation).casefold().split()))


def divide(
    rows: Sequence[Example],
    validation: Sequence[Example] | None = None,
    test: Sequence[Example] | None = None,
) -> Divided:
    """Hold out questions by their hash: 5% for validation and 5% for the test, 50 to 500 of each.

    Of fewer than 200 questions a quarter is held out for each. The same rows give the same questions in any order and
    on any machine. A question that is held out has one row, its first, and its further rows are left out, because
    several answers to one question would measure no more than one. If `validation` or `test` is given, none are taken
    from `rows` for it, and rows with one of its questions, however spelt, are left out, as are rows of `validation`
    with a question of `test`. Rows without reasoning are held out, but not trained on, unless no training row has any.
    ValueError for fewer than 20 rows, or too few different questions.
    """
    if len(rows) < FEWEST:
        raise ValueError(
            f"{len(rows)} rows are too few to train on and to measure with: {FEWEST} or more are needed"
        )
    tested = set(map(question_key, test or ()))
    given = tested | set(map(question_key, validation or ()))
    places_of: defaultdict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(map(question_key, rows)):
        if key not in given:
            places_of[key].append(place)
    # Of the spellings of one question the hash that comes first, in any order of the rows.
    questions = sorted(
        places_of.values(),
        key=lambda places: min(question_hash(rows[place].conversation) for place in places),
    )
    n = len(questions)
    n_to_hold = min(MOST_HELD_OUT, max(FEWEST_HELD_OUT, round(HELD_OUT * n)), n // 4)

    def first_rows() -> list[Example]:
        """Take the next questions: the first row of each, in the order of the rows."""
        taken = questions[:n_to_hold]
        del questions[:n_to_hold]
        return [rows[place] for place in sorted(places[0] for places in taken)]

    tests = first_rows() if test is None else list(test)
    untested = [row for row in validation or () if question_key(row) not in tested]
    validated = first_rows() if validation is None else untested
    train = [rows[place] for place in sorted(itertools.chain.from_iterable(questions))]
    n_held = n - len(questions)
    # Half of such rows, and a model answers nearly every question without a thought.
    reasoned = [row for row in train if row.steps] or train
    if not (reasoned and validated and tests):
        n_given = len(rows) - sum(map(len, places_of.values()))
        also = f" ({n_given} of {len(rows)} rows have a question that is held out)" if given else ""
        raise ValueError(f"{n} different questions are too few to train on and to measure with{also}")
    return Divided(
        reasoned,
        validated,
        tests,
        also_held_out=len(rows) - len(train) - n_held,
        without_chain=len(train) - len(reasoned),
    )
