"""Ties between the chain and the question: where each operand comes from, and the numbers that must stay for it.

    Ann has 20 bags of 5 pens and gives 30% away.     <<20*5=100>> <<100*0.3=30>>
    20: the number 20      5: the number 5      100: the result of step 0      0.3: a hundredth of the number 30

An operand has as an origin everything that has its value:

- a number of the question, as it is or in a form that its kind allows (`FORMS`);
- an earlier result, and, where there is nothing else and percentages are at stake, a hundredth of one;
- a constant that a word of the question is a cue for ("week" for 7, "half" for 2), and 1.

An operand without any is a constant if it is whole and up to 12, or round. Any other comes from nowhere, and the row is
left alone. An operand may have several origins; new numbers are right only if all of them give one new value. Only one
such case is decided here: an operand that may be a result is that result if the chain has not used the result before
and has used up the numbers of that value.

    Ben and his 2 brothers eat 12 slices each.        <<3*12=36>>

Numbers are pinned if something that the chain does not write may depend on them. 3 is 2 + 1 in the reader's head: with
5 brothers the chain would need a 6 that nothing computes, so 2 is pinned, and only 12 changes. Too much is pinned
rather than too little: that costs variety, and a missed tie makes a wrong row.
"""

import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from renumber.equations import CannotRenumber, Step
from renumber.mentions import SCALES, Mention

FORMS: Mapping[str, Callable[[Fraction], Fraction]] = {
    "itself": lambda value: value,
    "hundredth": lambda value: value / 100,  # 20% -> 0.2, 75 cents -> 0.75
    "rest of 100": lambda value: 100 - value,  # 20% -> 80
    "rest of 1": lambda value: 1 - value / 100,  # 20% -> 0.8
    "100 and it": lambda value: 100 + value,  # 20% -> 120
    "1 and it": lambda value: 1 + value / 100,  # 20% -> 1.2
    "top": lambda value: Fraction(value.numerator),  # 2/5 -> 2
    "bottom": lambda value: Fraction(value.denominator),  # 2/5 -> 5
    **{name: partial(operator.mul, scale) for name, scale in SCALES.items()},  # "2 dozen" -> 24
}
"""The forms that a number of the question may have in a chain."""
PERCENT_FORMS = ("hundredth", "rest of 100", "rest of 1", "100 and it", "1 and it")
FRACTION_FORMS = ("top", "bottom")
MOST_UNCUED = 12
"""Whole numbers up to this may be constants without a cue, and so may those of `ROUND`."""
ROUND = frozenset(map(Fraction, ("100", "1000", "0.5", "0.25", "0.75", "0.1", "0.01", "1.5")))

CUES: tuple[tuple[str, str], ...] = (
    (r"week|daily|every ?day|each day|per day|a day|monday|tuesday|wednesday|thursday|friday|saturday|sunday", "7"),
    (r"weekday|work ?day|business day|work ?week|school", "5"),
    (r"weekend", "2"),
    (r"\bday|night|o'clock", "24"),
    (r"hour|minute|second|mph|km/h", "60 0.5 30 3600"),
    (r"month|january|february|march|april|june|july|august|september|october|november|december", "12 30 4"),
    (r"year|annual", "12 52 365"),
    (r"dozen", "12 6 24"),
    (r"%|percent|discount|\$|cent|dollar", "100 0.01"),
    (r"penn|dime|nickel|quarter|coin", "100 0.01 25 10 5 0.25 0.1 0.05"),
    (r"half|halv|twice|doubl|both|pair|couple|either|twin|parents|midway|round trip|return", "2 0.5 50 1.5"),
    (r"third|tripl|thrice|triang|tricycle", "3 2"),
    (r"quarter|fourth|quadrupl|season|square|rectang|perimeter|corner", "4 2 0.25 0.75 25 75 3"),
    (r"fifth", "5 0.2 20 4"),
    (r"sixth", "6 5"),
    (r"eighth", "8 7"),
    (r"tenth", "10 9 0.1"),
    (r"foot|feet|inch|yard", "12 3 36"),
    (r"pound|ounce", "16"),
    (r"kilo|km|kg|litre|liter|meter|gram|\bml\b|\bcm\b", "1000 100"),
    (r"gallon|quart|pint", "4 2 8 16"),
    (r"decade|centur", "10 100"),
    (r"leg\b|legs|wheel|tire|paw|hoo[fv]|shoe|sock|glove|bicycle|bike|motorcycle", "2 3 4 6 8"),
)  # fmt: skip
"""Words of a question, and the constants that a chain may have from them. Generous on purpose: a number of the question
that equals a cued constant keeps its value, which costs a little variety; a constant that is taken for a number of the
question makes a wrong row."""
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


@dataclass(frozen=True)
class Origin:
    """The question's numbers of value `number`, the result of step `result`, or, with neither, a constant."""

    number: Fraction | None = None
    result: int | None = None
    form: str = "itself"


CONSTANT = Origin()


@dataclass(frozen=True)
class Operand:
    """A number in the expression of a step (counted from 0), and its origins, of which there is at least one."""

    step: int
    value: Fraction
    origins: tuple[Origin, ...]

    @property
    def numbers(self) -> set[Fraction]:
        """The values of the question's numbers that this operand may be."""
        return {origin.number for origin in self.origins if origin.number is not None}

    @property
    def results(self) -> set[int]:
        """The steps whose result this operand may be."""
        return {origin.result for origin in self.origins if origin.result is not None}


def cued_constants(question: str, mentions: Sequence[Mention]) -> set[Fraction]:
    """The constants that words of the question are cues for, and 1. The words of its numbers ("twice") are no cues."""
    text = question.lower()
    for mention in mentions:
        if mention.kind in ("fraction", "times", "word"):
            masked = "#" * (mention.end - mention.start)
            text = text[: mention.start] + masked + text[mention.end :]
    cued = " ".join(constants for words, constants in CUES if re.search(words, text))
    return {Fraction(1), *map(Fraction, cued.split())}


def trace(mentions: Sequence[Mention], steps: Sequence[Step], cued: Collection[Fraction]) -> list[Operand]:
    """The operands of all steps, in order, with their origins.

    `CannotRenumber` if an operand comes from nowhere, or if the chain may compute something that it does not write.
    """
    operands: list[Operand] = []
    for index, step in enumerate(steps):
        for value in step.operands:
            origins = _origins(value, mentions, steps[:index], cued)
            operands.append(Operand(index, value, _settled(origins, operands)))
    _check_unused_results(operands)
    _check_constants(mentions, steps, operands, cued)
    return operands


def unexplained(operand: Operand, cued: Collection[Fraction]) -> bool:
    """True if the operand can be nothing but a constant, and no word is a cue for it."""
    return operand.origins == (CONSTANT,) and operand.value not in cued


def forms_of(mention: Mention) -> list[str]:
    """The forms of this number: "20%" may be 20, 0.2, 80, 0.8, 120 or 1.2."""
    forms = ["itself"]
    if mention.kind == "percent":
        forms += PERCENT_FORMS
    elif mention.kind == "fraction":
        forms += FRACTION_FORMS
    elif mention.unit == "cent":
        forms.append("hundredth")
    return forms + [mention.scale] * bool(mention.scale)


def _origins(
    value: Fraction, mentions: Sequence[Mention], earlier: Sequence[Step], cued: Collection[Fraction]
) -> list[Origin]:
    """Everything that has the operand's value, each once; `CannotRenumber` if there is nothing."""
    origins = []
    for mention in mentions:
        for form in forms_of(mention):
            if FORMS[form](mention.value) == value:
                origins.append(Origin(number=mention.value, form=form))
    origins += [Origin(result=index) for index, step in enumerate(earlier) if step.result == value]
    if not origins and Fraction(1, 100) in cued:
        # The part of 100% that is left, as a factor.
        results = [index for index, step in enumerate(earlier) if step.result == 100 * value]
        origins += [Origin(result=index, form="hundredth") for index in results]
    if value in cued:
        origins.append(CONSTANT)
    if not origins:
        if value not in ROUND and not (value.denominator == 1 and value <= MOST_UNCUED):
            raise CannotRenumber("an operand comes from nowhere")
        origins.append(CONSTANT)
    return list(dict.fromkeys(origins))


def _settled(origins: list[Origin], earlier: Sequence[Operand]) -> tuple[Origin, ...]:
    """The one result that the chain has yet to use, if it has used all numbers of that value; else all origins.

    8 cakes a guest, 64 in all, 5 guests go: of `<<64/8=8>> <<8-5=3>>` the second 8 is the result.
    """
    used = {result for operand in earlier for result in operand.results}
    due = [origin for origin in origins if origin.result is not None and origin.result not in used]
    # A number counts as used only by an operand that can be nothing else.
    spent = {operand.origins[0].number for operand in earlier if len(operand.origins) == 1}
    numbers = {origin.number for origin in origins} - {None}
    return tuple(due if len(due) == 1 and numbers <= spent else origins)


def _check_unused_results(operands: Sequence[Operand]) -> None:
    """Reject a chain with an unused result and a constant behind it: 60 minutes may have become that 1."""
    used = {result for operand in operands for result in operand.results}
    last_constant = max((operand.step for operand in operands if operand.origins == (CONSTANT,)), default=0)
    if any(index not in used for index in range(last_constant)):
        raise CannotRenumber("a result may be used silently")


def _check_constants(
    mentions: Sequence[Mention],
    steps: Sequence[Step],
    operands: Sequence[Operand],
    cued: Collection[Fraction],
) -> None:
    """Reject a constant that may follow from an earlier result: rounded, or in one step with a number.

    `<<40/2=20>> <<20-5=15>>`: 5 may be a quarter of 20.
    """
    numbers = {mention.value for mention in mentions}
    for operand in operands:
        if operand.value > 2 and unexplained(operand, cued):
            results = [step.result for step in steps[: operand.step]]
            if any(_follows(operand.value, result, numbers) for result in results):
                raise CannotRenumber("an operand may follow from a result")


def _follows(value: Fraction, result: Fraction, numbers: Collection[Fraction]) -> bool:
    """True if `value` is `result` rounded, or one step with `result` and one of `numbers` gives it."""
    if value in (math.floor(result), math.ceil(result)):
        return True
    # Each step solved for the number, which is then looked up.
    partners = (result - value, result + value, value / result, result / value)
    return any(partner in numbers for partner in partners if partner)


# --- numbers that stay -------------------------------------------------------------------------------------


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
    outside = {value for value in fixed | (values - used) if value > MOST_UNCUED}
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
        if mention.value <= MOST_UNCUED and mention.kind in ("integer", "word")
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
    with_rests = set()
    for fraction in fractions:
        top, bottom = fraction.as_integer_ratio()
        if values & ({bottom - top, bottom + top} - {top, bottom}):
            with_rests.add(fraction)
    return with_rests


def _giving(
    targets: set[Fraction], values: Collection[Fraction], units: Collection[Fraction] = ()
) -> set[Fraction]:
    """Numbers from which a target follows in one step, with another of `values`, one of `units`, 1 or 100.

    14 follows from 8 and 6, and 3 from 2 and 1; no target follows from itself (14 = 28 - 14).
    """
    giving: set[Fraction] = set()
    if targets:
        for one, other in itertools.product(values, {*values, *units, Fraction(1), Fraction(100)}):
            if targets & _results(one, other) - {one, other}:
                giving |= {one, other}
    return giving


def _results(one: Fraction, other: Fraction) -> set[Fraction]:
    """Results of one step with two numbers, in either order; only the first one is divided without its remainder."""
    results = {one + other, one - other, other - one, one * other}
    if other:
        results |= {one / other, Fraction(one // other)}
    if one:
        results.add(other / one)
    return results
