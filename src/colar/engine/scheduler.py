"""Requests that wait and requests in prefill: first come, first served, within slots and a budget of positions.

A request is admitted if a slot is free and the positions of the cache, with its own, are within the budget. Slots are
as wide as the widest row may become, rounded up, so n rows require n times that:

    budget 150    running    15 and 30 positions     2 x 32 = 64
                  first      40                      3 x 48 = 144    admitted
                  second     12                      4 x 48 = 192    waits

If memory runs out, started requests return to the front of the queue, and half as many rows run (`rows_that_fit`).

Free slots are filled several at a time, because prefilling one question loads as many weights as prefilling several;
no request waits longer than `MAX_WAIT_STEPS` steps for others to share its prefill.

Requests that are admitted together are prefilled in batches, one a step, so that running rows wait for one at most.

    step       1           2           3
    prefills   a b c       d           f
    joins      a b c       d e         f         e is another sample of d's question: it is copied

The questions of a batch share a forward pass, right-padded, within `CHUNK` positions (on a GPU `GPU_PREFILL`). One that
is longer than `CHUNK` is prefilled by itself, in chunks of this size.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from colar import checks
from colar.engine.cache import CacheSize, round_columns
from colar.engine.completion import Event, EventKind
from colar.engine.graphs import columns_of, rows_of
from colar.engine.request import Request

MAX_WAIT_STEPS = 8
"""Most steps that the first in the queue waits for others to share its prefill, although a slot is free."""
SHARED_PREFILL_SLOTS = 8
"""One in this many slots must be free before questions are prefilled, unless `MAX_WAIT_STEPS` have passed or
nothing runs."""
CHUNK = 2048
"""Most positions of a question that are prefilled at once."""
GPU_PREFILL = 8192
"""Most positions of a forward pass of prefill on a CUDA GPU, padding included (else `CHUNK`); running rows wait."""


class QueueFull(RuntimeError):
    """The queue is at its limit: try again later, or raise `max_waiting`."""


@dataclass(eq=False)
class Entry:
    """A request in the engine: its question as token ids, and its progress. The engine numbers its requests from 0."""

    number: int
    request: Request
    ids: tuple[int, ...]
    thinks: bool = True
    """False once it answers."""
    cut: bool = False
    """True once the thinking has met its limit."""
    n_fed: int = 0
    """Embeddings fed since the question. While it thinks, these are its thoughts."""
    n_tokens: int = 0
    """Tokens of the answer that have been chosen."""
    reason: str = ""
    """The reason why it has ended, as in its last event; "" until then."""
    seconds: float = 0.0
    """Share of wall-clock time since it started."""
    error: Exception | None = None
    """The error that has ended it, if any."""

    @property
    def most_positions(self) -> int:
        """The most positions that it may need."""
        return len(self.ids) + self.request.decoding.positions_after_question

    def take_thought(self, done: bool, token_id: int, details: dict[str, Any]) -> list[Event]:
        """Report a thought or the stop, and end the thinking if it stops or has reached its limit."""
        if done:
            self.thinks = False
            return [self.event("stop", info=details.get("info", {}))]
        if self.n_fed >= self.request.decoding.max_latents:
            self.thinks = False
            self.cut = True
            return []
        return [self.event("thought", token_id=token_id, **details)]

    def take_token(self, done: bool, token_id: int, details: dict[str, Any]) -> list[Event]:
        """Report a token of the answer: EOS or the limit ends it."""
        self.n_tokens += 1
        if done:
            self.reason = "stop"
        elif self.n_tokens >= self.request.decoding.max_completion_length:
            self.reason = "length"
        return [self.event("token", token_id=token_id, info=details.get("info", {}))]

    def finished(self) -> Event:
        """The last event."""
        return self.event(
            "finished",
            reason=self.reason,
            truncated=self.cut or self.reason != "stop",
            seconds=self.seconds,
            error=self.error,
        )

    def event(self, kind: EventKind, **what: Any) -> Event:
        """An event of this request."""
        return Event(self.request, kind, number=self.number, **what)


class Scheduler:
    """The queue of an engine of at most `max_batch` rows and `token_budget` positions in all (None: any number).

    For CUDA graphs (`for_graphs`), rows are filled up to a power of 2 with copies, which write into a slot that nothing
    reads, and columns are a power of 2.
    """

    def __init__(
        self,
        max_batch: int,
        token_budget: int | None = None,
        max_waiting: int | None = None,
        for_graphs: bool = False,
        on_gpu: bool = False,
    ) -> None:
        limits = {"max_batch": max_batch, "token_budget": token_budget, "max_waiting": max_waiting}
        for name, value in limits.items():
            checks.check_holds(
                name, value is None or (checks.is_int(value) and value >= 1), value, "1 or more"
            )
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.max_waiting = max_waiting
        self.for_graphs = for_graphs
        self.on_gpu = on_gpu
        self.rows_that_fit = max_batch
        """Most rows that may run; fewer than `max_batch` after memory has run out."""
        self.waiting: deque[Entry] = deque()
        self.waited = 0
        """Steps that the first in the queue has waited for others to share its prefill, although a slot was free."""
        self.batches: deque[list[Entry]] = deque()
        """Requests in prefill: admitted, and not running yet. The first batch is next."""

    # The queue

    def check(self, request: Request, n_tokens: int) -> None:
        """ValueError for a request that could never run; its question has N tokens."""
        widest = n_tokens + request.decoding.positions_after_question
        needed = self.smallest_size(1, widest).positions
        if self.token_budget is not None and needed > self.token_budget:
            raise ValueError(
                f"request {request.id} needs {needed} positions; token_budget is {self.token_budget}"
            )

    def add(self, entry: Entry, running: Sequence[Entry]) -> None:
        """Append to the queue, given the running requests. QueueFull if `max_waiting` others wait for a slot."""
        started = len(running) + len(self.in_prefill)
        # Free slots are for the first in the queue, which do not wait for one. With a budget they may have to.
        free = max(0, self.rows_that_fit - started) if self.token_budget is None or not started else 0
        if self.max_waiting is not None and len(self.waiting) - free >= self.max_waiting:
            raise QueueFull(f"{self.max_waiting} requests wait for a slot, which is max_waiting")
        self.waiting.append(entry)

    def cancel(self, request: Request) -> bool:
        """Remove a request, found by identity, from the queue or from prefill; False if it is in neither."""
        n_before = len(self.waiting) + len(self.in_prefill)
        self.waiting = deque(entry for entry in self.waiting if entry.request is not request)
        for batch in self.batches:
            batch[:] = [entry for entry in batch if entry.request is not request]
        self.batches = deque(filter(None, self.batches))
        return len(self.waiting) + len(self.in_prefill) < n_before

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Return started requests to the queue, in the order in which all were submitted, even beyond `max_waiting`."""
        anew = [Entry(entry.number, entry.request, entry.ids) for entry in entries]
        self.waiting = deque(sorted([*anew, *self.waiting], key=lambda entry: entry.number))

    # Prefill

    @property
    def in_prefill(self) -> list[Entry]:
        """The requests of all batches."""
        return list(itertools.chain.from_iterable(self.batches))

    def schedule(self, running: Sequence[Entry]) -> list[Entry]:
        """The batch that is prefilled in this step, [] if there is none; it stays in `batches` until it has joined."""
        if not self.batches and (admitted := self._admit(running)):
            cached = {entry.ids for entry in running}
            most_positions = GPU_PREFILL if self.on_gpu else CHUNK
            self.batches.extend(_batches(admitted, cached, most_positions))
        return self.batches[0] if self.batches else []

    def _admit(self, running: Sequence[Entry]) -> list[Entry]:
        """Remove from the queue the requests that start now, given the running ones."""
        free = self.rows_that_fit - len(running)
        # A step without a free slot does not count as waiting for others.
        if not self.waiting or not free:
            return []

        # Wait for others: slots that are freed soon are then filled by the same prefill.
        enough = min(len(self.waiting), max(1, self.rows_that_fit // SHARED_PREFILL_SLOTS))
        if running and free < enough and self.waited < MAX_WAIT_STEPS:
            self.waited += 1
            return []

        admitted: list[Entry] = []
        widest = max((entry.most_positions for entry in running), default=0)
        while self.waiting and len(admitted) < free:
            rows = len(running) + len(admitted) + 1
            widest = max(widest, self.waiting[0].most_positions)
            # A single row always runs, because it has passed `check`. If the first in the queue does not fit, none
            # overtakes it, because it might starve.
            if (
                rows > 1
                and self.token_budget is not None
                and self.smallest_size(rows, widest).positions > self.token_budget
            ):
                break
            admitted.append(self.waiting.popleft())
        if admitted:
            self.waited = 0
        return admitted

    # The budget

    def smallest_size(self, rows: int, widest: int) -> CacheSize:
        """The smallest cache for this many rows, each of at most `widest` positions."""
        if self.for_graphs:
            return CacheSize(rows_of(rows, self.max_batch) + 1, columns_of(widest))
        return CacheSize(rows, round_columns(widest))

    def next_size(self, now: CacheSize, rows: int, widest: int) -> CacheSize:
        """The size to change to from `now`, within the budget if the smallest one is.

        If the budget allows it, the slots are a power of 2 and the cache only grows, because a new size copies all
        other rows, and has the graphs of decode steps recorded anew.
        """
        least = self.smallest_size(rows, widest)
        columns = max(now.columns, least.columns)
        slots = max(now.slots, least.slots)
        for grown in (
            CacheSize(max(slots, rows_of(rows, self.max_batch)), columns),
            CacheSize(slots, columns),
        ):
            if self.token_budget is None or grown.positions <= self.token_budget:
                return grown
        return least


def _batches(
    entries: Sequence[Entry], cached: set[tuple[int, ...]], most_positions: int
) -> Iterator[list[Entry]]:
    """Batches of requests, those of one question together. The first one has those whose question is `cached`."""
    batch: list[Entry] = []
    samples_of: dict[tuple[int, ...], list[Entry]] = {}
    for entry in entries:
        own = batch if entry.ids in cached else samples_of.setdefault(entry.ids, [])
        own.append(entry)
    n_questions = 0
    # Sorted, because questions of similar length waste the least padding. All of a batch are padded to its last one.
    for ids in sorted(samples_of, key=len):
        too_many = (n_questions + 1) * len(ids) > most_positions
        if n_questions and (too_many or len(ids) > CHUNK):
            yield batch
            batch, n_questions = [], 0
        batch += samples_of[ids]
        n_questions += 1
    if batch:
        yield batch
