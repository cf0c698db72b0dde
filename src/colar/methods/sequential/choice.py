"""The choice of a group: its first token, or the stop, and then one token after another.

A request has two temperatures. At a group's first place `temperature` decides whether to stop. Given that the thought
goes on, its tokens are drawn at `latent_temperature`; at 0 they are the likeliest, which is no choice and is not
scored. If the two are equal, all of this is one draw from the LM head, as in CoT.

With `method.shortlist` the tokens after the first are chosen among those of the training chains and the separator.
Chains use few of a vocabulary's tokens (equations: some dozens of 49,152), and the LM head is a large part of a small
model's step. The softmax at those places is over the shortlist in thinking, in training, and in the log-probs that
reinforcement learns from. A label that the shortlist lacks, in rows in which it was not counted, is scored by the whole
vocabulary.

Shape suffixes: B rows, G places of a group, X rows whose group goes on, S shortlist, D width, V vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar import progress
from colar.data.example import Example
from colar.methods.losses import continue_logps, without
from colar.methods.sequential.boundaries import NOTHING, Equations, OpenGroups, most_tokens
from colar.methods.sequential.decoder import Ending
from colar.methods.thinking import ThinkState
from colar.model.head import PartialHead
from colar.model.latent_lm import LatentLM
from colar.ops import devices, noise
from colar.ops.sampling import DrawModes, sample_tokens, token_logps, unlikely_logps
from colar.template.template import Template


@dataclass(frozen=True)
class Rules:
    """Rules by which the tokens of a group are chosen, and the group ends: columns (B,)."""

    units: Tensor
    """The units of a group that nothing ends early."""
    most_units: int
    """The largest of `units`, or more."""
    unites_digits: Tensor
    """bool: True in rows in which the digits of a number are one unit."""
    temperature: Tensor
    """Temperature of the tokens after the first."""
    top_p: Tensor
    modes: DrawModes
    """The modes in which these rows, or these and others, draw by temperature and top-p."""
    confidence_threshold: Tensor
    """A group ends before a token that is less likely than this; 0 for none."""
    has_threshold: bool
    """True if any row may have a threshold."""
    uniform: Callable[[int], Tensor]
    """The draws for a place of the group, (B,)."""
    shortlist: PartialHead | None = None
    """Candidates for the tokens after the first; the whole vocabulary by default."""
    equations: Equations | None = None
    """The tokens by which groups of equations end; None: a group simply has `units` tokens."""

    @property
    def most_tokens(self) -> int:
        """The most tokens that a group may have."""
        return most_tokens(self.most_units, self.equations)

    def tokens_at(self, columns: Tensor) -> Tensor:
        """The tokens of these columns of the logits, at a place after the first."""
        return columns if self.shortlist is None else self.shortlist.ids_S[columns]

    def thresholds(self, rows_X: Tensor, open_groups: OpenGroups) -> Tensor:
        """The threshold of each group's next token, (X,)."""
        return torch.where(open_groups.threshold_applies(rows_X), self.confidence_threshold[rows_X], 0)


class Groups:
    """The groups of B rows, of one token each at first, filled place by place."""

    def __init__(self, first_B: Tensor, places: int) -> None:
        device = first_B.device
        self.ids = torch.full((len(first_B), places), NOTHING, device=device)
        """Token ids (B, G), `NOTHING` after a group's end. The separator that ends a group early is among them."""
        self.ids[:, 0] = first_B
        self.logps = torch.zeros(self.ids.shape, device=device)
        """Log-prob of each token given those before it, (B, G); 0 at the first place."""
        self.endings = torch.full_like(first_B, Ending.NO_DRAW)
        """`Ending` of each group, (B,): the draw that ended it."""
        self.ending_logps = torch.zeros(len(first_B), device=device)
        """Log-prob of that draw, (B,); 0 if none ended the group."""
        self.low_confidence = torch.zeros(len(first_B), dtype=torch.bool, device=device)
        """(B,) bool: True where a group ended before a token that is below the threshold."""


def choose_first(state: ThinkState, separator_id: int) -> Tensor:
    """The first token of each group, (B,); the separator where the thinking stops."""
    logits_BV, conditions = state.logits(), state.conditions
    # No draw, because its noise would cost more than the choice.
    if not conditions.modes.drawn and not conditions.latent_modes.drawn:
        return logits_BV.argmax(-1)
    first_B = sample_tokens(logits_BV, state.temperature, state.top_p, state.uniform(), conditions.modes)
    # If both temperatures are equal, the draw that decided about the stop has chosen the token, too.
    if conditions.one_temperature:
        return first_B

    def token_if_no_stop(at: Any) -> Tensor:
        others_XV = without(logits_BV[at], separator_id)
        uniform_X = state.uniform(noise.TOKEN, 1)[at]
        return sample_tokens(
            others_XV, state.latent_temperature[at], state.top_p[at], uniform_X, conditions.latent_modes
        )

    again_B = (state.temperature != state.latent_temperature) & (first_B != separator_id)
    return devices.where_rows(again_B, token_if_no_stop, first_B)


def first_logps(state: ThinkState, separator_id: int, first_B: Tensor) -> Tensor:
    """Log-prob of the choice of `choose_first`, (B,): of stopping, or of going on and of the token given that."""
    logits_BV = state.logits()
    logps_B = token_logps(logits_BV, state.temperature, first_B)
    if state.conditions.one_temperature:
        return logps_B

    def in_two_choices(at: Any) -> Tensor:
        temperature_X, latent_temperature_X = state.temperature[at], state.latent_temperature[at]
        scale_X = torch.where(temperature_X == 0, 1, temperature_X).float()
        (continue_X,) = continue_logps(logits_BV[at].float(), scale_X, separator_id)
        token_X = token_logps(without(logits_BV[at], separator_id), latent_temperature_X, first_B[at])
        return continue_X + torch.where(latent_temperature_X > 0, token_X, 0)

    again_B = (state.temperature != state.latent_temperature) & (first_B != separator_id)
    return devices.where_rows(again_B, in_two_choices, logps_B)


def choose_groups(
    lm: LatentLM, hidden_BD: Tensor, first_B: Tensor, rules: Rules, wants_logps: bool = True
) -> Groups:
    """The groups that begin with `first_B`.

    A row whose first token is the separator has no more places. If no row wants log-probs, they are 0 unless a
    threshold needs them, and no ending is recorded. On a CPU only rows whose group goes on are computed; a GPU computes
    all, because finding these rows would synchronise at each place.
    """
    compact = not devices.is_asynchronous(first_B.device)
    groups = Groups(first_B, rules.most_tokens)

    # Compact: the rows whose group goes on, and their columns. The others cost nothing more.
    #
    #     place     1    2    3
    #     row 0     t1   t2   t3       c = 3
    #     row 1     t1   t2   .        c = 2
    #     row 2     t1   #    .        its group has ended
    rows_X = torch.arange(len(first_B), device=first_B.device)
    state_XD = hidden_BD
    token_X = first_B
    may_end = rules.has_threshold or rules.equations is not None
    open_groups = OpenGroups(first_B, rules.units, rules.equations, rules.unites_digits)
    going_X = (token_X != lm.template.separator_id) & open_groups.open(rows_X)
    for place in range(1, rules.most_tokens):
        if compact and not bool(going_X.all()):
            at = going_X.nonzero()[:, 0]
            rows_X, state_XD, token_X, going_X = rows_X[at], state_XD[at], token_X[at], going_X[at]
        if not len(rows_X):
            break
        state_XD = lm.extra["group_decoder"](state_XD, lm.embed(token_X))
        logits_XV = lm.logits(state_XD, rules.shortlist)
        index_X = _draw(logits_XV, rows_X, place, rules)
        token_X = rules.tokens_at(index_X)
        joins_X = going_X
        if rules.equations is not None:
            joins_X = joins_X & open_groups.admits(rows_X, token_X[:, None])[:, 0]
        # A softmax over the vocabulary, so it is computed only if its result is read.
        if rules.has_threshold or wants_logps:
            # The threshold applies to the softmax before top-p; at temperature 0, to that of temperature 1.
            logps_X = token_logps(logits_XV, rules.temperature[rows_X], index_X)
            low_confidence_X = joins_X & (logps_X.exp() < rules.thresholds(rows_X, open_groups))
            joins_X = joins_X & ~low_confidence_X
            groups.low_confidence[rows_X] |= low_confidence_X
            groups.logps[rows_X, place] = torch.where(joins_X, logps_X, 0)
        # If every row is greedy, no draw ends a group.
        if may_end and wants_logps and rules.modes.drawn:
            _record_endings(groups, rows_X, logits_XV, going_X & ~joins_X, rules, open_groups)
        groups.ids[rows_X, place] = torch.where(joins_X, token_X, NOTHING)
        open_groups.add(rows_X, token_X)
        going_X = joins_X & (token_X != lm.template.separator_id) & open_groups.open(rows_X)
    return groups


def _draw(logits_XV: Tensor, rows_X: Tensor, place: int, rules: Rules) -> Tensor:
    """The columns of the logits that are drawn for a place of these rows' groups, (X,)."""
    # No draw if all are greedy, because its noise would cost more than the choice.
    if not rules.modes.drawn:
        return logits_XV.argmax(-1)
    uniform_X = rules.uniform(place)[rows_X]
    return sample_tokens(logits_XV, rules.temperature[rows_X], rules.top_p[rows_X], uniform_X, rules.modes)


def _record_endings(
    groups: Groups, rows_X: Tensor, logits_XV: Tensor, ended_X: Tensor, rules: Rules, open_groups: OpenGroups
) -> None:
    """Record the draws that ended these groups, and the log-probs of such ends."""
    temperature_X = rules.temperature[rows_X]
    threshold_X = rules.thresholds(rows_X, open_groups)
    allowed_XV, best_XV = None, logits_XV
    if rules.equations is not None:
        ids_V = rules.tokens_at(torch.arange(logits_XV.shape[1], device=logits_XV.device))
        allowed_XV = open_groups.admits(rows_X, ids_V[None, :])
        best_XV = logits_XV.masked_fill(~allowed_XV, -torch.inf)
    end_logps_X = unlikely_logps(logits_XV, temperature_X, threshold_X, allowed_XV)
    # If no token could have continued a group, its end is certain: a log-prob of 0. A greedy row draws nothing.
    is_drawn_X = ended_X & (end_logps_X < 0) & (temperature_X > 0)
    # Without a threshold all tokens outside a class would have continued the group.
    class_X = torch.where(open_groups.refuses_digit(rows_X), Ending.DIGIT_OR_START, Ending.START)
    ending_X = torch.where(threshold_X > 0, rules.tokens_at(best_XV.argmax(-1)), class_X)
    groups.endings[rows_X] = torch.where(is_drawn_X, ending_X, groups.endings[rows_X])
    groups.ending_logps[rows_X] = torch.where(is_drawn_X, end_logps_X, groups.ending_logps[rows_X])


def count_shortlist(template: Template, examples: Sequence[Example]) -> tuple[int, ...]:
    """The ids of all tokens of the examples' chains, and the separator's, ascending. ValueError without any chain."""
    ids = set(_token_counts(template, progress.track(examples, "count the shortlist")))
    if not ids:
        raise ValueError(
            "method.shortlist is counted in the training chains, but no row has a chain: "
            "give method.shortlist_ids, or leave it out"
        )
    ids.add(template.separator_id)
    progress.say(f"shortlist: {len(ids):,} tokens, of {len(template.tokenizer):,}")
    return tuple(sorted(ids))


def warn_of_missing(template: Template, examples: Sequence[Example], ids: tuple[int, ...]) -> None:
    """Warn of the tokens of these chains that the shortlist lacks if it was counted in others."""
    counts = _token_counts(template, examples)
    known = set(ids)
    lacking = {token: n for token, n in counts.items() if token not in known}
    if lacking:
        progress.say(
            f"warning: method.shortlist lacks {sum(lacking.values()):,} of the {counts.total():,} tokens of these "
            f"chains ({len(lacking):,} different ones, such as {template.token(next(iter(lacking)))!r}): no group can "
            "have them behind its first token, and as labels they are scored by the whole vocabulary"
        )


def _token_counts(template: Template, examples: Iterable[Example]) -> Counter[int]:
    """The number of each token in the examples' chains. ValueError names an example that cannot be encoded."""
    counts: Counter[int] = Counter()
    for example in examples:
        try:
            counts.update(itertools.chain.from_iterable(template.steps(example.steps)))
        except ValueError as error:
            raise ValueError(f"{example.id}: {error}") from error
    return counts
