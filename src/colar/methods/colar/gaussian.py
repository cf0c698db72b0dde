"""The paper's head: predicts the next latent itself, as a Gaussian or a point (section 3.2).

    position    question's last    latent 1    latent 2      ###        answer 1
    LM head     group 1            group 2     ###           answer 1   EOS
    head        latent 1           latent 2    -             -          -

At inference the LM head decides BEFORE each latent whether to stop (it chooses the separator). Otherwise the latent
head's mean, plus `latent_temperature` times sigma times noise, times sigma_e, is fed back.

Shape suffixes: B rows, T reasoning tokens, K latents, G tokens of a group, N labelled positions of a row, M chosen
positions of all rows, L thoughts of all rows, X rows that snap, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from colar.methods import losses
from colar.methods.base import Batch, ThinkState, Thought
from colar.methods.colar import actions
from colar.methods.colar.anchor import Expected, expected_by, loss_and_anchor
from colar.methods.colar.config import ColarConfig, ColarParams
from colar.methods.colar.fed import Fed, followed_by_answer
from colar.methods.colar.heads import (
    LatentHead,
    gaussian_logps,
    latent_loss,
    without_separator,
)
from colar.methods.colar.merging import divisor
from colar.methods.colar.units import PLAIN, Units
from colar.methods.rollouts import LatentLogprob, Rollouts, Scores, ThoughtActions, score
from colar.model.latent_lm import LatentLM
from colar.ops import devices, groups, noise, ragged
from colar.ops.compress import lattice, members, pick_one, scale
from colar.ops.sampling import is_drawn, likeliest, probability, sample_tokens, token_logps

MOST_FACTOR = 32
"""Largest factor of a request, unless training drew larger ones."""


class LatentPredictor:
    """`head: gaussian`, `deterministic` or `anchored`."""

    trains_embeddings: ClassVar[bool] = False
    """The targets are made of the embeddings: they must not move while they are aimed at."""
    snaps: ClassVar[tuple[bool, ...]] = (False, True)
    """The values of `snap` that a request may have."""

    def __init__(self, config: ColarConfig) -> None:
        self.config = config

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        return {"latent_head": LatentHead(lm.width, correction=self.config.head == "anchored")}

    def check(self, params: ColarParams) -> str | None:
        """None, or a warning; ValueError for values that this head cannot work with."""
        c = params.compression_factor
        factors = self.config.factors
        # The latent head cannot see how many tokens the next group has: only a pattern that it was trained on works.
        if c != int(c) and c not in factors:
            raise ValueError(f"compression_factor {c:g} is not whole and was not trained; trained: {factors}")
        # A thought is snapped, and read for whoever watches, token by token: all other rows wait for it.
        most = max(MOST_FACTOR, factors.most)
        if c > most:
            raise ValueError(
                f"compression_factor must be {most:g} or less for this model (trained: {factors}), got {c:g}"
            )
        if params.confidence_threshold:
            raise ValueError(
                f"confidence_threshold belongs to head: sequential; {self.config.head} gives a group's tokens no "
                "probability"
            )
        return None

    def units(self, lm: LatentLM) -> Units:
        """What c counts: tokens."""
        return PLAIN

    def numbers(self, c: Tensor) -> Tensor | None:
        """Nothing to say: no number is a unit."""
        return None

    def phase(self, seeds_B: Tensor) -> Tensor:
        """No phase: groups of a c that is not whole have one pattern, which a head that sees no tokens can learn."""
        return torch.zeros_like(seeds_B, dtype=devices.widest(seeds_B.device))

    @property
    def loss_kind(self) -> Literal["mse", "soft_mse", "nll"]:
        """The loss of the latent head: a head without a spread has only the squared error."""
        if self.config.head == "deterministic":
            return "mse"
        kind: Literal["soft_mse", "nll"] = self.config.latent_loss
        return kind

    @property
    def sigma_e(self) -> float:
        """The scale of the embeddings, once `prepare` has measured it."""
        if self.config.sigma_e is None:
            raise ValueError("method.sigma_e is not known yet: call prepare, or give it in the config")
        return float(self.config.sigma_e)

    # Learning

    def loss(self, lm: LatentLM, batch: Batch, fed: Fed) -> dict[str, Tensor]:
        """ce: equation 1. latent: equation 2 or 3. Both are weighted by the config."""
        K = fed.latents_BKD.shape[1]
        labels_BNG, weights_BNG = self.labels(batch, fed.sizes_BK)
        hidden_BND = fed.hidden(lm, batch, n=labels_BNG.shape[1])
        latent_BK = ragged.length_mask(fed.counts_B, K)
        expected_LD = None
        expected = self._expected(lm)
        if expected is not None and self.config.supervise_chain:
            # Every latent's position has a label then: the same logits serve both losses.
            latent_BN = nn.functional.pad(latent_BK, (0, labels_BNG.shape[1] - K))
            ce_B, expected_LD = loss_and_anchor(lm, hidden_BND, labels_BNG, weights_BNG, latent_BN, expected)
        else:
            ce_B = losses.cross_entropy(lm, hidden_BND, labels_BNG, weights_BNG)
        latent_terms = self._latent_terms(lm, batch, hidden_BND, fed.latents_BKD, latent_BK, expected_LD)
        return {"ce": self.config.comp_weight * ce_B, **latent_terms}

    def labels(self, batch: Batch, sizes_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of the LM head from the last question position on, (B, N, G), and their weights.

        At the K positions before a latent: the tokens of its group, or one of them. After them: ### answer EOS, one
        label each, in the first of the G places.
        """
        ids_BKG, real_BKG = members(batch.chain_ids, sizes_BK)
        # The paper's label: one token of the group. The draw is a function of the row's seed, for a resumed run.
        if self.config.chain_label == "sampled":
            drawn_BK = noise.uniform(noise.keys(batch.seeds, noise.LABEL), sizes_BK.shape[1])
            real_BKG = pick_one(real_BKG, drawn_BK)
        weights_BKG = real_BKG / real_BKG.sum(-1, keepdim=True).clamp(min=1)
        # The ablation OC: the chain's labels go, the stop after the last latent stays (it is the answer's first label).
        if not self.config.supervise_chain:
            weights_BKG = torch.zeros_like(weights_BKG)

        return followed_by_answer(ids_BKG, weights_BKG, groups.counts(sizes_BK), batch)

    def _latent_terms(
        self,
        lm: LatentLM,
        batch: Batch,
        hidden_BND: Tensor,
        latents_BKD: Tensor,
        latent_BK: Tensor,
        expected_LD: Tensor | None,
    ) -> dict[str, Tensor]:
        """The latent head's loss, and two quantities to log: its spread and its squared error."""
        K = latent_BK.shape[1]
        hidden_LD = hidden_BND[:, :K][latent_BK]
        c_BK = batch.params["compression_factor"][:, None].expand_as(latent_BK)
        mean_LD, log_std_LD = self._predict(lm, hidden_LD, c_BK[latent_BK], expected_LD)
        target_LD = latents_BKD[latent_BK].float() / self.sigma_e
        config = self.config
        loss_LD = latent_loss(mean_LD, log_std_LD, target_LD, self.loss_kind, config.alpha, config.nll_beta)

        def mean_of_row(values_L: Tensor) -> Tensor:
            values_BK = values_L.new_zeros(latent_BK.shape).masked_scatter(latent_BK, values_L)
            return ragged.row_mean(values_BK, latent_BK)

        # Logged, not trained: soft-MSE and NLL hide how far the mean itself is off.
        squared_error_LD = (mean_LD.detach() - target_LD).square()
        return {
            "latent": config.latent_weight * mean_of_row(loss_LD.mean(-1)),
            "_sigma": mean_of_row(log_std_LD.detach().exp().mean(-1)),
            "_latent_mse": mean_of_row(squared_error_LD.mean(-1)),
        }

    def _predict(
        self, lm: LatentLM, hidden_LD: Tensor, c_L: Tensor, expected_LD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the next latent in units of sigma_e, (L, D) each.

        `expected_LD` is what `_expected` makes of the logits at these hidden states, where they are made already.
        """
        mean_LD, log_std_LD = lm.extra["latent_head"](hidden_LD)
        if self.config.head != "anchored":
            return mean_LD, log_std_LD
        if expected_LD is None:
            expected = expected_by(lm)
            (expected_LD,) = lm.reduce_logits(lambda logits_LV: (expected(logits_LV),), hidden_LD)
        # The LM head's label is the mean of a group's tokens, the latent their sum over its scale.
        size_L = torch.ceil(c_L)
        anchor_scale_L = size_L.float() / (scale(size_L, divisor(self.config.merge)) * self.sigma_e)
        return mean_LD + anchor_scale_L[:, None] * expected_LD, log_std_LD

    def _expected(self, lm: LatentLM) -> Expected | None:
        """Logits -> the embedding that the anchored head's mean starts from; None for the other heads."""
        return expected_by(lm) if self.config.head == "anchored" else None

    # Reinforcement

    @property
    def explores(self) -> bool:
        """Whether latents are drawn (at a latent_temperature above 0)."""
        return bool(self.config.head != "deterministic")

    @property
    def has_density(self) -> bool:
        """Whether `latent_logprob` has latents that it is of: those that are drawn."""
        return self.explores

    def logps(self, lm: LatentLM, rollouts: Rollouts, latent_logprob: LatentLogprob) -> Scores:
        if bool((rollouts.params["snap"] > 0).any()):
            raise ValueError(
                "snap must be false in outputs that are scored: a snapped latent is no draw of the head"
            )

        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            go_on_L, expected_LD = self._go_on(lm, thoughts)
            if not self.explores:
                return go_on_L, {}
            c_L = rollouts.params["compression_factor"][thoughts.row]
            mean_LD, log_std_LD = self._predict(lm, thoughts.hidden, c_L, expected_LD)
            temperature_L = rollouts.latent_temperature[thoughts.row].float()
            spread_LD = temperature_L[:, None] * log_std_LD.exp()
            drawn_LD = thoughts.latents.float() / self.sigma_e
            density_L = actions.density(drawn_LD, mean_LD, spread_LD, latent_logprob)
            with torch.no_grad():
                # Nothing is drawn at latent_temperature 0: there is no entropy to speak of.
                entropy_L = torch.where(temperature_L > 0, actions.entropy(spread_LD), torch.nan)
                sigma_L = log_std_LD.exp().mean(-1)
            return go_on_L + density_L, {"latents/sigma": sigma_L, "latents/entropy": entropy_L}

        return score(lm, rollouts, thought_logps)

    def _go_on(self, lm: LatentLM, thoughts: ThoughtActions) -> tuple[Tensor, Tensor | None]:
        """Log-prob of going on with each thought, (L,), and what `_predict` needs of the same logits."""
        expected = self._expected(lm)

        def reduce(logits_LV: Tensor, temperature_L: Tensor) -> tuple[Tensor, ...]:
            go_on_L = actions.go_on_logps(logits_LV, temperature_L, lm.template.separator_id)
            return (go_on_L,) if expected is None else (go_on_L, expected(logits_LV))

        go_on_L, *rest = lm.reduce_logits(reduce, thoughts.hidden, thoughts.temperature)
        return go_on_L, rest[0] if rest else None

    def sampled_logps(
        self, info: Mapping[str, Tensor], stopped: Tensor, latent_logprob: LatentLogprob
    ) -> Tensor:
        return actions.sampled_logps(info, stopped, latent_logprob)

    # Thinking

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        logits_BV = state.logits()
        expected = self._expected(lm)
        expected_BD = None if expected is None else expected(logits_BV)
        mean_BD, log_std_BD = self._predict(lm, state.hidden, state.params["compression_factor"], expected_BD)

        # The next latent, in units of sigma_e: the mean, or a draw.
        latent_BD = mean_BD
        spread_BD = torch.zeros_like(mean_BD)
        if self.explores and bool((state.known("latent_temperature") > 0).any()):
            spread_BD = state.latent_temperature[:, None].float() * log_std_BD.exp()
            latent_BD = mean_BD + spread_BD * state.normal(mean_BD.shape[-1])
        embeds_BD = latent_BD * self.sigma_e
        # Rows that snap share the batch with rows that do not, and do not wait for a larger c of these.
        snaps_B = state.known("snap") > 0
        if bool(snaps_B.any()):
            at_X = devices.send(snaps_B.nonzero()[:, 0], embeds_BD.device)
            embeds_BD = embeds_BD.index_copy(0, at_X, self._snapped(lm, state, logits_BV, snaps_B, at_X))

        info = {}
        if state.wants_info:
            stop_B = probability(lm.template.separator_id, logits_BV)
            # A deterministic head has the Gaussian's shape, but nothing ever trained its sigma.
            spread = {} if self.config.head == "deterministic" else {"sigma": log_std_BD.exp()}
            info = {
                "mu": mean_BD,
                **spread,
                "stop_probability": stop_B,
                "stop_logp": self._stop_logp(lm, state, logits_BV, stop_B),
                # Mean over the dimensions; 0 where the latent was not drawn.
                "latent_logp": gaussian_logps(latent_BD, mean_BD, spread_BD).mean(-1),
            }
        return Thought(
            # In float32, as it was drawn: rounded to bfloat16 it would be off by more than a small sigma.
            embeds=embeds_BD,
            # The stop is decided before the latent: a row that is done does not feed what was drawn above.
            done=self._stops(lm, state, logits_BV),
            token_ids=torch.full_like(state.step, -1),
            info=info,
        )

    def _stop_logp(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor, stop_B: Tensor) -> Tensor:
        """(B,): log-prob of stopping at each row's own temperature (1 where it is 0)."""
        temperature_B = state.known("temperature")
        if bool(((temperature_B == 0) | (temperature_B == 1)).all()):
            # `stop_B` is of temperature 1, by which temperature 0 is scored too: no second softmax.
            return stop_B.clamp(min=torch.finfo(stop_B.dtype).tiny).log()
        separator_B = torch.full_like(state.step, lm.template.separator_id)
        return token_logps(logits_BV, state.temperature, separator_B)

    def _stops(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor) -> Tensor:
        """(B,) bool: which rows end their thinking here.

        No token is chosen: whether it would be the separator takes the separator's probability alone.
        """
        separator_id = lm.template.separator_id
        greedy_B = state.temperature == 0
        is_greedy_B = state.known("temperature") == 0
        stops_B = torch.zeros_like(greedy_B)
        if bool(is_greedy_B.any()):
            if self.config.stop == "majority":
                stops_B = probability(separator_id, logits_BV) > 0.5
            else:
                stops_B = likeliest(logits_BV) == separator_id
        if bool(is_greedy_B.all()):
            return stops_B
        known = state.known_decoding()
        drawn_B = is_drawn(separator_id, logits_BV, state.temperature, state.top_p, state.uniform(), known)
        return torch.where(greedy_B, stops_B, drawn_B)

    def _snapped(
        self, lm: LatentLM, state: ThinkState, logits_BV: Tensor, snaps_B: Tensor, at_X: Tensor
    ) -> Tensor:
        """(X, D): the sums of c token embeddings that the LM head stands for; drawn, at temperatures above 0.

        Of the rows that snap: `snaps_B` on the CPU, and their indices `at_X`.
        """

        def choose(mass_XV: Tensor, g: int) -> Tensor:
            uniform_X = state.uniform(noise.SNAP, g + 1)[at_X]
            return sample_tokens(mass_XV.log(), state.temperature[at_X], state.top_p[at_X], uniform_X, known)

        known_temperature_B, known_top_p_B = state.known_decoding()
        known = (known_temperature_B[snaps_B], known_top_p_B[snaps_B])
        most = math.ceil(state.known("compression_factor")[snaps_B].max())
        probs_XV = without_separator(logits_BV[at_X], lm.template.separator_id)
        ids_XG, real_XG = lattice(probs_XV, state.params["compression_factor"][at_X], choose, most)
        total_XD = (real_XG[..., None] * lm.embed(ids_XG).float()).sum(1)
        return total_XD / scale(real_XG.sum(-1, keepdim=True), divisor(self.config.merge))
