"""Thinking thoughts that are given, not the model's own: what could it answer if its latents were these?

`Forced` is a method around a method: it asks as that one does, feeds a table's embeddings, then stops. With the
latents of the reference chain it measures reading apart from writing; with zeros, or another question's latents,
it says whether they matter at all. Every engine runs it, because a row is found by its request's seed.

Shape suffixes: R requests, K thoughts, D width, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from colar.data.example import Example
from colar.methods import base
from colar.methods.base import Batch, Method, Row, ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.prompts import Template


class Forced(base.Method):
    """`thoughts_RKD`, of which request r feeds the first `counts_R[r]`; requests carry r as their seed."""

    name: ClassVar[str] = "forced"
    Config: ClassVar[type] = object

    def __init__(self, method: Method, thoughts_RKD: Tensor, counts_R: Tensor) -> None:
        super().__init__(method.config)
        self.method, self.thoughts_RKD, self.counts_R = method, thoughts_RKD, counts_R

    def prompt(self, params: Any) -> str:
        return self.method.prompt(params)

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        return self.method.encode(template, example, rng, epoch)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        return self.method.loss(lm, batch)

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        at = state.step.clamp(max=max(self.thoughts_RKD.shape[1] - 1, 0))
        embeds = torch.zeros_like(state.hidden)
        if self.thoughts_RKD.shape[1]:
            embeds = self.thoughts_RKD[state.seed, at].to(state.hidden)
        return Thought(embeds, state.step >= self.counts_R[state.seed], torch.full_like(state.step, -1))


def reference_rows(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> list[Row]:
    """The examples as training would encode them, all with the same per-request values. No draw matters to them."""
    rows = [method.encode(lm.template, example, Random(0), 0.0) for example in examples]
    question = [lm.template.question(example.question, method.prompt(params)) for example in examples]
    return [replace(row, question=ids, params=params) for ids, row in zip(question, rows, strict=True)]


@torch.no_grad()
def reference_thoughts(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any
) -> tuple[Tensor, Tensor]:
    """The thoughts of the reference chains, (R, K, D) and (R,), as training feeds them."""
    return method.thoughts(lm, Batch.collate(reference_rows(lm, method, examples, params)))
