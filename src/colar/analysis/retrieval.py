"""Latents read as tokens: the vocabulary entries whose embeddings point the way a latent does.

The paper's case study ("we retrieve tokens with the predicted latents by embedding cosine similarity"). A latent
of c tokens is near the sum of their embeddings, so its c nearest tokens are the ones it stands for.

Shape suffixes: K latents, V vocabulary, D width.
"""

from __future__ import annotations

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


@torch.no_grad()
def nearest_tokens(lm: LatentLM, latents_KD: Tensor, k: int) -> list[tuple[Neighbour, ...]]:
    """The `k` nearest tokens of each latent by cosine similarity, best first."""
    vocabulary_VD = lm.vocabulary().float()
    cosine_KV = (
        torch.nn.functional.normalize(latents_KD.float(), dim=-1)
        @ torch.nn.functional.normalize(vocabulary_VD, dim=-1).T
    )
    values, ids = cosine_KV.topk(min(k, cosine_KV.shape[1]), dim=-1)
    return [
        tuple(Neighbour(lm.template.token(i), i, v) for v, i in zip(row_values, row_ids, strict=True))
        for row_values, row_ids in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def read(lm: LatentLM, completion: Completion, k: int) -> list[Reading]:
    """Every thought of a completion that was made with `keep_latents`."""
    if completion.latents is None:
        return []
    readings = []
    neighbours = nearest_tokens(lm, completion.latents, k)
    for token_id, near, info in zip(completion.thought_ids, neighbours, completion.info, strict=True):
        if token_id >= 0:
            readings.append(Reading(lm.template.token(token_id)))
            continue
        sigma = info["sigma"].mean().item() if "sigma" in info else None
        stop = info["stop_probability"].item() if "stop_probability" in info else None
        readings.append(Reading(None, near, sigma, stop))
    return readings
