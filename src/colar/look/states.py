"""Hidden states between the backbone's layers, and their norms (the paper's appendix B).

    layer      0           1         ...      L          the embeddings, then each layer's output
    final      norm        norm               norm       the backbone's last norm, which the LM head reads through

States are taken before the final norm, the last layer's too (transformers' own list has it behind the norm), so that
norms can be compared. Appendix B shows "the relative activation norm differences between consecutive LLM layers",
without a formula. Here it is the mean over thoughts of (|h_(l+1)| - |h_l|) / |h_l|.

Shape suffixes: L layers + 1, T positions, N positions looked at, D width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colar.evaluation import stats
from colar.look.reference_chain import ReferencePass
from colar.model.latent_lm import LatentLM


@dataclass(frozen=True)
class LayerNorms:
    """Means over `n_thoughts` thoughts; `norms` has the embeddings first, the others one value a layer."""

    n_thoughts: int
    norms: list[float]
    differences: list[float]
    differences_se: list[float] | None
    """Standard errors of `differences`, clustered by question; None for thoughts of one question."""


def norms_of(lm: LatentLM, passes: Sequence[ReferencePass]) -> LayerNorms:
    """The norms where the reference's thoughts are fed."""
    states = []
    questions = []
    for each in passes:
        thoughts_LND = layer_states(lm, each.fed_TD)[:, each.n_question :].cpu()
        states.append(thoughts_LND)
        # A question that is asked twice counts once.
        questions += [each.example.first_id] * thoughts_LND.shape[1]
    return layer_norms(torch.cat(states, dim=1), questions)


def layer_norms(states_LND: Tensor, questions: Sequence[Hashable]) -> LayerNorms:
    """The norms of states, and how they differ from layer to layer; `questions` has that of each position."""
    norm_LN = states_LND.double().norm(dim=-1)
    difference_LN = (norm_LN[1:] - norm_LN[:-1]) / norm_LN[:-1]
    errors = []
    # All layers have the same questions: either each of them has an error or none has.
    for difference_N in difference_LN.tolist():
        error = stats.mean(difference_N, questions).se
        if error is not None:
            errors.append(error)
    return LayerNorms(
        states_LND.shape[1], norm_LN.mean(1).tolist(), difference_LN.mean(1).tolist(), errors or None
    )


@torch.no_grad()
def layer_states(lm: LatentLM, fed_TD: Tensor) -> Tensor:
    """Run the backbone over what was fed, and keep what goes from layer to layer, (L, T, D)."""
    layers = _layers(lm)
    kept: list[Tensor] = []

    def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(args[0] if args else kwargs["hidden_states"])

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        # The layers of some families return a tuple, with the state first.
        kept.append(output if isinstance(output, Tensor) else output[0])

    hooks = [layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    hooks += [layer.register_forward_hook(keep_output) for layer in layers]
    try:
        lm.hidden(fed_TD[None])
    finally:
        for hook in hooks:
            hook.remove()
    # Each state is (1, T, D): one sequence was fed, so its axis becomes that of the layers.
    return torch.cat(kept)


def _layers(lm: LatentLM) -> nn.ModuleList:
    """The backbone's layers. ValueError where no list of modules has as many as the config says."""
    wanted = lm.config.num_hidden_layers
    for module in lm.causal_lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise ValueError(f"{type(lm.causal_lm).__name__} has no list of {wanted} layers")
