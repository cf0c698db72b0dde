"""`colar data list | show | prepare`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from colar import files
from colar.cli.shared import data_options, options


def add_parser(commands: Any) -> None:
    data = commands.add_parser("data", help="list, show or prepare data sources")
    actions = data.add_subparsers(dest="action", required=True, metavar="list | show | prepare")
    listed = actions.add_parser("list", help="every source and where it comes from")
    listed.add_argument("--data_dir", help="folder with upstream files (else $COLAR_DATA_DIR, else the Hub)")
    listed.set_defaults(run=data_list)
    show = actions.add_parser("show", help="a few rows of a source")
    show.add_argument("source", help="source, or .json / .jsonl file")
    show.add_argument("--n", type=int, default=3, help="rows")
    show.add_argument("--split", default="train", help="split")
    data_options(show)
    show.set_defaults(run=data_show)
    prepare = actions.add_parser("prepare", help="write a source as JSONL, checked row by row")
    prepare.add_argument("source", help="source, or .json / .jsonl file")
    prepare.add_argument("--splits", nargs="+", default=["train", "validation", "test"], help="splits")
    prepare.add_argument("--limit", type=int, help="first so many rows of each")
    prepare.add_argument("--output", required=True, help="folder")
    data_options(prepare)
    prepare.set_defaults(run=data_prepare)


def data_list(args: argparse.Namespace) -> None:
    from colar.data import sources

    for row in sources.describe(args.data_dir):
        print(f"{row.name:<12} {row.splits:<24} {row.answer_type:<8} {row.found}")
        print(f"{'':<12} {row.about} ({row.licence})")


def data_show(args: argparse.Namespace) -> None:
    from colar.data import sources

    examples = sources.load(
        args.source, args.split, data_dir=args.data_dir, limit=args.n, seed=args.data_seed,
        skip_malformed=args.skip_malformed, options=options(args.options, args.source),
    )  # fmt: skip
    for example in examples:
        print(json.dumps(dataclasses.asdict(example), ensure_ascii=False, indent=2))


def data_prepare(args: argparse.Namespace) -> None:
    from colar.data import sources

    written = sources.prepare(
        args.source, args.splits, files.require_writable(args.output), data_dir=args.data_dir, limit=args.limit,
        seed=args.data_seed, skip_malformed=args.skip_malformed, options=options(args.options, args.source),
    )  # fmt: skip
    for path in written:
        print(path)
