"""The type of a user's answers, inferred where the rows name none."""

import re
from collections import Counter
from collections.abc import Sequence

from colar.data.example import AnswerType
from colar.data.judge import understood

ENOUGH = 0.95
"""Share of the answers that must be numbers, or letters, for all to be judged as such."""
LATEX = 0.1
"""Share of answers with LaTeX at which all are judged as formulas."""
TELLING = re.compile(
    r"(?<![a-z])(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?|[ap]\.?m|ad|bce?|ago|later|before|after|more|fewer|less|increase|decrease|rise|fall"
    r"|gain|loss|profit|up|down|north|south|east|west|left|right)(?![a-z])"
)
"""Words behind a number of which the answer is a part: 5 pm, 12% increase."""
PRICE = re.compile(r"\$\s?[\d,.]+(?![\d,.$\\^])")
"""A price, whose dollar is not that of a formula."""


def infer(golds: Sequence[str]) -> AnswerType:
    """Number or choice if nearly all answers are such, else latex or text."""

    def are(answer_type: AnswerType) -> bool:
        return sum(understood(gold, answer_type) for gold in golds) >= ENOUGH * len(golds)

    are_numbers = are("number")
    # A number is judged without the words beside it, which must not be what tells "May 5" from "June 5".
    if are_numbers and _have_like_words(golds):
        return "number"
    # Of "B. 12" a number is read, too.
    if are("choice"):
        return "choice"
    if are_numbers:
        return "text"
    formulas = sum(any(sign in PRICE.sub("", gold) for sign in ("\\", "$", "^")) for gold in golds)
    return "latex" if formulas >= LATEX * len(golds) else "text"


def _have_like_words(golds: Sequence[str]) -> bool:
    """True if nearly all numbers have the same words before them, mostly none, and the same of `TELLING` behind."""

    def words(gold: str) -> tuple[str, ...]:
        before, *behind = re.split(r"\d[\d.,:]*", re.sub(r"\\[A-Za-z]+", "", gold), maxsplit=1)
        return ("".join(filter(str.isalpha, before)), *TELLING.findall("".join(behind).lower()))

    return max(Counter(map(words, golds)).values(), default=0) >= ENOUGH * len(golds)
