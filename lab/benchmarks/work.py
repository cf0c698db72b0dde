"""The work of the generation benchmarks, and the systems that do it.

A `Cell` says how much work, a `Job` is its prompts. `ours`, `hf_cot` and `published` do one job and return their
times. All systems do the same work: chains end at a given number of embeddings and answers at `ANSWER` tokens, never
by themselves.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import shared
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from colar.data import sources
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import base, pretrained, registry
from colar.methods.thinking import ThinkState, Thought
from colar.model import backbones
from colar.model.latent_lm import LatentLM, LoraSettings

ANSWER = 4
"""Tokens of an answer."""
NO_TOKEN = -2
"""No token has this id, and no place without a token either."""
FACTOR = 5
"""The compression factor at which latents are compared with tokens."""


def load_model(
    backbone: str,
    dtype: str,
    method: str,
    device: str = "cpu",
    lora: LoraSettings | None = None,
    config: Mapping[str, Any] | None = None,
    chains: Sequence[Example] = (),
) -> tuple[LatentLM, Any]:
    """A model with untrained modules of a method, in eval mode: its speed is that of a trained one.

    `config` is the method's. `chains` are training rows, for a method that counts something in them.
    """
    lm = LatentLM.from_backbone(backbones.load(backbone, dtype, seed=0), lora=lora).to(device).eval()
    # No token has this id: answers end at their limit.
    lm.template.eos_id = -1
    made = registry.build(method, config)
    pretrained.attach(lm, made, 0)
    made.prepare(lm, chains)
    return lm, made


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_questions(source: str, data_dir: Path | None, limit: int | None = None) -> list[Example]:
    """Test questions that have a reference chain, out of the first `limit`."""
    found = sources.load_examples(source, "test", data_dir=data_dir, limit=limit, skip_malformed=True)
    return [example for example in found if example.steps]


def load_chains(source: str, data_dir: Path | None) -> list[Example]:
    """All training rows."""
    return list(sources.load_examples(source, "train", data_dir=data_dir, skip_malformed=True))


@dataclass(frozen=True)
class Cell:
    """One piece of work: `questions` answered at the same time.

    Chains have `length` tokens; None: as many as the questions' own.
    """

    name: str
    questions: int
    length: int | None


class Unending(base.Method):
    """A method that never stops by itself: `max_latents` ends every chain where it should."""

    name = "unending"

    def __init__(self, method: Any) -> None:
        super().__init__(method.config)
        self.method = method
        self.Params = method.Params

    def speed_text(self, params: Any) -> str:
        return str(self.method.speed_text(params))

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        tokens = "group_decoder" in lm.extra
        thought = self._whole_group(lm, state) if tokens else self.method.think(lm, state)
        return Thought(thought.embeds, torch.zeros_like(thought.done), thought.token_ids, thought.info)

    def _whole_group(self, lm: LatentLM, state: ThinkState) -> Thought:
        """A thought of the sequential head, while no token is the separator: that would end its group early."""
        template = lm.template
        separator_id = template.separator_id
        template.separator_id = NO_TOKEN
        try:
            thought: Thought = self.method.think(lm, state)
        finally:
            template.separator_id = separator_id
        return thought

    def encode(self, *args: Any) -> Any:
        raise NotImplementedError("for inference")

    loss = encode


@dataclass
class Job:
    """A cell's rows: prompts and how many embeddings each emits while thinking."""

    requests: list[Request]
    ids: list[list[int]]
    lengths: list[int]


def make_job(
    lm: LatentLM, method: Any, examples: Sequence[Example], cell: Cell, compression_factor: int
) -> Job:
    """The greedy requests of a cell; a method without a compression factor is requested at its default, factor 1."""
    requests = []
    lengths = []
    params = method.Params(compression_factor) if compression_factor > 1 else method.Params()
    for index in range(cell.questions):
        example = examples[index % len(examples)]
        tokens = cell.length or chain_tokens(lm, example)
        length = -(-tokens // compression_factor)
        decoding = Decoding(max_latents=length, max_completion_length=ANSWER)
        requests.append(Request(f"{index}", example.question, params, decoding, seed=index))
        lengths.append(length)
    ids = [lm.template.question(request.question, method.speed_text(request.params)) for request in requests]
    return Job(requests, ids, lengths)


def chain_tokens(lm: LatentLM, example: Example) -> int:
    """Tokens of the reference chain."""
    return sum(len(step) for step in lm.template.steps(example.steps))


def ours(lm: LatentLM, method: Any, cell: Cell, job: Job, cuda_graphs: bool = False) -> dict[str, float]:
    """The engine. With `cuda_graphs` the job is done once before: an engine records its graphs when it is new.

    A step is timed where no request joined and every row was busy: prefills and the end of the queue are not steps of
    this batch size.
    """
    engine = Engine(lm, Unending(method), cell.questions, cuda_graphs=cuda_graphs)
    if cuda_graphs:
        engine.generate(job.requests)
    decoded = Decoded(engine.lm)
    started = time.perf_counter()
    for request in job.requests:
        engine.submit(request)
    steps: list[float] = []
    cpu_steps: list[float] = []
    thoughts: list[float] = []
    first_token: dict[str, float] = {}
    while engine.busy:
        rows = len(engine.running)
        waiting = len(engine.scheduler.waiting)
        before, cpu_before = time.perf_counter(), time.process_time()
        events = engine.step()
        now = time.perf_counter()
        none_joined = len(engine.scheduler.waiting) == waiting
        if none_joined and rows == len(job.requests):
            steps.append(now - before)
            # Of all threads: on a machine that others use as well it says more than the time that has passed.
            cpu_steps.append(time.process_time() - cpu_before)
        for event in events:
            if event.kind == "thought":
                thoughts.append(now - started)
            elif event.kind == "token":
                first_token.setdefault(event.request.id, now - started)
            assert event.kind != "finished" or event.reason == "length", "an answer ended by itself"
    seconds = time.perf_counter() - started
    decoded.check(job)
    return {
        "seconds": seconds,
        "first_answer_token_seconds": median(first_token.values()),
        "cpu_ms_per_step": 1e3 * median(cpu_steps),
        **thinking_times(steps, thoughts[0], thoughts[-1]),
    }


class Decoded:
    """Counts what the sequential head's decoder does: every thought of a timed run must have had all of its tokens."""

    def __init__(self, lm: LatentLM) -> None:
        self.tokens = 0
        self.counts = "group_decoder" in lm.extra
        if self.counts:
            self.hook = lm.extra["group_decoder"].register_forward_hook(self._count)

    def _count(self, module: Any, given: Any, state_XD: Tensor) -> None:
        self.tokens += state_XD.shape[0]

    def check(self, job: Job) -> None:
        """Each thought has c - 1 tokens behind its first; a row at its limit is asked for one thought more."""
        if not self.counts:
            return
        self.hook.remove()
        expected = 0
        for request, length in zip(job.requests, job.lengths, strict=True):
            expected += (length + 1) * (request.params.compression_factor - 1)
        assert self.tokens == expected, f"{self.tokens} tokens behind a group's first, expected {expected}"


def thinking_times(steps: Sequence[float], first: float, last: float) -> dict[str, float]:
    """Times of thinking, from the times at which the first and the last thought were there."""
    step = median(steps)
    return {
        "ms_per_step": 1e3 * step,
        # The first thought took a step too, which began when the questions were read.
        "thinking_seconds": last - first + step,
        "reading_and_thinking_seconds": last,
    }


class Times(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of every token that `generate` makes; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        shared.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def hf_cot(lm: LatentLM, method: Any, cell: Cell, job: Job, static: bool = False) -> dict[str, float]:
    """transformers' `generate`: left-padded, until the longest row has its answer.

    With a `static` cache, whose step transformers compiles on a GPU, the job is done once before.
    """
    ids, mask = left_padded(job.ids, lm.device)
    longest = max(job.lengths)
    # Without an EOS token `generate` does all of the work that is given.
    lm.causal_lm.generation_config.eos_token_id = None
    for _ in range(2 if static else 1):
        times = Times()
        started = time.perf_counter()
        lm.causal_lm.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest + 1 + ANSWER,  # the chain, the separator, the answer
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([times]),
            cache_implementation="static" if static else None,
        )
        shared.synchronize()
        seconds = time.perf_counter() - started
    since_start = [at - started for at in times.times]
    steps = [later - earlier for earlier, later in itertools.pairwise(since_start)]
    return {
        "seconds": seconds,
        # A row's answer begins after its own chain and its separator, while longer rows still think.
        "first_answer_token_seconds": median(since_start[length + 1] for length in job.lengths),
        **thinking_times(steps, since_start[0], since_start[longest - 1]),
    }


def published(lm: LatentLM, method: Any, cell: Cell, job: Job) -> dict[str, float]:
    """The latent loop as published, with our weights and heads."""
    ids, mask = left_padded(job.ids, lm.device)
    question = lm.embed(ids)
    fed = [question]
    steps: list[float] = []
    started = time.perf_counter()
    out = lm.causal_lm(inputs_embeds=question, attention_mask=mask, output_hidden_states=True, use_cache=True)
    read = time.perf_counter() - started
    # A static batch: every row thinks until the longest chain is done.
    for _ in range(max(job.lengths)):
        before = time.perf_counter()
        # Whether to stop, which the loop must know. What it says is not used: the length is given.
        out.logits[:, -1].argmax(-1).tolist()
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
    shared.synchronize()
    thinking = time.perf_counter() - started

    # The answer: `generate` reads questions, latents and separators once more, without the cache.
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
    shared.synchronize()
    return {
        "seconds": time.perf_counter() - started,
        "first_answer_token_seconds": times.times[0] - started,
        **thinking_times(steps, read + steps[0], thinking),
    }


def left_padded(ids: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, (B, longest) each, padding on the left."""
    longest = max(len(row) for row in ids)
    padded = []
    mask = []
    for row in ids:
        padding = [0] * (longest - len(row))
        padded.append(padding + row)
        mask.append(padding + [1] * len(row))
    return torch.tensor(padded, device=device), torch.tensor(mask, device=device)
