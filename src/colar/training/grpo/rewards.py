"""Rewards: plain functions `f(completions, **columns) -> list[float]`, one number per output.

`completions` are the answers' texts. The columns are lists of the same length: `example`, and its `id`, `question`,
`answer`, `answer_type`; the output's `length` (#L), `max_latents`, `truncated`, `completion_ids`; and the per-request
values (`compression_factor`). A function names the columns that it needs, and collects the rest in `**columns`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from colar import checks
from colar.data.example import Example
from colar.data.judge import verdict
from colar.training.grpo.rollout import Output

Reward = Callable[..., Sequence[float]]


def accuracy(completions: Sequence[str], example: Sequence[Example], **columns: Any) -> list[float]:
    """1 where the evaluation's judge finds the answer right, else 0 ("r_i to 1 when an answer is correctly predicted
    and to 0 otherwise")."""
    return [float(verdict(text, row).correct) for text, row in zip(completions, example, strict=True)]


def length_penalty(
    completions: Sequence[str], length: Sequence[int], max_latents: Sequence[int], **columns: Any
) -> list[float]:
    """-#L / max_latents: from 0 for no thinking to -1 at the limit, whether the answer is right or not."""
    return [-thoughts / most for thoughts, most in zip(length, max_latents, strict=True)]


REWARDS: dict[str, Reward] = {"accuracy": accuracy, "length_penalty": length_penalty}


def by_name(names: Sequence[str]) -> dict[str, Reward]:
    """Functions by their names. ValueError for an unknown name."""
    checks.check_known("reward in grpo.reward_funcs:", names, REWARDS)
    return {name: REWARDS[name] for name in names}


def apply(reward_funcs: Mapping[str, Reward], outputs: Sequence[Output]) -> Tensor:
    """Rewards (R outputs, F functions), float64. ValueError for a wrong number of values, or one that is not finite."""
    texts = [output.completion.text for output in outputs]
    columns = columns_of(outputs)
    rewards_FR = []
    for name, func in reward_funcs.items():
        values = list(func(texts, **columns))
        if len(values) != len(outputs):
            raise ValueError(f"reward {name} returned {len(values)} values for {len(outputs)} completions")
        for value, output in zip(values, outputs, strict=True):
            if not (isinstance(value, SupportsFloat) and math.isfinite(value)):
                raise ValueError(
                    f"reward {name} returned {value} for {output.example.id}: it must return a finite number"
                )
        rewards_FR.append(torch.tensor(values, dtype=torch.float64))
    return torch.stack(rewards_FR, 1)


def columns_of(outputs: Sequence[Output]) -> dict[str, list[Any]]:
    """The columns that reward functions may use."""
    columns: dict[str, list[Any]] = {"example": [output.example for output in outputs]}
    for name in ("id", "question", "answer", "answer_type"):
        columns[name] = [getattr(output.example, name) for output in outputs]
    completions = [output.completion for output in outputs]
    columns["length"] = [completion.length for completion in completions]
    columns["max_latents"] = [completion.request.decoding.max_latents for completion in completions]
    columns["truncated"] = [completion.truncated for completion in completions]
    columns["completion_ids"] = [completion.token_ids for completion in completions]
    for name in dataclasses.asdict(completions[0].request.params):
        columns[name] = [getattr(completion.request.params, name) for completion in completions]
    return columns
