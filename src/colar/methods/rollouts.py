"""Sampled outputs as tensors, and the log-probability of every action in them, from which reinforcement learns.

    fed        question ###   e1        e2        ###       a1    a2            e: thoughts, as they were fed
    action                    thought   thought   stop      a1    a2    EOS     one for each position of the row

An output is a row of actions: thoughts, the stop, and tokens of the answer. With p the LM head's softmax at the
temperature T that the row was sampled at, their log-probs are:

    thought        the method's own log-prob (`ThoughtLogps`): of a token of CoT, of going on with a latent of CoLaR
    stop           log p[###]
    token a        log p[a]

A stop that was forced (by `max_latents`, or by a method that thinks a fixed number of times) was not chosen, so it is
masked. Latents are inputs without gradient, unless a method recomputes them from its choices.

Shape suffixes: B rows, Q question, K thoughts, A answer, N actions (K + 1 + A at most), D width, V vocabulary,
M positions of all rows, L thoughts of all rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from colar.methods import losses
from colar.methods.base import Columns
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged


@dataclass(frozen=True)
class Rollouts(Columns):
    """Sampled rows: ids (B, Q | K | A) padded on the right, latents (B, K, D) as drawn, and columns (B,).

    With columns on the CPU, lengths and masks are known without synchronising with a GPU. `question_ids` ends with the
    opening separator. `thought_ids` are the tokens that were thought, or -1 for a method that thinks in latents.
    `group_ids` (B, K, G) are the tokens that a latent was chosen as, -1 after them; empty (G = 0) for methods that
    choose latents otherwise. `latents` are empty (D = 0) beside either. `endings` (B, K) record draws that ended groups
    (`sequential.decoder.Ending`); -1 if none did. `token_ids` are the answer's, EOS included if it was generated.
    `stopped` is True if the method chose to stop thinking.
    """

    question_ids: Tensor
    question_lengths: Tensor
    thought_ids: Tensor
    latents: Tensor
    group_ids: Tensor
    endings: Tensor
    thought_counts: Tensor
    token_ids: Tensor
    token_lengths: Tensor
    stopped: Tensor
    temperature: Tensor
    latent_temperature: Tensor
    params: dict[str, Tensor] = field(default_factory=dict)

    padded: ClassVar[Mapping[str, str]] = {
        "question_ids": "question_lengths",
        "thought_ids": "thought_counts",
        "latents": "thought_counts",
        "group_ids": "thought_counts",
        "endings": "thought_counts",
        "token_ids": "token_lengths",
    }

    def action_positions(self) -> Tensor:
        """(B,) positions that may hold an action: thoughts, one stop, tokens."""
        return self.thought_counts + 1 + self.token_lengths

    def n_actions(self) -> Tensor:
        """(B,) actions that were chosen, without a forced stop."""
        return self.thought_counts + self.stopped.long() + self.token_lengths


@dataclass(frozen=True)
class ThoughtActions:
    """The L thoughts of all rows, one after another, and the model's state before each of them.

    hidden (L, D) · temperature (L,) float32, the row's · latents (L, D): on the model's device. ids (L,), -1 for a
    latent · group_ids (L, G) · endings (L,) · row (L,) index of the row that a thought belongs to: on the device of
    the rollouts. Methods compute logits by `lm.reduce_logits`.
    """

    hidden: Tensor
    temperature: Tensor
    ids: Tensor
    latents: Tensor
    group_ids: Tensor
    endings: Tensor
    row: Tensor


ThoughtLogps = Callable[[ThoughtActions], tuple[Tensor, dict[str, Tensor]]]
"""Thought actions -> their log-probs (L,), with gradient, and quantities to log by name, (L,) each, without."""


@dataclass(frozen=True)
class Scores:
    """`logps` (B, N), 0 where `mask` (B, N) is False because nothing was chosen.

    `entropy` (B,) is the mean over the answer's tokens; `logged` holds the method's own quantities, means over a
    row's thoughts (B,); nan in rows that have none.
    """

    logps: Tensor
    mask: Tensor
    entropy: Tensor
    logged: dict[str, Tensor]


@runtime_checkable
class Scorable(Protocol):
    """A method that reinforcement can train: a `Method` that also computes the log-probs of its own choices."""

    def logps(self, lm: LatentLM, rollouts: Rollouts) -> Scores:
        """Log-probs by the current weights, with gradient to them."""
        ...

    def sampled_logps(self, info: Mapping[str, Tensor], stopped: Tensor) -> Tensor:
        """Log-probs by the sampling weights, from the `info` of `think`: columns (K, ...) of a request's steps -> (K,).

        Vectors of the model's width are not among them.

        `stopped` (K,) bool is True at the step that ended the thinking.
        """
        ...


def require_scorable(method: Any) -> Scorable:
    """Return the method if it can be trained by reinforcement; otherwise a ValueError names it."""
    if not isinstance(method, Scorable):
        raise ValueError(
            f"method.name {method.name} cannot be trained by grpo: its outputs have no log-probs"
        )
    return method


def score_actions(
    lm: LatentLM, rollouts: Rollouts, thought_logps: ThoughtLogps, latents_BKD: Tensor | None = None
) -> Scores:
    """Log-probs of all actions, in one forward over all rows.

    `latents_BKD` are fed in place of the rollouts' own, and take gradient: for methods that recompute latents from
    their choices.
    """
    N = int(rollouts.action_positions().max())
    if latents_BKD is None:
        latents_BKD = devices.send(rollouts.latents.detach(), lm.device)
    hidden_BND = _hidden(lm, rollouts, latents_BKD, N)

    # The actions at a row's positions: thoughts, then the stop, then the answer's tokens.
    position_N = torch.arange(N, device=rollouts.stopped.device)
    thoughts_B1 = rollouts.thought_counts[:, None]
    end_B1 = rollouts.action_positions()[:, None]
    thought_BN = position_N < thoughts_B1
    stop_BN = (position_N == thoughts_B1) & rollouts.stopped[:, None]
    token_BN = (position_N > thoughts_B1) & (position_N < end_B1)
    mask_BN = thought_BN | stop_BN | token_BN

    # Logits are computed only where something was chosen. The stop and the answer are tokens.
    temperature_BN = rollouts.temperature[:, None].expand(-1, N).float()
    written_BN = stop_BN | token_BN
    closing_BK = _closing_ids(lm, rollouts).expand(-1, rollouts.thought_ids.shape[1] + 1)
    labels_BN = ragged.pack(
        (closing_BK, rollouts.thought_counts + 1), (rollouts.token_ids, rollouts.token_lengths)
    )
    hidden_MD = ragged.take_masked(hidden_BND, written_BN)
    labels_M, temperature_M = (
        devices.beside(ragged.take_masked(values_BN, written_BN), hidden_MD)
        for values_BN in (labels_BN, temperature_BN)
    )
    written_logps_M, entropy_M = lm.reduce_logits(logps_and_entropy, hidden_MD, labels_M, temperature_M)
    real_BK = ragged.length_mask(rollouts.thought_counts, rollouts.thought_ids.shape[1])
    # Both masks list the thoughts row by row, so that states and choices stay aligned.
    actions = ThoughtActions(
        hidden=ragged.take_masked(hidden_BND, thought_BN),
        temperature=devices.beside(ragged.take_masked(temperature_BN, thought_BN), hidden_BND),
        ids=ragged.take_masked(rollouts.thought_ids, real_BK),
        latents=devices.beside(ragged.take_masked(rollouts.latents, real_BK).detach(), hidden_BND),
        group_ids=ragged.take_masked(rollouts.group_ids, real_BK),
        endings=ragged.take_masked(rollouts.endings, real_BK),
        row=thought_BN.nonzero()[:, 0],
    )
    thought_logps_L, logged_L = thought_logps(actions)
    logps_BN = ragged.put_masked(written_logps_M, written_BN)
    # The entropy is averaged over the answer's tokens alone, without the stop.
    entropy_BN = ragged.put_masked(entropy_M, written_BN)
    logged = {}
    for name, values_L in logged_L.items():
        logged[name] = _mean_or_nan(ragged.put_masked(values_L, thought_BN), thought_BN)
    return Scores(
        logps=logps_BN + ragged.put_masked(thought_logps_L, thought_BN),
        mask=devices.beside(mask_BN, logps_BN),
        entropy=_mean_or_nan(entropy_BN, token_BN),
        logged=logged,
    )


def logps_and_entropy(logits_MV: Tensor, ids_M: Tensor, temperature_M: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each position's token, and the entropy of its distribution, without gradient, (M,) each."""
    log_probs_MV = losses.log_probs(logits_MV, temperature_M)
    logps_M = log_probs_MV.gather(1, ids_M[:, None])[:, 0]
    with torch.no_grad():
        entropy_M = -(log_probs_MV.exp() * log_probs_MV).sum(-1)
    return logps_M, entropy_M


def _hidden(lm: LatentLM, rollouts: Rollouts, latents_BKD: Tensor, N: int) -> Tensor:
    """The hidden states that actions are chosen from, (B, N, D): from the question's last position on."""
    closing_B1 = _closing_ids(lm, rollouts)
    question_BQD = lm.embed(rollouts.question_ids)
    # Tokens of a chain are embedded again, not taken as they were fed, so that the gradient reaches embeddings that are
    # trained.
    fed_BKD = latents_BKD if latents_BKD.shape[-1] else lm.embed(rollouts.thought_ids)
    # Nothing is chosen after the last token, so it is not fed.
    fed_tokens_B = (rollouts.token_lengths - 1).clamp(min=0)
    fed_BTD = ragged.pack(
        (question_BQD, rollouts.question_lengths),
        (fed_BKD.to(question_BQD.dtype), rollouts.thought_counts),
        (lm.embed(closing_B1), torch.ones_like(rollouts.token_lengths)),
        (lm.embed(rollouts.token_ids), fed_tokens_B),
        multiple=ragged.PAD_TO,
    )
    lengths_B = rollouts.question_lengths + rollouts.thought_counts + 1 + fed_tokens_B
    # Outputs of one question share their start, which is then computed once.
    hidden_BTD = lm.hidden_of_rows(fed_BTD, (rollouts.question_ids, rollouts.question_lengths), lengths_B)
    return ragged.take_from(hidden_BTD, rollouts.question_lengths - 1, N)


def _mean_or_nan(values_BN: Tensor, where_BN: Tensor) -> Tensor:
    """Mean of each row's values, (B,); nan in rows that have none."""
    where_BN = devices.beside(where_BN, values_BN)
    return ragged.row_mean(values_BN, where_BN).masked_fill(~where_BN.any(-1), torch.nan)


def _closing_ids(lm: LatentLM, rollouts: Rollouts) -> Tensor:
    """The separator that ends each row's thoughts, (B, 1)."""
    return torch.full_like(rollouts.token_lengths, lm.template.separator_id)[:, None]
