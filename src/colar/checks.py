"""Checks of values that a user gave. One place, so that every package rejects a wrong value in the same words.

Each check raises ValueError with the name of the key, what is allowed, and what was given. NonFiniteError is for
numbers that a model computes.
"""

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

ERROR_CHARACTERS = 400
"""Most characters of a library's error that are shown, because torch's include C++ stack frames."""
INT64 = range(-(2**63), 2**63)
"""Whole numbers of 64 bits, as tensors and C have them."""


@contextlib.contextmanager
def in_library(what: str) -> Iterator[None]:
    """Turn any error of a library that reads a user's file or value into a ValueError: `what`, then its message.

    The message is one line. Libraries validate little of their input, and may raise a KeyError, a TypeError or a bare
    Exception from deep inside.
    """
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())[:ERROR_CHARACTERS]
        raise ValueError(f"{what}: {words or type(error).__name__}") from error


def is_number(value: object) -> TypeGuard[float]:
    """True if `value` is a finite int or float; a bool does not count, nor an int beyond the largest float."""
    # A tuple, because a union would be built at each call, and there is one for each number of a million records.
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_int(value: object) -> TypeGuard[int]:
    """True if `value` is an int; a bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """True if `value` is a whole number of at most 64 bits, 6.0 included: a larger one fits no tensor and no loop."""
    return is_number(value) and float(value).is_integer() and int(value) in INT64


def check_number(name: str, value: object, low: float, high: float = math.inf, whole: bool = False) -> None:
    """Reject all but a finite number in [low, high]; with `whole`, all but a whole one."""
    if is_number(value) and low <= float(value) <= high and (not whole or is_whole(value)):
        return
    bound = f"{low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
    raise ValueError(f"{name} must be a {'whole ' * whole}number, {bound}, got {value!r}")


def check_holds(name: str, holds: bool, value: object, allowed: str) -> None:
    """Reject `value` unless `holds`, and if it is infinite or NaN. `allowed` describes the right values."""
    finite = not isinstance(value, float) or math.isfinite(value)
    if not (holds and finite):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Reject all but the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_text(name: str, text: str) -> None:
    """Reject half of a surrogate pair: JSON can name it (`\\ud83d`), but it is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds half of a surrogate pair, {text[error.start]!r}, which is no character: put the whole "
            "character in its place, or leave it out"
        ) from None


def check_known(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Reject the first name that is not allowed; the message has the nearest allowed name, and all of them."""
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            raise ValueError(
                f"unknown {what} {name!r}{did_you_mean(name, allowed)}; allowed: {', '.join(allowed) or 'none'}"
            )


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`, did you mean 'x'?` where an allowed name is close to `name`, else an empty text."""
    close = difflib.get_close_matches(str(name), list(allowed), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, sorted; a key that only one of the two has differs."""
    missing = object()
    keys = before.keys() | now.keys()
    return sorted(key for key in keys if before.get(key, missing) != now.get(key, missing))


def check_same_run(where: object, before: Mapping[str, Any], now: Mapping[str, Any], remedy: str) -> None:
    """Refuse to continue the run in `where` with settings other than those that it was begun with.

    The message names every setting that differs, with both values, and ends with the `remedy`.
    """
    changed = changed_keys(before, now)
    if changed:
        both = "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed)
        raise ValueError(f"{where} holds another run ({both}); {remedy}")


class NonFiniteError(FloatingPointError):
    """A loss, a gradient or the hidden state of a request is NaN or infinite."""
