"""The shortlist of `sequential` (`method.shortlist`): the tokens that a group may have behind its first one.

    place in the group      1                    2 ... c
    chosen among            the vocabulary       the tokens of the training chains, and the separator

Chains use few of a vocabulary's tokens (equations: some dozens of 49,152), and the LM head is a large part of a small
model's step. The softmax of those places is over the shortlist: in thinking, in training, and in the log-probs that
reinforcement learns from. A label that the shortlist lacks, in rows that it was not counted in, is scored by the whole
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from colar import progress
from colar.data.example import Example
from colar.template.template import Template


def count_ids(template: Template, examples: Sequence[Example]) -> tuple[int, ...]:
    """The ids of all tokens of the examples' chains, and the separator's, ascending. ValueError without any chain."""
    ids: set[int] = set()
    for example in progress.track(examples, "count the shortlist"):
        ids.update(_chain(template, example))
    if not ids:
        raise ValueError(
            "method.shortlist is counted in the training chains, but no row has a chain: "
            "give method.shortlist_ids, or leave it out"
        )
    ids.add(template.closing_id)
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
    chain = []
    try:
        for step in template.steps(example.steps):
            chain += step
    except ValueError as error:
        raise ValueError(f"{example.id}: {error}") from error
    return chain
