"""Explicit chain of thought, and its control without any.

`cot`: the row is [question ###][all reasoning tokens][### answer EOS] and the loss the mean cross-entropy over
the reasoning and the answer, both separators' decisions included (where to stop is learnt). It thinks by
embedding the token it samples, and is done when that token is the separator.

With a `soft_temperature` above 0 it thinks softly, without any other training (Zhang et al. 2025, "Soft Thinking:
Unlocking the Reasoning Potential of LLMs in Continuous Concept Space", arXiv 2505.15778, section 3): it feeds the mean
of the likeliest tokens' embeddings, weighted by their probabilities, and is done when the separator is the likeliest.
The likeliest token stands for such a thought where a chain is shown, as in the authors' code.

    z = sum over v of p(v) e(v) / sum over v of p(v)        p = softmax(logits / soft_temperature)
    v: of the `SOFT_TOKENS` likeliest those up to a mass of `SOFT_TOP_P`, both as in its authors' README

Departures. Thinking is always greedy, and a request's decoding is the answer's alone: in the authors' code decoding at
temperature 0 feeds the likeliest token, and is CoT. There is no "cold stop", which ends the thinking after
256 steps and more of low entropy: a trained chain is certain of nearly all of its tokens, and ends with its separator.

`no_cot`: the same row with an empty chain: the answer straight from the question.

Both can be trained by reinforcement: an action is a token, of the chain, the stop or the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from colar import checks
from colar.data.example import Example
from colar.methods import base, losses, thinking
from colar.methods.base import Batch, NoParams, Row
from colar.methods.rollouts import LatentLogprob, Rollouts, Scores, ThoughtActions, score_actions
from colar.methods.soft_tokens import soft_token
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged
from colar.ops.sampling import sample_tokens, token_logps
from colar.template.template import Template

SOFT_TOKENS = 10
"""Tokens that are mixed into a soft thought, at most."""
SOFT_TOP_P = 0.95
"""Mass of the likeliest tokens at which no more are mixed."""


@dataclass(frozen=True)
class CotParams:
    """Per-request values."""

    soft_temperature: float = 0
    """Soft Thinking: feed the likeliest tokens' embeddings, mixed by their probabilities at this temperature (its
    paper: 0.6). 0, where the sampled token is fed, or from 0.01 to 100."""

    def __post_init__(self) -> None:
        value = self.soft_temperature
        sane = checks.is_number(value) and (value == 0 or 0.01 <= value <= 100)
        checks.check_holds("soft_temperature", sane, value, "0, or from 0.01 to 100")


@dataclass(frozen=True)
class CotConfig:
    """CoT has no keys, and neither has its control."""


class Cot(base.Method):
    name: ClassVar[str] = "cot"
    Config: ClassVar[type] = CotConfig
    Params: ClassVar[type] = CotParams

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        return base.encode_row(template, example, self.Params(), "", rng.getrandbits(62))

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: mean over L_r + L_a labelled positions of -log p(next token)."""
        ids_BT = ragged.pack(batch.question, batch.chain, batch.answer, multiple=ragged.PAD_TO)
        hidden_BTD = lm.hidden_of_rows(lm.embed(ids_BT), batch.question, batch.positions())
        return {"ce": losses.chain_loss(lm, hidden_BTD, batch)}

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        ids_B = sample_tokens(
            state.logits(), state.temperature, state.top_p, state.uniform(), state.branches.ways
        )
        soft_B = soft_temperature(state)
        if soft_B is not None:
            # The likeliest token stands for a soft thought, and decides the stop.
            ids_B = torch.where(soft_B > 0, state.logits().argmax(-1), ids_B)
        embeds_BD = lm.embed(ids_B)
        if soft_B is not None:
            temperature_B = torch.where(soft_B > 0, soft_B, 1)
            mixed_BD = soft_token(lm, state.logits(), SOFT_TOKENS, temperature_B, SOFT_TOP_P)
            embeds_BD = torch.where(soft_B[:, None] > 0, mixed_BD.to(embeds_BD.dtype), embeds_BD)
        info = {}
        if state.wants_info:
            info["logp"] = token_logps(state.logits(), state.temperature, ids_B)
        return Thought(embeds_BD, ids_B == lm.template.closing_id, ids_B, info)

    # Reinforcement: a thought is a token like any other.

    has_density: ClassVar[bool] = False

    def logps(self, lm: LatentLM, rollouts: Rollouts, latent_logprob: LatentLogprob) -> Scores:
        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            ids_L = devices.beside(thoughts.ids, thoughts.hidden)
            (logps_L,) = lm.reduce_logits(losses.chosen_logps, thoughts.hidden, ids_L, thoughts.temperature)
            return logps_L, {}

        return score_actions(lm, rollouts, thought_logps)

    def sampled_logps(
        self, info: Mapping[str, Tensor], stopped: Tensor, latent_logprob: LatentLogprob
    ) -> Tensor:
        return info["logp"]


def soft_temperature(state: ThinkState) -> Tensor | None:
    """Each row's, (B,), 0 where it feeds tokens; None where all rows do, or their method has no such value."""
    soft_B = state.params.get("soft_temperature")
    if soft_B is None or state.branches.largest("soft_temperature") == 0:
        return None
    return soft_B


class NoCot(Cot):
    name: ClassVar[str] = "no_cot"
    Params: ClassVar[type] = NoParams

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        return dataclasses.replace(row, steps=[])

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.no_thought(state)
