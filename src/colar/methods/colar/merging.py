"""How the tokens of a group become the latent that is fed: `method.merge`.

    sqrt       (E t_1 +     E t_2 +     E t_3) / sqrt(3)      the paper's
    mean       (E t_1 +     E t_2 +     E t_3) / 3            its ablation MP
    ordered    (E t_1 + W_2 E t_2 + W_3 E t_3) / sqrt(3)      ours: W_j a learnt map of the j-th place

A plain sum has lost the order of its tokens: 12 and 21 are one latent where each digit is a token. That of `ordered`
has not. W_j starts as the identity, so that training begins with sums that a model may know already. Near relatives:
MegaByte's patch embedding (2305.07185) and Hourglass's linear pooling (2110.13711) concatenate a group's embeddings and
map them at once, which is the same sum of a map for each place.

Shape suffixes: B rows, T reasoning tokens, K groups, G places of a group, D width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from colar.model.latent_lm import LatentLM
from colar.ops.compress import compress, members, scale

Merge = Literal["sqrt", "mean", "ordered"]


class PlaceMaps(nn.Module):
    """W_2 to W_G: the embeddings of a group's tokens (..., G, D) -> what is summed, (..., G, D), in float32.

    The token in the first place stays as it is.
    """

    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        identity = torch.eye(width)
        self.maps = nn.Parameter(identity.repeat(places - 1, 1, 1))

    def forward(self, embeds: Tensor) -> Tensor:
        mapped = [embeds[..., 0, :].float()]
        # A latent is an input of the backbone: rounding it in training alone would make it another one in the engine.
        with torch.autocast(embeds.device.type, enabled=False):
            for place in range(1, embeds.shape[-2]):
                at_place = embeds[..., place, :].float()
                mapped.append(at_place @ self.maps[place - 1].float().T)
        return torch.stack(mapped, dim=-2)


def modules(merge: Merge, width: int, widest: int) -> dict[str, nn.Module]:
    """The modules that merging needs, by name; `widest` is the most tokens that a group may have."""
    return {"place_maps": PlaceMaps(width, widest)} if merge == "ordered" and widest > 1 else {}


def merge_chains(lm: LatentLM, chain_ids: Tensor, sizes_BK: Tensor, merge: Merge) -> Tensor:
    """The latents (B, K, D) of chains (B, T) in groups of `sizes_BK`, in float32; zero where a size is 0."""
    if merge == "ordered":
        ids_BKG, real_BKG = members(chain_ids, sizes_BK)
        return merge_groups(lm, ids_BKG, real_BKG, merge)
    # Targets keep float32 over a half-precision base.
    return compress(lm.embed(chain_ids).float(), sizes_BK, divisor(merge))


def merge_groups(lm: LatentLM, ids: Tensor, real: Tensor, merge: Merge) -> Tensor:
    """The latents (..., D) of groups of tokens: ids (..., G), any where not real; float32, zero for an empty group."""
    # Places without a token may hold -1, which is no row of the embedding.
    embeds = lm.embed(torch.where(real, ids, 0)).float()
    if "place_maps" in lm.extra and ids.shape[-1] > 1:
        embeds = lm.extra["place_maps"](embeds)
    total = (real[..., None] * embeds).sum(-2)
    return total / scale(real.sum(-1, keepdim=True), divisor(merge))


def divisor(merge: Merge) -> Literal["sqrt", "mean"]:
    """What a group's sum is divided by: the square root of its size, or its size."""
    return "mean" if merge == "mean" else "sqrt"
