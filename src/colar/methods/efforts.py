"""Reasoning efforts: the words with which a server's clients ask for more or less thinking, as values of `Params`.

    trained    1, 2, 3, 5        xhigh 1    high 2    medium 2    low 3    minimal 5
               1, 2              xhigh 1    high 1    medium 1    low 2    minimal 2

Five efforts lie evenly over the trained values. Between two values the one that thinks more is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

EFFORTS = ("xhigh", "high", "medium", "low", "minimal")
"""From the most thinking to the least. "none", no thinking at all, is a limit and no value of a method."""


def spread(name: str, values: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Each effort as a value of the parameter `name`; `values` are the trained ones, the most thinking first."""
    efforts = {}
    for i, effort in enumerate(EFFORTS):
        place = i * (len(values) - 1) / (len(EFFORTS) - 1)
        # Halfway between two: the earlier one.
        efforts[effort] = {name: values[math.ceil(place - 0.5)]}
    return efforts
