"""Parsers of the published data sets, one for each way in which their rows are published.

Each is named in `catalogue.py`; a user's rows have parsers of their own, chosen by their columns (`layouts.py`).
"""

from __future__ import annotations

import re
from typing import Any

from colar.data.example import question_hash
from colar.data.fields import EQUATION, Fields, Parser, answer_of, filled, named_fields, stripped, text_of
from colar.data.judge.latex import extract_boxed

_PROMPT_SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."
_PARAGRAPH = re.compile(r"\n\s*\n")
_CLOSING = ".!?,;:"
_LETTERS = "ABCD"
# Two of the 7,500 training rows end in an empty box.
_MATH_UNANSWERED = frozenset({"79595ba3b4cfcfe2", "81a7fe8e017d681c"})


class UpstreamFault(ValueError):
    """A row that is known to be faulty where it was published: always left out, with a message on stderr."""


def columns(question: str, answer: str) -> Parser:
    """Make a parser of rows that hold a question and an answer, without steps, in columns of these names."""

    def parse(raw: Any) -> Fields:
        row = named_fields(raw)
        return Fields(text_of(row, question), (), answer_of(row, answer))

    return parse


def icot_line(raw: Any) -> Fields:
    """Parse `question||<<21/7=3>> <<5*3=15>> #### 15`; each `<<...>>` is a step, and there may be none."""
    question, bars, rest = str(raw).partition("||")
    if not bars:
        raise ValueError("no '||' between question and steps")
    chain, mark, answer = rest.partition("####")
    if not mark:
        raise ValueError("no '####' before the answer")
    # Text between the equations would be lost without a word.
    outside = EQUATION.sub("", chain).strip()
    if outside:
        raise ValueError(f"text outside <<...>> in the steps: {outside[:40]!r}")
    steps = tuple(EQUATION.findall(chain))
    return Fields(filled(question, "question"), steps, filled(answer, "answer"))


def gsm8k(raw: Any) -> Fields:
    """Parse GSM8K's own rows: a step a line, then `#### answer`; without the calculator's <<...>> marks."""
    row = named_fields(raw)
    # Steps and answer are one text, "step\nstep\n#### 72".
    chain, mark, answer = text_of(row, "answer").rpartition("####")
    if not mark:
        raise ValueError("no '####' before the answer")
    steps = stripped(EQUATION.sub("", chain).splitlines())
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
