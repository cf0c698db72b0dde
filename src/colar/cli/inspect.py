"""`colar inspect`: what checkpoints think, and where a chain goes wrong, as numbers and as a page."""

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
from colar.data import sources
from colar.engine.request import Decoding
from colar.evaluation.tables import print_tables
from colar.look.inspect import Inspection, inspect_system
from colar.look.page import tables_of
from colar.model import checkpoint


def add_inspect(parser: Parser) -> None:
    parser.description = (
        "Measure what checkpoints think: accuracy and cost, with controls; where a chain goes wrong first, "
        "in reading latents, writing them, stopping, the plan or the arithmetic. A page shows this, and each "
        "question's chains beside the reference's."
    )
    options.checkpoint_options(parser)
    options.data_options(parser)
    options.judge_option(parser)
    parser.add_argument(
        "--data",
        help="source or file; of rows without reasoning steps no chain is compared (default: the questions that a run "
        "of `colar train auto` held out, or else arithmetic)",
    )
    parser.add_argument("--split", default="test", help="split of the source")
    parser.add_argument("--limit", type=int, default=200, help="first N problems")
    options.params_options(parser)
    options.limit_options(parser)
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="FILE.html: the page, and FILE.json with the numbers beside it; FILE.json: the numbers alone",
    )
    options.model_options(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> None:
    output = Path(args.output)
    allowed = "a file that ends in .html or a file that ends in .json"
    checks.check_holds("--output", output.suffix in (".html", ".json"), args.output, allowed)
    files.require_writable(output.parent)
    paths = paths_by_name(args.checkpoints)
    folders = {name: checkpoint.resolve(path) for name, path in paths.items()}
    check_backbone(folders.values(), args)
    methods = methods_of(folders)
    combinations = param_combinations(methods, args)
    args.data = args.data or data_of_runs(paths.values())
    for path in (output, output.with_suffix(".json")):
        if str(path.resolve()) == sources.place_of(args.data, args.split):
            raise ValueError(f"--output {output}: {path} holds the questions, and would be replaced")
    say_judged_by(args.judge, paths.values())
    examples = options.examples_of(args, args.data, args.split)
    say_trained_on(args.data, examples, paths.values())
    have_steps = any(example.steps for example in examples)
    if not have_steps:
        progress.say(f"{args.data} has no reasoning steps: chains are compared with none")
    decoding = Decoding(**shared_limits(args, methods))
    systems = []
    for name, folder in folders.items():
        lm, method = load_checkpoint(str(folder), args)
        for params in combinations[name]:
            systems.append(inspect_system(name, lm, method, examples, params, decoding))
            if systems[-1]["diagnosis"] is None and have_steps:
                progress.say(f"{name}: its thoughts stand for no tokens of the reference chain: not compared")
        # Freed before the next model is loaded, because a GPU may have room for one only.
        del lm, method
    origin = {"data": args.data, "split": args.split, "limit": args.limit}
    inspection = Inspection(examples, systems, {"asked": origin})
    # The numbers come first, in the file and on the terminal, so that they are kept if the page fails.
    written = [output.with_suffix(".json")]
    files.write_json(written[0], inspection.to_json())
    print_tables(itertools.chain(*tables_of(systems)), Console())
    if output.suffix == ".html":
        written.append(inspection.save(output))
    progress.say(f"wrote {' and '.join(map(str, written))}")
