"""Which reasoning tokens make a group, for any real factor c from 1 (section 3.1 has whole ones).

    tokens        t0   t1   t2   t3   t4   t5   t6         L_r = 7
    c = 3         [      g0     ][      g1     ][g2]       sizes 3, 3, 1
    c = 1.5       [g0][   g1   ][g2][   g3   ][g4]         sizes 1, 2, 1, 2, 1     phase 0
                  [   g0   ][g1][   g2   ][g3][g4]         sizes 2, 1, 2, 1, 1     phase 0.5

Group k starts at token floor(k c + u). The phase u, from 0 to 1, is drawn once for a row, so groups of a c that is not
whole differ in size by one at most, and have c tokens on average over the draws. For a whole c the phase changes
nothing. Only the last group may be shorter: it takes what is left. No padding slot ever lies between the last latent
and the answer.

What c counts need not be tokens: a unit may have several, as a number has digits. Then a group takes that many units.

A group may also be cut short: by a bound on the tokens that a group may have which starts at a token. The next group
starts where it ends, and c still lets it take floor((k + 1) c + u) - floor(k c + u) tokens, k the groups before it.

Shape suffixes: B rows, K groups, T reasoning tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colar.ops import devices, noise

PHASES = 2**20
"""Phases are multiples of 1 / PHASES: so close to 1 that k c + u would be rounded up, there is none."""


def phase(seed_B: Tensor, sample_B: Tensor | int = 0) -> Tensor:
    """u of each row, (B,) float64 in [0, 1): a function of the row's seed, or of a request's seed and sample."""
    drawn_B = noise.uniform(noise.keys(seed_B, sample_B, noise.PHASE), 1)[:, 0]
    return torch.floor(drawn_B * PHASES) / PHASES


def most(step: Tensor, c: Tensor, phase: Tensor) -> Tensor:
    """The tokens that group number `step` (from 0) has where nothing ends it before: int64, of the arguments' shape."""
    # float64: at float32 a fractional factor would move groups of long chains by a token.
    c = devices.wide(c)
    return (torch.floor((step + 1) * c + phase) - torch.floor(step * c + phase)).long()


def sizes(lengths_B: Tensor, c_B: Tensor, phase_B: Tensor | float = 0.0) -> Tensor:
    """The tokens of each group of each row, (B, K) int64; 0 behind a row's last group.

    `lengths_B` are the reasoning tokens. Without a phase a row has ceil(L_r / c) groups.
    """
    c_B = devices.wide(c_B)
    phase_B = torch.as_tensor(phase_B, dtype=c_B.dtype, device=c_B.device).expand_as(c_B)
    n_groups = _most_groups(lengths_B, c_B)
    # Where each group starts; the one behind the last starts at the chain's end, or later.
    step_K1 = torch.arange(n_groups + 1, device=c_B.device)
    starts_BK1 = torch.floor(step_K1 * c_B[:, None] + phase_B[:, None]).long()
    starts_BK1 = torch.minimum(starts_BK1, lengths_B[:, None])
    return _used(starts_BK1.diff(dim=1))


def reach(unit_BT: Tensor, starts_BK: Tensor, most_BK: Tensor) -> Tensor:
    """The tokens of `most` units from each start on, (B, K). `unit_BT` are the tokens of the unit that starts at each
    token. More units than the row has reach beyond its end."""
    last = unit_BT.shape[1] - 1
    total_BK = torch.zeros_like(starts_BK)
    for step in range(int(most_BK.max()) if most_BK.numel() else 0):
        at_BK = starts_BK + total_BK
        length_BK = unit_BT.gather(1, at_BK.clamp(max=last))
        total_BK = total_BK + torch.where(step < most_BK, length_BK, 0)
    return total_BK


def cut_sizes(
    lengths_B: Tensor, c_B: Tensor, phase_B: Tensor, bounds_BT: Tensor, unit_BT: Tensor | None = None
) -> Tensor:
    """As `sizes`, and a group that starts at token t has no more than `bounds_BT[:, t]` tokens, from 1 on.

    c counts units where `unit_BT` says how many tokens the unit has that starts at each token; else tokens.
    """
    columns: list[Tensor] = []
    start_B = torch.zeros_like(lengths_B)
    # A group's start depends on where the one before it was cut: one group of all rows after another.
    while bool((start_B < lengths_B).any()):
        step_B = torch.full_like(lengths_B, len(columns))
        # Rows that have ended look at their last token; nothing is left for them to take.
        at_B1 = start_B.clamp(max=bounds_BT.shape[1] - 1)[:, None]
        bound_B = bounds_BT.gather(1, at_B1)[:, 0]
        size_B = most(step_B, c_B, phase_B)
        if unit_BT is not None:
            size_B = reach(unit_BT, at_B1, size_B[:, None])[:, 0]
        size_B = torch.minimum(size_B, bound_B)
        size_B = torch.minimum(size_B, lengths_B - start_B)
        columns.append(size_B)
        start_B = start_B + size_B
    return torch.stack(columns, dim=1) if columns else lengths_B.new_zeros(len(lengths_B), 0)


def counts(sizes_BK: Tensor) -> Tensor:
    """L_c, the groups of each row, (B,) int64. A row without reasoning tokens has none."""
    return (sizes_BK > 0).sum(-1)


def starts(sizes_BK: Tensor) -> Tensor:
    """The first token of each group, (B, K); behind the last group, the chain's length."""
    return sizes_BK.cumsum(-1) - sizes_BK


def _most_groups(lengths_B: Tensor, c_B: Tensor) -> int:
    """An upper bound of any row's groups: a phase only makes them fewer."""
    if not lengths_B.numel():
        return 0
    return int(torch.ceil(devices.wide(lengths_B) / c_B).max())


def _used(sizes_BK: Tensor) -> Tensor:
    """Without the columns behind every row's last group."""
    used = int((sizes_BK > 0).any(0).sum())
    return sizes_BK[:, :used]
