"""Values made of logits, some positions at a time: the logits of all positions never exist at once.

    hidden (X, D)    h h h h h h h h h h h h          X positions
                     '---.---' '---.---' '---.---'    chunks of at most `chunk_bytes` of float32 logits
    logits (C, V)        '-> l     '-> l     '-> l    one chunk's at a time, and once more in the backward pass
    values               '-> r     '-> r     '-> r    a log-prob, a sum: what is kept of each position
    result (X, ...)      '-------- cat ---------'

Logits are the largest tensors of an update: 37,035 labels of a vocabulary of 128,256 are 19 GB in float32, and a
softmax with its gradient holds three times that. The backward pass makes each chunk's logits once more
(torch.utils.checkpoint), which costs a product with the LM head. Positions that fit into one chunk are taken as they
are.

torch's own `linear_cross_entropy` takes a bare weight and one label a position: no adapter on the head, no cap or scale
of logits, no shared labels, no temperature.

Shape suffixes: X positions, C positions of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 2**28
"""Bytes of a chunk's logits in float32; their gradient needs about two more such tensors."""
CHUNK_BYTES_ON_CPU = 2**26
"""The same on a CPU, whose allocator gives larger blocks back to the system: to have them anew takes long."""

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

    found = []
    for chunk in split((hidden_XD, *columns), size):
        if torch.is_grad_enabled():
            found.append(checkpoint(of_chunk, *chunk, use_reentrant=False))
        else:
            found.append(of_chunk(*chunk))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def split(tensors: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """All tensors in chunks of at most `size` positions, of one size but the last: a short one needs own kernels."""
    count = len(tensors[0])
    even = math.ceil(count / math.ceil(count / size))
    return list(zip(*(torch.split(tensor, even) for tensor in tensors), strict=True))


def positions_of(chunk_bytes: int, n_logits: int) -> int:
    """The positions, of `n_logits` float32 logits each, that fit into these bytes; at least 1."""
    return max(1, chunk_bytes // (4 * n_logits))


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
