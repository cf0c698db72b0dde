"""The reasoning in a text: parted from the answer behind it, and cut into steps.

The answer stands behind `<think>` tags, behind the last line's `####`, or in the last `\\boxed{}` of the chain itself.
Steps are the chain's calculator marks, its lines, or its sentences.
"""

import re
from typing import Any

from colar.data.example import Context, Fields, Row, filled, key_of
from colar.data.judge.latex import extract_boxed

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
EMPTY: tuple[Any, ...] = (None, "", "[]", [], (), "on", "off")
"""Cells without reasoning. Nemotron's "on" and "off" tell whether reasoning was requested."""
MARK = re.compile(r"<<(?=[^<>]*\d)[^<>=;\n]*=[^<>;\n]*>>")
"""A mark of GSM8K's calculator, `<<21/7=3>>`; `x << 2` and `cin >> n` in a program are none."""
FORMULA = re.compile(
    r"\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL
)
LINE_END = re.compile(r"\s*\n\s*")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9$\\])")
ABBREVIATION = re.compile(r"(?:\b(?:[A-Z]|e\.g|i\.e|etc|vs|Mr|Mrs|Ms|Dr|St|No|Eq|Fig|approx|cf)|^\d+)\.$")
LONG = 120
"""Characters beyond which a line is cut at its sentence ends."""


def fields_of(row: Row, question: str, context: Context, chain: str | tuple[str, ...], answer: str) -> Fields:
    """The fields of a row; a `chain` that is text is cut into steps."""
    marked = []
    if isinstance(chain, str):
        marked = [bool(MARK.search(line)) for line in chain.splitlines() if line.strip()]
        chain = cut(chain)
    unmarked = any(marked) and not all(marked)
    return Fields(question, chain, answer, key_of(row), row.get("answer_type"), context, unmarked)


def parted(text: str) -> tuple[str, str]:
    """Split a text into its reasoning ("" if there is none) and the answer behind it or in its last box."""
    thought = _thought(text)
    if thought:
        chain, answer = parted(thought[3])
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


def without_answer(chain: str) -> str:
    """A chain of which the answer is known from elsewhere, without the tags around it or the answer at its end."""
    thought = _thought(chain)
    return thought[1] if thought else FINAL.split(chain.strip())[0]


def _thought(text: str) -> re.Match[str] | None:
    """The match of `THINK`. ValueError for thoughts that do not end: the answer in them is not the row's."""
    thought = THINK.match(text)
    if thought is None and OPEN.match(text):
        raise ValueError("the reasoning is cut: its <think> is not closed")
    return thought


def cut(chain: str) -> tuple[str, ...]:
    """A chain as steps: its `<<...>>` marks where it has some, else its lines, long ones cut at sentence ends."""
    marks = MARK.findall(chain)
    if marks:
        return tuple(marks)
    steps: list[str] = []
    for line in _parts(chain, LINE_END):
        steps += sentences(line) if len(line) > LONG else [line]
    return tuple(steps)


def sentences(text: str) -> list[str]:
    """The sentences of a text; none ends behind an abbreviation, or behind the number of a list item."""
    return _parts(text, SENTENCE_END, unless=ABBREVIATION)


def _parts(text: str, ends: re.Pattern[str], unless: re.Pattern[str] | None = None) -> list[str]:
    """Cut a text at each match of `ends`, but not inside a formula, nor if `unless` matches in the part before it."""
    formulas = [match.span() for match in FORMULA.finditer(text)]
    parts, start = [], 0
    for match in ends.finditer(text):
        part = text[start : match.start()].strip()
        inside = any(first <= match.start() < last for first, last in formulas)
        if part and not inside and not (unless and unless.search(part)):
            parts.append(text[start : match.end()].strip())
            start = match.end()
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts
