"""Layouts of a user's rows: each is recognised by its columns, and parsed into question, steps, answer and context.

| layout | columns |
|---|---|
| chat | messages (role, content) or conversations (from, value); prompt and completion, at least one a list (TRL's) |
| MathQA | problem, linear_formula, options, correct |
| program | question, and a column with a straight-line Python program, but none for reasoning alone |
| solution | columns under common names, those of `QUESTION`, `REASONING` and `ANSWER`: Coconut's, GSM8K's, MATH's |

The reasoning is read from a field of its own (steps, reasoning_content, ...), from `answer` beside `final_answer`, from
between `<think>` tags, or from before the last line's `####`; the text behind the tags or the mark is the answer.
Otherwise the whole text is the chain if it has a `\\boxed{}`, and the content of the last one is the answer. An answer
with none of these has no chain. A user's copy of GSM8K trains on the equations in its `<<21/7=3>>` marks, if it has
any, and drops the lines without one; the published source `gsm8k` has the words as its steps (`catalogue.py`).
"""

import ast
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from colar import files
from colar.checks import did_you_mean
from colar.data import programs
from colar.data.chats import TURNS, asked, messages_of, parse_chat, turns_of
from colar.data.example import Fields, Row, answer_of, context_of, key_of, named_fields, stripped, text_of
from colar.data.reasoning import EMPTY, fields_of, parted, without_answer

QUESTION = ("question", "problem", "prompt", "query", "instruction", "input")
ANSWER = ("final_answer", "answer", "response", "output", "completion", "solution", "result", "target")
REASONING = (
    "steps",
    "reasoning_content",
    "reasoning",
    "thinking",
    "rationale",
    "chain_of_thought",
    "cot",
    "solution",
)
PROGRAM = ("code", "program", "python", "python_code", "solution_code", "generated_code")
KNOWN = {*QUESTION, *ANSWER, *REASONING, *TURNS, "answer_type", "context", "system"}
"""Columns that a layout reads in any case (`Question`). `ID` and `Code` are often a subject's, not the row's."""
KEYS = ("question", "steps", "answer")
"""Keys for which a user may name columns."""
NAMING = "--columns question=problem,steps=rationale,answer=result"
MARKING = "end it with `#### 42` or `\\boxed{42}`, or put the reasoning into `<think>` tags"


@dataclass(frozen=True)
class Layout:
    """A layout of rows: the test that recognises it, and its parser."""

    name: str
    about: str
    """The columns that are read, in words for messages."""
    fits: Callable[[Row], bool]
    """True if a row, without its nulls, is of this layout."""
    parse: Callable[[Row], Fields]


def of(cells: Row) -> Layout:
    """Find the layout of a first row: by its cells that are not null or, failing that, by all of its columns.

    ValueError lists the row's columns and tells how to name them.
    """
    row = {name: value for name, value in cells.items() if value is not None}
    for columns in (row, {name: row.get(name, "") for name in cells}):
        known = known_names(columns)
        for layout in LAYOUTS:
            if layout.fits(known):
                return layout
    has = ", ".join(sorted(map(str, row))) or "none"
    raise ValueError(
        f"cannot tell which columns are question and answer (there are {has}): name them, "
        "--columns question=COLUMN,answer=COLUMN and perhaps steps=COLUMN; for a recipe, which has no such key, write "
        "them anew with colar data prepare FILE --columns ... --output FOLDER"
    )


def known_names(row: Row) -> Row:
    """The row with columns such as `Question` or ` answer` spelt as in `KNOWN`, unless it has that name, too."""
    found: dict[Any, Any] = {}
    for name, value in row.items():
        plain = str(name).strip().lower()
        is_free = row.get(plain) is None and found.get(plain) is None
        spelt = plain if plain in KNOWN and is_free else name
        # A null does not replace what another spelling has.
        if value is not None or spelt not in found:
            found[spelt] = value
    return found


def renamed(columns: Mapping[str, str]) -> Layout:
    """Make the layout of columns that a user has named. ValueError for an unknown or missing key."""
    for key in columns:
        if key not in KEYS:
            raise ValueError(f"--columns {key}: must be {', '.join(KEYS)}, as in {NAMING}")
    if not {"question", "answer"} <= columns.keys():
        raise ValueError(f"--columns must name question and answer, and may name steps, as in {NAMING}")
    if columns.get("steps") == columns["answer"]:
        raise ValueError(
            f"--columns: {columns['answer']} cannot be steps and answer; as answer alone, the reasoning in its text is "
            f"found: {MARKING}"
        )

    def parse(row: Row) -> Fields:
        for key in ("question", "answer"):
            require_column(columns[key], key, row)
        return _solution(row, columns["question"], columns["answer"], columns.get("steps"))

    about = ", ".join(f"{key} from {column}" for key, column in columns.items())
    return Layout("columns", about, lambda _: True, parse)


def require_column(column: str, key: str, there: Iterable[Any]) -> None:
    """Raise ValueError if the column that a user has named for `key` is not among those in `there`."""
    names = [str(name) for name in there]
    if column not in names:
        near = did_you_mean(column, names)
        raise ValueError(f"no column {column!r} for {key}{near} (there are {', '.join(names)})")


# --- parsers -----------------------------------------------------------------------------------------------


def _program(row: Row) -> Fields:
    solution = programs.of_python(str(row[_first(row, PROGRAM)]))
    gold = next((row[name] for name in ("answer", "result", "target") if row.get(name) is not None), None)
    return programs.checked(whole_question(row, _first(row, QUESTION)), solution, gold, key_of(row))


def _mathqa(row: Row) -> Fields:
    return replace(programs.mathqa({**row, "Problem": row["problem"]}), key=key_of(row))


def parse_solution(raw: Any) -> Fields:
    """Parse a row with a question, optional reasoning and an answer under common names, such as Coconut's."""
    row = named_fields(raw)
    columns = solution_columns(row)
    return _solution(row, columns["question"], columns["answer"], columns.get("steps"))


def solution_columns(row: Row) -> dict[str, str]:
    """The columns of a question, a solution and perhaps its reasoning: question, answer and steps -> column."""
    question = _first(row, QUESTION)
    answer = _first(row, [name for name in ANSWER if name != question])
    # An empty column counts as missing, as does an empty list in a CSV: the answer may hold the reasoning.
    reasoning = (*REASONING, "answer") if answer == "final_answer" else REASONING
    chains = (name for name in reasoning if row.get(name) not in EMPTY and name not in (question, answer))
    steps = next(chains, None)
    return {"question": question, "answer": answer, **({"steps": steps} if steps else {})}


def columns_beside(question: str) -> set[str]:
    """The columns that are read beside those of the question, in this column, the answer and the reasoning."""
    return {"id", "answer_type", "context", *(["input"] if question == "instruction" else [])}


def whole_question(row: Row, column: str) -> str:
    """The question in a column, behind its passage, a text in the column `context`; an instruction (Alpaca's) is
    followed by its `input`."""
    after = row.get("input") if column == "instruction" else None
    texts = (row.get("context") if column != "context" else None, text_of(row, column), after)
    return "\n\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())


def _first(row: Row, names: Sequence[str]) -> str:
    """The first of these columns that there is. ValueError if it is null: another one would hold something else."""
    first = next((name for name in names if name in row), None)
    if first is None:
        raise ValueError(f"no column {names[0]!r} (there are {', '.join(map(str, row)) or 'none'})")
    if row[first] is None:
        raise ValueError(f"{first} is empty")
    return first


def _solution(row: Row, question: str, answer: str, steps: str | None) -> Fields:
    """The fields of a question and a solution, which may hold its own reasoning."""
    asks = row.get(question)
    if isinstance(asks, list) and asks and isinstance(asks[0], Mapping):
        text, context = asked(messages_of(asks))
    else:
        # A column that the user has named for the chain or the answer is no part of the question.
        asking = {name: value for name, value in row.items() if name not in (answer, steps)}
        text, context = whole_question(asking, question), context_of(asking)
    chain: str | tuple[str, ...]
    chain, gold = parted(answer_of(row, answer))
    if steps is not None:
        chain = _chain_of(row, steps)
    return fields_of(row, text, context, chain, gold)


def _chain_of(row: Row, name: str) -> str | tuple[str, ...]:
    """The chain in a column: its steps, or a text to be cut into steps."""
    chain = row.get(name)
    if isinstance(chain, str):
        text, chain = chain, _listed(chain)
        if chain is None:
            return without_answer(text)
    if chain is None:
        return ()
    if not isinstance(chain, list | tuple) or not all(isinstance(step, str) for step in chain):
        raise ValueError(f"{name} must be text or a list of texts")
    return stripped(chain)


def _listed(text: str) -> list[Any] | None:
    """The list in a cell of a table, as JSON or as pandas writes it to CSV; None for any other text."""
    with contextlib.suppress(ValueError):
        value = files.parse_json(text)
        if isinstance(value, list):
            return value
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(text)
        # Compared with its repr, because Python would join numpy's `['a' 'b']` to one text.
        if isinstance(value, list) and repr(value) == text:
            return value
    return None


def _has(row: Collection[str], names: Collection[str]) -> bool:
    return any(name in row for name in names)


def _is_chat(row: Row) -> bool:
    return turns_of(row) is not None and _has(row, (*TURNS, "completion"))


def _is_program(row: Row) -> bool:
    # A column called "code" beside the reasoning is something else: a number, a subject.
    return _has(row, PROGRAM) and _has(row, QUESTION) and not _has(row, set(REASONING) - set(ANSWER))


def _is_common(row: Row) -> bool:
    return _has(row, QUESTION) and _has(row.keys() - {_first(row, QUESTION)}, ANSWER)


LAYOUTS = (
    Layout("chat", "messages, conversations, or prompt and completion", _is_chat, parse_chat),
    Layout(
        "MathQA", "problem, linear_formula, options, correct",
        lambda row: {"problem", "linear_formula"} <= row.keys() and not _has(row, ANSWER), _mathqa,
    ),
    Layout("program", "a question and a Python program", _is_program, _program),
    Layout("solution", "a question, an answer, perhaps its reasoning", _is_common, parse_solution),
)  # fmt: skip
