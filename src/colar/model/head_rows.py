"""The LM head at a few ids: what `lm.logits(hidden)[..., ids]` gives, without the products of all other rows.

Shape suffixes: D width, V vocabulary, S ids asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colar.model.added_rows import adapter_rows


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
        added = adapter_rows(head)
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
        """Where each of some ids stands among the rows, and whether it does, both of the shape of `ids`."""
        place = torch.searchsorted(self.ids_S, ids).clamp(max=len(self.ids_S) - 1)
        return place, self.ids_S[place] == ids


def is_linear(head: nn.Module) -> bool:
    """Whether a module computes x W^T + b, and nothing else: no adapter on it, no quantised weight."""
    return type(head) is nn.Linear or bool(getattr(head, "computes_linear", False))
