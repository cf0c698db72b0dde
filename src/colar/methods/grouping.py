"""Groups of reasoning tokens, and the latents that are fed for them: what `colar` and `sequential` share.

A compression factor c is the number of reasoning tokens that a latent stands for.

    tokens        t0   t1   t2   t3   t4   t5   t6         L_r = 7
    c = 3         [      g0     ][      g1     ][g2]       sizes 3, 3, 1
    c = 1.5       [g0][   g1   ][g2][   g3   ][g4]         sizes 1, 2, 1, 2, 1     phase 0
                  [   g0   ][g1][   g2   ][g3][g4]         sizes 2, 1, 2, 1, 1     phase 0.5

Group k starts at token floor(k c + u). The phase u, in [0, 1), is drawn once for a row, so that groups of a c that is
not whole differ in size by at most one, and have c tokens on average over the draws. For a whole c the phase changes
nothing. Only the last group may be shorter: it takes the remaining tokens. No padding slot ever lies between the last
latent and the answer.

A group is fed as one latent, the sum of its embeddings divided by the square root of its number of tokens (Embedding
Compress, section 3.1). Departure: the paper divides by sqrt(c), which differs for a short last group.

Shape suffixes: B rows, T reasoning tokens, K groups, J = K + 1, A answer, G tokens of a group or labels of a position,
N labelled positions of a row, D width.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from colar.checks import check_holds, check_number
from colar.data.example import Example
from colar.methods import base, losses
from colar.methods.base import Batch, Row
from colar.model.latent_lm import LatentLM
from colar.ops import devices, noise, ragged
from colar.template.template import Template

PHASES = 2**20
"""Phases are multiples of 1 / PHASES, so that none is close enough to 1 for k c + u to be rounded up."""

# Sizes


def draw_phase(seed_B: Tensor, sample_B: Tensor | int = 0) -> Tensor:
    """u of each row, (B,) float64 in [0, 1): a function of the row's seed, or of a request's seed and sample."""
    drawn_B = noise.uniform(noise.keys(seed_B, sample_B, noise.PHASE), 1)[:, 0]
    return torch.floor(drawn_B * PHASES) / PHASES


def nominal_units(step: Tensor, c: Tensor, phase: Tensor) -> Tensor:
    """The units (tokens, unless a method says otherwise) of group number `step` (from 0) if nothing ends it early:
    int64, of the arguments' broadcast shape."""
    # float64, because in float32 a fractional factor would move groups of long chains by a token.
    c = devices.to_widest(c)
    return (torch.floor((step + 1) * c + phase) - torch.floor(step * c + phase)).long()


def units_of_groups(K: int, c_B: Tensor, phase_B: Tensor) -> Tensor:
    """The `nominal_units` of each row's first K groups, (B, K)."""
    return nominal_units(torch.arange(K, device=c_B.device), c_B[:, None], phase_B[:, None])


def even_sizes(lengths_B: Tensor, c_B: Tensor) -> Tensor:
    """The number of tokens of each group at phase 0 if nothing ends one early, (B, K) int64; 0 after the last group.

    `lengths_B` are the numbers of reasoning tokens.
    """
    # No row has more groups than tokens. Not ceil(L_r / c): 45 * 2.8 is less than 126 in float64.
    most = int(lengths_B.max()) if lengths_B.numel() else 0
    # The start of each group, and one after the last, which is at the chain's end or later.
    starts_BJ = torch.arange(most + 1, device=c_B.device) * devices.to_widest(c_B)[:, None]
    sizes_BK = torch.minimum(starts_BJ.floor().long(), lengths_B[:, None]).diff(dim=1)
    return sizes_BK[:, : int((sizes_BK > 0).any(0).sum())]


def count_groups(sizes_BK: Tensor) -> Tensor:
    """L_c, the number of groups of each row, (B,) int64. A row without reasoning tokens has none."""
    return (sizes_BK > 0).sum(-1)


def group_starts(sizes_BK: Tensor) -> Tensor:
    """The position of each group's first token, (B, K); after the last group, the chain's length."""
    return sizes_BK.cumsum(-1) - sizes_BK


def tokens_of_groups(
    ids_BT: Tensor, sizes_BK: Tensor, starts_BK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tokens of each group: ids (B, K, G) and which of them are real (B, K, G) bool.

    G is the size of the largest group; ids are 0 where a group is shorter, or a row has fewer groups. Without
    `starts_BK` each group begins where the one before it ends.
    """
    G = int(sizes_BK.max()) if sizes_BK.numel() else 0
    # A group is a run of tokens: its first position, and the positions after it.
    offset_G = torch.arange(G, device=ids_BT.device)
    starts_BK = group_starts(sizes_BK) if starts_BK is None else starts_BK
    position_BKG = (starts_BK[..., None] + offset_G).clamp(max=ids_BT.shape[1] - 1)
    ids_BKG = ids_BT.gather(1, position_BKG.flatten(1)).view(position_BKG.shape)
    real_BKG = offset_G < sizes_BK[..., None]
    return torch.where(real_BKG, ids_BKG, 0), real_BKG


def members(sizes_BK: Tensor, T: int) -> Tensor:
    """(B, K, T) bool: True for the tokens of each group."""
    starts_BK1 = group_starts(sizes_BK)[..., None]
    position_T = torch.arange(T, device=sizes_BK.device)
    return (position_T >= starts_BK1) & (position_T < starts_BK1 + sizes_BK[..., None])


# Merging embeddings into latents


def merge_divisor(size: Tensor, divisor: Literal["sqrt", "mean"] = "sqrt") -> Tensor:
    """The divisor of a sum of `size` embeddings: sqrt(size), or size; 1 for an empty sum."""
    count = size.clamp(min=1).float()
    return count.sqrt() if divisor == "sqrt" else count


def compress(embeds_BTD: Tensor, sizes_BK: Tensor, divisor: Literal["sqrt", "mean"] = "sqrt") -> Tensor:
    """Merge each row's embeddings, float32, in groups of `sizes_BK` tokens, from the first one on.

    Returns the latents (B, K, D), zero where a size is 0. `sqrt` divides a group's sum by the square root of its size
    (keeps the variance of uncorrelated embeddings), `mean` by its size (the paper's mean-pooling ablation).
    """
    sizes_BK = devices.beside(sizes_BK, embeds_BTD)
    T = embeds_BTD.shape[1]
    # Merging is one matrix product: row k of a sample's weights has 1 / divisor at the tokens of group k.
    #                t0   t1   t2   t3   t4   (pad)
    #     latent 0   1/s  1/s   0    0    0    0         c = 2, L_r = 5, s = sqrt(2)
    #     latent 1    0    0   1/s  1/s   0    0
    #     latent 2    0    0    0    0    1    0
    weight_BKT = members(sizes_BK, T).float() / merge_divisor(sizes_BK, divisor)[..., None]
    # A weight of 0 is not enough: 0 times a NaN in the padding would be NaN.
    real_BT = ragged.length_mask(sizes_BK.sum(-1), T)
    clean_BTD = torch.where(real_BT[..., None], embeds_BTD, 0)
    # Under autocast the product would be taken in bfloat16.
    with torch.autocast(embeds_BTD.device.type, enabled=False):
        return weight_BKT @ clean_BTD


def hidden_around(lm: LatentLM, batch: Batch, latents_BKD: Tensor, sizes_BK: Tensor, n: int) -> Tensor:
    """Hidden states (B, n, D) with these latents between question and answer, from the question's last position on,
    where the first label is predicted."""
    hidden_BTD = losses.hidden_around(lm, batch, latents_BKD, count_groups(sizes_BK))
    return ragged.take_from(hidden_BTD, batch.question_lengths - 1, n)


def followed_by_answer(
    ids_BKG: Tensor, weights_BKG: Tensor, counts_B: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """The labels of a row's groups and then of its answer, (B, N, G), and their weights."""
    # If no row of the batch has any reasoning, its groups have no places.
    G = max(1, ids_BKG.shape[-1])
    ids_BKG, weights_BKG = (pad(values, (0, G - values.shape[-1])) for values in (ids_BKG, weights_BKG))
    # The answer's labels get as many places as a group's, so that both fit into one tensor.
    answer_BAG = pad(batch.answer_ids[..., None], (0, G - 1))
    one_BA1 = torch.ones_like(batch.answer_ids, dtype=weights_BKG.dtype)[..., None]
    answer_weights_BAG = pad(one_BA1, (0, G - 1))
    labels_BNG = ragged.pack((ids_BKG, counts_B), (answer_BAG, batch.answer_lengths))
    weights_BNG = ragged.pack((weights_BKG, counts_B), (answer_weights_BAG, batch.answer_lengths))
    return labels_BNG, weights_BNG


# Factors, and the methods that have them


def dealt(values: Sequence[float], rng: Random) -> Iterator[float]:
    """Draw values without end, each once before any repeats, because two equal rows of an example teach little.

    A value that is listed twice is drawn twice as often.
    """
    left: list[float] = []
    while True:
        left = left or list(values)
        value = rng.choice(left)
        left.remove(value)
        yield value


def parse_factors(value: Sequence[float] | str) -> tuple[float, ...]:
    """The factors that training draws from: a list, or a range such as "1..5". ValueError for anything else."""
    if isinstance(value, list | tuple):
        factors = tuple(value)
    else:
        low, _, high = str(value).partition("..")
        try:
            factors = tuple(range(int(low), int(high) + 1))
        except ValueError:
            factors = ()
    allowed = 'a list of numbers, or a range of whole numbers such as "1..5"'
    check_holds("method.compression_factors", bool(factors), value, allowed)
    for c in factors:
        check_number("each of method.compression_factors", c, 1)
    return factors


class GroupMethod(base.Method):
    """A method that thinks in latents of c tokens each: `Params` have a `compression_factor`, the config `factors`."""

    thinks_in_latents: ClassVar[bool] = True

    def speed_text(self, params: Any) -> str:
        return f"(Thinking speed: {params.compression_factor:g})"

    def check_params(self, params: Any) -> str | None:
        # A pretrained model's chains interpolate between its factors, a small model's do not (results/toy).
        return base.warning_if_untrained("compression_factor", params.compression_factor, self.config.factors)

    def choices(self) -> Mapping[str, Sequence[Any]]:
        return {"compression_factor": sorted(set(self.config.factors))}

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        (row,) = self.encode_draws(template, example, rng, epoch, 1)
        return row

    def encode_draws(
        self, template: Template, example: Example, rng: Random, epoch: float, n: int
    ) -> list[Row]:
        rows = []
        factors = list(itertools.islice(dealt(self.config.factors, rng), n))
        others = self.other_values(rng)
        for c in factors:
            # In this order, so that rows without other values are the same as before there were any.
            seed = rng.getrandbits(62)
            params = self.Params(c, **next(others))
            rows.append(base.encode_row(template, example, params, self.speed_text(params), seed))
        return rows

    def other_values(self, rng: Random) -> Iterator[dict[str, float]]:
        """The values of `Params` besides the factor, for one row of an example after another."""
        return itertools.repeat({})
