"""Latents read as tokens: the vocabulary entries whose embeddings point the way a latent does.

The paper's case study ("we retrieve tokens with the predicted latents by embedding cosine similarity"). A latent
of c tokens is near the sum of their embeddings, so its c nearest tokens are the ones it stands for.

Shape suffixes: K latents, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from colar.engine.request import Completion
from colar.model.latent_lm import LatentLM


@dataclass(frozen=True)
class Neighbour:
    """A token and the cosine between its embedding and the latent."""

    token: str
    token_id: int
    cosine: float


@dataclass(frozen=True)
class Reading:
    """One thought as a person reads it: `token` for a token of a chain, `neighbours` for a latent."""

    token: str | None
    neighbours: tuple[Neighbour, ...] = ()
    sigma: float | None = None
    stop_probability: float | None = None
    chosen: tuple[tuple[str, float], ...] = ()
    """The tokens that a latent was chosen as, each with its probability; empty where none were chosen."""
    unsure: bool = False
    """Whether these are fewer than its group may have, because the next one was unsure (`confidence_threshold`)."""


@torch.no_grad()
def nearest_tokens(
    lm: LatentLM, latents_KD: Tensor, k: int, directions_VD: Tensor | None = None
) -> list[tuple[Neighbour, ...]]:
    """The `k` nearest tokens of each latent by cosine similarity, best first.

    `directions_VD` are those of `directions`, for a caller who reads many chains.
    """
    cosine_KV = cosine_with(latents_KD, directions(lm) if directions_VD is None else directions_VD)
    best = cosine_KV.topk(min(k, cosine_KV.shape[1]), dim=-1)
    cosines, token_ids = best.values.tolist(), best.indices.tolist()

    nearest = []
    for row in range(len(latents_KD)):
        neighbours = []
        for cosine, token_id in zip(cosines[row], token_ids[row], strict=True):
            neighbours.append(Neighbour(lm.template.token(token_id), token_id, cosine))
        nearest.append(tuple(neighbours))
    return nearest


def read(lm: LatentLM, completion: Completion, k: int) -> list[Reading]:
    """Every thought of a completion that was made with `keep_latents`; latents with their `k` nearest tokens."""
    if completion.latents is None:
        return []
    nearest = nearest_tokens(lm, completion.latents, k)
    readings = []
    for place, token_id in enumerate(completion.thought_ids):
        # A chain of tokens is fed as embeddings too, but there is nothing to guess.
        if token_id >= 0:
            readings.append(Reading(lm.template.token(token_id)))
            continue
        info = completion.info[place]
        sigma = info["sigma"].mean().item() if "sigma" in info else None
        stop = info["stop_probability"].item() if "stop_probability" in info else None
        chosen = _chosen(lm, info)
        unsure = bool(chosen) and bool(info["group_unsure"])
        readings.append(Reading(None, nearest[place], sigma, stop, chosen, unsure))
    return readings


@torch.no_grad()
def directions(lm: LatentLM) -> Tensor:
    """The vocabulary's embeddings at length 1, (V, D): made once for many calls of `cosine_with`."""
    return torch.nn.functional.normalize(lm.vocabulary().float(), dim=-1)


def cosine_with(latents_KD: Tensor, directions_VD: Tensor) -> Tensor:
    """The cosine of each latent with each token's embedding, (K, V)."""
    # Outputs that processes have sent each other are on the CPU.
    directions_KD = torch.nn.functional.normalize(latents_KD.to(directions_VD), dim=-1)
    # Of unit vectors the product is the cosine: a merged latent is longer than any embedding.
    return directions_KD @ directions_VD.T


def _chosen(lm: LatentLM, info: Mapping[str, Tensor]) -> tuple[tuple[str, float], ...]:
    """The tokens of one group, in order, with the probability of each given those before it."""
    if "group_ids" not in info:
        return ()
    found = []
    for token_id, logp in zip(info["group_ids"].tolist(), info["group_logps"].tolist(), strict=True):
        if token_id >= 0:
            found.append((lm.template.token(token_id), math.exp(logp)))
    return tuple(found)
