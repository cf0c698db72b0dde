r"""Numbers in free text, exactly: "1,234.50 dollars" -> 2469/2.

What is read: signs, thousands separators in groups of three, decimals, fractions ("3/4", "\frac{3}{4}", the
mixed "1 1/2"), scientific notation ("1.5e6", "1.5 \times 10^6"), a currency sign before the number, and a unit or
percent sign after it. A percent sign is a unit ("45%" is 45, as in GSM8K's answers), never a division by 100.

Values are `Fraction`s, so a 30-digit integer is compared digit by digit. A number of more than MAX_DIGITS
characters or with an exponent beyond MAX_EXPONENT is not read at all: its value would take minutes to build.

Two values are the same as the authors of GSM-Hard judge: within 1e-3, absolutely. PAL's evaluation has
`score = 1 if abs(ans - x['target']) < 1e-3 else 0` (reasoning-machines/pal, scripts/gsm_eval.py, commit f81ca2a).
It needs a tolerance because its golds are a program's floats, 3244047.0999999996. Departure from PAL: the tolerance
is for golds with a fraction only; no rounding stands behind an integer gold, and it is compared exactly. The rule
has a price: an answer of 0 passes for the 31 of GSM-Hard's 1,319 golds that are smaller than 1e-3 and not 0.

Numbers are never picked: a text with two different values has no value, unless it is an equation, which has the
value to the right of its last "=". Operands ("10-5", "2^10"), dates and versions are no numbers.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 1000
MAX_EXPONENT = 400
TOLERANCE = Fraction(1, 1_000)
"""Answers less than this away from a gold with a fraction are right (PAL's rule)."""

_PLAIN = re.compile(r"-?[0-9]{1,15}")
_FRACTION = re.compile(r"\\[dtc]?frac\s{0,3}(?:\{([^{}]{1,60})\}\s{0,3}\{([^{}]{1,60})\}|([0-9])([0-9]))")
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("[−–]"), "-"),
    (re.compile(r"\{,\}|\\,(?=[0-9]{3})|,\\!"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\times|\\cdot"), "×"),
    (re.compile(r"(?<![0-9)])\*\*|\*\*(?![0-9($])"), ""),  # Markdown bold, not a power
    (re.compile(r"\*\*"), "^"),
    # Operators touch both operands, so that neither passes for a number of its own.
    (re.compile(r"(?<=[0-9)])\s{0,3}([-+*×/^÷])\s{0,3}(?=[0-9($\\])"), r"\1"),
    (re.compile(r"(^|[=:($]\s{0,3})([-+])\s{1,3}(?=[$0-9.])"), r"\1\2"),  # "= - 5" is a sign, not an operator
)
# Each run of digits is followed by "no digit", so that none is given back: "12x" must fail, not match as "1".
# (Possessive quantifiers would say so in one sign each; Python 3.11.2, which is Debian 12's, gets them wrong.)
_NUMBER = re.compile(
    r"""
    # A sign, a currency sign, and a sign after the currency sign. No digit, letter or operator stands before.
    (?:(?<![\w)\]}])(?P<sign>[-+]))?  (?:[$€£¥]\s?)?  (?P<inner>(?<=[$€£¥])[-+])?
    (?<![\w./^*×÷]) (?<![\w)\]}][-+])
    # "3/4" or "1 1/2"; else digits with or without thousands separators, and a power of ten.
    (?: (?:(?P<whole>[0-9]+)\s)? (?P<top>[0-9]+)/(?P<bottom>[0-9]+)(?![0-9])
      | (?P<digits> [0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])(?:\.[0-9]+(?![0-9]))?
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


def read_number(text: str) -> Fraction | None:
    """Read the one value that `text` states; None where it states none, several, or one too long to build."""
    text = text.strip()
    if _PLAIN.fullmatch(text):  # most answers: no need for the grammar below
        return Fraction(int(text))
    text = _FRACTION.sub(_slashed, text).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    value = _single(text)
    if value is None and "=" in text:
        # An equation: "6*7 = 42" states 42.
        value = _single(text.rpartition("=")[2])
    return value


def _slashed(match: re.Match[str]) -> str:
    r"""`\frac{3}{4}` or `\frac34` as " 3/4". The space keeps "2\frac{1}{2}" a mixed number."""
    top = match[1] or match[3]
    bottom = match[2] or match[4]
    return f" {top}/{bottom}"


def same_number(gold: Fraction, value: Fraction) -> bool:
    """Whether `value` is right: equal to an integer gold, less than TOLERANCE away from a gold with a fraction."""
    if gold.denominator == 1:
        return value == gold
    # Absolute: a share of a gold such as 14053029.67 would be more than a thousand.
    return abs(value - gold) < TOLERANCE


def canonical(value: Fraction) -> str:
    """One spelling for each value, for votes and records: "42", "-0.75", and "1/3" where decimals never end."""
    if value.denominator == 1:
        return str(value.numerator)
    # Decimals end exactly where the denominator has no prime factors but 2 and 5.
    twos, rest = _divided_out(value.denominator, 2)
    fives, rest = _divided_out(rest, 5)
    if rest != 1:
        return str(value)
    places = max(twos, fives)
    scaled = abs(value.numerator) * 10**places // value.denominator
    digits = str(scaled).rjust(places + 1, "0")  # 0.05 needs its zeros
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


def _divided_out(number: int, prime: int) -> tuple[int, int]:
    """How often `prime` divides `number`, and what is left."""
    times = 0
    while number % prime == 0:
        number //= prime
        times += 1
    return times, number


def _single(text: str) -> Fraction | None:
    """The value of all numbers in `text` if they agree ("42\\n42.0"), else None."""
    values: set[Fraction] = set()
    for match in _NUMBER.finditer(text):
        value = _value(match)
        # The one that cannot be read may be the answer: to take another would be a guess.
        if value is None:
            return None
        values.add(value)
        if len(values) > 1:
            return None
    return values.pop() if values else None


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of one number that the grammar found; None where it is too long to build, or divides by 0."""
    group = match.groupdict()
    exponent = group["exponent"] or group["braced"] or group["power"] or "0"
    # The exponent's own length first: int() of a million digits takes minutes too.
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
