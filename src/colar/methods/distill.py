"""Distill: a teacher that thinks in tokens and a student that thinks in latents, in one model (CODI; Shen et al. 2025,
"CODI: Compressing Chain-of-Thought into Continuous Space via Self-Distillation", section 3).

    teacher    question ###   t1 t2 t3 t4   ###  answer EOS
    student    question ###   z1 .. z6      ###  answer EOS        z_i = projection(last hidden state before it)
                                             ^ aligned here, in every layer: the token before the answer

    L = L_student + L_teacher + align_weight * L_align
    L_student = mean over (answer, EOS) of -log p(token | question, z_1 .. z_n, ###)
    L_teacher = mean over (chain, ###, answer, EOS) of -log p(token)
    L_align   = mean over layers l and D of  smooth-L1(s_l, stop-gradient(t_l)) / std(t_l)

where s_l and t_l are the student's and the teacher's hidden states at that token after layer l. The gradient flows
through the latents; that of L_align does not reach the teacher. The teacher is one forward without a cache, the student
a sequence with its own cache. The projection is Linear, GELU, Linear, LayerNorm, as in CODI's code.

The recipe decides whether training starts from CoT weights (`model.init_from`, as in the CoLaR paper) or runs in one
stage from the backbone (as in CODI).

Departures. The token before the answer is the closing separator, where CODI has the colon of "The answer is:". std(t_l)
is over the row's own D values, CODI's over the batch's, because a row's loss must not depend on its batch mates. CODI's
mean over layers includes the embeddings, which are left out here because both rows have the same token there. Each loss
is averaged within its row.
"""

from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colar import checks
from colar.data.example import Example
from colar.methods import base, losses, thinking
from colar.methods.base import Batch, Row
from colar.methods.thinking import ThinkState, Thought
from colar.methods.unroll import Unrolled, unroll
from colar.model.latent_lm import LatentLM
from colar.ops import ragged
from colar.template.template import Template


@dataclass(frozen=True)
class DistillConfig:
    """CODI's choices for GPT-2; for Llama-3.2-1B its align_weight is 20."""

    n_latents: int = 6
    """Latents of the student, 1 or more."""
    align_weight: float = 1.0
    """Weight of the alignment (gamma), 0 or more."""

    def __post_init__(self) -> None:
        checks.check_number("method.n_latents", self.n_latents, 1, whole=True)
        checks.check_number("method.align_weight", self.align_weight, 0)


class Distill(base.Method):
    name: ClassVar[str] = "distill"
    Config: ClassVar[type] = DistillConfig
    thinks_in_latents: ClassVar[bool] = True
    multiple_forwards = True

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        D = lm.width
        projection = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.LayerNorm(D))
        return {"projection": projection}

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
        # As in CODI: the last step's result is the answer, and a teacher that can copy it has nothing to teach.
        return replace(row, steps=row.steps[:-1], n_latents=self.config.n_latents)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """student, teacher, align: the three terms."""
        teacher_B, target_LBD = self._teacher(lm, batch)
        student_B, aligned_LBD = self._student(lm, batch)
        align_B = self.config.align_weight * alignment(aligned_LBD, target_LBD)
        return {"student": student_B, "teacher": teacher_B, "align": align_B}

    def positions(self, batch: Batch) -> Tensor:
        # The teacher's row has the chain, and the student's the latents; both have question and answer.
        return batch.positions() + batch.question_lengths + batch.answer_lengths

    def _teacher(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The teacher's cross-entropy (B,), and its hidden states at the closing separator, (B, D) for each layer."""
        ids_BT = ragged.pack(batch.question, batch.chain, batch.answer, multiple=ragged.PAD_TO)
        layers = lm.layers(lm.embed(ids_BT))
        # The closing separator is fed right after the chain; the student is aligned with the teacher at it.
        separator_B = batch.question_lengths + batch.chain_lengths
        at_separator = [ragged.take_from(layer_BTD, separator_B, 1)[:, 0] for layer_BTD in layers]
        return losses.chain_loss(lm, layers[-1], batch), at_separator

    def _student(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The same for the student, whose only labels are the answer's."""
        sequence, _, _ = self._unroll(lm, batch)
        # The answer segment begins with the closing separator, so the two are aligned at its first column.
        answer_BA = ragged.pack(batch.answer, multiple=ragged.PAD_TO)
        real_BA = ragged.length_mask(batch.answer_lengths, answer_BA.shape[1])
        layers = sequence.feed_layers(lm.embed(answer_BA), real_BA)
        return losses.answer_loss(lm, layers[-1], batch), [layer_BAD[:, 0] for layer_BAD in layers]

    def _unroll(self, lm: LatentLM, batch: Batch) -> tuple[Unrolled, Tensor, Tensor]:
        """Feed the questions, then the student's own latents, the same number in every row."""
        n = self.config.n_latents
        # Only its shape and dtype are used: every row has n latents, so none of these columns is fed.
        blank_BKD = lm.embed(batch.seeds.new_zeros(len(batch.seeds), n))
        real_BK = ragged.length_mask(batch.n_latents, n)
        return unroll(lm, batch, blank_BKD, real_BK, lambda hidden_BD: self.project(lm, hidden_BD))

    def project(self, lm: LatentLM, hidden_BD: Tensor) -> Tensor:
        """The latent that a hidden state makes, (B, D)."""
        module = lm.extra["projection"]
        # A method's modules are float32, also on a half-precision backbone.
        projected: Tensor = module(hidden_BD.to(next(module.parameters()).dtype))
        return projected

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.fixed_thought(state, self.project(lm, state.hidden), self.config.n_latents)


def alignment(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Distance between two lists of hidden states (B, D), mean over layers and D, (B,); no gradient to `teacher`."""
    by_layer = []
    for student_BD, teacher_BD in zip(student, teacher, strict=True):
        target_BD = teacher_BD.detach().float()
        loss_B = F.smooth_l1_loss(student_BD.float(), target_BD, reduction="none").mean(-1)
        # Unscaled, a layer with large states would outweigh the others.
        by_layer.append(loss_B / target_BD.std(-1))
    return torch.stack(by_layer).mean(0)
