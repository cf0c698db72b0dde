"""A user's rows: read from a file, a folder, the Hub or memory.

All rows have one layout, recognised by the columns of the first row (`layouts.py`). A row that cannot be read is left
out, and counted by its reason.
"""

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colar.checks import check_known, did_you_mean
from colar.data import answer_types, data_files, layouts
from colar.data.catalogue import SOURCES
from colar.data.data_files import LeftOut, ParsedRow, RawRows, examples_of, parsed
from colar.data.example import AnswerType, Example, Fields, Row, named_fields
from colar.data.judge import judged_by

PARTS_OF_QUESTION = ("choices", "options", "passage")
"""Columns that are not read, although a question may need them."""
FIRST_ROWS = 100
"""Rows that tell which columns are in use."""


@dataclass(frozen=True)
class UserRows:
    """A user's rows, and how they were understood."""

    name: str
    layout: layouts.Layout
    examples: list[Example]
    columns: list[str]
    """Columns that at least one row has."""
    roles: dict[str, str]
    """question, answer and steps -> column; {} in layouts that have other parts."""
    answer_type: AnswerType
    """Answer type of the rows that name none."""
    untyped: int
    """Number of rows that name no answer type."""
    unmarked: int
    """Number of rows whose chains lose lines without a `<<...>>` mark (`reasoning.cut`)."""
    judge: str | None
    """`module:function` of the user's judge."""
    left_out: LeftOut

    def summary(self) -> list[str]:
        """A human-readable summary, in a few lines."""
        rows_by_type = Counter(row.answer_type for row in self.examples)
        types = [f"{n:,} as {name}" for name, n in rows_by_type.most_common()]
        judged = ", ".join(types) if len(types) > 1 else f"as {self.examples[0].answer_type}"
        lines = [
            f"{self.name}: {len(self.examples):,} rows, layout {self.layout.name} ({self._read_as()}); "
            f"answers are judged {f'by {self.judge}' if self.judge else judged}"
        ]
        if self.unmarked:
            lines[0] += f"; lines without a <<...>> mark are left out of {self.unmarked:,} chains"
        lines += self.left_out.lines()
        bare = sum(not example.steps for example in self.examples)
        if bare:
            lines.append(f"{bare:,} of {len(self.examples):,} rows have no reasoning")
        firsts = {example.context[0] if example.context else ("", "") for example in self.examples}
        if len(firsts) == 1 and (first := firsts.pop())[0] == "system":
            lines.append(
                f"every row has the system message {first[1][:60]!r}: requests need it as well (--system), which takes "
                "a chat template"
            )
        return lines + self.unread()

    def _read_as(self) -> str:
        """The columns that are read, and those that are not."""
        if not self.roles:
            return self.layout.about
        read = {*self.roles.values(), *layouts.columns_beside(self.roles["question"])}
        columns: Mapping[str, str] = dict(zip(self.columns, self.columns, strict=True))
        # Columns that the user has named are read as they are spelt.
        if self.layout.name != "columns":
            columns = layouts.known_names(columns)
        others = [column for name, column in columns.items() if name not in read]
        parts = [f"{key} from {self.roles[key]}" for key in layouts.KEYS if key in self.roles]
        if "steps" not in self.roles and any(example.steps for example in self.examples):
            parts[-1] = f"steps and {parts[-1]}"
        return ", ".join(parts) + (f"; not read: {', '.join(others)}" if others else "")

    def unread(self) -> list[str]:
        """Warnings about columns that a question may need, and that are not read."""
        return [
            f"the column {column} is not read: write its text into the question"
            for column in self.columns
            if column.strip().lower() in PARTS_OF_QUESTION
            and column.strip().lower() not in self.layout.about.lower()
        ]

    def require_chains(self) -> None:
        """Raise ValueError if no row has reasoning, because there is none to learn from."""
        if not any(example.steps for example in self.examples):
            raise ValueError(
                f"{self.name}: no row has reasoning (columns: {', '.join(self.columns)}): name its column, as in "
                f"{layouts.NAMING}, or, where the answer is at the end of its text, {layouts.MARKING}"
            )


def read(
    data: Any,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    judge: str | None = None,
    answer_type: AnswerType | None = None,
    expected: type[ValueError] | tuple[type[ValueError], ...] = ValueError,
    needs_steps: bool = True,
) -> UserRows:
    """Read a user's rows.

    Args:
        data: A file (`data_files.USER_ENDINGS`), a folder of SPLIT files, a Hub id `owner/name[/config][:split]`, a
            list of dicts, or a `datasets.Dataset`.
        columns: `{"question": "problem", "answer": "solution"}` if the columns have other names.
        split: Split of a folder, or of a Hub id that names none.
        judge: `module:function` that judges answers of any type.
        answer_type: Answer type of rows that name none; by default inferred from the answers.
        expected: Errors for which a row is left out; any other aborts the load.
        needs_steps: If some row must have the steps' column, where `columns` names one.

    Raises:
        ValueError: If the data is missing or no table, the columns cannot be recognised, or no row can be read.
    """
    name, raw_rows = _raw_rows(data, split)
    left_out = LeftOut(expected)
    raw_rows = iter(raw_rows)
    first_rows = list(itertools.islice(raw_rows, FIRST_ROWS))
    first_cells = [_filled_cells(raw) for _, raw in first_rows]
    parser = _Parser(columns, first_cells)
    rows = list(parsed(itertools.chain(first_rows, raw_rows), parser, left_out))
    if not rows and not left_out.places:
        raise ValueError(f"{data if isinstance(data, str | Path) else name}: no rows")
    # A single row may lack its steps; if all rows lack them, the wrong column was named.
    if needs_steps and columns and "steps" in columns:
        layouts.require_column(columns["steps"], "steps", parser.found)
    if judge:
        # A user's judge accepts answers of any type.
        rows = [row._replace(fields=replace(row.fields, answer_type="text")) for row in rows]
    untyped = [row.fields.answer for row in rows if row.fields.answer_type is None]
    answer_type = answer_type or answer_types.infer(untyped)

    examples = list(examples_of(rows, _id_maker(f"{name}/{split}"), answer_type, left_out))
    layout = parser.layout
    if not examples or layout is None:
        reason, places = max(left_out.places.items(), key=lambda item: len(item[1]))
        hint = ""
        if layout is not None and not columns:
            # The wrong one may have been recognised.
            hint = f" in layout {layout.name}, {layout.about}; for other columns: {layouts.NAMING}"
        raise ValueError(f"{places[0]}: {reason} (none of the rows can be read{hint})")
    return UserRows(
        name,
        layout,
        judged_by(examples, judge),
        columns=list(parser.found),
        roles=dict(columns or {}) or _usual_roles(layout, first_cells),
        answer_type=answer_type,
        untyped=len(untyped),
        unmarked=sum(row.fields.unmarked for row in rows),
        judge=judge,
        left_out=left_out,
    )


def read_held_out(
    data: Any, rows: UserRows, columns: Mapping[str, str] | None = None, test: Any = None
) -> dict[str, UserRows]:
    """Read the validation and test rows that go with the training `rows`: those in files of the folder `data`, such as
    `colar data prepare` writes, and those of `test`, which takes precedence. A split without any has no key."""
    splits = data_files.splits_in(Path(data)) if isinstance(data, str | Path) and Path(data).is_dir() else []
    given = {name: data for name in ("validation", "test") if name in splits}
    if test is not None:
        given["test"] = test
    # If every training row names its type, that of the others is inferred from their own answers.
    answer_type = rows.answer_type if rows.untyped else None
    # They are answered, not learnt from, and need no steps.
    return {
        name: read(each, columns, name, rows.judge, answer_type, needs_steps=False)
        for name, each in given.items()
    }


def _id_maker(place: str) -> Callable[[ParsedRow, Collection[str]], str]:
    """A function that gives a row an id that is not taken: its own, or one of its place and number."""
    repeats: Counter[str] = Counter()

    def id_of(row: ParsedRow, taken: Collection[str]) -> str:
        found = first = row.fields.key or f"{place}/{row.number}"
        # Several solutions of one problem often share its id.
        while found in taken:
            repeats[first] += 1
            found = f"{first}-{repeats[first] + 1}"
        return found

    return id_of


class _Parser:
    """Parses rows by the columns that the user has named, or else by the layout of the first row."""

    def __init__(self, named: Mapping[str, str] | None, first_rows: Sequence[Row]) -> None:
        self.named = bool(named)
        self.layout = layouts.renamed(named) if named else None
        self.beside = {} if named else _columns_in_use(first_rows)
        """The columns that at least half of the first rows have, and those that rows have beside them."""
        self.found: dict[str, None] = {}
        """Columns that some row has, in their order."""

    def __call__(self, raw: Any) -> Fields:
        cells = named_fields(raw)
        self.found |= dict.fromkeys(str(key) for key, value in cells.items() if value is not None)
        if self.layout is None:
            self.layout = layouts.of(cells)
        if not self.named:
            cells = layouts.known_names(cells)
        row = {key: value for key, value in cells.items() if value is not None}
        if not self.layout.fits(row):
            empty = ", ".join(str(key) for key, value in cells.items() if value is None)
            has = f"it has {', '.join(map(str, row))}" + (f"; empty: {empty}" if empty else "")
            raise ValueError(f"not of layout {self.layout.name} ({self.layout.about}): {has}")
        # A column that such a row lacks is a null, or the one after it would pass for question or answer.
        blank = {
            name: None for name, others in self.beside.items() if name not in row and row.keys() <= others
        }
        return self.layout.parse(blank | row)


def _filled_cells(raw: Any) -> Row:
    """The cells of a raw row that are not null, under the names that layouts read; {} if it cannot be read."""
    with contextlib.suppress(ValueError):
        cells = layouts.known_names(named_fields(raw))
        return {name: value for name, value in cells.items() if value is not None}
    return {}


def _columns_in_use(rows: Sequence[Row]) -> dict[str, set[str]]:
    """The columns that at least half of the rows have, each with all that rows have beside it."""
    counts = Counter(itertools.chain.from_iterable(rows))
    in_use = [name for name, count in counts.items() if 2 * count >= len(rows)]
    beside: dict[str, set[str]] = {name: set() for name in in_use}
    for row in rows:
        for name in beside.keys() & row.keys():
            beside[name] |= row.keys()
    return beside


def _usual_roles(layout: layouts.Layout, rows: Sequence[Row]) -> dict[str, str]:
    """The usual columns of question, answer and steps among some rows; {} in layouts that have other parts."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    if layout.parse is layouts.parse_solution:
        for row in rows:
            with contextlib.suppress(ValueError):
                for key, column in layouts.solution_columns(row).items():
                    counts[key][column] += 1
    return {key: count.most_common(1)[0][0] for key, count in counts.items()}


def _raw_rows(data: Any, split: str) -> tuple[str, RawRows]:
    """A name for the rows, and the rows."""
    if not isinstance(data, str | Path):
        kind = type(data).__name__
        # A frame of pandas iterates over the names of its columns.
        if not isinstance(data, Iterable) or isinstance(data, Mapping) or kind == "DataFrame":
            frame = ': give its rows, data.to_dict("records")' if kind == "DataFrame" else ""
            raise ValueError(f"data must be a file, a folder, a Hub id, or a list of rows, got {kind}{frame}")
        return "rows", ((f"row {number}", row) for number, row in enumerate(data, start=1))
    path = Path(data)
    if path.is_dir():
        file = data_files.file_of(path, split)
        if not file.is_file():
            check_known(f"{path} split", [split], data_files.splits_in(path))
        return path.name, data_files.read(file)
    if path.is_file():
        return data_files.name_of(path), data_files.read(path, data_files.USER_ENDINGS)
    hub, _, part = str(data).partition(":")
    owner, *names = hub.split("/")
    # A path in a folder that exists is misspelt; it names no configuration.
    is_path = len(names) == 2 and Path(owner).exists()
    is_path |= str(data).startswith((".", "/", "~")) or data_files.ending(path) in data_files.ENDINGS
    if len(names) in (1, 2) and all([owner, *names]) and not is_path:
        name, config = names if len(names) == 2 else (*names, None)
        return hub, data_files.from_hub(f"{owner}/{name}", (config,), part or split)
    if hub in SOURCES:
        raise ValueError(
            f"{hub} is a published source: write its rows, colar data prepare {hub} --output FOLDER"
        )
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    near = did_you_mean(path.name, [*SOURCES, *(each.name for each in beside)])
    raise ValueError(
        f"no data at {data}: there is no such file or folder{near or ' (sources: colar data list)'}"
    )
