r"""Numbers in free text, exactly: "1,234.50 dollars" -> 2469/2.

The grammar covers signs, thousands separators in groups of three, decimals, fractions ("3/4", "\frac{3}{4}", the mixed
"1 1/2"), scientific notation ("1.5e6", "1.5 \times 10^6"), a currency sign before the number, and a unit or percent
sign after it. A percent sign is a unit ("45%" is 45, as in GSM8K's answers), never a division by 100.

Values are `Fraction`s, so a 30-digit integer is compared digit by digit. A number of more than MAX_DIGITS
characters or with an exponent beyond MAX_EXPONENT is not read at all, because its value would take minutes to build.

Two values are the same by the rule of GSM-Hard's authors: within an absolute 1e-3. PAL's evaluation has
`score = 1 if abs(ans - x['target']) < 1e-3 else 0` (reasoning-machines/pal, scripts/gsm_eval.py, commit f81ca2a).
It needs a tolerance because its golds are a program's floats, 3244047.0999999996. Departure from PAL: the tolerance
applies to golds with a fraction only; an integer gold results from no rounding, and is compared exactly. A drawback
of the rule: an answer of 0 passes for the 31 of GSM-Hard's 1,319 golds that are smaller than 1e-3 and not 0.

A number is never picked from several: a text with two different values has no value, unless it is an equation, which
has the value to the right of its last "="; several equations ("x = 1 or x = 2") have none. Nor does a part of a text
stand for the whole: the text beside a number must be words, units and punctuation. Operands ("10-5"), dates, and texts
in which a sign, a letter or a word changes the value ("2\pi", "10^{6}", "1.5 million", "half of 12", "not 17", "x > 5")
have no value.

Characters that look alike are unified: full-width digits, composed accents, dashes, quotes, hard spaces. Unicode's NFKC
does most of this, but is wrong about numbers: it turns "10⁶" into "106", "3½" into "31⁄2" and "①" into "1". Here a
superscript becomes `^{6}`, a subscript `_{7}`, a vulgar fraction " 1/2", and any other character that stands for a
number without being a decimal digit remains as it is.
"""

import re
import unicodedata
from fractions import Fraction

MAX_DIGITS = 1000
MAX_EXPONENT = 400
TOLERANCE = Fraction(1, 1_000)
"""Answers less than this away from a gold with a fraction are right (PAL's rule)."""

PLAIN = re.compile(r"(-?[0-9]{1,15}(?:\.[0-9]{1,15})?)\.?")
"""A number as Python writes it, perhaps with a full stop: most answers are one, and need no grammar."""
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
    "。": ".",
    # Characters without a width: soft hyphen, joiners of words, byte-order mark, marks of direction.
    **dict.fromkeys("\u00ad\u200b\u200e\u200f\u2060\ufeff\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"),
})  # fmt: skip
# Units that may touch a number or have one letter; any other letter beside a number may be a variable or a factor.
_UNITS = (
    "mm|cm|dm|km|m|in|ft|yd|mi|mg|kg|g|lb|lbs|oz|ml|mL|cl|dl|l|L|s|ms|h|hr|hrs|min|am|pm|mph|kph|km/h|m/s|st|nd|rd|th|"
    "W|V|A|N|J|C|F|Hz|kW|GB|MB|kB|yrs|wks|pcs|pts|qt|pt|gal|tbsp|tsp|TV|TVs|CD|CDs|DVDs?|"
    "AM|PM|sq|sqft|kgs|kms|cms|kWh|[MG]Hz|[KT]B|yr|yds|wk|Tbsp|cts?|rpm"
)
_UNIT_POWER = re.compile(
    rf"(?<=[0-9])(\s{{0,3}}(?:{_UNITS}|units?|inch(?:es)?|feet|met(?:er|re)s?))"
    r"(?:\s{0,3}\^\s?(?:[23]|\{[23]\})|[23])(?![0-9\w])"
)
_FRACTION = re.compile(
    r"\\[dtc]?frac\s{0,3}(?:\{([^{}]{1,60})\}|([0-9]))\s{0,3}(?:\{([^{}]{1,60})\}|([0-9]))"
)
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\{,\}|\\,(?=[0-9]{3})|,\\!"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[()\[\]]"), " "),
    (re.compile(r"\\[,;: !]|~|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s{0,3}\{([^{}]{0,60})\}"), r" \1 "),
    (re.compile(r"\^\s{0,3}(?:\\circ(?![a-zA-Z])|\{\s{0,3}\\circ\s{0,3}\})"), "°"),
    (re.compile(r"\\(?:approx|simeq)(?![a-zA-Z])|≈"), "="),
    (re.compile(r"\\times|\\cdot|[·⋅∙]|(?<=[0-9)])\s{0,3}[xX]\s{0,3}(?=\$?[0-9(])"), "×"),
    (re.compile(r"(?<![0-9)])\*\*|\*\*(?!\s?[-+]?\s?[0-9($\\.])"), ""),  # Markdown bold, not a power
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(^|[=:]\s{0,3}|\bis\s{1,3})(?:minus|negative)\s{1,3}(?=[$0-9.])", re.IGNORECASE), r"\1-"),
    # Operators touch both operands, so that neither passes for a number of its own.
    (re.compile(r"(?<=[0-9)])\s{0,3}([-+*×/^÷])\s{0,3}(?=[0-9($\\])"), r"\1"),
    (re.compile(r"(^|[=:($]\s{0,3})([-+])\s{1,3}(?=[$0-9.])"), r"\1\2"),  # "= - 5" is a sign, not an operator
    (_UNIT_POWER, r"\1"),  # "5 cm^2" has the unit cm
)
# Each run of digits is followed by "no digit", which prevents backtracking: "12x" must fail, not match as "1".
# (Possessive quantifiers would need one character each, but are faulty in Python 3.11.2, that of Debian 12.)
_NUMBER = re.compile(
    r"""
    # A sign, a currency sign, and a sign after the currency sign. No digit, letter or operator stands before.
    (?:(?<![\w)\]}])(?P<sign>[-+]))?  (?:[$€£¥]\s?)?  (?P<inner>(?<=[$€£¥])[-+])?
    (?<![\w./^*×÷]) (?<![\w)\]}][-+])
    # "3/4" or "1 1/2"; else digits with or without thousands separators, and a power of ten.
    (?: (?:(?P<whole>[0-9]+)[ \t]{1,3})? (?P<top>[0-9]+)/(?P<bottom>[0-9]+)(?![0-9])
      | (?P<digits> [1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])(?:\.[0-9]+(?![0-9]))?
                  | [0-9]+(?![0-9])(?:\.[0-9]+(?![0-9]))? | \.[0-9]+(?![0-9]) )
        (?: [eE](?P<exponent>[-+]?[0-9]+) | \s?[x×*]\s?10\^(?:\{(?P<braced>[-+]?[0-9]+)\}|(?P<power>[-+]?[0-9]+)) )?
        (?![0-9]) (?![eE][-+]?[0-9]) (?!\s?[x×*]\s?10\^)
    )
    # Percent signs are a unit. What follows must not make the number an operand, a date, a version or a name.
    (?: \s?% )* (?!\s?%)
    (?![0-9_]) (?!\.[0-9]) (?![-+*×/^÷][0-9($]) (?!\^) (?![A-Za-z](?![A-Za-z]))
    """,
    re.VERBOSE,
)


_PARTS = (
    "hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|"
    "(?:hundred|thousand)ths?"
)
_WORDS_OF_NUMBERS = (
    "zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    f"(?:twen|thir|for|fif|six|seven|eigh|nine)ty|point|{_PARTS}"
)
# Context that changes the value of a number. "\0" stands for the number, "\1" for one with a sign.
_CHANGES = re.compile(
    r"""
    [0-9\\{}^_|√]                                          # digits that are no number; notation that is not read
  | (?<!<)<(?!<) | (?<!>)>(?!>)                            # inequalities; "<<" and ">>" are GSM8K's marks
  | [-+*/×÷!—]\s*[\0\1] | [\0\1]\s*(?:[+*×÷!—]|/(?!\s?(?:minute|min|hour|hr|day|week|month|year|person)\b))
  | [\0\1]\s*-(?![A-Za-z]{2}) | [\0\1]\s*\.\.
  | [-+*/×÷!—]\s*[(\[|] | [)\]|]\s*[-+*/×÷!—^]
  | [\w)\]}]\(\s*[\0\1] | \)\s*[\0\1] | [\0\1]\( | (?<![A-Za-z])[A-Za-z]\s+\x01    # f(5), (5)5, 5(5), x -5
  | [)\]]\s?[A-Za-z](?![A-Za-z]) | [)\]][A-Za-zͰ-Ͽ\(] | (?<![A-Za-z])[b-zB-HJ-Z]\s*\(
  | (?<![A-Za-z'])[b-hj-zB-HJ-Z]\s+\0 | (?<![A-Za-z])(?!by|my|try)[b-df-hj-np-tv-z]{2,}\s+[\0\1]
  | [\0\1]\s*[Ͱ-Ͽ] | [Ͱ-Ͽ]\s*[\0\1]
  | [\0\1](?!(?:UNITS)(?![A-Za-z]))[A-Za-z]{1,2}(?![A-Za-z])
  | [\0\1]\s*(?!(?:UNITS|by|my|try|dry|fly)(?![A-Za-z]))[b-df-hj-np-tv-zB-DF-HJ-NP-TV-Z]{2,}(?![A-Za-z])
  | [\0\1]\s+(?!(?:UNITS|a|I)(?![A-Za-z])|(?i:[ap]\.\s?m\b))[A-Za-z](?![A-Za-z])
  | \b(?i:not|never|neither|cannot|hundreds?|thousands?|milli(?:on|ard)\w*|[bt]illion\w*|lakhs?|crores?|dozens?
        |below\s+zero)\b
  | (?i:n't)\b | \b(?i:bn|mn|mio|mil|mln)\b | [\0\1](?i:bn|mn|mio|mil|mln)\b | [\0\1]\s*(?i:percent\s+of|%\s*of)\b
  | \b(?i:than|least|most|over|under|above|below|between|times|plus|minus|negative|(?:multiplied|divided)\s+by)
        [\s(]+[\0\1]
  | [\0\1][\s)]+(?i:plus|minus|over|multiplied|divided|modulo|mod|squared|cubed|doubled|halved|tripled|factorial
        |below|to\s+the|pi|tau)\b
  | [\0\1]\s+times\s+[A-Za-z](?![A-Za-z])
  | [\0\1][\s)-]+(?i:and\s+)?(?i:a\s+|an\s+|one[\s-])?(?i:WORDS)\b
  | \b(?i:WORDS|twice|thrice|double|triple)[\s(-]+(?i:of[\s(]+|and\s+|as\s+much\s+as\s+)?[\0\1]
  | \b(?i:log|ln|exp|sin|cos|tan|cot|sec|csc|sqrt|abs|floor|ceil|gcd|lcm|pi|(?:root|squares?|cube|power|factorial|
          logarithm|reciprocal|inverse|opposite|sum|product|half|third|quarter)\s+of)\W{0,6}[\0\1]
    """.replace("UNITS", _UNITS).replace("WORDS", _WORDS_OF_NUMBERS),
    re.VERBOSE,
)
_OPERANDS = re.compile(r"[-0-9.,+*/=<>]+")
# Text that may stand between two statements of one value; "(5, 5)", "5 5" and "5% of 5" are more than one value.
_RESTATED = re.compile(r"\n|=|>>|#|\.\s+[A-Za-z]")
# The left side of an equation that is not solved for its variable: "2x = 10", "-x = 5", "x^2 = 25", "√x = 5"; of an
# inequality ("x >= 5"); of the last one of several ("x = 1 or x = 5").
_UNSOLVED = re.compile(
    r"(?:[0-9)][\s*×]{0,3}|[-+/][\s(]{0,3}|\|\s?)[b-zB-HJ-Z](?![A-Za-z])|(?<![A-Za-z])[b-zB-HJ-Z]\s?[\^*/+-]\s?[0-9(]"
    r"|\\(?!left|right|times|cdot|div|d?frac|text|mathrm|\W)[a-z]+\s{0,3}[{(\\a-zA-Z]|√\s?[(a-zA-Z]"
    r"|(?<![<>])[<>/]$|(?<![0-9)])!$"
    r"|(?<![\w^*/+)}-])[A-Za-z](?:_?\{?[0-9]\}?)?[\s$]*=[^=]*"
    r"(?:[,;]|\b(?:and|or)\b)[\s$]*(?:(?:and|or)\b[\s$]*)?[A-Za-z](?:_?\{?[0-9]\}?)?[\s$]*$"
)
_TOO_LONG = 2 * MAX_DIGITS
"""Most characters of a text beside its number: a longer text states nothing in particular."""


def read_number(text: str) -> Fraction | None:
    """Read the one value that `text` states; None where it states none, several, or one too long to build."""
    text = text.strip()
    if match := PLAIN.fullmatch(text):
        number = match[1]
        return Fraction(number if "." in number else int(number))  # a string takes three times as long
    text = folded(text)
    # The space keeps "2\frac{1}{2}" a mixed number.
    plain = _FRACTION.sub(r" \1\2/\3\4", text).strip()
    for pattern, replacement in _REWRITES:
        plain = pattern.sub(replacement, plain)
    left, equals, right = plain.rpartition("=")
    if _UNSOLVED.search(left):
        return None
    value = _single(plain)
    if value is None and equals:
        # An equation: "6*7 = 42" states 42.
        value = read_number(right)
    return value


def same_number(gold: Fraction, value: Fraction) -> bool:
    """True if `value` is right: equal to an integer gold, less than TOLERANCE away from a gold with a fraction."""
    if gold.denominator == 1:
        return value == gold
    # Absolute: relative to a gold such as 14053029.67, the tolerance would exceed a thousand.
    return abs(value - gold) < TOLERANCE


def canonical(value: Fraction) -> str:
    """One spelling for each value, for votes and records: "42", "-0.75", and "1/3" where decimals never end."""
    return str(value) if decimals_of(value) is None else decimal_text(value)


def decimals_of(value: Fraction) -> int | None:
    """Number of decimals: 2 of 0.25. None if they never end."""
    bottom = value.denominator
    # Decimals end after n places if and only if the denominator divides 10**n; n is then below its bit length.
    return next((n for n in range(bottom.bit_length()) if 10**n % bottom == 0), None)


def decimal_text(value: Fraction) -> str:
    """Write a value whose decimals end in digits: "-0.75"."""
    places = decimals_of(value) or 0
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    whole, part = digits[: len(digits) - places], digits[len(digits) - places :]
    return "-" * (value < 0) + (f"{whole}.{part}" if part else whole)


def _single(text: str) -> Fraction | None:
    """The value of all numbers in `text` if they agree ("42\\n42.0") and nothing beside them changes it, else None."""
    value: Fraction | None = None
    parts = []
    end = 0
    for match in _NUMBER.finditer(text):
        stated = _value(match)
        between = text[end : match.start()]
        # A number that cannot be read may be the answer, so taking another would be a guess.
        if stated is None or (value is not None and (stated != value or not _RESTATED.search(between))):
            return None
        value = stated
        parts += [between, "\1" if match["sign"] else "\0"]
        end = match.end()
    if value is None:
        return None
    beside = "".join(parts) + text[end:]
    if "<<" in text or ">>" in text:
        # GSM8K's marks: operands and operators are those of the chain's equations, not of the answer.
        beside = _OPERANDS.sub(" ", beside)
    return None if len(beside) > _TOO_LONG or _changed(beside) else value


def _changed(beside: str) -> bool:
    if _CHANGES.search(beside):
        return True
    # Other scripts' digits, and operators such as "≤" and "±".
    return not beside.isascii() and any(
        unicodedata.category(sign) in ("Nd", "Nl", "No", "Sm") or sign.isnumeric()
        for sign in beside
        if not sign.isascii()
    )


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of one number that the grammar found; None if it is too long to build, or divides by 0."""
    group = match.groupdict()
    exponent = group["exponent"] or group["braced"] or group["power"] or "0"
    # The exponent's length is checked first, because int() of a million digits takes minutes too.
    if len(match[0]) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    if group["digits"] is not None:
        value = Fraction(group["digits"].replace(",", "")) * Fraction(10) ** int(exponent)
    else:
        top, bottom = int(group["top"]), int(group["bottom"])
        if bottom == 0:
            return None
        value = int(group["whole"] or 0) + Fraction(top, bottom)
    if group["sign"] == "-" or group["inner"] == "-":
        return -value
    return value


# --- one spelling for characters that look alike ------------------------------------------------------------


def folded(text: str) -> str:
    """Rewrite `text` to one spelling of characters that look alike. ASCII text is returned as it is."""
    if text.isascii():
        return text
    spelled = _RAISED.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    spelled = _LOWERED.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run[0])}}}", spelled)
    # NFC before and after, so that the parts of a composed character are not converted one by one.
    spelled = unicodedata.normalize("NFC", spelled.translate(_ALIKE))
    spelled = unicodedata.normalize("NFC", "".join(map(_spelled, spelled))).translate(_ALIKE)
    # If nothing is left, the text itself is kept: two empty spellings would pass for equal answers.
    return spelled if spelled.strip() else text


def _spelled(character: str) -> str:
    """The character in NFKC; a vulgar fraction as " 1/2", other signs of numbers ("①", "Ⅳ") as they are."""
    spelled = unicodedata.normalize("NFKC", character)
    if character.isascii() or character.isdecimal() or not character.isnumeric():
        return spelled
    top, slash, bottom = spelled.partition("⁄")
    return f" {top}/{bottom}" if slash and top and bottom else character
