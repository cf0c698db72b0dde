"""Merge of the tokens of a group into the latent that is fed: `method.merge`.

    sqrt       (E t_1 +     E t_2 +     E t_3) / sqrt(3)      the paper's
    ordered    (E t_1 + W_2 E t_2 + W_3 E t_3) / sqrt(3)      ours: W_j a learnt map of the j-th place

A plain sum loses the order of its tokens: 12 and 21 are one latent where each digit is a token. The sum of `ordered`
keeps it. In groups of equations a number is the ordered sum of its digits, and j is the place of its unit:

    [4 8 <<]     ( (U_2 E 4 + E 8) + W_2 E << ) / sqrt(3)      U_2: the map of tens, U_3 of hundreds

So a number's digits are summed alike at any place of a group, each by its place value. A map is I + U V of rank 32, as
LoRA changes a weight, because trained full matrices differed from the identity in few directions (lab/LOG.md). It
starts as the identity, so that training begins with sums that a model may know already. Near relatives are listed in
docs/method.md.

Shape suffixes: B rows, T reasoning tokens, K groups, G places of a group, P places with a map, R rank, N tokens of all
groups, D width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colar.methods import grouping
from colar.methods.sequential.boundaries import NOTHING, Equations
from colar.model.latent_lm import LatentLM
from colar.ops import devices

RANK = 32
"""Rank of the term that a map adds to the identity."""


class PlaceMaps(nn.Module):
    """Maps W_2 to W_n: embeddings (..., G, D), each mapped by its place -> the terms of the sum, in float32.

    Places are (..., G), from 0. Embeddings in the first place are unchanged.
    """

    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(places - 1, width, RANK))
        self.down = nn.Parameter(torch.randn(places - 1, RANK, width) / width**0.5)

    @torch.no_grad()
    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """Copy the maps of a checkpoint, which may have another number of places. ValueError for another width.

        Places that the checkpoint lacks are unchanged; its further places are left out.
        """
        for name, mine in self.named_parameters():
            theirs = state[name]
            if theirs.shape[1:] != mine.shape[1:]:
                raise ValueError(
                    f"maps of {tuple(theirs.shape[1:])} do not fit those of {tuple(mine.shape[1:])}"
                )
            n = min(len(theirs), len(mine))
            mine[:n] = theirs[:n]

    def forward(self, embeds: Tensor, places: Tensor) -> Tensor:
        embeds_ND = embeds.flatten(end_dim=-2).float()
        # Places continue after a group's end, but nothing there is summed.
        places_N = devices.beside(places.flatten(), embeds_ND).clamp(max=len(self.up))
        place_P1 = torch.arange(1, len(self.up) + 1, device=embeds_ND.device)[:, None]
        own_PN1 = (places_N == place_P1)[..., None]
        # A latent is an input of the backbone: if training alone rounded it, the engine would feed another one.
        with torch.autocast(embeds_ND.device.type, enabled=False):
            # The place is chosen at rank R: every map of every token would be P times as much at width D.
            low_PNR = torch.where(own_PN1, embeds_ND @ self.down.float().transpose(1, 2), 0)
            mapped_ND = embeds_ND + torch.einsum("pnr,pdr->nd", low_PNR, self.up.float())
        return mapped_ND.view(embeds.shape)


def merge_chains(lm: LatentLM, chain_ids: Tensor, sizes_BK: Tensor) -> Tensor:
    """The latents (B, K, D) of chains (B, T) in groups of `sizes_BK`, merged in float32."""
    if "digit_maps" in lm.extra or "place_maps" in lm.extra:
        ids_BKG, real_BKG = grouping.tokens_of_groups(chain_ids, sizes_BK)
        return merge_groups(lm, torch.where(real_BKG, ids_BKG, NOTHING))
    return grouping.compress(lm.embed(chain_ids).float(), sizes_BK)


def merge_groups(lm: LatentLM, ids: Tensor) -> Tensor:
    """The latents (..., D) of groups of tokens (..., G), `NOTHING` after them; float32, zero for an empty group."""
    # In training the maps run even if each group has one token, or there is no chain: gradients of zero, not none,
    # because with split weights each process has to have the same.
    runs_maps = ids.shape[-1] > 1 or torch.is_grad_enabled()
    if not ids.shape[-1]:
        ids = ids.new_full((*ids.shape[:-1], 1), NOTHING)
    # The separator that ends a group is not part of it.
    real = (ids != NOTHING) & (ids != lm.template.separator_id)
    embeds = lm.embed(torch.where(real, ids, 0)).float()
    if runs_maps:
        unit = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
        # Only groups of equations have maps of digits.
        if "digit_maps" in lm.extra:
            unit, digit = Equations.of(lm.template).units_and_digits(torch.where(real, ids, NOTHING))
            embeds = lm.extra["digit_maps"](embeds, digit)
        if "place_maps" in lm.extra:
            embeds = lm.extra["place_maps"](embeds, unit)
    total = (devices.beside(real, embeds)[..., None] * embeds).sum(-2)
    divisor = grouping.merge_divisor(real.sum(-1, keepdim=True))
    return total / devices.beside(divisor, total)
