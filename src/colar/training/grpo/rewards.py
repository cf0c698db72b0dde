"""Rewards: plain functions `f(completions, **columns) -> list[float | None]`, one number an output.

`completions` are the answers' texts. The columns are lists of the same length: of the example `id`, `question`,
`answer`, `answer_type`; of the output `length` (#L), `max_latents`, `truncated`, `completion_ids`, and the
per-request values (`compression_factor`). A function takes what it needs and swallows the rest with `**columns`;
None means that it has nothing to say of an output (TRL's convention).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colar.data.answers import judge
from colar.training.grpo.rollout import Rollout

Reward = Callable[..., Sequence[float | None]]


def accuracy(
    completions: Sequence[str], answer: Sequence[str], answer_type: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1 where the evaluation's judge finds the answer right, else 0 ("r_i to 1 when an answer is correctly predicted
    and to 0 otherwise")."""
    triples = zip(completions, answer, answer_type, strict=True)
    return [float(judge(text, gold, kind).correct) for text, gold, kind in triples]


def length_penalty(
    completions: Sequence[str], length: Sequence[int], max_latents: Sequence[int], **columns: Any
) -> list[float | None]:
    """-#L / max_latents: from 0 for no thinking to -1 at the limit, whether the answer is right or not."""
    return [-thoughts / most for thoughts, most in zip(length, max_latents, strict=True)]


REWARDS: dict[str, Reward] = {"accuracy": accuracy, "length_penalty": length_penalty}


def named(names: Sequence[str]) -> dict[str, Reward]:
    """Functions by their names. ValueError for one that there is not."""
    for name in names:
        if name not in REWARDS:
            close = difflib.get_close_matches(name, REWARDS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"grpo.reward_funcs: unknown reward {name!r}{hint}; one of {', '.join(REWARDS)}")
    return {name: REWARDS[name] for name in names}


def apply(funcs: Mapping[str, Reward], rollouts: Sequence[Rollout]) -> Tensor:
    """(R outputs, F functions) float64; nan where a function has nothing to say.

    ValueError where a function returns another number of values, one that is infinite or NaN, or where none says
    anything of an output.
    """
    completions, columns = [r.completion.text for r in rollouts], columns_of(rollouts)
    rewards_RF = torch.full((len(rollouts), len(funcs)), math.nan, dtype=torch.float64)
    for f, (name, func) in enumerate(funcs.items()):
        values = list(func(completions, **columns))
        if len(values) != len(rollouts):
            raise ValueError(f"reward {name} returned {len(values)} values for {len(rollouts)} completions")
        for r, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"reward {name} returned {value} for {rollouts[r].example.id}: not finite")
            rewards_RF[r, f] = math.nan if value is None else value
    silent = rewards_RF.isnan().all(1).nonzero()[:, 0].tolist()
    if silent:
        raise ValueError(f"no reward function has a value for {rollouts[silent[0]].example.id}")
    return rewards_RF


def combine(rewards_RF: Tensor, weights: Sequence[float]) -> Tensor:
    """Weighted sum of what the functions say, (R,); what one does not say counts nothing."""
    return (rewards_RF * torch.tensor(weights, dtype=torch.float64)).nansum(1)


def columns_of(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """What reward functions may ask for."""
    examples, completions = [r.example for r in rollouts], [r.completion for r in rollouts]
    columns: dict[str, list[Any]] = {
        name: [getattr(example, name) for example in examples]
        for name in ("id", "question", "answer", "answer_type")
    }
    columns |= {
        "length": [c.length for c in completions],
        "max_latents": [c.request.decoding.max_latents for c in completions],
        "truncated": [c.truncated for c in completions],
        "completion_ids": [c.token_ids for c in completions],
    }
    params = [dataclasses.asdict(c.request.params) for c in completions]
    return columns | {name: [p[name] for p in params] for name in params[0]}
