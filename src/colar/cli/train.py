"""`colar train`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from colar import progress, recipes
from colar.cli.shared import collector_off, quiet_libraries


def add_parser(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a recipe; the same command resumes",
        description="Train a recipe. Any key can be overridden by its full name: --training.learning_rate 1e-4. "
        "The same command resumes a run that was stopped, and skips stages that are finished.",
    )
    train.add_argument(
        "recipe", help="a shipped recipe, e.g. tiny/colar (see `colar recipes list`), or a YAML file"
    )
    train.add_argument(
        "--no_resume",
        action="store_true",
        help="start the run again from the beginning, deleting its checkpoints",
    )
    train.add_argument(
        "--stages", nargs="+", metavar="NAME", help="of a recipe with stages, these alone (default: all)"
    )
    train.add_argument(
        "--keys", action="store_true", help="list every key of a recipe with its meaning, and exit"
    )
    train.add_argument(
        "--check",
        action="store_true",
        help="run the longest batch, a few updates and a validation batch here, print what was measured, and exit",
    )
    train.set_defaults(run=run, takes_keys=True, resumes=True)


def run(args: argparse.Namespace) -> None:
    # A misspelt name is found before seconds of imports.
    if not args.keys:
        recipes.find(args.recipe)
    with collector_off():
        from colar import processes, recipe

    quiet_libraries()
    if args.keys:
        _print_keys(recipe.all_keys())
        return
    # What argparse did not know are overrides: the recipe's own parser knows its keys.
    stages = recipe.load_stages(args.recipe, args.overrides, args.stages)
    if args.check:
        _check(stages)
        processes.leave()
        return
    best = recipe.run_stages(stages, resume=not args.no_resume)
    # The path is printed when all processes are done.
    processes.leave()
    # The path alone on stdout, once: out=$(colar train ...) is what a script wants.
    if progress.is_main():
        print(best)


def _print_keys(keys: Iterable[tuple[str, Any, str]]) -> None:
    """Print every key with its default and its meaning."""
    for key, default, meaning in keys:
        value = "" if default is dataclasses.MISSING else f" (default: {json.dumps(default)})"
        print(textwrap.fill(meaning, 100, initial_indent=f"{key}{value}: ", subsequent_indent="    "))


def _check(stages: Any) -> None:
    """Print the table of what was measured of each stage whose start is there."""
    from rich.console import Console

    from colar.recipe.check import check

    for place, stage in enumerate(stages):
        start = stage.recipe.model.init_from
        if place > 0 and not Path(start).exists():
            progress.say(f"stage {stage.name} starts from {start}: it can be checked when that is trained")
            return
        found = check(stage.recipe)
        if progress.is_main():
            Console().print(found)
