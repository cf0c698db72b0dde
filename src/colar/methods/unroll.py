"""Training through latents that are made of hidden states, so that the sequence grows while it is computed.

    columns    . . q q #  |  h1   h2  |  t1   t2   ###  a   EOS         "." is padding, "#" the opening separator
    forwards       1      |  2    3   |  4
                             h1 is made of the hidden state at "#", h2 of the one at h1, ...

Questions are padded on the LEFT, so that all rows take their first latent at the same column, and so that a layer's
sliding window, which counts columns, also counts positions. Gradients flow through every latent to the question.

Each sequence has its own key-value cache: transformers' caches are mutable, so two sequences that shared one would
attend to each other's thoughts. Under gradient checkpointing a layer silently drops its cache, so every forward then
runs over all that was fed so far, which gives the same numbers in more time.

Shape suffixes: B rows, T positions, N tail, K latents, D width.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from colar.methods.base import Batch
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged

EAGER = partial(torch.compiler.set_stance, "force_eager")
"""Context that runs eagerly: compiled layers (`training.compile`) would recompile for each state of a growing cache."""


class Unrolled:
    """Rows that are fed piece by piece; each piece attends to all pieces before it."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        # Layers that recompute their activations take no cache.
        recomputes = lm.training and lm.causal_lm.is_activation_checkpointing
        self.cache = None if recomputes else DynamicCache(config=lm.config)
        self.pieces: list[Tensor] = []
        """Without a cache, all embeddings fed so far, which every forward feeds again."""
        self.masks: list[Tensor] = []

    def feed(self, embeds_BTD: Tensor, real_BT: Tensor) -> Tensor:
        """Last hidden states at the new positions, (B, T, D); positions where `real_BT` is false are padding."""
        # Without a cache the forward returns all positions, the new ones last.
        with EAGER():
            return self.lm.hidden(*self._inputs(embeds_BTD, real_BT))[:, -embeds_BTD.shape[1] :]

    def feed_layers(self, embeds_BTD: Tensor, real_BT: Tensor) -> list[Tensor]:
        """The same as `feed`, after each layer: (B, T, D) each."""
        with EAGER():
            layers = self.lm.layers(*self._inputs(embeds_BTD, real_BT))
        return [layer_BTD[:, -embeds_BTD.shape[1] :] for layer_BTD in layers]

    def _inputs(
        self, embeds_BTD: Tensor, real_BT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, DynamicCache | None]:
        """Embeddings, mask, positions and cache of the next forward."""
        self.masks.append(devices.beside(real_BT, embeds_BTD))
        mask_BT = torch.cat(self.masks, dim=1).long()
        # Positions count real columns only, so that a question's left padding shifts nothing.
        # Without the clamp left padding would be at -1; nothing attends to it.
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        if self.cache is not None:
            return embeds_BTD, mask_BT, positions_BT[:, -embeds_BTD.shape[1] :], self.cache
        self.pieces.append(embeds_BTD)
        return torch.cat(self.pieces, dim=1), mask_BT, positions_BT, None


def unroll(
    lm: LatentLM,
    batch: Batch,
    tail_BND: Tensor,
    real_BN: Tensor,
    latent: Callable[[Tensor], Tensor],
) -> tuple[Unrolled, Tensor, Tensor]:
    """Feed the questions, then the first K columns after them, one by one.

    In row b the first `batch.n_latents[b]` columns are latents, each made by `latent` (B, D) -> (B, D) from the hidden
    state before it; K is the largest of these numbers. All other columns come from `tail_BND`; `real_BN` is False in
    their padding.

    Returns the sequence, to which the rest can be fed; the hidden states from which columns 0..K are predicted,
    (B, K + 1, D); and the columns 0..K-1 that were fed, (B, K, D).
    """
    sequence = Unrolled(lm)
    question_BQD, real_BQ = ragged.align_right(lm.embed(batch.question_ids), batch.question_lengths)
    # All questions end in the same column: its hidden state makes the first latent of every row.
    hidden = [sequence.feed(question_BQD, real_BQ)[:, -1]]
    fed = []
    for k in range(int(batch.n_latents.max())):
        latent_BD = latent(hidden[-1]).to(tail_BND.dtype)
        # A row with fewer latents is already fed its own tail here.
        thinks_B1 = devices.beside((batch.n_latents > k)[:, None], latent_BD)
        fed_BD = torch.where(thinks_B1, latent_BD, tail_BND[:, k])
        fed.append(fed_BD)
        hidden.append(sequence.feed(fed_BD[:, None], real_BN[:, k : k + 1])[:, 0])
    return sequence, torch.stack(hidden, dim=1), torch.stack(fed, dim=1)
