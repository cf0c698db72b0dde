"""Rollouts: a group of outputs for each question, through the engine, and what was sampled and how.

The outputs of a question follow one another in the engine's line, so that the question is read once for all of them.
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
from colar.methods.rollouts import LatentLogprob, Outputs
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
        """Whether the thinking ended by the model's choice."""
        return self.completion.length < self.completion.request.decoding.max_latents

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens, EOS included where it came."""
        ended = self.completion.reason == "stop"
        return [*self.completion.token_ids, *([self.eos_id] if ended else [])]

    def logps(self, latent_logprob: LatentLogprob) -> Tensor:
        """The engine's log-prob of each position, (K + 1 + A,): latents, the stop (0 if forced), tokens."""
        completion = self.completion
        stop = completion.stop_info["stop_logp"][None].cpu() if self.stopped else torch.zeros(1)
        return torch.cat([self._latent_logps(latent_logprob), stop, torch.tensor(completion.token_logps)])

    def _latent_logps(self, latent_logprob: LatentLogprob) -> Tensor:
        """log(1 - p[###]) + density of each latent, (K,), of what the method said when it drew them."""
        completion = self.completion
        if completion.latents is None:
            return torch.zeros(0)
        stop_K = torch.stack([info["stop_logp"] for info in completion.info]).cpu()
        density_K = torch.stack([info["latent_logp"] for info in completion.info]).cpu()
        dimensions = completion.latents.shape[1] if latent_logprob == "sum" else 1
        return torch.log(-torch.expm1(stop_K)) + dimensions * density_K


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


def collate(rollouts: Sequence[Rollout], width: int) -> Outputs:
    """Rollouts as tensors on the CPU; `width` is the model's."""
    question, question_lengths = pad([r.question_ids for r in rollouts])
    tokens, token_lengths = pad([r.token_ids for r in rollouts])
    counts = [r.completion.length for r in rollouts]
    thought = [r.completion.latents for r in rollouts if r.completion.latents is not None]
    dtype = thought[0].dtype if thought else torch.float32
    latents = torch.zeros(len(rollouts), max(counts), width, dtype=dtype)
    for row, rollout in enumerate(rollouts):
        if rollout.completion.latents is not None:
            latents[row, : counts[row]] = rollout.completion.latents.cpu()
    decodings = [r.completion.request.decoding for r in rollouts]
    return Outputs(
        question_ids=question,
        question_lengths=question_lengths,
        latents=latents,
        latent_counts=torch.tensor(counts),
        token_ids=tokens,
        token_lengths=token_lengths,
        stopped=torch.tensor([r.stopped for r in rollouts]),
        temperature=torch.tensor([d.temperature for d in decodings], dtype=torch.float64),
        latent_temperature=torch.tensor([d.latent_temperature for d in decodings], dtype=torch.float64),
        params=param_columns([r.completion.request.params for r in rollouts]),
    )


def engine_logps(rollouts: Sequence[Rollout], outputs: Outputs, latent_logprob: LatentLogprob) -> Tensor:
    """The engine's log-probs where `Scores.logps` has the trainer's, (R, N); 0 at forced stops."""
    logps_RN = torch.zeros(len(rollouts), int(outputs.positions().max()))
    for row, rollout in enumerate(rollouts):
        values = rollout.logps(latent_logprob)
        logps_RN[row, : len(values)] = values
    return logps_RN
