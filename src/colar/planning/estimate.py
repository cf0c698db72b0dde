"""What a run takes, as a table: the same for what was measured and for what was computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table

from colar.training.preflight import clock
from colar.training.room import gib


@dataclass
class Estimate:
    """Lines (what, how much, of what that follows), and what will not go well."""

    title: str
    lines: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    """Of one device."""
    numbers: dict[str, float] = field(default_factory=dict)
    """The same, for programs."""

    def add(self, what: str, how_much: str, note: str = "") -> None:
        self.lines.append((what, how_much, note))

    def add_seconds(self, what: str, seconds: float, note: str = "") -> None:
        self.numbers[what] = seconds
        self.add(what, clock(seconds), note)

    def add_bytes(self, what: str, size: float, note: str = "") -> None:
        self.numbers[what] = size
        self.add(what, gib(size), note)

    def table(self) -> Table:
        """For a terminal: what does not go well stands below."""
        made = Table(title=self.title, title_justify="left", box=None)
        for column in ("", "", ""):
            made.add_column(column)
        for line in self.lines:
            made.add_row(*line)
        for problem in self.problems:
            made.add_row("does not fit", problem, style="bold red")
        return made

    def text(self) -> list[str]:
        """Plain lines, as they stand in a recipe's header."""
        widths = [max((len(line[i]) for line in self.lines), default=0) for i in (0, 1)]
        found = [self.title]
        for what, how_much, note in self.lines:
            found.append(f"  {what:<{widths[0]}}  {how_much:<{widths[1]}}  {note}".rstrip())
        return found + [f"  does not fit: {problem}" for problem in self.problems]


def disk(trained: int, kept: int, moments: int) -> int:
    """Bytes of a run's checkpoints: the best weights, and `kept` more (one of them while it is written) to resume."""
    return trained + (kept + 1) * (1 + moments) * trained
