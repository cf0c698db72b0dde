"""Per-request values as reports, tables and pages have them: by name, and which of them is a method's speed.

No torch: `colar report` reads records without it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Given = tuple[tuple[str, float], ...]
"""A request's values by name, sorted: its speed, and what is not at its default. (("compression_factor", 2),)"""

SPEEDS = {"compression_factor": "c"}
"""Parameters that set how fast a method thinks, with the letter that stands for them in tables. Each is the number of
tokens of the reference chain that one thought stands for."""


def given(params: Any) -> Given:
    """The values of a method's `Params` that name a system."""
    found = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name in SPEEDS or value != field.default:
            found[field.name] = value
    return tuple(sorted(found.items()))


def speed(values: Given) -> float | None:
    """Tokens of the reference chain to a thought; None for a method without a speed."""
    for name, value in values:
        if name in SPEEDS:
            return value
    return None


def speed_text(values: Given) -> str:
    """The speed as tables have it, `c=2`; "" where there is none."""
    return ", ".join(f"{SPEEDS[name]}={value:g}" for name, value in values if name in SPEEDS)


def options(values: Given) -> Given:
    """The values other than the speed."""
    return tuple((name, value) for name, value in values if name not in SPEEDS)


def texts(values: Given) -> list[str]:
    """Each value as text, `confidence_threshold=0.8`; one that is true by its name alone."""
    return [name if value is True else f"{name}={value:g}" for name, value in values]
