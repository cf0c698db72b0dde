"""The sequential method on tiny random models, for tests."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import torch
from families import EXAMPLES, liven, tiny_lm

from colar.methods import pretrained, registry
from colar.methods.base import Row
from colar.methods.sequential import Sequential
from colar.methods.sequential.choice import Groups
from colar.model.latent_lm import LatentLM
from colar.training.grpo import rollout


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


def label_logp(
    lm: LatentLM, state: torch.Tensor, token: int, ids: tuple[int, ...] | None = None, temperature: float = 1
) -> float:
    """By the softmax over `ids`; over all where there are none, or the token is not among them."""
    logits = lm.logits(state) / temperature
    if ids is None or token not in ids:
        return logits.log_softmax(-1)[token].item()
    return logits[list(ids)].log_softmax(-1)[ids.index(token)].item()


@torch.no_grad()
def choice_logps(lm: LatentLM, each: rollout.Output, ids: tuple[int, ...] | None = None) -> list[float]:
    """Every choice of one output from a forward of its own, by the present weights: the tokens of a group summed up,
    those behind its first by the softmax over `ids`, if there are any."""
    decoder, separator = lm.extra["group_decoder"], lm.template.separator_id
    decoding = each.completion.request.decoding
    temperature, drawn_at = decoding.temperature, decoding.latent_temperature
    groups = [[i for i in info["group_ids"].tolist() if i >= 0] for info in each.completion.thought_info()]
    latents = [latent(lm, [i for i in group if i != separator]) for group in groups]
    answer = [separator, *each.sampled_ids]
    fed = [*lm.embed(torch.tensor(each.question_ids)), *latents, *lm.embed(torch.tensor(answer))]
    states = lm.hidden(torch.stack(fed)[None])[0, len(each.question_ids) - 1 :]
    found = []
    for state, group in zip(states, groups, strict=False):
        # Going on, and the first token given that; with one temperature the two are the token's own log-prob.
        total = math.log1p(-math.exp(label_logp(lm, state, separator, None, temperature)))
        if drawn_at > 0:
            going_on = math.log1p(-math.exp(label_logp(lm, state, separator, None, drawn_at)))
            total += label_logp(lm, state, group[0], None, drawn_at) - going_on
        for before, token in itertools.pairwise(group):
            assert ids is None or token in ids
            state = decoder(state, lm.embed(torch.tensor(before)))
            if drawn_at > 0:
                total += label_logp(lm, state, token, ids, drawn_at)
            else:
                listed = list(ids or range(lm.logits(state).shape[-1]))
                assert token == listed[int(lm.logits(state)[listed].argmax())]
        found.append(total)
    spoken = list(zip(states[len(groups) :], answer, strict=False))
    # A stop that was forced was no choice.
    for state, token in spoken if each.stop_chosen else spoken[1:]:
        found.append(label_logp(lm, state, token, None, temperature))
    return found


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
