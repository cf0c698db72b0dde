"""Rows that begin alike, as one sequence: what they share goes through the backbone once.

    rows     q q q q # a a            laid out   q q q q | # a a | # b b b | + c
             q q q q # b b b          places     0 1 2 3   4 5 6   4 5 6 7   4 5
             q q q q + c                         trunk     branches

A position sees the trunk and its own branch up to itself, and keeps the position id that it has in its own row. So each
row's hidden states are what they would be alone. A row that is like no other is a sequence of its own. Outputs of one
question (GRPO) and one example at several speeds are such rows; "Prefix Grouper" (2506.05433) has it for GRPO.

Shape suffixes: B rows, T positions of a row, L ids that rows are compared by, S sequences, P positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colar.ops.ragged import PAD_TO

SPARED = 0.5
"""A row joins a sequence where that spares at least this part of its ids."""


@dataclass(frozen=True)
class Tree:
    """Position in the sequences of each position of the rows, and the other way round.

    `source` (S, P): the position of a row, as an index into rows x positions. `target` (B, T): the position of a
    sequence, as an index into sequences x positions; 0 in a row's padding. `places` (S, P): positions in the row.
    `branches` (S, P): 0 in the trunk, 1, 2, ... in the branches, -1 in the padding.
    """

    source: Tensor
    target: Tensor
    places: Tensor
    branches: Tensor

    def gather(self, values_BTD: Tensor) -> Tensor:
        """(B, T, D) of rows -> (S, P, D) of sequences."""
        return values_BTD.flatten(0, 1)[self.source]

    def scatter(self, values_SPD: Tensor) -> Tensor:
        """(S, P, D) of sequences -> (B, T, D) of rows. What stands in a row's padding is never read."""
        return values_SPD.flatten(0, 1)[self.target]

    def seen(self) -> Tensor:
        """(S, P, P) bool: which keys a query sees. Padding sees itself."""
        query_SP1 = self.branches[:, :, None]
        key_S1P = self.branches[:, None, :]
        own = (query_SP1 == key_S1P) | ((key_S1P == 0) & (query_SP1 > 0))
        columns_P = torch.arange(self.branches.shape[1], device=self.branches.device)
        # A sequence has trunk and branches one after another: within each, columns are in the order of the row.
        return own & (columns_P <= columns_P[:, None])

    def behind(self) -> Tensor:
        """(S, P, P): how many positions of the row a key stands before a query."""
        return self.places[:, :, None] - self.places[:, None, :]


def plan(ids_BL: Tensor, id_lengths_B: Tensor, lengths_B: Tensor, width: int) -> Tree | None:
    """The tree of rows that begin with `ids_BL` (`id_lengths_B` of them) and have `lengths_B` positions in all.

    `width` is T, the rows' padded length. None where no two rows share enough.
    """
    # One copy of all that Python decides by: each waits for a GPU.
    columns = torch.cat([lengths_B[:, None], id_lengths_B[:, None], ids_BL], dim=1).tolist()
    lengths = [row[0] for row in columns]
    starts = [row[2 : 2 + row[1]] for row in columns]
    sequences = _sequences(starts)
    if len(sequences) == len(starts):
        return None

    longest = max(trunk + sum(lengths[row] - trunk for row in rows) for trunk, rows in sequences)
    P = -(-longest // PAD_TO) * PAD_TO
    source = torch.zeros(len(sequences), P, dtype=torch.int64)
    places = torch.zeros(len(sequences), P, dtype=torch.int64)
    branches = torch.full((len(sequences), P), -1, dtype=torch.int64)
    target = torch.zeros(len(starts), width, dtype=torch.int64)
    for sequence, (trunk, rows) in enumerate(sequences):
        source[sequence, :trunk] = torch.arange(trunk) + rows[0] * width
        places[sequence, :trunk] = torch.arange(trunk)
        branches[sequence, :trunk] = 0
        column = trunk
        for branch, row in enumerate(rows, start=1):
            n = lengths[row] - trunk
            own = torch.arange(trunk, trunk + n)
            source[sequence, column : column + n] = own + row * width
            places[sequence, column : column + n] = own
            branches[sequence, column : column + n] = branch
            target[row, :trunk] = torch.arange(trunk) + sequence * P
            target[row, trunk : trunk + n] = torch.arange(column, column + n) + sequence * P
            column += n
    device = ids_BL.device
    return Tree(source.to(device), target.to(device), places.to(device), branches.to(device))


def _sequences(starts: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """(length of the trunk, rows) of each sequence, in the order of their first rows."""
    # Sorted, rows that begin alike are neighbours.
    order = sorted(range(len(starts)), key=lambda row: (starts[row], row))
    sequences: list[tuple[int, list[int]]] = []
    for row in order:
        if sequences:
            trunk, rows = sequences[-1]
            common = _common(starts[rows[-1]][:trunk], starts[row])
            # A shorter trunk means longer branches for the rows that are there.
            spared = common - (trunk - common) * (len(rows) - 1)
            if common > 0 and spared >= SPARED * len(starts[row]):
                sequences[-1] = (common, [*rows, row])
                continue
        sequences.append((len(starts[row]), [row]))
    return sorted(sequences, key=lambda found: min(found[1]))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of ids that two rows have in common at their starts."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
