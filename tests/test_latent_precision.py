"""Drawn latents and the head's means in float32: reinforcement scores the draw, not a rounding of it."""

from __future__ import annotations

import math

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from torch import Tensor

from colar.methods import pretrained
from colar.methods.colar import LOG_STD_RANGE, Colar, ColarConfig, LatentHead
from colar.methods.rollouts import ThoughtActions, score_actions
from colar.model.latent_lm import LatentLM
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def model(head: str, log_sigma: float) -> tuple[LatentLM, Colar]:
    """A backbone in bfloat16 whose head has means of about 1 everywhere, and one sigma."""
    lm, method = tiny_lm("llama"), Colar(ColarConfig(head=head))
    pretrained.attach(lm, method, 0)
    method.prepare(lm, EXAMPLES)
    liven(lm)
    lm.causal_lm.to(torch.bfloat16)
    latent_head = lm.extra["latent_head"]
    with torch.no_grad():
        latent_head.log_std.weight.zero_()
        latent_head.log_std.bias.fill_(log_sigma)
        # The same mean at every hidden state: the forward that scores is not the engine's to the last bit.
        latent_head.mean.weight.zero_()
        latent_head.mean.bias.copy_(torch.randn(lm.width, generator=torch.Generator().manual_seed(0)))
    return lm, method


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("log_sigma", [math.log(0.003), LOG_STD_RANGE[0]])
def test_a_drawn_latent_is_as_far_from_its_mean_as_sigma_says(log_sigma: float, autocast: bool) -> None:
    """E[((latent - mean) / sigma)^2] = 1, from the rollout through the score, with the backbone in bfloat16."""
    lm, method = model("gaussian", log_sigma)
    config = GrpoConfig(num_generations=4, max_latents=12, max_completion_length=2)
    outputs = rollout.roll_out(lm, method, config, EXAMPLES, 0, 0)
    rollouts = rollout.collate(outputs, lm.width)
    squares: list[Tensor] = []

    def thought_logps(actions: ThoughtActions) -> tuple[Tensor, dict[str, Tensor]]:
        mean_LD, log_std_LD = lm.extra["latent_head"](actions.hidden)
        squares.append((((actions.latents / method.sigma_e) - mean_LD) / log_std_LD.exp()).square())
        # Any value for each thought: what is tested lies in `squares`.
        return actions.temperature, {}

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        score_actions(lm, rollouts, thought_logps)
    found = torch.cat(squares)
    assert found.numel() > 2000
    # The square of a standard normal has mean 1 and variance 2.
    assert abs(found.mean().item() - 1) < 4 * math.sqrt(2 / found.numel())


def test_latents_of_a_rollout_keep_all_that_was_drawn() -> None:
    lm, method = model("gaussian", LOG_STD_RANGE[0])
    config = GrpoConfig(num_generations=2, max_latents=6, max_completion_length=2)
    rollouts = rollout.collate(rollout.roll_out(lm, method, config, EXAMPLES, 0, 0), lm.width)
    assert rollouts.latents.dtype == torch.float32
    assert not torch.equal(rollouts.latents, rollouts.latents.bfloat16().float())


def test_the_head_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    head = LatentHead(32)
    hidden = torch.randn(50, 32)
    mean, log_std = head(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        again = head(hidden)
    assert torch.equal(again[0], mean)
    assert torch.equal(again[1], log_std)
