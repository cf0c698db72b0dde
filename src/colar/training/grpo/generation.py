"""Generations: the outputs that a run learns from, sampled when they are due, rewarded and laid out as tensors.

    epoch         every question once, shuffled
                  |-- generation 0 --|-- generation 1 --| ... | rest (left out) |
    generation    q1: o1 .. oG | q2: o1 .. oG | q3: o1 .. oG | q4: o1 .. oG        numbered on from one to the next
    updates       '-------- update 1 --------'-------- update 2 --------'          then once more for each iteration
    batches       '-- batch --'-- batch --'   '-- batch --'-- batch --'

    questions -> G outputs each -> rewards -> advantages and weights -> tensors
       ^             |
       '-- dynamic sampling: groups without spread are replaced by those of other questions

The outputs of a question are neighbours, so that an update holds whole groups wherever sizes allow.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from colar import processes
from colar.data.example import Example
from colar.look.thought import read_thoughts
from colar.methods.base import Method
from colar.methods.rollouts import Rollouts, require_scorable
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from
from colar.training.grpo import rewards, rollout
from colar.training.grpo.config import GenerationPlan, GrpoConfig
from colar.training.grpo.loss import advantages, has_spread, output_weights
from colar.training.grpo.rollout import Output
from colar.training.rows import Schedule, epoch_order

LOGGED = 2
"""Outputs of each generation that are written to completions.jsonl."""


class QuestionSchedule(Schedule):
    """The outputs of an epoch by number: each question once, in generations of `plan.questions`; a rest is left out.

    Questions are shuffled without regard to length, unlike the rows of SFT. Questions of similar length have
    similar difficulty, and a generation of only easy or only hard ones teaches nothing.
    """

    def __init__(self, examples: Sequence[Example], seed: int, plan: GenerationPlan) -> None:
        self.examples = examples
        self.plan = plan
        self.generations_per_epoch = len(examples) // plan.questions
        if not self.generations_per_epoch:
            raise ValueError(f"{len(examples)} questions do not fill a generation of {plan.questions}")
        self.seed = seed
        self._ordered_epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return self.generations_per_epoch * self.plan.outputs * self.plan.iterations

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * self.generations_per_epoch
        for generation in range(first, first + self.generations_per_epoch):
            start = generation * self.plan.outputs
            for _ in range(self.plan.iterations):
                yield from range(start, start + self.plan.outputs)

    def questions(self, number: int) -> list[int]:
        """Indices of the questions of a generation."""
        epoch, place = divmod(number, self.generations_per_epoch)
        if self._ordered_epoch != epoch:
            self._order = epoch_order(self.examples, self.seed, epoch, self.plan.questions)
            self._ordered_epoch = epoch
        start = place * self.plan.questions
        return self._order[start : start + self.plan.questions]


def collate_outputs(numbers: Sequence[int]) -> dict[str, Tensor]:
    """The numbers of a batch's outputs as a column, (B,) int64."""
    return {"outputs": torch.tensor(numbers)}


@dataclass(frozen=True)
class OutputGroup:
    """The G outputs of one question, and their rewards by each of F functions (G, F)."""

    outputs: list[Output]
    rewards_GF: Tensor

    @property
    def total_G(self) -> Tensor:
        """The sum of an output's rewards, (G,)."""
        return self.rewards_GF.sum(1)

    @property
    def spread(self) -> bool:
        """True where the rewards differ: without spread there is nothing to learn from the group."""
        return bool(has_spread(self.total_G[None]))


@dataclass
class Generation:
    """The sampled outputs of one turn.

    `tensors` are `Rollouts.tensors()` and the columns of `GrpoObjective`, (R, ...). `metrics` are logged, `records`
    are written to completions.jsonl.
    """

    number: int
    tensors: dict[str, Tensor]
    metrics: dict[str, float]
    records: list[dict[str, Any]]


class RolloutSampler:
    """Makes generations, each a function of the weights, the run's seed and the generation's number; for dr_grpo also
    of its constant `dr_grpo_length`, which the first generation measures.
    """

    def __init__(
        self,
        lm: LatentLM,
        method: Method,
        config: GrpoConfig,
        schedule: QuestionSchedule,
        reward_funcs: Mapping[str, rewards.Reward],
    ) -> None:
        self.lm = lm
        self.method = method
        self.config = config
        self.schedule = schedule
        self.reward_funcs = dict(reward_funcs)
        self.dr_grpo_length: float | None = None

    def generate(self, number: int) -> Generation:
        """Sample a generation. NonFiniteError if the model's numbers are not finite, ValueError if a reward is not."""
        groups, sampled = self._groups(number)
        outputs = all_outputs(groups)
        rollouts = rollout.collate(outputs, self.lm.width)
        total_R = torch.cat([group.total_G for group in groups])
        advantages_R = advantages(total_R, self.config.num_generations)
        tensors = rollouts.tensors() | self._columns(outputs, rollouts, advantages_R)

        names = list(self.reward_funcs)
        # Over all sampled groups: the chosen ones alone would hide how many questions are too easy or too hard.
        metrics = sampling_metrics(sampled, names)
        return Generation(number, tensors, metrics, records_to_read(self.lm, groups, names, advantages_R))

    def _columns(
        self, outputs: Sequence[Output], rollouts: Rollouts, advantages_R: Tensor
    ) -> dict[str, Tensor]:
        """The columns that the loss needs beside the outputs themselves."""
        n_actions_R = rollouts.n_actions()
        if self.dr_grpo_length is None:
            self.dr_grpo_length = float(n_actions_R.double().mean())
        masks = self.config.mask_truncated_completions
        kept_R = torch.tensor([not (masks and output.completion.truncated) for output in outputs])
        # An output that is left out has no actions to average over.
        counted_R = n_actions_R * kept_R
        plan = self.schedule.plan
        return {
            "advantages": advantages_R,
            "weights": output_weights(self.config.loss_type, counted_R, plan, self.dr_grpo_length),
            "kept": kept_R,
            # Only logged: how far the engine that sampled is from the trainer that scores.
            "engine_logps": rollout.engine_logps(require_scorable(self.method), outputs, rollouts),
        }

    def _groups(self, number: int) -> tuple[list[OutputGroup], list[OutputGroup]]:
        """The groups to learn from, and all that were sampled (more of them with dynamic sampling)."""
        questions = self.schedule.questions(number)
        groups = self._sample(questions, number)
        sampled = list(groups)
        for _ in range(self.config.dynamic_sampling):
            flat = [place for place, group in enumerate(groups) if not group.spread]
            others = self._others(number, questions, len(flat))
            if not others:
                break
            more_groups = self._sample(others, number)
            questions = questions + others
            sampled += more_groups
            # A group with spread takes the place of one without, so that those with spread are not all in one update.
            # Some groups may remain without spread.
            with_spread = [group for group in more_groups if group.spread]
            for place, group in zip(flat, with_spread, strict=False):
                groups[place] = group
        return groups, sampled

    def _others(self, number: int, sampled: Sequence[int], n: int) -> list[int]:
        """N questions that have not been sampled yet, or fewer if no more are left."""
        # Sorted, because a draw must not depend on the order of a set.
        left = sorted(set(range(len(self.schedule.examples))) - set(sampled))
        rng = Random(seed_from(self.schedule.seed, "more", number, len(sampled)))
        return rng.sample(left, min(n, len(left)))

    def _sample(self, questions: Sequence[int], number: int) -> list[OutputGroup]:
        """The rewarded groups of these questions. Processes divide the questions, and each gets all groups."""
        return processes.split_and_gather(questions, lambda share: self._sample_share(share, number))

    def _sample_share(self, questions: Sequence[int], number: int) -> list[OutputGroup]:
        """The groups of the questions that this process samples."""
        if not questions:
            return []
        examples = [self.schedule.examples[index] for index in questions]
        outputs = rollout.roll_out(self.lm, self.method, self.config, examples, self.schedule.seed, number)
        for output in outputs:
            # The engine ends a request whose numbers are not finite. Such an output cannot be rewarded.
            output.completion.require_answer(f"generation {number}")
        rewards_RF = rewards.apply(self.reward_funcs, outputs)
        G = self.config.num_generations
        return [
            OutputGroup(outputs[start : start + G], rewards_RF[start : start + G])
            for start in range(0, len(outputs), G)
        ]


def all_outputs(groups: Sequence[OutputGroup]) -> list[Output]:
    """The outputs of all groups, group by group."""
    return [output for group in groups for output in group.outputs]


def sampling_metrics(groups: Sequence[OutputGroup], reward_names: Sequence[str]) -> dict[str, float]:
    """Rewards and lengths under TRL's names; `completions/` are answers, `latents/` the thinking."""
    outputs = all_outputs(groups)
    rewards_RF = torch.cat([group.rewards_GF for group in groups])
    metrics = reward_metrics(rewards_RF, reward_names, torch.stack([group.total_G for group in groups]))
    answer_lengths = [len(output.sampled_ids) for output in outputs]
    answers_cut = [output.completion.reason == "length" for output in outputs]
    metrics.update(length_metrics("completions", answer_lengths, answers_cut))
    thought_counts = [output.completion.length for output in outputs]
    thoughts_cut = [not output.completion.stopped for output in outputs]
    metrics.update(length_metrics("latents", thought_counts, thoughts_cut))
    return metrics


def length_metrics(name: str, counts: Sequence[int], cut: Sequence[bool]) -> dict[str, float]:
    """Mean, smallest and largest length, and the share that was cut, under TRL's names."""
    return {
        f"{name}/mean_length": sum(counts) / len(counts),
        f"{name}/min_length": float(min(counts)),
        f"{name}/max_length": float(max(counts)),
        f"{name}/clipped_ratio": sum(cut) / len(cut),
    }


def reward_metrics(rewards_RF: Tensor, names: Sequence[str], groups_QG: Tensor) -> dict[str, float]:
    """TRL's: the sum's mean, its mean std in a group, the share of groups without spread; mean and std by function."""
    metrics = {
        "reward": float(groups_QG.mean()),
        "reward_std": float(groups_QG.std(1).mean()),
        "frac_reward_zero_std": float((~has_spread(groups_QG)).double().mean()),
    }
    for f, name in enumerate(names):
        metrics[f"rewards/{name}/mean"] = float(rewards_RF[:, f].mean())
        metrics[f"rewards/{name}/std"] = float(rewards_RF[:, f].std())
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def records_to_read(
    lm: LatentLM, groups: Sequence[OutputGroup], reward_names: Sequence[str], advantages_R: Tensor
) -> list[dict[str, Any]]:
    """Records of the first `LOGGED` outputs: a thought is the text of its chosen tokens, or else of the nearest."""
    rewards_RF = torch.cat([group.rewards_GF for group in groups])
    total_R = torch.cat([group.total_G for group in groups])
    records = []
    for row, output in enumerate(all_outputs(groups)[:LOGGED]):
        completion = output.completion
        record = {
            "id": output.example.id,
            "sample": completion.request.sample,
            **dataclasses.asdict(completion.request.params),
            "question": output.example.question,
            "thoughts": [thought["text"] for thought in read_thoughts(lm, completion, neighbours=0)],
            "completion": completion.text,
            "answer": output.example.answer,
            "length": completion.length,
            "truncated": completion.truncated,
            "rewards": dict(zip(reward_names, rewards_RF[row].tolist(), strict=True)),
            "reward": total_R[row].item(),
            "advantage": advantages_R[row].item(),
        }
        records.append(record)
    return records
