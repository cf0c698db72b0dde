"""What every `Config` and `Params` checks of its values, in the same words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """A finite int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_number(name: str, value: object, low: float, high: float = math.inf, whole: bool = False) -> None:
    """ValueError in words unless `value` is a finite number (a whole one) in [low, high]."""
    if is_number(value) and low <= float(value) <= high and (not whole or float(value).is_integer()):
        return
    bound = f"{low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
    raise ValueError(f"{name} must be a {'whole ' * whole}number, {bound}, got {value!r}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """ValueError in words unless `value` is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
