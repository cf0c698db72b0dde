"""Numbers as text: `3/2` written like "0.30", like "1,200" or as a word, and the article that goes before it."""

from __future__ import annotations

import re
from fractions import Fraction

SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
PARTS = {3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth", 10: "tenth"}
"""Names of the bottoms of fractions, singular."""
_MOST_PLACES = 15


def digits_like(value: Fraction, like: str, keep_places: bool = False) -> str:
    """Write `value` in digits as `like` is written: separators, a bare leading point, decimals padded with zeros.

    With `keep_places` it has at least as many decimals. ValueError where the value's decimals never end.
    """
    shown = len(like.partition(".")[2])
    # A zero at the end shows that decimals are padded: 2.50 becomes 4.00, where 2.5 becomes 4.
    padded = keep_places or (shown > 0 and like.endswith("0"))
    places = max(places_of(value), shown if padded else 0)
    # Exact: there are places enough for all of the value's decimals, so nothing is rounded.
    scaled = value.numerator * 10**places // value.denominator
    digits = str(scaled).rjust(places + 1, "0")
    whole, part = (digits[:-places], digits[-places:]) if places else (digits, "")
    if "," in like:
        whole = f"{int(whole):,}"
    if like.startswith(".") and whole == "0":
        whole = ""
    return f"{whole}.{part}" if part else whole


def places_of(value: Fraction) -> int:
    """Count the decimals of a value. ValueError where they never end."""
    for places in range(_MOST_PLACES + 1):
        if 10**places % value.denominator == 0:
            return places
    raise ValueError(f"the decimals of {value} never end")


def word_of(number: int) -> str:
    """2 -> two, 35 -> thirty-five; up to 99."""
    if number < len(SMALL):
        return SMALL[number]
    tens, units = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL[units]}" if units else "")


def fraction_like(value: Fraction, like: str) -> str:
    """Write a fraction as `like` is written: "2/5", "1/8th" or "two-thirds"; up to tenths in words."""
    top, bottom = value.numerator, value.denominator
    if like[0].isdigit():
        suffix = like.lstrip("0123456789/")
        return f"{top}/{bottom}{suffix}"
    joint = "-" if "-" in like else " "
    plural = "s" if like.endswith("s") else ""
    return cased(f"{SMALL[top]}{joint}{PARTS[bottom]}{plural}", like)


def cased(text: str, like: str) -> str:
    """`text` with a capital where `like` has one."""
    return text.capitalize() if like[0].isupper() else text


def with_article(before: str, old: str, new: str) -> str:
    """The words before a number, ending in the article that the new number needs: an 8-hour shift, a 6-hour shift."""
    if _begins_with_vowel(old) == _begins_with_vowel(new):
        return before
    wrong, right = ("a", "an") if _begins_with_vowel(new) else ("an", "a")

    def swapped(match: re.Match[str]) -> str:
        return cased(right, match[1]) + match[2]

    return re.sub(rf"\b({wrong})(\s[$€£]?)$", swapped, before, flags=re.IGNORECASE)


def _begins_with_vowel(text: str) -> bool:
    """True if the number is spoken with a vowel first: 8, 11, 18,000, eighty; not 110."""
    if not text[0].isdigit():
        return text.lower().startswith(("eight", "eleven"))
    whole = text.partition(".")[0].partition("/")[0].replace(",", "")
    # 11 and 18 are spoken at the head of a group of three digits only: 11,000, not 1,100.
    return whole.startswith("8") or (whole.startswith(("11", "18")) and len(whole) % 3 == 2)
