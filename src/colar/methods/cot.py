"""Explicit chain of thought, and its control without any.

`cot`: the row is [question ###][all reasoning tokens][### answer EOS] and the loss is the mean cross-entropy over
the reasoning and the answer, with the closing separator and EOS among the labels, so that stopping is learnt. Thinking
feeds the embedding of each sampled token, and is done when that token is the separator.

`no_cot`: the same row with an empty chain: the answer directly follows the question.

Both can be trained by reinforcement: an action is one token, of the chain, the stop or the answer.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from torch import Tensor

from colar.data.example import Example
from colar.methods import base, losses, thinking
from colar.methods.base import Batch, Row
from colar.methods.rollouts import Rollouts, Scores, ThoughtActions, score_actions
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged
from colar.template.template import Template


@dataclass(frozen=True)
class CotConfig:
    """CoT has no keys, and neither has its control."""


class Cot(base.Method):
    name: ClassVar[str] = "cot"
    Config: ClassVar[type] = CotConfig

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: mean over L_r + L_a labelled positions of -log p(next token)."""
        ids_BT = ragged.pack(batch.question, batch.chain, batch.answer, multiple=ragged.PAD_TO)
        hidden_BTD = lm.hidden_of_rows(lm.embed(ids_BT), batch.question, batch.positions())
        return {"ce": losses.chain_loss(lm, hidden_BTD, batch)}

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.token_thought(lm, state, lm.template.separator_id)

    # Reinforcement: a thought is a token like any other.

    def logps(self, lm: LatentLM, rollouts: Rollouts) -> Scores:
        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            ids_L = devices.beside(thoughts.ids, thoughts.hidden)
            (logps_L,) = lm.reduce_logits(losses.chosen_logps, thoughts.hidden, ids_L, thoughts.temperature)
            return logps_L, {}

        return score_actions(lm, rollouts, thought_logps)

    def sampled_logps(self, info: Mapping[str, Tensor], stopped: Tensor) -> Tensor:
        return info["logp"]


class NoCot(Cot):
    name: ClassVar[str] = "no_cot"

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        return dataclasses.replace(row, steps=[])

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.fixed_thought(state, state.hidden, 0)
