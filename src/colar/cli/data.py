"""`colar data list | show | prepare | chains`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from colar import files, progress, recipes
from colar.cli.shared import (
    DECODING_HELP,
    batching_options,
    check_backbone,
    collector_off,
    data_options,
    limit_options,
    limits_of,
    load,
    model_options,
    own_options,
)

SOURCE_HELP = "source of the list, .json / .jsonl file, or folder of SPLIT.jsonl or SPLIT.json files"


def add_parser(commands: Any) -> None:
    data = commands.add_parser(
        "data", help="list, show or prepare data sources; write chains of a model's own"
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="list | show | prepare | chains")
    _add_list(actions)
    _add_show(actions)
    _add_prepare(actions)
    _add_chains(actions)


def _add_list(actions: Any) -> None:
    listed = actions.add_parser("list", help="every source and where it comes from")
    listed.add_argument("--data_dir", help="folder with upstream files (else $COLAR_DATA_DIR, else the Hub)")
    listed.set_defaults(run=data_list)


def _add_show(actions: Any) -> None:
    show = actions.add_parser("show", help="print the first rows of a source")
    show.add_argument("source", help=SOURCE_HELP)
    show.add_argument("--limit", type=int, default=3, help="first N rows")
    # The name that --limit had before; it still works.
    show.add_argument("--n", dest="limit", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    show.add_argument("--split", help="split (default: the source's first)")
    show.add_argument(
        "--renumber", type=int, default=0, metavar="K", help="print each row and K new ones by other numbers"
    )
    data_options(show)
    show.set_defaults(run=data_show)


def _add_prepare(actions: Any) -> None:
    prepare = actions.add_parser("prepare", help="write a source as JSONL, checked row by row")
    prepare.add_argument("source", help=SOURCE_HELP)
    prepare.add_argument("--splits", nargs="+", help="splits (default: all that the source has)")
    prepare.add_argument("--limit", type=int, help="first N rows of each")
    prepare.add_argument("--output", required=True, help="folder")
    data_options(prepare)
    prepare.set_defaults(run=data_prepare)


def _add_chains(actions: Any) -> None:
    chains = actions.add_parser(
        "chains",
        help="write a recipe's training rows with a model's own chains, where its answers are right",
        description="Answer the training questions of a recipe with a checkpoint that thinks in words, and keep its "
        "chains where the answer is right. The output is a source: --data.source OUTPUT --data.validation_source ... "
        "Keys of the recipe can be overridden as in colar train: --data.renumber 8. The same command resumes.",
    )
    chains.add_argument("checkpoint", help="folder or Hub id")
    chains.add_argument("recipe", help="the recipe whose training rows are taken")
    chains.add_argument("--output", required=True, help="folder")
    chains.add_argument("--decoding", default="greedy", choices=["greedy", "sampled"], help=DECODING_HELP)
    chains.add_argument("--seed", type=int, default=0, help="seed of every random draw")
    limit_options(chains, max_completion_length=16)
    batching_options(chains)
    model_options(chains)
    chains.set_defaults(run=data_chains, takes_keys=True, resumes=True)


def data_list(args: argparse.Namespace) -> None:
    # Here and below the library is imported by the command that runs, so that `colar --help` stays fast.
    from colar.data import sources

    for listing in sources.describe(args.data_dir):
        print(f"{listing.name:<12} {listing.splits:<24} {listing.answer_type:<8} {listing.found}")
        print(f"{'':<12} {listing.about} ({listing.licence})")


def data_show(args: argparse.Namespace) -> None:
    from colar.data import renumber, sources

    split = args.split or sources.splits_of(args.source)[0]
    renumber.check("--renumber", args.renumber, args.source, split)
    examples = sources.load(
        args.source,
        split,
        data_dir=args.data_dir,
        limit=args.limit,
        seed=args.data_seed,
        skip_malformed=args.skip_malformed,
        options=own_options(args.options, args.source),
    )
    if args.renumber:
        from colar.show import before_after

        before_after.print_rows(examples, args.renumber, args.data_seed)
        return
    for example in examples:
        print(json.dumps(example.as_row(), ensure_ascii=False, indent=2))


def data_prepare(args: argparse.Namespace) -> None:
    from colar.data import sources

    written = sources.prepare(
        args.source,
        args.splits or sources.splits_of(args.source),
        files.require_writable(args.output),
        data_dir=args.data_dir,
        limit=args.limit,
        seed=args.data_seed,
        skip_malformed=args.skip_malformed,
        options=own_options(args.options, args.source),
    )
    for path in written:
        print(path)


def data_chains(args: argparse.Namespace) -> None:
    # A misspelt name is found before seconds of imports.
    recipes.find(args.recipe)
    with collector_off():
        from colar import recipe
        from colar.engine.request import DECODINGS
        from colar.evaluation import own_chains
        from colar.evaluation.evaluate import Limits
        from colar.model import checkpoint

    output = files.require_writable(args.output)
    folder = checkpoint.resolve(args.checkpoint)
    check_backbone([folder], args)
    examples, _ = recipe.load_examples(recipe.load(args.recipe, args.overrides).data)
    asked = {
        # A digest, not a path: other weights may lie there when the command is given again.
        "checkpoint": checkpoint.digest(folder),
        "recipe": args.recipe,
        "keys": args.overrides,
        "dtype": args.dtype,
    }
    limits = Limits(
        **limits_of(args),
        batch_size=args.batch_size,
        compile=args.compile,
        cuda_graphs=args.cuda_graphs,
    )
    lm, method, _ = load(args.checkpoint, args)
    with files.alone(output):
        counts = own_chains.write(
            lm, method, examples, output, DECODINGS[args.decoding], limits, args.seed, asked
        )
    progress.say(
        f"{counts['right']} of {counts['questions']} answers are right, {counts['as_in_the_data']} by the data's own "
        f"chain; {counts['truncated']} were cut at a limit"
    )
    print(output / "train.jsonl")
