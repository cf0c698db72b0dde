"""How the tokens of a group become the latent that is fed: `method.merge`.

    sqrt       (E t_1 +     E t_2 +     E t_3) / sqrt(3)      the paper's
    mean       (E t_1 +     E t_2 +     E t_3) / 3            its ablation MP
    ordered    (E t_1 + W_2 E t_2 + W_3 E t_3) / sqrt(3)      ours: W_j a learnt map of the j-th place

A plain sum has lost the order of its tokens: 12 and 21 are one latent where each digit is a token. That of `ordered`
has not. Where numbers are units (`units.py`), a number is the ordered sum of its digits, and j the place of its unit:

    [<< 4 8 /]     ( E << + W_2 (U_2 E 4 + E 8) + W_3 E / ) / sqrt(4)      U_2: the map of tens, U_3 of hundreds

So a number is read alike wherever in a group it stands, and a digit by what it is worth. The maps start as the
identity: training begins with sums that a model may know already. Near relatives: MegaByte's patch embedding
(2305.07185) and Hourglass's linear pooling (2110.13711) concatenate a group's embeddings and map them at once, which is
the same sum of a map for each place.

Shape suffixes: B rows, T reasoning tokens, K groups, G places of a group, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from colar.methods.colar.units import LONGEST, PLAIN, Units
from colar.model.latent_lm import LatentLM
from colar.ops.compress import compress, members, scale

Merge = Literal["sqrt", "mean", "ordered"]


class PlaceMaps(nn.Module):
    """W_2 to W_n: embeddings (..., G, D) by the place that each has -> what is summed, in float32.

    Places are (..., G), from 0, and by default the order. What is in the first place stays as it is. With a `rank` R a
    map is I + U V, U (D, R) and V (R, D), as LoRA changes a weight: trained maps differ from the identity in few
    directions (lab/LOG.md).
    """

    def __init__(self, width: int, places: int, rank: int | None = None) -> None:
        super().__init__()
        self.rank = rank
        if rank is None:
            self.maps = nn.Parameter(torch.eye(width).repeat(places - 1, 1, 1))
        else:
            self.up = nn.Parameter(torch.zeros(places - 1, width, rank))
            self.down = nn.Parameter(torch.randn(places - 1, rank, width) / width**0.5)

    def matrices(self) -> Tensor:
        """W_2 to W_n, (P - 1, D, D) float32."""
        if self.rank is None:
            return self.maps.float()
        up, down = self.up.float(), self.down.float()
        with torch.autocast(up.device.type, enabled=False):
            return torch.eye(up.shape[1], device=up.device) + up @ down

    def of_each_place(self, embeds_UD: Tensor) -> Tensor:
        """(U, D) -> (P, U, D): what each embedding is in each place, the first one as it is."""
        embeds_UD = embeds_UD.float()
        with torch.autocast(embeds_UD.device.type, enabled=False):
            if self.rank is None:
                mapped_PUD = embeds_UD @ self.maps.float().transpose(1, 2)
            else:
                low_PUR = embeds_UD @ self.down.float().transpose(1, 2)
                mapped_PUD = embeds_UD + low_PUR @ self.up.float().transpose(1, 2)
        return torch.cat([embeds_UD[None], mapped_PUD])

    @torch.no_grad()
    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """Take the maps of a checkpoint, which may have other numbers of places, or another rank: (P' - 1, D, D), or U
        and V.

        Places that it lacks stay as they are; those that it has more are left out. ValueError for another width.
        """
        if "maps" in state:
            maps = state["maps"].float()
        else:
            up, down = state["up"].float(), state["down"].float()
            maps = torch.eye(up.shape[1]) + up @ down
        mine = self.matrices()
        if maps.shape[1:] != mine.shape[1:]:
            raise ValueError(f"maps of width {maps.shape[-1]} do not fit those of width {mine.shape[-1]}")
        n = min(len(maps), len(mine))
        maps = maps[:n]
        if self.rank is None:
            self.maps[:n] = maps
            return
        # The nearest change of that rank, its scale shared by both factors.
        u, s, v = torch.linalg.svd(maps - torch.eye(maps.shape[-1]), full_matrices=False)
        root = s[:, : self.rank].sqrt()
        self.up[:n] = u[:, :, : self.rank] * root[:, None, :]
        self.down[:n] = v[:, : self.rank] * root[:, :, None]

    def forward(self, embeds: Tensor, places: Tensor | None = None) -> Tensor:
        if places is None:
            places = torch.arange(embeds.shape[-2], device=embeds.device)
        mapped = embeds.float()
        # A latent is an input of the backbone: rounding it in training alone would make it another one in the engine.
        with torch.autocast(embeds.device.type, enabled=False):
            for place, weight in enumerate(self.matrices(), start=1):
                at = (places == place)[..., None]
                mapped = torch.where(at, mapped @ weight.T, mapped)
        return mapped


def modules(
    merge: Merge, width: int, most: int, units: Units = PLAIN, rank: int | None = None
) -> dict[str, nn.Module]:
    """The modules that merging needs, by name; `most` is the most units that a group may have."""
    found: dict[str, nn.Module] = {}
    if merge == "ordered" and most > 1:
        found["place_maps"] = PlaceMaps(width, most, rank)
    if merge == "ordered" and units.digit_ids:
        found["digit_maps"] = PlaceMaps(width, LONGEST, rank)
    return found


def merge_chains(
    lm: LatentLM, chain_ids: Tensor, sizes_BK: Tensor, merge: Merge, units: Units = PLAIN
) -> Tensor:
    """The latents (B, K, D) of chains (B, T) in groups of `sizes_BK`, in float32; zero where a size is 0."""
    if merge == "ordered":
        ids_BKG, real_BKG = members(chain_ids, sizes_BK)
        return merge_groups(lm, ids_BKG, real_BKG, merge, units)
    # Targets keep float32 over a half-precision base.
    return compress(lm.embed(chain_ids).float(), sizes_BK, divisor(merge))


def merge_groups(lm: LatentLM, ids: Tensor, real: Tensor, merge: Merge, units: Units = PLAIN) -> Tensor:
    """The latents (..., D) of groups of tokens: ids (..., G), any where not real; float32, zero for an empty group."""
    # Places without a token may hold -1, which is no row of the embedding.
    known = torch.where(real, ids, 0)
    mapped = "digit_maps" in lm.extra or "place_maps" in lm.extra
    # The table takes a look at the ids, which a GPU would have to wait for; there the products of all tokens are fast.
    if mapped and ids.device.type == "cpu" and ids.shape[-1] > 1:
        return _from_table(lm, known, real, units) / scale(real.sum(-1, keepdim=True), divisor(merge))
    embeds = lm.embed(known).float()
    if ids.shape[-1] > 1:
        unit, digit = units.places(torch.where(real, ids, -1))
        for name, places in (("digit_maps", digit), ("place_maps", unit)):
            if name in lm.extra:
                embeds = lm.extra[name](embeds, places)
    total = (real[..., None] * embeds).sum(-2)
    return total / scale(real.sum(-1, keepdim=True), divisor(merge))


def _from_table(lm: LatentLM, ids: Tensor, real: Tensor, units: Units) -> Tensor:
    """The sums (..., D) of mapped embeddings, each token of a batch mapped to each place once.

    Chains have a few dozen different tokens and thousands of places: the maps' products would take as long as the
    layers of a small backbone.
    """
    present_U, index = torch.unique(ids, return_inverse=True)
    unit, digit = units.places(torch.where(real, ids, -1))
    table = lm.embed(present_U).float()
    for name, place in (("digit_maps", digit), ("place_maps", unit)):
        if name in lm.extra:
            maps = lm.extra[name]
            assert isinstance(maps, PlaceMaps)
            rows = table.flatten(end_dim=-2)
            index = index + place * len(rows)
            table = maps.of_each_place(rows)
    # Groups of more units than there are maps do not come: c is at most what was trained.
    index = torch.where(real, index, 0)
    sums = nn.functional.embedding_bag(
        index.flatten(end_dim=-2),
        table.reshape(-1, table.shape[-1]),
        mode="sum",
        per_sample_weights=real.flatten(end_dim=-2).to(table.dtype),
    )
    return sums.view(*ids.shape[:-1], -1)


def divisor(merge: Merge) -> Literal["sqrt", "mean"]:
    """What a group's sum is divided by: the square root of its size, or its size."""
    return "mean" if merge == "mean" else "sqrt"
