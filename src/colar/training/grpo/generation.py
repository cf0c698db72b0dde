"""One generation: the outputs that were sampled for its questions, as tensors to learn from and as text to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar.look import retrieval
from colar.model.latent_lm import LatentLM
from colar.training.grpo.loss import has_spread, length_metrics, reward_metrics
from colar.training.grpo.rollout import Output

NEAREST = 3
"""Tokens that a latent is read as in completions.jsonl."""


@dataclass(frozen=True)
class Group:
    """The G outputs of one question, their rewards by each of F functions (G, F), and the weighted sum (G,)."""

    outputs: list[Output]
    rewards_GF: Tensor
    total_G: Tensor

    @property
    def spread(self) -> bool:
        """Whether the rewards differ: without spread there is nothing to learn from the group."""
        return bool(has_spread(self.total_G[None]))


@dataclass
class Generation:
    """The sampled outputs of one turn.

    `tensors` are `Rollouts.tensors()` and the columns of `GrpoObjective`, (R, ...). `metrics` are logged, `records`
    are outputs to read.
    """

    number: int
    tensors: dict[str, Tensor]
    metrics: dict[str, float]
    records: list[dict[str, Any]]

    def take(self, slots: Tensor) -> dict[str, Tensor]:
        """The rows of a batch."""
        return {name: column[slots] for name, column in self.tensors.items()}


def all_outputs(groups: Sequence[Group]) -> list[Output]:
    """The outputs of all groups, group by group."""
    outputs: list[Output] = []
    for group in groups:
        outputs += group.outputs
    return outputs


def sampling_metrics(groups: Sequence[Group], reward_names: Sequence[str]) -> dict[str, float]:
    """Rewards and lengths under TRL's names; `completions/` are answers, `latents/` the thinking."""
    outputs = all_outputs(groups)
    metrics = reward_metrics(
        torch.cat([group.rewards_GF for group in groups]),
        list(reward_names),
        torch.cat([group.total_G for group in groups]),
        num_generations=len(groups[0].outputs),
    )

    answer_lengths = torch.tensor([len(output.token_ids) for output in outputs])
    answer_cut = [output.completion.reason == "length" for output in outputs]
    metrics.update(length_metrics(answer_lengths, "completions"))
    metrics["completions/clipped_ratio"] = sum(answer_cut) / len(outputs)

    thought_counts = torch.tensor([output.completion.length for output in outputs])
    thinking_cut = [output.cut for output in outputs]
    metrics.update(length_metrics(thought_counts, "latents"))
    metrics["latents/clipped_ratio"] = sum(thinking_cut) / len(outputs)
    return metrics


def records_to_read(
    lm: LatentLM, groups: Sequence[Group], reward_names: Sequence[str], advantages_R: Tensor, limit: int
) -> list[dict[str, Any]]:
    """The first `limit` outputs as a person reads them, with their rewards and advantages."""
    # All advantages, group by group, as the loop below meets the outputs.
    advantages = iter(advantages_R.tolist())
    records: list[dict[str, Any]] = []
    for group in groups:
        for i, output in enumerate(group.outputs):
            if len(records) == limit:
                return records
            record = _record(lm, output)
            record["rewards"] = _given(reward_names, group.rewards_GF[i])
            record["reward"] = group.total_G[i].item()
            record["advantage"] = next(advantages)
            records.append(record)
    return records


def _given(names: Sequence[str], rewards_F: Tensor) -> dict[str, float]:
    """An output's rewards by the functions that had one for it (nan: none)."""
    silent_F = rewards_F.isnan()
    return {name: rewards_F[f].item() for f, name in enumerate(names) if not silent_F[f]}


def _record(lm: LatentLM, output: Output) -> dict[str, Any]:
    """Question, thoughts and answer of an output, every latent read as its nearest tokens."""
    completion = output.completion
    thoughts = []
    # A latent has no token: its nearest ones are shown. A CoT's thought is shown as it is.
    for reading in retrieval.read_thoughts(lm, completion, NEAREST):
        nearest = [near.token for near in reading.neighbours]
        tokens = nearest if reading.token is None else [reading.token]
        thought = {"tokens": tokens, "sigma": reading.sigma, "stop_probability": reading.stop_probability}
        thoughts.append(thought)
    return {
        "id": output.example.id,
        "sample": completion.request.sample,
        **dataclasses.asdict(completion.request.params),
        "question": output.example.question,
        "thoughts": thoughts,
        "completion": completion.text,
        "answer": output.example.answer,
        "length": completion.length,
        "truncated": completion.truncated,
    }
