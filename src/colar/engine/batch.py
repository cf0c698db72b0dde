"""The running rows in their slots: rows join, are fed, and are released. Row i lies in slot i of the cache.

    slot 0   a    runs                       read, copy     new rows come behind the others
    slot 1   b    runs                       feed           one position of every row
    slot 2   c    runs                       release        rows leave, others move into their slots
    slot 3   d    is read, in chunks

Whatever raises here leaves the rows as they were. Which rows run is the engine's choice (`core.py`).

Shape suffixes: N rows, D width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from colar.engine.failures import apart
from colar.engine.reading import Reading
from colar.engine.runner import Runner
from colar.engine.running import Running, begin
from colar.engine.scheduler import Queued
from colar.engine.shapes import NOTHING, Shapes
from colar.methods.base import Method


class Batch:
    """The rows of one model and its method; none at first."""

    def __init__(self, runner: Runner, method: Method, shapes: Shapes) -> None:
        self.runner = runner
        self.method = method
        self.shapes = shapes
        self.cache = runner.cache
        self.running: Running | None = None
        self.wanted = NOTHING
        """The shape that was last asked for, whether there was memory for it or not."""

    def __len__(self) -> int:
        return 0 if self.running is None else len(self.running)

    @property
    def entries(self) -> list[Queued]:
        return [] if self.running is None else self.running.entries

    @property
    def widest(self) -> int:
        """Most positions that one of the rows may come to need."""
        return max((entry.positions for entry in self.entries), default=0)

    @property
    def questions(self) -> set[tuple[int, ...]]:
        """Those that are in the cache, as token ids."""
        return {entry.ids for entry in self.entries}

    # Room

    def reserve(self, more: Sequence[Queued], limit: int | None) -> None:
        """Make room for these requests beside the rows, within `limit` positions where that is possible."""
        widest = max(self.widest, *(entry.positions for entry in more))
        self.wanted = self.shapes.grown(self.cache.shape, len(self) + len(more), widest, limit)
        self.cache.reserve(self.wanted, len(self))

    def shrink(self) -> None:
        """Give back what the rows do not need."""
        if self.running is None:
            self.wanted = NOTHING
            self.cache.release()
        else:
            self.wanted = self.shapes.least(len(self), self.widest)
            self.cache.reserve(self.wanted, len(self))

    # Rows that come

    def read_chunk(self, reading: Reading) -> None:
        """Read a chunk of the long question whose turn it is; it has not ended then."""
        (entry,) = reading.batches[0]
        started = time.perf_counter()
        self._follow(reading)
        self.runner.read([entry.ids], len(self), reading.done, reading.chunk)
        reading.done += reading.chunk
        reading.seconds += time.perf_counter() - started

    def read(self, entries: Sequence[Queued], reading: Reading) -> None:
        """Read the rest of these questions, the longest of them last; their rows join."""
        started = time.perf_counter() - reading.seconds
        self._follow(reading)
        rest = len(entries[-1].ids) - reading.done
        hidden_ND = self.runner.read([entry.ids for entry in entries], len(self), reading.done, rest)
        self._join(entries, hidden_ND, started)

    def copy(self, entries: Sequence[Queued]) -> None:
        """Start other samples of questions that lie in the cache: their columns are copied, not read again."""
        started = time.perf_counter()
        assert self.running is not None, "a question that is known is that of a running row"
        slot_of = {entry.ids: slot for slot, entry in enumerate(self.running.entries)}
        sources = [slot_of[entry.ids] for entry in entries]
        targets = list(range(len(self), len(self) + len(entries)))
        longest = max(len(entry.ids) for entry in entries)
        self.cache.copy(sources, targets, columns=longest)
        self._join(entries, self.running.first_ND[sources], started)

    def _follow(self, reading: Reading) -> None:
        """Move what was read of a long question to the slot behind the rows: some may have left since."""
        slot = len(self)
        if reading.done and reading.slot != slot:
            self.cache.copy([reading.slot], [slot], reading.done)
        reading.slot = slot

    def _join(self, entries: Sequence[Queued], hidden_ND: Tensor, started: float) -> None:
        """Rows whose questions are in the cache join the others; they share the time since `started`."""
        begun = begin(self.runner.lm, self.method, entries, self.running)
        share = (time.perf_counter() - started) / len(entries)
        new = Running.start(entries, hidden_ND, begun, [share] * len(entries))
        self.running = new if self.running is None else self.running.join(new)

    # Rows that stay, and that leave

    def feed(self, embeds_ND: Tensor) -> dict[int, Exception]:
        """Feed each row's embedding into its next column. Returns the errors of rows that fail alone.

        They have to be released: their numbers are not finite then.
        """
        running = self.running
        assert running is not None, "there is a row to feed"

        def run(rows: range) -> Tensor:
            part = slice(rows.start, rows.stop)
            span = 1 + max(running.position(i) for i in rows)
            return self.runner.feed(embeds_ND[part], running.position_N[part], span, rows.start)

        parts = apart(range(len(running)), run)
        if not parts.errors and len(parts.results) == 1:
            # As nearly always: nothing to put together.
            hidden_ND = parts.results[0][1]
        elif parts.errors:
            hidden_ND = torch.full_like(running.hidden_ND, math.nan)
            for rows, part_ND in parts.results:
                hidden_ND[rows.start : rows.stop] = part_ND
        else:
            hidden_ND = torch.cat([part_ND for _, part_ND in parts.results])
        running.fed(hidden_ND)
        return parts.errors

    def release(
        self, running: Running, done: Collection[int], broken: Collection[int] | None = None
    ) -> list[int]:
        """Let `running` be the rows, without those that are done. Returns the others, in the order of their slots.

        `broken` are those of the done whose numbers may not be finite; None: all of them.
        """
        # Rows lie in the first slots, without a gap: the last ones move into the holes.
        #
        #     slot       0    1    2    3    4        done: 1 and 3
        #     before     a    b    c    d    e
        #     after      a    e    c                  left: 0, 4, 2
        n_left = len(running) - len(done)
        left = list(range(n_left))
        if not done:
            self.running = running
            return left
        holes = [i for i in done if i < n_left]
        movers = [i for i in range(n_left, len(running)) if i not in done]
        for hole, mover in zip(holes, movers, strict=True):
            left[hole] = mover

        # What a row leaves in its slot is masked for the next one, but a NaN goes through any mask.
        self.cache.wipe(list(done if broken is None else broken))
        if movers:
            columns = max(running.position(i) for i in movers)
            self.cache.copy(movers, holes, columns)
        self.running = running.take(left) if left else None
        return left

    def stop_newest(self) -> tuple[list[int], list[Queued]]:
        """Take out the newer half of the rows. Returns the others in the order of their new slots, and those."""
        running = self.running
        if running is None:
            return [], []
        numbers = [entry.number for entry in running.entries]
        by_age = sorted(range(len(running)), key=numbers.__getitem__)
        newest = by_age[len(by_age) // 2 :]
        return self.release(running, newest), [running.stopped(i) for i in newest]

    def stop_all(self) -> list[Queued]:
        """Take out all rows."""
        running = self.running
        self.running = None
        return [] if running is None else [running.stopped(i) for i in range(len(running))]

    def wipe_free(self) -> None:
        """Forget what a question that could not be read has left behind the rows."""
        self.cache.wipe(list(range(len(self), self.cache.shape.slots)))
