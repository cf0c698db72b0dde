"""Rollouts: a group of outputs for each question, through the engine, and what was sampled and how.

The outputs of a question follow one another in the engine's queue, so that the question is read once for all of them.
Every draw is a function of (run seed, generation, example id, sample): a resumed run samples the same, and no output
depends on what is sampled beside it. The model is in eval mode while it samples, and has no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from colar.data.example import Example
from colar.engine.engine import Engine, evaluating
from colar.engine.request import Completion, Request, prompt_ids
from colar.methods import registry
from colar.methods.base import Method, param_columns
from colar.methods.rollouts import LatentLogprob, Rollouts, Scorable
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from
from colar.ops.ragged import pad
from colar.training.grpo.config import GrpoConfig


@dataclass(frozen=True)
class Rollout:
    """One output and its question. The completion holds latents, stop decision, log-probs and text; its request the
    temperatures, limits, seed and sample."""

    example: Example
    question_ids: list[int]
    completion: Completion
    eos_id: int

    @property
    def stopped(self) -> bool:
        """Whether the method chose to end the thinking: neither cut at the limit, nor of a fixed number of thoughts."""
        return bool(self.completion.stop_info)

    @property
    def cut(self) -> bool:
        """Whether the thinking met `max_latents`."""
        return self.completion.length >= self.completion.request.decoding.max_latents

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens, EOS included where it came."""
        ended = self.completion.reason == "stop"
        return [*self.completion.token_ids, *([self.eos_id] if ended else [])]

    def logps(self, method: Scorable, latent_logprob: LatentLogprob) -> Tensor:
        """The engine's log-prob of each position, (K + 1 + A,): thoughts, the stop (0 if forced), tokens."""
        completion = self.completion
        said = list(completion.info)
        if self.stopped:
            said.append(completion.stop_info)
        chosen = torch.zeros(completion.length + 1)
        if said:
            columns = {name: torch.stack([info[name] for info in said]).cpu() for name in said[0]}
            stopped = torch.arange(len(said)) == completion.length
            chosen[: len(said)] = method.sampled_logps(columns, stopped, latent_logprob)
        return torch.cat([chosen, torch.tensor(completion.token_logps)])


def requests(
    method: Method, config: GrpoConfig, examples: Sequence[Example], seed: int, generation: int
) -> list[Request]:
    """G requests a question, question by question."""
    made = []
    for example in examples:
        own = seed_from(seed, "rollout", generation, example.id)
        for sample in range(config.num_generations):
            params = draw_params(method, config, own, sample)
            made.append(
                Request(example.id, example.question, params, config.decoding, own, sample, keep_latents=True)
            )
    return made


def draw_params(method: Method, config: GrpoConfig, seed: int, sample: int) -> Any:
    """The per-request values of an output: its factor is the group's, or its own."""
    factors = config.compression_factors
    if factors is None:
        return method.Params()
    drawn_by = (seed, "factor") if config.factor_drawn_per == "group" else (seed, "factor", sample)
    return registry.make_params(method, {"compression_factor": Random(seed_from(*drawn_by)).choice(factors)})


def roll_out(
    lm: LatentLM, method: Method, config: GrpoConfig, examples: Sequence[Example], seed: int, generation: int
) -> list[Rollout]:
    """The outputs of these questions, G each, question by question.

    A fresh engine: what it sampled before must not decide the shape of its cache, and with it the last bit of a sum.
    """
    asked = requests(method, config, examples, seed, generation)
    with evaluating(lm), lm.merged() if config.merge_adapter else contextlib.nullcontext():
        made = Engine(lm, method, max_batch=config.max_batch).generate(asked)
    return [
        Rollout(
            examples[i // config.num_generations],
            prompt_ids(lm, method, completion.request),
            completion,
            lm.template.eos_id,
        )
        for i, completion in enumerate(made)
    ]


def collate(rollouts: Sequence[Rollout], width: int) -> Rollouts:
    """Rollouts as tensors on the CPU; `width` is the model's."""
    question, question_lengths = pad([r.question_ids for r in rollouts])
    thoughts, thought_counts = pad([r.completion.thought_ids for r in rollouts])
    tokens, token_lengths = pad([r.token_ids for r in rollouts])
    decodings = [r.completion.request.decoding for r in rollouts]
    return Rollouts(
        question_ids=question,
        question_lengths=question_lengths,
        thought_ids=thoughts,
        latents=_latents(rollouts, thoughts.shape[1], width),
        thought_counts=thought_counts,
        token_ids=tokens,
        token_lengths=token_lengths,
        stopped=torch.tensor([r.stopped for r in rollouts]),
        temperature=torch.tensor([d.temperature for d in decodings], dtype=torch.float64),
        latent_temperature=torch.tensor([d.latent_temperature for d in decodings], dtype=torch.float64),
        params=param_columns([r.completion.request.params for r in rollouts]),
    )


def _latents(rollouts: Sequence[Rollout], longest: int, width: int) -> Tensor:
    """The latents as they were fed, (R, K, D), zero beyond a row's own; D = 0 where every thought is a token."""
    kept = [r.completion.latents for r in rollouts if r.completion.latents is not None]
    ids: set[int] = set()
    for rollout in rollouts:
        ids.update(rollout.completion.thought_ids)
    if ids and -1 not in ids:
        width = 0
    dtype = kept[0].dtype if kept else torch.float32
    latents = torch.zeros(len(rollouts), longest, width, dtype=dtype)
    for row, rollout in enumerate(rollouts):
        if width and rollout.completion.latents is not None:
            latents[row, : rollout.completion.length] = rollout.completion.latents.cpu()
    return latents


def engine_logps(
    method: Scorable, rollouts: Sequence[Rollout], tensors: Rollouts, latent_logprob: LatentLogprob
) -> Tensor:
    """The engine's log-probs where `Scores.logps` has the trainer's, (R, N); 0 at forced stops."""
    logps_RN = torch.zeros(len(rollouts), int(tensors.positions().max()))
    for row, rollout in enumerate(rollouts):
        values = rollout.logps(method, latent_logprob)
        logps_RN[row, : len(values)] = values
    return logps_RN
