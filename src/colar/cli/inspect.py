"""`colar inspect`."""

import argparse
import itertools
from pathlib import Path

from rich.console import Console

from colar import checks, files, progress
from colar.cli import options
from colar.cli.checkpoints import (
    check_backbone,
    data_of_runs,
    load_checkpoint,
    methods_of,
    param_combinations,
    paths_by_name,
    say_judged_by,
    say_trained_on,
    shared_limits,
)
from colar.cli.options import Parser
from colar.engine.request import Decoding
from colar.evaluation.tables import print_tables
from colar.look.inspect import Inspection, inspect_system
from colar.look.page import tables_of
from colar.model import checkpoint

ENDINGS = (".html", ".json")


def add_inspect(inspect: Parser) -> None:
    inspect.description = (
        "Measure what checkpoints think: accuracy and cost, with controls; where a chain goes wrong first, "
        "in reading latents, writing them, stopping, the plan or the arithmetic. A page shows this, and each "
        "question's chains beside the reference's."
    )
    options.checkpoint_options(inspect)
    options.data_options(inspect)
    options.judge_option(inspect)
    inspect.add_argument(
        "--data",
        help="source or file; of rows without reasoning steps no chain is compared (default: the questions that a run "
        "of `colar train auto` held out, or else arithmetic)",
    )
    inspect.add_argument("--split", default="test", help="split of the source")
    inspect.add_argument("--limit", type=int, default=200, help="first N problems")
    options.params_options(inspect)
    options.limit_options(inspect)
    inspect.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="FILE.html: the page, and FILE.json with the numbers beside it; FILE.json: the numbers alone",
    )
    options.model_options(inspect)
    inspect.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> None:
    output = Path(args.output)
    allowed = " or ".join(f"a file that ends in {ending}" for ending in ENDINGS)
    checks.check_holds("--output", output.suffix in ENDINGS, args.output, allowed)
    files.require_writable(output.parent)
    paths = paths_by_name(args.checkpoints)
    args.data = args.data or data_of_runs(paths.values())
    say_judged_by(args.judge, paths.values())
    examples = options.examples_of(args, args.data, args.split)
    say_trained_on(args.data, examples, paths.values())
    have_steps = any(example.steps for example in examples)
    if not have_steps:
        progress.say(f"{args.data} has no reasoning steps: chains are compared with none")
    folders = {name: checkpoint.resolve(path) for name, path in paths.items()}
    check_backbone(folders.values(), args)
    methods = methods_of(folders)
    combinations = param_combinations(methods, args)
    decoding = Decoding(**shared_limits(args, methods))
    systems = []
    for name, folder in folders.items():
        lm, method = load_checkpoint(str(folder), args)
        for params in combinations[name]:
            system = inspect_system(name, lm, method, examples, params, decoding)
            if system["diagnosis"] is None and have_steps:
                progress.say(f"{name}: its thoughts stand for no tokens of the reference chain: not compared")
            systems.append(system)
    origin = {"data": args.data, "split": args.split, "limit": args.limit}
    inspection = Inspection(examples, systems, {"asked": origin})
    # First the numbers, in the file and on the terminal: they are kept if the page fails.
    written = [output.with_suffix(".json")]
    files.write_json(written[0], inspection.to_json())
    print_tables(itertools.chain(*tables_of(systems)), Console())
    if output.suffix == ".html":
        written.append(inspection.save(output))
    progress.say(f"wrote {' and '.join(map(str, written))}")
