"""Rows that begin alike, as one sequence: the beginning that they share goes through the backbone once.

    rows     q q q q # a a            laid out   q q q q | # a a | # b b b | + c
             q q q q # b b b          places     0 1 2 3   4 5 6   4 5 6 7   4 5
             q q q q + c                         trunk     branches

A position sees the trunk and its own branch up to itself, and keeps the position id that it has in its own row, so that
each row's hidden states are the same as in isolation. Outputs of one question (GRPO) and one example at several speeds
are such rows; "Prefix Grouper" (2506.05433) does this for GRPO. A row that joins no other is a tree of its own.

Shape suffixes: B rows, T positions of a row, L ids that rows are compared by, S sequences, P positions of a sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from colar.ops import devices
from colar.ops.ragged import round_up

SPARED = 0.5
"""A row joins a tree if that spares at least this part of its ids, and if it makes the forward cheaper."""
KEYS = 1500
"""Keys to which a position attends at the cost of all else that is computed for it, measured at width 576 on a CPU. A
tree attends under a dense mask, so long branches cost more together than as rows of their own."""


class Tree(NamedTuple):
    """Position in the sequences of each position of the rows, and the other way round.

    `source` (S, P): the row position that is laid there, as an index into rows x positions. `target` (B, T): the
    sequence position of a row's position, as an index into sequences x positions; 0 in a row's padding. `places`
    (S, P): positions in the row. `branches` (S, P): 0 in the trunk, 1, 2, ... in the branches, -1 in the padding.
    """

    source: Tensor
    target: Tensor
    places: Tensor
    branches: Tensor

    def to(self, device: torch.device) -> "Tree":
        return Tree(*(devices.send(column, device) for column in self))

    def gather(self, values_BTD: Tensor) -> Tensor:
        """(B, T, D) of rows -> (S, P, D) of sequences."""
        return values_BTD.flatten(0, 1)[self.source]

    def scatter(self, values_SPD: Tensor) -> Tensor:
        """(S, P, D) of sequences -> (B, T, D) of rows. Values in a row's padding are never read."""
        return values_SPD.flatten(0, 1)[self.target]

    def seen(self) -> Tensor:
        """(S, P, P) bool: True where a query sees a key. Padding sees the trunk and itself."""
        key_S1P = self.branches[:, None, :]
        own = (self.branches[:, :, None] == key_S1P) | (key_S1P == 0)
        columns_P = torch.arange(self.branches.shape[1], device=self.branches.device)
        # Trunk and branches follow one another, and within each, columns are in the order of the row.
        return own & (columns_P <= columns_P[:, None])

    def behind(self) -> Tensor:
        """(S, P, P): the number of positions by which a key precedes a query in the row."""
        return self.places[:, :, None] - self.places[:, None, :]


def plan(ids_BL: Tensor, id_lengths_B: Tensor, lengths_B: Tensor, width: int) -> Tree | None:
    """The trees, on the CPU, of rows that begin with `ids_BL` (`id_lengths_B` of them) and have `lengths_B` positions.

    `width` is T, the rows' padded length. None if every row would be a sequence of its own, or if the trees, padded to
    the longest, would cost more than the rows.
    """
    # One copy for all columns, because each copy would synchronise with a GPU.
    columns = torch.cat([lengths_B[:, None], id_lengths_B[:, None], ids_BL], dim=1).tolist()
    lengths = [row[0] for row in columns]
    starts = [row[2 : 2 + row[1]] for row in columns]
    trees = _trees(starts, lengths)
    if len(trees) == len(starts):
        return None

    S = len(trees)
    longest = max(trunk + sum(lengths[row] - trunk for row in rows) for trunk, rows in trees)
    # All sequences are padded to the longest tree, which may cost more than the others spare.
    if S * _cost(longest) > len(starts) * _cost(width):
        return None
    P = round_up(longest)
    source = torch.zeros(S, P, dtype=torch.int64)
    places = torch.zeros(S, P, dtype=torch.int64)
    branches = torch.full((S, P), -1, dtype=torch.int64)
    target = torch.zeros(len(starts), width, dtype=torch.int64)
    for sequence, (trunk, rows) in enumerate(trees):
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
    return Tree(source, target, places, branches)


def _trees(starts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(length of the trunk, rows) of each tree, in the order of their first rows."""
    # Sorting makes rows that begin alike neighbours.
    order = sorted(range(len(starts)), key=lambda row: (starts[row], row))
    trees: list[tuple[int, list[int]]] = []
    for row in order:
        if trees:
            trunk, rows = trees[-1]
            common = _common(starts[rows[-1]][:trunk], starts[row])
            # A shorter trunk means longer branches for the rows already in the tree.
            spared = common - (trunk - common) * (len(rows) - 1)
            apart = trunk + sum(lengths[each] - trunk for each in rows)
            together = apart + lengths[row] - spared
            is_cheaper = _cost(together) <= _cost(apart) + _cost(lengths[row])
            if common > 0 and spared >= SPARED * len(starts[row]) and is_cheaper:
                trees[-1] = (common, [*rows, row])
                continue
        trees.append((len(starts[row]), [row]))
    return sorted(trees, key=lambda tree: min(tree[1]))


def _cost(n_positions: int) -> int:
    return n_positions * (KEYS + n_positions)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of equal ids at the starts of two rows."""
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((place for place, (mine, other) in enumerate(pairs) if mine != other), shorter)
