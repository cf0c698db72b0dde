"""Words of a question that are cues for constants of its chain: "week" for 7, "half" for 2, "dozen" for 12.

The table is generous on purpose. A number of the question that equals a cued constant keeps its value (`origins.py`),
which costs a little variety; a constant that is taken for a number of the question makes a wrong row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from colar.data.renumber.mentions import Mention

_CUES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"week|daily|every ?day|each day|per day|a day|monday|tuesday|wednesday|thursday|friday|saturday|sunday", ("7",)),
    (r"weekday|work ?day|business day|work ?week|school", ("5",)),
    (r"weekend", ("2",)),
    (r"\bday|night|o'clock", ("24",)),
    (r"hour|minute|second|mph|km/h", ("60", "0.5", "30", "3600")),
    (r"month|january|february|march|april|june|july|august|september|october|november|december", ("12", "30", "4")),
    (r"year|annual", ("12", "52", "365")),
    (r"dozen", ("12", "6", "24")),
    (r"%|percent|discount|\$|cent|dollar", ("100", "0.01")),
    (r"penn|dime|nickel|quarter|coin", ("100", "0.01", "25", "10", "5", "0.25", "0.1", "0.05")),
    (r"half|halv|twice|doubl|both|pair|couple|either|twin|parents|midway|round trip|return", ("2", "0.5", "50", "1.5")),
    (r"third|tripl|thrice|triang|tricycle", ("3", "2")),
    (r"quarter|fourth|quadrupl|season|square|rectang|perimeter|corner", ("4", "2", "0.25", "0.75", "25", "75", "3")),
    (r"fifth", ("5", "0.2", "20", "4")),
    (r"sixth", ("6", "5")),
    (r"eighth", ("8", "7")),
    (r"tenth", ("10", "9", "0.1")),
    (r"foot|feet|inch|yard", ("12", "3", "36")),
    (r"pound|ounce", ("16",)),
    (r"kilo|km|kg|litre|liter|meter|gram|\bml\b|\bcm\b", ("1000", "100")),
    (r"gallon|quart|pint", ("4", "2", "8", "16")),
    (r"decade|centur", ("10", "100")),
    (r"leg\b|legs|wheel|tire|paw|hoo[fv]|shoe|sock|glove|bicycle|bike|motorcycle", ("2", "3", "4", "6", "8")),
)  # fmt: skip
"""Words of a question, and the constants that a chain may have from them."""


def cued_constants(question: str, mentions: Sequence[Mention]) -> set[Fraction]:
    """Constants that the question's words are cues for. The words of its numbers ("twice") are none."""
    characters = list(question.lower())
    for mention in mentions:
        if mention.kind in ("fraction", "times", "word"):
            # Masked at equal length: the places of the mentions behind it stay valid.
            characters[mention.start : mention.end] = "#" * (mention.end - mention.start)
    text = "".join(characters)
    cued = {Fraction(1)}
    for words, constants in _CUES:
        if re.search(words, text):
            cued.update(Fraction(constant) for constant in constants)
    return cued
