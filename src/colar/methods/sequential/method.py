"""The sequential method (ours): the tokens of a group are chosen one after another, and their merged embedding is fed.

`decoder.py` has the decoder and its formulas, `choice.py` the choice of a group, `boundaries.py` the ends of groups,
`merging.py` the merge into a latent. At c = 1 this is CoT, its gradients included: embeddings are trained, because
they are no regression targets.

A group ends with its c tokens, with the separator (it is then the short last one), or before a token that is less
likely than `confidence_threshold`, so that c is then the most tokens, not the number.

A model whose groups never ended early in training has not learnt to read the latents of such groups. So training
simulates it (`confidence_thresholds`): a forward without gradient feeds the row's tokens as groups of one, and finds
for each of them the tokens that a group starting there would have. Labels are a group's tokens and the one that it was
cut before, because the decoder must know that its confidence in that token is low.

    chain      t1 t2 t3 t4 t5           c = 3; low confidence in t3 behind t1 t2, and in t4 behind t3
    groups     [t1 t2]     [t3]     [t4 t5]
    labels      t1 t2 t3    t3 t4    t4 t5 ###

Every position can also be trained on the tokens after its group, with a smaller weight (`lookahead_weight`), as in
multi-token prediction (Gloeckle et al. 2024, DeepSeek-V3). Rows of a small c then train the decoder for rows of a large
c, without another forward of the backbone.

Shape suffixes: B rows, T reasoning tokens, K latents, G places of a group, N labelled positions of a row, L thoughts of
all rows, X rows with a threshold, D width, V vocabulary.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from colar import progress
from colar.checks import check_choice, check_holds, check_number
from colar.data.example import Example
from colar.methods import grouping
from colar.methods.base import Batch
from colar.methods.grouping import GroupMethod, dealt, parse_factors
from colar.methods.rollouts import Rollouts, Scores, ThoughtActions, score_actions
from colar.methods.sequential import boundaries, choice, decoder, merging
from colar.methods.sequential.boundaries import NUMBERS_FROM, Equations, Windows
from colar.methods.sequential.choice import Groups, Rules
from colar.methods.sequential.decoder import GroupDecoder
from colar.methods.thinking import ThinkState, Thought
from colar.model.head import PartialHead, uncached_autocast
from colar.model.latent_lm import LatentLM
from colar.ops import noise, ragged
from colar.ops.sampling import probability

Merge = Literal["sqrt", "ordered"]
Grouping = Literal["tokens", "equations"]


@dataclass(frozen=True)
class SequentialParams:
    """Per-request values."""

    compression_factor: float = 2
    """c: the reasoning tokens that a latent stands for, 1 or more. It need not be whole: at 1.5 groups have 1 or 2."""

    confidence_threshold: float = 0
    """A group also ends before a token that is less likely than this: c is then the most tokens, not the number.
    From 0, where nothing ends a group before its c tokens, to 1. With grouping: equations it applies behind unfinished
    numbers and signs alone."""

    def __post_init__(self) -> None:
        check_number("compression_factor", self.compression_factor, 1)
        check_number("confidence_threshold", self.confidence_threshold, 0, 1)


@dataclass(frozen=True)
class SequentialConfig:
    """Values for making, feeding and learning groups."""

    compression_factors: tuple[float, ...] | str = "1..5"
    """Factors drawn from in training: a range of whole numbers such as "1..5", or a list, in which a factor that stands
    twice is drawn twice as often."""
    grouping: Grouping = "tokens"
    """Unit of c: "tokens"; or, for chains of equations and tokenizers with a token for each digit, "equations": "="
    is a group of its own, signs start one, and the digits of a number that begins a group are one unit."""
    merge: Merge = "sqrt"
    """A group is fed as its sum over "sqrt" of its size (the paper's), or as a sum that is "ordered", in which each
    place has a learnt map: a plain sum has lost the order of its tokens."""
    confidence_thresholds: tuple[float, ...] = (0,)
    """Values of confidence_threshold drawn from in training, as factors are: groups then end where the model itself has
    less confidence than that."""
    lookahead_weight: float = 0.0
    """Weight of the labels behind a group, up to the largest trained factor; the group's own have 1."""
    shortlist: bool = False
    """Choose the tokens of a group behind its first among those of the training chains alone: their rows of the LM head
    are few, and a thought of c tokens costs little more than one."""
    shortlist_ids: tuple[int, ...] | None = None
    """The ids of that shortlist, ascending; null: counted in the training data at the start and kept here."""

    def __post_init__(self) -> None:
        check_choice("method.grouping", self.grouping, get_args(Grouping))
        check_choice("method.merge", self.merge, get_args(Merge))
        check_number("method.lookahead_weight", self.lookahead_weight, 0)
        parse_factors(self.compression_factors)
        thresholds, ids = self.confidence_thresholds, self.shortlist_ids
        is_given = len(thresholds) > 0
        check_holds("method.confidence_thresholds", is_given, thresholds, "a list of numbers ([0]: none)")
        for threshold in thresholds:
            check_number("method.confidence_thresholds", threshold, 0, 1)
        if ids is not None and not self.shortlist:
            raise ValueError("method.shortlist_ids is given, but method.shortlist is false")
        are_right = ids is None or (len(ids) > 0 and ids[0] >= 0 and list(ids) == sorted(set(ids)))
        check_holds(
            "method.shortlist_ids", are_right, ids, "token ids in ascending order, each once, or null"
        )

    @property
    def factors(self) -> tuple[float, ...]:
        """The training factors, parsed."""
        return parse_factors(self.compression_factors)

    @property
    def most_units(self) -> int:
        """The most units that a group may have."""
        # At c = 2.5 groups have 2 or 3.
        return math.ceil(max(self.factors))


class Sequential(GroupMethod):
    name: ClassVar[str] = "sequential"
    Config: ClassVar[type] = SequentialConfig
    Params: ClassVar[type] = SequentialParams

    @property
    def multiple_forwards(self) -> bool:
        # If groups end before tokens of low confidence, a first forward computes the model's confidence.
        return any(self.config.confidence_thresholds)

    def modules(self, lm: LatentLM) -> dict[str, nn.Module]:
        # The tokenizer is checked before a run begins.
        equations = self.equations(lm)
        modules: dict[str, nn.Module] = {"group_decoder": GroupDecoder(lm.width)}
        if self.config.merge == "ordered":
            if self.config.most_units > 1:
                modules["place_maps"] = merging.PlaceMaps(lm.width, self.config.most_units)
            if equations is not None:
                modules["digit_maps"] = merging.PlaceMaps(lm.width, boundaries.MOST_DIGITS)
        return modules

    def equations(self, lm: LatentLM) -> Equations | None:
        """The tokens by which groups of equations end; None if c counts tokens. ValueError if the tokenizer lacks one
        of them."""
        if self.config.grouping != "equations":
            return None
        return Equations.of(lm.template)

    def prepare(self, lm: LatentLM, examples: Iterable[Example]) -> Iterable[Example]:
        equations = self.equations(lm)
        rows = list(examples)
        if equations is not None and not equations.are_seen(lm.template, [row.steps for row in rows]):
            progress.say(
                "warning: in these chains signs and = are no tokens by themselves, so that no group starts there: "
                "write equations without spaces (48/2=24), or set method.grouping tokens"
            )
        if self.config.shortlist_ids is not None:
            choice.warn_of_missing(lm.template, rows, self.config.shortlist_ids)
        elif self.config.shortlist:
            counted = choice.count_shortlist(lm.template, rows)
            self.config = dataclasses.replace(self.config, shortlist_ids=counted)
        return rows

    def shortlist_head(
        self, lm: LatentLM, gather: Callable[[tuple[int, ...]], PartialHead] | None = None
    ) -> PartialHead | None:
        """The LM head's weights of the shortlist; None for the whole vocabulary. An engine gathers them by `gather`."""
        if not self.config.shortlist:
            return None
        if self.config.shortlist_ids is None:
            raise ValueError(
                "method.shortlist_ids are not known yet: call prepare, or give them in the config"
            )
        return (gather or lm.partial_head)(self.config.shortlist_ids)

    def check_params(self, params: SequentialParams) -> str | None:
        c, most = params.compression_factor, max(self.config.factors)
        # The decoder has never been trained at a place after those.
        if c > most:
            raise ValueError(f"compression_factor {c:g} is above what was trained ({most:g})")
        warnings = [super().check_params(params)]
        if params.confidence_threshold and not any(self.config.confidence_thresholds):
            warnings.append(
                f"confidence_threshold {params.confidence_threshold:g}: groups that end early were not trained "
                "(method.confidence_thresholds): expect less"
            )
        return "; ".join(filter(None, warnings)) or None

    def choices(self) -> Mapping[str, Sequence[Any]]:
        thresholds = sorted(set(self.config.confidence_thresholds))
        return {**super().choices(), "confidence_threshold": thresholds}

    def other_values(self, rng: Random) -> Iterator[dict[str, float]]:
        thresholds = self.config.confidence_thresholds
        # Drawn only if there is a choice.
        drawn = dealt(thresholds, rng) if len(thresholds) > 1 else itertools.repeat(thresholds[0])
        return ({"confidence_threshold": threshold} for threshold in drawn)

    # Learning

    def training_thoughts(self, lm: LatentLM, batch: Batch) -> tuple[Tensor, Tensor]:
        """The chains in groups, each merged into a latent."""
        _, sizes_BK = self._groups(lm, batch)
        return merging.merge_chains(lm, batch.chain_ids, sizes_BK), sizes_BK

    def _groups(self, lm: LatentLM, batch: Batch) -> tuple[Windows, Tensor]:
        """The windows of the rows' chains, and the number of tokens of each group, (B, K)."""
        c_B = batch.params["compression_factor"]
        windows = Windows.of(batch.chain, self.config.most_units, self.equations(lm), c_B >= NUMBERS_FROM)
        if bool((batch.params["confidence_threshold"] > 0).any()):
            # A first pass finds the tokens of low confidence; the loss feeds groups that end before them.
            windows = windows.cut_before(self._low_confidence(lm, batch, windows))
        return windows, windows.sizes(batch.chain_lengths, c_B, grouping.draw_phase(batch.seeds))

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        """ce: cross-entropy of each token given those before it in its group, and of the answer."""
        windows, sizes_BK = self._groups(lm, batch)
        ids_BNG, weights_BNG = self._labels(lm, batch, windows, sizes_BK)
        latents_BKD = merging.merge_chains(lm, batch.chain_ids, sizes_BK)
        hidden_BND = grouping.hidden_around(lm, batch, latents_BKD, sizes_BK, n=ids_BNG.shape[1])
        return {"ce": decoder.loss(lm, hidden_BND, ids_BNG, weights_BNG, self.shortlist_head(lm))}

    def _labels(
        self, lm: LatentLM, batch: Batch, windows: Windows, sizes_BK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Labels from the last question position on, (B, N, G), and their weights; 0 where there is none.

        A group's labels are its tokens, the one that it was cut before, and after them, with `lookahead_weight`,
        those that a group of the largest factor would have.
        """
        starts_BK = grouping.group_starts(sizes_BK)
        most_units_BK = grouping.units_of_groups(
            sizes_BK.shape[1], batch.params["compression_factor"], grouping.draw_phase(batch.seeds)
        )
        # Labels stop at the token before which a group was cut, because inference computes no token after it.
        own_BK = all_BK = windows.label_counts(starts_BK, most_units_BK)
        ahead = self.config.lookahead_weight
        if ahead:
            all_BK = torch.maximum(own_BK, self._lookahead_counts(lm, batch, starts_BK))
        ids_BKG, real_BKG = decoder.tokens_from(
            batch.chain_ids, batch.chain_lengths, starts_BK, all_BK, lm.template.separator_id
        )
        place_G = torch.arange(ids_BKG.shape[-1], device=own_BK.device)
        weights_BKG = torch.where(place_G < own_BK[..., None], 1.0, ahead) * real_BKG
        return grouping.followed_by_answer(ids_BKG, weights_BKG, grouping.count_groups(sizes_BK), batch)

    def _lookahead_counts(self, lm: LatentLM, batch: Batch, starts_BK: Tensor) -> Tensor:
        """The number of labels that the groups' positions would have at the largest factor, (B, K)."""
        most_units, unites_digits = self.config.most_units, max(self.config.factors) >= NUMBERS_FROM
        unites_digits_B = torch.full_like(batch.seeds, unites_digits, dtype=torch.bool)
        windows = Windows.of(batch.chain, most_units, self.equations(lm), unites_digits_B)
        return windows.label_counts(starts_BK, torch.full_like(starts_BK, most_units))

    @torch.no_grad()
    def _low_confidence(self, lm: LatentLM, batch: Batch, windows: Windows) -> Tensor:
        """(B, T, G) bool: tokens that are less likely than the row's threshold, of those that it applies to.

        Rows are fed as groups of one token each, so that each start is judged as at inference after groups that are
        read well. Whole groups before it, which no threshold would let through, would lower the model's confidence.
        """
        threshold_B = batch.params["confidence_threshold"]
        # Groups of a smaller c than the largest do not have all tokens of a window, and those of one token no end.
        most_B11 = batch.params["compression_factor"].ceil()[:, None, None]
        tested_BTG = windows.tested_BTG & (windows.units_BTG <= most_B11) & (threshold_B > 0)[:, None, None]
        low_BTG = torch.zeros_like(tested_BTG)
        # Rows with nothing to test, perhaps most of a batch, cost nothing.
        at_X = tested_BTG.any(-1).any(-1).nonzero()[:, 0]
        if len(at_X):
            rows, ids_XTG, tested_XTG = batch.rows(at_X), windows.ids_BTG[at_X], tested_BTG[at_X]
            # The decoder reaches a place through those before it. The first is left out, because its log-prob would
            # take the whole vocabulary's softmax.
            reached_XTG = tested_XTG.flip(-1).long().cumsum(-1).flip(-1) > 0
            reached_XTG[..., 0] = False
            # As in thinking, without dropout. And without autocast's cache: up to torch 2.10 the loss would reuse the
            # weights that are cast here, which have no gradient.
            with lm.evaluating(), uncached_autocast(lm.device.type):
                fed_XTD = lm.embed(ragged.pack(rows.question, rows.chain, multiple=ragged.PAD_TO))
                lengths_X = rows.question_lengths + rows.chain_lengths
                hidden_XTD = lm.hidden_of_rows(fed_XTD, rows.question, lengths_X)
                hidden_XTD = ragged.take_from(hidden_XTD, rows.question_lengths - 1, ids_XTG.shape[1])
                logps_XTG = decoder.label_logps(lm, hidden_XTD, ids_XTG, reached_XTG, self.shortlist_head(lm))
            below_XTG = logps_XTG.exp().to(threshold_B.device) < threshold_B[at_X, None, None]
            low_BTG[at_X] = below_XTG & tested_XTG
        return low_BTG

    # Reinforcement

    def logps(self, lm: LatentLM, rollouts: Rollouts) -> Scores:
        """Exact log-probs: a latent is the sum of tokens that were chosen one by one, and its log-prob is theirs.

        The tokens that could have continued a group are fixed by the sampling weights; the current weights score the
        draw that was made there.
        """
        threshold_B = rollouts.params["confidence_threshold"]
        # At a half or below, several tokens of a place could have continued a group, and only one is recorded.
        if bool(((threshold_B > 0) & (threshold_B <= 0.5)).any()):
            raise ValueError("confidence_threshold must be 0 or above 0.5 in outputs that are scored")
        equations = self.equations(lm)

        def thought_logps(thoughts: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
            return decoder.thought_logps(lm, thoughts, rollouts, self.shortlist_head(lm), equations), {}

        # Recomputed from the chosen tokens by the current embeddings, with gradient to them.
        latents_BKD = merging.merge_groups(lm, rollouts.group_ids)
        return score_actions(lm, rollouts, thought_logps, latents_BKD)

    def sampled_logps(self, info: Mapping[str, Tensor], stopped: Tensor) -> Tensor:
        return info["logp"]

    # Thinking

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        """Choose the group's tokens; the separator in the first place is the stop."""
        separator_id = lm.template.separator_id
        first_B = choice.choose_first(state, separator_id)
        groups = choice.choose_groups(lm, state.hidden, first_B, self._rules(lm, state), state.wants_info)
        return Thought(
            embeds=merging.merge_groups(lm, groups.ids).to(state.hidden.dtype),
            done=first_B == separator_id,
            token_ids=torch.full_like(state.step, -1),
            info=self._info(lm, state, groups) if state.wants_info else {},
        )

    def _rules(self, lm: LatentLM, state: ThinkState) -> Rules:
        """The rules by which the rows' next groups are chosen."""
        c_B = state.params["compression_factor"]
        # A phase moves groups only if c is not whole, and drawing one takes as long as a place of the group.
        if "compression_factor" in state.conditions.whole_numbers:
            units_B = c_B.long()
        else:
            phase_B = grouping.draw_phase(state.seed, state.sample)
            units_B = grouping.nominal_units(state.step, c_B, phase_B)
        return Rules(
            units=units_B,
            # An upper bound: for a c that is not whole the units depend on the phase, which is drawn on the device.
            most_units=state.conditions.largest("compression_factor"),
            equations=self.equations(lm),
            unites_digits=c_B >= NUMBERS_FROM,
            temperature=state.latent_temperature,
            top_p=state.top_p,
            modes=state.conditions.latent_modes,
            confidence_threshold=state.params["confidence_threshold"],
            has_threshold=state.conditions.largest("confidence_threshold") > 0,
            # Draws of their own stream, so that a group's first token is drawn as CoT's is, for any c.
            uniform=lambda place: state.uniform(noise.GROUP, place - 1),
            shortlist=self.shortlist_head(lm, state.make_partial_head),
        )

    def _info(self, lm: LatentLM, state: ThinkState, groups: Groups) -> dict[str, Tensor]:
        """The groups as columns, their log-probs, and the probability of the stop."""
        separator_id = lm.template.separator_id
        first_logp_B = choice.first_logps(state, separator_id, groups.ids[:, 0])
        # Tokens that were not drawn are not scored, unless the whole request is greedy.
        scored_B = (state.latent_temperature > 0) | (state.temperature == state.latent_temperature)
        rest_B = torch.where(scored_B, groups.logps[:, 1:].sum(-1) + groups.ending_logps, 0)
        logps_BG = groups.logps.clone()
        logps_BG[:, 0] = first_logp_B
        # All batches have the same columns, because rows of different c share a batch and batches are compared.
        most_tokens = boundaries.most_tokens(self.config.most_units, self.equations(lm))
        behind = most_tokens - groups.ids.shape[1]
        return {
            "group_ids": nn.functional.pad(groups.ids, (0, behind), value=boundaries.NOTHING),
            "group_logps": nn.functional.pad(logps_BG, (0, behind)),
            "group_low_confidence": groups.low_confidence,
            "endings": groups.endings,
            "logp": first_logp_B + rest_B,
            "stop_probability": probability(separator_id, state.logits()),
        }
