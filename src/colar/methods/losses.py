"""Cross-entropy of rows of different lengths: the mean within each row first, logits only where there is a label.

A row's loss must not depend on its batch mates, so no mean is taken over the batch here.

Shape suffixes: B rows, N positions, A answer, G labels of a position, M labelled positions and L
thoughts of all rows, X positions, D width, V vocabulary.
"""

import math

import torch
from torch import Tensor

from colar.methods.base import Batch
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged


def cross_entropy(lm: LatentLM, hidden_BND: Tensor, labels_BNG: Tensor, weights_BNG: Tensor) -> Tensor:
    """Mean over each row's labelled positions of sum_g w_g * -log p(label_g), (B,).

    A position is labelled if its weights are not all 0; they then sum to 1. One label of weight 1 is the
    usual cross-entropy. Logits are computed only at labelled positions, a chunk at a time.
    """
    mask_BN = weights_BNG.sum(-1) > 0
    hidden_MD = ragged.take_masked(hidden_BND, mask_BN)
    labels_MG, weights_MG = (
        devices.beside(ragged.take_masked(values, mask_BN), hidden_MD) for values in (labels_BNG, weights_BNG)
    )
    (losses_M,) = lm.reduce_logits(position_losses, hidden_MD, labels_MG, weights_MG)
    return ragged.row_mean(ragged.put_masked(losses_M, mask_BN), mask_BN)


def position_losses(logits_MV: Tensor, labels_MG: Tensor, weights_MG: Tensor) -> tuple[Tensor]:
    """sum_g w_g * -log p(label_g) at each position, (M,)."""
    log_probs_MV = logits_MV.log_softmax(-1)
    return (-(log_probs_MV.gather(1, labels_MG) * weights_MG).sum(-1),)


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


def continue_logps(logits_LV: Tensor, temperature_L: Tensor, separator_id: int) -> tuple[Tensor]:
    """For `lm.reduce_logits`: log(1 - p[###]) of each thought, (L,), the log-prob that it follows instead of a stop."""
    scaled_LV = logits_LV / temperature_L[:, None]
    # As the mass of all other tokens, not as 1 - p, which would be inexact where stopping is nearly certain.
    return (without(scaled_LV, separator_id).logsumexp(-1) - scaled_LV.logsumexp(-1),)


def without(logits_XV: Tensor, separator_id: int) -> Tensor:
    """The logits given that the separator is not chosen, which has -inf."""
    closing = devices.constant((separator_id,), logits_XV.device)
    return logits_XV.index_fill(1, closing, -math.inf)


def chain_loss(lm: LatentLM, hidden_BTD: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the chain and the answer, the closing separator and EOS included, (B,).

    `hidden_BTD` are the hidden states of question, chain and answer, fed end to end.
    """
    # The question is not labelled, so hidden states are taken from its last position on. The separator that opens the
    # answer is a label (the decision to stop), and so is the answer's last token, EOS.
    labels_BN = ragged.pack(batch.chain, batch.answer)
    hidden_BND = ragged.take_from(hidden_BTD, batch.question_lengths - 1, labels_BN.shape[1])
    mask_BN = ragged.length_mask(batch.chain_lengths + batch.answer_lengths, labels_BN.shape[1])
    return token_loss(lm, hidden_BND, labels_BN, mask_BN)


def hidden_around(lm: LatentLM, batch: Batch, latents_BKD: Tensor, counts_B: Tensor) -> Tensor:
    """Hidden states (B, T, D) of questions, latents (`counts_B` per row) and answers, fed end to end."""
    question = (lm.embed(batch.question_ids), batch.question_lengths)
    answer = (lm.embed(batch.answer_ids), batch.answer_lengths)
    fed_BTD = ragged.pack(question, (latents_BKD, counts_B), answer, multiple=ragged.PAD_TO)
    # Rows of one example at several speeds share the start of their question, which is then computed once.
    lengths_B = batch.question_lengths + counts_B + batch.answer_lengths
    return lm.hidden_of_rows(fed_BTD, batch.question, lengths_B)


def answer_loss(lm: LatentLM, hidden_BAD: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the answer after the closing separator, EOS included, (B,).

    `hidden_BAD` are the hidden states of the answer segment. The separator is no label: this loss is for methods with
    a fixed number of thoughts, which feed it in any case.
    """
    # The segment begins with the closing separator, so position i predicts answer token i + 1.
    labels_BN = batch.answer_ids[:, 1:]
    mask_BN = ragged.length_mask(batch.answer_lengths - 1, labels_BN.shape[1])
    return token_loss(lm, hidden_BAD[:, : labels_BN.shape[1]], labels_BN, mask_BN)


def log1m_exp(logps: Tensor) -> Tensor:
    """log(1 - p) from log p."""
    # `expm1` keeps the digits that 1 - exp would lose where p is nearly 1. A p that float32 rounds to 1 has a log of 0,
    # so that any other draw would be impossible.
    least = torch.finfo(logps.dtype).eps / 2
    return torch.log(-torch.expm1(logps.clamp(max=-least)))
