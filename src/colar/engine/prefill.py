"""Prefill: the way of admitted requests from the queue into the running rows.

    step       1           2           3
    prefills   a b c       d           f         a batch a step: running rows wait for no more than that
    joins      a b c       d e         f         e is another sample of d's question: it is copied

Several questions share a forward pass, right-padded, within `BATCH_POSITIONS`. A question that is longer is prefilled
by itself.

Shape suffixes: N rows, D width.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from colar.engine.request import Request
from colar.engine.runner import Runner
from colar.engine.running import RunningRows
from colar.engine.scheduler import Entry
from colar.methods.base import Method

BATCH_POSITIONS = 2048
"""Positions of prefill between two decode steps, padding included, unless one question has more."""


class Prefill:
    """The requests of one admission that do not run yet."""

    def __init__(self, entries: Sequence[Entry] = (), rows: RunningRows | None = None) -> None:
        self.batches: deque[list[Entry]] = deque()
        """Each distinct question once; the first batch is next."""
        self.samples: list[Entry] = []
        """Other samples of these questions, or of those that run."""
        self._plan(entries, set() if rows is None else {entry.ids for entry in rows.entries})

    def _plan(self, entries: Sequence[Entry], cached: Collection[tuple[int, ...]]) -> None:
        """Batch these requests; those whose question is in the cache, or is prefilled before them, are copied."""
        known = set(cached)
        fresh: list[Entry] = []
        self.samples = []
        for entry in entries:
            (self.samples if entry.ids in known else fresh).append(entry)
            known.add(entry.ids)
        # Neighbours of similar length waste the least padding.
        fresh.sort(key=lambda entry: len(entry.ids))
        self.batches.extend(_batches(fresh))

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def entries(self) -> list[Entry]:
        """All requests in prefill."""
        return [*self.samples, *(entry for batch in self.batches for entry in batch)]

    def cancel(self, request: Request) -> bool:
        """Remove a request, this very object; False if it is not in prefill."""
        before = len(self)
        for batch in self.batches:
            batch[:] = [entry for entry in batch if entry.request is not request]
        self.batches = deque(filter(None, self.batches))
        self.samples = [entry for entry in self.samples if entry.request is not request]
        return len(self) < before

    # Into the cache

    def run(self, runner: Runner, method: Method, rows: RunningRows) -> None:
        """Prefill one batch. Its requests join the rows, with all samples of their questions."""
        self._copy_samples(runner, method, rows)
        if self.batches:
            started = time.perf_counter()
            entries = self.batches[0]
            hidden_ND = runner.prefill([entry.ids for entry in entries], len(rows))
            _join(runner, method, rows, entries, hidden_ND, started)
            self.batches.popleft()
            self._copy_samples(runner, method, rows)
        if not self.batches and self.samples:
            # The question of these samples was cancelled, or has left the rows: one of them is prefilled instead.
            self._plan(self.samples, ())

    def _copy_samples(self, runner: Runner, method: Method, rows: RunningRows) -> None:
        """Start samples of questions that are in the cache: their columns are copied."""
        if not self.samples:
            return
        slot_of = {entry.ids: slot for slot, entry in enumerate(rows.entries)}
        cached = [entry for entry in self.samples if entry.ids in slot_of]
        if not cached:
            return
        started = time.perf_counter()
        sources = [slot_of[entry.ids] for entry in cached]
        targets = list(range(len(rows), len(rows) + len(cached)))
        runner.cache.copy(sources, targets, max(len(entry.ids) for entry in cached))
        _join(runner, method, rows, cached, rows.first_ND[sources], started)
        self.samples = [entry for entry in self.samples if entry.ids not in slot_of]


def _batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Neighbours whose questions share one forward pass, in order; a question that is too long comes by itself.

    They are sorted by length, so the newest of a batch is its longest, and all are padded to it.
    """
    batch: list[Entry] = []
    for entry in entries:
        if batch and (len(batch) + 1) * len(entry.ids) > BATCH_POSITIONS:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _join(
    runner: Runner,
    method: Method,
    rows: RunningRows,
    entries: Sequence[Entry],
    hidden_ND: Tensor,
    started: float,
) -> None:
    """Requests whose questions are in the cache join the rows; they share the time since `started`."""
    begun = method.begin(runner.lm, [entry.request for entry in entries])
    alike = rows.begun if len(rows) else begun
    wanted = {name: ((len(entries), *column.shape[1:]), column.dtype) for name, column in alike.items()}
    found = {name: (tuple(column.shape), column.dtype) for name, column in begun.items()}
    if found != wanted:
        raise ValueError(
            f"method {method.name}: begin must give {len(entries)} requests a row each, like those that run: {wanted}; "
            f"got {found}"
        )
    rows.append(RunningRows.start(entries, hidden_ND, begun, (time.perf_counter() - started) / len(entries)))
