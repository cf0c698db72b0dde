"""A table without a medium, its two media, and how numbers are written in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from colar.ops.stats import Z95
from colar.show.naming import Row

BLANK = "–"


@dataclass(frozen=True)
class Grid:
    """A table without a medium: a title, column heads, rows of text, and notes below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    words: int = 1
    """How many columns, from the left, hold words; the others hold numbers and are set flush right."""
    last: int = 0
    """How many columns, from the right, a terminal too narrow for all of them shows, 0 for all of them, folded."""


def markdown(grid: Grid) -> str:
    escaped = [[_escape(text) for text in line] for line in (grid.head, *grid.rows)]
    rule = ["---"] * grid.words + ["---:"] * (len(grid.head) - grid.words)
    table = "\n".join("| " + " | ".join(line) + " |" for line in (escaped[0], rule, *escaped[1:]))
    return "\n\n".join([f"## {grid.title}", table, *map(_escape, grid.notes)])


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def narrowed(grid: Grid, width: int) -> Grid:
    """The grid with no more than its words and its last columns, where all do not fit into `width` characters."""
    lines = (grid.head, *grid.rows)
    needed = 1 + sum(3 + max(map(len, column)) for column in zip(*lines, strict=True))
    left_out = len(grid.head) - grid.words - grid.last
    if needed <= width or not grid.last or left_out <= 0:
        return grid
    head, *rows = ([*line[: grid.words], *line[-grid.last :]] for line in lines)
    note = f"{left_out} more columns do not fit this terminal; they are in report.md."
    return replace(grid, head=head, rows=rows, notes=[*grid.notes, note])


def rich_table(grid: Grid) -> Table:
    caption = Text("\n".join(grid.notes))
    table = Table(title=grid.title, caption=caption, title_justify="left", caption_justify="left")
    for index, head in enumerate(grid.head):
        table.add_column(Text(head), justify="left" if index < grid.words else "right", overflow="fold")
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table


def share(row: Row | None) -> str:
    if row is None:
        return BLANK
    return plus_minus(row["accuracy"], None if row["accuracy_se"] is None else Z95 * row["accuracy_se"])


def points(row: Row | None) -> str:
    """A difference in points, starred when its interval leaves out 0."""
    if row is None:
        return BLANK
    text = f"{100 * row['difference']:+.1f}"
    if row["interval"] is None:
        return text
    low, high = row["interval"]
    return f"{text} ± {100 * Z95 * row['se']:.1f}" + (" *" if low > 0 or high < 0 else "")


def plus_minus(share: float, half: float | None) -> str:
    return f"{100 * share:.1f}" + ("" if half is None else f" ± {100 * half:.1f}")


def percent(share: float | None) -> str:
    return BLANK if share is None else f"{100 * share:.1f}"


def number(value: float | None) -> str:
    return BLANK if value is None else f"{value:.1f}"
