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
from typing import Any, get_args

import torch
from torch import Tensor

from colar.engine.request import Completion
from colar.look.reference_chain import Kind, ReferencePass, Token, groups_thought
from colar.look.thought import Vocabulary, chosen_ids, says
from colar.model.latent_lm import LatentLM

KINDS: tuple[Kind, ...] = get_args(Kind)
FIVE = 5


Ranks = dict[str, Any]
"""One thought and its group, all but the first two of each token:

    question     the id of the first example that asks it: repeated questions are one
    position     in the chain, from 0
    token_ids
    kinds
    ranks        how many tokens of the vocabulary are nearer than it
    chosen       whether the head chose it; None (for all) where it chooses none
"""


def retrieval_accuracy(thoughts: Sequence[Ranks]) -> dict[str, Any]:
    """Fold ranks into shares, and keep them (`thoughts`): of all `tokens`, by kind of token, by position."""
    n_positions = max((each["position"] + 1 for each in thoughts), default=0)
    # A whole group is found by its worst token.
    by_position = [
        _share(max(each["ranks"]) < _size(each) for each in thoughts if each["position"] == position)
        for position in range(n_positions)
    ]
    return {
        "tokens": _of_tokens(thoughts),
        "by_kind": {kind: _of_tokens(thoughts, kind) for kind in KINDS},
        "by_position": by_position,
        "thoughts": list(thoughts),
    }


@torch.no_grad()
def rank_tokens(
    latents_KD: Tensor, groups: Sequence[Sequence[int]], vocabulary: Vocabulary
) -> list[list[int]]:
    """Number of tokens of the vocabulary that are nearer to each latent than each token of its group.

    A latent of zeros points nowhere: no token is near it, and all of the vocabulary counts as nearer.
    """
    cosine_KV = vocabulary.cosines(latents_KD)
    points_K = (latents_KD.norm(dim=-1) > 0).tolist()
    ranks = []
    for cosine_V, points, group in zip(cosine_KV, points_K, groups, strict=True):
        if not points:
            ranks.append([len(cosine_V)] * len(group))
            continue
        own_G = cosine_V[list(group)]
        # Strictly nearer: the token itself, and one with the very same embedding, do not count.
        nearer_G = (cosine_V[None] > own_G[:, None]).sum(-1)
        ranks.append(nearer_G.tolist())
    return ranks


# The three chains


def written_ranks(each: ReferencePass, vocabulary: Vocabulary) -> list[Ranks]:
    """Thoughts that the method writes after a right prefix."""
    # At the last position the method should stop: its embedding there stands for no group.
    return _ranks(each.example.first_id, each.thought.embeds[:-1], each.groups, each.chosen, vocabulary)


def reference_ranks(each: ReferencePass, vocabulary: Vocabulary) -> list[Ranks]:
    """The reference's latents. Nothing is chosen there."""
    chosen = [None] * len(each.latents_KD)
    return _ranks(each.example.first_id, each.latents_KD, each.groups, chosen, vocabulary)


def own_ranks(
    lm: LatentLM, each: ReferencePass, completion: Completion, vocabulary: Vocabulary
) -> list[Ranks]:
    """Thoughts of the model's own chain, as far as the reference goes; [] for a chain without any.

    After a wrong thought the two may be about different things: that is no error of reading.
    """
    if completion.latents is None:
        return []
    groups = groups_thought(lm, each.groups, completion)
    # The longer of the two chains has thoughts, or groups, that the other lacks.
    n = min(len(groups), completion.length)
    chosen = [chosen_ids(info) for info in completion.info[:n]]
    return _ranks(each.example.first_id, completion.latents[:n], groups[:n], chosen, vocabulary)


def _ranks(
    question: str,
    embeds_KD: Tensor,
    groups: Sequence[Sequence[Token]],
    chosen: Sequence[list[int] | None],
    vocabulary: Vocabulary,
) -> list[Ranks]:
    token_ids = [[token.token_id for token in group] for group in groups]
    ranked = rank_tokens(embeds_KD, token_ids, vocabulary)
    thoughts = []
    for k, group in enumerate(groups):
        ids = chosen[k]
        # Behind the end of the chain a head may choose the separator alone: there is no token to look for.
        if group:
            thoughts.append(
                {
                    "question": question,
                    "position": k,
                    "token_ids": token_ids[k],
                    "kinds": [token.kind for token in group],
                    "ranks": ranked[k],
                    "chosen": None if ids is None else says(token_ids[k], ids),
                }
            )
    return thoughts


# Shares


def _size(thought: Ranks) -> int:
    """The different tokens of the group."""
    return len(set(thought["token_ids"]))


def _of_tokens(thoughts: Sequence[Ranks], kind: str | None = None) -> dict[str, Any]:
    """Shares between 0 and 1 of `n` tokens of one kind, or of all; None without any."""
    ranks, sizes, chosen = [], [], []
    for each in thoughts:
        for i, rank in enumerate(each["ranks"]):
            if kind not in (None, each["kinds"][i]):
                continue
            ranks.append(rank)
            sizes.append(_size(each))
            if each["chosen"] is not None:
                chosen.append(each["chosen"][i])
    return {
        "n": len(ranks),
        "top1": _share(rank == 0 for rank in ranks),
        "top5": _share(rank < FIVE for rank in ranks),
        "in_set": _share(rank < size for rank, size in zip(ranks, sizes, strict=True)),
        "chosen": _share(chosen),
    }


def _share(found: Iterable[bool]) -> float | None:
    listed = list(found)
    return sum(listed) / len(listed) if listed else None
