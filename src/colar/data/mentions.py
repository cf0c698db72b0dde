"""Numbers in the words of a question: where each stands, what it is worth, and how another one would be written there.

    "Ann pays $12.50 for two bags and gets 20% off."     money 25/2, word 2, percent 20

| kind | examples | another one is |
|---|---|---|
| integer | 12, 1,200, 5kg, 30-minute | of about that size; round where this is round |
| decimal | 2.5, .75 | of about that size, with as many decimals |
| money | $12.50, 80$, €9 | the same, with as many decimals as are written |
| percent | 20%, 5 percent | from 1 to 99 |
| fraction | 2/5, 1/8th, three-fourths | a proper one in lowest terms; a top of 1 stays 1 |
| word | two, Twelve, thirty-five | a word |
| times | twice, thrice | "three times", "four times" ... |
| fixed | see below | never another |

Fixed are 0 and 1 (so that no plural becomes a singular), ordinals, clock times, ratios, ranges and scores (3:2,
37-23), years, dates, names (mp3, Room 12), mixed numbers, 100% and more, calendar and unit facts (7 days, 12 inches),
what bodies and vehicles have (4 wheels), compounds ("two hundred five"), and "the three" where no other number is 3.
"half", "a third", "double" and "a dozen" are no mentions at all: they are cues for constants (`program.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
PARTS = {3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth", 10: "tenth"}
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
CHANGEABLE = ("integer", "decimal", "money", "percent", "fraction", "word", "times")

_WORDS: dict[str, int] = {word: number for number, word in enumerate(SMALL)}
_WORDS |= {word: 10 * number for number, word in enumerate(TENS, start=2)}
_PART_VALUES = {name: bottom for bottom, name in PARTS.items()} | {"quarter": 4}

_MIXED = r"\d+(?: | and |-)\d+/\d+|\d*[½¼¾⅓⅔]|(?:\d+|[a-z]+) and (?:a|one)[ -](?:half|quarter|third)"
_FRACTION = r"(?<![\w./,:-])\d+/\d+(?![\d/.]\d)(?:ths?\b)?"
_DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|(?<!\d)\.\d+"
_UNITS_OF_TEN = "|".join(SMALL[1:10])
_WORD_PART = rf"(?:{'|'.join(SMALL[1:10])})[ -](?:{'|'.join(_PART_VALUES)})s?"
_WORD = rf"(?:{'|'.join(TENS)})(?:[ -](?:{_UNITS_OF_TEN}))?|{'|'.join(sorted(SMALL[2:], key=len, reverse=True))}"
_NUMBER = re.compile(
    rf"(?P<mixed>{_MIXED})|(?P<fraction>{_FRACTION})|(?P<digits>{_DIGITS})"
    rf"|\b(?P<part>{_WORD_PART})\b|\b(?P<times>twice|thrice)\b|\b(?P<word>{_WORD})\b",
    re.IGNORECASE,
)

_MONTHS = r"(?:Jan(?:uary)?|Feb(?:ruary)?|March|April|May|June|July|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
_LABELS = (
    "room route highway grade day week month year level chapter page number no. no lane gate bus team part type stage "
    "step question section exam test quiz class group house apartment flight train player season episode volume "
    "figure machine line top under over-"
).split()
# What stands right before a number that is part of a name, a range, a sum or a date.
_FIXED_BEFORE = re.compile(
    rf"[\w#+*^:×/–—-]$|[\d)]\s?[x×]\s?$|\b{_MONTHS}\.?\s$|\b(?:{'|'.join(map(re.escape, _LABELS))})\s#?$"
)
# What stands right behind an ordinal, a clock time, a ratio, a range, a product or a date.
_FIXED_BEHIND = re.compile(
    r"(?:st|nd|rd|th)\b|\s?(?:[ap]\.?m\b|o['’]?clock)|[:/–—-]\s?\d|\s?[x×*^+=]\s?[\d(]|-(?:to|of|by|in|for)-|[½¼¾⅓⅔°/]"
    rf"|\s(?:of\s)?{_MONTHS}\b|\s(?:hundred|thousand|dozen)\s(?:and\s)?(?:\d|(?:{_WORD})\b)|-(?:hundred|thousand)",
    re.IGNORECASE,
)
_SLASH_UNIT = re.compile(r"/[a-z]", re.IGNORECASE)
_GLUED = re.compile(r"(?:kgs?|g|mg|ml|l|cl|km|m|cm|mm|oz|lbs?|mph|ft|mi|hrs?|mins?)\b|(?![A-Za-z])", re.IGNORECASE)
_PERCENT = re.compile(r"\s?%|[\s-]percent\b")
_SCALE = re.compile(rf"[\s-]({'|'.join(SCALES)})s?\b", re.IGNORECASE)
_UNIT = re.compile(r"(?:[\s-]|(?<=\d))(?:(?:more|full|whole|extra|additional|other|small|large|big|different)\s)?([A-Za-z]+)")
_CURRENCY = re.compile(r"[$€£¥¢]\s?$")
_BACK = re.compile(r"\b(?:the|these|those|all|both|other|remaining)\s$", re.IGNORECASE)
_ALWAYS_BACK = re.compile(r"\b(?:other|remaining|all)\s$", re.IGNORECASE)

FACTS = {
    (7, "day"), (28, "day"), (29, "day"), (30, "day"), (31, "day"), (365, "day"), (366, "day"), (24, "hour"), (60, "minute"),
    (60, "second"), (12, "month"), (4, "week"), (52, "week"), (12, "inch"), (3, "feet"), (100, "cent"), (16, "ounce"),
    (1000, "gram"), (1000, "meter"), (1000, "ml"), (100, "cm"), (100, "point"),
}  # fmt: skip
"""A number and its unit that are, or may be, a fact of the calendar or of measures."""
BODIES = frozenset("wheel leg tire eye ear hand arm wing parent grandparent side twin tentacle finger toe half".split())
"""What has as many as it has: changing "4 wheels" would change the world."""
CAPS = {"day": 7, "hour": 24, "minute": 60, "second": 60, "month": 12, "week": 52, "cent": 99, "time": 10}
"""A number of these that is at most the cap stays so: no day has 30 hours."""


@dataclass(frozen=True)
class Mention:
    """A number in a question: characters `start` to `end`, its spelling there, its value.

    `unit` is the word behind it, lower case, without a plural's s. `scale` is 10^6 in "3 million", where the value
    is 3. `words` is the kind's reason in words where it is fixed.
    """

    start: int
    end: int
    text: str
    value: Fraction
    kind: str
    unit: str = ""
    scale: int = 1


def find(question: str) -> list[Mention]:
    """Every number of the question, in order, fixed ones included."""
    found = []
    for match in _NUMBER.finditer(question):
        # The indefinite "one" is no number; a 1 in digits is a fixed one.
        mention = _mention(question, match)
        if mention is not None:
            found.append(mention)
    return [_fixed_if_alone(question, mention, found) for mention in found]


def write(question: str, mentions: list[Mention], values: list[Fraction]) -> str:
    """The question with other values in place of its numbers. The same values give the same text."""
    parts = []
    done = 0
    for mention, value in zip(mentions, values, strict=True):
        between = question[done : mention.start]
        text = mention.text if value == mention.value else spell(mention, value)
        parts.append(_with_article(between, mention.text, text))
        parts.append(text)
        done = mention.end
    return "".join(parts) + question[done:]


def spell(mention: Mention, value: Fraction) -> str:
    """`value` as it is written in the place of `mention`: digits, a word, a fraction, "three times"."""
    if mention.kind == "times":
        return _cased(f"{word_of(int(value))} times", mention.text)
    if mention.kind == "word":
        return _cased(word_of(int(value)), mention.text)
    if mention.kind != "fraction":
        return digits_like(value, mention.text, keep_places=mention.kind == "money")
    top, bottom = value.numerator, value.denominator
    if mention.text[0].isdigit():
        suffix = mention.text.lstrip("0123456789/")
        return f"{top}/{bottom}{suffix}"
    joint = "-" if "-" in mention.text else " "
    plural = "s" if mention.text.endswith("s") else ""
    return _cased(f"{SMALL[top]}{joint}{PARTS.get(bottom, '?')}{plural}", mention.text)


def digits_like(value: Fraction, like: str, keep_places: bool = False) -> str:
    """`value` in digits, spelled as `like` is: separators, a bare leading point, decimals padded with zeros.

    ValueError where the value's decimals never end.
    """
    shown = len(like.partition(".")[2])
    padded = keep_places or (shown > 0 and like.endswith("0"))
    places = max(places_of(value), shown if padded else 0)
    scaled = value.numerator * 10**places // value.denominator
    digits = str(scaled).rjust(places + 1, "0")
    whole, part = (digits[:-places], digits[-places:]) if places else (digits, "")
    if "," in like:
        whole = f"{int(whole):,}"
    if like.startswith(".") and whole == "0":
        whole = ""
    return f"{whole}.{part}" if part else whole


def places_of(value: Fraction) -> int:
    """How many decimals a value has. ValueError where they never end."""
    for places in range(16):
        if 10**places % value.denominator == 0:
            return places
    raise ValueError(f"{value} has no end of decimals")


def word_of(number: int) -> str:
    """2 -> two, 35 -> thirty-five; up to 99."""
    if number < len(SMALL):
        return SMALL[number]
    ten, one = divmod(number, 10)
    return TENS[ten - 2] + (f"-{SMALL[one]}" if one else "")


def options(mention: Mention) -> list[Fraction]:
    """The other values of like size and kind, in order of size; never 0 or 1. Empty for a fixed number."""
    if mention.kind == "fixed":
        return []
    if mention.kind == "times":
        return [Fraction(number) for number in (2, 3, 4, 5) if number != mention.value]
    if mention.kind == "fraction":
        return _fractions(mention)
    low, high = mention.value / 2, mention.value * 2
    step = _grid(mention)
    if mention.value < 10 and step == 1:
        low, high = Fraction(2), Fraction(9)
    if mention.kind == "word" and mention.value <= 12:
        low, high = Fraction(2), Fraction(12)
    if mention.kind == "percent":
        high = min(high, Fraction(95))
    if mention.kind == "word":
        high = min(high, Fraction(99))
    cap = CAPS.get(mention.unit)
    if cap is not None and mention.value <= cap:
        high = min(high, Fraction(cap))
    # The grid goes through the value itself: $19.99 becomes $24.99, 20% becomes 35%.
    first = math.ceil((low - mention.value) / step)
    last = math.floor((high - mention.value) / step)
    steps = [mention.value + number * step for number in range(first, last + 1)]
    return [value for value in steps if value != mention.value and value > 0 and value != 1 and _same_kind(mention, value)]


def _same_kind(mention: Mention, value: Fraction) -> bool:
    """Whether a decimal stays one: 2.5 does not become 3."""
    return mention.kind != "decimal" or places_of(value) == places_of(mention.value)


def _grid(mention: Mention) -> Fraction:
    """The distance between the values that may come: 1 for 23, 100 for 600, 0.25 for $12.50."""
    value = mention.value
    places = len(mention.text.partition(".")[2])
    unit = Fraction(1, 10**places)
    if value.denominator == 1:
        # Whole stays whole: $12.00 is $15.00 next.
        unit = Fraction(1)
    elif (value - Fraction(99, 100)).denominator == 1:
        return Fraction(1)
    in_units = int(value / unit)
    least = 2 if mention.kind == "percent" else 6
    for step in (10**6, 10**5, 10**4, 5000, 1000, 500, 100, 50, 25, 10, 5):
        if in_units % step == 0 and in_units // step >= (least if unit == 1 else 1):
            return step * unit
    return unit


def _fractions(mention: Mention) -> list[Fraction]:
    """Proper fractions of up to twice the value; a top of 1 stays 1, and "8th" keeps its th."""
    value = mention.value
    in_words = not mention.text[0].isdigit()
    bottoms = range(4 if mention.text.endswith(("th", "ths")) or in_words else 2, 11)
    if in_words:
        bottoms = range(3, 11)
    found = set()
    for bottom in bottoms:
        tops = (1,) if value.numerator == 1 else range(2, bottom)
        found |= {Fraction(top, bottom) for top in tops if math.gcd(top, bottom) == 1}
    return sorted(other for other in found if value / 2 <= other <= value * 2 and other not in (1, value))


def _mention(question: str, match: re.Match[str]) -> Mention | None:
    before, behind = question[: match.start()], question[match.end() :]
    text = match[0]
    group = match.lastgroup or ""
    value = _value(group, text)
    if value is None:
        return None
    kind = "integer" if group == "digits" else "fixed" if group == "mixed" else group
    if group == "part":
        kind = "fraction"
    scale = _SCALE.match(behind)
    if scale is not None and group in ("digits", "word"):
        behind = behind[scale.end() :]
    unit_match = _UNIT.match(behind)
    unit = singular(unit_match[1]) if unit_match else ""
    if group == "digits":
        kind = _kind_of_digits(before, behind, text, value)
    if value in (0, 1) or _is_fixed(before, question[match.end() :], group, value, unit, kind):
        kind = "fixed"
    factor = SCALES[scale[1].lower()] if scale is not None else 1
    mention = Mention(match.start(), match.end(), text, value, kind, unit, factor)
    return mention if kind in ("fixed", "times") or _is_respelled(mention) else replace(mention, kind="fixed")


def _value(group: str, text: str) -> Fraction | None:
    text = text.lower()
    if group == "digits":
        return Fraction(text.replace(",", ""))
    if group == "times":
        return Fraction(2 if text == "twice" else 3)
    if group == "word":
        parts = re.split(r"[ -]", text)
        return Fraction(sum(_WORDS[part] for part in parts))
    if group == "part":
        top, part = re.split(r"[ -]", text)
        return Fraction(_WORDS[top], _PART_VALUES[part.removesuffix("s")])
    if group == "fraction":
        top, bottom = text.removesuffix("s").removesuffix("th").split("/")
        return Fraction(int(top), int(bottom)) if int(bottom) else None
    return _mixed_value(text)


def _mixed_value(text: str) -> Fraction | None:
    """ "2 1/2", "2½", "two and a half"; None for "salt and a half"."""
    glyphs = {"½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"}
    for glyph, spelled in glyphs.items():
        text = text.replace(glyph, f" {spelled}")
    named = {"half": Fraction(1, 2), "quarter": Fraction(1, 4), "third": Fraction(1, 3)}
    total = Fraction(0)
    for part in re.split(r"[ -]+", text.strip()):
        if part in ("and", "a", "one"):
            continue
        if part in named:
            total += named[part]
        elif part in _WORDS:
            total += _WORDS[part]
        elif re.fullmatch(r"\d+(?:/[1-9]\d*)?", part):
            total += Fraction(part)
        else:
            return None
    return total


def _kind_of_digits(before: str, behind: str, text: str, value: Fraction) -> str:
    if _PERCENT.match(behind):
        return "percent" if value < 100 else "fixed"
    if _CURRENCY.search(before) or re.match(r"\s?[$€£¢]", behind):
        return "money"
    return "decimal" if "." in text and value.denominator != 1 else "integer"


def _is_fixed(before: str, behind: str, group: str, value: Fraction, unit: str, kind: str) -> bool:
    """Whether this is an ordinal, a time, a name, a year, a fact: see the module's docstring."""
    if _FIXED_BEFORE.search(before) and not before.endswith("$"):
        return True
    if _FIXED_BEHIND.match(behind) and not _SLASH_UNIT.match(behind):
        return True
    if group == "digits" and not _GLUED.match(behind):
        return True
    if kind == "integer" and 1900 <= value <= 2099 and "," not in before[-1:] and unit in ("", "and", "to", "he", "she", "they"):
        return True
    return (int(value), unit) in FACTS or unit in BODIES


def _is_respelled(mention: Mention) -> bool:
    """Whether `spell` gives the very text back: not for 007, 4/8, "twenty five"."""
    if mention.kind == "fraction" and not 0 < mention.value < 1:
        return False
    if mention.kind == "fraction" and mention.value.denominator > 12:
        return False
    text = mention.text.lower().replace("quarter", "fourth")
    return spell(mention, mention.value).lower() == text


def _fixed_if_alone(question: str, mention: Mention, all_of_them: list[Mention]) -> Mention:
    """Fix "the three" where nothing else is 3: it counts what is listed by name. So with "the other two", always."""
    before = question[: mention.start]
    if mention.kind not in ("integer", "word") or mention.value > 12 or not _BACK.search(before):
        return mention
    others = [other for other in all_of_them if other.value == mention.value and other is not mention]
    if others and not _ALWAYS_BACK.search(before):
        return mention
    return replace(mention, kind="fixed")


def singular(noun: str) -> str:
    """The noun in lower case, without the s of its plural: enough to look it up in a table."""
    noun = noun.lower()
    if noun in ("inches",):
        return "inch"
    return noun if noun.endswith("ss") else noun.removesuffix("s")


def _cased(text: str, like: str) -> str:
    return text.capitalize() if like[0].isupper() else text


def _with_article(between: str, old: str, new: str) -> str:
    """The words before a number, with "a" and "an" as the new one needs: an 8-hour shift, a 6-hour shift."""
    if _vowel(old) == _vowel(new):
        return between
    wrong, right = ("a", "an") if _vowel(new) else ("an", "a")

    def swapped(match: re.Match[str]) -> str:
        article = right.capitalize() if match[1][0].isupper() else right
        return article + match[2]

    return re.sub(rf"\b({wrong})(\s[$€£]?)$", swapped, between, flags=re.IGNORECASE)


def _vowel(text: str) -> bool:
    """Whether the number is spoken with a vowel first: 8, 11, 18,000, eighty; not 110."""
    if not text[0].isdigit():
        return text.lower().startswith(("eight", "eleven"))
    whole = text.partition(".")[0].partition("/")[0].replace(",", "")
    return whole.startswith("8") or (whole.startswith(("11", "18")) and len(whole) % 3 == 2)
