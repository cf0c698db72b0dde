"""A diagnosis as tables: for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from colar.evaluation.tables import markdown_line
from colar.look.diagnosis import CLASSES
from colar.look.places import KINDS

SYSTEM = ("system", "c")
MEASURED = ("read", "write", "whole chain", "stop", "free", "#L", "gold #L")
WRONG = CLASSES[1:]
FIRST = {
    "behind_number": "t1 after numbers",
    "else": "t1 else",
    "result_behind_one": "result after one token",
    "result_behind_several": "result after several",
}


def cells(row: Mapping[str, Any], widest: int = 0, kinds: Sequence[str] = ()) -> dict[str, str]:
    """A row of `diagnose`, with the keys that name its system, as tables show it: percentages, by column.

    `widest` is the most places that a group has in any row of the table: there are no columns for them where it is 0.
    `kinds` are the kinds of token that any row has.
    """
    factor = row["compression_factor"]
    variant = row["variant"]
    shown = {
        "system": f"{row['model']} ({variant})" if variant else row["model"],
        "c": "-" if factor is None else f"{factor:g}",
        "read": percent(row["read"]),
        "write": percent(row["write_group"]),
        "whole chain": percent(row["write_chain"]),
        "stop": percent(row["stop"]),
        "free": percent(row["free"]),
        "#L": f"{row['length']:.1f}",
        "gold #L": f"{row['reference_length']:.1f}",
    }
    for name in WRONG:
        shown[name] = percent(row["classes"][name])
    # Rows of an older version have no places, and neither has a latent head.
    by_place = row.get("write_by_place") or []
    for place in range(widest):
        shown[f"t{place + 1}"] = percent(by_place[place] if place < len(by_place) else None)
    if widest:
        shown["joint"] = percent(row.get("write_joint"))
    by_kind = row.get("write_by_kind") or {}
    for kind in kinds:
        shown[kind] = percent(by_kind.get(kind))
    first = row.get("write_first") or {}
    if kinds:
        for name, column in FIRST.items():
            shown[column] = percent(first.get(name))
    return shown


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def shown_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The cells of all rows, with the same columns each."""
    widest = max(len(row.get("write_by_place") or []) for row in rows)
    by_kinds = [row.get("write_by_kind") or {} for row in rows]
    kinds = [kind for kind in KINDS if any(by_kind.get(kind) is not None for by_kind in by_kinds)]
    return [cells(row, widest, kinds) for row in rows]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """For the terminal: what was measured, what went wrong, and the places of a group where there are any.

    Four tables, because one would be wider than most terminals.
    """
    shown = shown_rows(rows)
    kinds = [name for name in shown[0] if name in (*KINDS, *FIRST.values())]
    places = [name for name in shown[0] if name not in (*SYSTEM, *MEASURED, *WRONG, *kinds)]
    titles = {
        f"{rows[0]['n']} problems: % of them, of latents for `write`": MEASURED,
        "% of problems, by the first thing that went wrong": WRONG,
    }
    if places:
        titles["write by place in the group: % right, after a right prefix"] = tuple(places)
    if kinds:
        titles["write by kind of token, and a group's first token by what came before"] = tuple(kinds)
    made = []
    for title, columns in titles.items():
        table = Table(title=title, title_justify="left")
        for name in (*SYSTEM, *columns):
            justify: Literal["left", "right"] = "left" if name == "system" else "right"
            # Where a terminal is narrow, heads of two words are the ones that wrap, and nothing is cut.
            table.add_column(
                name, justify=justify, no_wrap=name in WRONG and " " not in name, overflow="fold"
            )
        for row in shown:
            # A system is called as its folder is, brackets included.
            table.add_row(*(Text(row[name]) for name in (*SYSTEM, *columns)))
        made.append(table)
    return made


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """For a page: all columns in one table."""
    shown = shown_rows(rows)
    alignment = ["---"] + ["---:"] * (len(shown[0]) - 1)
    lines = [list(shown[0]), alignment, *(list(row.values()) for row in shown)]
    return "".join(markdown_line(line) + "\n" for line in lines)
