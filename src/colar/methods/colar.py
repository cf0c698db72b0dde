"""CoLaR: compressed latent reasoning, the paper's method (sections 3.1 and 3.2).

    fed        question  (Thinking speed: 2)  ###   l1   l2   l3   ###   answer
    LM head                                   t1    t2   t3   ###  answer EOS     t_k: the tokens of group k
    latent head                               l1    l2   l3                       mean and spread of the next latent

A row's factor c is drawn when it is encoded, its reasoning embeddings are merged in groups of c (`grouping.py`), and
each latent is predicted at the position before it. Two heads are trained at the same positions:

    L_comp   = mean over L_c + L_a of -log p(label)                             equation 1
    L_latent = mean over L_c and D of  soft-MSE  E[(mu + sigma eps - e)^2] - alpha * entropy       equation 3
               or of the Gaussian      NLL       (e - mu)^2 / (2 sigma^2) + log sigma              equation 2

At inference the LM head decides BEFORE each latent whether to stop: greedy thinking stops if the separator is more
likely than not, sampled thinking if it is drawn. Otherwise sigma_e * (mean + latent_temperature * sigma * noise) of the
latent head is fed back. As an action, with p the LM head's softmax at the row's temperature, a thought has the log-prob

    log(1 - p[###]) + log N(l / sigma_e; mu, (latent_temperature * sigma)^2)

The log-density is a mean over the D dimensions, of the size of a token's log-prob, because with their sum, the true
one, updates would be noise (lab/LOG.md). It is left out if latents are not drawn: a deterministic head, or
latent_temperature 0.

Departures. The paper labels a group by one of its tokens, drawn at random (`chain_label: sampled`); our default is the
expectation over that draw, -mean over the group of log p: it takes the same forward, has the same gradient on average
without the noise, and needs far fewer rows (lab/LOG.md). In the paper greedy thinking ends if no token is likelier than
the separator (`stop: argmax`), which is early where c tokens share the remaining probability. The expectation in
soft-MSE has a closed form too, (mu - e)^2 + sigma^2 (its sigma settles at sqrt(alpha / 2)). The NLL has the square that
the paper's formula lacks, the last group is scaled by its own size, and c is drawn per row, not per batch. Targets are
detached and divided by sigma_e, the standard deviation of the embedding module's output. The embeddings are frozen,
because they are the targets. c need not be whole.

Shape suffixes: B rows, T reasoning tokens, K latents (of a row, or of one request), G tokens of a group, N labelled
positions of a row, L thoughts of all rows, D width, V vocabulary.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from colar.checks import check_choice, check_number
from colar.data.example import Example
from colar.methods import grouping, losses
from colar.methods.base import Batch, ScaledMethod, check_sigma_e, listed
from colar.methods.grouping import GroupMethod, parse_factors
from colar.methods.rollouts import Rollouts, Scores, ThoughtActions, score_actions
from colar.methods.thinking import ThinkState, Thought, next_tokens
from colar.model.latent_lm import LatentLM
from colar.ops import devices, noise, ragged
from colar.ops.sampling import probability, token_logps

Merge = Literal["sqrt", "mean"]
Head = Literal["gaussian", "deterministic"]
LatentLoss = Literal["soft_mse", "nll"]
ChainLabel = Literal["expected", "sampled"]
Stop = Literal["majority", "argmax"]

LOG_STD_RANGE = (-7.0, 2.0)
"""Clamp of log sigma (targets have unit scale): unclamped, the NLL blows up where a latent is predictable."""
MOST_FACTOR = 32
"""Largest factor of a request, unless training drew larger ones, because c tokens are listed for each thought."""


@dataclass(frozen=True)
class ColarParams:
    """Per-request values."""

    compression_factor: float = 2
    """c: the reasoning tokens that a latent stands for, 1 or more. It need not be whole: at 1.5 groups have 1 or 2."""

    def __post_init__(self) -> None:
        check_number("compression_factor", self.compression_factor, 1)


@dataclass(frozen=True)
class ColarConfig:
    """The paper's choices but for `chain_label` and `stop`; its ablations are values of these."""

    compression_factors: tuple[float, ...] | str = "1..5"
    """Factors drawn from in training: a range of whole numbers such as "1..5" (the paper's), or a list, in which a
    factor that stands twice is drawn twice as often."""
    merge: Merge = "sqrt"
    """A group is fed as its sum over "sqrt" of its size, or as its "mean" (ablation MP)."""
    head: Head = "gaussian"
    """"gaussian" predicts mean and spread; "deterministic" a point, trained by MSE (ablation DL)."""
    latent_loss: LatentLoss = "soft_mse"
    """"soft_mse" for simple problems, "nll" for those that need exploration (the paper's MATH runs)."""
    alpha: float = 0.02
    """Weight of the entropy in soft-MSE; sigma settles at sqrt(alpha / 2) = 0.1 sigma_e, the exploration noise."""
    nll_beta: float = 0.0
    """Weighs the NLL by sigma^(2 nll_beta), 0 (the paper's) to 1 (beta-NLL, Seitzer et al. 2022): at 0 its gradient
    grows with 1 / sigma^2, until clipping leaves little of all others; 0.5 learns the mean as well as soft_mse."""
    supervise_chain: bool = True
    """Train the LM head on the tokens of each next group; false keeps only the stop and answer labels (OC)."""
    chain_label: ChainLabel = "expected"
    """"sampled": one token of the group, drawn at random (the paper's); "expected": its expectation over the draw."""
    stop: Stop = "majority"
    """The end of greedy thinking: "majority", the separator is more likely than not; "argmax", likelier than any one
    token (the paper's), which ends early where c tokens share what is left."""
    latent_weight: float = 1.0
    """Weight of L_latent beside L_comp ("we sum up L_comp and L_latent")."""
    sigma_e: float | None = None
    """Scale of the embeddings; null: measured on the backbone at the start and kept here."""

    def __post_init__(self) -> None:
        check_choice("method.merge", self.merge, get_args(Merge))
        check_choice("method.head", self.head, get_args(Head))
        check_choice("method.latent_loss", self.latent_loss, get_args(LatentLoss))
        check_choice("method.chain_label", self.chain_label, get_args(ChainLabel))
        check_choice("method.stop", self.stop, get_args(Stop))
        check_number("method.nll_beta", self.nll_beta, 0, 1)
        if self.head == "deterministic" and self.latent_loss == "nll":
            raise ValueError("method.latent_loss nll needs a spread: use head gaussian, or soft_mse")
        if self.nll_beta and self.latent_loss != "nll":
            raise ValueError(f"method.nll_beta is a value of latent_loss nll; this one is {self.latent_loss}")
        for name in ("alpha", "latent_weight"):
            check_number(f"method.{name}", getattr(self, name), 0)
        check_sigma_e(self.sigma_e)
        parse_factors(self.compression_factors)

    @property
    def factors(self) -> tuple[float, ...]:
        """The training factors, parsed."""
        return parse_factors(self.compression_factors)


class Colar(GroupMethod, ScaledMethod):
    name: ClassVar[str] = "colar"
    Config: ClassVar[type] = ColarConfig
    Params: ClassVar[type] = ColarParams

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        return {"latent_head": LatentHead(lm.width)}

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        # The targets are made of the embeddings, which therefore must not change in training.
        lm.freeze_embeddings()
        return super().prepare(lm, examples)

    def check_params(self, params: ColarParams) -> str | None:
        c, factors = params.compression_factor, self.config.factors
        trained = listed(factors)
        # The latent head cannot see how many tokens the next group has, so only trained patterns of sizes work.
        if c != int(c) and c not in factors:
            raise ValueError(f"compression_factor {c:g} is not whole and was not trained; trained: {trained}")
        most = max(MOST_FACTOR, *factors)
        if c > most:
            raise ValueError(
                f"compression_factor must be {most:g} or less for this model (trained: {trained}), got {c:g}"
            )
        return super().check_params(params)

    # Learning

    @torch.no_grad()
    def training_thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The chains in groups of c tokens, each merged into a latent."""
        # No phase: for a c that is not whole, sizes follow one pattern, which a head that sees no tokens can learn.
        sizes_BK = grouping.even_sizes(batch.chain_lengths, batch.params["compression_factor"])
        # Targets are float32 also on a half-precision backbone.
        embeds_BTD = lm.embed(batch.chain_ids).float()
        return grouping.compress(embeds_BTD, sizes_BK, self.config.merge), sizes_BK

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: equation 1. latent: equation 2 or 3, weighted by the config."""
        latents_BKD, sizes_BK = self.training_thoughts(lm, batch)
        labels_BNG, weights_BNG = self.labels(batch, sizes_BK)
        hidden_BND = grouping.hidden_around(lm, batch, latents_BKD, sizes_BK, n=labels_BNG.shape[1])
        ce_B = losses.cross_entropy(lm, hidden_BND, labels_BNG, weights_BNG)
        return {"ce": ce_B, **self._latent_terms(lm, hidden_BND, latents_BKD, sizes_BK)}

    def labels(self, batch: Batch, sizes_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of the LM head from the last question position on, (B, N, G), and their weights.

        A position before a latent has the tokens of the latent's group as labels, or one of them. The positions after
        these K have one label each, ### answer EOS, in the first of the G places.
        """
        ids_BKG, real_BKG = grouping.tokens_of_groups(batch.chain_ids, sizes_BK)
        # The paper's label: one token of the group, drawn by the row's seed, so that a resumed run draws the same.
        if self.config.chain_label == "sampled":
            drawn_BK = noise.uniform(noise.keys(batch.seeds, noise.LABEL), sizes_BK.shape[1])
            real_BKG = pick_one(real_BKG, drawn_BK)
        weights_BKG = real_BKG / real_BKG.sum(-1, keepdim=True).clamp(min=1)
        # Ablation OC: no labels of the chain. The stop after the last latent stays, as it is the answer's first label.
        if not self.config.supervise_chain:
            weights_BKG = torch.zeros_like(weights_BKG)
        return grouping.followed_by_answer(ids_BKG, weights_BKG, grouping.count_groups(sizes_BK), batch)

    def _latent_terms(
        self, lm: LatentLM, hidden_BND: Tensor, latents_BKD: Tensor, sizes_BK: Tensor
    ) -> dict[str, Tensor]:
        """The latent head's loss, and two quantities to log: its spread and its squared error."""
        config = self.config
        latent_BK = sizes_BK > 0
        hidden_LD = ragged.take_masked(hidden_BND[:, : latent_BK.shape[1]], latent_BK)
        mean_LD, log_std_LD = lm.extra["latent_head"](hidden_LD)
        target_LD = ragged.take_masked(latents_BKD, latent_BK).float() / self.sigma_e
        # A head without a spread has only the squared error.
        kind: Literal["mse", "soft_mse", "nll"] = config.latent_loss
        if config.head == "deterministic":
            kind = "mse"
        loss_LD = latent_loss(mean_LD, log_std_LD, target_LD, kind, config.alpha, config.nll_beta)

        def mean_of_row(values_L: Tensor) -> Tensor:
            return ragged.row_mean(ragged.put_masked(values_L, latent_BK), latent_BK)

        # Logged, not trained, because soft-MSE and NLL do not show the error of the mean itself.
        squared_error_LD = (mean_LD.detach() - target_LD).square()
        return {
            "latent": config.latent_weight * mean_of_row(loss_LD.mean(-1)),
            "_sigma": mean_of_row(log_std_LD.detach().exp().mean(-1)),
            "_latent_mse": mean_of_row(squared_error_LD.mean(-1)),
        }

    # Reinforcement

    @property
    def has_density(self) -> bool:
        """True if latents are drawn when latent_temperature is above 0."""
        return bool(self.config.head != "deterministic")

    def logps(self, lm: LatentLM, rollouts: Rollouts) -> Scores:
        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            continue_logps = partial(losses.continue_logps, separator_id=lm.template.separator_id)
            (continue_L,) = lm.reduce_logits(continue_logps, thoughts.hidden, thoughts.temperature)
            if not self.has_density:
                return continue_L, {}
            mean_LD, log_std_LD = lm.extra["latent_head"](thoughts.hidden)
            temperature_L = devices.beside(rollouts.latent_temperature[thoughts.row].float(), mean_LD)
            spread_LD = temperature_L[:, None] * log_std_LD.exp()
            density_LD = gaussian_logps(thoughts.latents.float() / self.sigma_e, mean_LD, spread_LD)
            with torch.no_grad():
                # At latent_temperature 0 nothing is drawn, and the entropy is undefined.
                entropy_LD = gaussian_entropy(spread_LD.clamp(min=1e-30).log())
                entropy_L = torch.where(temperature_L > 0, entropy_LD.mean(-1), torch.nan)
                sigma_L = log_std_LD.exp().mean(-1)
            return continue_L + density_LD.mean(-1), {"latents/sigma": sigma_L, "latents/entropy": entropy_L}

        return score_actions(lm, rollouts, thought_logps)

    def sampled_logps(self, info: Mapping[str, Tensor], stopped: Tensor) -> Tensor:
        stop_K = info["stop_logp"]
        thought_K = losses.log1m_exp(stop_K) + info["latent_logp"]
        return torch.where(stopped, stop_K, thought_K)

    # Thinking

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        logits_BV = state.logits()
        mean_BD, log_std_BD = lm.extra["latent_head"](state.hidden)

        # The next latent, in units of sigma_e: the mean, or a draw.
        latent_BD = mean_BD
        spread_BD = torch.zeros_like(mean_BD)
        if self.has_density and state.conditions.latent_modes.drawn:
            spread_BD = state.latent_temperature[:, None].float() * log_std_BD.exp()
            latent_BD = mean_BD + spread_BD * state.normal(mean_BD.shape[-1])

        info = {}
        if state.wants_info:
            separator_id = lm.template.separator_id
            # A deterministic head has the Gaussian's shape, but its sigma is never trained.
            spread = {"sigma": log_std_BD.exp()} if self.has_density else {}
            info = {
                "mu": mean_BD,
                **spread,
                "stop_probability": probability(separator_id, logits_BV),
                # At each row's own temperature, 1 where it is 0.
                "stop_logp": token_logps(
                    logits_BV, state.temperature, torch.full_like(state.step, separator_id)
                ),
                # Mean over the dimensions; 0 where the latent was not drawn.
                "latent_logp": gaussian_logps(latent_BD, mean_BD, spread_BD).mean(-1),
            }
        return Thought(
            # In float32, as it was drawn: rounded to bfloat16 it would be off by more than a small sigma.
            embeds=latent_BD * self.sigma_e,
            # The stop is decided before the latent, so a row that is done does not feed the latent drawn above.
            done=self._stops(lm, state, logits_BV),
            token_ids=torch.full_like(state.step, -1),
            info=info,
        )

    def _stops(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor) -> Tensor:
        """(B,) bool: True for rows that end their thinking here, as their next token would be the separator.

        With `stop: majority` a greedy row ends where the separator has more than half of the probability.
        """
        separator_id = lm.template.separator_id
        stops_B = next_tokens(state) == separator_id
        if self.config.stop == "majority" and state.conditions.modes.greedy:
            by_majority_B = probability(separator_id, logits_BV) > 0.5
            stops_B = torch.where(state.temperature == 0, by_majority_B, stops_B)
        return stops_B


def pick_one(real_BKG: Tensor, uniform_BK: Tensor) -> Tensor:
    """One member of each group, chosen uniformly: the label of section 3.1, as a (B, K, G) bool mask.

    `uniform_BK` in [0, 1) decides, so the draw is a function of its seed alone.
    """
    size_BK = real_BKG.sum(-1)
    last_BK = (size_BK - 1).clamp(min=0)
    chosen_BK = torch.minimum((uniform_BK * size_BK).long(), last_BK)
    one_BKG = torch.arange(real_BKG.shape[-1], device=real_BKG.device) == chosen_BK[..., None]
    # In an empty group place 0 was chosen, which holds no token.
    return one_BKG & real_BKG


# The latent head. Everything is in units of sigma_e.


class LatentHead(nn.Module):
    """Hidden state -> mean and log standard deviation of the next latent in units of sigma_e, (..., D) each.

    "A three-layered MLP with hidden dimensions corresponding to the LLM backbone's" and two heads.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(width, width), nn.GELU()]
        self.body = nn.Sequential(*layers)
        self.mean = nn.Linear(width, width)
        self.log_std = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        # In its own precision, float32, under autocast too: a mean that is rounded to bfloat16 is off by 0.002, a lot
        # for a small sigma (it may be 0.001).
        with torch.autocast(hidden.device.type, enabled=False):
            features = self.body(hidden.to(self.mean.weight.dtype))
            mean = self.mean(features).float()
            log_std = self.log_std(features).float().clamp(*LOG_STD_RANGE)
        return mean, log_std


def latent_loss(
    mean: Tensor,
    log_std: Tensor,
    target: Tensor,
    kind: Literal["mse", "soft_mse", "nll"],
    alpha: float = 0.0,
    nll_beta: float = 0.0,
) -> Tensor:
    """Elementwise loss of a prediction whose values are in units of sigma_e; `mse` does not use the spread.

    `nll_beta` weighs the NLL by sigma^(2 beta) without a gradient (beta-NLL, Seitzer et al. 2022, equation 5). At 0 the
    mean's gradient is (mean - target) / sigma^2, at 1 that of half the squared error.
    """
    error = (mean - target).square()
    if kind == "mse":
        return error
    if kind == "nll":
        # Without the constant 0.5 log(2 pi), which has no gradient.
        nll = 0.5 * error * torch.exp(-2 * log_std) + log_std
        return nll if nll_beta == 0 else nll * torch.exp(2 * nll_beta * log_std.detach())
    # Soft-MSE: E[(mean + sigma eps - target)^2] = error + sigma^2, less alpha times the Gaussian's entropy.
    return error + torch.exp(2 * log_std) - alpha * gaussian_entropy(log_std)


def gaussian_logps(latent: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Elementwise log-density of N(mean, spread^2) at `latent`; 0 where spread is 0."""
    drawn = spread > 0
    # A spread of 0 would make NaN, and NaN would pass through `where` into the gradient.
    safe = torch.where(drawn, spread, 1.0)
    squared = ((latent - mean) / safe).square()
    logps = -0.5 * squared - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(drawn, logps, 0.0)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """The Gaussian's entropy, elementwise."""
    return log_std + 0.5 * math.log(2 * math.pi * math.e)
