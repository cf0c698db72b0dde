"""Numbers in the words of a question: where each stands, what it is worth, and which others could stand there.

    "Ann pays $12.50 for two bags and gets 20% off."     money 25/2, word 2, percent 20

| kind | examples | another one is |
|---|---|---|
| integer | 12, 1,200, 5kg, 30-minute | from half to twice that, 2 to 9 below 10; round where this is round |
| decimal | 2.5, .75 | the same, with as many decimals |
| money | $12.50, 80$, €9 | the same, with as many decimals as are written |
| percent | 20%, 5 percent | the same, up to 95 |
| fraction | 2/5, 1/8th, three-fourths | a proper one in lowest terms; a top of 1 stays 1 |
| word | two, Twelve, thirty-five | a word: 2 to 12, or from half to twice that |
| times | twice, thrice | "two times" to "five times" |
| fixed | see below | never another |

Fixed are 0 and 1 (so that no plural becomes a singular), ordinals, clock times, ratios, ranges and scores (3:2,
37-23), years, dates, names (mp3, Room 12), mixed numbers, 100% and more, facts of calendar and measures (7 days, 12
inches), what bodies and vehicles have (4 wheels), compounds ("two hundred five"), odd spellings (007, 4/8), "all 14",
and "the three" where no other number is 3. "one", "half", "a third", "double" and "a dozen" are no mentions at all:
`origins.py` has them as cues for constants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from colar.data.renumber.spelling import (
    PARTS,
    SMALL,
    TENS,
    cased,
    digits_like,
    fraction_like,
    places_of,
    with_article,
    word_of,
)

SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}

_WORDS: dict[str, int] = {word: number for number, word in enumerate(SMALL)}
_WORDS |= {word: 10 * number for number, word in enumerate(TENS, start=2)}
_PART_VALUES = {name: bottom for bottom, name in PARTS.items()} | {"quarter": 4}
_GLYPHS = {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3"}
_NAMED_PARTS = {"half": Fraction(1, 2), "quarter": Fraction(1, 4), "third": Fraction(1, 3)}

_MIXED = r"\d+(?: | and |-)\d+/\d+|\d*[½¼¾⅓⅔]|(?:\d+|[a-z]+) and (?:a|one)[ -](?:half|quarter|third)"
_FRACTION = r"(?<![\w./,:-])\d+/\d+(?![\d/.]\d)(?:ths?\b)?"
_DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|(?<!\d)\.\d+"
_ONES = "|".join(SMALL[1:10])
_PART = rf"(?:{_ONES})[ -](?:{'|'.join(_PART_VALUES)})s?"
# The longest first: "sixteen" is no "six".
_WORD = rf"(?:{'|'.join(TENS)})(?:[ -](?:{_ONES}))?|{'|'.join(sorted(SMALL[2:], key=len, reverse=True))}"
# The first alternative that fits wins: the 2 of "2 1/2" and the 1 of "1/2" are no numbers of their own.
_NUMBER = re.compile(
    rf"(?P<mixed>{_MIXED})|(?P<fraction>{_FRACTION})|(?P<integer>{_DIGITS})"
    rf"|\b(?P<part>{_PART})\b|\b(?P<times>twice|thrice)\b|\b(?P<word>{_WORD})\b",
    re.IGNORECASE,
)

_MONTHS = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|March|April|May|June|July|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?"
    r"|Dec(?:ember)?)"
)
_LABELS = (
    r"room|route|highway|grade|day|week|month|year|level|chapter|page|number|no\.?|lane|gate|bus|team|part|type|stage"
    r"|step|question|section|exam|test|quiz|class|group|house|apartment|flight|train|player|season|episode|volume"
    r"|figure|machine|line|top|under"
)
# What stands right before a number that is part of a name, a range, a sum or a date.
_FIXED_BEFORE = re.compile(
    rf"[\w#+*^:×/–—-]$|[\d)]\s?[x×]\s?$|\b{_MONTHS}\.?\s$|\b(?i:{_LABELS})\s#?$|\b(?:hundred|thousand)\s(?:and\s)?$"
)
# What stands right behind an ordinal, a clock time, a ratio, a range, a product, a date or a compound.
_FIXED_BEHIND = re.compile(
    rf"(?:st|nd|rd|th)\b|\s?(?:[ap]\.?m\b|o['’]?clock)|[:/–—-]\s?\d|\s?[x×*^+=]\s?[\d(]|-(?:to|of|by|in|for)-"
    rf"|[½¼¾⅓⅔°]|\s(?:of\s)?{_MONTHS}\b|\s(?:hundred|thousand|dozen)\s(?:and\s)?(?:\d|(?:{_WORD})\b)|-(?:hundred|thousand)",
    re.IGNORECASE,
)
_GLUED = re.compile(
    r"(?:kgs?|g|mg|ml|l|cl|km|m|cm|mm|oz|lbs?|mph|ft|mi|hrs?|mins?)\b|(?![A-Za-z])", re.IGNORECASE
)
_PERCENT = re.compile(r"\s?%|[\s-]percent\b")
_CURRENCY_BEFORE = re.compile(r"[$€£¥¢]\s?$")
_CURRENCY_BEHIND = re.compile(r"\s?[$€£¢]")
_SCALE = re.compile(rf"[\s-]({'|'.join(SCALES)})s?\b", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:[\s-]|(?<=\d))(?:(?:more|full|whole|extra|additional|small|large|big|different)\s)?([A-Za-z]+)"
)
_BACK = re.compile(r"\b(?:the|these|those|all|both|other|remaining)\s$", re.IGNORECASE)
_ALWAYS_BACK = re.compile(r"\b(?:other|remaining|all)\s$", re.IGNORECASE)

FACTS = {
    (7, "day"), (28, "day"), (29, "day"), (30, "day"), (31, "day"), (365, "day"), (366, "day"), (24, "hour"),
    (60, "minute"), (60, "second"), (12, "month"), (4, "week"), (52, "week"), (12, "inch"), (3, "feet"), (100, "cent"),
    (16, "ounce"), (1000, "gram"), (1000, "meter"), (1000, "ml"), (100, "cm"), (100, "point"),
}  # fmt: skip
"""A number and its unit that are, or may be, a fact of the calendar or of measures."""
BODIES = {
    "wheel", "leg", "tire", "eye", "ear", "hand", "arm", "wing", "parent", "grandparent", "side", "twin", "tentacle",
    "finger", "toe", "half", "halve",
}  # fmt: skip
"""Things that come in fixed numbers: changing "4 wheels" would change the world."""
CAPS = {"day": 7, "hour": 24, "minute": 60, "second": 60, "month": 12, "week": 52, "cent": 99, "time": 10}
"""A number of these that is at most the cap stays so: no day has 30 hours."""
_MOST_STEPS = 5000
_YEARS = range(1900, 2100)
_NO_NOUN = {"", "and", "to", "he", "she", "they", "it", "but", "when", "was", "is"}


@dataclass(frozen=True)
class Mention:
    """A number in a question: characters `start` to `end`, its spelling there, its value, its kind.

    `unit` is the word behind it, in lower case and without a plural's s. `scale` is 10^6 in "3 million", where the
    value is 3.
    """

    start: int
    end: int
    text: str
    value: Fraction
    kind: str
    unit: str = ""
    scale: int = 1


def find(question: str) -> list[Mention]:
    """Find every number of the question, in order, fixed ones included."""
    found = []
    for match in _NUMBER.finditer(question):
        mention = _mention(question, match)
        if mention is not None:
            found.append(mention)
    # A second pass: whether "the three" has another 3 beside it takes all numbers.
    return [_fixed_if_alone(question, mention, found) for mention in found]


def write(question: str, mentions: Sequence[Mention], values: Sequence[Fraction]) -> str:
    """Write the question with `values` in place of its numbers. The same values give the same text."""
    parts = []
    done = 0
    for mention, value in zip(mentions, values, strict=True):
        # A number that stays keeps its very spelling: "twice" would come back as "two times".
        text = mention.text if value == mention.value else spell(mention, value)
        parts.append(with_article(question[done : mention.start], mention.text, text))
        parts.append(text)
        done = mention.end
    return "".join(parts) + question[done:]


def spell(mention: Mention, value: Fraction) -> str:
    """Write `value` as it stands in the place of `mention`: digits, a word, a fraction, "three times"."""
    if mention.kind == "times":
        return cased(f"{word_of(int(value))} times", mention.text)
    if mention.kind == "word":
        return cased(word_of(int(value)), mention.text)
    if mention.kind == "fraction":
        return fraction_like(value, mention.text)
    return digits_like(value, mention.text, keep_places=mention.kind == "money")


def options(mention: Mention) -> list[Fraction]:
    """List the other values of like size and kind, from the smallest; never 0 or 1, and none for a fixed number."""
    if mention.kind == "fixed":
        return []
    if mention.kind == "times":
        return [Fraction(number) for number in (2, 3, 4, 5) if number != mention.value]
    if mention.kind == "fraction":
        return _fractions(mention)
    low, high = _range(mention)
    step = _grid(mention)
    # The grid goes through the value itself: $19.99 becomes $24.99, 20% becomes 35%.
    first = math.ceil((low - mention.value) / step)
    last = math.floor((high - mention.value) / step)
    values = [mention.value + number * step for number in range(first, last + 1)]
    same_kind = [value for value in values if value > 0 and value not in (1, mention.value)]
    if mention.kind == "decimal":  # 2.5 does not become 3
        places = places_of(mention.value)
        same_kind = [value for value in same_kind if places_of(value) == places]
    return same_kind


def _range(mention: Mention) -> tuple[Fraction, Fraction]:
    """The smallest and the largest value that may come."""
    value = mention.value
    low, high = value / 2, value * 2
    if mention.kind == "word" and value <= 12:
        low, high = Fraction(2), Fraction(12)
    elif value < 10 and value.denominator == 1 and mention.kind in ("integer", "money"):
        low, high = Fraction(2), Fraction(9)
    ceilings = {"percent": 95, "word": 99}
    high = min(high, Fraction(ceilings.get(mention.kind, high)))
    cap = CAPS.get(mention.unit)
    if cap is not None and value <= cap:
        high = min(high, Fraction(cap))
    return low, high


def _grid(mention: Mention) -> Fraction:
    """The distance between the values that may come: 1 for 23, 100 for 600, 0.25 for $12.50."""
    value = mention.value
    if value.denominator > 1 and (value - Fraction(99, 100)).denominator == 1:
        step = Fraction(1)
    else:
        # $12.00 becomes $15.00
        unit = (
            Fraction(1) if value.denominator == 1 else Fraction(1, 10 ** len(mention.text.partition(".")[2]))
        )
        in_units = int(value / unit)
        # A number is round where it is some steps long.
        least = 2 if unit < 1 or mention.kind == "percent" else 6
        steps = (10**6, 10**5, 10**4, 5000, 1000, 500, 100, 50, 25, 10, 5)
        step = next((each for each in steps if in_units % each == 0 and in_units // each >= least), 1) * unit
    # Some thousand values are enough of 45,678,901.
    while value / step > _MOST_STEPS:
        step *= 10
    return step


def _fractions(mention: Mention) -> list[Fraction]:
    """Proper fractions from half to twice the value; a top of 1 stays 1, and 1/8th keeps its th."""
    value = mention.value
    # There is no 1/2th and no 1/3th.
    lowest = 4 if mention.text.endswith(("th", "ths")) else 2
    if not mention.text[0].isdigit():
        lowest = 3  # halves have a word of their own
    found = set()
    for bottom in range(lowest, 11):
        tops = (1,) if value.numerator == 1 else range(2, bottom)
        found |= {Fraction(top, bottom) for top in tops if math.gcd(top, bottom) == 1}
    return sorted(other for other in found if value / 2 <= other <= value * 2 and other != value)


def _mention(question: str, match: re.Match[str]) -> Mention | None:
    """The number that was found, with its kind; None where it is no number after all ("salt and a half")."""
    before, behind = question[: match.start()], question[match.end() :]
    group = match.lastgroup or ""
    value = _value(group, match[0].lower())
    if value is None:
        return None
    scale = _SCALE.match(behind) if group in ("integer", "word") else None
    noun = _UNIT.match(behind[scale.end() :] if scale else behind)
    mention = Mention(
        match.start(),
        match.end(),
        match[0],
        value,
        _kind(group, before, behind, value),
        unit=singular(noun[1]) if noun else "",
        scale=SCALES[scale[1].lower()] if scale else 1,
    )
    if _is_fixed(mention, before, behind):
        return replace(mention, kind="fixed")
    return mention


def _value(group: str, text: str) -> Fraction | None:
    if group == "integer":
        return Fraction(text.replace(",", ""))
    if group == "times":
        return Fraction(2 if text == "twice" else 3)
    if group == "word":
        return Fraction(sum(_WORDS[part] for part in re.split(r"[ -]", text)))
    if group == "part":
        top, part = re.split(r"[ -]", text)
        return Fraction(_WORDS[top], _PART_VALUES[part.removesuffix("s")])
    if group == "fraction":
        top, bottom = text.removesuffix("s").removesuffix("th").split("/")
        return Fraction(int(top), int(bottom)) if int(bottom) else None
    return _mixed_value(text)


def _mixed_value(text: str) -> Fraction | None:
    """ "2 1/2", "2½", "two and a half"; None for "salt and a half"."""
    for glyph, spelled in _GLYPHS.items():
        text = text.replace(glyph, spelled)
    total = Fraction(0)
    for part in re.split(r"[ -]+", text.strip()):
        if part in _NAMED_PARTS:
            total += _NAMED_PARTS[part]
        elif part in _WORDS and part != "one":
            total += _WORDS[part]
        elif re.fullmatch(r"\d+(?:/[1-9]\d*)?", part):
            total += Fraction(part)
        elif part not in ("and", "a", "one"):
            return None
    return total


def _kind(group: str, before: str, behind: str, value: Fraction) -> str:
    if group != "integer":
        return {"part": "fraction", "mixed": "fixed"}.get(group, group)
    if _PERCENT.match(behind):
        return "percent" if value < 100 else "fixed"
    if _CURRENCY_BEFORE.search(before) or _CURRENCY_BEHIND.match(behind):
        return "money"
    return "integer" if value.denominator == 1 else "decimal"


def _is_fixed(mention: Mention, before: str, behind: str) -> bool:
    """True if this is an ordinal, a time, a name, a year, a fact, an odd spelling: see the module's docstring."""
    value, kind = mention.value, mention.kind
    if value in (0, 1) or (int(value), mention.unit) in FACTS or mention.unit in BODIES:
        return True
    if _FIXED_BEFORE.search(before) or _FIXED_BEHIND.match(behind):
        return True
    digits = kind in ("integer", "decimal", "money")
    if digits and not _GLUED.match(behind):
        return True
    if kind == "integer" and value in _YEARS and mention.unit in _NO_NOUN:
        return True
    if kind == "fraction" and not (value < 1 and (value == Fraction(1, 2) or value.denominator in PARTS)):
        return True
    if kind in ("times", "fixed"):
        return kind == "fixed"
    try:
        # A spelling that cannot be made again (007, 4/8) gives no pattern for another number.
        spelled = spell(mention, value).lower()
    except (ValueError, KeyError):  # more decimals than anyone writes; "two fourths" are no name of a half
        return True
    return spelled != mention.text.lower().replace("quarter", "fourth")


def _fixed_if_alone(question: str, mention: Mention, found: Sequence[Mention]) -> Mention:
    """Fix "the three" where nothing else is 3: it counts what is listed by name. "The other two" is always fixed."""
    before = question[: mention.start]
    if mention.kind not in ("integer", "word") or not _BACK.search(before):
        return mention
    again = any(other.value == mention.value and other is not mention for other in found)
    counts_what_is_listed = mention.value <= 12 and not again
    if counts_what_is_listed or _ALWAYS_BACK.search(before):
        return replace(mention, kind="fixed")
    return mention


def singular(noun: str) -> str:
    """The noun in lower case, without the s of its plural: enough to look it up in a table."""
    noun = noun.lower()
    if noun == "inches":
        return "inch"
    return noun if noun.endswith("ss") else noun.removesuffix("s")
