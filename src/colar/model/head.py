"""The LM head, or the part of it for some tokens: hidden states to logits.

Shape suffixes: D width, V vocabulary, S tokens of a partial head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from colar.ops import devices


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
        # An adapter on it, or a quantised weight, computes something else than x W^T + b.
        if type(head) is not nn.Linear:
            return cls(ids_S, known_S)
        return cls(ids_S, known_S, head.weight[ids_S], None if head.bias is None else head.bias[ids_S])

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each of some ids among the tokens, and True where it has one, both of the shape of `ids`."""
        # Where the ids are, so is the result.
        known_S = self.known_S if ids.device.type == "cpu" else self.ids_S
        place = torch.searchsorted(known_S, ids).clamp(max=len(known_S) - 1)
        return place, known_S[place] == ids


def head_logits(causal_lm: PreTrainedModel, hidden: Tensor, part: PartialHead | None = None) -> Tensor:
    """The LM head, or a part of it, and the scaling that some families do after it: Cohere and Granite scale, Gemma 2
    caps."""
    config = causal_lm.config.get_text_config()
    logits: Tensor
    if part is None:
        logits = causal_lm.get_output_embeddings()(hidden).float()
    elif part.weight_SD is None:
        logits = causal_lm.get_output_embeddings()(hidden)[..., part.ids_S].float()
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
