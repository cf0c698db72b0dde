"""Numbers that keep their values, because something that the chain does not write may depend on them.

    Ben and his 2 brothers eat 12 slices each.     <<3*12=36>>

3 is 2 + 1 in the reader's head: with 5 brothers the chain would need a 6 that nothing computes. So 2 is pinned, and
only 12 changes. Too much is pinned rather than too little: that costs variety, and a missed tie makes a wrong row.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction

from colar.data.renumber.mentions import Mention
from colar.data.renumber.operands import CONSTANT, SMALL, Operand, unexplained

FEW = 5
"""The largest number that may be a count of persons without their being listed."""
UNITS = frozenset(map(Fraction, (7, 12, 24, 30, 52, 60)))
"""Constants of the calendar: 3 may be what 4 days leave of a week, and 15 the minutes of a mile at 4 an hour."""
PEOPLE = {
    "friend", "brother", "sister", "sibling", "kid", "child", "children", "people", "person", "cousin", "son",
    "daughter", "man", "men", "woman", "women", "boy", "girl", "neighbor", "roommate", "coworker", "colleague",
    "player", "runner", "member", "guest", "student", "teacher", "employee", "worker", "grandchild", "grandchildren",
}  # fmt: skip
_OTHERS = re.compile(r"\b(?:other|remaining|rest of the) (?:two|three|four|five|six|[2-9])\b", re.IGNORECASE)
_LIST = re.compile(r"[^,.;:?!]{1,60}(?:, [^,.;:?!]{1,60}?)+,? (?:and|or) |\b[A-Z][a-z]+(?: and) [A-Z][a-z]+")
_NAME = re.compile(r"(?<![.?!] )(?<!^)\b[A-Z][a-z]+\b")


def pinned(
    question: str, mentions: Sequence[Mention], operands: Sequence[Operand], cued: Collection[Fraction]
) -> set[Fraction]:
    """The values that stay as they are, of those that the chain uses (others stay anyway)."""
    values = {mention.value for mention in mentions}
    fixed = {mention.value for mention in mentions if mention.kind == "fixed"}
    constants = [operand for operand in operands if CONSTANT in operand.origins]
    # Constants that no word explains may be computed from the question's numbers: 3 is 2 + 1, and 6 is 20% of 30.
    odd = {operand.value for operand in constants if unexplained(operand, cued)}
    # A fixed number, or one that the chain leaves out, may be a sum, a part or a rest of others that it uses.
    used = {value for operand in operands for value in operand.numbers}
    outside = {value for value in fixed | (values - used) if value > SMALL}
    return set().union(
        fixed,
        *(operand.numbers for operand in constants),
        _counts(question, mentions),
        _overused_and_sums(mentions, operands),
        _with_rests(mentions, operands),
        _giving(odd, values, UNITS.intersection(cued)),
        _giving({100 * value for value in odd}, values),
        _giving(outside, values),
    )


def _counts(question: str, mentions: Sequence[Mention]) -> set[Fraction]:
    """Small numbers that may count what the question lists.

    4 of "Four friends, Ann, Bob, Cid and Dot", and 5 of "5 men ... the other two".
    """
    small = {
        mention.value
        for mention in mentions
        if mention.value <= SMALL and mention.kind in ("integer", "word")
    }
    if _OTHERS.search(question):
        return small
    lengths = set()
    for match in _LIST.finditer(question):
        commas = match[0].count(",")
        # "a, b, and c" has a comma more than "a, b and c": both list three.
        with_last = commas + (1 if re.search(r", (?:and|or) $", match[0]) else 2)
        lengths.add(with_last if commas else 2)
    names = len(set(_NAME.findall(question)))
    counts = {value for value in small if value in lengths}
    for mention in mentions:
        # "Four runners": Ann, Bob, Cid and Dot need not stand in one list, nor "I" among them.
        if mention.unit in PEOPLE and abs(mention.value - names) <= 1:
            counts.add(mention.value)
    return counts


def _overused_and_sums(mentions: Sequence[Mention], operands: Sequence[Operand]) -> set[Fraction]:
    """Numbers up to 5 that the chain uses more often than the question names them, and sums of two constants.

    "A, B and C have 3 pens and share them" names 3 once; a second 3 in the chain counts persons. Of "5 trees fell, one
    more of these than of those" the chain may have 2 and 3 as constants: 5 is their sum.
    """
    named = Counter(mention.value for mention in mentions)
    uses = Counter(
        origin.number
        for operand in operands
        for origin in operand.origins
        if origin.number is not None and origin.form == "itself"
    )
    overused = {value for value in named if value <= FEW and uses[value] > named[value]}
    constants = {operand.value for operand in operands if CONSTANT in operand.origins} - {1, 100}
    return overused | {sum(pair, Fraction(0)) for pair in itertools.combinations(constants | overused, 2)}


def _with_rests(mentions: Sequence[Mention], operands: Sequence[Operand]) -> set[Fraction]:
    """Fractions of which an operand may be a part of the rest, or of the whole and as much again.

    After 1/3 is gone 2/3 are left, and 1/3 more is 4/3: neither 2 nor 4 is in the question.
    """
    values = {operand.value for operand in operands}
    fractions = {mention.value for mention in mentions if mention.kind == "fraction"}
    found = set()
    for fraction in fractions:
        top, bottom = fraction.as_integer_ratio()
        if values & ({bottom - top, bottom + top} - {top, bottom}):
            found.add(fraction)
    return found


def _giving(
    targets: set[Fraction], values: Collection[Fraction], units: Collection[Fraction] = ()
) -> set[Fraction]:
    """Numbers from which a target follows in one step, with another of `values`, one of `units`, 1 or 100.

    14 follows from 8 and 6, and 3 from 2 and 1; no target follows from itself (14 = 28 - 14).
    """
    giving: set[Fraction] = set()
    if targets:
        for one, other in itertools.product(values, {*values, *units, Fraction(1), Fraction(100)}):
            if targets & _made(one, other) - {one, other}:
                giving |= {one, other}
    return giving


def _made(one: Fraction, other: Fraction) -> set[Fraction]:
    """Results of one step with two numbers, in either order; only the first one is divided without its remainder."""
    made = {one + other, one - other, other - one, one * other}
    if other:
        made |= {one / other, Fraction(one // other)}
    if one:
        made.add(other / one)
    return made
