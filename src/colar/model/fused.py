"""Replacements of a backbone's RMS norms and gated MLPs: fewer operations, and less saved for the backward pass.

                    transformers keeps                             here
    RMS norm        its input in float32                           its input as it came
    gated MLP       gate, act(gate), up, their product             gate, up, their product

On a GPU the norm is torch's own kernel: one operation in place of eight. A module is replaced only if both give the
same numbers, up to rounding. Compiled layers do not need this, because the compiler saves as much.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from colar.model import probes


@contextlib.contextmanager
def fused(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Replace the norms and gated MLPs of a model inside the block; its weights stay where they are."""
    same: dict[type[nn.Module], bool] = {}
    replaced = []
    with probes.evaluating(causal_lm):
        for module in causal_lm.modules():
            forward = _forward_for(module)
            if forward is None or "forward" in vars(module):
                continue
            if type(module) not in same:
                same[type(module)] = _is_same(module, forward, causal_lm)
            if same[type(module)]:
                module.forward = forward
                replaced.append(module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _forward_for(module: Any) -> Callable[[Tensor], Tensor] | None:
    if hasattr(module, "variance_epsilon") and isinstance(getattr(module, "weight", None), Tensor):
        return functools.partial(_norm, module)
    # Seed-OSS' MLP has dropout in training mode, in which the two are not compared.
    drops = any("dropout" in name for name in (*vars(module), *dict(module.named_children())))
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")) and not drops:
        return functools.partial(_gated_mlp, module)
    return None


@torch.no_grad()
def _is_same(module: Any, forward: Callable[[Tensor], Tensor], causal_lm: PreTrainedModel) -> bool:
    width = module.gate_proj.in_features if hasattr(module, "gate_proj") else len(module.weight)
    x = torch.linspace(-1, 2, width, device=causal_lm.device, dtype=causal_lm.dtype)[None]
    tolerance = 1e-5 if causal_lm.dtype.itemsize == 4 else 1e-2
    try:
        return torch.allclose(forward(x), module(x), rtol=tolerance, atol=tolerance)
    except Exception:
        # The architecture has its own arguments or shapes, or this release of torch lacks the kernel.
        return False


def _norm(module: Any, x: Tensor) -> Tensor:
    weight, eps = module.weight, module.variance_epsilon
    # Autocast is disabled because it would make the kernel return float32.
    if x.is_cuda and x.dtype == weight.dtype:
        with torch.autocast("cuda", enabled=False):
            return nn.functional.rms_norm(x, weight.shape, weight, eps)
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    product = _Gated.apply(module.act_fn, module.gate_proj(x), module.up_proj(x))  # type: ignore[no-untyped-call]
    y: Tensor = module.down_proj(product)
    return y


class _RmsNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps), in float32 except for the last product, as in Llama."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        by_normed = (grad * weight).float()
        along = (by_normed * normed).mean(-1, keepdim=True)
        # In place: two tensors less.
        by_x = by_normed.addcmul_(normed, along, value=-1).mul_(scale).to(x.dtype)
        by_weight = None
        if ctx.needs_input_grad[1]:
            by_weight = (grad * normed.to(x.dtype)).flatten(0, -2).sum(0)
        return by_x, by_weight, None


class _Gated(torch.autograd.Function):
    """act(gate) * up; the activation is recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return act(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            activated = ctx.act(gate)
        (by_gate,) = torch.autograd.grad(activated, gate, grad * up)
        return None, by_gate, grad * activated.detach()
