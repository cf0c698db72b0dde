"""The words of an `arithmetic` problem: a story around its moves, in several wordings."""

from __future__ import annotations

import random
from collections.abc import Sequence

from colar.data.moves import ENDINGS, Move, between

NAMES = ("Mia", "Leo", "Ana", "Tom", "Eva", "Ben", "Zoe", "Max", "Lily", "Omar", "Nina", "Hugo")
THINGS = (
    "pens",
    "cards",
    "coins",
    "shells",
    "stamps",
    "apples",
    "beads",
    "books",
    "eggs",
    "nuts",
    "keys",
    "toys",
)
CONTAINERS = ("boxes", "bags", "packs")
# What a move says in a story. {0} and {1} are its numbers; where there are several forms, one is drawn.
CLAUSES = {
    "count": ("has {0} {things}",),
    "groups": ("has {0} {container} of {1} {things}",),
    "add": ("finds {0} more", "buys {0} more", "wins {0} more"),
    "sub": ("loses {0}", "sells {0}", "drops {0}"),
    "mul": ("swaps each for {0}", "trades each for {0}"),
    "div": ("keeps one of {0} equal piles", "keeps one of {0} equal heaps"),
    "add_groups": ("finds {0} {container} of {1}", "buys {0} {container} of {1}"),
    "sub_groups": ("gives {0} friends {1} each", "sells {0} {container} of {1}"),
    "more": ("{peer} has {0} more",),
    "fewer": ("{peer} has {0} fewer",),
    "times": ("{peer} has {0} times as many",),
}
# The same moves without a story.
PLAIN = {
    "count": "Take {0}",
    "groups": "Take {0} times {1}",
    "add": "Add {0}",
    "sub": "Subtract {0}",
    "mul": "Multiply by {0}",
    "div": "Divide by {0}",
    "add_groups": "Add {0} times {1}",
    "sub_groups": "Subtract {0} times {1}",
    "more": "Add {0} more than that",
    "fewer": "Add {0} less than that",
    "times": "Add {0} times that",
}


def _tell(problem: list[Move], rng: random.Random, joiner: str = ", ") -> tuple[str, str]:
    """The story and its question; `joiner` stands between all clauses but the last two."""
    # The order of the draws is part of the format: the same seed tells the same story.
    words = {"name": _pick(NAMES, rng), "things": _pick(THINGS, rng)}
    # Drawn again until it is somebody else.
    words["peer"] = words["name"]
    while words["peer"] == words["name"]:
        words["peer"] = _pick(NAMES, rng)
    clauses = []
    for move in problem:
        words["container"] = _pick(CONTAINERS, rng)
        clause = _pick(CLAUSES[move.kind], rng)
        clauses.append(clause.format(*move.numbers, **words))
    # An ending is a sentence of its own.
    peer = clauses.pop() if problem[-1].kind in ENDINGS else ""
    story = clauses[-1]
    if len(clauses) > 1:
        story = joiner.join(clauses[:-1]) + " and " + story
    if peer:
        return f"{words['name']} {story}. {peer}.", "How many do both have?"
    return f"{words['name']} {story}.", "How many {things} does {name} have?".format(**words)


def _pick(among: Sequence[str], rng: random.Random) -> str:
    return among[between(rng, 0, len(among) - 1)]


def _story(problem: list[Move], rng: random.Random) -> str:
    return " ".join(_tell(problem, rng))


def _run_on(problem: list[Move], rng: random.Random) -> str:
    return " ".join(_tell(problem, rng, " and "))


def _question_first(problem: list[Move], rng: random.Random) -> str:
    return " ".join(reversed(_tell(problem, rng)))


def _plain(problem: list[Move], rng: random.Random) -> str:
    sentences = [PLAIN[move.kind].format(*move.numbers) + "." for move in problem]
    return " ".join([*sentences, "What is the result?"])


WORDINGS = {"story": _story, "run_on": _run_on, "question_first": _question_first, "plain": _plain}
