"""CoLaR: compressed latent reasoning (the paper's sections 3.1 and 3.2).

    fed        question  (Thinking speed: 2)  ###   l1   l2   l3   ###   answer
    LM head                                   t1    t2   t3   ###  answer EOS     t_k: the tokens of group k
    latent head                               l1    l2   l3                       mean and spread of the next latent

A row's factor c is drawn when it is encoded, its reasoning embeddings are merged in groups of c
(`ops/compress.py`), and two heads are trained at the same positions:

    L_comp   = mean over L_c + L_a of -log p(label)                             equation 1
    L_latent = mean over L_c and D of  soft-MSE  E[(mu + sigma eps - e)^2] - alpha * entropy       equation 3
               or of the Gaussian      NLL       (e - mu)^2 / (2 sigma^2) + log sigma              equation 2

Departures. The paper labels a group by one of its tokens, drawn at random (`chain_label: sampled`); our default is
the expectation over that draw, -mean over the group of log p: the same forward, the same gradient on average, none
of its noise, and far fewer rows to learn from (docs/log.md). The expectation in soft-MSE has a closed form too,
(mu - e)^2 + sigma^2 (its sigma settles at sqrt(alpha / 2)). The NLL has the square that the paper's formula
misses, the last group is scaled by its own size, and c is drawn per row, not per batch. Targets are detached
and divided by sigma_e, the standard deviation of the embedding module's output, and the embeddings are frozen:
they are the targets.

At inference the LM head decides BEFORE each latent whether to stop (it chooses the separator); otherwise the
latent head's mean, plus `latent_temperature` times sigma times noise, times sigma_e, is fed back.

Shape suffixes: B rows, T reasoning tokens, K latents, G tokens of a group, N labelled positions of a row, M chosen
positions of all rows, L thoughts of all rows, D width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from colar.data.example import Example
from colar.methods import base, losses
from colar.methods.base import Batch, Row, ThinkState, Thought
from colar.methods.colar import actions, sequential
from colar.methods.colar.config import ColarConfig, ColarParams
from colar.methods.colar.heads import LatentHead, gaussian_logps, latent_loss, without_separator
from colar.methods.colar.sequential import GroupDecoder
from colar.methods.rollouts import LatentLogprob, Rollouts, Scores, ThoughtActions, score
from colar.model.latent_lm import LatentLM
from colar.ops import noise, ragged
from colar.ops.compress import compress, lattice, members, pick_one, scale
from colar.ops.sampling import sample_tokens, token_logps
from colar.prompts import Template


class Colar(base.Method):
    name: ClassVar[str] = "colar"
    Config: ClassVar[type] = ColarConfig
    latent: ClassVar[bool] = True
    Params: ClassVar[type] = ColarParams
    removed: ClassVar[Mapping[str, Any]] = {"own_latents": 0.0}

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        if self.sequential:
            return {"group_decoder": GroupDecoder(lm.width)}
        return {"latent_head": LatentHead(lm.width, correction=self.config.head == "anchored")}

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        # The targets are made of the embeddings: they must not move while they are aimed at.
        lm.freeze_embeddings()
        if self.config.sigma_e is None:
            self.config = dataclasses.replace(self.config, sigma_e=lm.embedding_std())
        return examples

    @property
    def sequential(self) -> bool:
        """Whether a group's tokens are chosen one after another (`sequential.py`), not their sum at once."""
        return bool(self.config.head == "sequential")

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

    def prompt(self, params: ColarParams) -> str:
        return f"(Thinking speed: {params.compression_factor:g})"

    def trained(self, params: ColarParams) -> str | None:
        c, factors = params.compression_factor, self.config.factors
        if self.sequential and params.snap:
            raise ValueError(
                "snap belongs to the latent head: the sequential head feeds sums of tokens anyway"
            )
        if self.sequential and c > max(factors):
            raise ValueError(f"compression_factor {c:g} is above what was trained ({max(factors):g})")
        if c in factors:
            return None
        # A pretrained model's chains interpolate between its factors, a small model's do not (results/c-curves): the
        # caller is warned.
        known = ", ".join(f"{value:g}" for value in sorted(set(factors)))
        if c != int(c):
            raise ValueError(f"compression_factor {c:g} is not whole and was not trained; trained: {known}")
        return f"compression_factor {c:g} was not trained (trained: {known}): expect less"

    # Learning

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        params = ColarParams(rng.choice(self.config.factors))
        return base.encode_row(template, example, params, self.prompt(params), rng.getrandbits(62))

    @torch.no_grad()
    def thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        chain_BTD = lm.embed(batch.chain_ids).float()  # targets keep float32 over a half-precision base
        c_B = batch.params["compression_factor"]
        return compress(chain_BTD, batch.chain_lengths, c_B, self.config.merge)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: equation 1. latent: equation 2 or 3. Both are weighted by the config.

        position    question's last    latent 1    latent 2      ###        answer 1
        LM head     group 1            group 2     ###           answer 1   EOS
        head        latent 1           latent 2    -             -          -
        """
        latents_BKD, counts_B = self.thoughts(lm, batch)
        K = latents_BKD.shape[1]
        if self.sequential:
            ids_BNG, real_BNG = self._group_labels(lm, batch, counts_B, K)
            hidden_BND = self._hidden(lm, batch, latents_BKD, counts_B, n=ids_BNG.shape[1])
            ce_B = sequential.loss(lm, lm.extra["group_decoder"], hidden_BND, ids_BNG, real_BNG)
            return {"ce": self.config.comp_weight * ce_B}
        labels_BNG, weights_BNG = self._labels(batch, counts_B, K)
        hidden_BND = self._hidden(lm, batch, latents_BKD, counts_B, n=labels_BNG.shape[1])

        # Logits are made at labelled positions only: they are the largest tensor of an update.
        labelled_BN = losses.labelled(weights_BNG)
        logits_MV = lm.logits(hidden_BND[labelled_BN])
        ce_B = losses.cross_entropy_from(logits_MV, labels_BNG, weights_BNG)

        latent_BK = ragged.length_mask(counts_B, K)
        anchor_LV = None
        if self.config.head == "anchored" and self.config.supervise_chain:
            # Every latent's position has a label then: the logits that its mean starts from are made already.
            latent_BN = nn.functional.pad(latent_BK, (0, labelled_BN.shape[1] - K))
            anchor_LV = logits_MV[latent_BN[labelled_BN]]
        latent_terms = self._latent_terms(lm, batch, hidden_BND, latents_BKD, latent_BK, anchor_LV)
        return {"ce": self.config.comp_weight * ce_B, **latent_terms}

    def _hidden(self, lm: LatentLM, batch: Batch, latents_BKD: Tensor, counts_B: Tensor, n: int) -> Tensor:
        """Hidden states (B, n, D) from the question's last position on: the first label is predicted there."""
        question = (lm.embed(batch.question_ids), batch.question_lengths)
        answer = (lm.embed(batch.answer_ids), batch.answer_lengths)
        fed_BTD = ragged.pack(question, (latents_BKD, counts_B), answer, multiple=ragged.PAD_TO)
        return ragged.shift(lm.hidden(fed_BTD), batch.question_lengths - 1, n)

    def _labels(self, batch: Batch, counts_B: Tensor, K: int) -> tuple[Tensor, Tensor]:
        """Labels of the LM head from the last question position on, (B, N, G), and their weights.

        At the K positions before a latent: the tokens of its group, or one of them. After them: ### answer EOS, one
        label each, in the first of the G places.
        """
        c_B = batch.params["compression_factor"]
        ids_BKG, real_BKG = members(batch.chain_ids, batch.chain_lengths, c_B, K)
        # The paper's label: one token of the group. The draw is a function of the row's seed, for a resumed run.
        if self.config.chain_label == "sampled":
            real_BKG = pick_one(real_BKG, noise.uniform(noise.keys(batch.seeds, noise.LABEL), K))
        weights_BKG = real_BKG / real_BKG.sum(-1, keepdim=True).clamp(min=1)
        # The ablation OC: the chain's labels go, the stop after the last latent stays (it is the answer's first label).
        if not self.config.supervise_chain:
            weights_BKG = torch.zeros_like(weights_BKG)

        return _followed_by_answer(ids_BKG, weights_BKG, counts_B, batch)

    def _group_labels(self, lm: LatentLM, batch: Batch, counts_B: Tensor, K: int) -> tuple[Tensor, Tensor]:
        """Labels of the sequential head from the last question position on, (B, N, G), and which of them are real."""
        sizes_BK = torch.ceil(batch.params["compression_factor"]).long()[:, None].expand(-1, K)
        starts_BK = torch.arange(K, device=sizes_BK.device) * sizes_BK
        separator_id = lm.template.separator_id
        ids_BKG, real_BKG = sequential.windows(
            batch.chain_ids, batch.chain_lengths, starts_BK, sizes_BK, separator_id
        )
        if not self.config.supervise_chain:
            real_BKG = torch.zeros_like(real_BKG)
        return _followed_by_answer(ids_BKG, real_BKG, counts_B, batch)

    def _latent_terms(
        self,
        lm: LatentLM,
        batch: Batch,
        hidden_BND: Tensor,
        latents_BKD: Tensor,
        latent_BK: Tensor,
        anchor_LV: Tensor | None,
    ) -> dict[str, Tensor]:
        """The latent head's loss, and two quantities to log: its spread and its squared error."""
        K = latent_BK.shape[1]
        hidden_LD = hidden_BND[:, :K][latent_BK]
        c_BK = batch.params["compression_factor"][:, None].expand_as(latent_BK)
        mean_LD, log_std_LD = self._predict(lm, hidden_LD, c_BK[latent_BK], anchor_LV)
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
        self, lm: LatentLM, hidden_LD: Tensor, c_L: Tensor, logits_LV: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the next latent in units of sigma_e, (L, D) each.

        `logits_LV` are the LM head's at these hidden states, where they are made already (the anchored head uses them).
        """
        mean_LD, log_std_LD = lm.extra["latent_head"](hidden_LD)
        if self.config.head != "anchored":
            return mean_LD, log_std_LD
        if logits_LV is None:
            logits_LV = lm.logits(hidden_LD)
        probs_LV = without_separator(logits_LV, lm.template.separator_id)
        vocabulary_VD = lm.vocabulary().detach()
        with torch.autocast(hidden_LD.device.type, enabled=False):
            expected_LD = (probs_LV.to(vocabulary_VD.dtype) @ vocabulary_VD).float()
        # The LM head's label is the mean of a group's tokens, the latent their sum over its scale.
        size_L = torch.ceil(c_L)
        anchor_scale_L = size_L.float() / (scale(size_L, self.config.merge) * self.sigma_e)
        return mean_LD + anchor_scale_L[:, None] * expected_LD, log_std_LD

    # Reinforcement

    @property
    def explores(self) -> bool:
        """Whether latents are drawn (at a latent_temperature above 0)."""
        return bool(self.config.head != "deterministic")

    def logps(self, lm: LatentLM, rollouts: Rollouts, latent_logprob: LatentLogprob) -> Scores:
        if self.sequential:
            return self._group_logps(lm, rollouts)
        if bool((rollouts.params["snap"] > 0).any()):
            raise ValueError(
                "snap must be false in outputs that are scored: a snapped latent is no draw of the head"
            )

        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            go_on_L = actions.go_on_logps(thoughts, lm.template.separator_id)
            if not self.explores:
                return go_on_L, {}
            c_L = rollouts.params["compression_factor"][thoughts.row]
            mean_LD, log_std_LD = self._predict(lm, thoughts.hidden, c_L, thoughts.logits)
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

    def sampled_logps(
        self, info: Mapping[str, Tensor], stopped: Tensor, latent_logprob: LatentLogprob
    ) -> Tensor:
        if self.sequential:
            return info["logp"]
        return actions.sampled_logps(info, stopped, latent_logprob)

    def _group_logps(self, lm: LatentLM, rollouts: Rollouts) -> Scores:
        """Exact: a latent is the sum of tokens that were chosen one by one."""

        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            temperature_L = rollouts.temperature[thoughts.row]
            return sequential.thought_logps(lm, lm.extra["group_decoder"], thoughts, temperature_L), {}

        return score(lm, rollouts, thought_logps)

    # Thinking

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        return self._think_tokens(lm, state) if self.sequential else self._think_latent(lm, state)

    def _think_tokens(self, lm: LatentLM, state: ThinkState) -> Thought:
        """Choose the group's tokens, and feed their merged embedding; the separator in the first place is the stop."""
        # As CoT would: the likeliest token, or a draw. With c = 1 that is the whole thought.
        separator_id = lm.template.separator_id
        logits_BV = state.logits()
        first_B = sample_tokens(logits_BV, state.temperature, state.top_p, state.uniform())
        sizes_B = torch.ceil(state.params["compression_factor"]).long()
        width = int(max(self.config.factors))
        ids_BG, logps_BG = sequential.choose(
            lm,
            lm.extra["group_decoder"],
            state.hidden,
            first_B,
            sizes_B,
            width,
            state.temperature,
            state.top_p,
            lambda j: state.uniform(noise.GROUP, j),
        )
        logps_BG[:, 0] = token_logps(logits_BV, state.temperature, first_B)
        # The separator that ends a group is no part of it.
        real_BG = (ids_BG >= 0) & (ids_BG != separator_id)
        total_BD = (real_BG[..., None] * lm.embed(ids_BG.clamp(min=0)).float()).sum(1)
        embeds_BD = total_BD / scale(real_BG.sum(-1, keepdim=True), self.config.merge)
        return Thought(
            embeds=embeds_BD.to(state.hidden.dtype),
            done=first_B == separator_id,
            token_ids=torch.full_like(state.step, -1),
            info={
                "group_ids": ids_BG,
                "group_logps": logps_BG,
                "logp": logps_BG.sum(-1),
                "stop_probability": logits_BV.softmax(-1)[:, separator_id],
            },
        )

    def _think_latent(self, lm: LatentLM, state: ThinkState) -> Thought:
        logits_BV = state.logits()
        mean_BD, log_std_BD = self._predict(lm, state.hidden, state.params["compression_factor"], logits_BV)

        # The next latent, in units of sigma_e: the mean, or a draw.
        latent_BD = mean_BD
        latent_logp_B = torch.zeros_like(mean_BD[:, 0])
        if self.explores and bool((state.latent_temperature > 0).any()):
            spread_BD = state.latent_temperature[:, None].float() * log_std_BD.exp()
            latent_BD = mean_BD + spread_BD * state.normal(mean_BD.shape[-1])
            latent_logp_B = gaussian_logps(latent_BD, mean_BD, spread_BD).mean(-1)
        embeds_BD = latent_BD * self.sigma_e
        # Rows that snap share the batch with rows that do not.
        snap_B = state.params["snap"] > 0
        if bool(snap_B.any()):
            embeds_BD = torch.where(snap_B[:, None], self._snapped(lm, state, logits_BV), embeds_BD)

        # The stop is decided before the latent: a row that is done does not feed what was drawn above.
        stop_B = logits_BV.softmax(-1)[:, lm.template.separator_id]
        return Thought(
            embeds=embeds_BD.to(state.hidden.dtype),
            done=self._stops(lm, state, logits_BV, stop_B),
            token_ids=torch.full_like(state.step, -1),
            info={
                "mu": mean_BD,
                "sigma": log_std_BD.exp(),
                "stop_probability": stop_B,
                "stop_logp": self._stop_logp(lm, state, logits_BV, stop_B),
                "latent_logp": latent_logp_B,  # mean over the dimensions
            },
        )

    def _stop_logp(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor, stop_B: Tensor) -> Tensor:
        """(B,): log-prob of stopping at each row's own temperature (1 where it is 0)."""
        plain = (state.temperature == 0) | (state.temperature == 1)
        if bool(plain.all()):
            return stop_B.clamp(min=torch.finfo(stop_B.dtype).tiny).log()
        separator_B = torch.full_like(state.step, lm.template.separator_id)
        return token_logps(logits_BV, state.temperature, separator_B)

    def _stops(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor, stop_B: Tensor) -> Tensor:
        """(B,) bool: which rows end their thinking here."""
        greedy_B = state.temperature == 0
        by_majority = self.config.stop == "majority"
        # Greedy rows need no draw and no argmax over the vocabulary then.
        if by_majority and bool(greedy_B.all()):
            return stop_B > 0.5
        ids_B = sample_tokens(logits_BV, state.temperature, state.top_p, state.uniform())
        chosen_B = ids_B == lm.template.separator_id
        return torch.where(greedy_B, stop_B > 0.5, chosen_B) if by_majority else chosen_B

    def _snapped(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor) -> Tensor:
        """(B, D): the sums of c token embeddings that the LM head stands for; drawn, at temperatures above 0."""

        def choose(mass_BV: Tensor, g: int) -> Tensor:
            uniform_B = state.uniform(noise.SNAP, g + 1)
            return sample_tokens(mass_BV.log(), state.temperature, state.top_p, uniform_B)

        probs_BV = without_separator(logits_BV, lm.template.separator_id)
        ids_BG, real_BG = lattice(probs_BV, state.params["compression_factor"], choose)
        total_BD = (real_BG[..., None] * lm.embed(ids_BG).float()).sum(1)
        return total_BD / scale(real_BG.sum(-1, keepdim=True), self.config.merge)


def _followed_by_answer(
    ids_BKG: Tensor, weights_BKG: Tensor, counts_B: Tensor, batch: Batch
) -> tuple[Tensor, Tensor]:
    """The labels of a row's groups and then of its answer, (B, N, G), and their weights (numbers or bools)."""
    # The answer's labels get as many places as a group's, so that the two can stand in one row.
    G = max(1, ids_BKG.shape[-1])
    answer_BA1 = batch.answer_ids[..., None]
    answer_BAG = nn.functional.pad(answer_BA1, (0, G - 1))
    one_BA1 = torch.ones_like(answer_BA1, dtype=weights_BKG.dtype)
    answer_weights_BAG = nn.functional.pad(one_BA1, (0, G - 1))
    if ids_BKG.shape[-1] == 0:  # no row of the batch has any reasoning
        ids_BKG = answer_BAG[:, :0]
        weights_BKG = answer_weights_BAG[:, :0]
    labels_BNG = ragged.pack((ids_BKG, counts_B), (answer_BAG, batch.answer_lengths))
    weights_BNG = ragged.pack((weights_BKG, counts_B), (answer_weights_BAG, batch.answer_lengths))
    return labels_BNG, weights_BNG
