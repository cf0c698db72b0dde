"""The sequential head (ours): chooses the tokens of the next group one after another, and feeds their merged embedding.

    position    question's last    latent 1     latent 2     ###        answer 1
    labels      t1 t2              t3 t4        t5 ###       answer 1   EOS           c = 2, a chain of five tokens

`group_decoder.py` has the decoder and its formulas. A group ends with its c tokens, with the separator (it is then the
short last one), or before a token that is less likely than `confidence_threshold`: c is then the most, not the number.
A model that was never asked to end groups there has not learnt to read what comes out. So training simulates it
(`confidence_thresholds`): a forward without gradient says how likely the model finds each token of the row's chain, and
groups end before those that are below the row's threshold. Labels stay the tokens of the whole group, cut or not.

Every position can also be taught the tokens behind its group, with a smaller weight (`lookahead_weight`), as
multi-token prediction does (Gloeckle et al. 2024, DeepSeek-V3). Rows of a small c then teach the decoder what rows of a
large c need, at no further forward of the backbone.

Shape suffixes: B rows, T reasoning tokens, K latents, G places of a group, N labelled positions of a row, L thoughts of
all rows, X rows with a threshold, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from colar.methods.base import Batch, ThinkState, Thought
from colar.methods.colar import group_choice, group_decoder, merging
from colar.methods.colar.config import ColarConfig, ColarParams
from colar.methods.colar.fed import Fed, followed_by_answer
from colar.methods.colar.group_choice import Rules
from colar.methods.colar.group_decoder import NOTHING, GroupDecoder
from colar.methods.rollouts import LatentLogprob, Rollouts, Scores, ThoughtActions, score
from colar.model.head_rows import HeadRows
from colar.model.latent_lm import LatentLM
from colar.ops import groups, noise, ragged
from colar.ops.compress import members
from colar.ops.sampling import probability


class TokenPredictor:
    """`head: sequential`."""

    trains_embeddings: ClassVar[bool] = True
    """As CoT does: what is fed is a sum of embeddings, and at c = 1 this is CoT, its gradients included."""
    snaps: ClassVar[tuple[bool, ...]] = (False,)
    """The values of `snap` that a request may have: what is fed is a sum of tokens anyway."""

    def __init__(self, config: ColarConfig) -> None:
        self.config = config

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        config = self.config
        return {
            "group_decoder": GroupDecoder(lm.width),
            **merging.modules(config.merge, lm.width, config.widest),
        }

    def check(self, params: ColarParams) -> str | None:
        """None, or a warning; ValueError for values that this head cannot work with."""
        c = params.compression_factor
        factors = self.config.factors
        if params.snap:
            raise ValueError(
                "snap belongs to the latent head: the sequential head feeds sums of tokens anyway"
            )
        # The decoder has never said a token at a place behind those.
        if c > factors.most:
            raise ValueError(f"compression_factor {c:g} is above what was trained ({factors.most:g})")
        if params.confidence_threshold and not any(self.config.confidence_thresholds):
            return (
                f"confidence_threshold {params.confidence_threshold:g}: groups that end early were not trained "
                "(method.confidence_thresholds): expect less"
            )
        return None

    def shortlist(self, gather: Callable[[tuple[int, ...]], HeadRows]) -> HeadRows | None:
        """What tokens behind a group's first are chosen among; None for the whole vocabulary."""
        if not self.config.shortlist:
            return None
        if self.config.shortlist_ids is None:
            raise ValueError(
                "method.shortlist_ids are not known yet: call prepare, or give them in the config"
            )
        return gather(self.config.shortlist_ids)

    def phase(self, seeds_B: Tensor) -> Tensor:
        """The phase of each row's groups (`ops/groups.py`), (B,)."""
        return groups.phase(seeds_B)

    # Learning

    def loss(self, lm: LatentLM, batch: Batch, fed: Fed) -> dict[str, Tensor]:
        """ce: cross-entropy of each token given those before it in its group, and of the answer."""
        ids_BNG, weights_BNG = self._labels(lm, batch, fed)
        hidden_BND = fed.hidden(lm, batch, n=ids_BNG.shape[1])
        shortlist = self.shortlist(lm.head_rows)
        ce_B = group_decoder.loss(lm, hidden_BND, ids_BNG, weights_BNG, shortlist)
        terms = {"ce": self.config.comp_weight * ce_B}
        if shortlist is not None:
            terms["_outside_shortlist"] = group_decoder.outside(ids_BNG, weights_BNG, shortlist)
        return terms

    def _labels(self, lm: LatentLM, batch: Batch, fed: Fed) -> tuple[Tensor, Tensor]:
        """Labels from the last question position on, (B, N, G), and their weights; 0 where there is none.

        A group's labels are the tokens that it would have if nothing cut it, and behind them, with `lookahead_weight`,
        those that a group of the largest factor would have.
        """
        K = fed.sizes_BK.shape[1]
        c_B1 = batch.params["compression_factor"][:, None]
        phase_B1 = self.phase(batch.seeds)[:, None]
        step_K = torch.arange(K, device=c_B1.device)
        # Not `fed.sizes_BK`: a group that was cut keeps the labels of the whole one.
        own_BK = groups.most(step_K, c_B1, phase_B1)
        ahead = self.config.lookahead_weight
        ids_BKG, real_BKG = group_decoder.windows(
            batch.chain_ids,
            batch.chain_lengths,
            groups.starts(fed.sizes_BK),
            own_BK.clamp(min=self.config.widest) if ahead else own_BK,
            lm.template.separator_id,
        )
        place_G = torch.arange(ids_BKG.shape[-1], device=own_BK.device)
        weights_BKG = torch.where(place_G < own_BK[..., None], 1.0, ahead) * real_BKG
        if not self.config.supervise_chain:
            weights_BKG = torch.zeros_like(weights_BKG)
        return followed_by_answer(ids_BKG, weights_BKG, fed.counts_B, batch)

    @torch.no_grad()
    def cut(self, lm: LatentLM, batch: Batch, fed: Fed) -> Tensor:
        """(B, T) bool: the reasoning tokens that the model finds less likely than the row's threshold.

        `fed` are the groups without any cut: each token is judged given the right tokens before it in its group.
        """
        ids_BKG, real_BKG = members(batch.chain_ids, fed.sizes_BK)
        if not ids_BKG.numel():  # no row of the batch has any reasoning
            return torch.zeros_like(batch.chain_ids, dtype=torch.bool)
        hidden_BKD = fed.hidden(lm, batch, n=ids_BKG.shape[1])
        logps_BKG = group_decoder.label_logps(
            lm, hidden_BKD, ids_BKG, real_BKG, shortlist=self.shortlist(lm.head_rows)
        )
        threshold_B1 = batch.params["confidence_threshold"][:, None]
        # A row's groups, one after another, are its chain.
        logps_BT = torch.zeros(batch.chain_ids.shape, device=logps_BKG.device)
        chain_BT = ragged.length_mask(batch.chain_lengths, logps_BT.shape[1])
        logps_BT[chain_BT] = logps_BKG[real_BKG]
        return logps_BT.exp() < threshold_B1

    # Reinforcement

    def logps(self, lm: LatentLM, rollouts: Rollouts, latent_logprob: LatentLogprob) -> Scores:
        """Exact: a latent is the sum of tokens that were chosen one by one."""
        if bool((rollouts.params["confidence_threshold"] > 0).any()):
            raise ValueError(
                "confidence_threshold must be 0 in outputs that are scored: where a group ended would depend on the "
                "weights that are trained"
            )

        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            temperature_L = rollouts.temperature[thoughts.row]
            latent_temperature_L = rollouts.latent_temperature[thoughts.row]
            shortlist = self.shortlist(lm.head_rows)
            logps_L = group_decoder.thought_logps(
                lm, thoughts, temperature_L, latent_temperature_L, shortlist
            )
            return logps_L, {}

        # Made anew of what was chosen: by the present embeddings, and with gradient to them.
        chosen_BKG = rollouts.group_ids
        return score(lm, rollouts, thought_logps, self._merged(lm, chosen_BKG))

    def sampled_logps(
        self, info: Mapping[str, Tensor], stopped: Tensor, latent_logprob: LatentLogprob
    ) -> Tensor:
        return info["logp"]

    # Thinking

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        """Choose the group's tokens; the separator in the first place is the stop."""
        separator_id = lm.template.separator_id
        logits_BV = state.logits()
        temperatures = (state.temperature, state.latent_temperature)
        known_temperature_B, known_top_p_B = state.known_decoding()
        known_latent_temperature_B = state.known("latent_temperature")
        first_B = group_choice.choose_first(
            logits_BV,
            separator_id,
            *temperatures,
            state.top_p,
            lambda n: state.uniform(noise.TOKEN, n),
            (known_temperature_B, known_top_p_B),
            known_latent_temperature_B,
        )
        rules = Rules(
            most=self._most(state),
            temperature=state.latent_temperature,
            top_p=state.top_p,
            confidence_threshold=state.params["confidence_threshold"],
            # Draws of their own stream: a group's first token is drawn as CoT's is, whatever c.
            uniform=lambda place: state.uniform(noise.GROUP, place),
            shortlist=self.shortlist(state.make_head_rows or lm.head_rows),
            known={
                # An upper bound: for a c that is not whole the phase decides, which is drawn on the device.
                "most": state.known("compression_factor").ceil().long(),
                "temperature": known_latent_temperature_B,
                "top_p": known_top_p_B,
                "confidence_threshold": state.known("confidence_threshold"),
            },
        )
        ids_BG, logps_BG = group_choice.choose(lm, state.hidden, first_B, rules, state.wants_info)
        embeds_BD = self._merged(lm, ids_BG)
        info = {}
        if state.wants_info:
            first_logp_B = group_choice.first_logps(logits_BV, separator_id, *temperatures, first_B)
            # Tokens that were not drawn are no choice, unless the request is greedy altogether.
            scored_B = (state.latent_temperature > 0) | (state.temperature == state.latent_temperature)
            rest_B = torch.where(scored_B, logps_BG[:, 1:].sum(-1), 0)
            logps_BG[:, 0] = first_logp_B
            # Rows of different c share a batch, and batches are compared: as many columns in all of them.
            behind = self.config.widest - ids_BG.shape[1]
            info = {
                "group_ids": nn.functional.pad(ids_BG, (0, behind), value=NOTHING),
                "group_logps": nn.functional.pad(logps_BG, (0, behind)),
                "group_most": rules.most,
                "logp": first_logp_B + rest_B,
                "stop_probability": probability(separator_id, logits_BV),
            }
        return Thought(
            embeds=embeds_BD.to(state.hidden.dtype),
            done=first_B == separator_id,
            token_ids=torch.full_like(state.step, -1),
            info=info,
        )

    def _merged(self, lm: LatentLM, ids: Tensor) -> Tensor:
        """The latents of groups of chosen tokens: ids (..., G), `NOTHING` behind them -> (..., D)."""
        # The separator that ends a group is no part of it.
        real = (ids != NOTHING) & (ids != lm.template.separator_id)
        return merging.merge_groups(lm, ids, real, self.config.merge)

    def _most(self, state: ThinkState) -> Tensor:
        """The tokens that each row's next group has where nothing ends it before, (B,)."""
        c_B = state.params["compression_factor"]
        # A phase moves groups of a c that is not whole; drawing one takes as long as a place of the group.
        known_c_B = state.known("compression_factor")
        if bool((known_c_B == known_c_B.floor()).all()):
            return c_B.long()
        return groups.most(state.step, c_B, groups.phase(state.seed, state.sample))
