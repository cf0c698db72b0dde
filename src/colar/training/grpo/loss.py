"""Group relative policy optimisation over latents and tokens: advantages, loss, and the module that Trainer wraps.

For each question G outputs o_1 ... o_G are sampled and rewarded. An output is a row of actions (go on with a latent,
stop, a token; `methods/rollouts.py`), and with pi the model, pi_old the one that sampled and A_i the advantage:

    A_i  = (r_i - mean(r_1 ... r_G)) / (std(r_1 ... r_G) + 1e-4)              the paper's, std with G - 1 as in TRL
    w_in = pi(action n of o_i) / pi_old(action n of o_i)                      importance_sampling_level: token
         = exp(mean over n of log of that)                                    importance_sampling_level: sequence
    l_in = -min(w_in A_i, clip(w_in, 1 - epsilon, 1 + epsilon_high) A_i) + beta (e^d - d - 1),   d = log pi_ref - log pi

    loss of an update of M outputs = 1/M  sum_i c_i sum_n l_in,  where with |o| the actions of an output

    grpo     c_i = 1 / |o_i|                              the paper's: "averaged when applied to each latent/token"
    dr_grpo  c_i = 1 / a constant                         its ablation "w/o average"
    dapo     c_i = M / (sum of |o| over the update)       mean over all actions

Departures from the paper: the ratio is that of one action (or GSPO's length-normalised one), not of the whole output;
the stop is an action like a token. Departures from TRL: |o| counts latents and the stop; docs/grpo.md has the rest.
Outputs of a group without spread have advantage exactly 0, so that their gradient is exactly 0.

Shape suffixes: R outputs of a generation, Q questions, G outputs of a group, B outputs of a batch, N actions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colar.methods.base import Method
from colar.methods.rollouts import Rollouts, Scores, require_scorable
from colar.model.latent_lm import LatentLM
from colar.ops import devices
from colar.training.grpo.config import GenerationPlan, GrpoConfig, LossType
from colar.training.objective import Objective

EPSILON_STD = 1e-4
"""Added to the standard deviation of rewards (TRL's)."""
SAME = 1e-8
"""Rewards this close to each other count as equal (TRL's `isclose`)."""
FAR = 20.0
"""Log-ratios are clamped to this (verl's): e^20 is beyond every clip, and e^89 is not finite in float32."""


def advantages(rewards_R: Tensor, num_generations: int) -> Tensor:
    """Advantages (R,) float64 of rewards (R,) in consecutive groups; exactly 0 where a group's rewards are equal."""
    groups_QG = rewards_R.double().view(-1, num_generations)
    centred_QG = groups_QG - groups_QG.mean(1, keepdim=True)
    scaled_QG = centred_QG / (groups_QG.std(1, keepdim=True) + EPSILON_STD)
    # The mean of equal rewards may differ from them by rounding, which division by 1e-4 would amplify.
    spread_Q1 = has_spread(groups_QG)[:, None]
    return torch.where(spread_Q1, scaled_QG, 0.0).flatten()


def has_spread(groups_QG: Tensor) -> Tensor:
    """True for each group whose rewards (Q, G) differ by more than rounding, (Q,) bool."""
    return groups_QG.amax(1) - groups_QG.amin(1) > SAME


def output_weights(loss_type: LossType, lengths_R: Tensor, plan: GenerationPlan, constant: float) -> Tensor:
    """c_i of the formula above, (R,) float64, from the outputs' numbers of unmasked actions (R,).

    `constant` is dr_grpo's.
    """
    lengths_R = lengths_R.double()
    if loss_type == "grpo":
        return 1 / lengths_R.clamp(min=1)
    if loss_type == "dr_grpo":
        return torch.full_like(lengths_R, 1 / constant)
    # Outputs are in the order in which they are learnt from: an update is a slice of `size` of them.
    size = plan.outputs_per_update
    totals = lengths_R.view(-1, size).sum(1).clamp(min=1)
    return (size / totals).repeat_interleave(size)


def policy_loss(
    logps_BN: Tensor, old_BN: Tensor, mask_BN: Tensor, advantages_B: Tensor, config: GrpoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(w A, clip(w) A), (B, N), 0 outside the mask, and the shares of actions that were clipped (TRL's names)."""
    # 0 where nothing was chosen: log-probs there are meaningless, and a NaN would survive a product with 0.
    log_ratio_BN = torch.where(mask_BN, logps_BN - old_BN, 0.0)
    if config.importance_sampling_level == "sequence":
        count_B1 = mask_BN.sum(-1, keepdim=True).clamp(min=1)
        mean_B1 = log_ratio_BN.sum(-1, keepdim=True) / count_B1
        log_ratio_BN = mean_B1.expand_as(log_ratio_BN)
    ratio_BN = log_ratio_BN.clamp(-FAR, FAR).exp()
    low = 1 - config.epsilon
    high = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    clipped_BN = ratio_BN.clamp(low, high)
    advantage_B1 = advantages_B.to(logps_BN.dtype)[:, None]

    # The smaller gain counts: clipping removes the gradient away from a ratio of 1, never the one back to it.
    #
    #                 ratio below low         in between     above high
    #   A > 0         ratio A                 ratio A        clipped: no gradient
    #   A < 0         clipped: no gradient    ratio A        ratio A
    loss_BN = -torch.minimum(ratio_BN * advantage_B1, clipped_BN * advantage_B1)
    with torch.no_grad():
        low_BN = (ratio_BN < low) & (advantage_B1 < 0)
        high_BN = (ratio_BN > high) & (advantage_B1 > 0)
        shares = {
            "clip_ratio/low_mean": masked_mean(low_BN, mask_BN),
            "clip_ratio/high_mean": masked_mean(high_BN, mask_BN),
            "clip_ratio/region_mean": masked_mean(low_BN | high_BN, mask_BN),
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

    Tensors are `Rollouts.tensors()` and columns: advantages, weights (c_i), kept (B,); engine_logps (B, N); old_logps
    if a generation has several updates, and ref_logps if beta is above 0. Without old_logps the ratio is 1.
    """

    def __init__(self, lm: LatentLM, method: Method, config: GrpoConfig) -> None:
        super().__init__(lm, method)
        self.scorable = require_scorable(method)
        self.grpo = config  # not `config`: Trainer writes into a model's `config`

    def score_actions(self, tensors: dict[str, Tensor]) -> Scores:
        """Log-probs of the outputs' actions under the current weights."""
        with self.casts_left_to_autocast():
            return self.scorable.logps(self.lm, Rollouts.from_tensors(tensors))

    def forward(
        self,
        num_items_in_batch: Tensor | int | None = None,
        batch: Mapping[str, Tensor] | None = None,
        **tensors: Tensor,
    ) -> dict[str, Any]:
        """The outputs' losses summed and divided by `num_items_in_batch`, the outputs of the update.

        Without `num_items_in_batch`, divided by the number of outputs given.
        """
        config = self.grpo
        tensors = {**(batch or {}), **tensors}
        scores = self.score_actions(tensors)
        logps_BN = scores.logps
        own = ("advantages", "weights", "kept", "engine_logps", "old_logps", "ref_logps")
        tensors = {name: devices.beside(tensors[name], logps_BN) for name in own if name in tensors}
        mask_BN = scores.mask & tensors["kept"][:, None]

        # Columns are as wide as the generation's longest output; this batch's may be shorter.
        N = logps_BN.shape[1]
        old_BN = tensors["old_logps"][:, :N] if "old_logps" in tensors else logps_BN.detach()
        loss_BN, metrics = policy_loss(logps_BN, old_BN, mask_BN, tensors["advantages"], config)
        if config.beta > 0:
            kl_BN = kl_estimate(logps_BN, tensors["ref_logps"][:, :N], mask_BN)
            loss_BN = loss_BN + config.beta * kl_BN
            metrics["kl"] = masked_mean(kl_BN.detach(), mask_BN)
        losses_B = tensors["weights"].to(loss_BN.dtype) * loss_BN.sum(-1)

        metrics["entropy"] = mean_over_rows(scores.entropy)
        for name, values_B in scores.logged.items():
            metrics[name] = mean_over_rows(values_B)
        # Also of an output that the loss leaves out: the engine must agree with the trainer everywhere.
        difference_BN = (tensors["engine_logps"][:, :N] - old_BN).abs()
        metrics["sampling/logp_difference"] = masked_mean(difference_BN, scores.mask)
        count = losses_B.shape[0] if num_items_in_batch is None else num_items_in_batch
        return {**metrics, "loss": losses_B.sum() / count}


def mean_over_rows(values_B: Tensor) -> Tensor:
    """Mean over the rows that have the quantity (nan elsewhere), detached; 0 where none has."""
    values_B = values_B.detach()
    return masked_mean(values_B, ~values_B.isnan())
