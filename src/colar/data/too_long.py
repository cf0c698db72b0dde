"""Examples that are too long for a model are left out, and how many these are is logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colar import progress
from colar.data.example import Example


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
