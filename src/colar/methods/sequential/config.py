"""The values of `sequential`: `SequentialConfig` in a recipe, `SequentialParams` in a request. And the shortlist.

    place in the group      1                    2 ... c
    chosen among            the vocabulary       the tokens of the training chains, and the separator

Chains use few of a vocabulary's tokens (equations: some dozens of 49,152), and the LM head is a large part of a small
model's step. The softmax of those places is over the shortlist: in thinking, in training, and in the log-probs that
reinforcement learns from. A label that the shortlist lacks, in rows that it was not counted in, is scored by the whole
vocabulary.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from colar import progress
from colar.checks import check_choice, check_number, is_int
from colar.data.example import Example
from colar.methods.grouping import Factors
from colar.template.template import Template

Merge = Literal["sqrt", "ordered"]
Grouping = Literal["tokens", "equations"]


@dataclass(frozen=True)
class SequentialParams:
    """Per-request values."""

    compression_factor: float = 2
    """c: the reasoning tokens that a latent stands for, 1 or more. It need not be whole: at 1.5 groups have 1 or 2."""

    confidence_threshold: float = 0
    """A group also ends before a token that is less likely than this: c is then the most tokens, not the number.
    From 0, where nothing ends a group before its c tokens, to 1. With grouping: equations only digits are compared."""

    def __post_init__(self) -> None:
        check_number("compression_factor", self.compression_factor, 1)
        check_number("confidence_threshold", self.confidence_threshold, 0, 1)


@dataclass(frozen=True)
class SequentialConfig:
    """Values for making, feeding and learning groups."""

    compression_factors: tuple[float, ...] | str = "1..5"
    """Factors drawn from in training: a range of whole numbers such as "1..5", or a list, in which a factor that stands
    twice is drawn twice as often."""
    grouping: Grouping = "tokens"
    """Unit of c: "tokens"; or, for chains of equations and tokenizers with a token for each digit, "equations": "="
    is a group of its own, signs start one, the digits of a result are one unit and those of operands stay apart."""
    merge: Merge = "sqrt"
    """A group is fed as its sum over "sqrt" of its size (the paper's), or as a sum that is "ordered", in which each
    place has a learnt map: a plain sum has lost the order of its tokens."""
    confidence_thresholds: tuple[float, ...] = (0,)
    """Values of confidence_threshold drawn from in training, as factors are: groups then end where the model itself has
    less confidence than that."""
    lookahead_weight: float = 0.0
    """Weight of the labels behind a group, up to the largest trained factor; the group's own have 1."""
    shortlist: bool = False
    """Choose the tokens of a group behind its first among those of the training chains alone: their rows of the LM head
    are few, and a thought of c tokens costs little more than one."""
    shortlist_ids: tuple[int, ...] | None = None
    """The ids of that shortlist, ascending; null: counted in the training data at the start and kept here."""

    def __post_init__(self) -> None:
        check_choice("method.grouping", self.grouping, get_args(Grouping))
        check_choice("method.merge", self.merge, get_args(Merge))
        check_number("method.lookahead_weight", self.lookahead_weight, 0)
        Factors.parse(self.compression_factors)
        thresholds = self.confidence_thresholds
        if not isinstance(thresholds, list | tuple):
            raise ValueError(f"method.confidence_thresholds must be a list of numbers, got {thresholds!r}")
        if not thresholds:
            raise ValueError("method.confidence_thresholds is empty: [0] trains without one")
        for threshold in thresholds:
            check_number("method.confidence_thresholds", threshold, 0, 1)
        if self.shortlist_ids is not None:
            self._check_shortlist(self.shortlist_ids)

    def _check_shortlist(self, ids: tuple[int, ...]) -> None:
        if not self.shortlist:
            raise ValueError("method.shortlist_ids is given, but method.shortlist is false")
        are_ids = all(is_int(i) and i >= 0 for i in ids)
        if not are_ids or list(ids) != sorted(set(ids)) or not ids:
            raise ValueError("method.shortlist_ids must be token ids in ascending order, each once, or null")

    @property
    def factors(self) -> Factors:
        """The training factors, parsed."""
        return Factors.parse(self.compression_factors)

    @property
    def most_units(self) -> int:
        """The most units that a group may have."""
        # At c = 2.5 groups have 2 or 3.
        return math.ceil(self.factors.high)


def count_shortlist(template: Template, examples: Sequence[Example]) -> tuple[int, ...]:
    """The ids of all tokens of the examples' chains, and the separator's, ascending. ValueError without any chain."""
    ids: set[int] = set()
    for example in progress.track(examples, "count the shortlist"):
        ids.update(_chain(template, example))
    if not ids:
        raise ValueError(
            "method.shortlist is counted in the training chains, but no row has a chain: "
            "give method.shortlist_ids, or leave it out"
        )
    ids.add(template.separator_id)
    progress.say(f"shortlist: {len(ids):,} tokens, of {len(template.tokenizer):,}")
    return tuple(sorted(ids))


def warn_of_missing(template: Template, examples: Sequence[Example], ids: tuple[int, ...]) -> None:
    """Say how many tokens of these chains the shortlist lacks, where it was counted in others."""
    known = set(ids)
    lacking: list[int] = []
    total = 0
    for example in examples:
        chain = _chain(template, example)
        total += len(chain)
        lacking += [token for token in chain if token not in known]
    if lacking:
        progress.say(
            f"warning: method.shortlist lacks {len(lacking):,} of the {total:,} tokens of these chains "
            f"({len(set(lacking)):,} different ones, such as {template.token(lacking[0])!r}): no group can have them "
            "behind its first token, and as labels they are scored by the whole vocabulary"
        )


def _chain(template: Template, example: Example) -> list[int]:
    """The tokens of an example's chain. ValueError names the example."""
    try:
        return list(itertools.chain.from_iterable(template.steps(example.steps)))
    except ValueError as error:
        raise ValueError(f"{example.id}: {error}") from error
