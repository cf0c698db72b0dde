"""`colar train`, and `colar recipes list | copy`."""

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import textwrap

from colar import files, progress, recipes, yaml_settings
from colar.cli.options import Parser, columns_of, columns_option, judge_option

NEEDED = ("model", "data", "output")
"""Options that `colar train auto` requires."""
CHOICES = ("test", "method", "grpo", "columns", "template", "judge")
"""Options that `colar train auto` accepts: the other fields of `auto_run.AutoCall`."""


def add_train(train: Parser) -> None:
    train.description = (
        "Train a recipe. Any key can be overridden by its full name: --training.learning_rate 1e-4. "
        "The same command resumes a run that was stopped, and skips stages that are finished."
    )
    train.add_argument(
        "recipe",
        nargs="?",
        help="auto, a shipped recipe, e.g. tiny/colar (see `colar recipes list`), or a YAML file",
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
        "--keys", action="store_true", help="list every key that a recipe may have with its meaning, and exit"
    )
    train.add_argument(
        "--check",
        action="store_true",
        help="run the longest batch, a few updates and a validation batch here, print what was measured, and exit",
    )
    own = train.add_argument_group(
        "a recipe for your model and your file", "colar train auto, see docs/train.md"
    )
    own.add_argument("--model", help="a folder, a Hub id, or a built-in backbone (tiny, smollm2-135m)")
    own.add_argument(
        "--data",
        help="a file of problems, a folder (its train file), or a Hub data set owner/name[/config][:split] (default "
        "split: train)",
    )
    own.add_argument("--output", help="folder of the run (of other recipes too)")
    own.add_argument(
        "--test",
        help="another file, for the table at the end (default: the folder's test file, else rows held out)",
    )
    own.add_argument(
        "--method", choices=["sequential", "colar"], help="sequential (ours; default) or colar (the paper's)"
    )
    own.add_argument("--grpo", action="store_true", help="also learn by reinforcement, the judge as reward")
    columns_option(own)
    own.add_argument(
        "--template", choices=["auto", "chat", "plain"], help="format of the prompt (default: auto)"
    )
    judge_option(own)
    train.set_defaults(run=run_train, takes_keys=True, resumes=True)


def run_train(args: argparse.Namespace) -> None:
    if args.keys:
        _print_keys()
        return
    if args.recipe is None:
        raise ValueError(
            "name a recipe: colar train auto --model tiny --data my.jsonl --output runs/mine, or one that "
            "`colar recipes list` shows"
        )
    # The same command would start from the beginning again.
    if args.no_resume or args.check:
        args.resumes = False
    auto = args.recipe == recipes.AUTO
    # A misspelt name is reported before imports that take seconds.
    if not auto:
        recipes.find(args.recipe)
    _check_options(args, auto)
    from rich.console import Console

    from colar import processes, recipe
    from colar.evaluation.tables import print_tables
    from colar.recipe import auto_run, measure

    with contextlib.ExitStack() as held:
        if auto:
            args.columns = columns_of(args.columns)
            given = {name: getattr(args, name) for name in CHOICES if getattr(args, name)}
            call = auto_run.AutoCall(args.model, args.data, files.require_writable(args.output), **given)
            stages = held.enter_context(auto_run.prepared(call, args.overrides, args.stages))
        else:
            stages = recipe.load_stages(args.recipe, overrides(args.overrides, args.output), args.stages)
        if args.check:
            for table in measure.measure_stages(stages):
                if progress.is_main():
                    Console().print(table)
            processes.leave()
            return
        best = recipe.run_stages(stages, resume=not args.no_resume)
        if auto and not args.stages:
            outcome = auto_run.finish(call.output, stages)
            if progress.is_main():
                print_tables([outcome.speeds_table], Console(stderr=True))
                progress.say(outcome.sentence)
            best = call.output
        processes.leave()
    # This is the only output on stdout, so that a script can write out=$(colar train ...).
    if progress.is_main():
        print(best)


def _check_options(args: argparse.Namespace, auto: bool) -> None:
    """Reject options of `auto` beside another recipe, and `auto` without a model, data or an output."""
    if auto:
        missing = [f"--{name}" for name in NEEDED if not getattr(args, name)]
        if missing:
            raise ValueError(
                f"colar train auto needs {', '.join(missing)}: "
                "colar train auto --model tiny --data my.jsonl --output runs/mine"
            )
        return
    for name in ("model", "data", *CHOICES):
        if getattr(args, name):
            raise ValueError(
                f"--{name} is for colar train auto; {args.recipe} has keys of its own (--keys lists them)"
            )


def overrides(words: list[str], output: str | None) -> list[str]:
    """The overrides of a recipe: the words that argparse does not know, and --output, which it knows for `auto`."""
    return words if output is None else [*words, "--output", output]


def _print_keys() -> None:
    """Print every key with its default and its meaning; those of methods come last."""
    from colar.methods.registry import METHODS
    from colar.recipe import Recipe

    listed = list(yaml_settings.keys(Recipe))
    for name, method in METHODS.items():
        of_method = yaml_settings.keys(method.Config, "method.")
        listed += [(f"{key} of {name}", default, meaning) for key, default, meaning in of_method]
    for key, default, meaning in listed:
        value = "" if default is dataclasses.MISSING else f" (default: {json.dumps(default)})"
        print(textwrap.fill(meaning, 100, initial_indent=f"{key}{value}: ", subsequent_indent="    "))


def add_recipes(parser: Parser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | copy")
    listed = actions.add_parser("list", help="every shipped recipe, by the name that `colar train` takes")
    listed.set_defaults(run=recipes_list)
    copied = actions.add_parser("copy", help="copy a shipped recipe, and those it is based on, to change it")
    copied.add_argument("name", help="name of a shipped recipe, e.g. tiny/colar")
    copied.add_argument("target", nargs="?", default="recipes", help="folder to copy into (default: recipes)")
    copied.set_defaults(run=recipes_copy)


def recipes_list(args: argparse.Namespace) -> None:
    # One line each, cut at the width of a terminal. If stdout is no terminal, lines are whole.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for name in recipes.names():
        print(f"{name:<28} {recipes.describe(name)}"[:width])


def recipes_copy(args: argparse.Namespace) -> None:
    written = recipes.copy(args.name, args.target)
    # The recipe's own file comes first, then its bases.
    for path in written:
        print(path)
    progress.say(f"train it: colar train {written[0]}")
