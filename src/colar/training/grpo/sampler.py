"""`RolloutSampler`: from the number of a generation to its outputs, sampled, rewarded and laid out to learn from.

questions -> G outputs each -> rewards -> advantages and weights -> tensors
   ^             |
   '-- dynamic sampling: groups without spread are replaced by those of other questions
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from random import Random

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from colar.methods.base import Method
from colar.methods.rollouts import Rollouts, require_scorable
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from
from colar.training.grpo import rewards, rollout
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.generation import Generation, Group, all_outputs, records_to_read, sampling_metrics
from colar.training.grpo.loss import advantages, output_weights
from colar.training.grpo.rollout import Output
from colar.training.grpo.schedule import QuestionSchedule


class RolloutSampler:
    """Makes generations: a pure function of the weights, the run's seed and the generation's number.

    `dr_grpo_length` is dr_grpo's constant, measured on the first generation where the configuration has none.
    """

    def __init__(
        self,
        lm: LatentLM,
        method: Method,
        config: GrpoConfig,
        schedule: QuestionSchedule,
        seed: int,
        reward_funcs: Mapping[str, rewards.Reward],
    ) -> None:
        self.lm = lm
        self.method = method
        self.config = config
        self.schedule = schedule
        self.seed = seed
        self.reward_funcs = dict(reward_funcs)
        self.dr_grpo_length = config.dr_grpo_length

    def generate(self, number: int) -> Generation:
        """NonFiniteError where the model's numbers are not finite; ValueError where a reward's are not."""
        started = time.monotonic()
        groups, sampled = self._groups(number)
        seconds = time.monotonic() - started

        outputs = all_outputs(groups)
        rollouts = rollout.collate(outputs, self.lm.width)
        total_R = torch.cat([group.total_G for group in groups])
        advantages_R = advantages(total_R, self.config.num_generations, self.config.scale_rewards)
        tensors = rollouts.tensors()
        tensors.update(self._columns(outputs, rollouts, advantages_R))

        names = list(self.reward_funcs)
        # Over all that was sampled: the chosen groups alone would hide how many questions are too easy or too hard.
        metrics = sampling_metrics(sampled, names)
        metrics["rollout/seconds"] = seconds
        metrics["rollout/completions_per_second"] = len(all_outputs(sampled)) / max(seconds, 1e-9)
        records = records_to_read(self.lm, groups, names, advantages_R, self.config.log_completions)
        return Generation(number, tensors, metrics, records)

    def _columns(
        self, outputs: Sequence[Output], rollouts: Rollouts, advantages_R: Tensor
    ) -> dict[str, Tensor]:
        """The columns that the loss needs beside the outputs themselves."""
        n_actions_R = rollouts.n_actions()
        truncated_R = torch.tensor([output.completion.truncated for output in outputs])
        kept_R = torch.ones_like(truncated_R)
        if self.config.mask_truncated_completions:
            kept_R = ~truncated_R
        if self.dr_grpo_length is None:
            self.dr_grpo_length = float(n_actions_R.double().mean())
        # An output that is left out has no actions to average over.
        counted_R = n_actions_R * kept_R
        plan = self.schedule.plan
        weights_R = output_weights(self.config.loss_type, counted_R, plan, self.dr_grpo_length)
        # Only logged: how far the engine that sampled is from the trainer that scores.
        method = require_scorable(self.method)
        engine_logps_RN = rollout.engine_logps(method, outputs, rollouts, self.config.latent_logprob)
        return {
            "advantages": advantages_R,
            "weights": weights_R,
            "kept": kept_R,
            "engine_logps": engine_logps_RN,
        }

    def _groups(self, number: int) -> tuple[list[Group], list[Group]]:
        """The groups to learn from, and all that were sampled (more of them with dynamic sampling)."""
        asked = self.schedule.questions(number)
        groups = self._sample(asked, number)
        sampled = list(groups)
        for _ in range(self.config.dynamic_sampling):
            flat = [place for place, group in enumerate(groups) if not group.spread]
            more = self._others(number, asked, len(flat))
            if not more:
                break
            found = self._sample(more, number)
            asked = asked + more
            sampled += found
            # A group with spread takes the very place of one without: no update of the generation is left without.
            with_spread = [group for group in found if group.spread]
            for place, group in zip(flat, with_spread, strict=False):
                groups[place] = group
        return groups, sampled

    def _others(self, number: int, asked: Sequence[int], n: int) -> list[int]:
        """N questions beside those already asked, or as many as there are."""
        # Sorted, for a draw must not depend on the order of a set.
        left = sorted(set(range(len(self.schedule.examples))) - set(asked))
        rng = Random(seed_from(self.seed, "more", number, len(asked)))
        return rng.sample(left, min(n, len(left)))

    def _sample(self, questions: Sequence[int], number: int) -> list[Group]:
        """A group for each of these questions, rewarded. Processes divide the questions, and all get all groups."""
        with PartialState().split_between_processes(list(questions)) as share:
            groups = self._sample_share(share, number) if share else []
        found: list[Group] = gather_object(groups)
        return found

    def _sample_share(self, questions: Sequence[int], number: int) -> list[Group]:
        """The groups of the questions that this process samples."""
        examples = [self.schedule.examples[index] for index in questions]
        outputs = rollout.roll_out(self.lm, self.method, self.config, examples, self.seed, number)
        for output in outputs:
            # The engine ends a request whose numbers are not finite; it cannot be rewarded.
            output.completion.require_finite(f"generation {number}")
        rewards_RF = rewards.apply(self.reward_funcs, outputs)
        total_R = rewards.combine(rewards_RF, self.config.weights())
        groups = []
        G = self.config.num_generations
        for start in range(0, len(outputs), G):
            rows = slice(start, start + G)
            groups.append(Group(outputs[rows], rewards_RF[rows], total_R[rows]))
        return groups
