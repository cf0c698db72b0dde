"""One step of an engine: who joins, what is read, chosen and fed, who ends, and what happens where something fails.

    step = admit (scheduler.py)  ->  read a chunk (reading.py)  ->  choose (step.py)  ->  release, feed (batch.py)

A request that fails fails alone (`failures.py`): it ends with its error. Where memory runs out, the newest requests
wait again: they start anew, say nothing twice, and come to the same answer, since a draw is a function of the
request's seed and the step. The budget of positions is halved then, for a while (`scheduler.py`).

Shape suffixes: N rows, D width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from colar.engine.batch import Batch
from colar.engine.failures import apart, memory_error
from colar.engine.reading import Reading
from colar.engine.request import Event, Request
from colar.engine.runner import Runner
from colar.engine.running import Running
from colar.engine.scheduler import Queued, Scheduler
from colar.engine.step import Ending, KeptRows, choose_apart
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

ALONE = 3
"""A request that finds no memory with nothing else that runs is tried this often."""


class EngineCore:
    """The queue, the questions that are read and the rows that run. `prefill_chunk` positions are read in a step."""

    def __init__(self, runner: Runner, method: Method, scheduler: Scheduler, prefill_chunk: int) -> None:
        self.lm = runner.lm
        self.method = method
        self.scheduler = scheduler
        self.prefill_chunk = prefill_chunk
        self.batch = Batch(runner, method, scheduler.shapes)
        self.reading: Reading | None = None
        self._events: list[Event] = []
        """What has happened and was not returned yet."""
        self._kept_rows = KeptRows(self.lm)

    @property
    def busy(self) -> bool:
        """Whether anything runs, is read or waits, or was not said yet."""
        started = len(self.batch) > 0 or self.reading is not None
        return started or len(self.scheduler) > 0 or len(self._events) > 0

    def cancel(self, request: Request) -> bool:
        """Forget a request, this very object. No event follows. False where it is not here."""
        found = self.scheduler.remove(request)
        if self.reading is not None:
            found |= self.reading.remove(request)
        rows = [i for i, entry in enumerate(self.batch.entries) if entry.request is request]
        if self.batch.running is not None and rows:
            self.batch.release(self.batch.running, rows)
            found = True
        kept = [event for event in self._events if event.request is not request]
        found |= len(kept) < len(self._events)
        self._events = kept
        self._rest()
        return found

    def clear(self) -> None:
        """Forget all requests."""
        self._forget()
        self.scheduler.waiting.clear()
        self._events.clear()
        self._rest()

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Admit requests, read a chunk, choose each row's next input, release rows that end, feed the others.

        Returns what has happened. A request whose step raises finishes with the error, and the others go on.
        """
        try:
            with evaluating(self.lm):
                for act in (self._admit, self._read, self._round):
                    self._survive(act)
        except Exception as error:
            # What isolates failures has failed itself. Those that are read are given up, or else all that run; never
            # the queue.
            self._fail(self._stop_reading() or self._forget(), error)
        except BaseException:
            self._forget()
            raise
        self._rest()
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        """Take those out of the queue whose turn it is."""
        # Nearly every step: nobody looks how wide the rows are for an empty queue.
        if self.reading is not None or len(self.scheduler) == 0:
            return
        admitted = self.scheduler.admit(len(self.batch), self.batch.widest)
        if not admitted:
            return
        self.reading = Reading.of(admitted, self.batch.questions, self.prefill_chunk)
        if self.batch.running is None:
            # The weights may have been trained since the last requests.
            self.batch.runner.refresh()
            self._kept_rows.forget()
        self.batch.reserve(admitted, self.scheduler.limit)

    def _read(self) -> None:
        """Read one chunk of the questions of those that were admitted; rows whose question it ends join."""
        reading = self.reading
        if reading is None:
            return
        self._copy_others(reading)
        if reading.batches:
            entries = reading.batches[0]
            last = reading.chunks_left == 1

            def read(rows: range) -> None:
                if last:
                    self.batch.read(entries[rows.start : rows.stop], reading)
                else:
                    self.batch.read_chunk(reading)

            errors = apart(range(len(entries)), read).errors
            if last or errors:
                reading.next_batch()
            for i, error in errors.items():
                self._fail([entries[i]], error)
            self._copy_others(reading)
        if not reading.batches:
            # What is left are samples of a question that was cancelled, or failed: it is read once more.
            self.reading = Reading.of(reading.others, (), self.prefill_chunk) if reading.others else None

    def _copy_others(self, reading: Reading) -> None:
        """Start other samples of questions that are in the cache."""
        # Half a question lies where they would come to lie.
        if reading.done:
            return
        entries = reading.known(self.batch.questions)

        def copy(rows: range) -> None:
            self.batch.copy(entries[rows.start : rows.stop])

        errors = apart(range(len(entries)), copy).errors if entries else {}
        reading.drop(entries)
        for i, error in errors.items():
            self._fail([entries[i]], error)

    def _round(self) -> None:
        """One step of all running rows."""
        if self.batch.running is None:
            return
        started = time.perf_counter()
        chosen = choose_apart(self.lm, self.method, self.batch.running, self._kept_rows)
        # Timed in two parts: rows that end here have no share in the forward.
        halfway = time.perf_counter()
        chosen.running.charge(halfway - started)
        # Until they are released nothing has changed, and memory may run out.
        broken = [i for i, ending in chosen.ended.items() if ending.reason == "error"]
        left = self.batch.release(chosen.running, chosen.ended, broken)
        self._events += chosen.events
        self._finish(chosen.running, chosen.ended)
        # Rows move only where some have ended.
        self._feed(chosen.embeds_ND[left] if chosen.ended else chosen.embeds_ND)
        if self.batch.running is not None:
            self.batch.running.charge(time.perf_counter() - halfway)
        self.scheduler.ease()

    def _feed(self, embeds_ND: Tensor) -> None:
        """Feed what was chosen; where memory runs out, to fewer rows."""
        while self.batch.running is not None:
            running = self.batch.running
            try:
                errors = self.batch.feed(embeds_ND)
            except Exception as error:
                failed = memory_error(error)
            else:
                if errors:
                    ended = {i: Ending("error", error) for i, error in errors.items()}
                    self.batch.release(running, ended)
                    self._finish(running, ended)
                return
            embeds_ND = embeds_ND[self._shed(failed)]

    # Requests end

    def _finish(self, running: Running, ended: Mapping[int, Ending]) -> None:
        """Say that these rows have ended."""
        for i, ending in ended.items():
            entry = running.entries[i]
            event = Event(
                entry.request,
                "finished",
                reason=ending.reason,
                truncated=running.cut[i] or ending.reason != "stop",
                seconds=running.seconds[i],
                error=ending.error,
                number=entry.number,
            )
            self._events.append(event)

    def _fail(self, entries: Iterable[Queued], error: Exception) -> None:
        """Say that these have ended, which do not run (any more)."""
        # First of all: whatever fails below, nobody waits for them for ever.
        for entry in entries:
            event = Event(
                entry.request, "finished", reason="error", truncated=True, error=error, number=entry.number
            )
            self._events.append(event)
        try:
            self.batch.wipe_free()
        except Exception:
            # A NaN may be left behind the rows, which goes through any mask: all of the cache is given back. Whoever
            # has started waits again.
            self.scheduler.put_back(self._stop_reading() + self.batch.stop_all())
            self.batch.shrink()

    def _stop_reading(self) -> list[Queued]:
        """Stop those that are being read, but do not run yet."""
        reading = self.reading
        if reading is None:
            return []
        rows = {entry.number for entry in self.batch.entries}
        entries = reading.entries
        # Emptied too: `_read` may be in the middle of it.
        reading.batches.clear()
        reading.others.clear()
        self.reading = None
        return [entry for entry in entries if entry.number not in rows]

    def _forget(self) -> list[Queued]:
        """Stop all that have started."""
        started = self._stop_reading() + self.batch.entries
        self.batch.running = None
        return started

    def _rest(self) -> None:
        """Give memory back where there is nothing left to do."""
        if self.batch.running is None and self.reading is None and not len(self.scheduler):
            self.batch.shrink()

    # Memory that runs out

    def _survive(self, act: Callable[[], None]) -> None:
        """Do one thing; where memory runs out, less is done from now on."""
        try:
            act()
            return
        except Exception as error:
            failed = memory_error(error)
        self._shed(failed)

    def _shed(self, error: Exception) -> list[int]:
        """Have the newest wait again: those that are being read, or else half of the rows.

        Returns the rows that go on, in the order of their slots.
        """
        self.scheduler.squeeze(self.batch.wanted.positions)
        stopped = self._stop_reading()
        left = list(range(len(self.batch)))
        try:
            if not stopped:
                left, stopped = self.batch.stop_newest()
            self.batch.shrink()
        except Exception as again:
            # There is no room even to make room.
            memory_error(again)
            left = []
            stopped += self.batch.stop_all()
            self.batch.shrink()
        self._wait_again(stopped, error)
        if self.lm.device.type == "cuda":
            torch.cuda.empty_cache()
        return left

    def _wait_again(self, entries: list[Queued], error: Exception) -> None:
        """Put these back into the queue. A request that was alone each time fails in the end."""
        if len(entries) == 1 and self.batch.running is None:
            (entry,) = entries
            entries = [dataclasses.replace(entry, alone=entry.alone + 1)]
            if entries[0].alone >= ALONE:
                self._fail(entries, error)
                return
        self.scheduler.put_back(entries)


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
