"""The latent engine: continuous batching for models that feed embeddings back.

Requests join and leave at any step. All running rows, thinking or answering, share one forward of one position each:
what a row feeds (a latent, a token of a chain, the separator that ends its thinking, a token of the answer) is an
embedding like any other, and goes into the row's own next column of the cache (`cache.py`).

    step       1    2    3    4    5    6
    row 0      l1   l2   ###  a    EOS           thinks twice, then answers
    row 1      l1   ###  a    EOS                thinks once
    row 2                          l1   l2 ...   waited for a slot (`scheduler.py`)

Questions are read apart from that, several at once, right-padded, long ones in chunks; one that is running or has
just been read is not read again for its other samples. `step` does one round and returns its events;
`stream` yields events until nothing is left, `generate` folds over it, `async_engine.py` serves.

    step = admit (scheduler.py)  ->  choose (step.py)  ->  release the slots of those that end  ->  feed the others

Shape suffixes: N rows, T positions of a question, D width.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from colar.engine.cache import SlotCache
from colar.engine.compiled import CompiledHidden
from colar.engine.packed import can_pack, packed_copy, refresh
from colar.engine.request import Completion, Event, Request, fold, prompt_ids
from colar.engine.running import Running, begin
from colar.engine.scheduler import Queued, QueueFull, Scheduler
from colar.engine.step import KeptRows, choose
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
    its matrix units read them; it pays from some thousand steps on, results/bench-generate has figures.
    Weights may be trained in place between two calls, not while requests run. ValueError for a backbone whose
    attention the engine does not know.
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
        self.lm = packed_copy(lm) if compile and can_pack(lm) else lm
        self.method = method
        self.scheduler = Scheduler(max_batch, token_budget, max_waiting)
        self.running: Running | None = None
        self._n_requests = 0
        self._kept_rows = KeptRows(self.lm)
        self._cache = SlotCache(self.lm.causal_lm, slots=max_batch)
        self._hidden = CompiledHidden(self.lm) if compile else self.lm.hidden
        # A compiled step of one row would be a graph of its own: the last row runs beside a copy of itself.
        self._never_alone = compile and max_batch > 1

    # The queue

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return self.running is not None or len(self.scheduler) > 0

    def submit(self, request: Request) -> int:
        """Put a request into the queue. Returns its number, which its events have too.

        ValueError where it cannot be run, QueueFull where `max_waiting` others wait.
        """
        entry = self._enter(request)
        self.scheduler.add(entry)
        return entry.number

    def _enter(self, request: Request) -> Queued:
        """Check, tokenise and number a request."""
        ids = prompt_ids(self.lm, self.method, request)
        entry = Queued(self._n_requests, request, tuple(ids))
        self.scheduler.check(entry)
        self._n_requests += 1
        return entry

    def cancel(self, request: Request) -> bool:
        """Forget a request, this very object, waiting or running. No event follows. False where it is not here."""
        if self.scheduler.remove(request):
            return True
        if self.running is None:
            return False
        rows = [i for i, entry in enumerate(self.running.entries) if entry.request is request]
        if rows:
            self._release(self.running, rows)
        return len(rows) > 0

    def clear(self) -> None:
        """Forget all requests, waiting or running."""
        self.running = None
        self.scheduler.waiting.clear()

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        completions = fold(self.lm, self.stream(requests))
        return sorted(completions, key=lambda completion: completion.number)

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Events of all requests as they happen. All are checked before the first forward.

        They wait outside the queue, whatever its bound. Closing the stream cancels what is left of them. RuntimeError
        where other requests run or wait: their events would come out here.
        """
        if self.busy:
            raise RuntimeError("the engine is busy with other requests: use step, or an AsyncEngine")
        outside = deque([self._enter(request) for request in requests])
        unfinished = {entry.number: entry.request for entry in outside}
        try:
            while outside or self.busy:
                while outside and len(self.scheduler) < self.scheduler.room:
                    self.scheduler.add(outside.popleft())
                for event in self.step():
                    if event.kind == "finished":
                        unfinished.pop(event.number, None)
                    yield event
        finally:
            # Also where the caller closes the stream: whoever uses the engine next finds it idle.
            for request in unfinished.values():
                self.cancel(request)

    # One round

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Admit requests, choose each row's next input, release the rows that end, feed the others: one step's events.

        An error leaves the engine without running rows; those that wait still wait.
        """
        try:
            with evaluating(self.lm):
                self._admit()
                if self.running is None:
                    return []
                return self._round(self.running)
        except BaseException:
            # Some rows may have been fed and others not: none of them can continue.
            self.running = None
            raise

    def _round(self, running: Running) -> list[Event]:
        """One step of all running rows."""
        # Timed in two parts: rows that end here have no share in the forward.
        started = time.perf_counter()
        embeds_ND, events, ended = choose(self.lm, self.method, running, self._kept_rows)
        chosen = time.perf_counter()
        running.charge(chosen - started)

        for i, reason in ended.items():
            entry = running.entries[i]
            event = Event(
                entry.request,
                "finished",
                reason=reason,
                truncated=running.cut[i] or reason != "stop",
                seconds=running.seconds[i],
                number=entry.number,
            )
            events.append(event)

        if ended:
            left = self._release(running, ended)
            embeds_ND = embeds_ND[left]
        if self.running is not None:
            self._feed(self.running, embeds_ND)
            self.running.charge(time.perf_counter() - chosen)
        return events

    def _release(self, running: Running, done: Collection[int]) -> list[int]:
        """Free the slots of rows `done`. Returns the rows that are left, in the order of their new slots."""
        # Running rows lie in the first slots, without a gap: the last ones move into the holes.
        #
        #     slot       0    1    2    3    4        done: 1 and 3
        #     before     a    b    c    d    e
        #     after      a    e    c                  left: 0, 4, 2
        n_left = len(running) - len(done)
        holes = [i for i in done if i < n_left]
        movers = [i for i in range(n_left, len(running)) if i not in done]
        left = list(range(n_left))
        for hole, mover in zip(holes, movers, strict=True):
            left[hole] = mover

        # What a row leaves in its slot is masked for the next one, but a NaN goes through any mask.
        broken_N = ~torch.isfinite(running.hidden_ND).all(-1)
        self._cache.wipe([i for i in broken_N.nonzero()[:, 0].tolist() if i in done])
        if movers:
            columns = int(running.position_N[movers].max())
            self._cache.copy(movers, holes, columns)
        self.running = running.take(left) if left else None
        return left

    def _feed(self, running: Running, embeds_ND: Tensor) -> None:
        """One forward: each row's embedding goes into its next column."""
        position_N = running.position_N
        span = int(position_N.max()) + 1
        copies = 0
        if self._never_alone and len(running) == 1:
            embeds_ND = embeds_ND.repeat(2, 1)
            position_N = position_N.repeat(2)
            copies = 1
        mask = self._cache.at_decode(position_N, span, embeds_ND, copies)
        hidden_N1D = self._hidden(embeds_ND[:, None], mask, position_N[:, None], self._cache)
        running.hidden_ND = hidden_N1D[: len(running), -1]
        running.position_N = running.position_N + 1
        running.step_N = running.step_N + 1

    # Questions

    def _admit(self) -> None:
        """Start the requests whose turn it is. Each distinct question is read once."""
        entries = [] if self.running is None else self.running.entries
        widest = max((entry.positions for entry in entries), default=0)
        admitted = self.scheduler.admit(len(entries), widest)
        if not admitted:
            return
        if self.running is None:
            # The weights may have been trained since the last requests.
            refresh(self.lm)
            self._kept_rows.forget()
        self._cache.reserve(max(entry.positions for entry in admitted))

        known = {entry.ids for entry in entries}
        fresh: list[Queued] = []
        again: list[Queued] = []
        for entry in admitted:
            if entry.ids in known:
                again.append(entry)
            else:
                fresh.append(entry)
                known.add(entry.ids)

        # Neighbours of like length waste the least padding.
        fresh.sort(key=lambda entry: len(entry.ids))
        for batch in _batches(fresh):
            self._prefill(batch)
        if again:
            self._copy_questions(again)

    def _prefill(self, batch: Sequence[Queued]) -> None:
        """Read these questions into the next free slots."""
        started = time.perf_counter()
        device = self.lm.device
        first_slot = 0 if self.running is None else len(self.running)
        n = len(batch)
        lengths = [len(entry.ids) for entry in batch]
        longest = max(lengths)

        # Padded on the right, where a row's own next columns come to lie; no row sees beyond its own position.
        #
        #     slot 3     q q q q .
        #     slot 4     q q q q q
        ids_NT = torch.zeros(n, longest, dtype=torch.int64, device=device)
        for row, entry in enumerate(batch):
            ids_NT[row, : lengths[row]] = torch.tensor(entry.ids, device=device)

        # Chunks of a long question follow one another. Several questions are one chunk: `_batches` sees to it.
        for start in range(0, longest, PREFILL_TOKENS):
            embeds_NTD = self.lm.embed(ids_NT[:, start : start + PREFILL_TOKENS])
            length = embeds_NTD.shape[1]
            mask = self._cache.at_prefill(first_slot, n, start, length, embeds_NTD)
            position_NT = torch.arange(start, start + length, device=device).expand(n, -1)
            hidden_NTD = self._hidden(embeds_NTD, mask, position_NT, self._cache)

        # So every question ends in the last chunk, which began at `start`.
        last_N = torch.tensor(lengths, device=device) - 1 - start
        row_N = torch.arange(n, device=device)
        self._start(batch, hidden_NTD[row_N, last_N], started)

    def _copy_questions(self, entries: Sequence[Queued]) -> None:
        """Start other samples of questions that lie in the cache: their columns are copied, not read again."""
        started = time.perf_counter()
        assert self.running is not None, "a question that is known is that of a running row"
        n_running = len(self.running)
        slot_of = {entry.ids: slot for slot, entry in enumerate(self.running.entries)}
        sources = [slot_of[entry.ids] for entry in entries]
        targets = list(range(n_running, n_running + len(entries)))
        longest = max(len(entry.ids) for entry in entries)
        self._cache.copy(sources, targets, columns=longest)
        self._start(entries, self.running.first_ND[sources], started)

    def _start(self, entries: Sequence[Queued], hidden_ND: Tensor, started: float) -> None:
        """Rows whose questions are in the cache join the running ones; they share the time since `started`."""
        begun = begin(self.lm, self.method, entries, self.running)
        share = (time.perf_counter() - started) / len(entries)
        new = Running.start(entries, hidden_ND, begun, [share] * len(entries))
        self.running = new if self.running is None else self.running.join(new)


def _batches(entries: Sequence[Queued]) -> Iterator[list[Queued]]:
    """Neighbours whose questions one prefill forward takes; a question that is too long for one comes alone.

    They come shortest first: the newest of a batch is its longest, and all are padded to it.
    """
    batch: list[Queued] = []
    for entry in entries:
        if batch and (len(batch) + 1) * len(entry.ids) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


@contextlib.contextmanager
def evaluating(lm: LatentLM) -> Iterator[None]:
    """Switch dropout off inside the block, whatever the model's mode is; it is restored after it."""
    if not lm.training:
        yield
        return
    lm.eval()
    try:
        yield
    finally:
        lm.train()
