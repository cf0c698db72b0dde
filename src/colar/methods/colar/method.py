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
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from random import Random
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from colar.data.example import Example
from colar.methods import base, losses
from colar.methods.base import Batch, Row, ThinkState, Thought
from colar.methods.colar.config import ColarConfig, ColarParams
from colar.methods.colar.heads import LatentHead, continued, gaussian_logps, latent_loss
from colar.methods.rollouts import LatentLogprob, Outputs, Scores, score
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

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        return {"latent_head": LatentHead(lm.width, correction=self.config.head == "anchored")}

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        lm.freeze_embeddings()
        if self.config.sigma_e is None:
            self.config = dataclasses.replace(self.config, sigma_e=lm.embedding_std())
        return examples

    @property
    def loss_kind(self) -> Literal["mse", "soft_mse", "nll"]:
        """What trains the latent head: a head without a spread has only the squared error."""
        return "mse" if self.config.head == "deterministic" else self.config.latent_loss

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
        if c in factors:
            return None
        known = ", ".join(f"{value:g}" for value in sorted(set(factors)))
        if c != int(c):
            raise ValueError(f"compression_factor {c:g} is not whole and was not trained; trained: {known}")
        return f"compression_factor {c:g} was not trained (trained: {known}): expect less"

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        params = ColarParams(rng.choice(self.config.factors))
        return base.encode_row(template, example, params, self.prompt(params), rng.getrandbits(62))

    @torch.no_grad()
    def thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        chain_BTD = lm.embed(batch.chain_ids).float()  # targets keep float32 over a half-precision base
        c_B = batch.params["compression_factor"]
        return compress(chain_BTD, batch.chain_lengths, c_B, self.config.merge)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        latents_BKD, counts_B = self.thoughts(lm, batch)
        question = (lm.embed(batch.question_ids), batch.question_lengths)
        answer = (lm.embed(batch.answer_ids), batch.answer_lengths)
        fed_BKD = self._fed(lm, batch, question, latents_BKD, counts_B)
        hidden_BTD = lm.hidden(ragged.pack(question, (fed_BKD, counts_B), answer, multiple=ragged.PAD_TO))
        labels_BNG, weights_BNG = self._labels(batch, counts_B, latents_BKD.shape[1])
        hidden_BND = ragged.shift(hidden_BTD, batch.question_lengths - 1, labels_BNG.shape[1])
        labelled_BN = losses.labelled(weights_BNG)
        logits_MV = lm.logits(hidden_BND[labelled_BN])
        ce_B = losses.cross_entropy_from(logits_MV, labels_BNG, weights_BNG)
        mask_BK = ragged.length_mask(counts_B, latents_BKD.shape[1])
        mask_BN = nn.functional.pad(mask_BK, (0, labelled_BN.shape[1] - mask_BK.shape[1]))
        made = self.config.head == "anchored" and self.config.supervise_chain  # its logits are made already
        anchor_MV = logits_MV[mask_BN[labelled_BN]] if made else None
        terms = self._latent_loss(lm, hidden_BND, latents_BKD, mask_BK, batch, anchor_MV)
        return {"ce": self.config.comp_weight * ce_B} | terms

    @torch.no_grad()
    def _fed(
        self,
        lm: LatentLM,
        batch: Batch,
        question: tuple[Tensor, Tensor],
        latents_BKD: Tensor,
        counts_B: Tensor,
    ) -> Tensor:
        """What is fed in place of the reasoning: the latents, a share of them as the model predicts them itself."""
        K = latents_BKD.shape[1]
        if not (self.config.own_latents and K):
            return latents_BKD
        hidden_BTD = lm.hidden(ragged.pack(question, (latents_BKD, counts_B), multiple=ragged.PAD_TO))
        hidden_BKD = ragged.shift(hidden_BTD, batch.question_lengths - 1, K)
        c_BK = batch.params["compression_factor"][:, None].expand(-1, K)
        mean, _ = self._predict(lm, hidden_BKD.flatten(0, 1), c_BK.flatten())
        own_BK = noise.uniform(noise.keys(batch.seeds, noise.OWN), K) < self.config.own_latents
        own_BKD = (mean * self.sigma_e).view_as(latents_BKD).to(latents_BKD.dtype)
        return torch.where(own_BK[..., None], own_BKD, latents_BKD)

    def _predict(
        self, lm: LatentLM, hidden_MD: Tensor, c_M: Tensor, logits_MV: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the next latent in units of sigma_e, (M, D) each."""
        mean, log_std = lm.extra["latent_head"](hidden_MD)
        if self.config.head != "anchored":
            return mean, log_std
        logits_MV = lm.logits(hidden_MD) if logits_MV is None else logits_MV
        probs_MV = continued(logits_MV, lm.template.separator_id)
        # The LM head's label is the mean of a group's tokens, the latent their sum over its scale.
        scale_M = torch.ceil(c_M).float() / (scale(torch.ceil(c_M), self.config.merge) * self.sigma_e)
        vocabulary_VD = lm.vocabulary().detach()
        with torch.autocast(hidden_MD.device.type, enabled=False):
            expected_MD = (probs_MV.to(vocabulary_VD.dtype) @ vocabulary_VD).float()
        return mean + scale_M[:, None] * expected_MD, log_std

    def _labels(self, batch: Batch, counts_B: Tensor, K: int) -> tuple[Tensor, Tensor]:
        """Labels from the last question position on, (B, N, G), and their weights: the next group's tokens, or
        one of them; then ### answer EOS, one label each."""
        c_B = batch.params["compression_factor"]
        ids_BKG, real_BKG = members(batch.chain_ids, batch.chain_lengths, c_B, K)
        if self.config.chain_label == "sampled":
            real_BKG = pick_one(real_BKG, noise.uniform(noise.keys(batch.seeds, noise.LABEL), K))
        weights_BKG = real_BKG / real_BKG.sum(-1, keepdim=True).clamp(min=1)
        if not self.config.supervise_chain:
            weights_BKG = torch.zeros_like(weights_BKG)
        more = max(1, ids_BKG.shape[-1]) - 1
        answer_BA1 = nn.functional.pad(batch.answer_ids[..., None], (0, more))
        weight_BA1 = nn.functional.pad(
            torch.ones_like(batch.answer_ids[..., None], dtype=torch.float32), (0, more)
        )
        if ids_BKG.shape[-1] == 0:  # no row of the batch has any reasoning
            ids_BKG, weights_BKG = answer_BA1[:, :0], weight_BA1[:, :0]
        labels_BNG = ragged.pack((ids_BKG, counts_B), (answer_BA1, batch.answer_lengths))
        return labels_BNG, ragged.pack((weights_BKG, counts_B), (weight_BA1, batch.answer_lengths))

    def _latent_loss(
        self,
        lm: LatentLM,
        hidden_BND: Tensor,
        latents_BKD: Tensor,
        mask_BK: Tensor,
        batch: Batch,
        logits_MV: Tensor | None,
    ) -> dict[str, Tensor]:
        c_M = batch.params["compression_factor"][:, None].expand_as(mask_BK)[mask_BK]
        mean, log_std = self._predict(lm, hidden_BND[:, : mask_BK.shape[1]][mask_BK], c_M, logits_MV)
        target_MD = latents_BKD[mask_BK].float() / self.sigma_e
        loss_MD = latent_loss(
            mean, log_std, target_MD, self.loss_kind, self.config.alpha, self.config.nll_beta
        )

        def per_row(values_M: Tensor) -> Tensor:
            values_BK = values_M.new_zeros(mask_BK.shape).masked_scatter(mask_BK, values_M)
            return ragged.row_mean(values_BK, mask_BK)

        return {
            "latent": self.config.latent_weight * per_row(loss_MD.mean(-1)),
            "_sigma": per_row(log_std.detach().exp().mean(-1)),
            "_latent_mse": per_row((mean.detach() - target_MD).square().mean(-1)),
        }

    @property
    def explores(self) -> bool:
        """Whether latents are drawn (at a latent_temperature above 0)."""
        return bool(self.config.head != "deterministic")

    def logps(self, lm: LatentLM, outputs: Outputs, latent_logprob: LatentLogprob) -> Scores:
        if bool((outputs.params["snap"] > 0).any()):
            raise ValueError(
                "snap must be false in outputs that are scored: a snapped latent is no draw of the head"
            )
        predict = self._predict if self.explores else None
        return score(lm, outputs, predict, self.sigma_e, latent_logprob)

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        logits_BV, c_B = state.logits(), state.params["compression_factor"]
        mean, log_std = self._predict(lm, state.hidden, c_B, logits_BV)
        latent = mean
        latent_logp_B = torch.zeros_like(mean[:, 0])
        if self.explores and bool((state.latent_temperature > 0).any()):
            spread = state.latent_temperature[:, None].float() * log_std.exp()
            latent = mean + spread * state.normal(mean.shape[-1])
            latent_logp_B = gaussian_logps(latent, mean, spread).mean(-1)
        embeds = latent * self.sigma_e
        snap_B = state.params["snap"] > 0
        if bool(snap_B.any()):
            embeds = torch.where(snap_B[:, None], self._snapped(lm, state, logits_BV), embeds)
        stop_B = logits_BV.softmax(-1)[:, lm.template.separator_id]
        info = {
            "mu": mean,
            "sigma": log_std.exp(),
            "stop_probability": stop_B,
            "stop_logp": self._stop_logp(lm, state, logits_BV, stop_B),
            "latent_logp": latent_logp_B,  # mean over the dimensions
        }
        tokens_B = torch.full_like(state.step, -1)
        return Thought(
            embeds.to(state.hidden.dtype), self._stops(lm, state, logits_BV, stop_B), tokens_B, info
        )

    def _stop_logp(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor, stop_B: Tensor) -> Tensor:
        """(B,): log-prob of stopping at each row's own temperature (1 where it is 0)."""
        if bool(((state.temperature == 0) | (state.temperature == 1)).all()):
            return stop_B.clamp(min=torch.finfo(stop_B.dtype).tiny).log()
        separator_B = torch.full_like(state.step, lm.template.separator_id)
        return token_logps(logits_BV, state.temperature, separator_B)

    def _stops(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor, stop_B: Tensor) -> Tensor:
        """(B,) bool: which rows end their thinking here."""
        greedy_B = state.temperature == 0
        by_majority = self.config.stop == "majority"
        if by_majority and bool(greedy_B.all()):  # no need to know which token is likeliest
            return stop_B > 0.5
        ids_B = sample_tokens(logits_BV, state.temperature, state.top_p, state.uniform())
        chosen_B = ids_B == lm.template.separator_id
        return torch.where(greedy_B, stop_B > 0.5, chosen_B) if by_majority else chosen_B

    def _snapped(self, lm: LatentLM, state: ThinkState, logits_BV: Tensor) -> Tensor:
        """(B, D): the sums of c token embeddings that the LM head stands for; drawn, at temperatures above 0."""

        def choose(mass_BV: Tensor, g: int) -> Tensor:
            uniform_B = state.uniform(noise.SNAP, g + 1)
            return sample_tokens(mass_BV.log(), state.temperature, state.top_p, uniform_B)

        probs_BV = continued(logits_BV, lm.template.separator_id)
        ids_BG, real_BG = lattice(probs_BV, state.params["compression_factor"], choose)
        total_BD = (real_BG[..., None] * lm.embed(ids_BG).float()).sum(1)
        return total_BD / scale(real_BG.sum(-1, keepdim=True), self.config.merge)
