"""Row formats: how published rows become question, steps and answer.

A parser turns one raw row into `Fields` and raises ValueError with the reason where the row is malformed; the caller
adds the place. Text is stripped and otherwise left as published,
except that whole floats lose their ".0" (145.0 -> "145").
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from colar import files
from colar.checks import check_text, did_you_mean
from colar.data.example import AnswerType, Example
from colar.data.judge.latex import extract_boxed

Parser = Callable[[Any], "Fields"]

_EQUATION = re.compile(r"<<[^<>]*>>")
_PROMPT_SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."
_PARAGRAPH = re.compile(r"\n\s*\n")
_WHOLE_FLOAT = re.compile(r"^(-?[0-9]+)\.0$")
_CLOSING = ".!?,;:"
_LETTERS = "ABCD"
# Two of the 7,500 training rows end in an empty box.
_MATH_UNANSWERED = frozenset({"79595ba3b4cfcfe2", "81a7fe8e017d681c"})


class UpstreamFault(ValueError):
    """A row that is known to be faulty where it was published: always left out, with a message on stderr."""


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

    def example(self, name: str, answer_type: AnswerType) -> Example:
        """The example of this id. ValueError as of `Example`."""
        return Example(name, self.question, self.steps, self.answer, answer_type, context=self.context)


# --- parsers: a raw row -> Fields ----------------------------------------------------------------------


def columns(question: str, answer: str) -> Parser:
    """Make a parser of rows that hold a question and an answer, without steps, in columns of these names."""

    def parse(raw: Any) -> Fields:
        row = named_fields(raw)
        return Fields(text_of(row, question), (), answer_of(row, answer))

    return parse


def coconut(raw: Any) -> Fields:
    """Parse Coconut's rows, also a user's own.

    Fields: question, steps (a list, or one string), answer; perhaps id, answer_type and context.
    """
    row = named_fields(raw)
    # A null counts as not there, as in `text_of`: exports of tables have one for an empty list.
    steps = row.get("steps")
    chain = () if steps is None else steps_of(steps, "steps")
    key = None if row.get("id") is None else text_of(row, "id")
    context = row.get("context") or ()
    try:
        turns = tuple((role, text) for role, text in context)
    except (TypeError, ValueError) as error:
        raise ValueError("context must be a list of [role, text]") from error
    question, answer = text_of(row, "question"), answer_of(row, "answer")
    return Fields(question, chain, answer, key, row.get("answer_type"), turns)


def icot_line(raw: Any) -> Fields:
    """Parse `question||<<21/7=3>> <<5*3=15>> #### 15`; each `<<...>>` is a step, and there may be none."""
    question, bars, rest = str(raw).partition("||")
    if not bars:
        raise ValueError("no '||' between question and steps")
    chain, mark, answer = rest.partition("####")
    if not mark:
        raise ValueError("no '####' before the answer")
    # Text between the equations would be lost without a word.
    outside = _EQUATION.sub("", chain).strip()
    if outside:
        raise ValueError(f"text outside <<...>> in the steps: {outside[:40]!r}")
    steps = tuple(_EQUATION.findall(chain))
    return Fields(filled(question, "question"), steps, filled(answer, "answer"))


def gsm8k(raw: Any) -> Fields:
    """Parse GSM8K's own rows: a step a line, then `#### answer`; without the calculator's <<...>> marks."""
    row = named_fields(raw)
    # Steps and answer are one text, "step\nstep\n#### 72".
    chain, mark, answer = text_of(row, "answer").rpartition("####")
    if not mark:
        raise ValueError("no '####' before the answer")
    steps = stripped(_EQUATION.sub("", chain).splitlines())
    return Fields(text_of(row, "question"), steps, filled(answer, "answer"))


def svamp(raw: Any) -> Fields:
    """Parse SVAMP: Body and Question make the problem, joined by ". " where the body has no final punctuation."""
    row = named_fields(raw)
    body = text_of(row, "Body")
    question = text_of(row, "Question")
    joint = " " if body[-1] in _CLOSING else ". "
    return Fields(body + joint + question, (), answer_of(row, "Answer"), text_of(row, "ID"))


def hendrycks_math(raw: Any) -> Fields:
    """Parse MATH: the solution's paragraphs are the steps, its last box (braces matched) is the answer.

    Reads the publisher's columns (problem, solution) and the verl layout (`reward_model.ground_truth`), whose
    question carries a prompt suffix and whose `target` has lost its spaces: both are put right.
    """
    row = named_fields(raw)
    if "reward_model" in row:  # the verl layout
        truth = named_fields(named_fields(row["reward_model"]).get("ground_truth"))
        problem = text_of(truth, "question").removesuffix(_PROMPT_SUFFIX)
        row = {**truth, "problem": problem}
    problem = text_of(row, "problem")
    solution = text_of(row, "solution")
    answer = extract_boxed(solution)
    if answer is None:
        # A fault of the publisher's is left out and told; anyone else's stops the load.
        known = question_hash(problem) in _MATH_UNANSWERED
        fault = UpstreamFault if known else ValueError
        raise fault("no answer: the solution has no filled, closed \\boxed{}")
    return Fields(problem, stripped(_PARAGRAPH.split(solution)), answer)


def math_500(raw: Any) -> Fields:
    """Parse MATH-500: as MATH, with the answer in a column of its own and a `unique_id`."""
    row = named_fields(raw)
    # The caller puts source and split before the key: "test/" would stand there twice.
    key = text_of(row, "unique_id").removeprefix("test/").removesuffix(".json")
    return Fields(
        text_of(row, "problem"),
        stripped(_PARAGRAPH.split(text_of(row, "solution"))),
        text_of(row, "answer"),
        key,
    )


def gpqa(raw: Any) -> Fields:
    """Parse GPQA: no steps; the answer is a letter of four choices, their order fixed by a hash of each."""
    row = named_fields(raw)
    question = text_of(row, "Question")
    correct = text_of(row, "Correct Answer")
    wrong = [text_of(row, f"Incorrect Answer {number}") for number in (1, 2, 3)]
    # Published with the right answer first: the hash puts it in a random place, the same on every machine.
    choices = sorted([correct, *wrong], key=lambda choice: question_hash(f"{question} {choice}"))
    lines = [question]
    for letter, choice in zip(_LETTERS, choices, strict=True):
        lines.append(f"({letter}) {choice}")
    return Fields("\n".join(lines), (), _LETTERS[choices.index(correct)])


# --- parts of a row ------------------------------------------------------------------------------------


def collapsed(text: str) -> str:
    """The text with every run of white space as one space: two copies of a question differ in no more than that."""
    return " ".join(text.split())


def question_hash(question: str) -> str:
    """16 hex digits of the SHA-256 of the question with its white space collapsed: the same on every machine."""
    return hashlib.sha256(collapsed(question).encode()).hexdigest()[:16]


def named_fields(raw: Any) -> Mapping[str, Any]:
    if isinstance(raw, str):  # a line of a .jsonl file
        try:
            raw = files.parse_json(raw)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error.msg}") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be an object with named fields, is a {type(raw).__name__}")
    return raw


def text_of(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        # A null counts as not there: a user's own tools often write it for one.
        present = sorted(str(key) for key, other in row.items() if other is not None)
        has = ", ".join(present) or "none"
        raise ValueError(f"no field {name!r}{did_you_mean(name, present)} (has {has})")
    # An id may be a number in a user's file; any other field that is no text is a mistake.
    if name == "id" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
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
    for step in steps:
        check_text(name, step)
    return stripped(steps)


def stripped(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts without white space around them, empty ones left out."""
    return tuple(part.strip() for part in parts if part.strip())


def filled(text: str, name: str) -> str:
    """The text without white space around it. ValueError where nothing is left, or where it cannot be encoded."""
    if not text.strip():
        raise ValueError(f"empty {name}")
    check_text(name, text)
    return text.strip()
