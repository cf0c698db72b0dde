"""Pause: learned embeddings that give the model time (Goyal et al. 2024, "Think before you speak: Training Language
Models With Pause Tokens", section 3).

    question ###   p1 p2 .. pk   ###  answer EOS

    L = mean over (answer, EOS) of -log p(token | question, p_1 .. p_k, ###)

There is no chain, in training or at inference. The method measures the value of k more forward passes by themselves,
which a latent method has to beat. The model's predictions at the pauses are not trained.

Departures. The paper appends ten copies of one <pause> token; here there are as many as Coconut and Distill have
latents (6), each with an embedding of its own. They are learnt as multiples of
sigma_e, the standard deviation of the embedding module's output, so that they start, and move, on the scale of
embeddings. The paper pauses in pretraining too; this is its fine-tuning alone ("StdPT_PauseFT").
"""

from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, cast

from torch import Tensor, nn

from colar import checks
from colar.data.example import Example
from colar.methods import base, losses, thinking
from colar.methods.base import Batch, Row
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import ragged
from colar.template.template import Template


@dataclass(frozen=True)
class PauseConfig:
    """Number of pauses."""

    n_pauses: int = 6
    """Embeddings between the separators, 1 or more (the paper: 10)."""
    sigma_e: float | None = None
    """Scale of the embeddings, above 0; null: measured on the backbone at the start and kept here."""

    def __post_init__(self) -> None:
        checks.check_number("method.n_pauses", self.n_pauses, 1, whole=True)
        base.check_sigma_e(self.sigma_e)


class Pause(base.ScaledMethod):
    name: ClassVar[str] = "pause"
    Config: ClassVar[type] = PauseConfig
    thinks_in_latents: ClassVar[bool] = True

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        return {"pauses": nn.Embedding(self.config.n_pauses, lm.width)}  # standard normal

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        return replace(row, steps=[], n_latents=self.config.n_pauses)

    def pauses(self, lm: LatentLM) -> Tensor:
        """The embeddings that are fed, (K, D)."""
        return self.sigma_e * cast(Tensor, lm.extra["pauses"].weight)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: mean over the answer of -log p(next token)."""
        pauses_BKD = self.pauses(lm).expand(len(batch.seeds), -1, -1)
        hidden_BTD = losses.hidden_around(lm, batch, pauses_BKD, batch.n_latents)
        # Only the answer is labelled: predictions at a pause are not trained.
        separator_B = batch.question_lengths + batch.n_latents
        hidden_BAD = ragged.take_from(hidden_BTD, separator_B, batch.answer_ids.shape[1])
        return {"ce": losses.answer_loss(lm, hidden_BAD, batch)}

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        # A row that is done still needs some embedding here; it is ignored.
        at_B = state.step.clamp(max=self.config.n_pauses - 1)
        return thinking.fixed_thought(state, self.pauses(lm)[at_B], self.config.n_pauses)
