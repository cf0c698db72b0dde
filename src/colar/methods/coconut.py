"""Coconut: the last hidden state is the next input (Hao et al. 2024, "Training Large Language Models to Reason in a
Continuous Latent Space", sections 3 and 4).

    stage 0    question ###   t1 t2 t3 | t4 t5 | t6     ###  answer EOS         three reasoning steps
    stage 1    question ###   h1 h2    | t4 t5 | t6     ###  answer EOS         n_latents_per_step = 2
    stage 2    question ###   h1 h2 h3 h4      | t6     ###  answer EOS
    last       question ###   h1 h2 h3 h4 h5 h6         ###  answer EOS         no steps are left, of however many

In stage k the first k steps are replaced by k * n_latents_per_step latents; h_i is the last hidden state (after the
final norm) at the position before it, fed as it is. The loss is the cross-entropy of what is left in tokens,

    L = mean over (remaining steps, ###, answer, EOS) of -log p(token | question, h_1 .. h_n, tokens before),

and its gradient flows through all latents. At inference n_stages * n_latents_per_step latents are fed (6), then ###.

Departures. The two markers around the latents are this project's separators: one ### opens the latents, and one closes
latents and remaining steps together, so the last latent itself predicts the first remaining token (Coconut's code has
a marker of its own after the latents). Rows are averaged, each over its own tokens. The published code draws
an earlier stage now and then (`uniform_prob`); it is 0 in its GSM8k runs and not here. As in that code, latents do
not depend on how many steps a row has (`pad_latent_to_max`), and after the last counted stage comes one in which
all remaining steps go. Training forgets the optimiser's moments at each stage, as the paper does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from colar import checks
from colar.data.example import Example
from colar.methods import base, losses, thinking
from colar.methods.base import Batch, NoParams, Row
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
    cot_epochs: float = 0.0
    """Epochs of plain CoT (stage 0) before; 0 where the weights come from CoT-SFT (the paper: 6)."""

    def __post_init__(self) -> None:
        checks.check_number("method.n_latents_per_step", self.n_latents_per_step, 1, whole=True)
        checks.check_number("method.n_stages", self.n_stages, 1, whole=True)
        checks.check_number("method.epochs_per_stage", self.epochs_per_stage, 1e-6)
        checks.check_number("method.cot_epochs", self.cot_epochs, 0)

    @property
    def n_latents(self) -> int:
        """Latents at inference."""
        return self.n_stages * self.n_latents_per_step


class Coconut(base.Method):
    name: ClassVar[str] = "coconut"
    Config: ClassVar[type] = CoconutConfig
    thinks_in_latents: ClassVar[bool] = True

    @property
    def multiple_forwards(self) -> bool:
        return True

    def stage(self, epoch: float) -> int:
        """0 while plain CoT is trained, then 1 .. n_stages, and n_stages + 1 to the end."""
        since = epoch - self.config.cot_epochs
        if since < -1e-9:
            return 0
        # A boundary that is not a binary fraction must not fall a stage short.
        return 1 + int(min(since / self.config.epochs_per_stage, self.config.n_stages) + 1e-9)

    def last_stage(self) -> int:
        return int(self.config.n_stages) + 1

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = base.encode_row(template, example, NoParams(), "", rng.getrandbits(62))
        # The last stage has no steps left, however many the row has, and no more latents than the one before it.
        stage = self.stage(epoch)
        steps = [] if stage == self.last_stage() else row.steps[stage:]
        n_latents = min(stage, self.config.n_stages) * self.config.n_latents_per_step
        return replace(row, steps=steps, n_latents=n_latents)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: mean over the remaining steps and the answer of -log p(next token)."""
        ce_B, _ = self.ce_and_latents(lm, batch)
        return {"ce": ce_B}

    def ce_and_latents(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The cross-entropy (B,), and the latents that were fed for it, (B, K, D): a row's first `n_latents`."""
        # After the question: each row's latents, its remaining steps, its answer. The latents' columns are blank
        # here, and filled one by one while the sequence is unrolled.
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
        # A latent is no label: the data do not say what it should be.
        labelled_BN = real_BN & ~ragged.length_mask(batch.n_latents, tail_BN.shape[1])
        return losses.token_loss(lm, hidden_BND, tail_BN, labelled_BN), fed_BKD

    @torch.no_grad()
    def training_thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The model's own latents, then what is left of the steps."""
        chain_BTD = lm.embed(batch.chain_ids)
        K = int(batch.n_latents.max())
        blank_BKD = chain_BTD.new_zeros(len(batch.n_latents), K, lm.width)
        counts_B = batch.n_latents + batch.chain_lengths
        tail_BND = ragged.pack((blank_BKD, batch.n_latents), (chain_BTD, batch.chain_lengths))
        real_BN = ragged.length_mask(counts_B, tail_BND.shape[1])
        _, _, fed_BKD = unroll(lm, batch, tail_BND, real_BN, lambda hidden_BD: hidden_BD)
        return torch.cat([fed_BKD, tail_BND[:, K:]], dim=1), counts_B

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.fixed_thought(state, state.hidden, self.config.n_latents)
