"""Values made of logits, some positions at a time: the logits of all positions never exist at once.

    hidden (X, D)    h h h h h h h h h h h h          X positions
                     '---.---' '---.---' '---.---'    chunks of at most `chunk_bytes` of float32 logits
    logits (C, V)        '-> l     '-> l     '-> l    one chunk's at a time
    values               '-> r     '-> r     '-> r    a log-prob, a sum: what is kept of each position
    derivatives (C, D)   '-> d     '-> d     '-> d    of r by h: made beside it, kept for the backward pass
    result (X, ...)      '-------- cat ---------'

Logits are the largest tensors of an update: 37,035 labels of a vocabulary of 128,256 are 19 GB in float32, and a
softmax with its gradient holds three times that. A position's value depends on its own hidden state alone. So its
derivative is known as soon as the value is, and the backward pass only scales it. Nothing is computed twice (Liger's
fused cross-entropy does likewise).

That needs a head that is not trained itself, and one number for each position. Otherwise the backward pass makes each
chunk's logits once more (torch.utils.checkpoint), which costs a product with the LM head. Positions that fit into one
chunk are taken as they are. There is no second derivative.

torch's own `linear_cross_entropy` takes a bare weight and one label a position: no adapter on the head, no cap or scale
of logits, no shared labels, no temperature.

Shape suffixes: X positions, C positions of a chunk, D width, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 2**28
"""Bytes of a chunk's logits in float32; their gradient needs about two more such tensors."""
CHUNK_BYTES_ON_CPU = 2**24
"""The same on a CPU, where derivatives are made beside the values. Its allocator gives larger blocks back to the
system, and to have them anew for every tensor takes longer than the softmax itself: a chunk of 2**28 takes twice as
long."""

Values = tuple[Tensor, ...]
ValuesOf = Callable[..., Values]
"""Hidden states (C, D) or logits (C, V), and columns (C, ...) -> tensors (C, ...), each position's by itself alone."""


def in_chunks(values_of: ValuesOf, hidden_XD: Tensor, columns: tuple[Tensor, ...], size: int) -> Values:
    """`values_of(hidden_XD, *columns)`, computed `size` positions at a time.

    `columns` are (X, ...). Values and gradients are those of one piece, up to rounding.
    """
    if len(hidden_XD) <= size:
        return values_of(hidden_XD, *columns)

    def of_chunk(*chunk: Tensor) -> Values:
        with uncached_autocast(hidden_XD.device.type):
            return values_of(*chunk)

    tensors = (hidden_XD, *columns)
    if torch.is_grad_enabled() and has_derivatives(of_chunk, tensors):
        values: Values = _WithDerivatives.apply(of_chunk, size, *tensors)  # type: ignore[no-untyped-call]
        return values
    values_by_chunk = []
    for chunk in split(tensors, size):
        if torch.is_grad_enabled():
            values_by_chunk.append(checkpoint(of_chunk, *chunk, use_reentrant=False))
        else:
            values_by_chunk.append(of_chunk(*chunk))
    return joined(values_by_chunk)


def has_derivatives(of_chunk: ValuesOf, tensors: tuple[Tensor, ...]) -> bool:
    """True where gradients reach nothing but the given tensors, and every value is one number."""
    # A call with no positions tells, and costs nothing.
    values = of_chunk(*(tensor[:0].detach() for tensor in tensors))
    others_trained = any(value.requires_grad for value in values)
    return not others_trained and all(value.dim() == 1 for value in values)


class _WithDerivatives(torch.autograd.Function):
    """Values of all chunks; the derivatives of each, by every tensor that takes a gradient, are kept."""

    @staticmethod
    def forward(ctx: Any, of_chunk: ValuesOf, size: int, *tensors: Tensor) -> Values:
        ctx.wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        values_by_chunk = []
        derivatives: list[Values] = []
        for chunk in split(tensors, size):
            values, chunk_derivatives = with_derivatives(of_chunk, chunk, ctx.wanted)
            values_by_chunk.append(values)
            derivatives.append(chunk_derivatives)
        ctx.n_tensors = len(tensors)
        joined_derivatives = joined(derivatives)
        ctx.save_for_backward(*joined_derivatives)
        ctx.set_materialize_grads(False)
        values = joined(values_by_chunk)
        per_value = max(1, len(ctx.wanted))
        for value_X, derivative in zip(values, joined_derivatives[::per_value], strict=False):
            if not len(derivative):
                ctx.mark_non_differentiable(value_X)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        totals: list[Tensor | None] = [None] * ctx.n_tensors
        derivatives = iter(ctx.saved_tensors)
        for gradient_X in gradients:
            for index in ctx.wanted:
                derivative_XY = next(derivatives)
                if gradient_X is None:
                    continue
                scaled_XY = derivative_XY * gradient_X.to(derivative_XY.dtype)[:, None]
                before = totals[index]
                totals[index] = scaled_XY if before is None else before + scaled_XY
        return None, None, *totals


def with_derivatives(of_chunk: ValuesOf, chunk: Values, wanted: list[int]) -> tuple[Values, Values]:
    """A chunk's values, and for each value and each tensor of `wanted`: how the one changes with the other."""
    inputs = [tensor.detach().requires_grad_(index in wanted) for index, tensor in enumerate(chunk)]
    by = [inputs[index] for index in wanted]
    derivatives: list[Tensor] = []
    with torch.enable_grad():
        values = of_chunk(*inputs)
        for value_C in values:
            if value_C.requires_grad:
                # A position's value depends on it alone: the sum's gradient there is its derivative.
                derivatives += torch.autograd.grad(value_C.sum(), by, retain_graph=value_C is not values[-1])
            else:
                derivatives += [tensor.new_zeros(0) for tensor in by]
    return tuple(value_C.detach() for value_C in values), tuple(derivatives)


def split(tensors: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """All tensors in chunks of at most `size` positions, of one size but the last: a short one needs own kernels."""
    count = len(tensors[0])
    even = math.ceil(count / math.ceil(count / size))
    return list(zip(*(torch.split(tensor, even) for tensor in tensors), strict=True))


def joined(chunks: list[Values]) -> Values:
    """The tensors of all chunks end to end."""
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


def default_bytes(head: nn.Module) -> int:
    """Bytes of a chunk of this LM head's logits, where the model's `chunk_bytes` names none."""
    weights = list(head.parameters())
    # Chunks of a head that is trained cost one more product with it: the fewer, the better.
    trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    on_cpu = weights[0].device.type == "cpu"
    return CHUNK_BYTES_ON_CPU if on_cpu and not trained else CHUNK_BYTES


def positions_of(chunk_bytes: int, vocabulary: int) -> int:
    """The positions whose float32 logits fit into these bytes; at least 1."""
    return max(1, chunk_bytes // (4 * vocabulary))


def uncached_autocast(device: str) -> torch.autocast:
    """Autocast as it is, without its cache.

    All chunks would share the cache's bfloat16 copy of the LM head, and add up their gradients in bfloat16. With a copy
    each they are added in the weight's own dtype.
    """
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )
