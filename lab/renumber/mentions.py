"""Numbers in the words of a question: where each stands, its value, and the others that could stand there.

    "Ann pays $12.50 for two bags and gets 20% off."     money 25/2, word 2, percent 20

| kind | examples | other values |
|---|---|---|
| integer | 12, 1,200, 5kg, 30-minute | from half to twice that, 2 to 9 below 10; round where this is round |
| decimal | 2.5, .75 | the same, with as many decimals |
| money | $12.50, 80$, €9 | the same, with as many decimals as are written |
| percent | 20%, 5 percent | the same, up to 95 |
| fraction | 2/5, 1/8th, three-fourths | a proper one in lowest terms; a top of 1 stays 1 |
| word | two, Twelve, thirty-five | a word: 2 to 12, or from half to twice that |
| times | twice, thrice | "two times" to "five times" |
| fixed | see below | none |

Fixed are 0 and 1 (so that no plural becomes a singular), ordinals, clock times, ratios, ranges and scores (3:2,
37-23), years, dates, names (mp3, Room 12), mixed numbers, 100% and more, facts of calendar and measures (7 days, 12
inches), what bodies and vehicles have (4 wheels), odd spellings (007, 4/8), "all 14", and "the three" where no other
number is 3. "one", "half", "a third", "double" and "a dozen" are no mentions at all.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from colar.data.judge.numbers import folded
from renumber.equations import digits_like, finite_decimals

SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
BELOW_TWENTY = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
PARTS = {3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth", 10: "tenth"}
"""Names of the bottoms of fractions, singular."""
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
GRIDS = (10**6, 10**5, 10**4, 5000, 1000, 500, 100, 50, 25, 10, 5)
"""A round number becomes another multiple of the largest of these that divides it."""
MOST_VALUES = 5000

_WORDS = {word: number for number, word in enumerate(BELOW_TWENTY)}
_WORDS |= {word: 10 * number for number, word in enumerate(TENS, start=2)}
_BOTTOMS = {name: bottom for bottom, name in PARTS.items()} | {"quarter": 4}
_MIXED_WORDS: dict[str, int | Fraction] = {
    **_WORDS, "a": 0, "and": 0, "one": 0, "half": Fraction(1, 2), "quarter": Fraction(1, 4), "third": Fraction(1, 3)
}  # fmt: skip
_ONES = "|".join(BELOW_TWENTY[1:10])
_MIXED = r"\d+(?: | and |-)\d+/\d+|\d*[½¼¾⅓⅔]|(?:\d+|[a-z]+) and (?:a|one)[ -](?:half|quarter|third)"
_FRACTION = r"(?<![\w./,:-])\d+/\d+(?![\d/.]\d)(?:ths?\b)?"
_DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|(?<!\d)\.\d+"
_PART = rf"(?:{_ONES})[ -](?:{'|'.join(_BOTTOMS)})s?"
# The longest first: "sixteen" is no "six".
_WORD = (
    rf"(?:{'|'.join(TENS)})(?:[ -](?:{_ONES}))?|{'|'.join(sorted(BELOW_TWENTY[2:], key=len, reverse=True))}"
)
# The first alternative that fits wins: the 2 of "2 1/2" and the 1 of "1/2" are no numbers of their own.
_NUMBER = re.compile(
    rf"(?P<mixed>{_MIXED})|(?P<fraction>{_FRACTION})|(?P<integer>{_DIGITS})"
    rf"|\b(?P<part>{_PART})\b|\b(?P<times>twice|thrice)\b|\b(?P<word>{_WORD})\b",
    re.IGNORECASE,
)
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_NAMED = (
    "room|route|grade|day|week|month|year|chapter|page|number|bus|type|section|class|house|season|machine|top"
    "|under"
)
# Right before a number that is part of a name, a range, a sum, a product, a date or a compound ("one hundred five").
_FIXED_BEFORE = re.compile(
    rf"[\w#+*^:×/–—-]$|[\d)]\s?[x×]\s?$|\b(?:{_MONTHS})\s$|\b(?i:{_NAMED})\s#?$|\b(?:hundred|thousand)\s$"
)
# Right behind an ordinal, a name (5k, the 90s), a clock time, a ratio, a range, a product.
_FIXED_BEHIND = re.compile(
    r"(?:st|nd|rd|th|k|s)\b|\s?(?:[ap]\.?m\b|o['’]?clock)|[:/–—-]\s?\d|\s?[x×*^+=]\s?[\d(]|[½¼¾⅓⅔]",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"\s?%|[\s-]percent\b")
_CURRENCY_BEFORE = re.compile(r"[$€£¥¢]\s?$")
_CURRENCY_BEHIND = re.compile(r"\s?[$€£¢]")
_SCALE = re.compile(rf"[\s-]({'|'.join(SCALES)})s?\b", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:[\s-]|(?<=\d))(?:(?:more|full|whole|extra|additional|small|large|big|different)\s)?([A-Za-z]+)"
)
_BACK = re.compile(r"\b(?:the|these|those|both|(all|other|remaining))\s$", re.IGNORECASE)
_NO_NOUN = {"", "and", "to", "he", "she", "they", "it", "but", "when", "was", "is"}


@dataclass(frozen=True)
class Mention:
    """A number in a question: characters `start` to `end`, its spelling there, its value, its kind.

    `unit` is the word behind it, in lower case and without a plural's s. `scale` is "million" in "3 million", where
    the value is 3.
    """

    start: int
    end: int
    text: str
    value: Fraction
    kind: str
    unit: str = ""
    scale: str = ""


def find(question: str) -> list[Mention]:
    """Find every number of the question, in order, fixed ones included."""
    candidates = (_mention(question, match) for match in _NUMBER.finditer(question))
    mentions = [mention for mention in candidates if mention is not None]
    # A second pass: whether "the three" has another 3 beside it depends on all numbers.
    return [
        replace(each, kind="fixed") if _refers_back(question, each, mentions) else each for each in mentions
    ]


def _mention(question: str, match: re.Match[str]) -> Mention | None:
    """The number that was found, with its kind; None if it is no number after all ("salt and a half", 3/0)."""
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
        unit=_singular(noun[1]) if noun else "",
        scale=scale[1].lower() if scale else "",
    )
    return replace(mention, kind="fixed") if _is_fixed(mention, before, behind) else mention


def _value(group: str, text: str) -> Fraction | None:
    if group == "times":
        return Fraction(2 if text == "twice" else 3)
    if group == "word":
        return Fraction(sum(_WORDS[part] for part in re.split(r"[ -]", text)))
    if group == "part":
        top, part = re.split(r"[ -]", text)
        return Fraction(_WORDS[top], _BOTTOMS[part.removesuffix("s")])
    if group == "mixed":  # "2 1/2", "2½", "two and a half"
        total = Fraction(0)
        for part in re.split(r"[ -]+", folded(text).strip()):
            try:
                total += _MIXED_WORDS[part] if part in _MIXED_WORDS else Fraction(part)
            except (ValueError, ZeroDivisionError):
                return None
        return total
    top, slash, bottom = text.removesuffix("s").removesuffix("th").replace(",", "").partition("/")
    return None if slash and not int(bottom) else Fraction(top + slash + bottom)


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
    if kind == "fixed" or value in (0, 1) or (int(value), mention.unit) in FACTS or mention.unit in BODIES:
        return True
    if _FIXED_BEFORE.search(before) or _FIXED_BEHIND.match(behind):
        return True
    if kind == "integer" and value in range(1900, 2100) and mention.unit in _NO_NOUN:  # a year
        return True
    if kind == "fraction" and not (value < 1 and (value == Fraction(1, 2) or value.denominator in PARTS)):
        return True
    if kind == "times":
        return False
    try:
        # A spelling that cannot be made again (007, 4/8) gives no pattern for another number.
        return spell(mention, value).lower() != mention.text.lower().replace("quarter", "fourth")
    except (ValueError, KeyError):  # more decimals than anyone writes; "two fourths" are no name of a half
        return True


def _refers_back(question: str, mention: Mention, mentions: Sequence[Mention]) -> bool:
    """True for "the other two", and for "the three" if no other number is 3: it counts what is listed by name."""
    back = _BACK.search(question, 0, mention.start)
    if back is None or mention.kind not in ("integer", "word"):
        return False
    again = any(other.value == mention.value and other is not mention for other in mentions)
    return bool(back[1]) or (mention.value <= 12 and not again)


def _singular(noun: str) -> str:
    """The noun in lower case, without the s of its plural: enough to look it up in a table."""
    noun = noun.lower()
    if noun == "inches":
        return "inch"
    return noun if noun.endswith("ss") else noun.removesuffix("s")


# --- other numbers -----------------------------------------------------------------------------------------


def options(mention: Mention) -> list[Fraction]:
    """List the other values of like size and kind, from the smallest; never 0 or 1, and none for a fixed number.

    Of "23 cats" 12 to 46 without 23; of "40 cats" 20, 25, ... 80; of "$19.99" $10.99, $11.99 and on.
    """
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
    others = [value for value in values if value > 0 and value not in (1, mention.value)]
    if mention.kind == "decimal":  # 2.5 does not become 3
        places = finite_decimals(mention.value)
        others = [value for value in others if finite_decimals(value) == places]
    return others


def _range(mention: Mention) -> tuple[Fraction, Fraction]:
    """The smallest and the largest value that may come."""
    value = mention.value
    low, high = value / 2, value * 2
    if mention.kind == "word" and value <= 12:
        low, high = Fraction(2), Fraction(12)
    elif value < 10 and value.denominator == 1 and mention.kind in ("integer", "money"):
        low, high = Fraction(2), Fraction(9)
    high = min(high, Fraction({"percent": 95, "word": 99}.get(mention.kind, high)))
    cap = CAPS.get(mention.unit, 0)
    return low, min(high, Fraction(cap)) if value <= cap else high


def _grid(mention: Mention) -> Fraction:
    """The distance between the values that may come: 1 for 23, 100 for 600, 0.25 for $12.50, 1 for $19.99."""
    value = mention.value
    step = Fraction(1)
    if value.denominator == 1 or (value - Fraction(99, 100)).denominator > 1:
        places = 0 if value.denominator == 1 else len(mention.text.partition(".")[2])
        in_units = int(value * 10**places)
        # A number is round where it is some steps long.
        least = 2 if places or mention.kind == "percent" else 6
        rounds = (each for each in GRIDS if in_units % each == 0 and in_units // each >= least)
        step = Fraction(next(rounds, 1), 10**places)
    # Some thousand values are enough of 45,678,901.
    while value / step > MOST_VALUES:
        step *= 10
    return step


def _fractions(mention: Mention) -> list[Fraction]:
    """Proper fractions from half to twice the value; a top of 1 stays 1, and 1/8th keeps its th."""
    value = mention.value
    # There is no 1/2th and no 1/3th, and halves have a word of their own.
    lowest = 4 if mention.text.endswith(("th", "ths")) else 2
    if not mention.text[0].isdigit():
        lowest = 3
    proper = set()
    for bottom in range(lowest, 11):
        tops = (1,) if value.numerator == 1 else range(2, bottom)
        proper |= {Fraction(top, bottom) for top in tops if math.gcd(top, bottom) == 1}
    return sorted(other for other in proper if value / 2 <= other <= value * 2 and other != value)


# --- writing -----------------------------------------------------------------------------------------------


def write(question: str, mentions: Sequence[Mention], values: Sequence[Fraction]) -> str:
    """Write the question with `values` in place of its numbers. The same values give the same text."""
    parts = []
    done = 0
    for mention, value in zip(mentions, values, strict=True):
        # A number that stays keeps its very spelling: "twice" would come back as "two times".
        text = mention.text if value == mention.value else spell(mention, value)
        parts.append(_with_article(question[done : mention.start], mention.text, text))
        parts.append(text)
        done = mention.end
    return "".join(parts) + question[done:]


def spell(mention: Mention, value: Fraction) -> str:
    """Write `value` as it stands in the place of `mention`: digits, a word, a fraction, "three times"."""
    like = mention.text
    if mention.kind == "fraction" and like[0].isdigit():
        return f"{value}{like.lstrip('0123456789/')}"  # 1/8th keeps its th
    if mention.kind not in ("times", "word", "fraction"):
        return digits_like(value, like, keep_decimals=mention.kind == "money")
    if mention.kind == "fraction":
        plural = "s" if like.endswith("s") else ""
        text = (
            f"{BELOW_TWENTY[value.numerator]}{'-' if '-' in like else ' '}{PARTS[value.denominator]}{plural}"
        )
    else:
        text = word_of(int(value)) + (" times" if mention.kind == "times" else "")
    return text.capitalize() if like[0].isupper() else text


def word_of(number: int) -> str:
    """2 -> two, 35 -> thirty-five; up to 99."""
    if number < len(BELOW_TWENTY):
        return BELOW_TWENTY[number]
    tens, units = divmod(number, 10)
    return TENS[tens - 2] + (f"-{BELOW_TWENTY[units]}" if units else "")


def _with_article(before: str, old: str, new: str) -> str:
    """The words before a number, ending in the article that the new number needs: an 8-hour shift, a 6-hour shift."""
    if _begins_with_vowel(old) == _begins_with_vowel(new):
        return before
    if _begins_with_vowel(new):
        return re.sub(r"\b([Aa])(\s[$€£]?)$", r"\1n\2", before)
    return re.sub(r"\b([Aa])n(\s[$€£]?)$", r"\1\2", before)


def _begins_with_vowel(text: str) -> bool:
    """True if the number is spoken with a vowel first: 8, 11, 18,000, eighty; not 110."""
    if not text[0].isdigit():
        return text.lower().startswith(("eight", "eleven"))
    whole = text.partition(".")[0].partition("/")[0].replace(",", "")
    # 11 and 18 are spoken at the head of a group of three digits only: 11,000, not 1,100.
    return whole.startswith("8") or (whole.startswith(("11", "18")) and len(whole) % 3 == 2)
