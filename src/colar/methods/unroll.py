"""Training through latents that are made of hidden states: a sequence that grows while it is computed.

    columns    . . q q #  |  h1   h2  |  t1   t2   ###  a   EOS         "." is padding, "#" the opening separator
    forwards       1      |  2    3   |  4
                             h1 is made of the hidden state at "#", h2 of the one at h1, ...

Questions are padded on the LEFT, so that all rows take their first latent at the same column and a layer's sliding
window, which counts columns, counts positions. Gradients flow through every latent to the question.

A sequence has a key-value cache of its own: transformers' caches are mutable, and two sequences that shared one would
read each other's thoughts. Under gradient checkpointing a layer silently drops its cache, so there every forward
runs over all that was fed so far: the same numbers, more time.

Shape suffixes: B rows, T positions, N tail, K latents, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from colar.methods.base import Batch
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged

EAGER = partial(torch.compiler.set_stance, "force_eager")
"""Compiled layers (`training.compile`) would be compiled anew for each state of a cache that grows."""


class Unrolled:
    """Rows that are fed piece by piece; every piece sees all pieces before it."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.cache = None if recomputes_activations(lm) else DynamicCache(config=lm.config)
        self.fed_BTD: Tensor | None = None
        self.real_BT: Tensor | None = None

    def feed(self, embeds_BTD: Tensor, real_BT: Tensor) -> Tensor:
        """Last hidden states at the new positions, (B, T, D); where `real_BT` is false lies padding."""
        # Without a cache all positions come back: the new ones are the last.
        with EAGER():
            return self.lm.hidden(*self._inputs(embeds_BTD, real_BT))[:, -embeds_BTD.shape[1] :]

    def feed_layers(self, embeds_BTD: Tensor, real_BT: Tensor) -> list[Tensor]:
        """The same after each layer, (B, T, D) each."""
        with EAGER():
            layers = self.lm.layers(*self._inputs(embeds_BTD, real_BT))
        return [layer_BTD[:, -embeds_BTD.shape[1] :] for layer_BTD in layers]

    def _inputs(
        self, embeds_BTD: Tensor, real_BT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, DynamicCache | None]:
        """Embeddings, mask, positions and cache of the next forward."""
        real_BT = devices.beside(real_BT, embeds_BTD)
        before_BT = real_BT[:, :0] if self.real_BT is None else self.real_BT
        self.real_BT = torch.cat([before_BT, real_BT], dim=1)
        # Positions count what is real: padding on the left of a question moves nothing.
        # The clamp is for left padding, which would be at -1; it is never seen.
        positions_BT = (self.real_BT.cumsum(1) - 1).clamp(min=0)
        mask_BT = self.real_BT.long()
        if self.cache is not None:
            n_new = embeds_BTD.shape[1]
            return embeds_BTD, mask_BT, positions_BT[:, -n_new:], self.cache
        # No cache: everything that was fed so far goes in again.
        before_BTD = embeds_BTD[:, :0] if self.fed_BTD is None else self.fed_BTD
        self.fed_BTD = torch.cat([before_BTD, embeds_BTD], dim=1)
        return self.fed_BTD, mask_BT, positions_BT, None


def unroll(
    lm: LatentLM,
    batch: Batch,
    tail_BND: Tensor,
    real_BN: Tensor,
    latent: Callable[[Tensor], Tensor],
) -> tuple[Unrolled, Tensor, Tensor]:
    """Read the questions, then the first K columns of what follows them, one by one.

    Of row b the first `batch.n_latents[b]` columns are latents, `latent` (B, D) -> (B, D) of the hidden state before
    them; K is the largest of these numbers. The other columns are `tail_BND`'s own, real where `real_BN` says so.

    Returns the sequence, to feed the rest to; the hidden states from which columns 0..K are predicted, (B, K + 1, D);
    and the columns 0..K-1 that were fed, (B, K, D).
    """
    sequence = Unrolled(lm)
    question_BQD, real_BQ = ragged.align_right(lm.embed(batch.question_ids), batch.question_lengths)
    # All questions end in the same column: its hidden state makes the first latent of every row.
    hidden = [sequence.feed(question_BQD, real_BQ)[:, -1]]
    fed = []
    for k in range(int(batch.n_latents.max())):
        latent_BD = latent(hidden[-1]).to(tail_BND.dtype)
        # A row with fewer latents is already in its own tail here.
        thinks_B1 = devices.beside((batch.n_latents > k)[:, None], latent_BD)
        fed_BD = torch.where(thinks_B1, latent_BD, tail_BND[:, k])
        fed.append(fed_BD)
        hidden.append(sequence.feed(fed_BD[:, None], real_BN[:, k : k + 1])[:, 0])
    fed_BKD = torch.stack(fed, dim=1) if fed else tail_BND[:, :0]
    return sequence, torch.stack(hidden, dim=1), fed_BKD


def recomputes_activations(lm: LatentLM) -> bool:
    """True if layers recompute their activations in the backward pass (and so take no cache)."""
    # The flag stands on each layer that recomputes.
    layers = lm.causal_lm.modules()
    return lm.training and any(getattr(layer, "gradient_checkpointing", False) for layer in layers)
