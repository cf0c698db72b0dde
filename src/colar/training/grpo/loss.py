"""Group relative policy optimisation over latents and tokens: advantages, loss, and the module that Trainer wraps.

For each question G outputs o_1 ... o_G are sampled and rewarded. An output is a row of actions (go on with a latent,
stop, a token; `methods/rollouts.py`), and with pi the model, pi_old the one that sampled and A_i the advantage:

    A_i  = (r_i - mean(r_1 ... r_G)) / (std(r_1 ... r_G) + 1e-4)              the paper's, std with G - 1 as in TRL
    w_in = pi(action n of o_i) / pi_old(action n of o_i)                      importance_sampling_level: token
         = exp(mean over n of log of that)                                    importance_sampling_level: sequence
    l_in = -min(w_in A_i, clip(w_in, 1 - epsilon, 1 + epsilon_high) A_i) + beta (e^d - d - 1),   d = log pi_ref - log pi

    loss of an update of N outputs = 1/N  sum_i c_i sum_n l_in,  where with |o| the actions of an output

    grpo     c_i = 1 / |o_i|                              the paper's: "averaged when applied to each latent/token"
    dr_grpo  c_i = 1 / a constant                         its ablation "w/o average"
    dapo     c_i = N / (sum of |o| over the update)       mean over all actions
    bnpo     c_i = B / (sum of |o| over the batch of B)   mean over those of each batch, averaged over the batches

Departures from the paper: the ratio is an action's (or GSPO's length-normalised one), where the formula has the whole
output's; the stop is an action like a token. From TRL: |o| counts latents and the stop; docs/grpo.md has the rest.
Outputs without spread in their group have advantage exactly 0, so that their gradient is 0 to the last bit.

Shape suffixes: R outputs of a generation, B of a batch, N actions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar.methods.base import Method
from colar.methods.rollouts import Rollouts, Scores, require_scorable
from colar.model.latent_lm import LatentLM
from colar.training.grpo.config import GrpoConfig, Level, LossType, Plan, Scale
from colar.training.objective import Objective

EPSILON_STD = 1e-4
"""Added to the standard deviation of rewards (TRL's)."""
SAME = 1e-8
"""Rewards this near to each other are equal (TRL's `isclose`)."""
FAR = 20.0
"""Log-ratios are held within this (verl's): e^20 is past every clip, and the exponential of 89 is not finite."""


def advantages(rewards_R: Tensor, num_generations: int, scale_rewards: Scale) -> Tensor:
    """(R,) float64 of rewards (R,) in groups that follow one another; exactly 0 where a group's rewards are equal."""
    groups = rewards_R.double().view(-1, num_generations)
    centred = groups - groups.mean(1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (groups.std(1, keepdim=True) + EPSILON_STD)
    elif scale_rewards == "batch":
        centred = centred / (groups.std() + EPSILON_STD)
    return torch.where(has_spread(groups)[:, None], centred, 0.0).flatten()


def has_spread(groups: Tensor) -> Tensor:
    """(groups,) bool of rewards (groups, G): whether they differ by more than rounding."""
    return groups.amax(1) - groups.amin(1) > SAME


def output_weights(loss_type: LossType, lengths_R: Tensor, plan: Plan, constant: float) -> Tensor:
    """c_i of the formula above, (R,) float64, of outputs of so many unmasked actions; `constant` is dr_grpo's."""
    lengths_R = lengths_R.double()
    if loss_type == "grpo":
        return 1 / lengths_R.clamp(min=1)
    if loss_type == "dr_grpo":
        return torch.full_like(lengths_R, 1 / constant)
    size = plan.outputs_per_update if loss_type == "dapo" else plan.batch
    totals = lengths_R.view(-1, size).sum(1).clamp(min=1)
    return (size / totals).repeat_interleave(size)


@dataclass(frozen=True)
class Clip:
    """Where and how ratios are clipped."""

    low: float
    high: float
    level: Level


def policy_loss(
    logps_BN: Tensor, old_BN: Tensor, mask_BN: Tensor, advantages_B: Tensor, clip: Clip
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(w A, clip(w) A), (B, N), 0 outside the mask, and the shares of actions that were clipped (TRL's names)."""
    log_ratio_BN = torch.where(mask_BN, logps_BN - old_BN, 0.0)
    if clip.level == "sequence":
        mean_B1 = log_ratio_BN.sum(-1, keepdim=True) / mask_BN.sum(-1, keepdim=True).clamp(min=1)
        log_ratio_BN = mean_B1.expand_as(log_ratio_BN)
    ratio_BN, advantage_B1 = log_ratio_BN.clamp(-FAR, FAR).exp(), advantages_B.to(logps_BN.dtype)[:, None]
    clipped_BN = ratio_BN.clamp(1 - clip.low, 1 + clip.high)
    loss_BN = -torch.minimum(ratio_BN * advantage_B1, clipped_BN * advantage_B1)
    with torch.no_grad():
        low = (ratio_BN < 1 - clip.low) & (advantage_B1 < 0)
        high = (ratio_BN > 1 + clip.high) & (advantage_B1 > 0)
        shares = {
            "clip_ratio/low_mean": masked_mean(low, mask_BN),
            "clip_ratio/high_mean": masked_mean(high, mask_BN),
            "clip_ratio/region_mean": masked_mean(low | high, mask_BN),
        }
    return torch.where(mask_BN, loss_BN, 0.0), shares


def kl_estimate(logps_BN: Tensor, ref_BN: Tensor, mask_BN: Tensor) -> Tensor:
    """Schulman's estimate of KL(pi, pi_ref) at each action, e^d - d - 1 with d = log pi_ref - log pi, (B, N)."""
    d_BN = torch.where(mask_BN, ref_BN - logps_BN, 0.0).clamp(-FAR, FAR)
    return d_BN.exp() - d_BN - 1


def masked_mean(values_BN: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean over the masked entries, a scalar; 0 where there are none."""
    return torch.where(mask_BN, values_BN, 0).sum() / mask_BN.sum().clamp(min=1)


class GrpoObjective(Objective):
    """`forward(**tensors)` -> {"loss": scalar, metric: detached scalar}.

    Tensors are `Rollouts.tensors()` with columns: advantages, weights (c_i), kept (B,); engine_logps (B, N); and where
    a generation is used more than once old_logps, with beta above 0 ref_logps. Without old_logps the ratio is 1.
    """

    def __init__(self, lm: LatentLM, method: Method, config: GrpoConfig) -> None:
        super().__init__(lm, method)
        self.scorable = require_scorable(method)
        self.grpo = config  # not `config`: Trainer writes into a model's

    def score(self, tensors: dict[str, Tensor]) -> Scores:
        """Log-probs of what these outputs chose, by the present weights."""
        return self.scorable.logps(self.lm, Rollouts.from_tensors(tensors), self.grpo.latent_logprob)

    def forward(self, num_items_in_batch: Tensor | int | None = None, **tensors: Tensor) -> dict[str, Any]:
        """The outputs' losses summed and divided by `num_items_in_batch`, the outputs of the update (or given)."""
        config, scores = self.grpo, self.score(tensors)
        logps_BN, mask_BN = scores.logps, scores.mask & tensors["kept"][:, None]
        N = logps_BN.shape[1]
        old_BN = tensors["old_logps"][:, :N] if "old_logps" in tensors else logps_BN.detach()
        clip = Clip(config.epsilon, config.high, config.importance_sampling_level)
        loss_BN, metrics = policy_loss(logps_BN, old_BN, mask_BN, tensors["advantages"], clip)
        if config.beta > 0:
            kl_BN = kl_estimate(logps_BN, tensors["ref_logps"][:, :N], mask_BN)
            loss_BN = loss_BN + config.beta * kl_BN
            metrics["kl"] = masked_mean(kl_BN.detach(), mask_BN)
        losses_B = tensors["weights"].to(loss_BN.dtype) * loss_BN.sum(-1)
        difference_BN = (tensors["engine_logps"][:, :N] - old_BN).abs()
        metrics |= {
            "entropy": finite_mean(scores.entropy),
            **{name: finite_mean(values_B) for name, values_B in scores.logged.items()},
            "sampling/logp_difference": masked_mean(difference_BN, scores.mask),
        }
        count = losses_B.shape[0] if num_items_in_batch is None else num_items_in_batch
        return {**metrics, "loss": losses_B.sum() / count}


def finite_mean(values_B: Tensor) -> Tensor:
    """Mean over the rows that have the quantity (nan elsewhere), detached; 0 where none has."""
    values_B = values_B.detach()
    return masked_mean(values_B, ~values_B.isnan())


def length_metrics(lengths: Tensor, name: str) -> dict[str, float]:
    """Mean, smallest and largest under TRL's names (`completions/mean_length`)."""
    lengths = lengths.double()
    return {
        f"{name}/mean_length": float(lengths.mean()),
        f"{name}/min_length": float(lengths.min()),
        f"{name}/max_length": float(lengths.max()),
    }


def reward_metrics(
    rewards_RF: Tensor, names: list[str], total_R: Tensor, num_generations: int
) -> dict[str, float]:
    """TRL's: the sum's mean, the groups' mean spread, the share of groups without any; each function's own."""
    groups = total_R.view(-1, num_generations)
    metrics = {
        "reward": float(total_R.mean()),
        "reward_std": float(groups.std(1).mean()),
        "frac_reward_zero_std": float((~has_spread(groups)).double().mean()),
    }
    for f, name in enumerate(names):
        values = rewards_RF[:, f][~rewards_RF[:, f].isnan()]
        if len(values):
            metrics[f"rewards/{name}/mean"] = float(values.mean())
            metrics[f"rewards/{name}/std"] = float(values.std()) if len(values) > 1 else math.nan
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
