"""Outputs that were sampled, as tensors, and the log-probability of everything that was chosen in them.

    fed        question ###   l1        l2        ###       a1    a2            l: latents, as they were drawn
    action                    go on,l1  go on,l2  stop      a1    a2    EOS     one for each position of the row

An action is: go on with a latent, stop, or a token of the answer. With p the LM head's softmax at the
temperature T that the row was sampled at, and mu, sigma of the latent head:

    go on with l   log(1 - p[###]) + log N(l / sigma_e; mu, (latent_temperature * sigma)^2)
    stop           log p[###]
    token a        log p[a]

The density is a mean over the D dimensions (`latent_logprob: mean`, of the size of a token's log-prob) or their
sum (the true one). It is left out where latents are not drawn: a deterministic head, latent_temperature 0. A stop
that was forced by `max_latents` was no choice: it has no log-prob and is masked. Latents are inputs here, and no
gradient flows through them.

Shape suffixes: B rows, Q question, K latents, A answer, N actions (K + 1 + A at most), D width, V vocabulary, M chosen
actions, L latents among them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from colar.methods.colar.heads import gaussian_logps
from colar.model.latent_lm import LatentLM
from colar.ops import ragged

LatentLogprob = Literal["mean", "sum"]
Predict = Callable[[LatentLM, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(lm, hidden (L, D), compression factors (L,), logits (L, V)) -> mean and log std of the next latent, (L, D)."""


@dataclass(frozen=True)
class Outputs:
    """Sampled rows: ids (B, Q | A) padded on the right, latents (B, K, D) as fed, lengths and settings (B,).

    `question_ids` ends with the opening separator; `token_ids` are the answer's, EOS included where it came.
    `stopped` says that the row stopped thinking by itself.
    """

    question_ids: Tensor
    question_lengths: Tensor
    latents: Tensor
    latent_counts: Tensor
    token_ids: Tensor
    token_lengths: Tensor
    stopped: Tensor
    temperature: Tensor
    latent_temperature: Tensor
    params: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """A flat dict, as Trainer moves it between devices."""
        flat = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "params"}
        return flat | {f"params.{name}": column for name, column in self.params.items()}

    @classmethod
    def from_tensors(cls, flat: Mapping[str, Tensor]) -> Outputs:
        """Back from a flat dict; what else it holds is left."""
        own = {f.name: flat[f.name] for f in dataclasses.fields(cls) if f.name != "params"}
        params = {key.removeprefix("params."): flat[key] for key in flat if key.startswith("params.")}
        return cls(**own, params=params)

    def positions(self) -> Tensor:
        """(B,) positions that an action may stand at: latents, one stop, tokens."""
        return self.latent_counts + 1 + self.token_lengths

    def n_actions(self) -> Tensor:
        """(B,) actions chosen: a forced stop is none."""
        return self.latent_counts + self.stopped.long() + self.token_lengths


@dataclass(frozen=True)
class Scores:
    """`logps` (B, N), 0 where `mask` (B, N) says that nothing was chosen; means over a row's choices, (B,) each.

    `entropy` is that of the answer's tokens, `latent_entropy` the Gaussian's per dimension (units of sigma_e),
    `sigma` its mean spread before the latent_temperature; nan in rows that have none.
    """

    logps: Tensor
    mask: Tensor
    entropy: Tensor
    latent_entropy: Tensor
    sigma: Tensor


@runtime_checkable
class Scorable(Protocol):
    """What a method needs to be trained by reinforcement: the log-probs of what it chose itself."""

    def logps(self, lm: LatentLM, outputs: Outputs, latent_logprob: LatentLogprob) -> Scores:
        """With gradient to the weights, none through the latents."""
        ...


def score(
    lm: LatentLM, outputs: Outputs, predict: Predict | None, sigma_e: float, latent_logprob: LatentLogprob
) -> Scores:
    """The formula above, in one forward. `predict` is None where latents are not drawn."""
    N, device = int(outputs.positions().max()), outputs.question_ids.device
    hidden_BND = _hidden(lm, outputs, N)
    n_N, counts_B1 = torch.arange(N, device=device), outputs.latent_counts[:, None]
    latent_BN = n_N < counts_B1
    stop_BN = (n_N == counts_B1) & outputs.stopped[:, None]
    token_BN = (n_N > counts_B1) & (n_N < outputs.positions()[:, None])
    mask_BN = latent_BN | stop_BN | token_BN

    raw_MV = lm.logits(hidden_BND[mask_BN])
    scaled_MV = raw_MV / outputs.temperature[:, None].expand(-1, N)[mask_BN].float()[:, None]
    total_M = scaled_MV.logsumexp(-1)
    chosen_M = scaled_MV.gather(1, _labels(lm, outputs)[mask_BN][:, None])[:, 0] - total_M
    latent_M, token_M = latent_BN[mask_BN], token_BN[mask_BN]
    # log(1 - p[###]) without the 1 - p: exact where stopping is nearly certain, too.
    others_LV = scaled_MV[latent_M].index_fill(1, _separator(lm, device), -math.inf)
    logps_M = chosen_M.masked_scatter(latent_M, others_LV.logsumexp(-1) - total_M[latent_M])

    with torch.no_grad():
        log_probs = (scaled_MV[token_M] - total_M[token_M, None]).float()
        entropy_B = _mean(-(log_probs.exp() * log_probs).sum(-1), token_BN)
    latent_entropy_B = sigma_B = torch.full_like(entropy_B, math.nan)
    if predict is not None:
        density_L, sigma_L, spread_entropy_L = _density(
            lm, outputs, predict, sigma_e, latent_logprob, hidden_BND, raw_MV[latent_M], latent_BN
        )
        logps_M = logps_M.masked_scatter(latent_M, logps_M[latent_M] + density_L)
        sigma_B = _mean(sigma_L, latent_BN)
        drawn_B = outputs.latent_temperature > 0
        latent_entropy_B = torch.where(drawn_B, _mean(spread_entropy_L, latent_BN), math.nan)
    empty_BN = logps_M.new_zeros(mask_BN.shape)
    logps_BN = empty_BN.masked_scatter(mask_BN, logps_M)
    return Scores(logps_BN, mask_BN, entropy_B, latent_entropy_B, sigma_B)


def _hidden(lm: LatentLM, outputs: Outputs, N: int) -> Tensor:
    """The hidden states that actions are chosen from, (B, N, D): from the question's last position on."""
    separator_B1 = _separator(lm, outputs.question_ids.device).expand(outputs.question_ids.shape[0], 1)
    question_BQD = lm.embed(outputs.question_ids)
    fed = ragged.pack(
        (question_BQD, outputs.question_lengths),
        (outputs.latents.detach().to(question_BQD.dtype), outputs.latent_counts),
        (lm.embed(separator_B1), torch.ones_like(outputs.token_lengths)),
        (
            lm.embed(outputs.token_ids),
            (outputs.token_lengths - 1).clamp(min=0),
        ),  # nothing follows the last token
        multiple=ragged.PAD_TO,
    )
    return ragged.shift(lm.hidden(fed), outputs.question_lengths - 1, N)


def _labels(lm: LatentLM, outputs: Outputs) -> Tensor:
    """(B, N) ids: the separator where the row could stop, then the answer's tokens."""
    B, K = outputs.latents.shape[:2]
    separator_BK = _separator(lm, outputs.token_ids.device).expand(B, K + 1)
    return ragged.pack((separator_BK, outputs.latent_counts + 1), (outputs.token_ids, outputs.token_lengths))


def _density(
    lm: LatentLM,
    outputs: Outputs,
    predict: Predict,
    sigma_e: float,
    latent_logprob: LatentLogprob,
    hidden_BND: Tensor,
    logits_LV: Tensor,
    latent_BN: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-density, mean sigma and entropy per dimension of each latent, (L,) each; the last two without gradient."""

    def per_latent(column_B: Tensor) -> Tensor:
        return column_B[:, None].expand_as(latent_BN)[latent_BN]

    factors_B = outputs.params["compression_factor"]
    mean_LD, log_std_LD = predict(lm, hidden_BND[latent_BN], per_latent(factors_B), logits_LV)
    drawn_LD = (
        outputs.latents[ragged.length_mask(outputs.latent_counts, outputs.latents.shape[1])].float() / sigma_e
    )
    spread_LD = per_latent(outputs.latent_temperature).float()[:, None] * log_std_LD.exp()
    density_LD = gaussian_logps(drawn_LD.detach(), mean_LD, spread_LD)
    density_L = density_LD.mean(-1) if latent_logprob == "mean" else density_LD.sum(-1)
    with torch.no_grad():
        sigma_L = log_std_LD.exp().mean(-1)
        entropy_L = (spread_LD.clamp(min=1e-30).log() + 0.5 * math.log(2 * math.pi * math.e)).mean(-1)
    return density_L, sigma_L, entropy_L


def _mean(values_M: Tensor, where_BN: Tensor) -> Tensor:
    """Mean of each row's values, (B,); nan in rows that have none."""
    spread_BN = values_M.new_zeros(where_BN.shape).masked_scatter(where_BN, values_M)
    return spread_BN.sum(-1) / where_BN.sum(-1)


def _separator(lm: LatentLM, device: torch.device) -> Tensor:
    return torch.tensor([lm.template.separator_id], device=device)
