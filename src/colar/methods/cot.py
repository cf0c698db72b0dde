"""Explicit chain of thought, and its control without any.

`cot`: the row is [question ###][all reasoning tokens][### answer EOS] and the loss the mean cross-entropy over
the reasoning and the answer, both separators' decisions included (where to stop is learnt). It thinks by
embedding the token it samples, and is done when that token is the separator.

`no_cot`: the same row with an empty chain: the answer straight from the question.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from colar.data.example import Example
from colar.methods import base, losses
from colar.methods.base import Batch, NoParams, Row, ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import ragged
from colar.ops.sampling import sample_tokens
from colar.prompts import Template


@dataclass(frozen=True)
class CotConfig:
    """CoT has nothing to set."""


@dataclass(frozen=True)
class NoCotConfig:
    """Neither has its control."""


class Cot(base.Method):
    name: ClassVar[str] = "cot"
    Config: ClassVar[type] = CotConfig

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        return base.encode_row(template, example, NoParams(), "", rng.getrandbits(62))

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: mean over L_r + L_a labelled positions of -log p(next token)."""
        chain = (batch.chain_ids, batch.chain_lengths)
        answer = (batch.answer_ids, batch.answer_lengths)
        ids_BT = ragged.pack(
            (batch.question_ids, batch.question_lengths), chain, answer, multiple=ragged.PAD_TO
        )
        labels_BN = ragged.pack(chain, answer)
        hidden_BTD = lm.hidden(lm.embed(ids_BT))
        hidden_BND = ragged.shift(hidden_BTD, batch.question_lengths - 1, labels_BN.shape[1])
        # The separator that opens the answer is a label (the decision to stop) and its last token, EOS, too.
        mask_BN = ragged.length_mask(batch.chain_lengths + batch.answer_lengths, labels_BN.shape[1])
        return {"ce": losses.token_loss(lm, hidden_BND, labels_BN, mask_BN)}

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        ids_B = sample_tokens(state.logits(), state.temperature, state.top_p, state.uniform())
        return Thought(lm.embed(ids_B), ids_B == lm.template.separator_id, ids_B)


class NoCot(Cot):
    name: ClassVar[str] = "no_cot"
    Config: ClassVar[type] = NoCotConfig

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        return dataclasses.replace(row, steps=[])

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return base.fixed_thought(state, torch.zeros_like(state.hidden), 0)
