"""The work of the generation benchmarks, and the systems that do it.

A `Cell` says how much, a `Job` is its prompts; `ours`, `hf_cot` and `published` do one and return their times, and
`floor` times the bare matrix products of a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import base
from colar.methods.base import ThinkState, Thought
from colar.model.latent_lm import LatentLM

ANSWER = 4
"""Tokens of an answer."""
FACTOR = 5
ALL = ("colar5", "cot", "hf-cot", "published")
"""Systems that a cell is measured with, unless it names others."""


@dataclass(frozen=True)
class Cell:
    """One piece of work: `questions` in a batch of `slots`, each `samples` times, with chains of `length` tokens
    (None: as long as the questions' own)."""

    name: str
    slots: int
    questions: int
    length: int | None
    samples: int = 1
    systems: tuple[str, ...] = ALL


class Unending(base.Method):
    """A method that never stops by itself: `max_latents` ends every chain where it should."""

    name = "unending"

    def __init__(self, method: Any) -> None:
        super().__init__(method.config)
        self.method, self.Params = method, method.Params

    def prompt(self, params: Any) -> str:
        return str(self.method.prompt(params))

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        thought = self.method.think(lm, state)
        return Thought(thought.embeds, torch.zeros_like(thought.done), thought.token_ids, thought.info)

    def encode(self, *args: Any) -> Any:
        raise NotImplementedError("for inference")

    loss = encode


@dataclass
class Job:
    """A cell's rows: prompts and how many embeddings each emits while thinking."""

    requests: list[Request]
    ids: list[list[int]]
    lengths: list[int]


def make_job(lm: LatentLM, method: Any, examples: Sequence[Any], cell: Cell, factor: int) -> Job:
    requests, lengths = [], []
    for index in range(cell.questions):
        example = examples[index % len(examples)]
        length = cell.length or sum(map(len, lm.template.steps(example.steps)))
        for sample in range(cell.samples):
            decoding = Decoding(max_latents=-(-length // factor), max_completion_length=ANSWER)
            params = method.Params(**({"compression_factor": factor} if factor > 1 else {}))
            requests.append(
                Request(f"{index}", example.question, params, decoding, seed=index, sample=sample)
            )
            lengths.append(decoding.max_latents)
    ids = [lm.template.question(r.question, method.prompt(r.params)) for r in requests]
    return Job(requests, ids, lengths)


def ours(lm: LatentLM, method: Any, cell: Cell, job: Job, compile: bool = True) -> dict[str, float]:
    """The engine. A step counts where nobody joined, and all slots were busy if ever they are."""
    engine = Engine(lm, Unending(method), cell.slots, compile=compile)
    started = time.perf_counter()
    for request in job.requests:
        engine.submit(request)
    steps, first, thoughts = [], {}, []
    while engine.busy:
        before, waiting = time.perf_counter(), len(engine.scheduler)
        rows = 0 if engine.running is None else len(engine.running)
        events = engine.step()
        now = time.perf_counter()
        if len(engine.scheduler) == waiting and rows == min(cell.slots, len(job.requests)):
            steps.append(now - before)
        for event in events:
            if event.kind == "thought":
                thoughts.append(now - started)
            elif event.kind == "token":
                first.setdefault((event.request.id, event.request.sample), now - started)
            assert event.kind != "finished" or event.reason == "length", "an answer ended by itself"
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "first_answer_token_seconds": median(first.values()),
        **thinking_times(steps, thoughts[0], thoughts[-1]),
    }


def thinking_times(steps: Sequence[float], first: float, last: float) -> dict[str, float]:
    """From the times at which the first and the last thought were there."""
    return {
        "ms_per_step": 1e3 * median(steps),
        "thinking_seconds": last - first + median(steps),
        "reading_and_thinking_seconds": last,
    }


class Times(StoppingCriteria):  # type: ignore[misc]
    """When each token of `generate` was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def hf_cot(lm: LatentLM, method: Any, cell: Cell, job: Job) -> dict[str, float]:
    """transformers' `generate`: left-padded, until the longest row has its answer."""
    ids, mask = left_padded(job.ids, lm.device)
    n, times = max(job.lengths) + 1 + ANSWER, Times()
    config = lm.causal_lm.generation_config
    config.eos_token_id = None  # the work is given
    started = time.perf_counter()
    lm.causal_lm.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([times]),
    )
    seconds = time.perf_counter() - started
    steps = [b - a for a, b in zip(times.times, times.times[1:], strict=False)]
    return {
        "seconds": seconds,
        "first_answer_token_seconds": median(times.times[length + 1] - started for length in job.lengths),
        **thinking_times(steps, times.times[0] - started, times.times[max(job.lengths) - 1] - started),
    }


def published(lm: LatentLM, method: Any, cell: Cell, job: Job) -> dict[str, float]:
    """The latent loop as published, with our weights and heads."""
    ids, mask = left_padded(job.ids, lm.device)
    question = lm.embed(ids)
    fed, steps = [question], []
    started = time.perf_counter()
    out = lm.causal_lm(inputs_embeds=question, attention_mask=mask, output_hidden_states=True, use_cache=True)
    read = time.perf_counter() - started
    for _ in range(max(job.lengths)):
        before = time.perf_counter()
        out.logits[:, -1].argmax(-1)  # stop or go on
        mean, _ = lm.extra["latent_head"](out.hidden_states[-1][:, -1])
        fed.append((mean * method.sigma_e)[:, None].to(question))
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        out = lm.causal_lm(
            inputs_embeds=fed[-1],
            attention_mask=mask,
            past_key_values=out.past_key_values,
            output_hidden_states=True,
            use_cache=True,
        )
        steps.append(time.perf_counter() - before)
    thinking = time.perf_counter() - started
    separator = lm.embed(torch.full((len(job.ids), 1), lm.template.separator_id, device=lm.device))
    times = Times()
    lm.causal_lm.generation_config.eos_token_id = None
    lm.causal_lm.generate(
        inputs_embeds=torch.cat([*fed, separator], dim=1),
        attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
        max_new_tokens=ANSWER,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([times]),
    )
    return {
        "seconds": time.perf_counter() - started,
        "first_answer_token_seconds": times.times[0] - started,
        **thinking_times(steps, read + steps[0], thinking),
    }


def floor(lm: LatentLM, n: int) -> float:
    """Milliseconds of a step's matrix products with n rows, each weight read once, LM head included."""
    head = lm.causal_lm.get_output_embeddings().weight
    embedding = lm.causal_lm.get_input_embeddings().weight
    weights = [p for p in lm.causal_lm.parameters() if p.ndim == 2 and p is not embedding and p is not head]
    weights.append(head)
    inputs = {w.shape[1]: torch.randn(n, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        if lm.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 1e3 * median(seconds[2:])


def left_padded(ids: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=device)
    return padded, mask
