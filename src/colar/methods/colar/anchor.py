"""What the anchored head's mean starts from: the embedding that the LM head expects the next group's tokens to have.

    p = softmax of the logits without ###,    expected = sum over the vocabulary of p(token) E(token)

Made of the same logits as the cross-entropy or the log-probs of a position, while a chunk of them is there.

Shape suffixes: B rows, N positions, G labels of a position, M labelled positions and L latents of all rows, D width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from colar.methods import losses
from colar.methods.colar.heads import expected_embedding, without_separator
from colar.model.latent_lm import LatentLM

Expected = Callable[[Tensor], Tensor]
"""Logits (L, V) -> embeddings (L, D)."""


def expected_by(lm: LatentLM) -> Expected:
    """The function that makes expected embeddings of `lm`'s logits. No gradient reaches the embeddings."""
    vocabulary_VD = lm.vocabulary().detach()
    separator_id = lm.template.separator_id

    def expected(logits_LV: Tensor) -> Tensor:
        return expected_embedding(without_separator(logits_LV, separator_id), vocabulary_VD)

    return expected


def loss_and_anchor(
    lm: LatentLM,
    hidden_BND: Tensor,
    labels_BNG: Tensor,
    weights_BNG: Tensor,
    latent_BN: Tensor,
    expected: Expected,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy (B,), and the expected embedding at each latent's position, (L, D), of the same logits."""

    def reduce(
        logits_MV: Tensor, labels_MG: Tensor, weights_MG: Tensor, latent_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        (losses_M,) = losses.position_losses(logits_MV, labels_MG, weights_MG)
        expected_LD = expected(logits_MV[latent_M])
        # A row for each position: chunks are joined position by position.
        blank_MD = expected_LD.new_zeros(len(logits_MV), expected_LD.shape[1])
        return losses_M, blank_MD.masked_scatter(latent_M[:, None], expected_LD)

    labelled_BN = losses.labelled(weights_BNG)
    latent_M = latent_BN[labelled_BN]
    losses_M, expected_MD = lm.reduce_logits(
        reduce, hidden_BND[labelled_BN], labels_BNG[labelled_BN], weights_BNG[labelled_BN], latent_M
    )
    return losses.mean_of_rows(losses_M, labelled_BN), expected_MD[latent_M]
