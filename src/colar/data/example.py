"""`Example`: one problem with its reasoning. Every source yields these, and every method learns from them.

`Fields` are the parsed columns of one row. The parsers of published data sets (`catalogue.py`, `programs.py`) and of a
user's rows (`layouts.py`) build them with the readers below. Text is stripped and otherwise unchanged, except that
whole floats lose their ".0" (145.0 -> "145"). A malformed row raises ValueError with the reason; the caller adds the
place.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from colar import files, progress
from colar.checks import check_choice, check_holds, check_text, did_you_mean, is_int

AnswerType = Literal["number", "latex", "choice", "text"]
ANSWER_TYPES: tuple[str, ...] = get_args(AnswerType)
SPLITS = ("train", "validation", "test")
ROLES = ("system", "user", "assistant")
Context = tuple[tuple[str, str], ...]
"""Turns of a chat before the question: (role, text) of each, role `system`, `user` or `assistant`."""
Row = Mapping[str, Any]
"""A row of a table, by the names of its columns."""
MOST_CHARACTERS = 100_000
"""Characters of a text of a row: more is a mistake in the file, and longer than any model's context."""
_WHOLE_FLOAT = re.compile(r"^(-?[0-9]+)\.0$")


@dataclass(frozen=True)
class Example:
    """A question, its reasoning steps and its answer, as text.

    `id` is unique within source and split and the same on every machine (`gsm8k-aug/test/17`): records,
    seeds and paired comparisons are keyed by it. `steps` may be empty: some real rows have no reasoning.

    `cluster` is the id of the first example with the same question, "" if this is the first. Answers to one question
    are not independent, so standard errors count them as one cluster.
    """

    id: str
    question: str
    steps: tuple[str, ...]
    answer: str
    answer_type: AnswerType = "number"
    cluster: str = ""
    context: Context = ()
    judge: str = ""
    """`module:function` of a user's judge (`data/judge`); "": judged by `answer_type`. A row cannot set it."""

    def __post_init__(self) -> None:
        for field in ("id", "question", "answer"):
            value = getattr(self, field)
            check_holds(field, isinstance(value, str) and bool(value.strip()), value, "a non-empty string")
        steps = self.steps
        texts = isinstance(steps, list | tuple) and all(isinstance(step, str) for step in steps)
        check_holds("steps", texts, steps, "a tuple of texts")
        check_choice("answer_type", self.answer_type, ANSWER_TYPES)
        for role, text in self.context:
            check_choice("context", role, ROLES)
            check_holds("context", isinstance(text, str), text, "text")

    @property
    def first_id(self) -> str:
        """The id of the first example that asks this question: its own, or its `cluster`."""
        return self.cluster or self.id

    @property
    def conversation(self) -> str:
        """The earlier turns and the question: equal for two rows with the same question."""
        return conversation(self.question, self.context)

    def as_row(self) -> dict[str, Any]:
        """The example as a row of a JSONL file, which `colar.data.sources.load_examples` reads back to an equal one.

        Without `cluster`, which follows from the file's questions, and without `judge`.
        """
        row = asdict(self)
        del row["cluster"], row["judge"]
        if not self.context:
            del row["context"]
        return row


def collapsed(text: str) -> str:
    """The text with each run of white space as one space, because copies of a question may differ in white space."""
    return " ".join(text.split())


def conversation(question: str, context: Iterable[Sequence[str]] = ()) -> str:
    """The turns and the question as one text: without the turns, every "And in total?" would be the same question."""
    return collapsed(" ".join([*(text for _, text in context), question]))


def question_hash(question: str) -> str:
    """16 hex digits of the SHA-256 of the question with its white space collapsed: the same on every machine."""
    return files.digest([collapsed(question)])


def without_too_long(
    examples: Sequence[Example], too_long: Mapping[int, str], kind: str, remedy: str
) -> list[Example]:
    """Drop the examples that are too long (`too_long`: index -> reason), and log how many there are.

    `kind` names the examples ("training rows"), `remedy` the key to change. ValueError if more than half are too
    long.
    """
    if too_long:
        reason = next(iter(too_long.values()))
        count = f"{len(too_long):,} of {len(examples):,} {kind}"
        if 2 * len(too_long) > len(examples):
            raise ValueError(f"{reason}; {count} are too long: {remedy}")
        progress.say(f"left out {count} that are too long ({reason}): {remedy}")
    return [example for index, example in enumerate(examples) if index not in too_long]


# --- an example in the columns of a row -------------------------------------------------------------------


@dataclass(frozen=True)
class Fields:
    """One parsed row."""

    question: str
    steps: tuple[str, ...]
    answer: str
    key: str | None = None
    """The publisher's or the user's own id, where there is one."""
    answer_type: AnswerType | None = None
    context: Context = ()
    unmarked: bool = False
    """True if lines of the chain without a `<<...>>` mark are left out of its steps."""

    def __post_init__(self) -> None:
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


def named_fields(raw: Any) -> Row:
    """The columns of a raw row, which may be a line of a .jsonl file."""
    if isinstance(raw, str):
        raw = files.parse_json(raw)
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be an object with named fields, is a {type(raw).__name__}")
    # pandas holds values of numpy, and NaN for a cell without a value.
    values = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in raw.items()}
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in values.items()
    }


def context_of(row: Row) -> Context:
    """The turns before the question, a list of [role, text]; a text is a passage, see `layouts.whole_question`."""
    context = row.get("context") or ()
    if isinstance(context, str):
        return ()
    turns = context if isinstance(context, list | tuple) else [context]
    for turn in turns:
        pair = isinstance(turn, list | tuple) and len(turn) == 2 and isinstance(turn[1], str)
        check_holds("context", pair, turn, "a list of [role, text]")
        check_choice("context", turn[0], ROLES)
    return tuple((role, text) for role, text in turns)


def text_of(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        # A null counts as missing, because users' tools often write one for a missing value.
        present = sorted(str(key) for key, other in row.items() if other is not None)
        near = did_you_mean(name, present)
        raise ValueError(f"no field {name!r}{near} (has {', '.join(present) or 'none'})")
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, is a {type(value).__name__}")
    return filled(value, name)


def answer_of(row: Row, name: str) -> str:
    """The answer of a row, a text or a number."""
    value = row.get(name)
    if isinstance(value, list) and len(value) == 1:  # MultiArith's lSolutions
        value = value[0]
    if is_int(value) or isinstance(value, bool):  # true and false, of questions with these two answers
        return str(value)
    if isinstance(value, float | Decimal):  # Parquet has both
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, is {value}")
        if value == int(value):
            return str(int(value))
        # repr reproduces the digits of the file: 3244047.0999999996.
        return repr(value) if isinstance(value, float) else format(value.normalize(), "f")
    text = text_of({**row, name: value}, name)
    return _WHOLE_FLOAT.sub(r"\1", text)  # the Hub's SVAMP has text, "145.0"


def key_of(row: Row) -> str | None:
    """The row's own id, a text or a whole number."""
    value = row.get("id")
    return str(value) if isinstance(value, str) or is_int(value) else None


def stripped(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts without white space around them, empty ones left out."""
    return tuple(part.strip() for part in parts if part.strip())


def filled(text: str, name: str) -> str:
    """The text without white space around it. ValueError if nothing is left."""
    if not text.strip():
        raise ValueError(f"empty {name}")
    return text.strip()
