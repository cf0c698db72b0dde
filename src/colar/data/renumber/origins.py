"""Origins of the operands of a chain: a number of the question, an earlier result, or a constant.

An operand's candidates are all of these that have its value:

- a number of the question, as it is or in a form that its kind allows: 20% as 0.2, 80, 0.8, 120 or 1.2; 2/5 as 2, 5,
  0.4 or 0.6; "3 million", "75 cents" and "2 dozen" in their scale;
- an earlier result, and, where there is nothing else, a hundredth of one where percentages are at stake;
- a constant that the question's words are a cue for ("week" for 7, "half" for 2), and 1.

An operand without any is a constant if it is whole and up to 12, or round, and does not follow in one step from an
earlier result, rounded or with a number. Any other comes from nowhere, and the row is left alone. So is a chain with a
constant behind a result that it never uses.

**Ambiguity.** An operand with several candidates is right only where all of them give the same new value. So numbers
of one value stay equal, and a number that may be a constant stays what it is. One thing is decided: an operand that may
be an earlier result is that result, if the chain has not used it so far and has used the number of that value.

Numbers stay what they are, too, where they may be tied to something that is not in the chain (`_frozen`):

- numbers from which a constant without a cue follows in one step (3 from "2 brothers": 2 + 1) or as a sum of a few;
- the sum of two constants (the 2 and 3 of "5 trees fell, one more of these than of those");
- fractions and percentages whose rest an operand may be (the 2 of 2/3, where the question says 1/3);
- a number up to 5 that the chain uses more often than the question names it: one use may be a count of persons;
- a number up to 12 that counts what is listed ("three friends, Ann, Bob and Cid"), or stands beside "the other two";
- numbers from which another above 12 follows that is fixed or not in the chain ("8 men and 6 women ... of all 14").
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from colar.data.renumber.mentions import Mention
from colar.data.renumber.program import NotAProgram, Step

_MOST_NUMBERS = 40
"""Numbers of a question: pairs and sums of them are looked at one by one."""
_SMALL = 12
_FEW = 5
_ROUND = frozenset(Fraction(value) for value in ("100", "1000", "0.5", "0.25", "0.75", "0.1", "0.01", "1.5"))
"""Constants that need no cue, beside whole numbers up to 12."""

_UNITS = {Fraction(value) for value in (7, 12, 24, 30, 52, 60)}
"""Constants of the calendar: 3 may be what 4 days leave of a week, and 15 the minutes of a mile at 4 an hour."""

_OTHERS = re.compile(r"\b(?:other|remaining|rest of the) (?:two|three|four|five|six|[2-9])\b", re.IGNORECASE)
_LIST = re.compile(r"[^,.;:?!]{1,60}(?:, [^,.;:?!]{1,60}?)+,? (?:and|or) |\b[A-Z][a-z]+(?: and) [A-Z][a-z]+")
_NAME = re.compile(r"(?<![.?!] )(?<!^)\b[A-Z][a-z]+\b")
_PEOPLE = {
    "friend", "brother", "sister", "sibling", "kid", "child", "children", "people", "person", "cousin", "son",
    "daughter", "man", "men", "woman", "women", "boy", "girl", "neighbor", "roommate", "coworker", "colleague",
    "player", "runner", "member", "guest", "student", "teacher", "employee", "worker", "grandchild", "grandchildren",
}  # fmt: skip


_CUES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"week|daily|every ?day|each day|per day|a day|monday|tuesday|wednesday|thursday|friday|saturday|sunday", ("7",)),
    (r"weekday|work ?day|business day|work ?week|school", ("5",)),
    (r"weekend", ("2",)),
    (r"\bday|night|o'clock", ("24",)),
    (r"hour|minute|second|mph|km/h", ("60", "0.5", "30", "3600")),
    (r"month|january|february|march|april|june|july|august|september|october|november|december", ("12", "30", "4")),
    (r"year|annual", ("12", "52", "365")),
    (r"dozen", ("12", "6", "24")),
    (r"%|percent|discount|\$|cent|dollar", ("100", "0.01")),
    (r"penn|dime|nickel|quarter|coin", ("100", "0.01", "25", "10", "5", "0.25", "0.1", "0.05")),
    (r"half|halv|twice|doubl|both|pair|couple|either|twin|parents|midway|round trip|return", ("2", "0.5", "50", "1.5")),
    (r"third|tripl|thrice|triang|tricycle", ("3", "2")),
    (r"quarter|fourth|quadrupl|season|square|rectang|perimeter|corner", ("4", "2", "0.25", "0.75", "25", "75", "3")),
    (r"fifth", ("5", "0.2", "20", "4")),
    (r"sixth", ("6", "5")),
    (r"eighth", ("8", "7")),
    (r"tenth", ("10", "9", "0.1")),
    (r"foot|feet|inch|yard", ("12", "3", "36")),
    (r"pound|ounce", ("16",)),
    (r"kilo|km|kg|litre|liter|meter|gram|\bml\b|\bcm\b", ("1000", "100")),
    (r"gallon|quart|pint", ("4", "2", "8", "16")),
    (r"decade|centur", ("10", "100")),
    (r"leg\b|legs|wheel|tire|paw|hoo[fv]|shoe|sock|glove|bicycle|bike|motorcycle", ("2", "3", "4", "6", "8")),
)  # fmt: skip
"""Words of a question, and the constants that a chain may have from them. Generous on purpose: a number of the question
that equals a cued constant keeps its value, which costs a little variety; a constant that is taken for a number of the
question makes a wrong row."""


@dataclass(frozen=True)
class OperandForm:
    """Formula of an operand in a number or a result: offset + factor * (its value, or a part of its fraction)."""

    part: str = "value"
    offset: Fraction = Fraction(0)
    factor: Fraction = Fraction(1)

    def of(self, value: Fraction) -> Fraction:
        """The operand that this form makes of a value."""
        if self.part == "top":
            value = Fraction(value.numerator)
        elif self.part == "bottom":
            value = Fraction(value.denominator)
        return self.offset + self.factor * value


@dataclass(frozen=True)
class Origin:
    """One candidate of an operand: the question's numbers of value `number`, step `result`, or else a constant."""

    form: OperandForm = OperandForm()
    number: Fraction | None = None
    result: int | None = None


Origins = list[list[list[Origin]]]
"""The candidates of every operand, by step, then by operand."""


def trace(
    question: str, mentions: Sequence[Mention], steps: Sequence[Step]
) -> tuple[Origins, list[Fraction]]:
    """The origins of every operand, and the values of the question that may change.

    `NotAProgram` where an operand comes from nowhere, or where no number may change.
    """
    if len(mentions) > _MOST_NUMBERS:
        raise NotAProgram("too many numbers")
    cued = cued_constants(question, mentions)
    origins: Origins = []
    for index, step in enumerate(steps):
        before = _flat(origins)
        found: list[list[Origin]] = []
        for operand in step.operands:
            candidates = _origins(operand, mentions, steps[:index], cued)
            found.append(_due(candidates, [*before, *found]))
        origins.append(found)
    _check_silent(origins)
    frozen = _frozen(question, mentions, steps, origins, cued)
    used = {
        origin.number for candidates in _flat(origins) for origin in candidates if origin.number is not None
    }
    free = sorted(used - frozen)
    if not free:
        raise NotAProgram("no number may change")
    return origins, free


def cued_constants(question: str, mentions: Sequence[Mention]) -> set[Fraction]:
    """Constants that the question's words are cues for. The words of its numbers ("twice") are none."""
    characters = list(question.lower())
    for mention in mentions:
        if mention.kind in ("fraction", "times", "word"):
            # Masked at equal length: the places of the mentions behind it stay valid.
            characters[mention.start : mention.end] = "#" * (mention.end - mention.start)
    text = "".join(characters)
    cued = {Fraction(1)}
    for words, constants in _CUES:
        if re.search(words, text):
            cued.update(Fraction(constant) for constant in constants)
    return cued


def _check_silent(origins: Origins) -> None:
    """Reject a chain that leaves a result unused and has a constant behind it: 60 minutes may have become that 1."""
    used = {origin.result for candidates in _flat(origins) for origin in candidates}
    for index in range(len(origins) - 1):
        # `[Origin()]` is an operand that can be nothing but a constant.
        if index not in used and [Origin()] in _flat(origins[index + 1 :]):
            raise NotAProgram("a result may be used silently")


def forms_of(mention: Mention) -> list[OperandForm]:
    """Other forms that a number of this kind may have in a chain, beside its value."""
    hundredth = Fraction(1, 100)
    forms = []
    if mention.kind == "percent":
        forms += [
            OperandForm(factor=hundredth),
            OperandForm(offset=Fraction(100), factor=Fraction(-1)),
            OperandForm(offset=Fraction(1), factor=-hundredth),
            OperandForm(offset=Fraction(100)),
            OperandForm(offset=Fraction(1), factor=hundredth),
        ]
    elif mention.kind == "fraction":
        rest = OperandForm(offset=Fraction(1), factor=Fraction(-1))
        forms += [OperandForm(part="top"), OperandForm(part="bottom"), rest]
    elif mention.unit == "cent":
        forms.append(OperandForm(factor=hundredth))
    if mention.scale > 1:
        forms.append(OperandForm(factor=Fraction(mention.scale)))
    return forms


def _origins(
    operand: Fraction, mentions: Sequence[Mention], earlier: Sequence[Step], cued: set[Fraction]
) -> list[Origin]:
    """The candidates of one operand; `NotAProgram` where it has none."""
    found = []
    for mention in mentions:
        for form in (OperandForm(), *forms_of(mention)):
            if form.of(mention.value) == operand:
                found.append(Origin(form, number=mention.value))
    for index, step in enumerate(earlier):
        if step.result == operand:
            found.append(Origin(result=index))
    if not found and Fraction(1, 100) in cued:
        # What is left of 100%, as a factor.
        hundredth = OperandForm(factor=Fraction(1, 100))
        shares = [index for index, step in enumerate(earlier) if hundredth.of(step.result) == operand]
        found = [Origin(hundredth, result=index) for index in shares]
    if operand in cued:
        found.append(Origin())
    if not found:
        small = operand.denominator == 1 and operand <= _SMALL
        if not small and operand not in _ROUND:
            raise NotAProgram("an operand comes from nowhere")
        found.append(Origin())
    # Several numbers of one value are one origin.
    return list(dict.fromkeys(found))


def _due(candidates: list[Origin], before: Sequence[list[Origin]]) -> list[Origin]:
    """The one earlier result that is due: not used so far, where the numbers of that value have been. Else all."""
    taken = {origin.result for earlier in before for origin in earlier}
    results = [origin for origin in candidates if origin.result is not None and origin.result not in taken]
    if len(results) != 1:
        return candidates
    # A number counts as used only where an operand can be nothing else.
    spent = {earlier[0].number for earlier in before if len(earlier) == 1}
    numbers = [origin for origin in candidates if origin.number is not None]
    return results if all(origin.number in spent for origin in numbers) else candidates


def _frozen(
    question: str,
    mentions: Sequence[Mention],
    steps: Sequence[Step],
    origins: Origins,
    cued: set[Fraction],
) -> set[Fraction]:
    """The values that stay what they are, of those that the chain uses: see the module's docstring.

    A value that it does not use may be among them or not: it stays anyway.
    """
    fixed = {mention.value for mention in mentions if mention.kind == "fixed"}
    frozen = set(fixed)
    named = Counter(mention.value for mention in mentions)
    used: set[Fraction] = set()
    constants: set[Fraction] = set()
    uncued: set[Fraction] = set()
    uses: Counter[Fraction] = Counter()
    for index, (step, of_step) in enumerate(zip(steps, origins, strict=True)):
        for operand, candidates in zip(step.operands, of_step, strict=True):
            numbers = {origin.number for origin in candidates if origin.number is not None}
            used |= numbers
            uses.update(value for value in numbers if Origin(number=value) in candidates)
            is_constant = any(origin.number is None and origin.result is None for origin in candidates)
            if is_constant:
                if numbers:
                    frozen |= numbers
                elif operand not in cued:
                    results = [earlier.result for earlier in steps[:index]]
                    if operand > 2 and any(_follows(operand, result, named) for result in results):
                        raise NotAProgram("an operand may follow from a result")
                    uncued.add(operand)
                constants.add(operand)
            frozen |= _leaving(operand, mentions, is_constant)
    overused = {value for value in named if value <= _FEW and uses[value] > named[value]}
    pairs = itertools.combinations(constants - {1, 100} | overused, 2)
    frozen |= overused | {one + other for one, other in pairs}
    frozen |= _counts(question, mentions)
    for operand in uncued:
        frozen |= _summing_to(operand, named)
    frozen |= _giving(uncued, named, cued & _UNITS)
    # A hundredfold too: the constant 0.1 may be the 10% between 20% and 30%.
    frozen |= _giving({100 * operand for operand in uncued}, named)
    outside = {value for value in named if (value not in used or value in fixed) and value > _SMALL}
    return frozen | _giving(outside, named, apart=True)


def _leaving(operand: Fraction, mentions: Sequence[Mention], is_constant: bool) -> set[Fraction]:
    """The fractions and percentages of which the operand may be the rest, or the whole and the rest.

    After 1/3 is gone 2/3 are left, and 1/3 more is 4/3: neither 2 nor 4 is in the question. After 40% and 50% it is 10.
    """
    leaving = set()
    for mention in mentions:
        top, bottom = mention.value.numerator, mention.value.denominator
        rests = {bottom - top, bottom + top} - {top, bottom}
        if mention.kind == "fraction" and operand in rests:
            leaving.add(mention.value)
    percentages = [mention.value for mention in mentions if mention.kind == "percent"]
    rest = 100 - sum(percentages)
    if is_constant and len(percentages) > 1 and operand in (rest, rest / 100):
        leaving.update(percentages)
    return leaving


def _follows(operand: Fraction, result: Fraction, values: Collection[Fraction]) -> bool:
    """True if an operand follows from a result: rounded, or in one step with a number (a quarter of what is left)."""
    if operand in (math.floor(result), math.ceil(result)):
        return True
    # Solved for the number, which is then looked up: neither operand nor result is 0.
    partners = (result - operand, result + operand, operand / result, result / operand)
    return any(value in values for value in partners if value)


def _giving(
    targets: set[Fraction],
    values: Collection[Fraction],
    units: Iterable[Fraction] = (),
    apart: bool = False,
) -> set[Fraction]:
    """Numbers from which one of the targets follows in one step, with another of `values`, a unit's constant, 1 or 100.

    With `apart`, a target among the values is not taken to follow from itself (14 = 28 - 14).
    """
    giving: set[Fraction] = set()
    if targets:
        for one, other in itertools.product(values, {*values, *units, Fraction(1), Fraction(100)}):
            found = targets & _made(one, other)
            # The target times 1 is the target: that ties it to nothing.
            found -= {one, other} if apart else {one} if other == 1 else set()
            if found:
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


def _summing_to(target: Fraction, values: Iterable[Fraction]) -> set[Fraction]:
    """The values of which three or four sum to `target`, 1 among them or not: the parts of a ratio, persons named."""
    least = [value for value in {*values, Fraction(1)} if value < target]
    sums = [*itertools.combinations(least, 3), *itertools.combinations(least, 4)]
    return {value for some in sums if sum(some) == target for value in some}


def _counts(question: str, mentions: Sequence[Mention]) -> set[Fraction]:
    """Numbers up to 12 that may count what the question lists."""
    small = {
        mention.value
        for mention in mentions
        if mention.value <= _SMALL and mention.kind in ("integer", "word")
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
        if mention.unit in _PEOPLE and abs(mention.value - names) <= 1:
            counts.add(mention.value)
    return counts


def _flat(origins: Sequence[list[list[Origin]]]) -> list[list[Origin]]:
    """The candidates of each operand of some steps, in one list."""
    return [candidates for of_step in origins for candidates in of_step]
