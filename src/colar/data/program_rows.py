"""Rows whose chain is a program: a user's, and those of TinyGSM, MathQA, MathCAMPS, DMath and MAWPS.

| rows | chain | given answer |
|---|---|---|
| TinyGSM | a Python function in the answer of a language model | none |
| MathQA | `linear_formula` | the right one of the options |
| MathCAMPS | `[[var y = (162 / 18)]] [[question g = ['y']]]` | `answer` |
| DMath | Python, an operation a line | `answer_en` |
| MAWPS | `X=(88.0-6.0)` | `lSolutions` |

A row is kept if its program is straight (`programs.py`) and its result equals the given answer by the judge's rule.
Otherwise the parser raises `NotStraight` with the reason.
"""

from __future__ import annotations

import re
from typing import Any

from colar.data import programs
from colar.data.fields import Fields, answer_of, named_fields, text_of
from colar.data.judge.numbers import read_number, same_number
from colar.data.programs import NotStraight, Solution

# What some of the models wrote before the question that they were asked to make up.
_PREAMBLE = re.compile(
    r"^\W*(?:(?:student|result|(?:s?ome )?(?:possible )?(?:new |math |python |additional )*questions"
    r"(?: and (?:python )?programs)?(?: are)?)\s*:\s*)+",
    re.IGNORECASE,
)
_OPTION = re.compile(r"([a-e])\s*\)\s*(?:\1\s*\)\s*)?(.+?)(?=\s*,\s*[a-e]\s*\)|$)")
_RUPEES = re.compile(r"\brs\s*\.?\s*")
_SPACES = re.compile(r"\s+(?=[.,?!;:](?!\d))|(?<=\d)\s+(?=%)")
_DEFINED = re.compile(r"\[\[var (\w+) = (.*)\]\]")
_UNKNOWN = re.compile(r"\[\[question \w+ = \['(\w+)'\]\]\]")
_PRINT = re.compile(r"print\(.*?\b(var_\w+)\b.*\)\s*$")


def checked(question: str, solution: Solution, gold: Any, key: str | None = None) -> Fields:
    """The fields of a program, if its value is the row's own answer `gold`; None where the row has none."""
    if gold is not None:
        answer = read_number(str(gold))
        if answer is None:
            raise NotStraight("a given answer that is no number")
        if not same_number(answer, solution.value):
            raise NotStraight("its program gives another answer than the row")
    return Fields(question, solution.steps, solution.answer, key, "number")


def tinygsm(raw: Any) -> Fields:
    """Parse TinyGSM: `question` and `code` on the Hub, `user` and `assistant` in TinyGSM-Filter's files."""
    row = named_fields(raw)
    names = ("user", "assistant") if "user" in row else ("question", "code")
    question, code = (text_of(row, name) for name in names)
    return checked(_PREAMBLE.sub("", question), programs.of_python(code), None)


def mathqa(raw: Any) -> Fields:
    """Parse MathQA: the right option is the answer; spaces before punctuation go."""
    row = named_fields(raw)
    problem = text_of(row, "Problem")
    solution = programs.of_formula(text_of(row, "linear_formula"), problem)
    options = dict(_OPTION.findall(str(row.get("options", ""))))
    right = options.get(str(row.get("correct", "")).strip(), "")
    gold = _RUPEES.sub("", right) if "options" in row else None
    return checked(_SPACES.sub("", problem), solution, gold)


def mathcamps(raw: Any) -> Fields:
    """Parse the first problem of a MathCAMPS dialogue; its follow-ups cannot be read without it."""
    row = named_fields(raw[0] if isinstance(raw, list) and raw else raw)
    program = text_of(row, "symbolic-struct")
    unknown = _UNKNOWN.search(program)
    if unknown is None:
        raise NotStraight("several unknowns, or one that stands more than once")
    lines = []
    for name, expression in _DEFINED.findall(program):
        # A number in place of a name: the equation is to be solved for what is asked.
        lines.append(
            programs.solved(name, expression, unknown[1]) if name.isdigit() else f"{name} = {expression}"
        )
    solution = programs.of_python("\n".join([*lines, f"result = {unknown[1]}"]))
    return checked(text_of(row, "statement"), solution, answer_of(row, "answer"))


def dmath(raw: Any) -> Fields:
    """Parse the English half of DMath; its programs end in a print of the result, in one of several formats."""
    row = named_fields(raw)
    code = _PRINT.sub(r"result = \1", text_of(row, "solution_code_en"))
    return checked(text_of(row, "question_en"), programs.of_python(code), answer_of(row, "answer_en"))


def mawps(raw: Any) -> Fields:
    """Parse MAWPS: rows of one equation, in which the unknown stands once."""
    row = named_fields(raw)
    equations: list[str] = row.get("lEquations") or []
    solutions: list[Any] = row.get("lSolutions") or []
    if len(equations) != 1 or len(solutions) != 1:
        raise NotStraight("a system of equations, or none")
    left, _, right = equations[0].partition("=")
    unknown, *others = re.findall(r"[A-Za-z_]\w*", equations[0]) or [""]
    if others or not unknown:
        raise NotStraight("several unknowns, or one that stands more than once")
    known, side = (left, right) if unknown in right else (right, left)
    question = _SPACES.sub("", text_of(row, "sQuestion"))
    return checked(question, programs.of_python(programs.solved(known, side, unknown)), solutions[0])
