"""Coconut: the last hidden state is the next input (Hao et al. 2024, "Training Large Language Models to Reason in a
Continuous Latent Space", sections 3 and 4).

    CoT        question ###   t1 t2 t3 | t4 t5 | t6     ###  answer EOS         three reasoning steps
    stage 1    question ###   h1 h2    | t4 t5 | t6     ###  answer EOS         n_latents_per_step = 2
    stage 2    question ###   h1 h2 h3 h4      | t6     ###  answer EOS
    last       question ###   h1 h2 h3 h4 h5 h6         ###  answer EOS         no steps are left, of however many

In stage k the first k steps are replaced by k * n_latents_per_step latents; h_i is the last hidden state (after the
final norm) at the position before it, fed unchanged. The loss is the cross-entropy of the segments that remain tokens,

    L = mean over (remaining steps, ###, answer, EOS) of -log p(token | question, h_1 .. h_n, tokens before),

and its gradient flows through all latents. At inference n_stages * n_latents_per_step latents are fed (6), then ###.

Departures. The two markers around the latents are this project's separators: one ### opens the latents, and one closes
latents and remaining steps together, so the last latent itself predicts the first remaining token (Coconut's code has
a marker of its own after the latents). Each row's loss is a mean over its own tokens. The published code can draw
an earlier stage at random (`uniform_prob`, 0 in its GSM8k runs), which is not implemented here. As in that code, the
number of latents does not depend on the row's number of steps (`pad_latent_to_max`), and the last counted stage is
followed by one that removes all remaining steps. The optimiser's moments are reset at each stage, as in the paper. Its
epochs of plain CoT are here a run of the method `cot` before this one.

Shape suffixes: B rows, T positions, N tail, K latents, D width.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from colar import checks
from colar.data.example import Example
from colar.methods import base, losses, thinking
from colar.methods.base import Batch, Row
from colar.methods.thinking import ThinkState, Thought
from colar.methods.unroll import unroll
from colar.model.latent_lm import LatentLM
from colar.ops import ragged
from colar.template.template import Template


@dataclass(frozen=True)
class CoconutConfig:
    """The curriculum; defaults are those of its paper's GSM8k runs."""

    n_latents_per_step: int = 2
    """Latents that replace a step (the paper's c), 1 or more."""
    n_stages: int = 3
    """Stages in which a step more is replaced, 1 or more; one more follows, in which no steps are left."""
    epochs_per_stage: float = 3.0
    """Epochs in each of those stages, above 0; the last one lasts until training ends."""

    def __post_init__(self) -> None:
        checks.check_number("method.n_latents_per_step", self.n_latents_per_step, 1, whole=True)
        checks.check_number("method.n_stages", self.n_stages, 1, whole=True)
        checks.check_number("method.epochs_per_stage", self.epochs_per_stage, 1e-6)

    @property
    def n_latents(self) -> int:
        """Latents at inference."""
        return self.n_stages * self.n_latents_per_step


class Coconut(base.Method):
    name: ClassVar[str] = "coconut"
    Config: ClassVar[type] = CoconutConfig
    thinks_in_latents: ClassVar[bool] = True
    multiple_forwards = True

    def stage(self, epoch: float) -> int:
        """1 .. n_stages, then n_stages + 1 until training ends."""
        # The rounding error of a boundary that is no binary fraction must not yield the stage before it.
        return 1 + int(min(epoch / self.config.epochs_per_stage, self.config.n_stages) + 1e-9)

    def last_stage(self) -> int:
        return int(self.config.n_stages) + 1

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        # The last stage has no steps, however many the row has, and as many latents as the stage before it.
        stage = self.stage(epoch)
        steps = [] if stage == self.last_stage() else row.steps[stage:]
        n_latents = min(stage, self.config.n_stages) * self.config.n_latents_per_step
        return replace(row, steps=steps, n_latents=n_latents)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: mean over the remaining steps and the answer of -log p(next token)."""
        ce_B, _ = self.ce_and_latents(lm, batch)
        return {"ce": ce_B}

    def ce_and_latents(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The cross-entropy (B,), and the latents that were fed, (B, K, D): a row has the first `n_latents` of them."""
        # After the question come each row's latents, its remaining steps and its answer. The latents' columns are
        # blank here, and are filled one by one while the sequence is unrolled.
        K = int(batch.n_latents.max())
        blank_BK = batch.seeds.new_zeros(len(batch.seeds), K)
        blank = (blank_BK, batch.n_latents)
        tail_BN = ragged.pack(blank, batch.chain, batch.answer, multiple=ragged.PAD_TO)
        tail_BND = lm.embed(tail_BN)
        lengths_B = batch.n_latents + batch.chain_lengths + batch.answer_lengths
        real_BN = ragged.length_mask(lengths_B, tail_BN.shape[1])
        sequence, first_BKD, fed_BKD = unroll(lm, batch, tail_BND, real_BN, lambda hidden_BD: hidden_BD)
        rest_BTD = sequence.feed(tail_BND[:, K:], real_BN[:, K:])

        # Column i is predicted one position before it.
        hidden_BND = torch.cat([first_BKD, rest_BTD], dim=1)[:, :-1]
        # A latent is no label, because the data hold no target for it.
        labelled_BN = real_BN & ~ragged.length_mask(batch.n_latents, tail_BN.shape[1])
        return losses.token_loss(lm, hidden_BND, tail_BN, labelled_BN), fed_BKD

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.fixed_thought(state, state.hidden, self.config.n_latents)
