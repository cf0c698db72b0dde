"""Who waits and who may run: first come, first served, within slots and a budget of positions.

A request is admitted when there is a slot for it and its positions (question, thoughts and answer at their limits) fit
with those of the running ones: rows are as wide as the widest, so n rows cost n times that. Freed slots are
filled a few at a time, since a forward over one question reads as many weights as one over several; nobody waits
longer than `PATIENCE` steps for company.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from colar.engine.request import Request

PATIENCE = 8
"""Steps that the first in the queue waits at a free slot for others to share its prefill."""
COMPANY = 8
"""One in so many slots must be free before questions are prefilled, unless patience or work runs out."""


class QueueFull(RuntimeError):
    """The queue is at its limit: try again later, or raise `max_waiting`."""


@dataclass(frozen=True)
class Queued:
    """A request in the queue, with its question as token ids and the positions that it may come to need."""

    request: Request
    ids: tuple[int, ...]

    @property
    def positions(self) -> int:
        decoding = self.request.decoding
        return len(self.ids) + decoding.max_latents + 1 + decoding.max_completion_length


class Scheduler:
    """The queue of an engine with `slots` slots and `budget` positions in all (None: no limit but the slots)."""

    def __init__(self, slots: int, budget: int | None = None, max_waiting: int | None = None) -> None:
        for name, value in (("max_batch", slots), ("token_budget", budget), ("max_waiting", max_waiting)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        self.slots, self.budget, self.max_waiting = slots, budget, max_waiting
        self.waiting: deque[Queued] = deque()
        self.waited = 0

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def room(self) -> int:
        """Places in the queue that are worth filling: as many as can start at once."""
        return self.slots if self.max_waiting is None else min(self.slots, self.max_waiting)

    def add(self, entry: Queued) -> None:
        """Append to the queue. QueueFull where it is full, ValueError where the request could never run."""
        if self.budget is not None and entry.positions > self.budget:
            raise ValueError(
                f"request {entry.request.id} needs {entry.positions} positions; token_budget is {self.budget}"
            )
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting, which is max_waiting")
        self.waiting.append(entry)

    def remove(self, request: Request) -> bool:
        """Take a request out of the queue; False where it is not in it."""
        kept = [entry for entry in self.waiting if entry.request is not request]
        found = len(kept) < len(self.waiting)
        self.waiting = deque(kept)
        return found

    def admit(self, running: int, widest: int) -> list[Queued]:
        """Who starts now, beside `running` rows of which the widest may come to need `widest` positions."""
        if not self.waiting:
            return []
        enough = min(len(self.waiting), max(1, self.slots // COMPANY))
        if running and self.slots - running < enough and self.waited < PATIENCE:
            self.waited += 1
            return []
        admitted: list[Queued] = []
        while self.waiting and running + len(admitted) < self.slots:
            widest = max(widest, self.waiting[0].positions)
            rows = running + len(admitted) + 1
            if self.budget is not None and rows > 1 and rows * widest > self.budget:
                break  # the first in the queue goes first: nobody overtakes it and lets it starve
            admitted.append(self.waiting.popleft())
        self.waited = 0 if admitted else self.waited
        return admitted
