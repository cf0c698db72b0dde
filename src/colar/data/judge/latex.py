r"""LaTeX answers: the content of `\boxed{}`, a plain spelling, and the comparison of two expressions.

Braces are matched, because cutting at the last brace of a MATH solution corrupts a tenth of the answers. Two answers
are the same if their plain spellings are equal, if they are plain numbers of equal value, or if math-verify finds them
equal; different units or bases make different answers. A list in parentheses or brackets is ordered, a
bare list and one in braces is not: "(3,4)" is neither "3,4" nor "(4,3)", and "3,4" is "4,3" and "\{3,4\}".
math-verify runs in a process of its own (`math_process.py`), and its replies are cached. Without a reply
the two are not the same, and this is not cached, because the machine may have been busy.

A unit is `\text{ cm}`, a word ("5 meters"), `\$` before the number, `^\circ`; a base is the subscript of "4210_7". Two
answers may have the same, or one of them none: "5" is right if 5 cm is expected. If both have one and the two differ,
the answers differ. math-verify alone would drop both: 5 cm would be 5 m, and 4210_7 would be 4210_8.
"""

import itertools
import re
from functools import lru_cache

from colar.data.judge import math_process
from colar.data.judge.numbers import read_number

CACHED = 10_000
"""Most comparisons whose outcome is cached."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE_BOX = re.compile(r"[^\s$]+")
# No span contains a delimiter of its own kind, so the search is linear in the text's length. `\$` is a currency sign.
_MATHS = re.compile(
    r"(?<!\\)\$\$?((?:\\.|[^$\\])+)\$\$?|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]", re.DOTALL
)
# The text between two formulas: in a list, and in an equation.
_LISTED = re.compile(r",|(?:,\s*)?(?:and|or)", re.IGNORECASE)
_EQUATED = re.compile(r"=|is|equals", re.IGNORECASE)
# Text beside the only formula, "\0", that changes its value: "not $5$", "-$5$", "6 or $5$", "$5$ million".
_CHANGED = re.compile(
    r"""(?:[-<>0-9] | [<>]\s | [0-9]\s*(?:[-+*/]|\b(?:and|or|to)\b)\s*
          | \b(?:not|minus|negative|than|least|most|half\s+of)\s+ | n't\s+)\0
      | \0\s*(?:[0-9] | (?:[-+*/,]|and|or)\s*[0-9] | or\s+(?:more|less)\b
          | (?:hundred|thousand|million|billion|trillion|dozen)\b)""",
    re.IGNORECASE | re.VERBOSE,
)
_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{"
WORDS = re.compile(_TEXT + r"([^{}]*)\}")
# Spellings that print alike, and the one that replaces each.
_LOOKS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[!]"), ""),
    (re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\[,;: ]|~|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*([0-9])"), r"\\sqrt{\1}"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\mid(?![a-zA-Z])"), "|"),
    # A space counts between words and digits only: "1 2" is not "12".
    (re.compile(r"(?<![0-9a-zA-Z])\s+|\s+(?![0-9a-zA-Z])"), ""),
    (re.compile(r"\s+"), " "),
)
_PLAIN_NUMBER = re.compile(
    r"[-+]?\\?\$?(?:[0-9.,]+(?:e[-+]?[0-9]+)?|(?:[0-9]+ )?[0-9]+/[0-9]+|\\frac\{[0-9]+\}\{[0-9]+\})",
    re.IGNORECASE,
)
# Signs that math-verify does not read.
_SIGNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("∞"), r"\\infty "),
    (re.compile("∈"), r"\\in "),
    (re.compile(r"√\s*(?:([0-9]+|[A-Za-z])|\(([^()]*)\))"), r"\\sqrt{\1\2}"),
)
# The name before a pair or an interval: "(x,y)=", "x\in".
_NAME = re.compile(r"^(?:\([^()=]*\)|[^()\[\]=])*?(?:=|\\in(?![a-zA-Z]))")
_INEQUALITY = re.compile(r"[<>]|\\[lg](?:eq?|t)(?![a-zA-Z])")

# Other spellings of units, without a plural's "s". Units that are not here are compared as they are spelled.
_UNITS = {
    "centimeter": "cm", "millimeter": "mm", "kilometer": "km", "meter": "m", "inch": "in", "inche": "in", "foot": "ft",
    "feet": "ft", "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg", "pound": "lb",
    "ounce": "oz", "liter": "L", "l": "L", "milliliter": "mL", "ml": "mL", "second": "s", "sec": "s", "minute": "min",
    "hour": "h", "hr": "h", "year": "yr", "mile/hour": "mph", "miles/hour": "mph", "dollar": "$", "usd": "$",
    "cent": "¢", "degree": "°", "deg": "°", "percent": "%",
}  # fmt: skip
_NAMES = {*_UNITS, *_UNITS.values(), "unit"}
_SHORT = "|".join(
    re.escape(name) for name in sorted(_NAMES, key=len, reverse=True) if name.isalpha() and len(name) > 1
)
_BASE = re.compile(
    r"(?<=[0-9])_\s*(?:([0-9]+)|\{\s*([0-9]+)\s*\})|(?<=[0-9])_\s*\{\s*" + _TEXT + r"\s*([a-z]+)\s*\}\s*\}"
)
_POWER = r"(?P<power>\s*\^\s*\{?\s*[0-9]\s*\}?)?"
_BEHIND = re.compile(
    rf"(?:(?<=[0-9)}}\]π])|(?<=\\pi))(?:\\[,;: !]|~|\s)*(?:{_TEXT}(?P<boxed>[^{{}}]*[A-Za-z°¢][^{{}}]*)\}}"
    rf"|(?P<short>(?:{_SHORT})s?)(?![A-Za-z(])|(?<=[\s~])(?P<words>[A-Za-z]{{3,}}(?:[\s.]+[A-Za-z]{{2,}})*))"
    rf"{_POWER}\s*\.?\s*$"
)
_LETTER = re.compile(rf"(?<=[0-9}}])[\s~]+(?P<letter>[mgslLh]){_POWER}\s*\.?\s*$")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|°)\s*$|°\s*$")
_PERCENT = re.compile(r"\s*\\?%\s*$")
_DOLLARS = re.compile(r"^\s*([-+]?)\s*\\\$\s*(?=[-+0-9.])")
# Words behind a number that are maths, or that join two answers.
_NO_UNIT = re.compile(
    r"(?:pi|tau|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|mod|or|and|if|for|when|where|is|to|from|in|not|no|none|"
    r"million|billion|thousand|hundred|dozen|infinity|inf)\b",
    re.IGNORECASE,
)
_SQUARE = re.compile(r"\b(?:sq(?:uare)?|(cu(?:bic)?))\b\.?\s*")


def extract_boxed(solution: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, braces matched; also `\boxed 5`.

    None if there is no box, if it is empty, or if the last one never closes (a truncated completion).
    """
    start = None
    for match in _BOX.finditer(solution):
        start = match.end()
    if start is None or start >= len(solution):
        return None
    if solution[start] == "{":
        content = _braced(solution, start) or ""
    else:
        # `\boxed 5.`: the next word, without the sentence's punctuation.
        bare = _BARE_BOX.match(solution, start)
        content = bare[0].rstrip(".,;:") if bare else ""
    return content.strip() or None


def math_spans(text: str) -> list[str]:
    r"""The texts between `$...$`, `\(...\)` or `\[...\]`."""
    # One group per kind of delimiter; two of the three are empty.
    return ["".join(groups).strip() for groups in _MATHS.findall(text)]


def formula(text: str) -> str | None:
    """The formula that `text` states: all of it if it has no delimiters; None if several could be meant.

    Several in a row are a list ("$1$, $2$ and $3$"); in an equation ("$x$ is $5$") the right side is meant.
    """
    formulas = list(_MATHS.finditer(text))
    spans = math_spans(text)
    between = [text[one.end() : other.start()].strip() for one, other in itertools.pairwise(formulas)]
    if len(spans) == 1:
        beside = f"{text[: formulas[0].start()]}\0{text[formulas[0].end() :]}"
        return None if _CHANGED.search(beside) else spans[0]
    if not spans:
        return text
    if all(_LISTED.fullmatch(words) for words in between):
        # In dollars still: of a list in which all are alike, math-verify takes one.
        return ", ".join(f"${span}$" for span in spans)
    if all(_EQUATED.fullmatch(words) for words in between):
        return spans[-1]
    return None


def as_latex(text: str) -> str:
    r"""The text with the signs ∞, ∈ and √ replaced by `\infty`, `\in` and `\sqrt{}`."""
    for sign, command in _SIGNS:
        text = sign.sub(command, text)
    return text


def plain(expression: str) -> str:
    r"""One spelling for looks that do not matter: `\dfrac`, `\left(`, `\text{}`, spaces, dollars, a final full stop."""
    text = WORDS.sub(r" \1 ", undelimited(expression.strip()))
    # In the order of the table: spaces are removed last, because other replacements may leave some.
    for pattern, replacement in _LOOKS:
        text = pattern.sub(replacement, text)
    # If nothing is left, the text itself is kept: two empty spellings would pass for equal answers.
    return text.strip().removesuffix(".").strip() or expression.strip()


def same_maths(gold: str, answer: str) -> bool:
    """True if two LaTeX expressions, whose plain spellings differ, mean the same.

    Thread-safe; returns within about DEADLINE_S.
    """
    only_words = not WORDS.sub("", gold).strip(" $.\\")
    if only_words:
        # "\text{Evelyn}" is a word. As maths it would be a product of letters, in any order.
        return plain(gold).casefold().strip("()") == plain(answer).casefold().strip("()")
    if formula(gold) is None or formula(answer) is None:
        return False  # math-verify would take the last one
    whole, other_whole = undelimited(gold), undelimited(answer)
    gold, unit, bases = split_unit(whole, other_whole)
    answer, other_unit, other_bases = split_unit(other_whole, whole)
    # One of the two may have no unit or no base.
    if (unit and other_unit and unit != other_unit) or (bases and other_bases and bases != other_bases):
        return False
    # An interval may stand for an inequality.
    if _ordered(gold) != _ordered(answer) and not _INEQUALITY.search(gold):
        return False
    spelled, other = plain(gold), plain(answer)
    if spelled == other:
        return True
    # Plain numbers are compared exactly, and need no worker.
    if _PLAIN_NUMBER.fullmatch(spelled) and _PLAIN_NUMBER.fullmatch(other):
        values = [read_number(spelled), read_number(other)]
        if None not in values:
            return values[0] == values[1]
    try:
        return _equal(gold, answer)
    except TimeoutError:
        return False


def undelimited(text: str) -> str:
    """The formula without its delimiters; a list of several as it is."""
    spans = math_spans(text)
    return spans[0] if len(spans) == 1 and _MATHS.fullmatch(text.strip().rstrip(".")) else text


def _ordered(expression: str) -> bool:
    """True for a list in parentheses or brackets: a pair or an interval, not a set of solutions."""
    spelled = _NAME.sub("", plain(expression))
    if not spelled.startswith(("(", "[")) or not spelled.endswith((")", "]")):
        return False
    depth = 0
    commas = 0
    for position, character in enumerate(spelled):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and position < len(spelled) - 1:
            return False  # "(1,2),(3,4)" is a list of pairs
        commas += depth == 1 and character == ","
    return commas > 0


def _braced(text: str, start: int) -> str | None:
    """The text in the braces that open at `start`; None where they never close.

    `\\{` and `\\}` are characters, not braces.
    """
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # the next character is escaped
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None


# --- units and bases --------------------------------------------------------------------------------------


def split_unit(answer: str, other: str) -> tuple[str, str, tuple[str, ...]]:
    """Split an answer in LaTeX into its rest, its unit and its bases, each in one spelling; "" and () for none.

    The letter of "5 m" is a unit if the `other` answer has a `\\text{}`; else it is a variable.
    """
    text = answer
    unit = ""
    if dollars := _DOLLARS.match(text):
        text, unit = dollars[1] + text[dollars.end() :], "$"
    degrees = _DEGREES.search(text)
    behind = _BEHIND.search(text)
    letter = _LETTER.search(text) if re.search(_TEXT, other) else None
    if letter:
        text, unit = text[: letter.start()], _unit(letter["letter"], letter["power"] or "")
    elif degrees:
        text, unit = text[: degrees.start()], "°"
    elif percent := _PERCENT.search(text):
        text, unit = text[: percent.start()], "%"
    elif behind:
        name = behind["boxed"] or behind["short"] or behind["words"]
        if name.strip(" .") in _NAMES or not _NO_UNIT.match(name.strip()):
            text, unit = text[: behind.start()], _unit(name, behind["power"] or "")
    bases = tuple(number or braced or word for number, braced, word in _BASE.findall(text))
    return _BASE.sub("", text).strip(), unit, bases


def _unit(name: str, power: str) -> str:
    """One spelling for a unit: "sq. units", "square units" and "units^2" are "unit^2"."""
    raised = "".join(character for character in power if character.isdigit())
    square = _SQUARE.search(name)
    if square:
        raised = "3" if square[1] else "2"
        name = _SQUARE.sub("", name)
    name = "".join(name.replace(" per ", "/").replace(".", "").split()).strip("\\,;:~")
    if name not in _NAMES:
        name = name.lower().removesuffix("s")
    name = _UNITS.get(name, name)
    return f"{name}^{raised}" if raised and raised != "1" else name


# Cached, because a model repeats its wrong answers, and a group of rollouts has many alike.
@lru_cache(maxsize=CACHED)
def _equal(gold: str, answer: str) -> bool:
    """The worker's reply. TimeoutError, which is not cached, if there is none."""
    return math_process.WORKER.same(gold, answer)
