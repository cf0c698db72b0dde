"""Both ends of the vocabulary: ids to embeddings, hidden states to logits, and the weights of an added separator.

A token's weights are its line of the embedding's table and its line of the LM head's; where the two are tied, it has
one. An added separator's weights are trained in one of two ways:

    adapter_tokens       under LoRA peft trains them: they lie in the adapter, in place of the base's. peft's own layer
                         copies the whole table to put them in, at each call; `embed` and `head_logits` compute the
                         same without the copy
    masked_embeddings    else, where embeddings are frozen: the gradient of all other tokens is set to 0

Shape suffixes: N added tokens, D width, V vocabulary, S tokens of a partial head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from peft.utils import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from colar.ops import devices
from colar.template.template import Template

# Weights of an added separator


def fit_vocabulary(causal_lm: PreTrainedModel, template: Template) -> None:
    """Grow embedding and LM head for added tokens where they have no spare weights (padded vocabularies do).

    ValueError where BOS, separator or EOS is the tokenizer's own and has no weights in the model. Other tokens may have
    none: texts that contain them are rejected (`Template.require_known`).
    """
    if template.n_known is None:
        template.n_known = vocabulary_size(causal_lm)
        bos = [] if template.bos_id is None else [template.bos_id]
        template.require_known([*bos, template.separator_id, template.eos_id])
    needed = 1 + template.separator_id
    if needed > vocabulary_size(causal_lm):
        causal_lm.resize_token_embeddings(needed, mean_resizing=False)


@torch.no_grad()
def start_separator(causal_lm: PreTrainedModel, separator_id: int) -> None:
    """Start a new separator's weights as the mean of those before it, where it is read and where it is chosen."""
    for module in (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()):
        module.weight[separator_id] = module.weight[:separator_id].mean(0)


def vocabulary_size(causal_lm: PreTrainedModel) -> int:
    """The number of tokens of the embedding."""
    embedding = causal_lm.get_input_embeddings()
    base = embedding.token_adapter.base_layer if isinstance(embedding, TrainableTokensWrapper) else embedding
    return int(base.weight.shape[0])


def adapter_token_ids(causal_lm: PreTrainedModel, separator_id: int) -> dict[str, list[int]]:
    """Module name -> ids: of the embedding, and of the head too where it is not tied (peft follows ties by itself)."""
    embedding = causal_lm.get_input_embeddings()
    head = causal_lm.get_output_embeddings()
    wanted = [embedding]
    if head.weight is not embedding.weight:
        wanted.append(head)
    # peft wants names, and families call these modules differently.
    names = [name for name, module in causal_lm.named_modules() if any(module is one for one in wanted)]
    return {name: [separator_id] for name in names}


def mask_embedding(weight: Any, ids: list[int]) -> None:
    """Stop training the weights of all tokens of an embedding but these."""
    if not ids:
        weight.requires_grad_(False)
        return
    # A part of a parameter cannot be trained by itself: the others' gradient is set to 0.
    mask_V1 = torch.zeros(weight.shape[0], 1)
    mask_V1[ids] = 1

    def masked(grad: Tensor) -> Tensor:
        nonlocal mask_V1
        # Brought to the weight's device once: a GPU is waited for each time.
        mask_V1 = mask_V1.to(grad)
        return grad * mask_V1

    weight.register_hook(masked)


def masked_embeddings(causal_lm: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of which `mask_embedding` trains some tokens: the others must get no weight decay."""
    weights = []
    for weight in causal_lm.get_input_embeddings().parameters():
        if weight.requires_grad and getattr(weight, "_backward_hooks", None):
            weights.append(weight)
    return weights


# From ids to logits


class AdapterTokens:
    """The weights that peft trains for some tokens, in place of those of the embedding or of the LM head."""

    def __init__(self, layer: Any) -> None:
        self.base = layer.base_layer
        name = layer.active_adapters[0]
        self.weight_ND: nn.Parameter = layer.trainable_tokens_delta[name]
        self.ids_N = devices.constant(tuple(layer.token_indices[name]), self.weight_ND.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of these tokens, (..., D) -> (..., N)."""
        bias = self.base.bias
        own_bias_N = None if bias is None else bias[self.ids_N]
        return nn.functional.linear(hidden, self.weight_ND.to(hidden.dtype), own_bias_N)


def adapter_tokens(module: nn.Module) -> AdapterTokens | None:
    """The tokens that an adapter trains in an embedding or LM head; None where the module's own weights are all."""
    if not isinstance(module, TrainableTokensWrapper):
        return None
    layer = module.token_adapter
    # Merged, or switched off: what the base computes is the result.
    if layer.merged or layer.disable_adapters:
        return None
    return AdapterTokens(layer)


def embed(embedding: nn.Module, ids: Tensor) -> Tensor:
    """The embedding module's output, (...,) -> (..., D)."""
    added = adapter_tokens(embedding)
    if added is None:
        result: Tensor = embedding(ids)
        return result
    base: Tensor = added.base(ids)
    place, is_added = find(added.ids_N, ids)
    own = added.weight_ND.to(base.dtype)[place]
    # Gemma scales inside its embedding module.
    scale = getattr(added.base, "embed_scale", None)
    if scale is not None:
        own = own * torch.as_tensor(scale, device=own.device).to(own.dtype)
    return torch.where(is_added[..., None], own, base)


def unscaled_logits(head: nn.Module, hidden: Tensor, adapter: Tensor | None = None) -> Tensor:
    """The LM head's output, (..., D) -> (..., V). `adapter`: of `adapter_logits`, where that was called already."""
    added = adapter_tokens(head)
    if added is None:
        result: Tensor = head(hidden)
        return result
    base: Tensor = added.base(hidden)
    if adapter is None:
        adapter = added.logits(hidden)
    # In place: the table of logits is the largest tensor of a step.
    return base.index_copy_(-1, added.ids_N, adapter.to(base.dtype))


def adapter_logits(head: nn.Module, hidden: Tensor) -> Tensor | None:
    """The logits of the tokens that an adapter trains in the LM head, (..., N); None where there are none."""
    added = adapter_tokens(head)
    return None if added is None else added.logits(hidden)


@dataclass(frozen=True)
class PartialHead:
    """An LM head's weights of some tokens, in ascending order of their ids, as they were when they were gathered.

    Without a weight the head is more than one product (a LoRA adapter lies on it): the logits of all ids are made
    there, and these taken.
    """

    ids_S: Tensor
    known_S: Tensor
    """The same on the CPU."""
    weight_SD: Tensor | None = None
    bias_S: Tensor | None = None

    @classmethod
    def gather(cls, head: Any, ids: tuple[int, ...], device: torch.device) -> "PartialHead":
        """The head's weights of these tokens. Gradients go through them to the head."""
        known_S, ids_S = torch.tensor(ids), devices.constant(ids, device)
        added = adapter_tokens(head)
        base = head if added is None else added.base
        # An adapter on it, or a quantised weight, computes something else than x W^T + b.
        if type(base) is not nn.Linear:
            return cls(ids_S, known_S)
        weight_SD = base.weight[ids_S]
        if added is not None:
            place_S, is_added_S = find(added.ids_N, ids_S)
            own_SD = added.weight_ND.to(weight_SD.dtype)[place_S]
            weight_SD = torch.where(is_added_S[:, None], own_SD, weight_SD)
        return cls(ids_S, known_S, weight_SD, None if base.bias is None else base.bias[ids_S])

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each of some ids among the tokens, and True where it has one, both of the shape of `ids`."""
        # Where the ids are, so is the result.
        return find(self.known_S if ids.device.type == "cpu" else self.ids_S, ids)


def find(known_S: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each of some ids among `known_S`, ascending, and True where it has one."""
    place = torch.searchsorted(known_S, ids).clamp(max=len(known_S) - 1)
    return place, known_S[place] == ids


def head_logits(
    causal_lm: PreTrainedModel, hidden: Tensor, part: PartialHead | None = None, adapter: Tensor | None = None
) -> Tensor:
    """The LM head, or a part of it, and the scaling that some families do after it.

    Cohere and Granite scale, Gemma 2 caps. `adapter`: of `adapter_logits`, where that was called already.
    """
    config = causal_lm.config.get_text_config()
    logits: Tensor
    if part is None:
        logits = unscaled_logits(causal_lm.get_output_embeddings(), hidden, adapter).float()
    elif part.weight_SD is None:
        logits = unscaled_logits(causal_lm.get_output_embeddings(), hidden, adapter)[..., part.ids_S].float()
    else:
        logits = nn.functional.linear(hidden, part.weight_SD, part.bias_S).float()
    if getattr(config, "logit_scale", None) is not None:
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits
