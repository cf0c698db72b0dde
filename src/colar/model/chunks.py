"""What is made of logits, some positions at a time: the logits of all positions never exist at once.

    hidden (X, D)    h h h h h h h h h h h h          X positions
                     '---.---' '---.---' '---.---'    chunks of at most `chunk_bytes` of float32 logits
    logits (C, V)        '-> l     '-> l     '-> l    one chunk's at a time
    reduce               '-> r     '-> r     '-> r    a log-prob, a sum: what is kept of each position
    result (X, ...)      '-------- cat ---------'

Logits are the largest tensors of an update: 37,035 labels of a vocabulary of 128,256 are 19 GB in float32, and a
softmax with its gradient holds three times that. Here the backward pass makes each chunk's logits once more
(torch.utils.checkpoint), which costs a product with the LM head. Positions that fit into one chunk are reduced as they
are, with nothing made twice.

torch's own `linear_cross_entropy` recomputes likewise where each position's loss is asked for. It takes a bare weight
and one label a position: no adapter on the head, no cap or scale of logits, no shared labels, no temperature.

Shape suffixes: X positions, C positions of a chunk, D width, V vocabulary, S some rows of the LM head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 2**28
"""Bytes of a chunk's logits in float32; the backward pass holds about three such tensors."""

Reduce = Callable[..., tuple[Tensor, ...]]
"""Logits (C, V) and columns (C, ...) -> tensors (C, ...), each position's a function of its own logits alone."""


def reduce_in_chunks(
    logits_of: Callable[[Tensor], Tensor],
    reduce: Reduce,
    hidden_XD: Tensor,
    columns: tuple[Tensor, ...],
    size: int,
) -> tuple[Tensor, ...]:
    """`reduce(logits_of(hidden_XD), *columns)`, computed `size` positions at a time.

    `columns` have X rows each. Loss and gradients are those of one piece, up to rounding.
    """
    if len(hidden_XD) <= size:
        return reduce(logits_of(hidden_XD), *columns)

    def reduced(hidden_CD: Tensor, *columns_C: Tensor) -> tuple[Tensor, ...]:
        with uncached_autocast(hidden_CD.device.type):
            return reduce(logits_of(hidden_CD), *columns_C)

    # Chunks of one size: a short last one would need kernels of its own.
    even = -(-len(hidden_XD) // -(-len(hidden_XD) // size))
    chunks = zip(*(torch.split(tensor, even) for tensor in (hidden_XD, *columns)), strict=True)
    if torch.is_grad_enabled():
        found = [checkpoint(reduced, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        found = [reduced(*chunk) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


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
