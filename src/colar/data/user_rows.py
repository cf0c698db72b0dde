"""A user's rows: read from a file, a folder, the Hub or memory, and divided for training, validation and test.

    read(data) -> UserRows;  divide(examples) -> Divided(train, validation, test)

All rows have one layout, recognised by the columns of the first row (`layouts.py`). A row that cannot be read is left
out, and counted by its reason.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colar.checks import check_known, did_you_mean
from colar.data import data_files, layouts
from colar.data.catalogue import SOURCES
from colar.data.data_files import LeftOut, ParsedRow, RawRows, examples_of, parsed
from colar.data.example import AnswerType, Example, Fields, named_fields, question_hash
from colar.data.judge import judged_by, understood
from colar.data.judge.numbers import folded

FEWEST = 20
"""Fewest rows that can be divided: of fewer, nothing is left to train on once some are held out."""
HELD_OUT = 0.05
"""Share of the questions held out for validation, and again for the test."""
FEWEST_HELD_OUT, MOST_HELD_OUT = 50, 500
"""Bounds on the number of questions held out for each."""
ENOUGH = 0.95
"""Share of the answers that must be numbers, or letters, for all to be judged as such."""
TELLING = re.compile(
    r"(?<![a-z])(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?|[ap]\.?m|ad|bce?|ago|later|before|after|more|fewer|less|increase|decrease|rise|fall"
    r"|gain|loss|profit|up|down|north|south|east|west|left|right)(?![a-z])"
)
"""Words behind a number of which the answer is a part: 5 pm, 12% increase."""
PRICE = re.compile(r"\$\s?[\d,.]+(?![\d,.$\\^])")
"""A price, whose dollar is not that of a formula."""
PARTS_OF_QUESTION = ("choices", "options", "passage")
"""Columns that are not read, although a question may need them."""
SPACE = re.compile(r"(?<!\d) | (?!\d)")
"""A space that is not between two digits."""
FIRST_ROWS = 100
"""Rows that tell which columns are in use."""
LATEX = 0.1
"""Share of answers with LaTeX at which all are judged as formulas."""


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
    """Number of rows whose chains lose lines without a `<<...>>` mark (`steps.cut`)."""
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


@dataclass(frozen=True)
class Divided:
    """Rows for training, for validation, and for the test at the end."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    also_held_out: int = 0
    """Number of rows left out because a validation or test row has their question."""
    without_chain: int = 0
    """Number of training rows left out because they have no reasoning."""


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
    parser = _Parser(columns, [raw for _, raw in first_rows])
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
    answer_type = answer_type or _answer_type(untyped)

    repeats: Counter[str] = Counter()

    def id_of(row: ParsedRow, taken: Collection[str]) -> str:
        found = first = row.fields.key or f"{name}/{split}/{row.number}"
        # Several solutions of one problem often share its id.
        while found in taken:
            repeats[first] += 1
            found = f"{first}-{repeats[first] + 1}"
        return found

    examples = list(examples_of(rows, id_of, answer_type, left_out))
    if not examples or parser.layout is None:
        reason, places = max(left_out.places.items(), key=lambda item: len(item[1]))
        raise ValueError(f"{places[0]}: {reason} (none of the rows can be read{parser.hint})")
    examples = judged_by(examples, judge)
    unmarked = sum(row.fields.unmarked for row in rows)
    found = list(parser.found)
    roles = dict(columns or {}) or parser.usual_roles(raw for _, raw in first_rows)
    return UserRows(
        name, parser.layout, examples, found, roles, answer_type, len(untyped), unmarked, judge, left_out
    )


def read_held_out(
    data: Any, rows: UserRows, columns: Mapping[str, str] | None = None, test: Any = None
) -> dict[str, UserRows]:
    """Read the validation and test rows that go with the training `rows`: those in files of the folder `data`, such as
    `colar data prepare` writes, and those of `test`, which takes precedence. A split without any has no key."""
    splits = data_files.splits_in(Path(data)) if isinstance(data, str | Path) and Path(data).is_dir() else []
    given = {name: data for name in ("validation", "test") if name in splits}
    given |= {} if test is None else {"test": test}
    # If every training row names its type, that of the others is inferred from their own answers.
    answer_type = rows.answer_type if rows.untyped else None
    found: dict[str, UserRows] = {}
    for name, each in given.items():
        # They are answered, not learnt from.
        found[name] = read(each, columns, name, rows.judge, answer_type, needs_steps=False)
    return found


class _Parser:
    """Parses rows by the columns that the user has named, or else by the layout of the first row."""

    def __init__(self, named: Mapping[str, str] | None, first_rows: Sequence[Any]) -> None:
        self.named = bool(named)
        self.layout = layouts.renamed(named) if named else None
        self.beside: dict[str, set[str]] = {}
        """The columns that at least half of the first rows have, and those that rows have beside them."""
        if not named:
            self.beside = _columns_in_use(first_rows)
        self.hint = ""
        """Advice for the error message, in case the wrong layout was recognised."""
        self.found: dict[str, None] = {}
        """Columns that some row has, in their order."""

    def __call__(self, raw: Any) -> Fields:
        cells = named_fields(raw)
        self.found |= dict.fromkeys(str(key) for key, value in cells.items() if value is not None)
        if self.layout is None:
            self.layout = layouts.of(cells)
            self.hint = (
                f" in layout {self.layout.name}, {self.layout.about}; for other columns: {layouts.NAMING}"
            )
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

    def usual_roles(self, first_rows: Iterable[Any]) -> dict[str, str]:
        """The usual columns of question, answer and steps among the first rows; {} in layouts that have other parts."""
        counts: dict[str, Counter[str]] = {key: Counter() for key in layouts.KEYS}
        if self.layout is not None and self.layout.parse is layouts.parse_solution:
            for raw in first_rows:
                with contextlib.suppress(ValueError):
                    cells = layouts.known_names(named_fields(raw)).items()
                    row = {key: value for key, value in cells if value is not None}
                    for key, column in layouts.solution_columns(row).items():
                        counts[key][column] += 1
        return {key: count.most_common(1)[0][0] for key, count in counts.items() if count}


def _columns_in_use(rows: Sequence[Any]) -> dict[str, set[str]]:
    beside: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    for raw in rows:
        with contextlib.suppress(ValueError):
            cells = layouts.known_names(named_fields(raw))
            filled = {key for key, value in cells.items() if value is not None}
            counts.update(filled)
            for key in filled:
                beside.setdefault(key, set()).update(filled)
    return {key: others for key, others in beside.items() if 2 * counts[key] >= len(rows)}


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
    is_path = str(data).startswith((".", "/", "~")) or data_files.ending(path) in data_files.ENDINGS
    # A path in a folder that exists is misspelt; it names no configuration.
    if (
        not is_path
        and all([owner, *names])
        and (len(names) == 1 or (len(names) == 2 and not Path(owner).exists()))
    ):
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


def _answer_type(golds: Sequence[str]) -> AnswerType:
    """Infer the type of answers that name none: number or choice if nearly all are such, else latex or text."""

    def are(answer_type: AnswerType) -> bool:
        return sum(understood(gold, answer_type) for gold in golds) >= ENOUGH * len(golds)

    are_numbers = are("number")
    # A number is judged without the words beside it, which must not be what tells "May 5" from "June 5".
    if are_numbers and _have_like_words(golds):
        return "number"
    # Of "B. 12" a number is read, too.
    if are("choice"):
        return "choice"
    if are_numbers:
        return "text"
    formulas = sum(any(sign in PRICE.sub("", gold) for sign in ("\\", "$", "^")) for gold in golds)
    return "latex" if formulas >= LATEX * len(golds) else "text"


def _have_like_words(golds: Sequence[str]) -> bool:
    """True if nearly all numbers have the same words before them, mostly none, and the same of `TELLING` behind."""

    def words(gold: str) -> tuple[str, ...]:
        before, *behind = re.split(r"\d[\d.,:]*", re.sub(r"\\[A-Za-z]+", "", gold), maxsplit=1)
        return ("".join(filter(str.isalpha, before)), *TELLING.findall("".join(behind).lower()))

    return max(Counter(map(words, golds)).values(), default=0) >= ENOUGH * len(golds)


# --- splits ------------------------------------------------------------------------------------------------


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
    held_out = tested | set(map(question_key, validation or ()))
    keyed = [
        (row, key) for row, key in zip(rows, map(question_key, rows), strict=True) if key not in held_out
    ]
    own = [row for row, _ in keyed]
    # Of the spellings of one question the hash that comes first, in any order of the rows.
    hash_of: dict[str, str] = {}
    for row, key in keyed:
        spelt = question_hash(row.conversation)
        hash_of[key] = min(spelt, hash_of.get(key, spelt))
    hashes = [hash_of[key] for _, key in keyed]
    n = len(hash_of)
    n_to_hold = min(MOST_HELD_OUT, max(FEWEST_HELD_OUT, round(HELD_OUT * n)), n // 4)
    not_given = [name for name, given in (("test", test), ("validation", validation)) if given is None]
    part_of: dict[str, str] = {}
    sizes: Counter[str] = Counter()
    for key in sorted(hash_of.values()):
        part_of[key] = next((name for name in not_given if sizes[name] < n_to_hold), "train")
        sizes[part_of[key]] += 1
    parts = {
        "validation": [row for row in validation or () if question_key(row) not in tested],
        "test": list(test or ()),
    }
    parts["train"] = [row for row, key in zip(own, hashes, strict=True) if part_of[key] == "train"]
    first_rows: dict[str, Example] = {}
    for row, key in zip(own, hashes, strict=True):
        first_rows.setdefault(key, row)
    for part in not_given:
        parts[part] = [row for key, row in first_rows.items() if part_of[key] == part]
    also_held_out = len(rows) - sum(len(parts[part]) for part in ("train", *not_given))
    # Half of such rows, and a model answers nearly every question without a thought.
    reasoned = [row for row in parts["train"] if row.steps]
    without_chain = len(parts["train"]) - len(reasoned) if reasoned else 0
    parts["train"] = reasoned or parts["train"]
    if not all(parts.values()):
        also = (
            f" ({len(rows) - len(own)} of {len(rows)} rows have a question that is held out)"
            if held_out
            else ""
        )
        raise ValueError(
            f"{len(part_of)} different questions are too few to train on and to measure with{also}"
        )
    return Divided(**parts, also_held_out=also_held_out, without_chain=without_chain)
