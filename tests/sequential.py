"""The sequential method on tiny random models, for tests."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from families import EXAMPLES, liven, tiny_lm

from colar.methods import pretrained, registry
from colar.methods.base import Row
from colar.methods.sequential import Sequential
from colar.methods.sequential.choice import Groups
from colar.model.latent_lm import LatentLM


def matrices(maps: Any) -> torch.Tensor:
    """The matrices of maps of places behind the first, (P - 1, D, D): I + U V each."""
    return torch.eye(maps.up.shape[1]) + maps.up @ maps.down


def made(
    family: str = "llama", live: bool = False, digits: bool = False, **config: Any
) -> tuple[LatentLM, Sequential]:
    """A random model whose decoder and maps do something: they would start as the identity. With `digits` its tokenizer
    has a token for each digit."""
    lm, method = tiny_lm(family, digits=digits), registry.build("sequential", config)
    assert isinstance(method, Sequential)
    pretrained.attach(lm, method, seed=1)
    torch.manual_seed(2)
    torch.nn.init.normal_(lm.extra["group_decoder"].mlp[-1].weight, std=0.3)
    for name in ("place_maps", "digit_maps"):
        if name in lm.extra:
            for weight in lm.extra[name].parameters():
                torch.nn.init.normal_(weight, std=0.2)
    method.prepare(lm, EXAMPLES)
    return (liven(lm) if live else lm), method


def encoded(lm: LatentLM, method: Sequential, times: int = 1) -> list[Row]:
    rows = []
    for i in range(times * len(EXAMPLES)):
        rows.append(method.encode(lm.template, EXAMPLES[i % len(EXAMPLES)], Random(i), 0.0))
    return rows


def latent(lm: LatentLM, ids: list[int]) -> torch.Tensor:
    """What a group is fed as, token by token: (D,). With maps for digits, a digit's by what it is worth, and its unit."""
    total = torch.zeros(lm.width)
    digits = [lm.tokenizer.get_vocab()[digit] for digit in "0123456789"] if "digit_maps" in lm.extra else []
    for unit, tokens in enumerate(units_of(ids, digits)):
        for worth, token in enumerate(reversed(tokens)):
            embed = lm.embed(torch.tensor(token))
            if worth > 0:
                embed = matrices(lm.extra["digit_maps"])[worth - 1] @ embed
            if unit > 0 and "place_maps" in lm.extra:
                embed = matrices(lm.extra["place_maps"])[unit - 1] @ embed
            total = total + embed
    return total / len(ids) ** 0.5


def units_of(ids: list[int], digits: list[int]) -> list[list[int]]:
    """The tokens of each unit of a group: up to three digits, or any other token."""
    units: list[list[int]] = []
    for token in ids:
        last = units[-1] if units else []
        if token in digits and last and last[-1] in digits and len(last) < 3:
            last.append(token)
        else:
            units.append([token])
    return units


def check_shares(found: Groups, slack: float = 1e-4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Many draws of one group: each outcome comes as often as its log-probs say, the end by what was drawn included.

    `slack` is for outcomes so rare that a draw or two are many. Returns the ids of each outcome and what its draws
    declined.
    """
    n = len(found.ids)
    logps = found.logps.sum(-1) + found.ending_logps
    # Place by place: whole rows take ten times as long to sort.
    which = torch.zeros(n, dtype=torch.long)
    for ids in found.ids.T:
        pair = which * (int(found.ids.max()) + 2) + ids + 1
        _, which, count = torch.unique(pair, return_inverse=True, return_counts=True)
    # A draw of each outcome: there may be thousands, too many for a loop.
    one = torch.empty(len(count), dtype=torch.long).scatter_(0, which, torch.arange(n))
    # What was declined may differ by place, not within one outcome.
    assert torch.equal(found.endings, found.endings[one][which])
    expected = logps[one].double().exp()
    spread = (expected * (1 - expected) / n).clamp(min=0).sqrt()
    assert ((count / n - expected).abs() <= 5 * spread + slack).all()
    return list(zip(found.ids[one], found.endings[one], strict=True))
