"""Embedding Compress (section 3.1): the embeddings of a group of reasoning tokens become one latent.

    tokens      t0   t1   t2   t3   t4   t5   t6      L_r = 7, c = 3
    groups     [      g0     ][      g1     ][g2]     L_c = ceil(7 / 3) = 3
    latent k   sum of the group's embeddings / sqrt(number of tokens in it)

`groups.py` says which tokens make a group. Departure: the paper divides by sqrt(c), we by the square root of the
tokens really in the group. This is the same for full groups and keeps the scale of the last one.

Shape suffixes: B rows, T reasoning tokens, K latents, G tokens of a group, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from colar.ops import devices, groups

Divisor = Literal["sqrt", "mean"]


def scale(size: Tensor, divisor: Divisor = "sqrt") -> Tensor:
    """The divisor of a sum of `size` embeddings: sqrt(size), or size; 1 for an empty sum."""
    count = size.clamp(min=1).float()
    return count.sqrt() if divisor == "sqrt" else count


def compress(embeds_BTD: Tensor, sizes_BK: Tensor, divisor: Divisor = "sqrt") -> Tensor:
    """Merge each row's embeddings in groups of `sizes_BK` tokens, from the first one on.

    Returns the latents (B, K, D), zero where a size is 0. `sqrt` divides a group's sum by the square root of its size
    (keeps the variance of uncorrelated embeddings), `mean` by its size (the paper's mean-pooling ablation). Sums are
    taken in float32.
    """
    B, T, D = embeds_BTD.shape
    K = sizes_BK.shape[1]
    if K == 0:
        return embeds_BTD.new_zeros(B, 0, D)

    # Merging is one matrix product: row k of a sample's weights has 1 / scale at the tokens of group k.
    #                t0   t1   t2   t3   t4   (pad)
    #     latent 0   1/s  1/s   0    0    0    0         c = 2, L_r = 5, s = sqrt(2)
    #     latent 1    0    0   1/s  1/s   0    0
    #     latent 2    0    0    0    0    1    0
    starts_BK1 = groups.starts(sizes_BK)[..., None]
    ends_BK1 = starts_BK1 + sizes_BK[..., None]
    position_T = torch.arange(T, device=embeds_BTD.device)
    member_BKT = (position_T >= starts_BK1) & (position_T < ends_BK1)
    weight_BKT = member_BKT.float() / scale(sizes_BK, divisor)[..., None]

    # A weight of 0 is not enough: 0 times a NaN in the padding would be NaN.
    real_BT = position_T < sizes_BK.sum(-1, keepdim=True)
    clean_BTD = torch.where(real_BT[..., None], embeds_BTD, 0)
    # Under autocast the product would be taken in bfloat16.
    with torch.autocast(embeds_BTD.device.type, enabled=False):
        latents_BKD = weight_BKT @ clean_BTD.float()
    return latents_BKD.to(embeds_BTD.dtype)


def members(ids_BT: Tensor, sizes_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each group: ids (B, K, G) and which of them are real (B, K, G) bool.

    G is the size of the largest group; ids are 0 where a group is shorter, or a row has fewer groups.
    """
    G = int(sizes_BK.max()) if sizes_BK.numel() else 0
    if G == 0:
        nothing = ids_BT.new_zeros(*sizes_BK.shape, 0)
        return nothing, nothing.bool()
    # A group is a run of tokens: its first position, and the positions after it.
    offset_G = torch.arange(G, device=ids_BT.device)
    position_BKG = groups.starts(sizes_BK)[..., None] + offset_G
    position_BKG = position_BKG.clamp(max=ids_BT.shape[1] - 1)
    ids_BKG = ids_BT.gather(1, position_BKG.flatten(1)).view(position_BKG.shape)
    real_BKG = offset_G < sizes_BK[..., None]
    return torch.where(real_BKG, ids_BKG, 0), real_BKG


def pick_one(real_BKG: Tensor, uniform_BK: Tensor) -> Tensor:
    """One member of each group, chosen uniformly: the label of section 3.1, as a (B, K, G) bool mask.

    `uniform_BK` in [0, 1) decides, so the draw is a function of its seed and of nothing else.
    """
    size_BK = real_BKG.sum(-1)
    last_BK = (size_BK - 1).clamp(min=0)
    chosen_BK = torch.minimum((uniform_BK * size_BK).long(), last_BK)
    one_BKG = torch.arange(real_BKG.shape[-1], device=real_BKG.device) == chosen_BK[..., None]
    # An empty group chose its place 0, which holds no token.
    return one_BKG & real_BKG


def lattice(
    probs_BV: Tensor, c_B: Tensor, choose: Callable[[Tensor, int], Tensor], most: int | None = None
) -> tuple[Tensor, Tensor]:
    """The c tokens that a distribution over a group's tokens stands for: ids (B, G), and which are real (B, G) bool.

    The label of a group is a distribution whose masses are multiples of 1/c, so latents lie on a lattice: the sums
    of c embeddings. A token is chosen by `choose(masses (B, V), g)` (argmax, or a draw), 1/c is taken off its mass,
    and this is repeated c times (the method of largest remainders). A probability of 1 is the same token c times.
    `most` is the largest of the c, where it is known without a look at them.
    """
    size_B = torch.ceil(devices.wide(c_B))
    share_B1 = (1 / size_B[:, None]).to(probs_BV.dtype)
    left_BV = probs_BV.clone()
    ids: list[Tensor] = []
    for g in range(int(size_B.max()) if most is None else most):
        chosen_B = choose(left_BV, g)
        left_BV.scatter_add_(1, chosen_B[:, None], -share_B1)
        left_BV.clamp_(min=0)
        ids.append(chosen_B)
    # Rows with a smaller c than the largest were given tokens too many.
    real_BG = torch.arange(len(ids), device=c_B.device) < size_B[:, None]
    return torch.stack(ids, dim=1), real_BG
