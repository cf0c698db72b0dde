"""The LM head: logits of hidden states as the backbone's own forward makes them, of all ids or of a few.

Shape suffixes: D width, V vocabulary, S ids asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from colar.model import added_rows


@dataclass(frozen=True)
class HeadRows:
    """Rows of an LM head as it was when they were gathered, ids in ascending order.

    Without a weight the head is more than one product (a LoRA adapter lies on it): the logits of all ids are made
    there, and these taken.
    """

    ids_S: Tensor
    weight_SD: Tensor | None = None
    bias_S: Tensor | None = None

    @classmethod
    def gather(cls, head: Any, ids: tuple[int, ...], device: torch.device) -> HeadRows:
        """The head's rows at these ids. Gradients go through them to the head."""
        ids_S = torch.tensor(ids, device=device)
        added = added_rows.adapter_rows(head)
        base = head if added is None else added.base
        if not is_linear(base):
            return cls(ids_S)
        weight_SD = base.weight[ids_S]
        if added is not None:
            place_S, is_added_S = added.find(ids_S)
            own_SD = added.weight_ND.to(weight_SD.dtype)[place_S]
            weight_SD = torch.where(is_added_S[:, None], own_SD, weight_SD)
        return cls(ids_S, weight_SD, None if base.bias is None else base.bias[ids_S])

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each of some ids among the rows, and True where it has one, both of the shape of `ids`."""
        place = torch.searchsorted(self.ids_S, ids).clamp(max=len(self.ids_S) - 1)
        return place, self.ids_S[place] == ids


def is_linear(head: nn.Module) -> bool:
    """True where a module computes x W^T + b, and nothing else: no adapter on it, no quantised weight."""
    return type(head) is nn.Linear or bool(getattr(head, "computes_linear", False))


def head_logits(
    lm: PreTrainedModel, hidden: Tensor, rows: HeadRows | None = None, own: Tensor | None = None
) -> Tensor:
    """The LM head, or some of its rows, and the scaling that some families do after it.

    Cohere and Granite scale, Gemma 2 caps. `own` are logits of rows in an adapter, where they are made already.
    """
    config = lm.config.get_text_config()
    logits: Tensor
    if rows is None:
        logits = added_rows.logits(lm.get_output_embeddings(), hidden, own).float()
    elif rows.weight_SD is None:
        logits = added_rows.logits(lm.get_output_embeddings(), hidden, own)[..., rows.ids_S].float()
    else:
        logits = nn.functional.linear(hidden, rows.weight_SD, rows.bias_S).float()
    if getattr(config, "logit_scale", None) is not None:
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits
