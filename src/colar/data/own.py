"""A user's own rows: from a file, a folder, the Hub or memory to examples, and to training, validation and test rows.

    read(data) -> OwnRows -> split -> Divided(train, validation, test)

One layout is found for all rows, by the columns of the first (`layouts.py`). A row that cannot be read is left out, and
counted by its reason.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colar.checks import did_you_mean
from colar.data import data_files, layouts
from colar.data.example import AnswerType, Example, question_hash
from colar.data.fields import Fields, named_fields
from colar.data.judge import answers, custom

FEWEST = 20
"""Rows below which nothing is left to train on once some are held out."""
HELD_OUT = 0.05
"""Share of the rows for validation, and as many for the test."""
LEAST, MOST = 50, 500
"""Bounds of that number."""
ENOUGH = 0.95
"""Share of the answers that must be numbers, or letters, for all to be judged so."""
LATEX = 0.1
"""Share of the answers with LaTeX from which all are judged as formulas."""
SHOWN = 3
"""Places that a message names."""


@dataclass(frozen=True)
class OwnRows:
    """A user's rows, and how they were understood."""

    name: str
    layout: layouts.Layout
    examples: list[Example]
    columns: list[str]
    """That some row has."""
    judge: str | None
    """`module:function` of a judge of the user's."""
    left_out: dict[str, list[str]]
    """Places of the rows that could not be read, by the reason."""

    def summary(self) -> list[str]:
        """A few lines for a person."""
        rows_by_type = Counter(row.answer_type for row in self.examples)
        types = [f"{n:,} as {name}" for name, n in rows_by_type.most_common()]
        judged = ", ".join(types) if len(types) > 1 else f"as {self.examples[0].answer_type}"
        lines = [
            f"{self.name}: {len(self.examples):,} rows, layout {self.layout.name} ({self.layout.about}); "
            f"answers are judged {f'by {self.judge}' if self.judge else judged}"
        ]
        lines += left_out_lines(self.left_out)
        bare = sum(not example.steps for example in self.examples)
        if bare:
            lines.append(f"{bare:,} of {len(self.examples):,} rows have no reasoning")
        return lines

    def require_chains(self) -> None:
        """ValueError where no row has reasoning: there is nothing to learn to think from."""
        if not any(example.steps for example in self.examples):
            raise ValueError(
                f"{self.name}: no row has reasoning (columns: {', '.join(self.columns)}): name its column, as in "
                f"{layouts.NAMING}"
            )


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each kind of reason: how many rows, and the places of the first."""
    # Alike up to a detail ("an operation that is no arithmetic: sqrt") is one reason.
    kinds: defaultdict[str, dict[str, Sequence[str]]] = defaultdict(dict)
    for reason, places in left_out.items():
        kinds[reason.partition(": ")[0]][reason] = places
    lines = []
    for kind, reasons in sorted(kinds.items(), key=lambda item: -sum(map(len, item[1].values()))):
        places = [place for some in reasons.values() for place in some]
        named = next(iter(reasons)) if len(reasons) == 1 else f"{kind}: {len(reasons)} different ones"
        more = ", ..." if len(places) > SHOWN else ""
        lines.append(f"left out {len(places):,}: {named} ({', '.join(places[:SHOWN])}{more})")
    return lines


@dataclass(frozen=True)
class Divided:
    """Rows to train on, to validate with, and for the table at the end."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    also_in_test: int = 0
    """Rows that were left out of the others because the test asks their question."""


def read(
    data: Any,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    judge: str | None = None,
    answer_type: AnswerType | None = None,
) -> OwnRows:
    """Read a user's rows.

    Args:
        data: A file (`data_files.ENDINGS`), a folder of SPLIT files, a Hub id `owner/name` with `:split`, a list of
            dicts, or a `datasets.Dataset`.
        columns: `{"question": "problem", "answer": "solution"}` where the columns have other names.
        split: Of a folder.
        judge: `module:function` that judges answers of any kind.
        answer_type: That of rows in Coconut's format which name none; by default it is guessed, as in other layouts.

    Raises:
        ValueError: For data that is not there or no table, rows whose columns cannot be recognised, and where no row
            can be read.
    """
    name, entries = _entries(data, split)
    layout = layouts.renamed(columns) if columns else None
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    rows: dict[str, tuple[str, Fields]] = {}
    column_names: dict[str, None] = {}
    for number, (place, raw) in enumerate(entries):
        try:
            cells = named_fields(raw)
            row = {key: value for key, value in cells.items() if value is not None}
            column_names |= dict.fromkeys(map(str, row))
            layout = layout or _layout_of(cells)
            fields = _fields(layout, cells, row, columns)
            # A row that was left out has a number, too.
            key = fields.key or f"{name}/{split}/{number}"
            if key in rows:
                raise ValueError(f"id occurs twice: {key!r}")
        except ValueError as error:
            left_out[str(error)].append(place)
        else:
            rows[key] = (place, fields)
    if not rows and not left_out:
        raise ValueError(f"{data if isinstance(data, str | Path) else name}: no rows")
    # A row may lack a chain: one that all lack is another column.
    _check_columns(column_names, columns, ("steps",))
    if answer_type is None or layout is None or not layouts.is_coconut(layout, column_names):
        answer_type = _answer_type([fields for _, fields in rows.values()])
    examples = []
    for key, (place, fields) in rows.items():
        try:
            # With a judge of the user's, answers may be anything.
            examples.append(fields.example(key, "text" if judge else fields.answer_type or answer_type))
        except ValueError as error:
            left_out[str(error)].append(place)
    if not examples or layout is None:
        reason, places = max(left_out.items(), key=lambda item: len(item[1]))
        raise ValueError(f"{places[0]}: {reason} (none of the rows can be read)")
    return OwnRows(name, layout, custom.applied(examples, judge), list(column_names), judge, dict(left_out))


def _fields(
    layout: layouts.Layout,
    cells: Mapping[str, Any],
    row: Mapping[str, Any],
    columns: Mapping[str, str] | None,
) -> Fields:
    """The fields of one row, of which `row` has the cells that are not empty."""
    if columns is None and not layout.fits(row):
        empty = ", ".join(str(key) for key, value in cells.items() if value is None)
        has = f"it has {', '.join(map(str, row))}" + (f"; empty: {empty}" if empty else "")
        raise ValueError(f"not of layout {layout.name} ({layout.about}): {has}")
    _check_columns(row, columns, ("question", "answer"))
    return layout.parse(row)


def _layout_of(cells: Mapping[str, Any]) -> layouts.Layout:
    """The layout of a first row: by what it has, or else by its columns, of which it may leave some empty."""
    try:
        return layouts.of(cells)
    except ValueError:
        with contextlib.suppress(ValueError):
            return layouts.of({key: "" if value is None else value for key, value in cells.items()})
        raise


def _entries(data: Any, split: str) -> tuple[str, Iterator[tuple[str, Any]]]:
    """A name for the rows, and (place, raw row) of each."""
    if isinstance(data, str | Path):
        path = Path(data)
        if path.is_dir():
            return path.name, data_files.read(data_files.existing(path, split))
        if path.is_file():
            return data_files.name_of(path), data_files.read(path)
        hub, _, part = str(data).partition(":")
        is_path = str(data).startswith((".", "/", "~")) or data_files.ending(path) in data_files.ENDINGS
        if is_path or hub.count("/") != 1:
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            near = did_you_mean(path.name, [each.name for each in beside])
            raise ValueError(f"no data at {data}: there is no such file or folder{near}")
        return hub, data_files.from_hub(hub, (None,), part or split)
    if not isinstance(data, Iterable) or isinstance(data, Mapping):
        raise ValueError(
            f"data must be a file, a folder, a Hub id, or a list of rows, got {type(data).__name__}"
        )
    return "rows", ((f"row {number}", row) for number, row in enumerate(data, start=1))


def _check_columns(row: Iterable[Any], columns: Mapping[str, str] | None, keys: Iterable[str]) -> None:
    """Reject a row that lacks a column that the user has named for one of `keys`."""
    there = [str(name) for name in row]
    for key in keys:
        column = (columns or {}).get(key)
        if column is not None and column not in there:
            near = did_you_mean(column, there)
            raise ValueError(f"no column {column!r} for {key}{near} (there are {', '.join(there)})")


def _answer_type(rows: Sequence[Fields]) -> AnswerType:
    """The type of rows that name none: that of the others, if it is one; else guessed from their answers.

    Numbers or letters where nearly all answers are, LaTeX or text.
    """
    types = {fields.answer_type for fields in rows if fields.answer_type is not None}
    if len(types) == 1:
        return types.pop()
    golds = [fields.answer for fields in rows if fields.answer_type is None]
    strict: tuple[AnswerType, ...] = ("number", "choice")
    for answer_type in strict:
        if sum(answers.understood(gold, answer_type) for gold in golds) >= ENOUGH * len(golds):
            return answer_type
    formulas = sum("\\" in gold or "$" in gold or "^" in gold for gold in golds)
    return "latex" if formulas >= LATEX * len(golds) else "text"


# --- splits ------------------------------------------------------------------------------------------------


def divide(rows: Sequence[Example], test: Sequence[Example] | None = None) -> Divided:
    """Hold out rows by a hash of their question: 5% for validation and 5% for the test, 50 to 500 of each.

    Of fewer than 200 rows a quarter is taken for each. The same rows give the same split in any order and on any
    machine, and rows of one question are on one side. With `test`, no test is taken from `rows`, and those that ask a
    question of it are left out. ValueError for fewer than 20 rows.
    """
    if len(rows) < FEWEST:
        raise ValueError(
            f"{len(rows)} rows are too few to train on and to measure with: {FEWEST} or more are needed"
        )
    tested = {_question(row) for row in test or ()}
    by_question: defaultdict[str, list[Example]] = defaultdict(list)
    for row in rows:
        if _question(row) not in tested:
            by_question[_question(row)].append(row)
    n = sum(map(len, by_question.values()))
    held = min(MOST, max(LEAST, round(HELD_OUT * n)), n // 4)
    training: list[Example] = []
    validation: list[Example] = []
    test_rows: list[Example] = []
    for question in sorted(by_question):
        if test is None and len(test_rows) < held:
            test_rows += by_question[question]
        elif len(validation) < held:
            validation += by_question[question]
        else:
            training += by_question[question]
    if not training or not validation:
        tested_rows = f" ({len(rows) - n} of {len(rows)} rows have a question of the test)" if tested else ""
        raise ValueError(
            f"{len(by_question)} different questions are too few to train on and to measure with{tested_rows}"
        )
    # In the order of the file.
    order = {id(row): place for place, row in enumerate(rows)}
    for part in (training, validation, test_rows):
        part.sort(key=lambda row: order[id(row)])
    return Divided(training, validation, test_rows if test is None else list(test), len(rows) - n)


def _question(row: Example) -> str:
    """A hash of what a row asks, its context included."""
    return question_hash(" ".join([*(text for _, text in row.context), row.question]))
