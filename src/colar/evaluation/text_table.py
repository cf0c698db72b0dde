"""A table of text cells, its two media (Markdown and the terminal), and how numbers are written in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    last: int = 0
    """Columns, from the right, that a terminal too narrow for all of them still shows; 0 shows all of them, folded."""


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


def narrowed(table: TextTable, width: int) -> TextTable:
    """The table with its words and its last columns alone, where all do not fit into `width` characters."""
    columns = zip(table.head, *table.rows, strict=True)
    # Each column takes its longest text, a space on either side and a vertical rule.
    needed = 1
    for column in columns:
        needed += 3 + max(len(text) for text in column)
    left_out = len(table.head) - table.words - table.last
    if needed <= width or not table.last or left_out <= 0:
        return table

    def ends(line: Sequence[str]) -> list[str]:
        # `last` is 1 or more here: [-0:] would be the whole line.
        return [*line[: table.words], *line[-table.last :]]

    note = f"{left_out} more columns do not fit this terminal; they are in report.md."
    rows = [ends(row) for row in table.rows]
    return replace(table, head=ends(table.head), rows=rows, notes=[*table.notes, note])


def print_tables(tables: Iterable[TextTable], console: Console) -> None:
    """Print tables; one that does not fit the terminal keeps its last columns, such as averages, where it says so."""
    for table in tables:
        console.print(rich_table(narrowed(table, console.width)))


def rich_table(table: TextTable) -> Table:
    """The table for a terminal. Texts are shown as they are: rich's markup is not read in them."""
    # As Text objects, labels such as [red] stay as they are.
    caption = Text("\n".join(table.notes))
    printed = Table(title=table.title, caption=caption, title_justify="left", caption_justify="left")
    for index, head in enumerate(table.head):
        words = index < table.words
        # On a narrow terminal words are folded, never a number.
        printed.add_column(
            Text(head), justify="left" if words else "right", overflow="fold", no_wrap=not words
        )
    for row in table.rows:
        printed.add_row(*(Text(text) for text in row))
    return printed


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
