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
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from colar import files
from colar.checks import did_you_mean, is_int
from colar.data import programs
from colar.data.example import (
    ROLES,
    Context,
    Fields,
    Row,
    answer_of,
    context_of,
    filled,
    named_fields,
    stripped,
    text_of,
)
from colar.data.judge.latex import extract_boxed
from colar.data.steps import MARK, cut

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
TURNS = ("messages", "conversations")
KNOWN = {*QUESTION, *ANSWER, *REASONING, *TURNS, "answer_type", "context", "system"}
"""Columns that a layout reads in any case (`Question`). `ID` and `Code` are often a subject's, not the row's."""
KEYS = ("question", "steps", "answer")
"""Keys for which a user may name columns."""
NAMING = "--columns question=problem,steps=rationale,answer=result"
MARKING = "end it with `#### 42` or `\\boxed{42}`, or put the reasoning into `<think>` tags"
ROLE = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "developer": "system"}
EMPTY: tuple[Any, ...] = (None, "", "[]", [], (), "on", "off")
"""Cells without reasoning. Nemotron's "on" and "off" tell whether reasoning was requested."""
THINK = re.compile(
    r"^\s*(?:<think(?:ing)?>|<\|begin_of_thought\|>)?(.*?)(?:</think(?:ing)?>|<\|end_of_thought\|>)\s*"
    r"(?:(.*)<answer>|<\|begin_of_solution\|>)?(.*?)(?:</answer>|<\|end_of_solution\|>)?\s*$",
    re.DOTALL,
)
"""Thoughts, words before an answer in tags, and the text behind them, in the tags of R1 or OpenThoughts."""
OPEN = re.compile(r"^\s*(?:<think(?:ing)?>|<\|begin_of_thought\|>)")
"""The beginning of thoughts; where `THINK` finds no end, the text was cut."""
FINAL = re.compile(r"(?<!#)####(?!#)(?=\s*[^\n]*(?:\nThe answer is:[^\n]*)?$)")
"""The mark of the answer, which MetaMathQA repeats on the next line. Before other lines it is a Markdown heading."""
EMPTY_BOX = re.compile(r"[\s$]*(?:\\(?:boxed|fbox)[\s{]*)+[\s}$.]*")


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


class Message(NamedTuple):
    """A checked message of a chat."""

    role: str
    text: str
    raw: Mapping[str, Any]


def turns_of(row: Row) -> Any:
    """The raw messages of a row: its chat, or TRL's prompt and optional completion; None for any other row."""
    for name in TURNS:
        if row.get(name) is not None:
            return row[name]
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or not (isinstance(prompt, list) or isinstance(completion, list)):
        return None
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if completion is None:
        return before
    return [
        *before,
        *(completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]),
    ]


def parse_chat(row: Row) -> Fields:
    """Parse a row with a chat: the last assistant turn is the answer to learn, the turn before it the question."""
    messages = messages_in(row)
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if len(messages) < 2:
        raise ValueError("a chat without an answer: no message of 'assistant' behind one of 'user'")
    question, context = asked(messages[:-1])
    last = messages[-1]
    chain, answer = _parted(last.text)
    for name in ("thinking", "reasoning", "reasoning_content"):
        thought = last.raw.get(name) or row.get(name)
        chain = thought if isinstance(thought, str) and thought.strip() not in EMPTY else chain
    return _fields(row, question, context, chain, answer)


def messages_in(row: Row) -> list[Message]:
    """The messages of a row with a chat."""
    messages = messages_of(turns_of(row))
    # ShareGPT has the system message in a column beside the conversation.
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages and messages[0].role != "system":
        messages.insert(0, Message("system", system.strip(), {}))
    return messages


def messages_of(turns: Any) -> list[Message]:
    """The messages of raw `turns`, with roles renamed to `ROLES`. ValueError if they are no chat."""
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError("a chat must be a list of messages, each with a role and a content")
    messages = []
    for turn in turns:
        role = str(turn.get("role", turn.get("from", "")))
        role = ROLE.get(role, role)
        if role not in ROLES:
            raise ValueError(f"the role {role!r} of a message is none of {', '.join(ROLES)}")
        content = turn.get("content", turn.get("value"))
        if not isinstance(content, str):
            raise ValueError(
                f"the content of a message of {role!r} must be text, is a {type(content).__name__}"
            )
        messages.append(Message(role, content.strip(), turn))
    return messages


def asked(messages: Sequence[Message]) -> tuple[str, Context]:
    """Split a chat into the question, its last turn, and the turns before. ValueError if the last is not the user's."""
    *before, last = messages
    if last.role != "user":
        raise ValueError(f"the turn before the answer is of {last.role!r}, must be of 'user'")
    # The thoughts of earlier answers are not shown to a model again.
    context = []
    for role, text, _ in before:
        thought = THINK.match(text) if role == "assistant" else None
        context.append((role, thought[3].strip() if thought else text))
    return last.text, tuple(context)


def _program(row: Row) -> Fields:
    solution = programs.of_python(str(row[_first(row, PROGRAM)]))
    gold = next((row[name] for name in ("answer", "result", "target") if row.get(name) is not None), None)
    return programs.checked(whole_question(row, _first(row, QUESTION)), solution, gold, _key(row))


def _mathqa(row: Row) -> Fields:
    return replace(programs.mathqa({**row, "Problem": row["problem"]}), key=_key(row))


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
    chain, gold = _parted(answer_of(row, answer))
    if steps is not None:
        chain = _chain_of(row, steps)
    return _fields(row, text, context, chain, gold)


def _chain_of(row: Row, name: str) -> str | tuple[str, ...]:
    """The chain in a column: its steps, or a text to be cut into steps."""
    chain = row.get(name)
    if isinstance(chain, str):
        text, chain = chain, _listed(chain)
        if chain is None:
            # The text may repeat the answer at its end.
            thought = _thought(text)
            return thought[1] if thought else FINAL.split(text.strip())[0]
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


def _fields(row: Row, question: str, context: Context, chain: str | tuple[str, ...], answer: str) -> Fields:
    """The fields of a row; a `chain` that is text is cut into steps."""
    marked = []
    if isinstance(chain, str):
        marked = [bool(MARK.search(line)) for line in chain.splitlines() if line.strip()]
        chain = cut(chain)
    unmarked = any(marked) and not all(marked)
    return Fields(question, chain, answer, _key(row), row.get("answer_type"), context, unmarked)


def _parted(text: str) -> tuple[str, str]:
    """Split a text into its reasoning ("" if there is none) and the answer behind it or in its last box."""
    thought = _thought(text)
    if thought:
        chain, answer = _parted(thought[3])
        # Qwen3 writes empty tags where it was told not to think.
        return thought[1] if thought[1].strip() else thought[2] or chain, answer
    before, *behind = FINAL.split(text.strip())
    if behind:
        return before, filled(behind[-1], "answer").partition("\n")[0]
    boxed = extract_boxed(text)
    if boxed is None:
        return "", filled(text, "answer")
    # The answer alone, in its box, is no reasoning.
    before, _, after = text.rpartition(boxed)
    return "" if EMPTY_BOX.fullmatch(before + after) else text, boxed


def _thought(text: str) -> re.Match[str] | None:
    """The match of `THINK`. ValueError for thoughts that do not end: the answer in them is not the row's."""
    thought = THINK.match(text)
    if thought is None and OPEN.match(text):
        raise ValueError("the reasoning is cut: its <think> is not closed")
    return thought


def _key(row: Row) -> str | None:
    value = row.get("id")
    return str(value) if isinstance(value, str) or is_int(value) else None


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
