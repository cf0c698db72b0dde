"""Reasoning efforts: the words by which a server's clients ask for more or less thinking, as trained values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

EFFORTS = ("xhigh", "high", "medium", "low", "minimal")
"""The most thinking first. "none", no thinking at all, is a limit and no value of a method."""

DEFAULT_EFFORT = "medium"
"""Its values are the defaults where a method's own were not trained."""


def efforts_over(name: str, values: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Each effort as a value of the parameter `name`; `values` are the trained ones, the most thinking first.

        trained    1, 2, 3, 5        xhigh 1    high 2    medium 2    low 3    minimal 5

    Five efforts lie evenly over the values. Between two of these the one that thinks more is taken.
    """
    efforts = {}
    for i, effort in enumerate(EFFORTS):
        place = i * (len(values) - 1) / (len(EFFORTS) - 1)
        # Halfway between two: the earlier one.
        efforts[effort] = {name: values[math.ceil(place - 0.5)]}
    return efforts
