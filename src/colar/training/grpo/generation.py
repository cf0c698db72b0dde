"""A generation: which questions are due, what is sampled and rewarded for them, and the tensors to learn from.

    generation 0                                generation 1
    q1: o1 .. oG | q2: o1 .. oG | q3 ...        q5: o1 .. oG | ...        outputs, in order
    '-- update 1 --'-- update 2 --' ...         (num_iterations times)

An update's outputs are neighbours, so that a question's are together wherever sizes allow.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from colar.analysis import retrieval
from colar.data.example import Example
from colar.methods.base import Method
from colar.methods.rollouts import require_scorable
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from
from colar.training.batches import Order, Schedule
from colar.training.grpo import rewards, rollout
from colar.training.grpo.config import GrpoConfig, Plan
from colar.training.grpo.loss import advantages, describe, has_spread, output_weights, reward_metrics
from colar.training.grpo.rollout import Rollout
from colar.training.trainer import NonFiniteError

NEAREST = 3
"""Tokens that a latent is read as in completions.jsonl."""

Key = tuple[int, int]
"""(number of the generation, place of the output in it)."""


class Generations(Schedule):
    """One epoch's keys: each question once, in generations of `plan.questions`; a rest that fills none is left out.

    Shuffled whatever their lengths, unlike the rows of SFT: questions of like length are of like difficulty, and a
    generation that is all easy or all hard teaches nothing.
    """

    def __init__(self, examples: Sequence[Example], seed: int, plan: Plan) -> None:
        self.examples, self.plan, self.epoch = examples, plan, 0
        self.per_epoch = len(examples) // plan.questions
        if not self.per_epoch:
            raise ValueError(f"{len(examples)} questions do not fill a generation of {plan.questions}")
        self._questions = Order(examples, [0] * len(examples), seed, plan.questions)
        self._known: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self.per_epoch * self.plan.outputs * self.plan.iterations

    def __iter__(self) -> Iterator[Key]:
        for number in range(self.epoch * self.per_epoch, (self.epoch + 1) * self.per_epoch):
            for _ in range(self.plan.iterations):
                yield from ((number, slot) for slot in range(self.plan.outputs))

    def questions(self, number: int) -> list[int]:
        """Indices of the questions of a generation."""
        epoch, place = divmod(number, self.per_epoch)
        if self._known[0] != epoch:
            self._known = epoch, self._questions.order(epoch)
        start = place * self.plan.questions
        return self._known[1][start : start + self.plan.questions]


class Slots(Dataset[Key]):
    """Keys as they are: what they stand for is sampled when its turn comes, by the weights of then."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Key) -> Key:
        return key


def collate_slots(keys: Sequence[Key]) -> dict[str, Tensor]:
    generations, slots = torch.tensor(keys, dtype=torch.int64).T
    return {"generations": generations, "slots": slots}


@dataclass(frozen=True)
class Group:
    """The outputs of one question, their rewards by function (G, F), and the weighted sum (G,)."""

    rollouts: list[Rollout]
    rewards_GF: Tensor
    total_G: Tensor

    @property
    def spread(self) -> bool:
        return bool(has_spread(self.total_G[None]))


@dataclass
class Generation:
    """Its number, its outputs as tensors (R, ...), what it was like, and some outputs to read."""

    number: int
    tensors: dict[str, Tensor]
    metrics: dict[str, float]
    records: list[dict[str, Any]]

    def take(self, slots: Tensor) -> dict[str, Tensor]:
        return {name: column[slots] for name, column in self.tensors.items()}


class Generator:
    """Makes generations: a pure function of the weights, the run's seed and the generation's number.

    `length` is dr_grpo's constant, measured on the first generation where the configuration has none.
    """

    def __init__(
        self,
        lm: LatentLM,
        method: Method,
        config: GrpoConfig,
        order: Generations,
        seed: int,
        funcs: Mapping[str, rewards.Reward],
    ) -> None:
        self.lm, self.method, self.config, self.order, self.seed = lm, method, config, order, seed
        self.funcs, self.length = dict(funcs), config.dr_grpo_length

    def generate(self, number: int) -> Generation:
        """NonFiniteError where the model's numbers are not finite; ValueError where a reward's are not."""
        started = time.monotonic()
        groups, sampled = self._groups(number)
        seconds = time.monotonic() - started
        rollouts = [each for group in groups for each in group.rollouts]
        total_R = torch.cat([group.total_G for group in groups])
        outputs = rollout.collate(rollouts, self.lm.width)
        cut = torch.tensor([each.completion.truncated for each in rollouts])
        kept = ~cut if self.config.mask_truncated_completions else torch.ones_like(cut)
        lengths = outputs.n_actions() * kept
        if self.length is None:
            self.length = float(outputs.n_actions().double().mean())
        advantages_R = advantages(total_R, self.config.num_generations, self.config.scale_rewards)
        columns = {
            "advantages": advantages_R,
            "weights": output_weights(self.config.loss_type, lengths, self.order.plan, self.length),
            "kept": kept,
            "engine_logps": rollout.engine_logps(
                require_scorable(self.method), rollouts, outputs, self.config.latent_logprob
            ),
        }
        metrics = self._metrics(sampled) | {
            "rollout/seconds": seconds,
            "rollout/completions_per_second": sum(len(group.rollouts) for group in sampled)
            / max(seconds, 1e-9),
        }
        records = self._records(groups, advantages_R.tolist())
        return Generation(number, outputs.tensors() | columns, metrics, records)

    def _groups(self, number: int) -> tuple[list[Group], list[Group]]:
        """Those to learn from, and all that were sampled (more of them with dynamic sampling).

        A group with spread takes the very place of one without, so that no update of the generation is left without.
        """
        asked = self.order.questions(number)
        groups = self._sample(asked, number)
        sampled = list(groups)
        for _ in range(self.config.dynamic_sampling):
            flat = [place for place, group in enumerate(groups) if not group.spread]
            more = self._others(number, asked, len(flat))
            if not more:
                break
            asked, found = asked + more, self._sample(more, number)
            sampled += found
            for place, group in zip(flat, (group for group in found if group.spread), strict=False):
                groups[place] = group
        return groups, sampled

    def _others(self, number: int, asked: Sequence[int], n: int) -> list[int]:
        """So many questions beside those already asked (or as many as there are)."""
        left = sorted(set(range(len(self.order.examples))) - set(asked))
        return Random(seed_from(self.seed, "more", number, len(asked))).sample(left, min(n, len(left)))

    def _sample(self, questions: Sequence[int], number: int) -> list[Group]:
        examples = [self.order.examples[index] for index in questions]
        made = rollout.roll_out(self.lm, self.method, self.config, examples, self.seed, number)
        for each in made:
            if each.completion.reason == "error":
                raise NonFiniteError(
                    f"generation {number}: the model's numbers for {each.example.id} are not finite"
                )
        rewards_RF = rewards.apply(self.funcs, made)
        total_R, G = rewards.combine(rewards_RF, self.config.weights()), self.config.num_generations
        return [
            Group(made[i : i + G], rewards_RF[i : i + G], total_R[i : i + G]) for i in range(0, len(made), G)
        ]

    def _metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of all that was sampled, under TRL's names; `completions/` are answers, `latents/` the thinking."""
        rollouts = [each for group in groups for each in group.rollouts]
        thoughts = torch.tensor([each.completion.length for each in rollouts])
        tokens = torch.tensor([len(each.token_ids) for each in rollouts])
        return {
            **reward_metrics(
                torch.cat([group.rewards_GF for group in groups]),
                list(self.funcs),
                torch.cat([group.total_G for group in groups]),
                self.config.num_generations,
            ),
            **describe(tokens, "completions"),
            "completions/clipped_ratio": share(each.completion.reason == "length" for each in rollouts),
            **describe(thoughts, "latents"),
            "latents/clipped_ratio": share(each.cut for each in rollouts),
        }

    def _records(self, groups: Sequence[Group], advantages_R: Sequence[float]) -> list[dict[str, Any]]:
        """The first outputs as a person reads them."""
        records: list[dict[str, Any]] = []
        for g, group in enumerate(groups):
            for i, each in enumerate(group.rollouts):
                if len(records) == self.config.log_completions:
                    return records
                said = {name: group.rewards_GF[i, f].item() for f, name in enumerate(self.funcs)}
                record = self._record(each) | {
                    "rewards": {name: value for name, value in said.items() if value == value},
                    "reward": group.total_G[i].item(),
                    "advantage": advantages_R[g * self.config.num_generations + i],
                }
                records.append(record)
        return records

    def _record(self, each: Rollout) -> dict[str, Any]:
        completion = each.completion
        readings = retrieval.read(self.lm, completion, NEAREST)
        return {
            "id": each.example.id,
            "sample": completion.request.sample,
            **dataclasses.asdict(completion.request.params),
            "question": each.example.question,
            "thoughts": [
                {
                    "tokens": [near.token for near in reading.neighbours]
                    if reading.token is None
                    else [reading.token],
                    "sigma": reading.sigma,
                    "stop_probability": reading.stop_probability,
                }
                for reading in readings
            ],
            "completion": completion.text,
            "answer": each.example.answer,
            "length": completion.length,
            "truncated": completion.truncated,
        }


def share(flags: Iterator[bool]) -> float:
    """Share of the flags that are set."""
    found = list(flags)
    return sum(found) / len(found)
