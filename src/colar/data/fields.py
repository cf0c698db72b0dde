"""Fields of a row: question, steps, answer and what else it may have, read from its columns and checked.

    raw rows -> parsed -> examples_of -> examples; rows with an error are left out, or end the load (`LeftOut`)

The parsers of published data sets (`catalogue.py`) and those of a user's rows (`layouts.py`) both make `Fields`.
Text is stripped and otherwise left as it is, except that whole floats lose their ".0" (145.0 -> "145"). A malformed row
is a ValueError with the reason; the caller adds the place.
"""

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from colar import files, progress
from colar.checks import check_choice, check_holds, check_text, did_you_mean
from colar.data.example import ANSWER_TYPES, ROLES, AnswerType, Example
from colar.data.judge import understood

SHOWN = 3
"""Places that a message names."""


@dataclass
class LeftOut:
    """The places of rows that cannot be read, by the reason."""

    expected: type[ValueError] | tuple[type[ValueError], ...] = ValueError
    """Errors of a row that is left out; any other ends the load."""
    places: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: str, error: ValueError) -> None:
        """Leave out the row at this place. Raises the error, with the place, where it is not `expected`."""
        if not isinstance(error, self.expected):
            raise ValueError(f"{place}: {error}") from error
        self.places[str(error)].append(place)

    def lines(self) -> list[str]:
        """A line for each kind of reason: how many rows, and the places of the first."""
        # Alike up to a detail ("an operation that is no arithmetic: sqrt") is one reason.
        kinds: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
        for reason, places in self.places.items():
            kinds[reason.partition(": ")[0]][reason] = places
        lines = []
        for kind, reasons in sorted(kinds.items(), key=lambda item: -sum(map(len, item[1].values()))):
            places = list(itertools.chain.from_iterable(reasons.values()))
            named = next(iter(reasons)) if len(reasons) == 1 else f"{kind}: {len(reasons)} different ones"
            more = ", ..." if len(places) > SHOWN else ""
            lines.append(f"left out {len(places):,}: {named} ({', '.join(places[:SHOWN])}{more})")
        return lines

    def say(self, name: str, n_read: int) -> None:
        """Log how many rows of `name` were read, if not all, and why the others were not."""
        if self.places:
            n_rows = n_read + sum(map(len, self.places.values()))
            progress.say(f"{name}: read {n_read:,} of {n_rows:,} rows")
        for line in self.lines():
            progress.say(f"  {line}")


def without_too_long(
    examples: Sequence[Example], too_long: Mapping[int, str], kind: str, remedy: str
) -> list[Example]:
    """The examples without those that are too long, given by index with the reason; logs how many these are.

    `kind` names the examples ("training rows"), `remedy` the key that changes it. ValueError where more than half are
    too long.
    """
    if too_long:
        reason = next(iter(too_long.values()))
        count = f"{len(too_long):,} of {len(examples):,} {kind}"
        if 2 * len(too_long) > len(examples):
            raise ValueError(f"{reason}; {count} are too long: {remedy}")
        progress.say(f"left out {count} that are too long ({reason}): {remedy}")
    return [example for index, example in enumerate(examples) if index not in too_long]


Parser = Callable[[Any], "Fields"]
"""A function of one raw row."""
EQUATION = re.compile(r"<<[^<>]*>>")
"""A mark of GSM8K's calculator: `<<21/7=3>>`."""
MOST_CHARACTERS = 100_000
"""Characters of a text of a row: more is a mistake in the file, and longer than any model's context."""
_WHOLE_FLOAT = re.compile(r"^(-?[0-9]+)\.0$")
_EXPECTED = {
    "number": "write one number (42, -1,234.5, 3/4), or give the row answer_type latex or text",
    "choice": "write one letter A-J, True or False, or give the row answer_type text",
}


@dataclass(frozen=True)
class Fields:
    """One parsed row. `key` is the publisher's own id, where there is one."""

    question: str
    steps: tuple[str, ...]
    answer: str
    key: str | None = None
    answer_type: AnswerType | None = None
    context: tuple[tuple[str, str], ...] = ()
    """Turns of a chat before the question: (role, text) each."""
    unmarked: bool = False
    """True where lines of the chain are left out of its steps, as they have no `<<...>>` mark."""

    def __post_init__(self) -> None:
        if self.answer_type is not None:
            check_choice("answer_type", self.answer_type, ANSWER_TYPES)
        texts = {
            "id": self.key or "",
            "question": self.question,
            "steps": "".join(self.steps),
            "answer": self.answer,
        }
        for name, text in texts.items():
            check_text(name, text)
            if len(text) > MOST_CHARACTERS:
                raise ValueError(f"{name} has more than {MOST_CHARACTERS:,} characters")
        for _, text in self.context:
            check_text("context", text)

    def example(self, name: str, answer_type: AnswerType) -> Example:
        """The example of this id. ValueError as of `Example`, and for an answer that the judge cannot read."""
        if not self.question.strip():
            raise ValueError("empty question")
        # Every completion would count as wrong.
        if answer_type in _EXPECTED and not understood(self.answer, answer_type):
            raise ValueError(
                f"answer cannot be read as answer_type {answer_type!r}: {self.answer[:40]!r}; {_EXPECTED[answer_type]}"
            )
        return Example(name, self.question, self.steps, self.answer, answer_type, context=self.context)


class ParsedRow(NamedTuple):
    """A row whose columns could be read."""

    place: str
    number: int
    """Counted from 0, rows that are left out included."""
    fields: Fields


def parsed(raw_rows: Iterable[tuple[str, Any]], parser: Parser, left_out: LeftOut) -> Iterator[ParsedRow]:
    """Parse (place, raw row) pairs one by one; those with an error go to `left_out`."""
    for number, (place, raw) in enumerate(raw_rows):
        try:
            fields = parser(raw)
        except ValueError as error:
            left_out.add(place, error)
        else:
            yield ParsedRow(place, number, fields)


def examples_of(
    rows: Iterable[ParsedRow],
    id_of: Callable[[ParsedRow, Collection[str]], str],
    answer_type: AnswerType,
    left_out: LeftOut,
) -> Iterator[Example]:
    """Make the examples of parsed rows one by one; those with an error go to `left_out`, and take no id.

    `id_of` gets a row and the ids that are taken; `answer_type` is that of rows which name none.
    """
    taken: set[str] = set()
    for row in rows:
        name = id_of(row, taken)
        try:
            if name in taken:
                raise ValueError(f"id occurs twice: {name!r}")
            example = row.fields.example(name, row.fields.answer_type or answer_type)
        except ValueError as error:
            left_out.add(row.place, error)
        else:
            taken.add(name)
            yield example


def named_fields(raw: Any) -> Mapping[str, Any]:
    if isinstance(raw, str):  # a line of a .jsonl file
        try:
            raw = files.parse_json(raw)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error.msg}") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be an object with named fields, is a {type(raw).__name__}")
    return raw


def context_of(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The turns before the question, a list of [role, text]; a text called "context" is another column."""
    context = row.get("context") or ()
    if isinstance(context, str):
        return ()
    turns = context if isinstance(context, list | tuple) else [context]
    for turn in turns:
        pair = isinstance(turn, list | tuple) and len(turn) == 2 and isinstance(turn[1], str)
        check_holds("context", pair, turn, "a list of [role, text]")
        check_choice("context", turn[0], ROLES)
    return tuple((role, text) for role, text in turns)


def text_of(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        # A null counts as not there: a user's own tools often write it for one.
        present = sorted(str(key) for key, other in row.items() if other is not None)
        has = ", ".join(present) or "none"
        raise ValueError(f"no field {name!r}{did_you_mean(name, present)} (has {has})")
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, is a {type(value).__name__}")
    return filled(value, name)


def answer_of(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if isinstance(value, list) and len(value) == 1:  # MultiArith's lSolutions
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = text_of({**row, name: value}, name)
        return _WHOLE_FLOAT.sub(r"\1", text)  # the Hub's SVAMP has text, "145.0"
    # Whole numbers have any length: the largest would be no float.
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, is {value}")
    if value == int(value):
        return str(int(value))
    # repr has the digits that the file had: 3244047.0999999996.
    return repr(value)


def steps_of(value: Any, name: str) -> tuple[str, ...]:
    steps = [value] if isinstance(value, str) else value
    if not isinstance(steps, list | tuple) or not all(isinstance(step, str) for step in steps):
        raise ValueError(f"{name} must be text or a list of texts")
    return stripped(steps)


def stripped(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts without white space around them, empty ones left out."""
    return tuple(part.strip() for part in parts if part.strip())


def filled(text: str, name: str) -> str:
    """The text without white space around it. ValueError where nothing is left."""
    if not text.strip():
        raise ValueError(f"empty {name}")
    return text.strip()
