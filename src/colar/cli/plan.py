"""`colar plan`."""

from __future__ import annotations

import argparse
from typing import Any

from colar import recipes
from colar.cli.shared import collector_off, quiet_libraries


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a recipe takes on cards that are elsewhere: memory, time, disk",
        description="Compute from shapes alone what a recipe takes: no weights are loaded, nothing is trained. The "
        "recipe's rows must be there, or a part of them. Keys are overridden as for `colar train`. What runs here is "
        "measured by `colar train RECIPE --check`.",
    )
    parser.add_argument("recipe", help="a shipped recipe, e.g. llama-3.2-1b/cot-math, or a YAML file")
    parser.add_argument(
        "--gpu", default="h100", help="a100 | a100-40gb | h100 | h200 | b200 | l40s | rtx4090"
    )
    parser.add_argument("--count", type=int, default=1, help="number of cards")
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="rows to train on, where only a part of them is here: as long as these",
    )
    parser.set_defaults(run=run, takes_keys=True)


def run(args: argparse.Namespace) -> None:
    # A misspelt name is found before seconds of imports.
    recipes.find(args.recipe)
    with collector_off():
        from rich.console import Console

        from colar import planning, recipe

    quiet_libraries()
    found = planning.plan(recipe.load(args.recipe, args.overrides), args.gpu, args.count, as_many=args.rows)
    Console().print(found.table())
