"""Shared by `prosqa.py` and `prontoqa.py`: made-up words, draws, and the split of a problem.

A row is a function of (source, options, split, seed, index) alone: every row has a random stream of its own, so that
row 17 is the same in a call for 20 rows and in one for 20,000. Of `random.Random` only an integer seed and `random()`
are used, the two that Python promises to keep: rows are the same on every machine.

Splits are disjoint by construction. A problem's split is a hash of its facts and of what is asked, in sorted order.
Neither seed, options, nor the order of the sentences can move a problem from one split to another.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from colar.checks import check_choice, check_number
from colar.data.example import SPLITS, AnswerType, Example, split_by_hash
from colar.data.formats import question_hash

MAX_DRAWS = 10_000
"""Draws for one row after which the options count as impossible to meet."""

# Made-up nouns: a beginning, a rhyme and "pus", so that those of the published sets are among them.
BEGINNINGS = (
    "", "b", "br", "ch", "d", "dr", "f", "fr", "g", "gr", "gw", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s",
    "scr", "sh", "sl", "sn", "st", "t", "th", "tr", "tw", "v", "w", "y", "z", "zh",
)  # fmt: skip
RHYMES = ("im", "um", "om", "em", "or", "er", "il", "el", "oom")
_WORDS = [f"{beginning}{rhyme}pus" for beginning in BEGINNINGS for rhyme in RHYMES]
NOUNS = tuple(word for word in _WORDS if word != "rumpus")  # which is a real word
NAMES = (
    "Alex", "Amir", "Anna", "Bob", "Carol", "Clara", "Davis", "Emma", "Eva", "Fae", "Felix", "Gabriel", "Hugo", "Ivan",
    "Jack", "Jane", "Kim", "Lena", "Max", "Mia", "Nora", "Oliver", "Otto", "Polly", "Rex", "Rosa", "Sally", "Sam",
    "Stella", "Tom", "Vera", "Wren",
)  # fmt: skip

T = TypeVar("T")


class Dice:
    """Random draws, all made from `random()` of one stream; the stream is named by a text."""

    def __init__(self, stream: str) -> None:
        digest = hashlib.sha256(stream.encode()).digest()
        self._rng = random.Random(int.from_bytes(digest[:8], "big"))

    def chance(self) -> float:
        """Draw uniformly from [0, 1)."""
        return self._rng.random()

    def pick(self, among: Sequence[T]) -> T:
        """Draw one of `among`, all equally likely."""
        return among[int(self._rng.random() * len(among))]

    def weighted(self, weights: Sequence[float]) -> int:
        """Draw an index, as likely as its weight."""
        left = self._rng.random() * sum(weights)
        for index, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return index
        return len(weights) - 1  # the sum was rounded

    def sample(self, among: Sequence[T], n: int) -> list[T]:
        """Draw `n` different places of `among`, in random order."""
        rest = list(among)
        return [rest.pop(int(self._rng.random() * len(rest))) for _ in range(n)]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All of `items` in random order."""
        return self.sample(items, len(items))


@dataclass(frozen=True)
class Problem:
    """A problem in words. `facts`: what it states and asks, each once, without wording; the split is their hash."""

    question: str
    steps: tuple[str, ...]
    answer: str
    facts: tuple[str, ...]


def generate(
    source: str,
    draw: Callable[[Dice], Problem | None],
    answer_type: AnswerType,
    split: str,
    n: int,
    seed: int,
    avoid: frozenset[str],
) -> list[Example]:
    """Make the first `n` rows of that split and seed. A draw of None is drawn again, and so is a question in `avoid`.

    `avoid` holds hashes of questions (`formats.question_hash`). Raises ValueError for an unknown split, a negative n,
    and where no draw gives a problem.
    """
    check_choice("split", split, SPLITS)
    check_number("n", n, 0, whole=True)
    examples = []
    for index in range(n):
        # Repeats are not looked for: a row would then depend on the rows before it.
        problem = _problem(f"{source}/{split}/{seed}/{index}", draw, split, avoid)
        row_id = f"{source}/{split}/{index}"
        examples.append(Example(row_id, problem.question, problem.steps, problem.answer, answer_type))
    return examples


def _problem(
    stream: str, draw: Callable[[Dice], Problem | None], split: str, avoid: frozenset[str]
) -> Problem:
    for attempt in range(MAX_DRAWS):
        problem = draw(Dice(f"{stream}/{attempt}"))
        if problem is None or split_of(problem.facts) != split:
            continue
        if question_hash(problem.question) not in avoid:
            return problem
    raise ValueError(f"no problem found for {stream} in {MAX_DRAWS} draws: widen the source's options")


def split_of(facts: Sequence[str]) -> str:
    """The split of a problem: by the hash of its facts in sorted order."""
    return split_by_hash("\n".join(sorted(facts)))
