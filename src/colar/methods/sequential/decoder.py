"""The decoder of groups: the tokens of a group, one after another.

    position   question's last          latent 1                 latent 2
    state      s1 ----> s2              s1 ----> s2              s1               s1 = h, the backbone's hidden state
                ^ \\     ^ \\
    label      t1  '-> t2               t3      t4               t5      ###      c = 2, a chain of five tokens
    fed        latent 1 = (E t1 + E t2) / sqrt(2)   ...                            as the paper merges

A Gaussian around the sum of a group cannot say WHICH tokens come together. Here a small decoder says them in order: the
first from the backbone's own hidden state, each further one from the state before it and the token chosen before it,

    s_1 = h
    s_j = s_(j-1) + MLP([norm(s_(j-1)); norm(E t_(j-1))])        the last layer starts at zero
    t_j from LM head(s_j)

until the group has c tokens, or the separator, which makes it the short last one. The separator in the first place is
the stop. Trained by cross-entropy alone: of each token given those before it in its group, mean over the group's
tokens, then over the row's positions. At c = 1 this is CoT. The log-prob of a thought is the sum of its tokens', and
exact.

Near relatives are listed in docs/method.md.

Shape suffixes: B rows, K latents, T reasoning tokens, G places of a group, N labelled positions of a row, M labelled
positions of all rows, P labels of all rows, L thoughts of all rows, X rows or labels of one kind, D width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn

from colar.methods import grouping
from colar.methods.losses import chosen_logps, go_on_logps, log_probs
from colar.methods.rollouts import ThoughtActions
from colar.methods.sequential.equation_groups import Equations
from colar.model.latent_lm import LatentLM
from colar.model.vocabulary import PartialHead
from colar.ops import devices, ragged

NOTHING = -1
"""In a group's ids: no token at this place."""


class Ending(IntEnum):
    """Ends of groups by a draw: values of the column `endings`, which `thought_logps` reads to score that draw.

    A number from 0 on is a token id: of all tokens it alone would have continued the group (with a threshold above a
    half). Below 0 it is one of these; where it is a class of tokens, one of them was drawn, and ended a group of
    equations.
    """

    NO_DRAW = -1
    """No draw ended it: its c tokens or the separator did, or no token could have continued it."""
    START = -3
    """Tokens that start a group."""
    DIGIT_OR_START = -4
    """Digits, and tokens that start a group."""


class GroupDecoder(nn.Module):
    """State before a token and that token's embedding -> state before the next token, (..., D) each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.state_norm = nn.RMSNorm(width)
        self.token_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        # The second token is first predicted from the state of the first: a start that CoT weights understand.
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        dtype = self.state_norm.weight.dtype
        both = torch.cat([self.state_norm(state.to(dtype)), self.token_norm(token.to(dtype))], dim=-1)
        step: Tensor = self.mlp(both)
        return state + step.to(state.dtype)


def tokens_from(
    chain_ids: Tensor, chain_lengths: Tensor, starts_BK: Tensor, sizes_BK: Tensor, closing_id: int
) -> tuple[Tensor, Tensor]:
    """The labels of each group, (B, K, G), and which of them are real: the tokens from its start on, up to its size.

    A last group that is shorter than its size has the separator as its last label.
    """
    # One column more than the longest chain: there stands the separator of the longest row.
    end_B1 = chain_lengths[:, None]
    closed_BT = nn.functional.pad(chain_ids, (0, 1)).scatter(1, end_B1, closing_id)
    # Behind a row's last group the starts are the chain's length: no ### is a label there.
    left_BK = torch.where(starts_BK < end_B1, end_B1 + 1 - starts_BK, 0)
    return grouping.tokens_of_groups(closed_BT, torch.minimum(sizes_BK, left_BK), starts_BK)


def states(lm: LatentLM, hidden_MD: Tensor, ids_MG: Tensor, real_MG: Tensor) -> Tensor:
    """The state before each real label, (P, D), position by position and place by place; labels are given."""
    decoder = lm.extra["group_decoder"]
    places = [hidden_MD]
    for place in range(1, ids_MG.shape[1]):
        # Most positions of an answer have one label: the decoder runs where there is one more.
        (more_X,) = real_MG[:, place].nonzero(as_tuple=True)
        token_XD = lm.embed(ids_MG[more_X, place - 1])
        more_X = devices.beside(more_X, hidden_MD)
        next_XD = decoder(places[-1].index_select(0, more_X), token_XD)
        places.append(torch.zeros_like(hidden_MD).index_copy(0, more_X, next_XD))
    return ragged.take_masked(torch.stack(places, dim=1), real_MG)


def without(logits_PV: Tensor, closing_id: int) -> Tensor:
    """The logits given that the separator is not chosen."""
    closing = devices.constant((closing_id,), logits_PV.device)
    return logits_PV.index_fill(1, closing, -torch.inf)


def thought_logps(
    lm: LatentLM,
    actions: ThoughtActions,
    temperature_L: Tensor,
    latent_temperature_L: Tensor,
    shortlist: PartialHead | None = None,
    equations: Equations | None = None,
) -> Tensor:
    """Log-prob of each thought, (L,): the sum of its tokens', each given those before it in its group.

    Where a draw ended the group (`Ending`), its log-prob counts as well. Where the two temperatures differ: of going
    on, at the one, and of the tokens given that, at the other.
    """
    ids_LG = actions.group_ids
    # Outputs without any thought have no places either.
    if not ids_LG.numel():
        return torch.zeros(len(ids_LG), device=actions.hidden.device)
    # A draw that ended a group stands behind its last token. Where it is a class of tokens, any token stands for it.
    place_G = torch.arange(ids_LG.shape[1], device=ids_LG.device)
    is_behind_LG = place_G == (ids_LG != NOTHING).sum(-1, keepdim=True)
    endings_LG = torch.where(is_behind_LG, actions.endings[:, None], Ending.NO_DRAW)
    ids_LG = torch.where(endings_LG != Ending.NO_DRAW, endings_LG.clamp(min=0), ids_LG)
    real_LG = ids_LG != NOTHING
    drawn_L = latent_temperature_L > 0
    # Tokens that were not drawn count nothing below: any temperature but 0 serves for them.
    scale_L = torch.where(drawn_L, latent_temperature_L, 1)
    scored = _score(lm, actions.hidden, ids_LG, real_LG, scale_L, shortlist)
    endings_P = ragged.take_masked(endings_LG, real_LG)
    logps_P = _with_endings(lm, scored, endings_P, shortlist, equations)
    tokens_LG = ragged.put_masked(logps_P, real_LG)
    again_L = temperature_L != latent_temperature_L
    if not bool(again_L.any()):
        return tokens_LG.sum(-1)
    again_L, drawn_L, first_L, scale_L = (
        devices.beside(column, tokens_LG) for column in (again_L, drawn_L, ids_LG[:, 0], scale_L.float())
    )

    # That a thought comes at all was decided before its first token was drawn.
    closing_id = lm.template.closing_id

    def reduce(
        logits_XV: Tensor, first_X: Tensor, scale_X: Tensor, temperature_X: Tensor
    ) -> tuple[Tensor, ...]:
        (token_logps_X,) = chosen_logps(without(logits_XV, closing_id), first_X, scale_X)
        return token_logps_X, go_on_logps(logits_XV, temperature_X, closing_id)

    token_logps_L, go_on_L = lm.reduce_logits(reduce, actions.hidden, first_L, scale_L, actions.temperature)
    first_logps_L = torch.where(again_L, token_logps_L, tokens_LG[:, 0])
    drawn_logps_L = torch.where(drawn_L, first_logps_L + tokens_LG[:, 1:].sum(-1), 0)
    return drawn_logps_L + torch.where(again_L, go_on_L, 0)


def _log1m_exp(logps: Tensor) -> Tensor:
    """log(1 - p) from log p."""
    # A p that float32 rounds to 1 has a log of 0, and would be impossible not to draw.
    least = torch.finfo(logps.dtype).eps / 2
    return torch.log(-torch.expm1(logps.clamp(max=-least)))


def label_logps(
    lm: LatentLM, hidden: Tensor, ids: Tensor, real: Tensor, shortlist: PartialHead | None = None
) -> Tensor:
    """Log-prob of each real label given those before it in its group, (..., G); 0 elsewhere.

    hidden (..., D) · ids (..., G) · real (..., G) bool. With a shortlist the labels behind a group's first one are
    scored by its softmax, those of them that it lacks by the whole vocabulary's.
    """
    if not ids.numel():
        return torch.zeros(ids.shape, device=hidden.device)
    real_MG = real.flatten(end_dim=-2)
    scored = _score(lm, hidden.flatten(end_dim=-2), ids.flatten(end_dim=-2), real_MG, None, shortlist)
    return ragged.put_masked(scored.logps_P, real_MG).view(ids.shape)


@dataclass(frozen=True)
class Scored:
    """The real labels of all positions, one after another, with the states before them."""

    state_PD: Tensor
    temperature_P: Tensor | None
    """Of the labels' positions; None for 1."""
    logps_P: Tensor


def _score(
    lm: LatentLM,
    hidden_MD: Tensor,
    ids_MG: Tensor,
    real_MG: Tensor,
    temperature_M: Tensor | None,
    shortlist: PartialHead | None,
) -> Scored:
    """Log-prob of each real label given those before it in its group."""
    state_PD = states(lm, hidden_MD, ids_MG, real_MG)
    label_P = ragged.take_masked(ids_MG, real_MG)
    temperature_P = None
    if temperature_M is not None:
        temperature_MG = temperature_M[:, None].expand_as(ids_MG).float()
        temperature_P = devices.beside(ragged.take_masked(temperature_MG, real_MG), state_PD)
    if shortlist is None:
        return Scored(state_PD, temperature_P, _logps_at(lm, state_PD, label_P, temperature_P))
    place_MG = torch.arange(ids_MG.shape[1], device=ids_MG.device).expand_as(real_MG)
    behind_P = ragged.take_masked(place_MG, real_MG) > 0
    logps_P = _logps_by_shortlist(lm, state_PD, label_P, temperature_P, behind_P, shortlist)
    return Scored(state_PD, temperature_P, logps_P)


def _with_endings(
    lm: LatentLM,
    scored: Scored,
    endings_P: Tensor,
    shortlist: PartialHead | None,
    equations: Equations | None,
) -> Tensor:
    """The labels' log-probs, (P,), with those of draws that ended groups in place of the tokens that stand for them."""
    logps_P = scored.logps_P
    is_token_P = devices.beside(endings_P >= 0, logps_P)
    logps_P = torch.where(is_token_P, _log1m_exp(logps_P), logps_P)
    if equations is None:
        return logps_P
    classes: dict[int, Callable[[Tensor], Tensor]] = {
        Ending.START: equations.is_start,
        Ending.DIGIT_OR_START: lambda ids: equations.is_digit(ids) | equations.is_start(ids),
    }
    for ending, is_in_class in classes.items():
        (at_X,) = (endings_P == ending).nonzero(as_tuple=True)
        if len(at_X):
            at_X = devices.beside(at_X, logps_P)
            temperature_X = None if scored.temperature_P is None else scored.temperature_P[at_X]
            state_XD = scored.state_PD.index_select(0, at_X)
            logps_X = _class_logps(lm, state_XD, is_in_class, temperature_X, shortlist)
            logps_P = logps_P.index_copy(0, at_X, logps_X)
    return logps_P


def _logps_at(
    lm: LatentLM,
    state_XD: Tensor,
    label_X: Tensor,
    temperature_X: Tensor | None,
    part: PartialHead | None = None,
) -> Tensor:
    """Log-prob of a label at each state, (X,): an id of the whole vocabulary, or a place in a part of it."""
    temperatures = () if temperature_X is None else (temperature_X,)
    label_X = devices.beside(label_X, state_XD)
    (logps_X,) = lm.reduce_logits(chosen_logps, state_XD, label_X, *temperatures, part=part)
    return logps_X


def _logps_by_shortlist(
    lm: LatentLM,
    state_PD: Tensor,
    label_P: Tensor,
    temperature_P: Tensor | None,
    behind_P: Tensor,
    shortlist: PartialHead,
) -> Tensor:
    """Log-prob of each label, (P,): by the shortlist where it is behind its group's first and there, else by all."""
    index_P, listed_P = shortlist.find(label_P)
    short_P = behind_P & listed_P
    logps_P = state_PD.new_zeros(len(label_P), dtype=torch.float32)
    for chosen_P, names_P, part in ((short_P, index_P, shortlist), (~short_P, label_P, None)):
        (at_X,) = chosen_P.nonzero(as_tuple=True)
        names_X = names_P[at_X]
        at_X = devices.beside(at_X, state_PD)
        temperature_X = None if temperature_P is None else temperature_P[at_X]
        logps_X = _logps_at(lm, state_PD.index_select(0, at_X), names_X, temperature_X, part)
        logps_P = logps_P.index_copy(0, at_X, logps_X)
    return logps_P


def _class_logps(
    lm: LatentLM,
    state_XD: Tensor,
    is_in_class: Callable[[Tensor], Tensor],
    temperature_X: Tensor | None,
    shortlist: PartialHead | None,
) -> Tensor:
    """Log-prob that one of the tokens of a class comes, at each state, (X,)."""

    def reduce(logits_CV: Tensor, *temperature: Tensor) -> tuple[Tensor]:
        ids_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
        in_class_V = is_in_class(ids_V if shortlist is None else shortlist.ids_S)
        logps_CV = log_probs(logits_CV, *(temperature or (None,)))
        return (logps_CV.masked_fill(~in_class_V, -torch.inf).logsumexp(-1),)

    columns = () if temperature_X is None else (temperature_X,)
    (logps_X,) = lm.reduce_logits(reduce, state_XD, *columns, part=shortlist)
    return logps_X


def loss(
    lm: LatentLM,
    hidden_BND: Tensor,
    ids_BNG: Tensor,
    weights_BNG: Tensor,
    shortlist: PartialHead | None = None,
) -> Tensor:
    """Cross-entropy of each label given those before it in its group, (B,).

    Weighted mean over a position's labels, then mean over the row's positions that have any.
    """
    real_BNG = weights_BNG > 0
    labelled_BN = real_BNG.any(-1)
    hidden_MD, ids_MG, real_MG, weights_MG = (
        ragged.take_masked(values, labelled_BN) for values in (hidden_BND, ids_BNG, real_BNG, weights_BNG)
    )
    losses_MG = -label_logps(lm, hidden_MD, ids_MG, real_MG, shortlist=shortlist)
    weights_MG = devices.beside(weights_MG, losses_MG)
    losses_M = (weights_MG * losses_MG).sum(-1) / weights_MG.sum(-1)
    return ragged.row_mean(ragged.put_masked(losses_M, labelled_BN), labelled_BN)
