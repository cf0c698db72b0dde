"""Rows of different lengths as tensors: a row's segments end to end, its own positions, its own averages.

Padding is on the right and never read: every use goes through the lengths. Each mean is within a row first, so
that a row's loss does not depend on who shares its batch.

Shape suffixes as in `base.py`; L a segment's longest, M labelled positions of all rows, G labels of a position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAD_TO = 8
"""Sequences that go through the backbone are padded to multiples of this: few lengths means few kernels to make."""


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids as (B, longest) int64, zeros on the right, and each row's length (B,)."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    ids = torch.zeros(len(rows), int(lengths.max()) if len(rows) else 0, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return ids, lengths


def pack(*segments: tuple[Tensor, Tensor], multiple: int = 1) -> Tensor:
    """Lay each row's segments end to end, right-padded with zeros.

    Each segment is (values (B, L, ...), lengths (B,)). Returns (B, longest total, ...), that length rounded up to
    a `multiple`; gradients flow.
    """
    lengths = torch.stack([lengths for _, lengths in segments])
    values = segments[0][0]
    longest = -(-int(lengths.sum(0).max()) // multiple) * multiple
    out = values.new_zeros(values.shape[0], longest, *values.shape[2:])
    start_B = torch.zeros_like(lengths[0])
    for values, lengths_B in segments:
        row, column = torch.nonzero(length_mask(lengths_B, values.shape[1]), as_tuple=True)
        out = out.index_put((row, start_B[row] + column), values[row, column].to(out.dtype))
        start_B = start_B + lengths_B
    return out


def length_mask(lengths_B: Tensor, n: int) -> Tensor:
    """(B, n) bool, true at a row's first `lengths_B[b]` positions."""
    return torch.arange(n, device=lengths_B.device) < lengths_B[:, None]


def shift(hidden_BTD: Tensor, start_B: Tensor, n: int) -> Tensor:
    """Row b's hidden states at positions start_b, start_b + 1, ... (B, n, D), clamped at the end."""
    index_BN = (start_B[:, None] + torch.arange(n, device=start_B.device)).clamp(max=hidden_BTD.shape[1] - 1)
    return hidden_BTD.gather(1, index_BN[..., None].expand(-1, -1, hidden_BTD.shape[2]))


def row_mean(values_BN: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean over each row's masked entries, (B,); 0 where a row has none."""
    total_B = torch.where(mask_BN, values_BN, 0).sum(-1)
    return total_B / mask_BN.sum(-1).clamp(min=1)
