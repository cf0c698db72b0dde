"""Cutting the text of a chain into steps: at its calculator marks, its lines, or the ends of its sentences."""

import re

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
