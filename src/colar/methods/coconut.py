"""Coconut: the last hidden state is the next input (Hao et al. 2024, "Training Large Language Models to Reason in a
Continuous Latent Space", sections 3 and 4).

    CoT        question ###   t1 t2 t3 | t4 t5 | t6     ###  answer EOS         three reasoning steps
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
all remaining steps go. Training forgets the optimiser's moments at each stage, as the paper does. Its epochs of plain
CoT are a run of the method `cot` before this one.

`unroll` trains through latents that are made of hidden states (`distill` does, too): a sequence that grows while it is
computed.

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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from colar import checks
from colar.data.example import Example
from colar.methods import base, losses, thinking
from colar.methods.base import Batch, Row
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged
from colar.template.template import Template

EAGER = partial(torch.compiler.set_stance, "force_eager")
"""Compiled layers (`training.compile`) would be compiled anew for each state of a cache that grows."""


@dataclass(frozen=True)
class CoconutConfig:
    """The curriculum; defaults are those of its paper's GSM8k runs."""

    n_latents_per_step: int = 2
    """Latents that replace a step (the paper's c), 1 or more."""
    n_stages: int = 3
    """Stages in which a step more is replaced, 1 or more; one more follows, in which no steps are left."""
    epochs_per_stage: float = 3.0
    """Epochs in each of those stages, above 0; the last one lasts until training ends."""

    def __post_init__(self) -> None:
        checks.check_number("method.n_latents_per_step", self.n_latents_per_step, 1, whole=True)
        checks.check_number("method.n_stages", self.n_stages, 1, whole=True)
        checks.check_number("method.epochs_per_stage", self.epochs_per_stage, 1e-6)

    @property
    def n_latents(self) -> int:
        """Latents at inference."""
        return self.n_stages * self.n_latents_per_step


class Coconut(base.Method):
    name: ClassVar[str] = "coconut"
    Config: ClassVar[type] = CoconutConfig
    thinks_in_latents: ClassVar[bool] = True
    multiple_forwards = True

    def stage(self, epoch: float) -> int:
        """1 .. n_stages, and n_stages + 1 to the end."""
        # A boundary that is not a binary fraction must not fall a stage short.
        return 1 + int(min(epoch / self.config.epochs_per_stage, self.config.n_stages) + 1e-9)

    def last_stage(self) -> int:
        return int(self.config.n_stages) + 1

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        row = super().encode(template, example, rng, epoch)
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

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return thinking.fixed_thought(state, state.hidden, self.config.n_latents)


# A sequence that grows


class Unrolled:
    """Rows that are fed piece by piece; every piece sees all pieces before it."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.cache = None if recomputes_activations(lm) else DynamicCache(config=lm.config)
        self.pieces: list[Tensor] = []
        """Without a cache, all embeddings that were fed: they go in again."""
        self.masks: list[Tensor] = []

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
        self.masks.append(devices.beside(real_BT, embeds_BTD))
        mask_BT = torch.cat(self.masks, dim=1).long()
        # Positions count what is real: padding on the left of a question moves nothing.
        # The clamp is for left padding, which would be at -1; it is never seen.
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
    return sequence, torch.stack(hidden, dim=1), torch.stack(fed, dim=1)


def recomputes_activations(lm: LatentLM) -> bool:
    """True if layers recompute their activations in the backward pass (and so take no cache)."""
    # The flag stands on each layer that recomputes.
    layers = lm.causal_lm.modules()
    return lm.training and any(getattr(layer, "gradient_checkpointing", False) for layer in layers)
