"""Rows of different lengths as tensors: segments laid end to end, positions of a row's own, means within a row.

A row is one sequence of a batch, made of segments, each of its own length. `pack` lays them end to end, right-padded:

    question      q q q #     q #         lengths 4, 2
    chain         t t         t t t t     lengths 2, 4
    answer        # a EOS     # a EOS     lengths 3, 3

    packed        q q q # t t # a EOS .  .  .  .  .  .  .
                  q # t t t t # a EOS .  .  .  .  .  .  .      "." is padding, up to a multiple of `PAD_TO`

Attention is causal, so no position sees the padding to its right, and padded rows need no attention mask. Results at
the padding itself are never read, because every use goes through the lengths. `take_from` reads the hidden states of a
row from its own start on, for instance from the last question position, which predicts the next token:

    take_from(start = 3, 1; n = 6)      # t t # a EOS
                                    # t t t t #

Each mean is taken within a row first, so that a row's loss does not depend on its batch mates.

Lengths, starts and masks may be on the CPU and the values on a GPU: then sizes are known without synchronising.

Shape suffixes: B rows, L positions of a segment, T positions, N positions read, D width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from colar.ops import devices

PAD_TO = 8
"""Sequences that go through the backbone are padded to multiples of this, because fewer lengths need fewer kernels."""


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids as (B, longest) int64, zeros on the right, and each row's length (B,)."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    if not rows:
        return lengths.new_zeros(0, 0), lengths
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True), lengths


def pack(*segments: tuple[Tensor, Tensor], multiple: int = 1) -> Tensor:
    """Lay each row's segments end to end, right-padded with zeros.

    Each segment is (values (B, L, ...), lengths (B,)). Returns (B, longest total, ...), that length rounded up to
    a `multiple`; gradients flow.
    """
    lengths_SB = torch.stack([lengths_B for _, lengths_B in segments])
    longest = round_up(int(lengths_SB.sum(0).max()), multiple)
    first, _ = segments[0]
    side_by_side = torch.cat([values.to(first.dtype) for values, _ in segments], dim=1)
    if side_by_side.shape[1] == 0:
        return first.new_zeros(first.shape[0], longest, *first.shape[2:])

    # (B, T): the column of `side_by_side` that each column of the output takes.
    column_T = torch.arange(longest, device=lengths_SB.device)
    source_BT = torch.zeros_like(column_T)
    start_B = torch.zeros_like(lengths_SB[0])
    offset = 0
    for values, lengths_B in segments:
        behind_BT = column_T - start_B[:, None]
        source_BT = torch.where(behind_BT >= 0, offset + behind_BT, source_BT)
        start_B = start_B + lengths_B
        offset += values.shape[1]
    shape = (*source_BT.shape, *(1 for _ in first.shape[2:]))
    source = devices.beside(source_BT.clamp(max=offset - 1).view(shape), first)
    real = devices.beside((column_T < start_B[:, None]).view(shape), first)
    # `where`, not a product, because a segment's padding may hold NaN.
    return torch.where(real, side_by_side.gather(1, source.expand(-1, -1, *first.shape[2:])), 0)


def align_right(values_BLD: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Align rows at their ends, so that all take their next step at one column: values (B, T, D), and (B, T) bool,
    False in the padding.

        q q q #        . . . . q q q #
        q # . .   ->   . . . . . . q #       T is a multiple of `PAD_TO`

    Padding repeats the row's first value, and the mask hides it.
    """
    longest = round_up(int(lengths_B.max()))
    # The column of the input that each column of the output takes; negative in the padding.
    source_BT = torch.arange(longest, device=lengths_B.device) - (longest - lengths_B)[:, None]
    source_BT1 = devices.beside(source_BT.clamp(min=0)[..., None], values_BLD)
    moved_BTD = values_BLD.gather(1, source_BT1.expand(-1, -1, values_BLD.shape[2]))
    return moved_BTD, source_BT >= 0


def length_mask(lengths_B: Tensor, n: int) -> Tensor:
    """(B, n) bool, true at a row's first `lengths_B[b]` positions."""
    return torch.arange(n, device=lengths_B.device) < lengths_B[:, None]


def take_from(hidden_BTD: Tensor, start_B: Tensor, n: int) -> Tensor:
    """Row b's hidden states at positions start_b, start_b + 1, ... (B, n, D), clamped at the end."""
    last = hidden_BTD.shape[1] - 1
    index_BN = (start_B[:, None] + torch.arange(n, device=start_B.device)).clamp(max=last)
    index_BN = devices.beside(index_BN, hidden_BTD)
    return hidden_BTD.gather(1, index_BN[..., None].expand(-1, -1, hidden_BTD.shape[2]))


def row_mean(values_BN: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean over each row's masked entries, (B,); 0 where a row has none."""
    # `where`, not a product with the mask, because values outside it may be NaN or infinite.
    mask_BN = devices.beside(mask_BN, values_BN)
    total_B = torch.where(mask_BN, values_BN, 0).sum(-1)
    return total_B / mask_BN.sum(-1).clamp(min=1)


def take_masked(values_BND: Tensor, mask_BN: Tensor) -> Tensor:
    """The values (M, ...) at the masked positions, row by row."""
    (at_M,) = mask_BN.flatten().nonzero(as_tuple=True)
    # Not by the mask itself: indexing by a mask synchronises with a GPU even if the mask is on the CPU.
    return values_BND.flatten(0, 1).index_select(0, devices.beside(at_M, values_BND))


def put_masked(values_M: Tensor, mask_BN: Tensor) -> Tensor:
    """The inverse of `take_masked`: (B, N, ...), 0 outside the mask."""
    (at_M,) = mask_BN.flatten().nonzero(as_tuple=True)
    zeros_XD = values_M.new_zeros(mask_BN.numel(), *values_M.shape[1:])
    put_XD = zeros_XD.index_copy(0, devices.beside(at_M, values_M), values_M)
    return put_XD.view(*mask_BN.shape, *values_M.shape[1:])


def round_up(n: int, multiple: int = PAD_TO) -> int:
    """`n`, rounded up to a multiple."""
    return math.ceil(n / multiple) * multiple
