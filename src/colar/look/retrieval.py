"""Accuracy of retrieval: a group's tokens ranked in the vocabulary by their cosine with the thought.

A token is

    top1      the nearest of all
    top5      among the five nearest
    in_set    among the n nearest, n being the different tokens of its group
    chosen    among the tokens that the head chose, as often as it chose it; None for a head that chooses none

Shares by kind are of tokens. A thought has one nearest token, so of c different tokens top1 finds one at most. Shares
by position are of thoughts whose whole group is found, in_set.

Shape suffixes: K latents, V vocabulary, D width, G tokens of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from colar.engine.request import Completion
from colar.look.reference_chain import Kind, ReferencePass, Token, groups_thought
from colar.look.thought import chosen_ids, cosine_with, says
from colar.model.latent_lm import LatentLM

KINDS: tuple[Kind, ...] = get_args(Kind)
FIVE = 5


@dataclass(frozen=True)
class ThoughtRanks:
    """One thought and its group: each token's kind, and how many tokens of the vocabulary are nearer than it."""

    question: str
    """The id of the first example that asks it: repeated questions are one."""
    position: int
    """In the chain, from 0."""
    token_ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    ranks: tuple[int, ...]
    chosen: tuple[bool, ...] | None = None
    """Of each token, whether the head chose it; None where it chooses none."""

    @property
    def size(self) -> int:
        """The different tokens of the group."""
        return len(set(self.token_ids))


@dataclass(frozen=True)
class Shares:
    """Shares between 0 and 1 of `n` tokens; None without any."""

    n: int
    top1: float | None
    top5: float | None
    in_set: float | None
    chosen: float | None


@dataclass(frozen=True)
class RetrievalAccuracy:
    """The shares, and the ranks that they are made of."""

    tokens: Shares
    by_kind: dict[str, Shares]
    by_position: list[float | None]
    thoughts: list[ThoughtRanks]


def retrieval_accuracy(thoughts: Sequence[ThoughtRanks]) -> RetrievalAccuracy:
    """Fold ranks into shares."""
    by_kind: dict[str, Shares] = {kind: _of_tokens(thoughts, kind) for kind in KINDS}
    n_positions = max((each.position + 1 for each in thoughts), default=0)
    # A whole group is found by its worst token.
    by_position = [
        _share(max(each.ranks) < each.size for each in thoughts if each.position == position)
        for position in range(n_positions)
    ]
    return RetrievalAccuracy(_of_tokens(thoughts), by_kind, by_position, list(thoughts))


@torch.no_grad()
def rank_tokens(
    latents_KD: Tensor, groups: Sequence[Sequence[int]], directions_VD: Tensor
) -> list[tuple[int, ...]]:
    """Number of tokens of the vocabulary that are nearer to each latent than each token of its group.

    A latent of zeros points nowhere: no token is near it, and all of the vocabulary counts as nearer.
    """
    cosine_KV = cosine_with(latents_KD, directions_VD)
    points_K = (latents_KD.norm(dim=-1) > 0).tolist()
    ranks = []
    for cosine_V, points, group in zip(cosine_KV, points_K, groups, strict=True):
        if not points:
            ranks.append((len(cosine_V),) * len(group))
            continue
        own_G = cosine_V[list(group)]
        # Strictly nearer: the token itself, and one with the very same embedding, do not count.
        nearer_G = (cosine_V[None] > own_G[:, None]).sum(-1)
        ranks.append(tuple(nearer_G.tolist()))
    return ranks


# The three chains


def written_ranks(each: ReferencePass, directions_VD: Tensor) -> list[ThoughtRanks]:
    """Thoughts that the method writes after a right prefix."""
    # At the last position the method should stop: its embedding there stands for no group.
    return _ranks(each.example.first_id, each.thought.embeds[:-1], each.groups, each.chosen, directions_VD)


def reference_ranks(each: ReferencePass, directions_VD: Tensor) -> list[ThoughtRanks]:
    """The reference's latents. Nothing is chosen there."""
    chosen = [None] * len(each.latents_KD)
    return _ranks(each.example.first_id, each.latents_KD, each.groups, chosen, directions_VD)


def own_ranks(
    lm: LatentLM, each: ReferencePass, completion: Completion, directions_VD: Tensor
) -> list[ThoughtRanks]:
    """Thoughts of the model's own chain, as far as the reference goes; [] for a chain without any.

    After a wrong thought the two may be about different things: that is no error of reading.
    """
    if completion.latents is None:
        return []
    groups = groups_thought(lm, each.groups, completion)
    # The longer of the two chains has thoughts, or groups, that the other lacks.
    n = min(len(groups), completion.length)
    chosen = [chosen_ids(info) for info in completion.info[:n]]
    return _ranks(each.example.first_id, completion.latents[:n], groups[:n], chosen, directions_VD)


def _ranks(
    question: str,
    embeds_KD: Tensor,
    groups: Sequence[Sequence[Token]],
    chosen: Sequence[list[int] | None],
    directions_VD: Tensor,
) -> list[ThoughtRanks]:
    token_ids = [tuple(token.token_id for token in group) for group in groups]
    ranked = rank_tokens(embeds_KD, token_ids, directions_VD)
    thoughts = []
    for k, group in enumerate(groups):
        kinds = tuple(token.kind for token in group)
        ids = chosen[k]
        found = None if ids is None else tuple(says(token_ids[k], ids))
        # Behind the end of the chain a head may choose the separator alone: there is no token to look for.
        if group:
            thoughts.append(ThoughtRanks(question, k, token_ids[k], kinds, ranked[k], found))
    return thoughts


# Shares


def _of_tokens(thoughts: Sequence[ThoughtRanks], kind: str | None = None) -> Shares:
    """Of tokens of one kind, or of all."""
    ranks, sizes, chosen = [], [], []
    for each in thoughts:
        for i, rank in enumerate(each.ranks):
            if kind not in (None, each.kinds[i]):
                continue
            ranks.append(rank)
            sizes.append(each.size)
            if each.chosen is not None:
                chosen.append(each.chosen[i])
    return Shares(
        n=len(ranks),
        top1=_share(rank == 0 for rank in ranks),
        top5=_share(rank < FIVE for rank in ranks),
        in_set=_share(rank < size for rank, size in zip(ranks, sizes, strict=True)),
        chosen=_share(chosen),
    )


def _share(found: Iterable[bool]) -> float | None:
    listed = list(found)
    return sum(listed) / len(listed) if listed else None
