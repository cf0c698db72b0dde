"""The latent engine: continuous batching for models that feed embeddings back.

Requests join and leave at any step. All running rows, thinking or answering, share one forward of one position each:
what a row feeds (a latent, a token of a chain, the separator that ends its thinking, a token of the answer) is an
embedding like any other, and goes into the row's own next column of the cache (`cache.py`).

    step       1    2    3    4    5    6
    row 0      l1   l2   ###  a    EOS           thinks twice, then answers
    row 1      l1   ###  a    EOS                thinks once
    row 2                          l1   l2 ...   waited for a slot (`scheduler.py`)

Questions are read apart from that, several at once, right-padded, long ones in chunks; one that is running or has
just been read is not read again for its other samples. `step` does one round and says what happened;
`stream` yields events until nothing is left, `generate` folds over it, `async_engine.py` serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from colar.engine.cache import SlotCache
from colar.engine.compiled import CompiledHidden
from colar.engine.request import Completion, Event, Request, fold, prompt_ids
from colar.engine.rows import Rows
from colar.engine.scheduler import QueueFull, Scheduler, Waiting
from colar.methods.base import Method, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import noise
from colar.ops.sampling import sample_tokens, token_logps

__all__ = ["Engine", "QueueFull"]

PREFILL_TOKENS = 2048
"""Most positions of one prefill forward, padding included."""


class Engine:
    """Answers requests with one model and its method.

    `max_batch` rows run at a time, in at most `token_budget` positions (None: as many as they need); `max_waiting`
    bounds the line (None: no bound). With `compile` the step is compiled when it is first taken, which lasts a
    minute or so (less when it was done before), and pays from some thousand steps on; docs/engine.md has figures.
    Weights may be trained between two calls, not while requests run.
    """

    def __init__(
        self,
        lm: LatentLM,
        method: Method,
        max_batch: int = 32,
        token_budget: int | None = None,
        max_waiting: int | None = None,
        compile: bool = False,
    ) -> None:
        self.lm, self.method = lm, method
        self._hidden = CompiledHidden(lm) if compile else lm.hidden
        self.scheduler = Scheduler(max_batch, token_budget, max_waiting)
        self.rows: Rows | None = None
        self._cache: SlotCache | None = None

    # The line

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return self.rows is not None or len(self.scheduler) > 0

    def submit(self, request: Request) -> None:
        """Put a request into the line; `step` says what comes of this very object.

        Raises ValueError where it cannot be run, and QueueFull where `max_waiting` others wait.
        """
        self.scheduler.add(Waiting(request, tuple(prompt_ids(self.lm, self.method, request))))

    def cancel(self, request: Request) -> bool:
        """Forget a request, waiting or running; no event follows. False where it is not here (any more)."""
        if self.scheduler.remove(request):
            return True
        rows = self.rows
        at = [] if rows is None else [i for i in range(len(rows)) if rows.request(i) is request]
        self._release(at)
        return bool(at)

    def clear(self) -> None:
        """Forget all requests, waiting or running."""
        self.rows = None
        self.scheduler.waiting.clear()

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        # One object for each: events name their request.
        requests = [dataclasses.replace(request) for request in requests]
        by_request = {id(c.request): c for c in fold(self.lm, self.stream(requests))}
        return [by_request[id(request)] for request in requests]

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Events of all requests as they happen. All are checked before the first forward.

        They wait outside the line, whatever its bound. Closing the stream cancels what is left of them. RuntimeError
        where other requests run or wait: their events would come out here.
        """
        if self.busy:
            raise RuntimeError("the engine is busy with other requests: use step, or an AsyncEngine")
        outside = [Waiting(r, tuple(prompt_ids(self.lm, self.method, r))) for r in requests]
        outside.reverse()
        mine = {id(entry.request): entry.request for entry in outside}
        try:
            while mine:
                while outside and len(self.scheduler) < self.scheduler.room:
                    self.scheduler.add(outside.pop())
                for event in self.step():
                    if event.kind == "finished":
                        mine.pop(id(event.request), None)
                    yield event
        finally:
            for request in mine.values():
                self.cancel(request)

    # One round

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Let in who may, choose what every row feeds next, let go of those that are done, feed the others.

        An error leaves the engine without running rows; those that wait still wait.
        """
        try:
            with _evaluating(self.lm):
                self._admit()
                return [] if self.rows is None else self._round(self.rows)
        except BaseException:
            self.rows = None
            raise

    def _round(self, rows: Rows) -> list[Event]:
        started = time.perf_counter()
        embeds_ND, events = self._next(rows)
        rows.charge(time.perf_counter() - started)
        done = {i: rows.seconds[i] for i, event in events if event.kind == "finished"}
        named = [
            dataclasses.replace(event, seconds=done[i]) if event.kind == "finished" else event
            for i, event in events
        ]
        started = time.perf_counter()
        left = self._release(list(done), embeds_ND)
        if left is not None and self.rows is not None:
            self._feed(self.rows, left)
            self.rows.charge(time.perf_counter() - started)
        return named

    def _feed(self, rows: Rows, embeds_ND: Tensor) -> None:
        """One forward: each row's embedding goes into its next column."""
        cache = self._room(0)
        span = int(rows.position_N.max()) + 1
        mask = cache.at_decode(rows.position_N, span, embeds_ND)
        hidden_N1D = self._hidden(embeds_ND[:, None], mask, rows.position_N[:, None], cache)
        rows.hidden_ND = hidden_N1D[:, -1]
        rows.position_N = rows.position_N + 1
        rows.step_N = rows.step_N + 1

    def _release(self, done: Sequence[int], embeds_ND: Tensor | None = None) -> Tensor | None:
        """Free the slots of rows `done`: the last rows move into them. Returns the others' embeddings."""
        rows = self.rows
        if rows is None or not done:
            return embeds_ND
        kept = len(rows) - len(done)
        holes = [i for i in done if i < kept]
        movers = [i for i in range(kept, len(rows)) if i not in done]
        order = list(range(kept))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        broken = (~torch.isfinite(rows.hidden_ND).all(-1)).nonzero()[:, 0].tolist()
        cache = self._room(0)
        cache.wipe([i for i in broken if i in done])
        if movers:
            cache.copy(movers, holes, int(rows.position_N[movers].max()))
        self.rows = rows.take(order) if kept else None
        return None if embeds_ND is None or not kept else embeds_ND[order]

    # Questions

    def _room(self, columns: int) -> SlotCache:
        """The cache, with room for rows of so many positions."""
        if self._cache is None:
            self._cache = SlotCache(self.lm.causal_lm, self.scheduler.slots, max(columns, 1))
        self._cache.reserve(columns)
        return self._cache

    def _admit(self) -> None:
        """Read the questions of those whose turn it is, each distinct one once."""
        rows = self.rows
        running = [] if rows is None else rows.waiting
        widest = max((entry.positions for entry in running), default=0)
        admitted = self.scheduler.admit(len(running), widest)
        if not admitted:
            return
        cache = self._room(max(entry.positions for entry in admitted))
        slot_of = {entry.ids: i for i, entry in enumerate(running)}
        fresh = list({entry.ids: entry for entry in admitted if entry.ids not in slot_of}.values())
        fresh.sort(key=lambda entry: len(entry.ids))
        for batch in _batches(fresh):
            self._join(self._prefill(batch, cache))
        slot_of |= {entry.ids: len(running) + i for i, entry in enumerate(fresh)}
        read = {id(entry) for entry in fresh}
        again = [entry for entry in admitted if id(entry) not in read]
        if again and self.rows is not None:
            sources = [slot_of[entry.ids] for entry in again]
            targets = list(range(len(self.rows), len(self.rows) + len(again)))
            cache.copy(sources, targets, max(len(entry.ids) for entry in again))
            self._join(Rows.start(again, self.rows.first_ND[sources], [0.0] * len(again)))

    def _join(self, rows: Rows) -> None:
        self.rows = rows if self.rows is None else self.rows.join(rows)

    def _prefill(self, batch: Sequence[Waiting], cache: SlotCache) -> Rows:
        """Rows of these questions, read into the next free slots."""
        started = time.perf_counter()
        device, first = self.lm.device, 0 if self.rows is None else len(self.rows)
        lengths = [len(entry.ids) for entry in batch]
        longest = max(lengths)
        ids_NT = torch.tensor(
            [[*entry.ids, *[0] * (longest - len(entry.ids))] for entry in batch], device=device
        )
        last_N = torch.tensor(lengths, device=device) - 1
        hidden_ND: Tensor | None = None
        chunk = max(1, PREFILL_TOKENS // len(batch))
        for start in range(0, longest, chunk):
            embeds_NTD = self.lm.embed(ids_NT[:, start : start + chunk])
            n, length = embeds_NTD.shape[:2]
            mask = cache.at_prefill(first, n, start, length, embeds_NTD)
            positions_NT = torch.arange(start, start + length, device=device).expand(n, -1)
            hidden_NTD = self.lm.hidden(embeds_NTD, mask, positions_NT, cache)
            here_N = last_N - start
            picked_ND = hidden_NTD[torch.arange(n, device=device), here_N.clamp(0, length - 1)]
            inside_N1 = ((here_N >= 0) & (here_N < length))[:, None]
            hidden_ND = picked_ND if hidden_ND is None else torch.where(inside_N1, picked_ND, hidden_ND)
        assert hidden_ND is not None, "a question has at least one token"
        share = (time.perf_counter() - started) / len(batch)
        return Rows.start(batch, hidden_ND, [share] * len(batch))

    # What is fed next

    def _next(self, rows: Rows) -> tuple[Tensor, list[tuple[int, Event]]]:
        """What every row feeds next, (N, D), and what happened in choosing it."""
        embeds_ND = torch.zeros_like(rows.hidden_ND)
        broken_N = ~torch.isfinite(rows.hidden_ND).all(-1)
        events = [(i, _failed(rows.request(i))) for i in broken_N.nonzero()[:, 0].tolist()]
        thinking = (rows.thinking_N & ~broken_N).nonzero()[:, 0]
        answering = (~rows.thinking_N & ~broken_N).nonzero()[:, 0]
        logits = _Logits(self.lm, rows, together=bool(len(thinking) and len(answering)))
        if len(thinking):
            events += self._think(rows, thinking, logits, embeds_ND)
        if len(answering):
            events += self._answer(rows, answering, logits, embeds_ND)
        return embeds_ND, events

    def _think(self, rows: Rows, at: Tensor, logits: _Logits, embeds_ND: Tensor) -> list[tuple[int, Event]]:
        """Rows `at` take a thinking step; those that are done, or at their limit, get the separator."""
        cut_N = rows.n_thoughts_N[at] >= rows.max_latents_N[at]
        thought = self.method.think(self.lm, rows.think_state(at, lambda _: logits(at)))
        done_N = thought.done | cut_N
        separator_D = self.lm.embed(torch.tensor(self.lm.template.separator_id, device=at.device))
        embeds_ND[at] = torch.where(done_N[:, None], separator_D.to(embeds_ND), thought.embeds.to(embeds_ND))
        rows.thinking_N[at] = ~done_N
        rows.n_thoughts_N[at] += (~done_N).long()
        events = []
        ids = thought.token_ids.tolist()
        for j, (i, done, cut) in enumerate(zip(at.tolist(), done_N.tolist(), cut_N.tolist(), strict=True)):
            rows.cut[i] = rows.cut[i] or cut
            if not done:
                events.append((i, _thought(rows.request(i), thought, j, ids[j])))
            elif not cut and rows.request(i).keep_latents:
                events.append((i, Event(rows.request(i), "stop", info=_row(thought, j))))
        return events

    def _answer(self, rows: Rows, at: Tensor, logits: _Logits, embeds_ND: Tensor) -> list[tuple[int, Event]]:
        """Rows `at` choose an answer token; EOS or the limit finishes them."""
        keys_N = noise.keys(rows.seed_N[at], rows.sample_N[at], rows.step_N[at], noise.TOKEN)
        uniform_N = noise.uniform(keys_N, 1)[:, 0]
        logits_NV = logits(at)
        ids_N = sample_tokens(logits_NV, rows.temperature_N[at], rows.top_p_N[at], uniform_N)
        kept = any(rows.request(i).keep_latents for i in at.tolist())
        logps_N = token_logps(logits_NV, rows.temperature_N[at], ids_N) if kept else None
        embeds_ND[at] = self.lm.embed(ids_N).to(embeds_ND)
        rows.n_tokens_N[at] += 1
        ended_N = ids_N == self.lm.template.eos_id
        full_N = rows.n_tokens_N[at] >= rows.max_tokens_N[at]
        events = []
        columns = zip(at.tolist(), ids_N.tolist(), ended_N.tolist(), full_N.tolist(), strict=True)
        for j, (i, token_id, ended, full) in enumerate(columns):
            request = rows.request(i)
            info = {"logp": logps_N[j]} if logps_N is not None and request.keep_latents else {}
            events.append((i, Event(request, "token", token_id, info=info)))
            if ended or full:
                reason = "stop" if ended else "length"
                cut = rows.cut[i] or not ended
                events.append((i, Event(request, "finished", reason=reason, truncated=cut)))
        return events


class _Logits:
    """The LM head at some of the rows; once for all of them where both kinds of row ask for theirs."""

    def __init__(self, lm: LatentLM, rows: Rows, together: bool) -> None:
        self.lm, self.hidden_ND, self.together = lm, rows.hidden_ND, together
        self.all_NV: Tensor | None = None

    def __call__(self, at: Tensor) -> Tensor:
        if self.together and self.all_NV is None:
            self.all_NV = self.lm.logits(self.hidden_ND)
        return self.lm.logits(self.hidden_ND[at]) if self.all_NV is None else self.all_NV[at]


def _thought(request: Request, thought: Thought, j: int, token_id: int) -> Event:
    if not request.keep_latents:
        return Event(request, "thought", token_id)
    return Event(request, "thought", token_id, thought.embeds[j], _row(thought, j))


def _row(thought: Thought, j: int) -> dict[str, Tensor]:
    """What a method says of one of its rows."""
    return {name: column[j] for name, column in thought.info.items()}


def _failed(request: Request) -> Event:
    return Event(request, "finished", reason="error", truncated=True)


def _batches(entries: Sequence[Waiting]) -> Iterator[list[Waiting]]:
    """Neighbours that one prefill forward takes; a question that is too long for one comes alone."""
    batch: list[Waiting] = []
    for entry in entries:  # shortest first: the newest is the longest
        if batch and (len(batch) + 1) * len(entry.ids) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


@contextlib.contextmanager
def _evaluating(lm: LatentLM) -> Iterator[None]:
    """Without dropout, whatever the model's mode is; it is as it was afterwards."""
    if not lm.training:
        yield
        return
    lm.eval()
    try:
        yield
    finally:
        lm.train()
