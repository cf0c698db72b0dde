"""A group's tokens ranked in the vocabulary by their cosine with the thought, for the figure of retrieval.

A token is found by a thought if it is among the n nearest, n being the different tokens of its group.

Shape suffixes: K latents, V vocabulary, D width, G tokens of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from colar.engine.completion import Completion
from colar.look.reference_chain import ReferencePass, Token, groups_thought
from colar.look.thought import EmbeddingIndex
from colar.model.latent_lm import LatentLM

Kind = Literal["bracket", "sign", "operand", "result", "text"]
"""Of a token of an equation `<<20-4=16>>`: bracket, sign, number before the last "=", behind it, or other text."""
Ranks = dict[str, Any]
"""One thought and its group, `kinds` and `ranks` of each token:

    question     the id of the first example that asks it: repeated questions are one
    position     in the chain, from 0
    token_ids
    kinds
    ranks        how many tokens of the vocabulary are nearer than it
"""


def kind_of(text: str, is_result: bool) -> Kind:
    stripped = text.strip()
    if is_result:
        return "result"
    if stripped and stripped.strip("<>") == "":
        return "bracket"
    if stripped and stripped.strip("+-*/%()=") == "":
        return "sign"
    return "operand" if any(character.isdigit() for character in stripped) or stripped == "." else "text"


@torch.no_grad()
def rank_tokens(
    latents_KD: Tensor, groups: Sequence[Sequence[int]], vocabulary: EmbeddingIndex
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


def written_ranks(lm: LatentLM, each: ReferencePass, vocabulary: EmbeddingIndex) -> list[Ranks]:
    """Thoughts that the method writes after a right prefix."""
    # At the last position the method should stop: its embedding there stands for no group.
    return _ranks(lm, each.example.first_id, each.thought.embeds[:-1], each.groups, vocabulary)


def reference_ranks(lm: LatentLM, each: ReferencePass, vocabulary: EmbeddingIndex) -> list[Ranks]:
    """The reference's latents."""
    return _ranks(lm, each.example.first_id, each.latents_KD, each.groups, vocabulary)


def own_ranks(
    lm: LatentLM, each: ReferencePass, completion: Completion, vocabulary: EmbeddingIndex
) -> list[Ranks]:
    """Thoughts of the model's own chain, as far as the reference goes; [] for a chain without any.

    After a wrong thought the two may be about different things: that is no error of reading.
    """
    if completion.latents is None:
        return []
    groups = groups_thought(lm, each.groups, completion)
    # The longer of the two chains has thoughts, or groups, that the other lacks.
    n = min(len(groups), completion.length)
    return _ranks(lm, each.example.first_id, completion.latents[:n], groups[:n], vocabulary)


def _ranks(
    lm: LatentLM,
    question: str,
    embeds_KD: Tensor,
    groups: Sequence[Sequence[Token]],
    vocabulary: EmbeddingIndex,
) -> list[Ranks]:
    token_ids = [[token.token_id for token in group] for group in groups]
    ranked = rank_tokens(embeds_KD, token_ids, vocabulary)
    thoughts = []
    for k, group in enumerate(groups):
        # Behind the end of the chain a head may choose the separator alone: there is no token to look for.
        if group:
            thoughts.append(
                {
                    "question": question,
                    "position": k,
                    "token_ids": token_ids[k],
                    "kinds": [kind_of(lm.template.token(token.token_id), token.is_result) for token in group],
                    "ranks": ranked[k],
                }
            )
    return thoughts
