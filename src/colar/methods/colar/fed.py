"""What training feeds between the separators, and where its labels stand: the same for all heads.

Shape suffixes: B rows, T tokens, K latents, A answer, G labels of a position, N labelled positions of a row, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colar.methods.base import Batch
from colar.model.latent_lm import LatentLM
from colar.ops import groups, ragged


@dataclass(frozen=True)
class Fed:
    """The latents of a batch's chains: (B, K, D), and how many tokens each stands for, (B, K); 0 behind the last."""

    latents_BKD: Tensor
    sizes_BK: Tensor

    @property
    def counts_B(self) -> Tensor:
        """The latents of each row, (B,)."""
        return groups.counts(self.sizes_BK)

    def hidden(self, lm: LatentLM, batch: Batch, n: int) -> Tensor:
        """Hidden states (B, n, D) from the question's last position on: the first label is predicted there."""
        question = (lm.embed(batch.question_ids), batch.question_lengths)
        answer = (lm.embed(batch.answer_ids), batch.answer_lengths)
        fed_BTD = ragged.pack(question, (self.latents_BKD, self.counts_B), answer, multiple=ragged.PAD_TO)
        lengths_B = batch.question_lengths + self.counts_B + batch.answer_lengths
        # One example at several speeds has one question.
        starts = (batch.question_ids, batch.question_lengths)
        hidden_BTD = lm.hidden_of_rows(fed_BTD, starts, lengths_B)
        return ragged.shift(hidden_BTD, batch.question_lengths - 1, n)


def followed_by_answer(
    ids_BKG: Tensor, weights_BKG: Tensor, counts_B: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """The labels of a row's groups and then of its answer, (B, N, G), and their weights (numbers or bools)."""
    # The answer's labels get as many places as a group's, so that the two can stand in one row.
    G = max(1, ids_BKG.shape[-1])
    answer_BA1 = batch.answer_ids[..., None]
    answer_BAG = nn.functional.pad(answer_BA1, (0, G - 1))
    one_BA1 = torch.ones_like(answer_BA1, dtype=weights_BKG.dtype)
    answer_weights_BAG = nn.functional.pad(one_BA1, (0, G - 1))
    if ids_BKG.shape[-1] == 0:  # no row of the batch has any reasoning
        ids_BKG = answer_BAG[:, :0]
        weights_BKG = answer_weights_BAG[:, :0]
    labels_BNG = ragged.pack((ids_BKG, counts_B), (answer_BAG, batch.answer_lengths))
    weights_BNG = ragged.pack((weights_BKG, counts_B), (answer_weights_BAG, batch.answer_lengths))
    return labels_BNG, weights_BNG
