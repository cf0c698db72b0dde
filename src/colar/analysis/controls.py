"""Do the latents matter? The same model on the same questions, with its thoughts replaced by others as many.

    own         its own thoughts, fed again: the answers are the method's, token for token (a check of the control)
    zeroed      zeros
    shuffled    the thoughts that it had of another question, as many as those were
    random      Gaussian directions, each as long as the thought it replaces

A model that answers as well with them does not read its thoughts. The accuracy that is left with `zeroed` is what the
forward passes are worth alone; with `shuffled` the thoughts are of the right kind, and wrong. A CoT that is cut short
needs no control of its own: it is `Decoding.max_latents`.

    control = controls.build(lm, method, "shuffled", requests)
    Engine(lm, control).generate(requests)

Shape suffixes: R requests, K thoughts, D width, B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from colar import checks
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Request
from colar.methods import base
from colar.methods.base import Batch, Method, Row, ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import noise
from colar.prompts import Template


@dataclass(frozen=True)
class Thoughts:
    """Request r's thoughts: the first `counts_R[r]` of `embeds_RKD[r]`."""

    embeds_RKD: Tensor
    counts_R: Tensor


class Control(base.Method):
    """A method that asks as `method` does and feeds the thoughts of a table, found by the request's seed."""

    name: ClassVar[str] = "control"
    Config: ClassVar[type] = object

    def __init__(self, method: Method, thoughts: Thoughts, seeds: Sequence[int]) -> None:
        super().__init__(method.config)
        cast(Any, self).name = method.name  # a report's rows are the method's, with a label of their own
        cast(Any, self).Params = method.Params
        cast(Any, self).latent = method.latent
        self.method = method
        device = thoughts.embeds_RKD.device
        self.seeds_R, order = torch.tensor(seeds, dtype=torch.int64, device=device).sort()
        self.fed = Thoughts(thoughts.embeds_RKD[order], thoughts.counts_R[order])

    def prompt(self, params: Any) -> str:
        return self.method.prompt(params)

    def trained(self, params: Any) -> str | None:
        return self.method.trained(params)

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        return self.method.encode(template, example, rng, epoch)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        return self.method.loss(lm, batch)

    def thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.method.thoughts(lm, batch)

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        row_B = torch.searchsorted(self.seeds_R, state.seed).clamp(max=len(self.seeds_R) - 1)
        if not torch.equal(self.seeds_R[row_B], state.seed):
            raise ValueError("a control answers the requests that it was built from, and no others")
        embeds_RKD, K = self.fed.embeds_RKD, self.fed.embeds_RKD.shape[1]
        embeds_BD = torch.zeros_like(state.hidden)
        if K:
            embeds_BD = embeds_RKD[row_B, state.step.clamp(max=K - 1)].to(state.hidden)
        done_B = state.step >= self.fed.counts_R[row_B]
        return Thought(embeds_BD, done_B, torch.full_like(state.step, -1))


def build(
    lm: LatentLM,
    method: Method,
    kind: str,
    requests: Sequence[Request],
    *,
    seed: int = 0,
    max_batch: int = 32,
) -> Control:
    """Let `method` think about the requests, and replace its thoughts.

    Every request needs a seed of its own (one control for each set of params). All thoughts are kept at once: R x K x D
    numbers. `seed` fixes what is drawn. ValueError for an unknown kind, two requests of one seed, or a single question
    to be shuffled.
    """
    return build_all(lm, method, [kind], requests, seed=seed, max_batch=max_batch)[0]


def build_all(
    lm: LatentLM,
    method: Method,
    kinds: Sequence[str],
    requests: Sequence[Request],
    *,
    seed: int = 0,
    max_batch: int = 32,
) -> list[Control]:
    """Several controls of the same requests, which are thought about once."""
    for kind in kinds:
        checks.check_choice("control", kind, tuple(KINDS))
    if not requests or len({request.seed for request in requests}) < len(requests):
        raise ValueError("a control needs requests, each with a seed of its own")
    own = own_thoughts(lm, method, requests, max_batch)
    seeds = [request.seed for request in requests]
    return [Control(method, KINDS[kind](own, requests, seed), seeds) for kind in kinds]


def own_thoughts(lm: LatentLM, method: Method, requests: Sequence[Request], max_batch: int = 32) -> Thoughts:
    """What `method` thinks about each request."""
    kept = [replace(request, keep_latents=True) for request in requests]
    done = Engine(lm, method, max_batch).generate(kept)
    counts = [completion.length for completion in done]
    embeds_RKD = torch.zeros(len(done), max(counts), lm.width, device=lm.device)
    for r, completion in enumerate(done):
        if completion.latents is not None:
            embeds_RKD[r, : counts[r]] = completion.latents.float()
    return Thoughts(embeds_RKD, torch.tensor(counts, device=lm.device))


def zeroed(own: Thoughts, requests: Sequence[Request], seed: int) -> Thoughts:
    return Thoughts(torch.zeros_like(own.embeds_RKD), own.counts_R)


def shuffled(own: Thoughts, requests: Sequence[Request], seed: int) -> Thoughts:
    """Each question takes the thoughts of the next one in a random round, so that none keeps its own."""
    by_question: dict[str, list[int]] = {}
    for r, request in enumerate(requests):
        by_question.setdefault(request.question, []).append(r)
    questions = sorted(by_question)
    if len(questions) < 2:
        raise ValueError("thoughts can be shuffled between two questions or more, there is only one")
    Random(seed).shuffle(questions)
    source = [0] * len(requests)
    for question, following in zip(questions, questions[1:] + questions[:1], strict=True):
        others = by_question[following]
        for i, r in enumerate(by_question[question]):
            source[r] = others[i % len(others)]
    index_R = torch.tensor(source, device=own.counts_R.device)
    return Thoughts(own.embeds_RKD[index_R], own.counts_R[index_R])


def randomised(own: Thoughts, requests: Sequence[Request], seed: int) -> Thoughts:
    """A function of (seed, request seed, position): batches and their order change nothing."""
    device, (_, K, D) = own.counts_R.device, own.embeds_RKD.shape
    seed_R = torch.tensor([request.seed for request in requests], dtype=torch.int64, device=device)
    drawn = [noise.normal(noise.keys(seed_R, seed, k, noise.LATENT), D) for k in range(K)]
    drawn_RKD = torch.stack(drawn, dim=1) if drawn else own.embeds_RKD
    unit_RKD = torch.nn.functional.normalize(drawn_RKD, dim=-1)
    return Thoughts(unit_RKD * own.embeds_RKD.norm(dim=-1, keepdim=True), own.counts_R)


def unchanged(own: Thoughts, requests: Sequence[Request], seed: int) -> Thoughts:
    return own


KINDS: dict[str, Callable[[Thoughts, Sequence[Request], int], Thoughts]] = {
    "own": unchanged,
    "zeroed": zeroed,
    "shuffled": shuffled,
    "random": randomised,
}
