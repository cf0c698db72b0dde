"""Which requests wait and which may run: first come, first served, within slots and a budget of positions.

A request is admitted when there is a slot for it and the positions of the cache with it (`shapes.py`) are within the
budget. Slots are as wide as the widest row, so n rows cost n times that:

    budget 150    running    15 and 30 positions     2 x 32 = 64
                  first      40                      3 x 48 = 144    admitted
                  second     12                      4 x 48 = 192    waits

Where memory runs out, the budget is halved for a while (`squeeze`), and rows that the engine stops come back to the
front of the queue.

Freed slots are filled a few at a time, since a forward over one question reads as many weights as one over several;
nobody waits longer than `PATIENCE` steps for company.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from colar import checks
from colar.engine.request import Request
from colar.engine.shapes import Shapes

PATIENCE = 8
"""Steps that the first in the queue waits at a free slot for others to share its prefill."""
COMPANY = 8
"""One in this many slots must be free before questions are prefilled, unless patience or work runs out."""
RECOVERY = 64
"""Steps after which a budget that was halved is doubled again."""
PLENTY = 2**40
"""Positions that no machine has memory for."""


class QueueFull(RuntimeError):
    """The queue is at its limit: try again later, or raise `max_waiting`."""


@dataclass(frozen=True)
class Queued:
    """A request in the queue, with its question as token ids. The engine numbers its requests from 0."""

    number: int
    request: Request
    ids: tuple[int, ...]
    said: int = 0
    """Events that it had before memory ran out: it starts anew, and says these again."""
    alone: int = 0
    """How often memory ran out with nothing else that ran, since it last said something new."""

    @property
    def positions(self) -> int:
        """Most positions that it may come to need."""
        return len(self.ids) + self.request.decoding.positions


class Scheduler:
    """The queue of an engine with `slots` slots and `budget` positions in all (None: no limit but the slots)."""

    def __init__(
        self,
        slots: int,
        budget: int | None = None,
        max_waiting: int | None = None,
        spare: bool = False,
        filled: bool = False,
    ) -> None:
        # Named as the engine's arguments are: these are what a user gave.
        limits = {"max_batch": slots, "token_budget": budget, "max_waiting": max_waiting}
        for name, value in limits.items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            checks.check_holds(name, value is None or (whole and value >= 1), value, "1 or more")
        self.slots = slots
        self.budget = budget
        self.max_waiting = max_waiting
        self.shapes = Shapes(slots, spare, filled)
        self.squeezed: int | None = None
        """The budget while memory is short."""
        self.calm = 0
        """Steps since it ran out."""
        self.waiting: deque[Queued] = deque()
        self.waited = 0
        """Steps that the first in the queue has waited for company, at a free slot."""

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def room(self) -> int:
        """Places in the queue that are worth filling: as many as can start at once."""
        return self.slots if self.max_waiting is None else min(self.slots, self.max_waiting)

    @property
    def limit(self) -> int | None:
        """The most positions at present."""
        limits = [limit for limit in (self.budget, self.squeezed) if limit is not None]
        return min(limits, default=None)

    def check(self, entry: Queued) -> None:
        """ValueError for a request that could never run."""
        # What would be allocated for it alone: rounded up.
        needed = self.shapes.least(1, entry.positions).positions
        if self.budget is not None and needed > self.budget:
            raise ValueError(
                f"request {entry.request.id} needs {needed} positions; token_budget is {self.budget}"
            )

    def add(self, entry: Queued) -> None:
        """Append to the queue. QueueFull where it is full."""
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting, which is max_waiting")
        self.waiting.append(entry)

    def remove(self, request: Request) -> bool:
        """Take a request out of the queue; False where it is not in it."""
        left = deque(entry for entry in self.waiting if entry.request is not request)
        found = len(left) < len(self.waiting)
        self.waiting = left
        return found

    def admit(self, running: int, widest: int) -> list[Queued]:
        """Take those out of the queue that start now.

        They start beside `running` rows, of which the widest may come to need `widest` positions.
        """
        free = self.slots - running
        # Without a free slot nobody waits for company: such a step does not count.
        if not self.waiting or not free:
            return []

        # Wait for company: slots that others will free soon are filled in one prefill.
        enough = min(len(self.waiting), max(1, self.slots // COMPANY))
        if running and free < enough and self.waited < PATIENCE:
            self.waited += 1
            return []

        admitted: list[Queued] = []
        while self.waiting and running + len(admitted) < self.slots:
            rows = running + len(admitted) + 1
            widest = max(widest, self.waiting[0].positions)
            # A row that is alone always runs: `check` has let it pass. Where the first in the queue does not fit,
            # nobody overtakes it, or it might starve.
            if rows > 1 and not self.fits(rows, widest):
                break
            admitted.append(self.waiting.popleft())
        if admitted:
            self.waited = 0
        return admitted

    def fits(self, rows: int, widest: int) -> bool:
        """Whether this many rows, as wide as that, are within the present limit."""
        return self.limit is None or self.shapes.least(rows, widest).positions <= self.limit

    # Memory that ran out

    def put_back(self, entries: Sequence[Queued]) -> None:
        """Let these wait again, before all others and in the order in which they came, whatever `max_waiting` is."""
        self.waiting.extendleft(sorted(entries, key=lambda entry: entry.number, reverse=True))

    def squeeze(self, positions: int) -> None:
        """Halve the budget: memory was too small for this many."""
        limit = positions if self.limit is None else min(positions, self.limit)
        self.squeezed = max(1, limit // 2)
        self.calm = 0

    def ease(self) -> None:
        """Count a step for which there was memory; after some, more may run again."""
        if self.squeezed is None:
            return
        self.calm += 1
        if self.calm >= RECOVERY:
            self.calm = 0
            self.squeezed *= 2
            if self.squeezed >= (self.budget or PLENTY):
                self.squeezed = None
