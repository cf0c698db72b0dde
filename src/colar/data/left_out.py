"""Rows that are left out, and how these are logged: those that cannot be read, and those too long for a model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from colar import progress
from colar.data.example import Example

SHOWN = 3
"""Places that a message names."""


@dataclass
class LeftOut:
    """The places of rows that cannot be read, by the reason."""

    expected: type[ValueError] | tuple[type[ValueError], ...] = ValueError
    """Errors of a row that is left out; any other ends the load."""
    places: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: str, error: ValueError) -> None:
        """Leave out the row at this place. Raises the error, with the place, where it is not `expected`."""
        if not isinstance(error, self.expected):
            raise ValueError(f"{place}: {error}") from error
        self.places[str(error)].append(place)

    def lines(self) -> list[str]:
        """A line for each kind of reason: how many rows, and the places of the first."""
        # Alike up to a detail ("an operation that is no arithmetic: sqrt") is one reason.
        kinds: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
        for reason, places in self.places.items():
            kinds[reason.partition(": ")[0]][reason] = places
        lines = []
        for kind, reasons in sorted(kinds.items(), key=lambda item: -sum(map(len, item[1].values()))):
            places = list(itertools.chain.from_iterable(reasons.values()))
            named = next(iter(reasons)) if len(reasons) == 1 else f"{kind}: {len(reasons)} different ones"
            more = ", ..." if len(places) > SHOWN else ""
            lines.append(f"left out {len(places):,}: {named} ({', '.join(places[:SHOWN])}{more})")
        return lines

    def say(self, name: str, n_read: int) -> None:
        """Log how many rows of `name` were read, if not all, and why the others were not."""
        if self.places:
            n_rows = n_read + sum(map(len, self.places.values()))
            progress.say(f"{name}: read {n_read:,} of {n_rows:,} rows")
        for line in self.lines():
            progress.say(f"  {line}")


def leave_out(
    examples: Sequence[Example], too_long: Mapping[int, str], kind: str, remedy: str
) -> list[Example]:
    """The examples without those that are too long, given by index with the reason; logs how many these are.

    `kind` names the examples ("training rows"), `remedy` the key that changes it. ValueError where more than half are
    too long.
    """
    if too_long:
        reason = next(iter(too_long.values()))
        count = f"{len(too_long):,} of {len(examples):,} {kind}"
        if 2 * len(too_long) > len(examples):
            raise ValueError(f"{reason}; {count} are too long: {remedy}")
        progress.say(f"left out {count} that are too long ({reason}): {remedy}")
    return [example for index, example in enumerate(examples) if index not in too_long]
