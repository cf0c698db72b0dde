"""The sequential head (ours): chooses the tokens of the next group one after another, and feeds their merged embedding.

    position    question's last    latent 1     latent 2     ###        answer 1
    labels      t1 t2              t3 t4        t5 ###       answer 1   EOS           c = 2, a chain of five tokens

`group_decoder.py` has the decoder and its formulas. A group ends with its c tokens, with the separator (it is then the
short last one), or before a token that is less likely than `confidence_threshold`: c is then the most, not the number.
A model that was never asked to end groups there has not learnt to read what comes out. So training simulates it
(`confidence_thresholds`): a forward without gradient feeds the row's tokens one by one and asks at each of them which
tokens a group would have that starts there. Labels are a group's tokens and the one that it ended before: the decoder
must know that it is unsure of it.

    chain      t1 t2 t3 t4 t5           c = 3; unsure of t3 behind t1 t2, and of t4 behind t3
    groups     [t1 t2]     [t3]     [t4 t5]
    labels      t1 t2 t3    t3 t4    t4 t5 ###

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
from colar.methods.colar.units import Units
from colar.methods.rollouts import LatentLogprob, Rollouts, Scores, ThoughtActions, score
from colar.model.head import HeadRows
from colar.model.latent_lm import LatentLM
from colar.ops import groups, noise
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
            **merging.modules(config.merge, lm.width, config.most_units, self.units(lm), config.merge_rank),
        }

    def units(self, lm: LatentLM) -> Units:
        """What c counts, by the model's tokenizer. ValueError where it lacks a token that the config names."""
        config = self.config
        return Units.of(lm.template, config.unit, config.alone, config.starts)

    def numbers(self, c: Tensor) -> Tensor | None:
        """In which rows numbers are units, by their c; None: in all of them."""
        least = self.config.numbers_from
        return None if least <= 1 else c >= least

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

        A group's labels are its tokens, the one that it was cut before, and behind them, with `lookahead_weight`,
        those that a group of the largest factor would have.
        """
        K = fed.sizes_BK.shape[1]
        c_B1 = batch.params["compression_factor"][:, None]
        phase_B1 = self.phase(batch.seeds)[:, None]
        step_K = torch.arange(K, device=c_B1.device)
        most_BK = groups.most(step_K, c_B1, phase_B1)
        # Up to the token that a group ended before: at inference nothing behind that is asked for.
        numbers_B = self.numbers(batch.params["compression_factor"])
        own_BK = self.units(lm).asked(batch.chain_ids, fed.sizes_BK, most_BK, numbers_B)
        ahead = self.config.lookahead_weight
        starts_BK = groups.starts(fed.sizes_BK)
        ids_BKG, real_BKG = group_decoder.windows(
            batch.chain_ids,
            batch.chain_lengths,
            starts_BK,
            torch.maximum(own_BK, self._ahead(lm, batch, starts_BK)) if ahead else own_BK,
            lm.template.separator_id,
        )
        place_G = torch.arange(ids_BKG.shape[-1], device=own_BK.device)
        weights_BKG = torch.where(place_G < own_BK[..., None], 1.0, ahead) * real_BKG
        if not self.config.supervise_chain:
            weights_BKG = torch.zeros_like(weights_BKG)
        return followed_by_answer(ids_BKG, weights_BKG, fed.counts_B, batch)

    def _ahead(self, lm: LatentLM, batch: Batch, starts_BK: Tensor) -> Tensor:
        """The tokens that inference would ask for at each group's position at the largest factor, (B, K)."""
        units = self.units(lm)
        most_BK = torch.full_like(starts_BK, self.config.most_units)
        if units.plain or not starts_BK.numel():
            return most_BK
        c_B = batch.params["compression_factor"]
        numbers_B = self.numbers(torch.full_like(c_B, self.config.factors.most))
        sizes_BK = groups.reach(units.lengths(batch.chain_ids, numbers_B), starts_BK, most_BK)
        # Behind a row's last group the starts are the chain's length.
        at_BK = starts_BK.clamp(max=batch.chain_ids.shape[1] - 1)
        sizes_BK = torch.minimum(sizes_BK, units.bounds(batch.chain_ids, numbers_B).gather(1, at_BK))
        sizes_BK = torch.minimum(sizes_BK, batch.chain_lengths[:, None] - starts_BK)
        return units.asked(batch.chain_ids, sizes_BK, most_BK, numbers_B, starts_BK)

    @torch.no_grad()
    def bounds(self, lm: LatentLM, batch: Batch) -> Tensor:
        """(B, T): how many tokens a group has that starts at a reasoning token, where only the threshold ends it.

        Rows are fed as groups of one token each. So each start is judged as at inference where the groups before it are
        read well; whole groups before it, which no threshold would let through, would make the model unsure.
        """
        B, T = batch.chain_ids.shape
        # Places: what the row's c lets in.
        c_B1 = batch.params["compression_factor"][:, None]
        numbers_B = self.numbers(c_B1[:, 0])
        starts_BT = torch.arange(T, device=c_B1.device).expand(B, T)
        most_BT = c_B1.ceil().long().expand(B, T)
        units = self.units(lm)
        if not units.plain:
            most_BT = groups.reach(units.lengths(batch.chain_ids, numbers_B), starts_BT, most_BT)
        ids_BTG, asked_BTG = group_decoder.windows(
            batch.chain_ids, batch.chain_lengths, starts_BT, most_BT, lm.template.separator_id
        )
        if ids_BTG.shape[-1] < 2:
            return torch.ones_like(batch.chain_ids)
        # The first token is never cut.
        asked_BTG = asked_BTG & (torch.arange(ids_BTG.shape[-1], device=ids_BTG.device) > 0)
        threshold_B = batch.params["confidence_threshold"]
        asked_BTG = asked_BTG & (threshold_B > 0)[:, None, None]
        if self.config.threshold_on == "number":
            columns_BT = None if numbers_B is None else numbers_B[:, None].expand(B, T)
            asked_BTG = asked_BTG & units.numbers_open(ids_BTG, columns_BT)

        # Most rows of a batch may have nothing to ask for, and cost nothing then.
        sure_BTG = torch.ones_like(asked_BTG)
        at_X = asked_BTG.any(-1).any(-1).nonzero()[:, 0]
        if len(at_X):
            logps_XTG = self._alone_logps(lm, batch.rows(at_X), ids_BTG[at_X], asked_BTG[at_X])
            sure_XTG = logps_XTG.exp() >= threshold_B[at_X, None, None]
            sure_BTG[at_X] = sure_XTG | ~asked_BTG[at_X]
        # The tokens before the first that is unsure.
        return 1 + sure_BTG[..., 1:].long().cumprod(-1).sum(-1)

    def _alone_logps(self, lm: LatentLM, batch: Batch, ids_BTG: Tensor, asked_BTG: Tensor) -> Tensor:
        """Log-probs of the tokens behind each token, (B, T, G), where they are asked for. Single tokens are fed."""
        T = batch.chain_ids.shape[1]
        sizes_BT = groups.sizes(batch.chain_lengths, torch.ones_like(batch.params["compression_factor"]))
        latents_BTD = merging.merge_chains(lm, batch.chain_ids, sizes_BT, self.config.merge, self.units(lm))
        hidden_BTD = Fed(latents_BTD, sizes_BT).hidden(lm, batch, n=T)
        # The decoder comes to a place by those before it. But for the first: it would take the whole vocabulary's
        # softmax.
        behind_BTG = asked_BTG.flip(-1).long().cumsum(-1).flip(-1) > 0
        behind_BTG[..., 0] = False
        return group_decoder.label_logps(
            lm, hidden_BTD, ids_BTG, behind_BTG, shortlist=self.shortlist(lm.head_rows)
        )

    # Reinforcement

    has_density: ClassVar[bool] = False
    """A thought's log-prob is that of its tokens."""

    def logps(self, lm: LatentLM, rollouts: Rollouts, latent_logprob: LatentLogprob) -> Scores:
        """Exact: a latent is the sum of tokens that were chosen one by one.

        Where a group could go on at all was decided by the weights that sampled; the present ones are asked how likely
        they find what was drawn there.
        """
        threshold_B = rollouts.params["confidence_threshold"]
        # Below a half several tokens of a place could have let a group go on, and one is kept.
        if bool(((threshold_B > 0) & (threshold_B <= 0.5)).any()):
            raise ValueError("confidence_threshold must be 0 or above 0.5 in outputs that are scored")

        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            temperature_L = rollouts.temperature[thoughts.row]
            latent_temperature_L = rollouts.latent_temperature[thoughts.row]
            shortlist = self.shortlist(lm.head_rows)
            logps_L = group_decoder.thought_logps(
                lm, thoughts, temperature_L, latent_temperature_L, shortlist, self.units(lm)
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
        known_c_B = state.known("compression_factor")
        known_numbers_B = self.numbers(known_c_B)
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
            units=self.units(lm),
            numbers=self.numbers(state.params["compression_factor"]),
            temperature=state.latent_temperature,
            top_p=state.top_p,
            confidence_threshold=state.params["confidence_threshold"],
            threshold_on=self.config.threshold_on,
            # Draws of their own stream: a group's first token is drawn as CoT's is, whatever c.
            uniform=lambda place: state.uniform(noise.GROUP, place),
            shortlist=self.shortlist(state.make_head_rows or lm.head_rows),
            known={
                # An upper bound: for a c that is not whole the phase decides, which is drawn on the device.
                "most": known_c_B.ceil().long(),
                "temperature": known_latent_temperature_B,
                "top_p": known_top_p_B,
                "confidence_threshold": state.known("confidence_threshold"),
                **({} if known_numbers_B is None else {"numbers": known_numbers_B}),
            },
        )
        found = group_choice.choose(lm, state.hidden, first_B, rules, state.wants_info)
        ids_BG, logps_BG = found.ids, found.logps
        embeds_BD = self._merged(lm, ids_BG)
        info = {}
        if state.wants_info:
            first_logp_B = group_choice.first_logps(logits_BV, separator_id, *temperatures, first_B)
            # Tokens that were not drawn are no choice, unless the request is greedy altogether.
            scored_B = (state.latent_temperature > 0) | (state.temperature == state.latent_temperature)
            rest_B = torch.where(scored_B, logps_BG[:, 1:].sum(-1) + found.declined_logps, 0)
            logps_BG[:, 0] = first_logp_B
            # Rows of different c share a batch, and batches are compared: as many columns in all of them.
            behind = self.config.widest - ids_BG.shape[1]
            info = {
                "group_ids": nn.functional.pad(ids_BG, (0, behind), value=NOTHING),
                "group_logps": nn.functional.pad(logps_BG, (0, behind)),
                "group_unsure": found.unsure,
                "declined_ids": found.declined_ids,
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
        return merging.merge_groups(lm, ids, real, self.config.merge, self.units(lm))

    def _most(self, state: ThinkState) -> Tensor:
        """The units that each row's next group has where nothing ends it before, (B,)."""
        c_B = state.params["compression_factor"]
        # A phase moves groups of a c that is not whole; drawing one takes as long as a place of the group.
        known_c_B = state.known("compression_factor")
        if bool((known_c_B == known_c_B.floor()).all()):
            return c_B.long()
        return groups.most(state.step, c_B, groups.phase(state.seed, state.sample))
