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
from colar.engine.packed import can_pack, packed_copy, refresh
from colar.engine.request import Completion, Event, Request, fold, prompt_ids
from colar.engine.running import Running, begin
from colar.engine.scheduler import Queued, QueueFull, Scheduler
from colar.engine.step import choose
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

__all__ = ["Engine", "QueueFull"]

PREFILL_TOKENS = 2048
"""Most positions of one prefill forward, padding included."""


class Engine:
    """Answers requests with one model and its method.

    `max_batch` rows run at a time, in at most `token_budget` positions (None: as many as they need); `max_waiting`
    bounds the queue (None: no bound). With `compile` forwards are compiled when they are first taken, which lasts a
    minute or two (less when it was done before), and bfloat16 weights on a CPU are kept twice, the second time as
    its matrix units read them; it pays from some thousand steps on, docs/engine.md has figures.
    Weights may be trained in place between two calls, not while requests run.
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
        self.lm, self.method = packed_copy(lm) if compile and can_pack(lm) else lm, method
        self._hidden = CompiledHidden(self.lm) if compile else self.lm.hidden
        self._pairs = (
            compile and max_batch > 1
        )  # a last row runs beside a copy of itself: no graph of its own
        self.scheduler = Scheduler(max_batch, token_budget, max_waiting)
        self.running: Running | None = None
        self._cache: SlotCache | None = None

    # The queue

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return self.running is not None or len(self.scheduler) > 0

    def submit(self, request: Request) -> None:
        """Put a request into the queue; `step` says what comes of this very object.

        Raises ValueError where it cannot be run, and QueueFull where `max_waiting` others wait.
        """
        self.scheduler.add(Queued(request, tuple(prompt_ids(self.lm, self.method, request))))

    def cancel(self, request: Request) -> bool:
        """Forget a request, waiting or running; no event follows. False where it is not here (any more)."""
        if self.scheduler.remove(request):
            return True
        running = self.running
        at = [] if running is None else [i for i in range(len(running)) if running.request(i) is request]
        self._release(at)
        return bool(at)

    def clear(self) -> None:
        """Forget all requests, waiting or running."""
        self.running = None
        self.scheduler.waiting.clear()

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        # One object for each: events name their request.
        requests = [dataclasses.replace(request) for request in requests]
        by_request = {id(c.request): c for c in fold(self.lm, self.stream(requests))}
        return [by_request[id(request)] for request in requests]

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Events of all requests as they happen. All are checked before the first forward.

        They wait outside the queue, whatever its bound. Closing the stream cancels what is left of them. RuntimeError
        where other requests run or wait: their events would come out here.
        """
        if self.busy:
            raise RuntimeError("the engine is busy with other requests: use step, or an AsyncEngine")
        outside = [Queued(r, tuple(prompt_ids(self.lm, self.method, r))) for r in requests]
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
            with evaluating(self.lm):
                self._admit()
                return [] if self.running is None else self._round(self.running)
        except BaseException:
            self.running = None
            raise

    def _round(self, running: Running) -> list[Event]:
        started = time.perf_counter()
        embeds_ND, events = choose(self.lm, self.method, running)
        running.charge(time.perf_counter() - started)
        done = {i: running.seconds[i] for i, event in events if event.kind == "finished"}
        named = [
            dataclasses.replace(event, seconds=done[i]) if event.kind == "finished" else event
            for i, event in events
        ]
        started = time.perf_counter()
        left = self._release(list(done), embeds_ND)
        if left is not None and self.running is not None:
            self._feed(self.running, left)
            self.running.charge(time.perf_counter() - started)
        return named

    def _feed(self, running: Running, embeds_ND: Tensor) -> None:
        """One forward: each row's embedding goes into its next column."""
        cache, position_N, copies = self._room(0), running.position_N, 0
        if self._pairs and len(running) == 1:
            embeds_ND, position_N, copies = embeds_ND.repeat(2, 1), position_N.repeat(2), 1
        mask = cache.at_decode(position_N, int(position_N.max()) + 1, embeds_ND, copies)
        hidden_N1D = self._hidden(embeds_ND[:, None], mask, position_N[:, None], cache)
        running.hidden_ND = hidden_N1D[: len(running), -1]
        running.position_N = running.position_N + 1
        running.step_N = running.step_N + 1

    def _release(self, done: Sequence[int], embeds_ND: Tensor | None = None) -> Tensor | None:
        """Free the slots of rows `done`: the last rows move into them. Returns the others' embeddings."""
        running = self.running
        if running is None or not done:
            return embeds_ND
        kept = len(running) - len(done)
        holes = [i for i in done if i < kept]
        movers = [i for i in range(kept, len(running)) if i not in done]
        order = list(range(kept))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        broken = (~torch.isfinite(running.hidden_ND).all(-1)).nonzero()[:, 0].tolist()
        cache = self._room(0)
        cache.wipe([i for i in broken if i in done])
        if movers:
            cache.copy(movers, holes, int(running.position_N[movers].max()))
        self.running = running.take(order) if kept else None
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
        entries = [] if self.running is None else self.running.entries
        widest = max((entry.positions for entry in entries), default=0)
        admitted = self.scheduler.admit(len(entries), widest)
        if not admitted:
            return
        refresh(self.lm)
        cache = self._room(max(entry.positions for entry in admitted))
        slot_of = {entry.ids: i for i, entry in enumerate(entries)}
        fresh = list({entry.ids: entry for entry in admitted if entry.ids not in slot_of}.values())
        fresh.sort(key=lambda entry: len(entry.ids))
        for batch in _batches(fresh):
            self._prefill(batch, cache)
        slot_of |= {entry.ids: len(entries) + i for i, entry in enumerate(fresh)}
        read = {id(entry) for entry in fresh}
        again = [entry for entry in admitted if id(entry) not in read]
        if again and self.running is not None:
            started = time.perf_counter()
            sources = [slot_of[entry.ids] for entry in again]
            targets = list(range(len(self.running), len(self.running) + len(again)))
            cache.copy(sources, targets, max(len(entry.ids) for entry in again))
            self._start(again, self.running.first_ND[sources], started)

    def _start(self, entries: Sequence[Queued], hidden_ND: Tensor, started: float) -> None:
        """Rows whose questions are in the cache join the running ones; they share the time since `started`."""
        begun = begin(self.lm, self.method, entries, self.running)
        share = (time.perf_counter() - started) / len(entries)
        new = Running.start(entries, hidden_ND, begun, [share] * len(entries))
        self.running = new if self.running is None else self.running.join(new)

    def _prefill(self, batch: Sequence[Queued], cache: SlotCache) -> None:
        """Read these questions into the next free slots."""
        started = time.perf_counter()
        device, first = self.lm.device, 0 if self.running is None else len(self.running)
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
            hidden_NTD = self._hidden(embeds_NTD, mask, positions_NT, cache)
            here_N = last_N - start
            picked_ND = hidden_NTD[torch.arange(n, device=device), here_N.clamp(0, length - 1)]
            inside_N1 = ((here_N >= 0) & (here_N < length))[:, None]
            hidden_ND = picked_ND if hidden_ND is None else torch.where(inside_N1, picked_ND, hidden_ND)
        assert hidden_ND is not None, "a question has at least one token"
        self._start(batch, hidden_ND, started)


def _batches(entries: Sequence[Queued]) -> Iterator[list[Queued]]:
    """Neighbours that one prefill forward takes; a question that is too long for one comes alone."""
    batch: list[Queued] = []
    for entry in entries:  # shortest first: the newest is the longest
        if batch and (len(batch) + 1) * len(entry.ids) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


@contextlib.contextmanager
def evaluating(lm: LatentLM) -> Iterator[None]:
    """Without dropout, whatever the model's mode is; it is as it was afterwards."""
    if not lm.training:
        yield
        return
    lm.eval()
    try:
        yield
    finally:
        lm.train()
