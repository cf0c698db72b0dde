"""Questions that are being read: admitted requests that do not run yet.

    step     1           2           3           4
    reads    a b c       d           d           d         a chunk a step: rows that run wait for no more than that
    joins    a b c                               d e       e is another sample of d's question: it is copied

Several questions are read at once, right-padded, where one chunk takes them all. A question that is longer than a
chunk is read alone, in several steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from colar.engine.request import Request
from colar.engine.scheduler import Queued


@dataclass
class Reading:
    """The requests of one admission that do not run yet."""

    chunk: int
    """Most positions of one forward, padding included."""
    batches: deque[list[Queued]] = field(default_factory=deque)
    """Each distinct question once; the first batch is read next."""
    others: list[Queued] = field(default_factory=list)
    """Other samples of these questions, or of those that run."""
    done: int = 0
    """Positions of the first batch that have been read, where that is one long question."""
    slot: int = 0
    """Where they lie."""
    seconds: float = 0.0
    """What that took."""

    @classmethod
    def of(cls, entries: Sequence[Queued], running: Collection[tuple[int, ...]], chunk: int) -> Reading:
        """What there is to read for these entries, where the questions `running` are in the cache."""
        reading = cls(chunk)
        known = set(running)
        fresh: list[Queued] = []
        for entry in entries:
            if entry.ids in known:
                reading.others.append(entry)
            else:
                fresh.append(entry)
                known.add(entry.ids)
        # Neighbours of like length waste the least padding.
        fresh.sort(key=lambda entry: len(entry.ids))
        reading.batches.extend(_batches(fresh, chunk))
        return reading

    @property
    def entries(self) -> list[Queued]:
        """All that wait in here."""
        waiting = list(self.others)
        for batch in self.batches:
            waiting += batch
        return waiting

    @property
    def chunks_left(self) -> int:
        """Chunks of the first batch that are to be read."""
        longest = len(self.batches[0][-1].ids)
        return -(-(longest - self.done) // self.chunk)

    def known(self, questions: Collection[tuple[int, ...]]) -> list[Queued]:
        """Other samples of these questions, which are in the cache."""
        return [entry for entry in self.others if entry.ids in questions]

    def drop(self, entries: Sequence[Queued]) -> None:
        """Take these other samples out."""
        numbers = {entry.number for entry in entries}
        self.others = [entry for entry in self.others if entry.number not in numbers]

    def next_batch(self) -> list[Queued]:
        """Take out the first batch, which has been read."""
        self.done = 0
        self.seconds = 0.0
        return self.batches.popleft()

    def remove(self, request: Request) -> bool:
        """Take a request out; False where it is not in here."""
        before = len(self.entries)
        self.others = [entry for entry in self.others if entry.request is not request]
        kept: deque[list[Queued]] = deque()
        for i, batch in enumerate(self.batches):
            left = [entry for entry in batch if entry.request is not request]
            if left:
                kept.append(left)
            elif i == 0:
                self.done = 0
                self.seconds = 0.0
        self.batches = kept
        return len(self.entries) < before


def _batches(entries: Sequence[Queued], chunk: int) -> Iterator[list[Queued]]:
    """Neighbours whose questions one forward takes; a question that is too long for one comes alone.

    They come shortest first: the newest of a batch is its longest, and all are padded to it.
    """
    batch: list[Queued] = []
    for entry in entries:
        if batch and (len(batch) + 1) * len(entry.ids) > chunk:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch
