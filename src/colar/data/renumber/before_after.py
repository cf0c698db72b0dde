"""Rows and what other numbers make of them, one above the other: what `colar data show --renumber` prints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from colar.data.example import Example
from colar.data.renumber import renumber
from colar.data.renumber.program import NotAProgram


def print_rows(examples: Iterable[Example], versions: int, seed: int) -> None:
    """Print each row and up to `versions` new ones on stdout; on a terminal, what is new in them is bold."""
    console = Console(highlight=False)
    for example in examples:
        console.print(Text(example.id))
        table = Table.grid(padding=(0, 1))
        table.add_row("  ", *_cells(example, example))
        try:
            made = renumber.versions_of(example, versions, seed)
        except NotAProgram as reason:
            table.add_row("", Text(f"stays alone: {reason}"))
            made = []
        for new in made:
            table.add_row("~" + new.id.rpartition("~")[2], *_cells(example, new))
        console.print(table)
        console.print()


def _cells(before: Example, now: Example) -> tuple[Text]:
    """The question, and below it the chain and the answer."""
    text = _new_in_bold(before.question, now.question)
    text.append("\n")
    text.append_text(_new_in_bold(" ".join(before.steps), " ".join(now.steps)))
    text.append(f"  #### {now.answer}")
    return (text,)


def _new_in_bold(before: str, now: str) -> Text:
    """`now`, its words that are not those of `before` in bold."""
    old, new = before.split(" "), now.split(" ")
    text = Text()
    # autojunk would take frequent words of a long text for noise, and not match them.
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for what, _, _, start, end in matcher.get_opcodes():
        words = " ".join(new[start:end])
        joint = " " if text and words else ""
        text.append(joint)
        text.append(words, style="" if what == "equal" else "bold")
    return text
