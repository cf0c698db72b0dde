"""Hidden states between the backbone's layers: their norms (the paper's appendix B), and what the LM head would say.

    layer      0           1         ...      L          the embeddings, then each layer's output
    final      norm        norm               norm       the backbone's last norm, which the LM head reads through
    lens       tokens      tokens             tokens     the last is what the model says

States are taken before the final norm, the last layer's too (transformers' own list has it behind the norm): norms
can be compared. Appendix B shows "the relative activation norm differences between consecutive LLM layers", without a
formula. Both readings are here, each a mean over thoughts:

    differences    (|h_(l+1)| - |h_l|) / |h_l|
    updates        |h_(l+1) - h_l| / |h_l|

The logit lens (nostalgebraist 2020) reads a middle layer through a norm and a head that were not trained for it.

Shape suffixes: L layers + 1, T positions, N positions looked at, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colar.evaluation import stats
from colar.look.reference_chain import Measured, ReferencePass
from colar.model.latent_lm import LatentLM


@dataclass(frozen=True)
class LayerStates:
    """The states of one sequence, (L, T, D), and the modules that turn the last ones into `lm.hidden`'s."""

    states_LTD: Tensor
    final: tuple[nn.Module, ...]

    def through_final(self, states: Tensor) -> Tensor:
        """States of any layer as the LM head reads them."""
        for module in self.final:
            states = module(states)
        return states


@dataclass(frozen=True)
class LayerNorms(Measured):
    """Means over `n_thoughts` thoughts; `norms` has the embeddings first, the others one value a layer."""

    n_thoughts: int
    norms: list[float]
    differences: list[float]
    updates: list[float]
    differences_se: list[float] | None
    """Standard errors of `differences`, clustered by question; None for thoughts of one question."""


@dataclass(frozen=True)
class LensLayer:
    """What the LM head would say behind one layer, on average."""

    layer: int
    """0 for the embeddings."""
    top1: float
    """Share of positions whose most likely token is one of the next group's (the separator behind the last)."""
    mass: float
    """Mean probability of the next group's tokens together."""
    entropy: float
    """In nats."""


@dataclass(frozen=True)
class LogitLens(Measured):
    n_positions: int
    layers: list[LensLayer]


@dataclass(frozen=True)
class LensReading(Measured):
    """The likeliest tokens behind each layer at one position, with their probabilities; embeddings first."""

    tokens: list[list[tuple[str, float]]]


# Norms


def layer_norms(states_LND: Tensor, questions: Sequence[Hashable]) -> LayerNorms:
    """The norms of states, and how they differ from layer to layer. ValueError without any position.

    `questions` has the question of each position: thoughts of one are alike.
    """
    if states_LND.shape[1] == 0:
        raise ValueError("layer norms need at least one thought, got none")
    states_LND = states_LND.double()
    norm_LN = states_LND.norm(dim=-1)
    before_LN = norm_LN[:-1]
    difference_LN = (norm_LN[1:] - before_LN) / before_LN
    update_LN = (states_LND[1:] - states_LND[:-1]).norm(dim=-1) / before_LN
    errors = []
    # All layers have the same questions: either each of them has an error or none has.
    for difference_N in difference_LN.tolist():
        error = stats.mean(difference_N, questions).se
        if error is not None:
            errors.append(error)
    return LayerNorms(
        n_thoughts=states_LND.shape[1],
        norms=norm_LN.mean(1).tolist(),
        differences=difference_LN.mean(1).tolist(),
        updates=update_LN.mean(1).tolist(),
        differences_se=errors or None,
    )


def norms_of(lm: LatentLM, passes: Sequence[ReferencePass]) -> LayerNorms:
    """The norms where the reference's thoughts are fed."""
    states = []
    questions = []
    for each in passes:
        read = layer_states(lm, each.fed_TD)
        thoughts_LND = read.states_LTD[:, each.n_question :].cpu()
        states.append(thoughts_LND)
        # A question that is asked twice counts once.
        questions += [each.example.first_id] * thoughts_LND.shape[1]
    return layer_norms(torch.cat(states, dim=1), questions)


# The logit lens


@torch.no_grad()
def lens_of(lm: LatentLM, passes: Sequence[ReferencePass]) -> LogitLens:
    """The lens at all positions from which a thought, or the stop, is predicted."""
    n = 0
    totals: dict[int, list[float]] = {}
    for each in passes:
        read = layer_states(lm, each.fed_TD)
        wanted = [{token.token_id for token in group} for group in each.groups]
        wanted.append({lm.template.separator_id})
        n += len(wanted)
        for layer, states_TD in enumerate(read.states_LTD):
            hidden_ND = read.through_final(states_TD[each.n_question - 1 :])
            sums = totals.setdefault(layer, [0.0, 0.0, 0.0])
            for i, value in enumerate(_lens_sums(lm.logits(hidden_ND), wanted)):
                sums[i] += value
    if n == 0:
        raise ValueError("the logit lens needs at least one chain, got none")
    layers = [LensLayer(layer, *(value / n for value in sums)) for layer, sums in totals.items()]
    return LogitLens(n, layers)


def _lens_sums(logits_NV: Tensor, wanted: Sequence[set[int]]) -> tuple[float, float, float]:
    """Sums over positions: right first tokens, mass on the wanted tokens, entropy."""
    logp_NV = logits_NV.double().log_softmax(-1)
    best = logp_NV.argmax(-1).tolist()
    right = sum(token_id in ids for token_id, ids in zip(best, wanted, strict=True))
    mass = 0.0
    for logp_V, ids in zip(logp_NV, wanted, strict=True):
        mass += logp_V[sorted(ids)].exp().sum().item()
    # entr(0) is 0; p log p would be NaN where a logit is -inf.
    entropy_N = torch.special.entr(logp_NV.exp()).sum(-1)
    return float(right), mass, entropy_N.sum().item()


@torch.no_grad()
def lens_at(lm: LatentLM, fed_TD: Tensor, position: int, k: int) -> LensReading:
    """The `k` likeliest tokens behind each layer at one position of what was fed."""
    read = layer_states(lm, fed_TD)
    tokens = []
    for states_TD in read.states_LTD:
        probs_V = lm.logits(read.through_final(states_TD[position])).softmax(-1)
        best = probs_V.topk(min(k, len(probs_V)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        tokens.append([(lm.template.token(token_id), probability) for token_id, probability in pairs])
    return LensReading(tokens)


# Reading them


@torch.no_grad()
def layer_states(lm: LatentLM, fed_TD: Tensor) -> LayerStates:
    """Run the backbone over what was fed, and keep what goes from layer to layer.

    ValueError for an architecture whose layers or last norm are not found: the last states, put through the modules
    that were called behind the last layer, must be the model's last hidden states.
    """
    layers = decoder_layers(lm)
    kept: list[Tensor] = []
    behind: list[nn.Module] = []

    def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(args[0] if args else kwargs["hidden_states"])

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        # The layers of some families return a tuple, with the state first.
        kept.append(output if isinstance(output, Tensor) else output[0])

    def note_behind(module: nn.Module, args: Any, output: Any) -> None:
        # All layers have run: what is called from now on works on the last one's output.
        if len(kept) == len(layers) + 1:
            behind.append(module)

    inside = {id(module) for layer in layers for module in layer.modules()}
    hooks: list[Any] = [layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    try:
        for layer in layers:
            hooks.append(layer.register_forward_hook(keep_output))
        for module in lm.causal_lm.base_model.modules():
            # Leaves only: the module around a leaf would be noted as well, and its work done twice.
            if id(module) not in inside and not list(module.children()):
                hooks.append(module.register_forward_hook(note_behind))
        hidden_TD = lm.hidden(fed_TD[None])[0]
    finally:
        for hook in hooks:
            hook.remove()

    # Each state is (1, T, D): one sequence was fed, so its axis becomes that of the layers.
    read = LayerStates(torch.cat(kept), tuple(behind))
    if len(kept) != len(layers) + 1 or not torch.allclose(
        read.through_final(read.states_LTD[-1]).float(), hidden_TD.float(), rtol=1e-3, atol=1e-3
    ):
        raise ValueError(
            f"{type(lm.causal_lm).__name__} does not lay out its layers in a way that colar knows"
        )
    return read


def decoder_layers(lm: LatentLM) -> nn.ModuleList:
    """The backbone's layers. ValueError where no list of modules has as many as the config says."""
    wanted = lm.config.num_hidden_layers
    for module in lm.causal_lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise ValueError(f"{type(lm.causal_lm).__name__} has no list of {wanted} layers")


# Where a thought looks: the mass of its attention on the question, on the thoughts before it, and on itself.
#
#     position    q  q ### | l1  l2 | l3         of l3's row:  question + earlier + itself = 1
#                 question   earlier  itself
#
# Much of the question's mass often rests on the very first token, which says nothing: a "sink". `first` is that part
# of it. Weights are taken with transformers' eager attention, one row of weights for each query head.
#
# Shape suffixes: H query heads, T positions, K thoughts, D width.


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
