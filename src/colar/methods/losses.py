"""Cross-entropy of rows of different lengths: the mean within each row first, logits only where there is a label.

A row's loss must not depend on who shares its batch, so no mean is taken over the batch here.

Shape suffixes: B rows, N positions, G labels of a position, M labelled positions of all rows, D width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from colar.model.latent_lm import LatentLM
from colar.ops.ragged import row_mean


def labelled(weights_BNG: Tensor) -> Tensor:
    """(B, N) bool: the positions that have a label."""
    return weights_BNG.sum(-1) > 0


def cross_entropy(lm: LatentLM, hidden_BND: Tensor, labels_BNG: Tensor, weights_BNG: Tensor) -> Tensor:
    """Mean over each row's labelled positions of sum_g w_g * -log p(label_g), (B,).

    A position is labelled where its weights are not all 0; there they sum to 1. One label of weight 1 is the
    usual cross-entropy. Logits are made only at labelled positions.
    """
    logits_MV = lm.logits(hidden_BND[labelled(weights_BNG)])
    return cross_entropy_from(logits_MV, labels_BNG, weights_BNG)


def cross_entropy_from(logits_MV: Tensor, labels_BNG: Tensor, weights_BNG: Tensor) -> Tensor:
    """`cross_entropy` from the logits of the M labelled positions, row after row."""
    mask_BN = labelled(weights_BNG)
    labels_MG = labels_BNG[mask_BN]
    weights_MG = weights_BNG[mask_BN]
    log_probs_MV = logits_MV.log_softmax(-1)
    losses_M = -(log_probs_MV.gather(1, labels_MG) * weights_MG).sum(-1)
    # Back into rows: the mean is taken over a row's own positions.
    losses_BN = losses_M.new_zeros(mask_BN.shape).masked_scatter(mask_BN, losses_M)
    return row_mean(losses_BN, mask_BN)


def token_loss(lm: LatentLM, hidden_BND: Tensor, ids_BN: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean over each row's masked positions of -log p(token), (B,)."""
    return cross_entropy(lm, hidden_BND, ids_BN[..., None], mask_BN[..., None].float())
