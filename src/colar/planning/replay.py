"""The memory and the arithmetic of a batch's work, from shapes alone.

    twin's work     forwards (B, T), logits at M positions, modules' inputs
    replayed        the same on the large model's shapes: forward and backward, under autocast, with checkpoints
    counted         bytes of the tensors that are there at one time; products

Tensors without values cannot be chosen by what they hold. So the method's own code runs on the twin, and here only what
is large.

Shape suffixes: B rows, T positions, X positions of all rows, M positions with logits, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from colar.methods import losses
from colar.model.latent_lm import LatentLM
from colar.planning.trace import Work
from colar.training.peak import TensorPeak


@dataclass(frozen=True)
class Replayed:
    """Of one batch, forward and backward."""

    bytes: int
    """Beside weights, the optimiser's moments, and gradients that were there before."""
    flops: int


def replay(
    lm: LatentLM,
    work: Work,
    bf16: bool,
    mode: FakeTensorMode,
    *,
    accumulates: bool = False,
    leaving: Sequence[nn.Parameter] = (),
) -> Replayed:
    """Do the work on the shapes of `lm` (made in `mode`).

    `accumulates`: earlier batches of the update have left their gradients, to which this one's are added. Gradients of
    the weights `leaving` are gone as soon as they are made.
    """
    # In eval mode layers would not recompute: checkpoints work in training alone.
    lm.train()
    trained = [weight for weight in lm.parameters() if weight.requires_grad]
    hooks: list[Any] = []
    for weight in leaving:
        hooks.append(weight.register_post_accumulate_grad_hook(_drop_gradient))  # type: ignore[no-untyped-call]
    with mode:
        if accumulates:
            for weight in trained:
                weight.grad = torch.zeros_like(weight)
        with TensorPeak() as counted, Products() as products:
            _forward_and_backward(lm, work, bf16)
    for weight in trained:
        weight.grad = None
    for hook in hooks:
        hook.remove()
    return Replayed(counted.peak, products.flops)


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of products, attention's too, by torch's own formulas.

    torch's `FlopCounterMode` also follows modules, and keeps their tensors longer than the work itself does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _forward_and_backward(lm: LatentLM, work: Work, bf16: bool) -> None:
    # The shapes say that they are on the CPU (`shapes.without_memory`), whatever card they stand for.
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        results = _forward(lm, work)
    total: Tensor = torch.stack([result.float().sum() for result in results]).sum()
    # Held by this list, they would count as memory all through the backward pass.
    del results
    torch.autograd.backward(total)


def _forward(lm: LatentLM, work: Work) -> list[Tensor]:
    """Tensors whose sum stands for the loss."""
    embedding = lm.causal_lm.get_input_embeddings()
    hidden = []
    for rows, length in work.passes:
        ids_BT = torch.zeros(rows, length, dtype=torch.int64)
        embeds_BTD = embedding(ids_BT)
        hidden.append(lm.hidden(embeds_BTD))
    last_XD = hidden[-1].reshape(-1, lm.width)
    # Passes without a loss of their own have a teacher's or a later pass's.
    results = [each.mean() for each in hidden[:-1]]
    for count in work.logits:
        chosen_MD = _chosen(last_XD, count)
        labels_M1 = torch.zeros(count, 1, dtype=torch.int64)
        results += lm.reduce_logits(losses.position_losses, chosen_MD, labels_M1, labels_M1.float())
    for name, shapes in work.modules:
        inputs = []
        for shape in shapes:
            count = int(torch.Size(shape).numel())
            inputs.append(_chosen(last_XD, count).view(*shape, lm.width))
        made = lm.extra[name](*inputs)
        results += [made] if isinstance(made, Tensor) else [*made]
    return results


def _chosen(last_XD: Tensor, count: int) -> Tensor:
    """As many of the hidden states, again from the first where there are not enough."""
    index_M = torch.arange(count) % last_XD.shape[0]
    return last_XD.index_select(0, index_M)
