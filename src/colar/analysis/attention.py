"""Where a thought looks: the mass of its attention on the question, on the thoughts before it, and on itself.

    position    q  q ### | l1  l2 | l3         of l3's row:  question + earlier + itself = 1
                question   earlier  itself

Much of the question's mass often rests on the very first token, which says nothing: a "sink". `first` is that part
of it. Weights are taken with transformers' eager attention, one row of weights for each query head.

Shape suffixes: H query heads, T positions, K thoughts, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colar.analysis.measured import Measured
from colar.analysis.reference_pass import ReferencePass
from colar.model.latent_lm import LatentLM


@dataclass(frozen=True)
class LayerMass:
    """Means over heads and thoughts: `question` + `earlier` + `itself` = 1; `first` is a part of `question`."""

    question: float
    earlier: float
    itself: float
    first: float


@dataclass(frozen=True)
class AttentionMass(Measured):
    n_thoughts: int
    layers: list[LayerMass]


def thought_mass(weights_HTT: Tensor, n_question: int) -> Tensor:
    """Sums over the thoughts of one sequence, means over heads: question, earlier, itself, first, (4,)."""
    # In float64: sums over many positions in half precision would lose the small weights.
    weights_HKT = weights_HTT[:, n_question:].double()
    own_HK = weights_HKT[:, :, n_question:].diagonal(dim1=1, dim2=2)
    question_HK = weights_HKT[:, :, :n_question].sum(-1)
    # A row sees nothing behind its own position: what is left lies on the thoughts before it.
    earlier_HK = weights_HKT[:, :, n_question:].sum(-1) - own_HK
    first_HK = weights_HKT[:, :, 0]
    masses = torch.stack([question_HK, earlier_HK, own_HK, first_HK])
    return masses.mean(1).sum(-1)


def attention_of(lm: LatentLM, passes: Sequence[ReferencePass]) -> AttentionMass:
    """The mass at the reference's thoughts. ValueError where there are none, or the backbone shows no weights."""
    n = sum(each.n_thoughts for each in passes)
    if n == 0:
        raise ValueError("attention needs at least one thought, got none")
    totals: list[Tensor] = []
    with eager(lm):
        for each in passes:
            for layer, weights_HTT in enumerate(attention_weights(lm, each.fed_TD)):
                mass_4 = thought_mass(weights_HTT, each.n_question).cpu()
                if layer == len(totals):
                    totals.append(torch.zeros_like(mass_4))
                totals[layer] += mass_4
    layers = [LayerMass(*(mass_4 / n).tolist()) for mass_4 in totals]
    return AttentionMass(n, layers)


@torch.no_grad()
def attention_weights(lm: LatentLM, fed_TD: Tensor) -> list[Tensor]:
    """The weights of each layer, (H, T, T); call it inside `eager`."""
    # The base model alone: nobody looks at the LM head's logits here.
    output = lm.causal_lm.base_model(inputs_embeds=fed_TD[None], use_cache=False, output_attentions=True)
    weights = output.attentions
    if not weights or any(each is None for each in weights):
        raise ValueError(f"{type(lm.causal_lm).__name__} does not show its attention weights")
    return [each[0] for each in weights]


@contextlib.contextmanager
def eager(lm: LatentLM) -> Iterator[None]:
    """Eager attention inside the block: fused kernels never have the weights in memory."""
    model = lm.causal_lm
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
