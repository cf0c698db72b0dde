"""Groups of chains that are given, as training feeds them, and the number of labels at each group's position.

Where c alone ends groups, `grouping.even_sizes` has their sizes. Otherwise the rules of thinking run over a chain from
each of its tokens on, because a group's start depends on where the one before it ended:

    chain       4  8  /  2  =  2  4          grouping: equations
    from 4      1  1  .                      the units of a group up to each token; ".": no group has it
    from 8         1  .
    from /            1  2  .
    from 2               1  .
    from =                  1  .
    from 2                     1  1

Shape suffixes: B rows, T reasoning tokens, K groups, G places of a group, N windows of all rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from colar.methods import grouping
from colar.methods.sequential.equation_groups import Equations, Extents, most_tokens

NEVER = torch.iinfo(torch.int64).max
"""More units than any group has."""


@dataclass(frozen=True)
class Windows:
    """The tokens from each token of the chains on, (B, T, G), which a group may have that starts there."""

    ids_BTG: Tensor
    units_BTG: Tensor
    """The units of a group that ends with the token; `NEVER` where no group has it."""
    compared_BTG: Tensor
    """bool: tokens of a group that a threshold applies to."""

    @classmethod
    def of(
        cls,
        chain: tuple[Tensor, Tensor],
        most_units: int,
        equations: Equations | None,
        unites_digits_B: Tensor,
    ) -> Windows:
        """Those of groups of at most `most_units`; `chain` is ids (B, T) and lengths (B,)."""
        ids_BT, lengths_B = chain
        T, G = ids_BT.shape[1], most_tokens(most_units, equations)
        ids_BTG = pad(ids_BT, (0, G)).unfold(1, G, 1)[:, :T]
        place_G = torch.arange(G, device=ids_BT.device)
        left_BT = lengths_B[:, None] - torch.arange(T, device=ids_BT.device)
        in_chain_NG = (place_G < left_BT[..., None]).flatten(0, 1)
        ids_NG = ids_BTG.flatten(0, 1)

        all_N = torch.arange(len(ids_NG), device=ids_BT.device)
        units_N = torch.full_like(all_N, most_units)
        extents = Extents(ids_NG[:, 0], units_N, equations, unites_digits_B.repeat_interleave(T))
        joins_N = in_chain_NG[:, 0]
        units = [torch.where(joins_N, extents.used_B, NEVER)]
        # The first token is never compared.
        compared = [torch.zeros_like(joins_N)]
        for place in range(1, G):
            token_N = ids_NG[:, place]
            joins_N = joins_N & in_chain_NG[:, place] & extents.open(all_N)
            if equations is not None:
                joins_N = joins_N & extents.admits(all_N, token_N[:, None])[:, 0]
            compared.append(joins_N & extents.compares(all_N))
            extents.add(all_N, token_N)
            units.append(torch.where(joins_N, extents.used_B, NEVER))
        units_NG, compared_NG = torch.stack(units, dim=-1), torch.stack(compared, dim=-1)
        return cls(ids_BTG, units_NG.view(ids_BTG.shape), compared_NG.view(ids_BTG.shape))

    def cut_before(self, low_confidence_BTG: Tensor) -> Windows:
        """The same where groups end before these tokens (bool)."""
        is_cut_BTG = low_confidence_BTG.long().cumsum(-1) > 0
        return dataclasses.replace(self, units_BTG=torch.where(is_cut_BTG, NEVER, self.units_BTG))

    def sizes(self, lengths_B: Tensor, c_B: Tensor, phase_B: Tensor) -> Tensor:
        """The tokens of each group, (B, K), as `grouping.even_sizes` has them where c alone ends groups.

        The next group starts where one ends, and c lets it have as many units as if none had been cut.
        """
        columns: list[Tensor] = []
        start_B = torch.zeros_like(lengths_B)
        # A group's start depends on where the one before it ended: one group of all rows after another.
        while bool((start_B < lengths_B).any()):
            step_B = torch.full_like(lengths_B, len(columns))
            most_units_B = grouping.nominal_units(step_B, c_B, phase_B)
            size_B = self.sizes_at(start_B[:, None], most_units_B[:, None])[:, 0]
            columns.append(torch.minimum(size_B, lengths_B - start_B))
            start_B = start_B + columns[-1]
        return torch.stack(columns, dim=1) if columns else lengths_B.new_zeros(len(lengths_B), 0)

    def sizes_at(self, starts_BK: Tensor, most_units_BK: Tensor) -> Tensor:
        """The tokens of groups that start there and have at most `most_units`, (B, K)."""
        return (_from(self.units_BTG, starts_BK) <= most_units_BK[..., None]).sum(-1)

    def last(self, values_BTG: Tensor, starts_BK: Tensor, sizes_BK: Tensor) -> Tensor:
        """The values of the last tokens of groups, (B, K). An empty group's mean nothing."""
        last_BK1 = (sizes_BK - 1).clamp(min=0)[..., None]
        return _from(values_BTG, starts_BK).gather(-1, last_BK1)[..., 0]


def _from(values_BTG: Tensor, starts_BK: Tensor) -> Tensor:
    """The values of the windows from each start on, (B, K, G)."""
    row_B1 = torch.arange(len(starts_BK), device=starts_BK.device)[:, None]
    # Behind a row's last group the starts are the chain's length.
    return values_BTG[row_B1, starts_BK.clamp(max=values_BTG.shape[1] - 1)]


@dataclass(frozen=True)
class ChainGroups:
    """The groups of a batch's chains, (B, K)."""

    equations: Equations | None
    starts_BK: Tensor
    sizes_BK: Tensor
    """Their tokens."""
    most_units_BK: Tensor
    """The units that c lets them have."""
    windows: Windows | None
    """None where c alone ends groups."""

    def label_counts(self) -> Tensor:
        """The tokens that the decoder chooses at each group's position in thinking, (B, K): the group's own and, where
        another could still have joined it, the one behind."""
        if self.windows is None:
            return torch.minimum(self.most_units_BK, self.sizes_BK + 1)
        units_BK = self.windows.last(self.windows.units_BTG, self.starts_BK, self.sizes_BK)
        is_open_BK = units_BK < self.most_units_BK
        if self.equations is not None:
            last_id_BK = self.windows.last(self.windows.ids_BTG, self.starts_BK, self.sizes_BK)
            is_open_BK = is_open_BK & ~self.equations.is_end(last_id_BK)
        return self.sizes_BK + is_open_BK.long()
