"""Linear layers whose weights are laid out for a CPU's matrix units.

A plain linear layer rearranges the weights that it reads on every call, which at a few rows takes a third of its time.
oneDNN can be given them rearranged: a second copy of the weights, in the layout of the matrix units
(results/speed/generate has figures).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from colar.model.latent_lm import LatentLM
from colar.ops import devices

PACK_FOR = 16
"""Rows that the packed layout is chosen for; any number can be computed with it."""
SAMPLE = 4096
"""Numbers of a weight that are compared to detect that it has changed."""
OPERATION = "colar::packed_linear"
"""An operation of our own, which a compiled graph calls as it is."""


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
    """Its weight and bias are all of it (`model/vocabulary.py`)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.pack()

    def pack(self) -> None:
        """Copy the weight as it is now."""
        self.version, self.sample = self._state()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACK_FOR)

    def outdated(self) -> bool:
        """True if the weight has been changed since it was packed."""
        version, sample = self._state()
        return self.version != version or not torch.equal(self.sample, sample)

    def _state(self) -> tuple[int, Tensor]:
        """The count of in-place changes, and numbers from all over the weight: fused optimisers do not count theirs."""
        version = 0 if self.weight.is_inference() else self.weight._version
        flat = self.weight.detach().flatten()
        return version, flat[:: max(1, len(flat) // SAMPLE)].clone()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.colar.packed_linear(x, self.packed, self.bias, self.out_features)
        return y


def can_pack(lm: LatentLM) -> bool:
    """True for bfloat16 weights on a CPU whose oneDNN computes in bfloat16: nothing else gains by packing."""
    dtype = lm.causal_lm.get_input_embeddings().weight.dtype
    return lm.device.type == "cpu" and dtype == torch.bfloat16 and devices.computes_bfloat16(lm.device)


def packed_copy(lm: LatentLM) -> LatentLM:
    """Copy `lm` with packed linear layers, in eval mode. Parameters and buffers are shared; `lm` stays as it is."""
    shared: tuple[Any, ...] = (*lm.parameters(), *lm.buffers(), lm.tokenizer, lm.template)
    # deepcopy takes what is in its memo for copied already: the copy has these very objects.
    twin = copy.deepcopy(lm, {id(value): value for value in shared}).eval()
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            # A quantised weight is a tensor of its own kind.
            if type(child) is not nn.Linear or type(child.weight) is not nn.Parameter:
                continue
            if child.weight.dtype == torch.bfloat16:
                setattr(parent, name, PackedLinear(child))
    return twin


def pack_again(twin: LatentLM) -> None:
    """Pack the weights again that have been trained since."""
    for module in twin.modules():
        if isinstance(module, PackedLinear) and module.outdated():
            module.pack()
