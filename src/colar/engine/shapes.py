"""How many slots and columns the cache has, so that it stays within a budget of positions.

    slots x columns = positions          rows that run: 3, of which the widest may come to need 40 positions

    40 columns     a a a a a . . .       rounded up to 48: attention reads a multiple of 16
                   b b b b b b b b
                   c c c . . . . .
                   . . . . . . . .       a slot more than there are rows: they came one by one, and slots are doubled

Slots are as wide as the widest row that runs, so n rows cost n times that. A row's width is the most that it may come
to need: its question, and its thoughts and answer at their limits.
"""

from __future__ import annotations

from dataclasses import dataclass

ROUND_TO = 16
"""Attention reads columns up to a multiple of this: few shapes."""
HOLD = 4
"""Slots or columns beyond this many times what is needed are given back while rows run."""


@dataclass(frozen=True)
class Shape:
    """How much is allocated, a layer: slots times columns are positions, of a key and a value for each head."""

    slots: int
    columns: int

    @property
    def positions(self) -> int:
        return self.slots * self.columns


NOTHING = Shape(0, 0)


@dataclass(frozen=True)
class Shapes:
    """Chooses shapes for `rows` rows that may come to need `widest` positions, at most `max_batch` of them.

    A compiled step needs spare room: a slice that reads all slots or all columns would be a case of its own to it, and
    a row that is alone runs beside a copy, which writes into a slot that nobody reads. With `filled` rows are filled up
    to a power of 2 with such copies.
    """

    max_batch: int
    spare: bool = False
    filled: bool = False

    def least(self, rows: int, widest: int) -> Shape:
        """The smallest one."""
        if self.filled:
            return Shape(filled_up(rows, self.max_batch) + 1, round_up(widest))
        if self.spare:
            return Shape(max(rows, 2) + 1, round_up(widest) + ROUND_TO)
        return Shape(rows, round_up(widest))

    def grown(self, now: Shape, rows: int, widest: int, limit: int | None) -> Shape:
        """One to go over to from `now`, within `limit` positions where the smallest one is.

        Larger than the smallest: slots are doubled, and neither slots nor columns are given back for a little while, so
        that rows that come and go do not have all others copied each time.
        """
        least = self.least(rows, widest)
        most_slots = self.least(self.max_batch, widest).slots
        slots = now.slots
        if slots < least.slots:
            slots = max(least.slots, min(2 * now.slots, most_slots))
        if slots > HOLD * least.slots:
            slots = least.slots
        columns = now.columns
        if not least.columns <= columns <= HOLD * least.columns:
            columns = least.columns

        for shape in (Shape(slots, columns), Shape(least.slots, columns), Shape(slots, least.columns)):
            if limit is None or shape.positions <= limit:
                return shape
        return least


def filled_up(rows: int, most: int) -> int:
    """The next power of 2, at most `most`."""
    return min(most, 1 << (rows - 1).bit_length())


def round_up(columns: int) -> int:
    return -(-columns // ROUND_TO) * ROUND_TO
