"""Embedding Compress (section 3.1): c consecutive reasoning embeddings become one latent.

    tokens      t0   t1   t2   t3   t4   t5   t6      L_r = 7, c = 3
    groups     [      g0     ][      g1     ][g2]     L_c = ceil(7 / 3) = 3
    latent k   sum of the group's embeddings / sqrt(number of tokens in it)

Groups start at the first reasoning token, and only the last one may be shorter: no padding slot ever lies
between the last latent and the answer. Departure: the paper divides by sqrt(c), we by the square root of the
tokens really in the group, which is the same for full groups and keeps the scale of the last one.
A factor need not be whole: token t (from 0) belongs to group ceil((t + 1) / c) - 1, which is floor(t / c)
for whole factors and gives L_c = ceil(L_r / c) groups for all.

Shape suffixes: B rows, T reasoning tokens, K latents, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Merge = Literal["sqrt", "mean"]


def n_latents(lengths_B: Tensor, c_B: Tensor) -> Tensor:
    """L_c = ceil(L_r / c) per row, (B,) int64. A row without reasoning tokens has no latents."""
    return torch.ceil(lengths_B.double() / c_B.double()).long()


def groups(n_tokens: int, c_B: Tensor) -> Tensor:
    """The group that each token position falls in, (B, T) int64."""
    positions_T = torch.arange(1, n_tokens + 1, device=c_B.device, dtype=torch.float64)
    return torch.ceil(positions_T / c_B.double()[:, None]).long() - 1


def scale(size: Tensor, merge: Merge = "sqrt") -> Tensor:
    """What a sum of `size` embeddings is divided by: sqrt(size), or size; 1 for none."""
    count = size.clamp(min=1).float()
    return count.sqrt() if merge == "sqrt" else count


def compress(
    embeds_BTD: Tensor, lengths_B: Tensor, c_B: Tensor, merge: Merge = "sqrt"
) -> tuple[Tensor, Tensor]:
    """Merge each row's first `lengths_B[b]` embeddings in groups of `c_B[b]`.

    Returns the latents (B, K, D), zero beyond a row's own count, and that count (B,). `sqrt` divides a
    group's sum by the square root of its size (keeps the variance of uncorrelated embeddings), `mean` by its
    size (the paper's mean-pooling ablation). Sums are taken in float32.
    """
    B, T, D = embeds_BTD.shape
    counts_B = n_latents(lengths_B, c_B)
    K = int(counts_B.max()) if B else 0
    if K == 0:
        return embeds_BTD.new_zeros(B, 0, D), counts_B
    real_BT = torch.arange(T, device=embeds_BTD.device) < lengths_B[:, None]
    member_BKT = groups(T, c_B)[:, None, :] == torch.arange(K, device=embeds_BTD.device)[:, None]
    member_BKT = (member_BKT & real_BT[:, None, :]).float()
    weight_BKT = member_BKT / scale(member_BKT.sum(-1, keepdim=True), merge)
    with torch.autocast(embeds_BTD.device.type, enabled=False):
        latents_BKD = weight_BKT @ torch.where(real_BT[..., None], embeds_BTD, 0).float()
    return latents_BKD.to(embeds_BTD.dtype), counts_B


def members(ids_BT: Tensor, lengths_B: Tensor, c_B: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """The tokens of each of a row's first K groups: ids (B, K, G) and which of them are real (B, K, G) bool.

    G is the size of the largest group; ids are 0 where a group is shorter, or a row has fewer groups.
    """
    B, T = ids_BT.shape
    index_BT = groups(T, c_B)
    real_BT = torch.arange(T, device=ids_BT.device) < lengths_B[:, None]
    here_BKT = index_BT[:, None, :] == torch.arange(K, device=ids_BT.device)[:, None]
    here_BKT = here_BKT & real_BT[:, None, :]
    size_BK1 = here_BKT.sum(-1, keepdim=True)
    G = int(size_BK1.max()) if size_BK1.numel() else 0
    if G == 0:
        return ids_BT.new_zeros(B, K, 0), here_BKT[..., :0]
    offset_G = torch.arange(G, device=ids_BT.device)
    real_BKG = offset_G < size_BK1
    at_BKG = (here_BKT.int().argmax(-1, keepdim=True) + offset_G).clamp(max=T - 1)
    ids_BKG = ids_BT.gather(1, at_BKG.flatten(1)).view(at_BKG.shape)
    return torch.where(real_BKG, ids_BKG, 0), real_BKG


def pick_one(real_BKG: Tensor, uniform_BK: Tensor) -> Tensor:
    """One member of each group, chosen uniformly: the label of section 3.1, as a (B, K, G) bool mask.

    `uniform_BK` in [0, 1) decides, so the draw is a function of its seed and of nothing else.
    """
    size_BK = real_BKG.sum(-1)
    chosen_BK = torch.minimum((uniform_BK * size_BK).long(), (size_BK - 1).clamp(min=0))
    one_BKG = torch.arange(real_BKG.shape[-1], device=real_BKG.device) == chosen_BK[..., None]
    return one_BKG & real_BKG


def lattice(probs_BV: Tensor, c_B: Tensor, choose: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
    """The c tokens that a distribution over a group's tokens stands for: ids (B, G), and which are real (B, G) bool.

    The label of a group is a distribution whose masses are multiples of 1/c, so latents lie on a lattice: the sums
    of c embeddings. A token is chosen by `choose(masses (B, V), g)` (argmax, or a draw), 1/c is taken off its mass,
    and so on c times (the method of largest remainders). A probability of 1 is the same token c times.
    """
    size_B = torch.ceil(c_B.double())
    left_BV, ids = probs_BV.clone(), []
    for g in range(int(size_B.max())):
        ids.append(choose(left_BV, g))
        left_BV.scatter_add_(1, ids[-1][:, None], -(1 / size_B[:, None]).to(left_BV.dtype))
        left_BV.clamp_(min=0)
    return torch.stack(ids, dim=1), torch.arange(len(ids), device=c_B.device) < size_B[:, None]
