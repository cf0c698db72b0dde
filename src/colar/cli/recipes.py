"""`colar recipes list | copy`."""

from __future__ import annotations

import argparse
from typing import Any

from colar import progress, recipes

PADDING = 4
"""Columns that rich leaves free around those of a table."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("recipes", help="list or copy the recipes that ship with colar")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | copy")
    listed = actions.add_parser("list", help="every shipped recipe, by the name that `colar train` takes")
    listed.set_defaults(run=recipes_list)
    copied = actions.add_parser("copy", help="copy a shipped recipe, and those it is based on, to change it")
    copied.add_argument("name", help="name of a shipped recipe, e.g. tiny/colar")
    copied.add_argument("target", nargs="?", default="recipes", help="folder to copy into (default: recipes)")
    copied.set_defaults(run=recipes_copy)


def recipes_list(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    # A program that reads the list gets one plain line each, with nothing cut off.
    console = Console()
    if not console.is_terminal:
        for name in recipes.names():
            print(f"{name:<28} {recipes.describe(name)}")
        return
    shipped = recipes.names()
    # The name is what a user types: where there is no room, the description is cut.
    longest = max(len(name) for name in shipped)
    room = max(console.width - longest - PADDING, 20)
    table = Table(box=None)
    table.add_column("recipe", min_width=longest)
    table.add_column("description", no_wrap=True, overflow="ellipsis", max_width=room)
    for name in shipped:
        table.add_row(name, recipes.describe(name))
    console.print(table)


def recipes_copy(args: argparse.Namespace) -> None:
    written = recipes.copy(args.name, args.target)
    # Its own file first, then its bases.
    for path in written:
        print(path)
    progress.say(f"train it: colar train {written[0]}")
