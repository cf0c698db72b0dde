"""Soft tokens: the likeliest tokens' embeddings, mixed by their probabilities.

    likeliest tokens     7     12     9   | 40 ...        n = 3
    probability         .60   .25   .05   | .04
    weight of each      .67   .28   .05   |  0            they sum to 1
    soft token          .67 e(7) + .28 e(12) + .05 e(9)

A function of the row's logits alone. The n likeliest carry nearly all of a trained model's probability; to mix the
whole vocabulary would read its table of embeddings at every step.

Shape suffixes: B rows, V vocabulary, N likeliest tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colar.model.latent_lm import LatentLM


def soft_token(
    lm: LatentLM, logits_BV: Tensor, n: int, temperature_B: Tensor | None = None, top_p: float = 1.0
) -> Tensor:
    """Mix the n likeliest tokens of each row, those of its nucleus alone: (B, D), as the embedding module gives them.

    Temperatures, 1 by default, are above 0. The nucleus holds the likeliest tokens up to a mass of `top_p`.
    """
    if temperature_B is not None:
        logits_BV = logits_BV / temperature_B[:, None].to(logits_BV.dtype)
    log_mass_B1 = logits_BV.logsumexp(-1, keepdim=True)
    likeliest = logits_BV.topk(min(n, logits_BV.shape[1]))
    probability_BN = (likeliest.values - log_mass_B1).exp()
    before_BN = probability_BN.cumsum(-1) - probability_BN
    nucleus_BN = torch.where(before_BN < top_p, probability_BN, 0)
    weight_BN = nucleus_BN / nucleus_BN.sum(-1, keepdim=True)
    embeds_BND = lm.embed(likeliest.indices)
    # The weights are float32: half-precision embeddings are added up in it too.
    soft_BD: Tensor = (weight_BN[..., None] * embeds_BND).sum(1)
    return soft_BD.to(embeds_BND.dtype)
