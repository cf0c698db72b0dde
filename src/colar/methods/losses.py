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
    usual cross-entropy. Logits are made only at labelled positions, a chunk at a time.
    """
    mask_BN = labelled(weights_BNG)
    (losses_M,) = lm.reduce_logits(
        position_losses, hidden_BND[mask_BN], labels_BNG[mask_BN], weights_BNG[mask_BN]
    )
    return mean_of_rows(losses_M, mask_BN)


def position_losses(logits_MV: Tensor, labels_MG: Tensor, weights_MG: Tensor) -> tuple[Tensor]:
    """sum_g w_g * -log p(label_g) at each position, (M,)."""
    log_probs_MV = logits_MV.log_softmax(-1)
    return (-(log_probs_MV.gather(1, labels_MG) * weights_MG).sum(-1),)


def mean_of_rows(values_M: Tensor, mask_BN: Tensor) -> Tensor:
    """The mean over each row's own positions, (B,), of values at the positions of the mask, row after row."""
    # Indexing by a mask and `masked_scatter` go through it in the same order, row by row.
    values_BN = values_M.new_zeros(mask_BN.shape).masked_scatter(mask_BN, values_M)
    return row_mean(values_BN, mask_BN)


def token_loss(lm: LatentLM, hidden_BND: Tensor, ids_BN: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean over each row's masked positions of -log p(token), (B,)."""
    return cross_entropy(lm, hidden_BND, ids_BN[..., None], mask_BN[..., None].float())


def chosen_logps(logits_XV: Tensor, ids_X: Tensor, temperature_X: Tensor | None = None) -> tuple[Tensor]:
    """For `lm.reduce_logits`: log-prob of an id at each position, (X,), at its temperature; 1 by default."""
    return (log_probs(logits_XV, temperature_X).gather(1, ids_X[:, None])[:, 0],)


def log_probs(logits_XV: Tensor, temperature_X: Tensor | None) -> Tensor:
    """The log-softmax of each position's logits, (X, V), at its temperature; 1 by default."""
    if temperature_X is not None:
        logits_XV = logits_XV / temperature_X[:, None]
    return logits_XV.log_softmax(-1)
