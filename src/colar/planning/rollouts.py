"""The work of a batch of GRPO: outputs that the twin samples, as long as they may get."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colar.data.example import Example
from colar.methods.base import Method
from colar.planning.trace import Twin, Work
from colar.recipe import Recipe
from colar.training.batches import part_indices, take
from colar.training.grpo import rewards
from colar.training.grpo.config import Plan
from colar.training.grpo.loss import GrpoObjective
from colar.training.grpo.sampler import RolloutSampler
from colar.training.grpo.schedule import QuestionSchedule
from colar.training.grpo.trainer import fed_positions


def rollout_work(
    twin: Twin, method: Method, recipe: Recipe, examples: Sequence[Example]
) -> tuple[Work, bool]:
    """The work of the longest part of a batch, and whether that is all of it.

    The twin has learnt nothing: it rarely stops by itself.
    """
    config = recipe.grpo
    assert config is not None
    size = recipe.training.per_device_train_batch_size
    # As many whole groups as a batch has, at least one.
    groups = max(1, -(-size // config.num_generations))
    # A generation of one batch: no more is sampled than is measured.
    plan = Plan(groups * config.num_generations, 1, 1, 1, config.num_generations)
    schedule = QuestionSchedule(list(examples), recipe.training.seed, plan)
    sampler = RolloutSampler(
        twin.eval(), method, config, schedule, recipe.training.seed, rewards.named(config.reward_funcs)
    )
    tensors = sampler.generate(0).tensors
    lengths = fed_positions(tensors)
    # The longest rows, and of their parts the first, which has the longest again.
    batch = lengths.argsort(descending=True)[:size]
    first, *others = part_indices(lengths[batch], recipe.training.tokens_per_batch)
    # What sampling has noted is dropped: a batch's work is that of its loss.
    twin.work = Work()
    with torch.no_grad():
        GrpoObjective(twin, method, config)(**take(tensors, batch[first]))
    return twin.work, not others
