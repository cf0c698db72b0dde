"""The choice of a group: its first token, or the stop, and then one token after another.

A request has two temperatures. At a group's first place `temperature` decides whether to stop. Given that the thought
goes on, its tokens are drawn at `latent_temperature`; at 0 they are the likeliest: no choice, and not scored. Where the
two are equal, all of this is one draw from the LM head, as in CoT.

Shape suffixes: B rows, G places of a group, X rows whose group goes on, P labels of all rows, S shortlist, D width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colar.methods.sequential.decoder import DIGIT_OR_START, GROUP_START, NO_DIGIT, NOTHING, without
from colar.methods.sequential.equations import LONGEST, Equations, Extents
from colar.model.latent_lm import LatentLM
from colar.model.vocabulary import HeadRows
from colar.ops.sampling import Known, sample_tokens, token_logps, unlikely_logps


@dataclass(frozen=True)
class Rules:
    """Rules by which the tokens of a group are chosen, and the group ends: columns (B,)."""

    most: Tensor
    """The units of a group that nothing ends before."""
    temperature: Tensor
    """Of the tokens behind the first."""
    top_p: Tensor
    confidence_threshold: Tensor
    """A group ends before a token that is less likely than this; 0 for none."""
    uniform: Callable[[int], Tensor]
    """The draws for a place of the group, (B,)."""
    shortlist: HeadRows | None = None
    """Tokens that those behind the first are chosen among; the whole vocabulary by default."""
    equations: Equations | None = None
    """The tokens by which groups of equations end; None: a group simply has `most` tokens."""
    numbers: Tensor | None = None
    """Bools: in which rows numbers are units. Of equations."""
    known: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns by name on the CPU, for what Python decides by; of `most` an upper bound. By default those above."""

    @property
    def places(self) -> int:
        """The most tokens that a group may have."""
        most = int(self.look("most").max())
        # A number that begins a group is one unit; behind it a unit is one token.
        return most if self.equations is None else most + LONGEST - 1

    def thresholds(self, rows_X: Tensor, extents: Extents) -> Tensor:
        """The threshold of each group's next token, (X,)."""
        threshold_X = self.confidence_threshold[rows_X]
        if self.equations is None:
            return threshold_X
        # Of equations, only what stands behind a number that may go on is asked for: a digit of it, or its end. A
        # result's digits are computed one from another; a sign and the digit behind it cost nothing in one thought.
        return torch.where(extents.takes_digit(rows_X), threshold_X, 0)

    def look(self, name: str) -> Tensor:
        """A column on the CPU, if it is known there."""
        column: Tensor = self.known.get(name, getattr(self, name))
        return column


@dataclass(frozen=True)
class Groups:
    """The groups of B rows."""

    ids: Tensor
    """(B, G), `NOTHING` behind a group's end. The separator that ends a group early is among them."""
    logps: Tensor
    """(B, G), of each token given those before it; 0 at the first place."""
    declined_ids: Tensor
    """(B,), of a group that ended because of what was drawn behind it: what another draw would have let it go on with.
    With a threshold, the one token that reaches it. Without one, `NO_DIGIT` where a digit would have, `GROUP_START`
    where all but the tokens that start a group would have, and `DIGIT_OR_START` where digits would not, either.
    `NOTHING` where no draw would."""
    unsure: Tensor
    """(B,) bool: whether a group ended before a token that is below the threshold."""
    declined_logps: Tensor
    """(B,), that such an end was drawn; 0 where nothing else could have been."""

    @classmethod
    def begun(cls, first_B: Tensor, places: int) -> Groups:
        """Of one token each, to be filled place by place."""
        device = first_B.device
        ids_BG = torch.full((len(first_B), places), NOTHING, device=device)
        ids_BG[:, 0] = first_B
        nothing_B = torch.full_like(first_B, NOTHING)
        return cls(
            ids_BG,
            torch.zeros(ids_BG.shape, device=device),
            nothing_B,
            torch.zeros(len(first_B), dtype=torch.bool, device=device),
            torch.zeros(len(first_B), device=device),
        )


def choose_first(
    logits_BV: Tensor,
    separator_id: int,
    temperature_B: Tensor,
    latent_temperature_B: Tensor,
    top_p_B: Tensor,
    uniform: Callable[[int], Tensor],
    known: Known,
    known_latent_temperature_B: Tensor,
) -> Tensor:
    """The first token of each group, (B,); the separator where the thinking stops.

    `uniform(1)` are the draws that decide whether to stop, (B,), and `uniform(2)` those for a token that is drawn at
    another temperature. What is `known` of the temperatures is on the CPU.
    """
    # No draw: its noise would cost more than the choice.
    if bool((known[0] == 0).all()) and bool((known_latent_temperature_B == 0).all()):
        return logits_BV.argmax(-1)
    first_B = sample_tokens(logits_BV, temperature_B, top_p_B, uniform(1), known)
    # Where both temperatures are one, the draw that decided has chosen the token, too.
    if bool((known[0] == known_latent_temperature_B).all()):
        return first_B
    again_B = (temperature_B != latent_temperature_B) & (first_B != separator_id)
    at = again_B.nonzero()[:, 0]
    if not len(at):
        return first_B
    others_XV = without(logits_BV[at], separator_id)
    token_X = sample_tokens(others_XV, latent_temperature_B[at], top_p_B[at], uniform(2)[at])
    return first_B.index_copy(0, at, token_X)


def first_logps(
    logits_BV: Tensor, separator_id: int, temperature_B: Tensor, latent_temperature_B: Tensor, first_B: Tensor
) -> Tensor:
    """Log-prob of what `choose_first` chose, (B,): of stopping, or of going on and of the token given that."""
    logps_B = token_logps(logits_BV, temperature_B, first_B)
    again_B = (temperature_B != latent_temperature_B) & (first_B != separator_id)
    at = again_B.nonzero()[:, 0]
    if not len(at):
        return logps_B
    others_XV = without(logits_BV[at], separator_id)
    # As `sampling._weights`: logits divided by a temperature that is 0 in float32 would make inf - inf.
    least = torch.finfo(torch.float32).tiny
    scale_X1 = torch.where(temperature_B[at] == 0, 1, temperature_B[at]).float().clamp(min=least)[:, None]
    best_X1 = logits_BV[at].float().amax(-1, keepdim=True)
    # log(1 - p[###]) as the mass of the other tokens: exact where stopping is nearly certain, too.
    others_X = ((others_XV.float() - best_X1) / scale_X1).logsumexp(-1)
    total_X = ((logits_BV[at].float() - best_X1) / scale_X1).logsumexp(-1)
    token_X = token_logps(others_XV, latent_temperature_B[at], first_B[at])
    drawn_X = torch.where(latent_temperature_B[at] > 0, token_X, 0)
    return logps_B.index_copy(0, at, others_X - total_X + drawn_X)


def choose(
    lm: LatentLM,
    hidden_BD: Tensor,
    first_B: Tensor,
    rules: Rules,
    wants_logps: bool = True,
    compact: bool | None = None,
) -> Groups:
    """The groups that begin with `first_B`.

    G is the most tokens that a group may have. A row whose first token is the separator has no more places. If no row
    wants log-probs, they are 0, and no id is `declined`.
    With `compact` only rows whose group goes on are computed, which takes a look at each place; the result is the same.
    By default on the CPU, where a look costs nothing.
    """
    if compact is None:
        compact = first_B.device.type == "cpu"
    decoder = lm.extra["group_decoder"]
    separator_id = lm.template.closing_id
    shortlist = rules.shortlist
    G = rules.places
    found = Groups.begun(first_B, G)
    greedy = bool((rules.look("temperature") == 0).all())
    gated = bool((rules.look("confidence_threshold") > 0).any())

    # Compact: the rows whose group goes on, and their columns. The others cost nothing more.
    #
    #     place     1    2    3
    #     row 0     t1   t2   t3       c = 3
    #     row 1     t1   t2   .        c = 2
    #     row 2     t1   #    .        its group has ended
    rows_X = torch.arange(len(first_B), device=first_B.device)
    state_XD = hidden_BD
    token_X = first_B
    numbers_B = torch.zeros_like(first_B, dtype=torch.bool) if rules.numbers is None else rules.numbers
    extents = Extents(first_B, rules.most, rules.equations, numbers_B)
    going_X = (first_B != separator_id) & extents.open(rows_X)
    for place in range(1, G):
        if compact and not bool(going_X.all()):
            at = going_X.nonzero()[:, 0]
            rows_X, state_XD, token_X, going_X = rows_X[at], state_XD[at], token_X[at], going_X[at]
        if not len(rows_X):
            break
        state_XD = decoder(state_XD, lm.embed(token_X))
        # (X, S) with a shortlist of S tokens.
        logits_XV = lm.logits(state_XD, shortlist)
        temperature_X = rules.temperature[rows_X]
        # No draw where all are greedy: its noise would cost more than the choice.
        index_X = logits_XV.argmax(-1) if greedy else _drawn(logits_XV, rows_X, place, rules, compact)
        token_X = index_X if shortlist is None else shortlist.ids_S[index_X]

        was_going_X = going_X
        if rules.equations is not None:
            going_X = going_X & extents.admits(rows_X, token_X[:, None])[:, 0]
        # A softmax over the vocabulary: only where somebody looks at it.
        if gated or wants_logps:
            # The threshold is about the distribution drawn from; at temperature 0, that of temperature 1.
            logps_X = token_logps(logits_XV, temperature_X, index_X)
            unsure_X = going_X & (logps_X.exp() < rules.thresholds(rows_X, extents))
            found.unsure[rows_X] = found.unsure[rows_X] | unsure_X
            going_X = going_X & ~unsure_X
            found.logps[rows_X, place] = torch.where(going_X, logps_X, 0)
            # What is drawn is the likeliest where all are greedy: then nothing else could have been.
            if (gated or rules.equations is not None) and wants_logps and not greedy:
                _note_declined(found, rows_X, was_going_X & ~going_X, logits_XV, rules, extents)
        found.ids[rows_X, place] = torch.where(going_X, token_X, NOTHING)
        extents.add(rows_X, token_X)
        going_X = going_X & (token_X != separator_id) & extents.open(rows_X)
    return found


def _drawn(logits_XV: Tensor, rows_X: Tensor, place: int, rules: Rules, compact: bool) -> Tensor:
    """The draws of some rows for a place of their groups: indices into the columns, (X,)."""
    # Rows are fewer than those that `known` is of, once some have ended.
    known = None if compact else (rules.look("temperature"), rules.look("top_p"))
    uniform_X = rules.uniform(place)[rows_X]
    return sample_tokens(logits_XV, rules.temperature[rows_X], rules.top_p[rows_X], uniform_X, known)


def _note_declined(
    found: Groups, rows_X: Tensor, ended_X: Tensor, logits_XV: Tensor, rules: Rules, extents: Extents
) -> None:
    """Write down, of the groups that what was drawn has ended here, what would have let them go on, and how likely such
    an end was."""
    temperature_X = rules.temperature[rows_X]
    threshold_X = rules.thresholds(rows_X, extents)
    allowed_XV = None
    if rules.equations is not None:
        ids_V = torch.arange(logits_XV.shape[1], device=logits_XV.device)
        ids_S = ids_V if rules.shortlist is None else rules.shortlist.ids_S
        allowed_XV = extents.admits(rows_X, ids_S[None, :])
        best_XV = logits_XV.masked_fill(~allowed_XV, -torch.inf)
    else:
        best_XV = logits_XV
    end_logps_X = unlikely_logps(logits_XV, temperature_X, threshold_X, allowed_XV)
    # Certain, a log-prob of 0, where no token could have let it go on. And what is greedy is no draw.
    declined_X = ended_X & (end_logps_X < 0) & (temperature_X > 0)
    best_X = best_XV.argmax(-1)
    if rules.shortlist is not None:
        best_X = rules.shortlist.ids_S[best_X]
    # Without a threshold it is not one token alone.
    begins_X = torch.where(extents.refuses_digit(rows_X), DIGIT_OR_START, GROUP_START)
    any_X = torch.where(extents.has_room(rows_X), begins_X, NO_DIGIT)
    which_X = torch.where(threshold_X > 0, best_X, any_X)
    found.declined_ids[rows_X] = torch.where(declined_X, which_X, found.declined_ids[rows_X])
    found.declined_logps[rows_X] = torch.where(declined_X, end_logps_X, found.declined_logps[rows_X])
