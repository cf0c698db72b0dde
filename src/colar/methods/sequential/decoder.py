"""The decoder of groups: the tokens of a group, one after another.

    position   question's last          latent 1                 latent 2
    state      s1 ----> s2              s1 ----> s2              s1 ----> s2      s1 = h, the backbone's hidden state
    label      t1       t2              t3       t4              t5       ###     c = 2, a chain of five tokens
    fed        latent 1 = (E t1 + E t2) / sqrt(2)   ...                           as the paper merges

A Gaussian around the sum of a group cannot tell WHICH tokens come together. Here a small decoder predicts them in
order: the first from the backbone's own hidden state, each further one from the state and the chosen token before it,

    s_1 = h
    s_j = s_(j-1) + MLP([norm(s_(j-1)); norm(E t_(j-1))])        the last layer starts at zero
    t_j from LM head(s_j)

until the group has c tokens, or the separator, which makes it the short last one. The separator in the first place is
the stop. The decoder is trained by cross-entropy alone. The log-prob of a thought is exact: the sum of its tokens'.

Near relatives are listed in docs/method.md.

Shape suffixes: B rows, K latents, T reasoning tokens, G places of a group, N labelled positions of a row, M labelled
positions of all rows, P labels of all rows, L thoughts of all rows, X rows or labels of one kind, D width, V
vocabulary.
"""

from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn

from colar.methods import grouping
from colar.methods.losses import chosen_logps, continue_logps, log1m_exp, log_probs, without
from colar.methods.rollouts import Rollouts, ThoughtActions
from colar.methods.sequential.boundaries import NOTHING, Equations
from colar.model.head import PartialHead, ValuesOf
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged


class Ending(IntEnum):
    """Ends of groups by a draw: values of the column `endings`, which `thought_logps` reads to score that draw.

    A value of 0 or more is the id of a token that was not drawn, the only one that would have continued the group (with
    a threshold above a half). A value below 0 is one of these members; a class means that one of its tokens was drawn,
    which ended a group of equations.
    """

    NO_DRAW = -1
    """No draw ended the group: its c tokens or the separator did, or no token could have continued it."""
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
        # At first the second token is predicted from the state of the first, a start that suits CoT weights.
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
    chain_ids: Tensor, chain_lengths: Tensor, starts_BK: Tensor, sizes_BK: Tensor, separator_id: int
) -> tuple[Tensor, Tensor]:
    """The labels of each group, (B, K, G), and which of them are real: the tokens from its start on, up to its size.

    A last group that is shorter than its size has the separator as its last label.
    """
    # One column more than the longest chain, for the separator of the longest row.
    end_B1 = chain_lengths[:, None]
    closed_BT = nn.functional.pad(chain_ids, (0, 1)).scatter(1, end_B1, separator_id)
    # After a row's last group the starts are the chain's length, and no ### is a label there.
    left_BK = torch.where(starts_BK < end_B1, end_B1 + 1 - starts_BK, 0)
    return grouping.tokens_of_groups(closed_BT, torch.minimum(sizes_BK, left_BK), starts_BK)


def states(lm: LatentLM, hidden_MD: Tensor, ids_MG: Tensor, real_MG: Tensor) -> Tensor:
    """The state before each real label, (P, D), position by position and place by place; labels are given."""
    decoder = lm.extra["group_decoder"]
    # In training a second place even if no row has one: gradients of zero, not none, because with split weights each
    # process has to have the same.
    missing = max(0, 2 - ids_MG.shape[1]) if torch.is_grad_enabled() else 0
    ids_MG, real_MG = (nn.functional.pad(each, (0, missing)) for each in (ids_MG, real_MG))
    places = [hidden_MD]
    for place in range(1, ids_MG.shape[1]):
        # Positions of an answer have one label, so the decoder runs only where there is one more.
        (more_X,) = real_MG[:, place].nonzero(as_tuple=True)
        token_XD = lm.embed(ids_MG[more_X, place - 1])
        more_X = devices.beside(more_X, hidden_MD)
        next_XD = decoder(places[-1].index_select(0, more_X), token_XD)
        places.append(torch.zeros_like(hidden_MD).index_copy(0, more_X, next_XD))
    return ragged.take_masked(torch.stack(places, dim=1), real_MG)


def thought_logps(
    lm: LatentLM,
    actions: ThoughtActions,
    rollouts: Rollouts,
    shortlist: PartialHead | None,
    equations: Equations | None,
) -> Tensor:
    """Log-prob of each thought, (L,): the sum of its tokens', each given those before it in its group.

    If a draw ended the group (`Ending`), its log-prob counts as well. If the two temperatures differ, the log-prob is
    that of going on, at `temperature`, plus those of the tokens given that, at `latent_temperature`.
    """
    ids_LG = actions.group_ids
    # The place after a group's last token gets the ending, if a draw ended the group: a token, or a class of tokens.
    place_G = torch.arange(ids_LG.shape[1], device=ids_LG.device)
    is_behind_LG = place_G == (ids_LG != NOTHING).sum(-1, keepdim=True)
    is_ending_LG = is_behind_LG & (actions.endings != Ending.NO_DRAW)[:, None]
    labels_LG = torch.where(is_ending_LG, actions.endings[:, None], ids_LG)
    real_LG = labels_LG != NOTHING
    temperature_L = rollouts.temperature[actions.row]
    latent_temperature_L = rollouts.latent_temperature[actions.row]
    drawn_L = latent_temperature_L > 0
    # Tokens that were not drawn count nothing below, so any temperature but 0 will do for them.
    scale_L = torch.where(drawn_L, latent_temperature_L, 1)
    tokens_LG = label_logps(lm, actions.hidden, labels_LG, real_LG, shortlist, equations, scale_L)
    # If one token alone would have continued the group, any other token was drawn.
    is_other_LG = devices.beside(is_ending_LG & (labels_LG >= 0), tokens_LG)
    tokens_LG = torch.where(is_other_LG, log1m_exp(tokens_LG), tokens_LG)
    again_L = temperature_L != latent_temperature_L
    if not bool(again_L.any()):
        return tokens_LG.sum(-1)
    again_L, drawn_L, first_L, scale_L = (
        devices.beside(column, tokens_LG) for column in (again_L, drawn_L, ids_LG[:, 0], scale_L.float())
    )

    # Stopping or going on was decided before the thought's first token was drawn.
    separator_id = lm.template.separator_id

    def reduce(
        logits_XV: Tensor, first_X: Tensor, scale_X: Tensor, temperature_X: Tensor
    ) -> tuple[Tensor, ...]:
        chosen = chosen_logps(without(logits_XV, separator_id), first_X, scale_X)
        return *chosen, *continue_logps(logits_XV, temperature_X, separator_id)

    token_logps_L, continue_L = lm.reduce_logits(
        reduce, actions.hidden, first_L, scale_L, actions.temperature
    )
    first_logps_L = torch.where(again_L, token_logps_L, tokens_LG[:, 0])
    drawn_logps_L = torch.where(drawn_L, first_logps_L + tokens_LG[:, 1:].sum(-1), 0)
    return drawn_logps_L + torch.where(again_L, continue_L, 0)


def label_logps(
    lm: LatentLM,
    hidden: Tensor,
    ids: Tensor,
    real: Tensor,
    shortlist: PartialHead | None,
    equations: Equations | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """Log-prob of each real label given those before it in its group, (..., G); 0 elsewhere.

    hidden (..., D) · ids (..., G), the last of a group perhaps a class of tokens (`Ending`) · real (..., G) bool ·
    temperature (...), 1 by default. With a shortlist the labels after a group's first are scored by its softmax, and
    those that it lacks by the whole vocabulary's.
    """
    ids_MG, real_MG = ids.flatten(end_dim=-2), real.flatten(end_dim=-2)
    state_PD = states(lm, hidden.flatten(end_dim=-2), ids_MG, real_MG)
    is_later_MG = (torch.arange(ids_MG.shape[1], device=ids_MG.device) > 0).expand_as(real_MG)
    id_P, is_later_P = (ragged.take_masked(values, real_MG) for values in (ids_MG, is_later_MG))
    temperature_P: tuple[Tensor, ...] = ()
    if temperature is not None:
        temperature_MG = temperature.flatten()[:, None].expand_as(ids_MG).float()
        temperature_P = (devices.beside(ragged.take_masked(temperature_MG, real_MG), state_PD),)

    # Labels of one kind are scored together: by the shortlist, by the whole vocabulary, as a class.
    is_listed_P = torch.zeros_like(is_later_P)
    if shortlist is not None:
        is_listed_P = is_later_P & shortlist.find(id_P)[1]
    kinds: list[tuple[Tensor, ValuesOf, PartialHead | None]] = [
        (is_listed_P, chosen_logps, shortlist),
        ((id_P >= 0) & ~is_listed_P, chosen_logps, None),
    ]
    if equations is not None:
        for ending in (Ending.START, Ending.DIGIT_OR_START):
            kinds.append((id_P == ending, partial(_class_logps, equations, ending, shortlist), shortlist))
    logps_P = state_PD.new_zeros(len(id_P), dtype=torch.float32)
    for is_kind_P, logps_of, part in kinds:
        (at_X,) = is_kind_P.nonzero(as_tuple=True)
        if not len(at_X):
            continue
        id_X = id_P[at_X] if part is None else part.find(id_P[at_X])[0]
        at_X, id_X = devices.beside(at_X, state_PD), devices.beside(id_X, state_PD)
        columns = (id_X, *(column_P[at_X] for column_P in temperature_P))
        (logps_X,) = lm.reduce_logits(logps_of, state_PD.index_select(0, at_X), *columns, part=part)
        logps_P = logps_P.index_copy(0, at_X, logps_X)
    return ragged.put_masked(logps_P, real_MG).view(ids.shape)


def _class_logps(
    equations: Equations,
    ending: Ending,
    part: PartialHead | None,
    logits_XV: Tensor,
    _: Tensor,
    temperature_X: Tensor | None = None,
) -> tuple[Tensor]:
    """For `lm.reduce_logits`: log-prob that any of the tokens of a class is drawn, (X,)."""
    ids_V = part.ids_S if part else torch.arange(logits_XV.shape[1], device=logits_XV.device)
    in_class_V = equations.is_start(ids_V)
    if ending == Ending.DIGIT_OR_START:
        in_class_V = in_class_V | equations.is_digit(ids_V)
    logps_XV = log_probs(logits_XV, temperature_X)
    return (logps_XV.masked_fill(~in_class_V, -torch.inf).logsumexp(-1),)


def loss(
    lm: LatentLM, hidden_BND: Tensor, ids_BNG: Tensor, weights_BNG: Tensor, shortlist: PartialHead | None
) -> Tensor:
    """Cross-entropy of each label given those before it in its group, (B,).

    Weighted mean over a position's labels, then mean over the row's positions that have any.
    """
    real_BNG = weights_BNG > 0
    labelled_BN = real_BNG.any(-1)
    hidden_MD, ids_MG, real_MG, weights_MG = (
        ragged.take_masked(values, labelled_BN) for values in (hidden_BND, ids_BNG, real_BNG, weights_BNG)
    )
    losses_MG = -label_logps(lm, hidden_MD, ids_MG, real_MG, shortlist)
    weights_MG = devices.beside(weights_MG, losses_MG)
    losses_M = (weights_MG * losses_MG).sum(-1) / weights_MG.sum(-1)
    return ragged.row_mean(ragged.put_masked(losses_M, labelled_BN), labelled_BN)
