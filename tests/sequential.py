"""The sequential head on tiny random models, for tests."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from families import EXAMPLES, liven, tiny_lm

from colar.methods import pretrained, registry
from colar.methods.base import Row
from colar.methods.colar import Colar
from colar.model.latent_lm import LatentLM


def made(family: str = "llama", live: bool = False, **config: Any) -> tuple[LatentLM, Colar]:
    """A random model whose decoder and maps do something: they would start as the identity."""
    lm, method = tiny_lm(family), registry.build("colar", {"head": "sequential", **config})
    assert isinstance(method, Colar)
    pretrained.attach(lm, method, seed=1)
    torch.manual_seed(2)
    torch.nn.init.normal_(lm.extra["group_decoder"].mlp[-1].weight, std=0.3)
    if "place_maps" in lm.extra:
        torch.nn.init.normal_(lm.extra["place_maps"].maps, std=0.2)
    method.prepare(lm, EXAMPLES)
    return (liven(lm) if live else lm), method


def encoded(lm: LatentLM, method: Colar, times: int = 1) -> list[Row]:
    rows = []
    for i in range(times * len(EXAMPLES)):
        rows.append(method.encode(lm.template, EXAMPLES[i % len(EXAMPLES)], Random(i), 0.0))
    return rows


def latent(lm: LatentLM, ids: list[int]) -> torch.Tensor:
    """What a group is fed as, token by token: (D,)."""
    total = torch.zeros(lm.width)
    for place, token in enumerate(ids):
        embed = lm.embed(torch.tensor(token))
        mapped = place > 0 and "place_maps" in lm.extra
        total = total + (lm.extra["place_maps"].maps[place - 1] @ embed if mapped else embed)
    return total / len(ids) ** 0.5
