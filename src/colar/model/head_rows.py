"""The LM head at a few ids: what `lm.logits(hidden)[..., ids]` gives, without the products of all other rows.

Shape suffixes: D width, V vocabulary, S ids asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadRows:
    """Rows of an LM head as it was when they were gathered, ids in ascending order.

    Without a weight the head is more than one product (an adapter lies on it): the logits of all ids are made there,
    and these taken.
    """

    ids_S: Tensor
    weight_SD: Tensor | None = None
    bias_S: Tensor | None = None

    @classmethod
    def gather(cls, head: Any, ids: tuple[int, ...], device: torch.device) -> HeadRows:
        """The head's rows at these ids. Gradients go through them to the head."""
        ids_S = torch.tensor(ids, device=device)
        if not is_linear(head):
            return cls(ids_S)
        return cls(ids_S, head.weight[ids_S], None if head.bias is None else head.bias[ids_S])

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where each of some ids stands among the rows, and whether it does, both of the shape of `ids`."""
        place = torch.searchsorted(self.ids_S, ids).clamp(max=len(self.ids_S) - 1)
        return place, self.ids_S[place] == ids


def is_linear(head: nn.Module) -> bool:
    """Whether a module computes x W^T + b, and nothing else: no adapter on it, no quantised weight."""
    return type(head) is nn.Linear or bool(getattr(head, "computes_linear", False))
