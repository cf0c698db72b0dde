r"""Units and bases of LaTeX answers: what stands behind a number and is not its value.

A unit is `\text{ cm}`, a word ("5 meters"), `\$` before the number, `^\circ`; a base is the subscript of "4210_7". Two
answers may have the same, or one of them none: "5" is right where 5 cm is expected. Where both have one and the two
differ, the answers differ: math-verify drops both, so that 5 cm would be 5 m, and 4210_7 would be 4210_8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# One line a unit: its spellings. Units that are not here are compared as they are spelled, without a plural's "s".
_SPELLINGS = """
cm centimeter centimetre
mm millimeter millimetre
dm decimeter decimetre
km kilometer kilometre
m meter metre
in inch inche
ft foot feet
yd yard
mi mile
g gram
kg kilogram
mg milligram
lb lbs pound
oz ounce
l L liter litre
ml mL milliliter millilitre
s sec second
min minute
h hr hour
yr year
mph mile/hour mileperhour
$ dollar usd USD
cent ¢
degree deg °
percent %
unit
"""
_UNITS = {spelling: line.split()[0] for line in _SPELLINGS.strip().splitlines() for spelling in line.split()}
_SHORT = "|".join(
    re.escape(name) for name in sorted(_UNITS, key=len, reverse=True) if name.isalpha() and len(name) > 1
)
_BOX = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{"
_BASE = re.compile(
    r"(?<=[0-9])_\s*(?:([0-9]+)|\{\s*([0-9]+)\s*\})|(?<=[0-9])_\s*\{\s*" + _BOX + r"\s*([a-z]+)\s*\}\s*\}"
)
_POWER = r"(?P<power>\s*\^\s*\{?\s*[0-9]\s*\}?)?"
_BEHIND = re.compile(
    rf"(?<=[0-9)}}\]π])(?:\\[,;: !]|~|\s)*(?:{_BOX}(?P<boxed>[^{{}}]*[A-Za-z°¢][^{{}}]*)\}}"
    rf"|(?P<short>(?:{_SHORT})s?)(?![A-Za-z(])|(?<=[\s~])(?P<words>[A-Za-z]{{3,}}(?:[\s.]+[A-Za-z]{{2,}})*))"
    rf"{_POWER}\s*\.?\s*$"
)
_LETTER = re.compile(rf"(?<=[0-9}}])[\s~]+(?P<letter>[mgslLh]){_POWER}\s*\.?\s*$")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|°)\s*$|°\s*$")
_DOLLARS = re.compile(r"^\s*([-+]?)\s*\\\$\s*(?=[-+0-9.])")
# Words behind a number that are maths, or that join two answers.
_NO_UNIT = re.compile(
    r"(?:pi|tau|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|mod|or|and|if|for|when|where|is|to|from|in|not|no|none|"
    r"million|billion|thousand|hundred|dozen|infinity|inf)\b",
    re.IGNORECASE,
)
_SQUARE = re.compile(r"\b(?:sq(?:uare)?|(cu(?:bic)?))\b\.?\s*")


@dataclass(frozen=True)
class Measured:
    """An answer without its unit and its bases, each in one spelling; "" and () where it has none."""

    expression: str
    unit: str
    bases: tuple[str, ...]

    def compatible(self, other: Measured) -> bool:
        """Units and bases are the same, or one of the two answers has none."""
        units = not self.unit or not other.unit or self.unit == other.unit
        bases = not self.bases or not other.bases or self.bases == other.bases
        return units and bases


def measured(answer: str, other: str) -> Measured:
    """Split an answer in LaTeX into its value, its unit and its bases.

    The letter of "5 m" is a unit where the `other` answer has one in words; else it is a variable.
    """
    text = answer
    unit = ""
    dollars = _DOLLARS.match(text)
    if dollars:
        text = dollars[1] + text[dollars.end() :]
        unit = "$"
    degrees = _DEGREES.search(text)
    behind = _BEHIND.search(text)
    letter = _LETTER.search(text) if re.search(_BOX, other) else None
    if letter:
        text, unit = text[: letter.start()], _canonical(letter["letter"], letter["power"] or "")
    elif degrees:
        text, unit = text[: degrees.start()], "degree"
    elif behind:
        name = behind["boxed"] or behind["short"] or behind["words"]
        if not _NO_UNIT.match(name.strip()):
            text = text[: behind.start()]
            unit = _canonical(name, behind["power"] or "")
    bases = tuple(number or braced or word for number, braced, word in _BASE.findall(text))
    return Measured(_BASE.sub("", text).strip(), unit, bases)


def _canonical(name: str, power: str) -> str:
    """One spelling for a unit: "sq. units", "square units" and "units^2" are "unit^2"."""
    raised = "".join(character for character in power if character.isdigit())
    square = _SQUARE.search(name)
    if square:
        raised = "3" if square[1] else "2"
        name = _SQUARE.sub("", name)
    name = "".join(name.replace(" per ", "/").replace(".", "").split()).strip("\\,;:~")
    for spelling in (name, name.lower(), name.removesuffix("s"), name.lower().removesuffix("s")):
        if spelling in _UNITS:
            name = _UNITS[spelling]
            break
    else:
        name = name.lower().removesuffix("s")
    return f"{name}^{raised}" if raised and raised != "1" else name
