"""`colar data list | show | prepare`."""

import argparse
import json
from pathlib import Path

from colar import files
from colar.checks import check_known
from colar.cli import options
from colar.cli.options import Parser
from colar.data import catalogue, sources, user_rows
from colar.data.held_out import divide

SOURCE_HELP = (
    "a source by name, a file of your own (JSON, JSONL, CSV, TSV, Parquet), or a folder of SPLIT files"
)


def add_data(data: Parser) -> None:
    actions = data.add_subparsers(dest="action", required=True, metavar="list | show | prepare")

    listed = actions.add_parser("list", help="every source and where it comes from")
    listed.set_defaults(run=data_list)

    show = actions.add_parser("show", help="print the first rows of a source, or how a file of yours is read")
    show.add_argument("source", help=f"{SOURCE_HELP}, or owner/name[/config][:split] of the Hub")
    options.judge_option(show)
    show.add_argument("--model", default="tiny", help="backbone whose tokens are counted in your own file")
    show.add_argument("--limit", type=int, default=3, help="first N rows")
    show.add_argument("--split", help="split (default: the source's first)")
    options.data_options(show)
    show.set_defaults(run=data_show)

    prepare = actions.add_parser("prepare", help="write a source as JSONL, checked row by row")
    prepare.add_argument("source", help=SOURCE_HELP)
    prepare.add_argument("--splits", nargs="+", help="splits (default: all that the source has)")
    prepare.add_argument("--limit", type=int, help="first N rows of each")
    prepare.add_argument("--output", required=True, help="folder")
    options.data_options(prepare)
    prepare.set_defaults(run=data_prepare)


def data_list(args: argparse.Namespace) -> None:
    for name, source in catalogue.SOURCES.items():
        origin = source.hub or ("files only" if source.parser else "built in")
        print(f"{name:<12} {', '.join(source.splits):<24} {source.answer_type:<8} {origin}")
        print(f"{'':<12} {source.about} ({source.licence})")


def data_show(args: argparse.Namespace) -> None:
    if args.source not in catalogue.SOURCES:
        _show_user_rows(args)
        return
    split = args.split or sources.splits_of(args.source)[0]
    for example in options.examples_of(args, args.source, split):
        print(json.dumps(example.as_row(), ensure_ascii=False, indent=2))


def _show_user_rows(args: argparse.Namespace) -> None:
    """Print how a user's rows are parsed: the first ones, those left out, the lengths of chains, the split."""
    check_known("file option", options.source_options(args.options, args.source), ())
    first = sources.splits_of(args.source)[0] if Path(args.source).is_dir() else "train"
    split = args.split or first
    columns = options.columns_of(args.columns)
    rows = user_rows.read(args.source, columns, split, args.judge)
    for example in rows.examples[: args.limit]:
        for role, text in (*example.context, ("question", example.question)):
            print(f"{role:>9}  {text}")
        for step in example.steps:
            print(f"{'step':>9}  {step}")
        print(f"{'answer':>9}  {example.answer}\n")
    for line in rows.summary():
        print(line)
    # This import needs torch, which the other `data` commands do not.
    from colar.recipe.facts import LONGER, RowReader

    reader = RowReader.of(args.model)
    lengths = sorted(reader.tokens(example)[1] for example in rows.examples)
    middle = lengths[len(lengths) // 2]
    print(
        f"tokens of a chain, by the tokenizer of {args.model}: {lengths[0]} to {lengths[-1]}, median {middle}"
    )
    if too_long := reader.too_long(rows.examples):
        print(
            f"{len(too_long):,} of {len(lengths):,} rows are too long to train on ({next(iter(too_long.values()))}): "
            f"{LONGER}"
        )
    if split != "train":
        return
    try:
        rows.require_chains()
        held_out = user_rows.read_held_out(args.source, rows, columns)
        divided = divide(rows.examples, **{name: given.examples for name, given in held_out.items()})
    except ValueError as error:
        print(f"colar train auto would not take it: {error}")
        return
    sizes = (len(divided.train), len(divided.validation), len(divided.test))
    print("split: {:,} to train on, {:,} to validate with, {:,} for the table at the end".format(*sizes))


def data_prepare(args: argparse.Namespace) -> None:
    written = sources.prepare(
        args.source,
        args.splits or sources.splits_of(args.source),
        files.require_writable(args.output),
        data_dir=args.data_dir,
        limit=args.limit,
        seed=args.data_seed,
        skip_malformed=args.skip_malformed,
        options=options.source_options(args.options, args.source),
        columns=options.columns_of(args.columns),
    )
    for path in written:
        print(path)
