"""Progress on stderr: a bar with ETA on a terminal, a plain line every half minute elsewhere.

Results go to stdout, so a pipe sees nothing of this.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")
PLAIN_EVERY_S = 30.0


def console() -> Console:
    """A console on the current stderr (looked up at each call: tests and pipes replace it)."""
    return Console(file=sys.stderr, highlight=False)


def is_main() -> bool:
    """True in the process that prints: the first of those that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print one line on stderr, once however many processes there are."""
    if is_main():
        print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`0.25 s`, `12 s`, `3.5 min`, `2.4 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def warn_on_error(what: str) -> Iterator[None]:
    """Warn of an error inside the block, and go on: a picture or a page is not worth the result that it shows."""
    try:
        yield
    except Exception as error:
        say(f"warning: {what} could not be made: {type(error).__name__}: {error}")


class Bar:
    """A running count: `advance` it, and leave a short `note` at its end (an accuracy so far, a file name).

    `done` of `total` were finished by an earlier process: the time left is estimated from this one's rate.
    """

    def __init__(self, description: str, total: int | None, done: int = 0) -> None:
        self.description = description
        self.total = total
        self.done = self._before = done
        self._started = time.monotonic()
        self.text = ""
        self._next_line = time.monotonic() + PLAIN_EVERY_S
        # A log file would keep every redraw of a live bar, so it gets plain lines instead.
        self._rich: Progress | None = None
        if is_main() and sys.stderr.isatty():
            # Notes are names of users' folders, in which brackets are no markup.
            self._rich = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False), console=console(),
            )  # fmt: skip
            self._task = self._rich.add_task(description, total=total, completed=done, note="")
            self._rich.start()

    def advance(self, n: int = 1) -> None:
        """Count `n` more."""
        self.done += n
        if self._rich is not None:
            self._rich.update(self._task, advance=n)
        # By the clock and not by the count: steps take milliseconds or minutes.
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_EVERY_S
            self._print_line()

    def note(self, text: str) -> None:
        """Show `text` at the end of the bar from now on."""
        self.text = text
        if self._rich is not None:
            self._rich.update(self._task, note=text)

    def close(self) -> None:
        """Stop the bar; elsewhere than on a terminal, print the last line."""
        if self._rich is not None:
            self._rich.stop()
        else:
            self._print_line()

    def _print_line(self) -> None:
        of = f"/{self.total}" if self.total is not None else ""
        parts = [f"{self.done}{of}", self.text, self._time_left()]
        say(f"{self.description}: {', '.join(part for part in parts if part)}")

    def _time_left(self) -> str:
        """`about 7 min left`; empty where that is unknown, or less than a few seconds."""
        own = self.done - self._before
        if self.total is None or own == 0:
            return ""
        seconds = (time.monotonic() - self._started) / own * (self.total - self.done)
        return "" if seconds < 10 else f"about {duration(seconds)} left"


@contextmanager
def bar(description: str, total: int | None = None) -> Iterator[Bar]:
    """A `Bar` that is closed at the end, also after an error."""
    running = Bar(description, total)
    try:
        yield running
    finally:
        running.close()


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over `items` with a bar; its total is their number, where that is known."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with bar(description, total) as running:
        for item in items:
            yield item
            running.advance()
