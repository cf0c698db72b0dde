"""A table of text cells, its two media (Markdown and the terminal), and how numbers are written in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

BLANK = "–"


@dataclass(frozen=True)
class TextTable:
    """A table, for Markdown or a terminal: a title, column heads, rows of text, and notes below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    words: int = 1
    """Columns, from the left, that hold words; the others hold numbers and are set flush right."""


def markdown(table: TextTable) -> str:
    """A heading, the table and its notes. Column heads and cells are escaped: `|`, `*` and `<` mean themselves."""
    # `---:` sets a column flush right.
    rule = ["---"] * table.words + ["---:"] * (len(table.head) - table.words)
    lines = [markdown_line(table.head), "| " + " | ".join(rule) + " |"]
    for row in table.rows:
        lines.append(markdown_line(row))
    notes = [_escape(note) for note in table.notes]
    return "\n\n".join([f"## {table.title}", "\n".join(lines), *notes])


def markdown_line(cells: Sequence[str]) -> str:
    """A row of a table, its cells escaped."""
    return "| " + " | ".join(_escape(text) for text in cells) + " |"


def _escape(text: str) -> str:
    # A line break would end the row, and "<" open a tag.
    text = " ".join(text.splitlines())
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def print_tables(tables: Iterable[TextTable], console: Console) -> None:
    """Print tables; one that does not fit the terminal keeps its whole numbers, and its lines are wrapped there.

    Texts are shown as they are: rich's markup is not read in them.
    """
    for table in tables:
        # As Text objects, labels such as [red] stay as they are.
        caption = Text("\n".join(table.notes))
        printed = Table(title=table.title, caption=caption, title_justify="left", caption_justify="left")
        for index, column in enumerate(zip(table.head, *table.rows, strict=True)):
            # On a narrow terminal words are folded, never a number.
            words = index < table.words
            least = None if words else max(map(len, column))
            printed.add_column(
                Text(column[0]), justify="left" if words else "right", overflow="fold", min_width=least
            )
        for row in table.rows:
            printed.add_row(*(Text(text) for text in row))
        needed = console.measure(printed, options=console.options.update(max_width=10_000)).minimum
        if needed > console.width:
            printed.width = needed
        console.print(printed, crop=False)


def percent(share: float | None, half: float | None = None, digits: int = 1) -> str:
    """A share in %, with half of its interval where that is known: `52.0 ± 3.9`."""
    if share is None:
        return BLANK
    text = f"{100 * share:.{digits}f}"
    return text if half is None else f"{text} {half_width(half, digits)}"


def half_width(half: float | None, digits: int = 1) -> str:
    """Half of an interval, in points: `± 3.9`."""
    return BLANK if half is None else f"± {100 * half:.{digits}f}"


def number(value: float | None) -> str:
    return BLANK if value is None else f"{value:.1f}"
