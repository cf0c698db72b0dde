"""`prontoqa-made`: ProntoQA's task without end: true or false, by one chain through an ontology of made-up nouns.

    ... Every yumpus is a lorpus. Lorpuses are floral. Dumpuses are not floral. Eva is a yumpus. Eva is a brimpus.
    True or false: Eva is not floral.
    Eva is a yumpus. Every yumpus is a lorpus. / Eva is a lorpus. Lorpuses are floral. / Eva is floral.        False

ProntoQA is Saparov and He 2022 (2210.01240; github asaparov/prontoqa); Coconut (2412.06769) took its fictional
ontology with relevant distractors, 5 hops, sentences in random order, and this layout. Written here from its rules:

    chain        c1 -> c2 -> ... -> ch -> top; each c has one property, and one more parent that leads nowhere
    side parents each has one property
    stray        the entity is a second thing, too: a noun with a property and a parent
    contrary     a noun that nothing leads to has the opposite of the property asked for
    asked        the property of ch, as it is or negated, both equally often
    h hops are h - 1 steps from noun to noun, and the one to the property

With 5 hops: 25 sentences, 14 nouns, 6 steps. A property is one of a family (colour, size, ...), and a family occurs
once in a row. Whether a property is negated is drawn as there (`STEP_NEGATED` has the derivation).

Departures: nouns and names come from longer lists (`logic.py`), the properties from families of our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from colar.checks import check_number, check_range
from colar.data import logic
from colar.data.example import Example
from colar.data.logic import Dice, Problem

SOURCE = "prontoqa-made"
FAMILIES = (
    ("red", "green", "blue", "brown"),
    ("small", "large"),
    ("wooden", "metallic", "woollen", "liquid"),
    ("transparent", "opaque"),
    ("happy", "nervous", "shy", "proud"),
    ("bright", "dull"),
    ("sweet", "sour", "bitter", "salty"),
    ("floral", "fruity", "smoky"),
    ("hot", "cold", "mild"),
    ("kind", "mean", "angry", "gentle", "aggressive"),
    ("loud", "quiet", "melodic", "muffled"),
    ("slow", "fast", "steady"),
    ("sunny", "rainy", "windy", "cloudy", "snowy"),
)
NEGATED = 1 / 3
"""Share of the properties that are negated: half as likely as the others."""
# The published generator walks up the chain and starts anew where the walk ends early. At a noun with a plain property
# it goes on with 1 / 1.3 and takes the property with 0.3 / 1.3; with a negated one 1 / 1.7 and 0.7 / 1.7. So walks of
# full length pass fewer negated properties, and end in more of them, than there are.
STEP_NEGATED = (NEGATED / 1.7) / (NEGATED / 1.7 + (1 - NEGATED) / 1.3)
ASKED_NEGATED = (NEGATED * 0.7 / 1.7) / (NEGATED * 0.7 / 1.7 + (1 - NEGATED) * 0.3 / 1.3)

_NOUNS = frozenset(logic.NOUNS)


@dataclass(frozen=True)
class ProntoqaConfig:
    """The kind of problems that are made. The default is Coconut's."""

    hops: int | tuple[int, int] = 5
    """Deductions from the entity's first noun to the property that is asked for; or [fewest, most] of them."""

    def __post_init__(self) -> None:
        # Every noun of the chain takes two families of properties, and the stray noun one.
        most = (len(FAMILIES) - 1) // 2
        if not isinstance(self.hops, list | tuple):
            check_number("hops", self.hops, 1, most, whole=True)
            return
        check_range("hops", self.hops)
        check_number("hops: most", self.hops[1], 1, most, whole=True)
        object.__setattr__(self, "hops", tuple(self.hops))  # YAML gives a list

    def draw_hops(self, dice: Dice) -> int:
        """Number of hops of a problem, all equally likely; no draw is spent where the number is fixed."""
        if isinstance(self.hops, int):
            return self.hops
        fewest, most = self.hops
        return dice.pick(range(fewest, most + 1))


@dataclass(frozen=True)
class _Fact:
    """Every `subject` is, or is not, `what`: a noun or a property."""

    subject: str
    what: str
    negated: bool = False


def generate(
    config: ProntoqaConfig, split: str, n: int, seed: int, avoid: frozenset[str] = frozenset()
) -> list[Example]:
    """Make the first `n` rows of that split and seed, none with a question in `avoid`. Errors: `logic.generate`'s."""
    return logic.generate(SOURCE, partial(draw, config), "choice", split, n, seed, avoid)


def draw(config: ProntoqaConfig, dice: Dice) -> Problem:
    """Draw a problem."""
    hops = config.draw_hops(dice)
    nouns = dice.sample(logic.NOUNS, 2 * hops + 4)
    top, stray, stray_parent, contrary = nouns[:4]
    chain = nouns[4 : 4 + hops]
    sides = nouns[4 + hops :]
    families = dice.sample(FAMILIES, 2 * hops + 1)
    properties = [dice.pick(family) for family in families]

    # What is on the way to the answer: a noun's parent, and the last one's property.
    up = [_Fact(noun, parent) for noun, parent in zip(chain, [*chain[1:], top], strict=True)]
    shares = [STEP_NEGATED] * (hops - 1) + [ASKED_NEGATED]
    own = []
    for noun, word, share in zip(chain, properties[:hops], shares, strict=True):
        own.append(_Fact(noun, word, dice.chance() < share))
    asked = own[-1]
    # What is not.
    beside = [_Fact(noun, side) for noun, side in zip(chain, sides, strict=True)]
    for noun, word in zip([*sides, stray], properties[hops:], strict=True):
        beside.append(_Fact(noun, word, dice.chance() < NEGATED))
    beside.append(_Fact(stray, stray_parent))
    # The property and its opposite both stand in the context: to look for the claim's words tells nothing.
    beside.append(_Fact(contrary, asked.what, not asked.negated))

    who = dice.pick(logic.NAMES)
    wording = {fact: _sentence(fact, dice) for fact in [*up, *own, *beside]}
    context = dice.shuffled(list(wording.values()))
    context += dice.shuffled([f"{who} is {_a(chain[0])}.", f"{who} is {_a(stray)}."])
    true = dice.chance() < 0.5
    claim = asked.negated if true else not asked.negated
    question = " ".join([*context, f"True or false: {who} is {_not(claim)}{asked.what}."])

    steps = []
    for fact in [*up[:-1], asked]:  # the way to the top is left before its last step
        steps.append(f"{who} is {_a(fact.subject)}. {wording[fact]}")
    steps.append(f"{who} is {_not(asked.negated)}{asked.what}.")
    # The claim is left out: a question and its negation are in the same split.
    facts = [f"{fact.subject} > {_not(fact.negated)}{fact.what}" for fact in wording]
    facts += [f"{who} > {chain[0]}", f"{who} > {stray}"]
    return Problem(question, tuple(steps), str(true), tuple(facts))


def _sentence(fact: _Fact, dice: Dice) -> str:
    """The fact in the plural or, as often, with "each" or "every"."""
    is_noun = fact.what in _NOUNS
    if dice.chance() < 0.5:
        what = f"{fact.what}es" if is_noun else fact.what
        return f"{fact.subject.capitalize()}es are {_not(fact.negated)}{what}."
    what = _a(fact.what) if is_noun else fact.what
    return f"{dice.pick(('Each', 'Every'))} {fact.subject} is {_not(fact.negated)}{what}."


def _a(noun: str) -> str:
    article = "an" if noun[0] in "aeiou" else "a"
    return f"{article} {noun}"


def _not(negated: bool) -> str:
    return "not " if negated else ""
