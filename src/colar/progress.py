"""Progress on stderr: a bar with the time left on a terminal, a plain line every half minute elsewhere.

Results go to stdout, so a pipe does not receive it.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
PLAIN_EVERY_S = 30.0


def is_main() -> bool:
    """True in the process that prints: the first of those that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print one line on stderr, above the bars, in the main process only."""
    if is_main():
        tqdm.write(text, file=sys.stderr)


def duration(seconds: float) -> str:
    """`0.25 s`, `12 s`, `3.5 min`, `2.4 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def warn_on_error(what: str) -> Iterator[None]:
    """Warn of an error inside the block, and continue: a failed picture or page must not cost its result."""
    try:
        yield
    except Exception as error:
        say(f"warning: {what} could not be made: {type(error).__name__}: {error}")


class _Lines:
    """stderr that is not a terminal: a bar's text as a line, without the characters that redraw it."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


def bar(
    description: str, total: int | None = None, done: int = 0, items: Iterable[Any] | None = None
) -> tqdm:
    """A tqdm for a `with`: advance it by `update`, set the note at its end by `set_postfix_str(..., refresh=False)`.

    `done` of `total` were finished by an earlier process: the time left is estimated from this one's rate.
    """
    options: dict[str, Any] = {"mininterval": 0.1, "dynamic_ncols": True, "leave": None, "file": sys.stderr}
    if not sys.stderr.isatty():
        # A log file would get every redraw. Work of less than half a minute leaves no line.
        of_total = "/{total_fmt}{postfix}, {remaining} left" if total else "{postfix}"
        options = {"mininterval": PLAIN_EVERY_S, "delay": PLAIN_EVERY_S, "position": 0}
        options |= {"bar_format": "{desc}: {n_fmt}" + of_total, "file": _Lines()}
    # Redrawn by the clock, not by the count, because steps take milliseconds or minutes.
    return tqdm(items, description, total, initial=done, miniters=1, disable=not is_main(), **options)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over `items` with a bar; its total is their number, if that is known."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    yield from bar(description, total, items=items)
