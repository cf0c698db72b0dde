"""The batched engine: prefill, think and answer with one key-value cache that is never thrown away.

Questions are padded on the left, so that every row's next embedding goes into the same cache column, whatever
it is: a latent, a token of the chain, the separator that ends the thinking, a token of the answer. Rows in
different phases therefore share each forward. A finished row leaves the batch as soon as it is worth a copy.

    column     0 1 2 3 4 | 5  6   7   8
    row 0      . . q q # | l1 l2  ###  a       thinks twice, then answers
    row 1      q q q q # | l1 ###  a  EOS      thinks once

`stream` yields events as they happen and `generate` is a fold over it. Admission of waiting requests into a
running batch, and speed, are not yet here: a batch runs until its last row is done.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from colar.engine.request import Completion, Event, Request, fold, prompt_ids
from colar.methods.base import Method, ThinkState, Thought, param_columns
from colar.model.latent_lm import LatentLM
from colar.ops import noise
from colar.ops.sampling import sample_tokens

KEEP_SHARE = 0.75
"""The batch is compacted when fewer than this share of its rows are still running."""


@dataclass
class Rows:
    """The running rows as columns; index i of each belongs to `requests[i]`."""

    requests: list[Request]
    hidden_BD: Tensor
    position_B: Tensor
    thinking_B: Tensor
    running_B: Tensor
    n_thoughts_B: Tensor
    n_tokens_B: Tensor
    step_B: Tensor
    seed_B: Tensor
    sample_B: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    latent_temperature_B: Tensor
    max_latents_B: Tensor
    max_tokens_B: Tensor
    params: dict[str, Tensor]
    seconds: list[float]
    cut: list[bool]

    def take(self, keep: Tensor) -> Rows:
        """The rows at these indices."""
        index = keep.tolist()
        taken: dict[str, Any] = {"params": {name: value[keep] for name, value in self.params.items()}}
        for name, value in vars(self).items():
            if name != "params":
                taken[name] = value[keep] if isinstance(value, Tensor) else [value[i] for i in index]
        return Rows(**taken)

    def charge(self, seconds: float) -> None:
        """Divide the time of a step between the rows that ran in it."""
        running = self.running_B.tolist()
        share = seconds / sum(running)
        self.seconds = [spent + share * ran for spent, ran in zip(self.seconds, running, strict=True)]


class Engine:
    """Answers requests with one model and its method, `max_batch` at a time."""

    def __init__(self, lm: LatentLM, method: Method, max_batch: int = 32) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be 1 or more, got {max_batch}")
        self.lm, self.method, self.max_batch = lm, method, max_batch

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        # One object for each: events name their request.
        requests = [dataclasses.replace(request) for request in requests]
        by_request = {id(c.request): c for c in fold(self.lm, self.stream(requests))}
        return [by_request[id(request)] for request in requests]

    @torch.no_grad()
    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Events of all requests as they happen. All requests are checked before the first forward."""
        prompts = [(request, prompt_ids(self.lm, self.method, request)) for request in requests]
        prompts.sort(key=lambda pair: len(pair[1]))
        was_training = self.lm.training
        self.lm.eval()
        try:
            for start in range(0, len(prompts), self.max_batch):
                yield from self._run(prompts[start : start + self.max_batch])
        finally:
            self.lm.train(was_training)

    def _run(self, prompts: list[tuple[Request, list[int]]]) -> Iterator[Event]:
        started = time.perf_counter()
        cache = DynamicCache(config=self.lm.config)
        rows, mask_BT = self._prefill(prompts, cache)
        while True:
            embeds_BD, events = self._next(rows)
            rows.charge(time.perf_counter() - started)
            finished = [i for i, event in events if event.kind == "finished"]
            for i, event in events:
                done = event.kind == "finished"
                yield dataclasses.replace(event, seconds=rows.seconds[i]) if done else event
            started = time.perf_counter()  # what the reader of the events did with them is not ours
            rows.running_B[finished] = False
            n_running = int(rows.running_B.sum())
            if not n_running:
                return
            if n_running < KEEP_SHARE * len(rows.requests):
                keep = rows.running_B.nonzero()[:, 0]
                rows, embeds_BD, mask_BT = rows.take(keep), embeds_BD[keep], mask_BT[keep]
                cache.batch_select_indices(keep)
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(mask_BT.shape[0], 1)], dim=1)
            hidden_B1D = self.lm.hidden(embeds_BD[:, None], mask_BT, rows.position_B[:, None], cache)
            rows.hidden_BD = hidden_B1D[:, -1]
            # A row that is done stays where it is: it must not count on past the model's positions.
            rows.position_B = rows.position_B + rows.running_B.long()
            rows.step_B = rows.step_B + 1

    def _prefill(self, prompts: list[tuple[Request, list[int]]], cache: DynamicCache) -> tuple[Rows, Tensor]:
        device = self.lm.device
        longest = max(len(ids) for _, ids in prompts)
        ids_BT = torch.tensor([[0] * (longest - len(ids)) + ids for _, ids in prompts], device=device)
        mask_BT = torch.tensor(
            [[0] * (longest - len(ids)) + [1] * len(ids) for _, ids in prompts], device=device
        )
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        last_BD = self.lm.hidden(self.lm.embed(ids_BT), mask_BT, positions_BT, cache)[:, -1]
        requests = [request for request, _ in prompts]

        def whole(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=device, dtype=torch.int64)

        def real(name: str) -> Tensor:
            values = [getattr(request.decoding, name) for request in requests]
            return torch.tensor(values, device=device, dtype=torch.float64)

        zeros = whole(0 for _ in requests)
        rows = Rows(
            requests=requests,
            hidden_BD=last_BD,
            position_B=mask_BT.sum(1),
            thinking_B=zeros == 0,
            running_B=zeros == 0,
            n_thoughts_B=zeros.clone(),
            n_tokens_B=zeros.clone(),
            step_B=zeros.clone(),
            seed_B=whole(request.seed for request in requests),
            sample_B=whole(request.sample for request in requests),
            temperature_B=real("temperature"),
            top_p_B=real("top_p"),
            latent_temperature_B=real("latent_temperature"),
            max_latents_B=whole(request.decoding.max_latents for request in requests),
            max_tokens_B=whole(request.decoding.max_completion_length for request in requests),
            params={k: v.to(device) for k, v in param_columns([r.params for r in requests]).items()},
            seconds=[0.0] * len(requests),
            cut=[False] * len(requests),
        )
        return rows, mask_BT

    def _next(self, rows: Rows) -> tuple[Tensor, list[tuple[int, Event]]]:
        """What every row feeds next, (B, D), and what happened in choosing it."""
        embeds_BD = torch.zeros_like(rows.hidden_BD)
        events: list[tuple[int, Event]] = []
        answering = (~rows.thinking_B & rows.running_B).nonzero()[:, 0]
        thinking = (rows.thinking_B & rows.running_B).nonzero()[:, 0]
        if len(answering):
            events += self._answer(rows, answering, embeds_BD)
        if len(thinking):
            events += self._think(rows, thinking, embeds_BD)
        return embeds_BD, events

    def _think(self, rows: Rows, at: Tensor, embeds_BD: Tensor) -> list[tuple[int, Event]]:
        """Rows `at` take a thinking step; those that are done, or at their limit, get the separator."""
        cut_B = rows.n_thoughts_B[at] >= rows.max_latents_B[at]
        thought = self.method.think(self.lm, self._state(rows, at))
        done_B = thought.done | cut_B
        separator = self.lm.embed(torch.tensor(self.lm.template.separator_id, device=at.device))
        embeds_BD[at] = torch.where(done_B[:, None], separator.to(embeds_BD), thought.embeds.to(embeds_BD))
        rows.thinking_B[at] = ~done_B
        rows.n_thoughts_B[at] += (~done_B).long()
        events = []
        for j, (i, done, cut) in enumerate(zip(at.tolist(), done_B.tolist(), cut_B.tolist(), strict=True)):
            rows.cut[i] = rows.cut[i] or cut
            if not done:
                events.append((i, self._thought_event(rows.requests[i], thought, j)))
        return events

    def _thought_event(self, request: Request, thought: Thought, j: int) -> Event:
        token_id = int(thought.token_ids[j])
        if not request.keep_latents:
            return Event(request, "thought", token_id)
        info = {name: column[j] for name, column in thought.info.items()}
        return Event(request, "thought", token_id, thought.embeds[j], info)

    def _answer(self, rows: Rows, at: Tensor, embeds_BD: Tensor) -> list[tuple[int, Event]]:
        """Rows `at` choose an answer token; EOS or the limit finishes them."""
        uniform_B = noise.uniform(
            noise.keys(rows.seed_B[at], rows.sample_B[at], rows.step_B[at], noise.TOKEN), 1
        )
        logits_BV = self.lm.logits(rows.hidden_BD[at])
        ids_B = sample_tokens(logits_BV, rows.temperature_B[at], rows.top_p_B[at], uniform_B[:, 0])
        embeds_BD[at] = self.lm.embed(ids_B).to(embeds_BD)
        rows.n_tokens_B[at] += 1
        ended_B = ids_B == self.lm.template.eos_id
        full_B = rows.n_tokens_B[at] >= rows.max_tokens_B[at]
        events = []
        columns = zip(at.tolist(), ids_B.tolist(), ended_B.tolist(), full_B.tolist(), strict=True)
        for i, token_id, ended, full in columns:
            request = rows.requests[i]
            events.append((i, Event(request, "token", token_id)))
            if ended or full:
                reason = "stop" if ended else "length"
                cut = rows.cut[i] or not ended
                events.append((i, Event(request, "finished", reason=reason, truncated=cut)))
        return events

    def _state(self, rows: Rows, at: Tensor) -> ThinkState:
        return ThinkState(
            hidden=rows.hidden_BD[at],
            step=rows.step_B[at],
            params={name: column[at] for name, column in rows.params.items()},
            temperature=rows.temperature_B[at],
            top_p=rows.top_p_B[at],
            latent_temperature=rows.latent_temperature_B[at],
            seed=rows.seed_B[at],
            sample=rows.sample_B[at],
            make_logits=self.lm.logits,
        )
