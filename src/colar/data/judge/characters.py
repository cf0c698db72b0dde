"""One spelling for characters that look alike: full-width digits, composed accents, dashes, quotes, hard spaces.

Unicode's NFKC does most of it, and is wrong about numbers: it turns "10⁶" into "106", "3½" into "31⁄2" and "①" into
"1". Here a superscript becomes `^{6}`, a subscript `_{7}`, a vulgar fraction " 1/2", and any other character that
stands for a number without being a decimal digit remains as it is.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎"
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+")
_LOWERED = re.compile(f"[{_SUBSCRIPTS}]+")
_ALIKE = str.maketrans({
    **dict.fromkeys("‐‑‒–−﹣－", "-"),  # hyphens, figure and en dash, minus; an em dash is punctuation
    **dict.fromkeys("‘’‚‛′ʼ＇", "'"),
    **dict.fromkeys("“”„‟″＂", '"'),
    **dict.fromkeys("⁄∕", "/"),
    "º": "°",
    # Characters without a width: soft hyphen, joiners of words, byte-order mark, marks of direction.
    **dict.fromkeys("\u00ad\u200b\u200e\u200f\u2060\ufeff\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"),
})  # fmt: skip


def folded(text: str) -> str:
    """Rewrite `text` to one spelling of characters that look alike. ASCII text is returned as it is."""
    if text.isascii():
        return text
    # Where nothing is left the text itself stays: two empty spellings would pass for equal answers.
    spelled = _folded(text)
    return spelled if spelled.strip() else text


def _folded(text: str) -> str:
    text = _RAISED.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    # NFC first, so that the parts of a composed character are not taken one by one.
    text = unicodedata.normalize("NFC", text.translate(_ALIKE))
    if any(_is_number_sign(character) for character in text):
        text = "".join(_number_sign(character) for character in text)
    else:
        text = unicodedata.normalize("NFKC", text)
    return text.translate(_ALIKE)


def _is_number_sign(character: str) -> bool:
    return not character.isascii() and character.isnumeric() and not character.isdecimal()


def _number_sign(character: str) -> str:
    """The character in NFKC; a vulgar fraction as " 1/2", other signs of numbers ("①", "Ⅳ") as they are."""
    spelled = unicodedata.normalize("NFKC", character)
    if not _is_number_sign(character):
        return spelled
    top, slash, bottom = spelled.partition("⁄")
    return f" {top}/{bottom}" if slash and top and bottom else character
