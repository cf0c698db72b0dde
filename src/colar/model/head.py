"""The LM head: hidden states to logits of all tokens or of some, and values made of logits a chunk at a time.

    hidden (X, D)    h h h h h h h h h h h h          X positions
                     '---.---' '---.---' '---.---'    chunks of at most `chunk_bytes` of float32 logits
    logits (C, V)        '-> l     '-> l     '-> l    one chunk's at a time
    values               '-> r     '-> r     '-> r    a log-prob, an entropy: one number for each position
    derivatives (C, D)   '-> d     '-> d     '-> d    of r by h: made with it, cached for the backward pass
    result (X,)          '-------- cat ---------'

Logits are the largest tensors of an update: 37,035 labels of a vocabulary of 128,256 are 19 GB in float32, and a
softmax with its gradient requires three times that. A position's value depends on its own hidden state alone, so its
derivative is known as soon as the value is, and the backward pass only scales it. Nothing is computed twice (as in
Liger's fused cross-entropy). There is no second derivative.

If the head itself is trained, there are no such derivatives: the backward pass recomputes each chunk's logits
(torch.utils.checkpoint), which costs a product with the LM head.

torch's own `linear_cross_entropy` takes a bare weight and one label a position: no adapter on the head, no cap or scale
of logits, no shared labels, no temperature.

Shape suffixes: X positions, C positions of a chunk, D width, V vocabulary, S tokens of a partial head.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from colar.ops import devices

CHUNK_BYTES = 2**28
"""Bytes of a chunk's logits in float32; their gradient needs about two more such tensors."""
CHUNK_BYTES_ON_CPU = 2**24
"""The same on a CPU with a head that is not trained. The CPU's allocator returns larger blocks to the system, and
allocating them anew for every tensor takes longer than the softmax itself: a chunk of 2**28 takes twice as long."""

Values = tuple[Tensor, ...]
ValuesOf = Callable[..., Values]
"""Hidden states (C, D) or logits (C, V), and columns (C, ...) -> tensors (C,): each position's value, from it alone."""


@dataclass(frozen=True)
class PartialHead:
    """An LM head's weights of some tokens, in ascending order of their ids, with the values that they had at `gather`.

    `weight_SD` is None if the head is more than one product (it has a LoRA adapter, for instance): then the head
    computes the logits of all ids, and those of these tokens are selected.
    """

    ids_S: Tensor
    ids_on_cpu_S: Tensor
    weight_SD: Tensor | None = None
    bias_S: Tensor | None = None

    @classmethod
    def gather(cls, head: Any, ids: tuple[int, ...], device: torch.device) -> "PartialHead":
        """The head's weights of these tokens. Gradients flow through them to the head."""
        ids_S, ids_on_cpu_S = devices.constant(ids, device), torch.tensor(ids)
        # A head with an adapter, or with a quantised weight, computes something else than x W^T + b.
        if type(head) is not nn.Linear:
            return cls(ids_S, ids_on_cpu_S)
        return cls(ids_S, ids_on_cpu_S, head.weight[ids_S], None if head.bias is None else head.bias[ids_S])

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The index of each id among the tokens, and True where the id is one of them; both have the shape of `ids`."""
        # The result is on the device of `ids`.
        listed_S = self.ids_on_cpu_S if ids.device.type == "cpu" else self.ids_S
        place = torch.searchsorted(listed_S, ids).clamp(max=len(listed_S) - 1)
        return place, listed_S[place] == ids


def head_logits(causal_lm: PreTrainedModel, hidden: Tensor, part: PartialHead | None = None) -> Tensor:
    """(..., D) -> (..., V) or (..., S) float32: the LM head, or a part of it, and the steps that follow in some
    families: Cohere and Granite scale logits, Gemma 2 caps them."""
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


# Chunks


def in_chunks(values_of: ValuesOf, hidden_XD: Tensor, columns: tuple[Tensor, ...], size: int) -> Values:
    """`values_of(hidden_XD, *columns)`, computed `size` positions at a time.

    `columns` are (X, ...), without gradient. Values and gradients equal those of a single call, up to rounding.
    """
    if len(hidden_XD) <= size:
        return values_of(hidden_XD, *columns)

    def of_chunk(*chunk: Tensor) -> Values:
        with uncached_autocast(hidden_XD.device.type):
            return values_of(*chunk)

    make: ValuesOf = of_chunk
    if torch.is_grad_enabled():
        # A call with no positions tells whether the head itself is trained, and costs nothing.
        of_nothing = of_chunk(hidden_XD[:0].detach(), *(column[:0] for column in columns))
        if any(value.requires_grad for value in of_nothing):
            make = functools.partial(checkpoint, of_chunk, use_reentrant=False)
        elif hidden_XD.requires_grad:
            values: Values = _WithDerivatives.apply(of_chunk, size, hidden_XD, *columns)  # type: ignore[no-untyped-call]
            return values
    return _joined([make(*chunk) for chunk in _split((hidden_XD, *columns), size)])


class _WithDerivatives(torch.autograd.Function):
    """Values of all chunks; their derivatives by the hidden states are cached."""

    @staticmethod
    def forward(ctx: Any, of_chunk: ValuesOf, size: int, hidden_XD: Tensor, *columns: Tensor) -> Values:
        chunks = [_with_derivatives(of_chunk, *chunk) for chunk in _split((hidden_XD, *columns), size)]
        values = _joined([values for values, _ in chunks])
        derivatives = _joined([derivatives for _, derivatives in chunks])
        ctx.save_for_backward(*derivatives)
        ctx.n_columns = len(columns)
        ctx.set_materialize_grads(False)
        # The derivative of a value that has no gradient is empty.
        pairs = zip(values, derivatives, strict=True)
        ctx.mark_non_differentiable(*(value_X for value_X, derivative in pairs if not len(derivative)))
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        total_XD: Tensor | None = None
        for gradient_X, derivative_XD in zip(gradients, ctx.saved_tensors, strict=True):
            if gradient_X is not None:
                scaled_XD = derivative_XD * gradient_X.to(derivative_XD.dtype)[:, None]
                total_XD = scaled_XD if total_XD is None else total_XD + scaled_XD
        return None, None, total_XD, *[None] * ctx.n_columns


def _with_derivatives(of_chunk: ValuesOf, hidden_CD: Tensor, *columns: Tensor) -> tuple[Values, Values]:
    """A chunk's values (C,), and the derivative of each by the hidden states, (C, D); (0,) if it has no gradient."""
    hidden_CD = hidden_CD.detach().requires_grad_()
    derivatives = []
    with torch.enable_grad():
        values = of_chunk(hidden_CD, *columns)
        for value_C in values:
            assert value_C.dim() == 1, "a position's value is one number"
            derivative = hidden_CD.new_zeros(0)
            if value_C.requires_grad:
                # A position's value depends on that position alone, so the sum's gradient there is its derivative.
                (derivative,) = torch.autograd.grad(
                    value_C.sum(), hidden_CD, retain_graph=value_C is not values[-1]
                )
            derivatives.append(derivative)
    return tuple(value_C.detach() for value_C in values), tuple(derivatives)


def _split(tensors: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """All tensors in chunks of at most `size` positions, of one size but the last: a short one needs new kernels."""
    count = len(tensors[0])
    even = math.ceil(count / math.ceil(count / size))
    return list(zip(*(torch.split(tensor, even) for tensor in tensors), strict=True))


def _joined(chunks: list[Values]) -> Values:
    """The tensors of all chunks, concatenated."""
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


def default_chunk_bytes(head: nn.Module) -> int:
    """Bytes of a chunk of this LM head's logits, for a model whose `chunk_bytes` is None."""
    weights = list(head.parameters())
    # Chunks of a head that is trained cost one more product with the head, so the fewer, the better.
    trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    on_cpu = weights[0].device.type == "cpu"
    return CHUNK_BYTES_ON_CPU if on_cpu and not trained else CHUNK_BYTES


def positions_of(chunk_bytes: int, vocabulary: int) -> int:
    """Number of positions whose float32 logits fit into these bytes; at least 1."""
    return max(1, chunk_bytes // (4 * vocabulary))


def uncached_autocast(device: str) -> torch.autocast:
    """Autocast with its current settings, without its cache.

    With the cache, all chunks would share one bfloat16 copy of the LM head and accumulate their gradients in bfloat16.
    With a copy for each chunk, gradients are accumulated in the weight's own dtype.
    """
    return torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )
