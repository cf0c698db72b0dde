"""Linear layers with their weights laid out as a CPU's matrix units read them.

A plain product rearranges the weights it reads on every call, which at a few rows takes a third of its time.
oneDNN can be given them rearranged. That costs a second copy of the weights in memory, so it comes with
`Engine(compile=True)`; results/speed/generate has figures.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from colar.model.latent_lm import LatentLM
from colar.ops import devices

PACK_FOR = 16
"""Rows that the layout is chosen for; any number can be computed with it."""

SAMPLE = 4096
"""Numbers of a weight that are compared, to see whether it has changed."""

OPERATION = "colar::packed_linear"
"""An operation of our own, so that a compiled graph takes it as it is."""


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, width: int) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


# torch.compile traces with tensors that have a shape and no numbers: this is the operation on those.
def _shape(x: Tensor, packed: Tensor, bias: Tensor | None, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


_library: Any = torch.library
_library.define(OPERATION, "(Tensor x, Tensor packed, Tensor? bias, SymInt width) -> Tensor")
_library.impl(OPERATION, "CompositeExplicitAutograd", _packed_linear)
_library.register_fake(OPERATION, _shape)


class PackedLinear(nn.Module):
    """Computes the same as `linear`, without gradient. The weight is shared, the packed copy is this module's own."""

    computes_linear = True
    """Its weight and bias are all of it (`model/head.py`)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.pack()

    def pack(self) -> None:
        """Copy the weight as it is now."""
        self.version = _version(self.weight)
        self.sample = _sample(self.weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACK_FOR)

    def outdated(self) -> bool:
        """Whether the weight has been changed since it was packed."""
        # Fused optimisers change weights behind their counter; they change all of a weight's numbers.
        return self.version != _version(self.weight) or not torch.equal(self.sample, _sample(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.colar.packed_linear(x, self.packed, self.bias, self.out_features)
        return y


def can_pack(lm: LatentLM) -> bool:
    """Whether there is anything to gain: bfloat16 weights on a CPU whose oneDNN computes in bfloat16."""
    dtype = lm.causal_lm.get_input_embeddings().weight.dtype
    return lm.device.type == "cpu" and dtype == torch.bfloat16 and devices.computes_bfloat16(lm.device)


def packed_copy(lm: LatentLM) -> LatentLM:
    """Copy `lm` with packed linear layers, in eval mode. Parameters and buffers are shared; `lm` stays as it is."""
    kept: tuple[Any, ...] = (*lm.parameters(), *lm.buffers(), lm.tokenizer, lm.template)
    # What deepcopy finds in its memo counts as copied already: the copy has these very objects.
    memo = {id(value): value for value in kept}
    twin = copy.deepcopy(lm, memo).eval()
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(parent, name, PackedLinear(child))
    return twin


def refresh(twin: LatentLM) -> None:
    """Pack the weights again that were trained since."""
    for module in twin.modules():
        if isinstance(module, PackedLinear) and module.outdated():
            module.pack()


def _version(weight: Tensor) -> int:
    """How often a weight was changed in place (inference tensors do not count, and cannot be trained)."""
    return 0 if weight.is_inference() else weight._version


def _sample(weight: Tensor) -> Tensor:
    """A copy of some numbers of a weight, from all over it."""
    flat = weight.detach().flatten()
    step = max(1, len(flat) // SAMPLE)
    return flat[::step].clone()
