"""`colar report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from colar import files
from colar.cli.shared import write_report


def add_parser(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="fold records into a report again, or several into one",
        description="Fold records into a report: records.jsonl files, or folders that hold one.",
    )
    report.add_argument("records", nargs="+", help="records.jsonl[.gz], or folders")
    report.add_argument("--output", required=True, help="folder for report.json, report.md and the picture")
    report.add_argument("--title", help="heading of the report")
    report.add_argument(
        "--nearest",
        metavar="METHOD",
        help="compare every system also with this method's at the nearest #L, e.g. colar",
    )
    report.add_argument(
        "--draw_labelled",
        nargs="*",
        metavar="LABEL",
        help="draw ablations and controls too in the picture: all, or those with these labels",
    )
    report.add_argument(
        "--pair",
        nargs=2,
        action="append",
        default=[],
        metavar=("SYSTEM", "BASELINE"),
        help='a table of the paired difference between these two, by their names in the tables: "colar c=5" coconut; '
        "may come several times",
    )
    report.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    paths = []
    for text in args.records:
        path = Path(text)
        found = [path / name for name in ("records.jsonl", "records.jsonl.gz") if (path / name).exists()]
        paths += found[:1] if path.is_dir() else [path]
        if path.is_dir() and not found:
            raise ValueError(f"{path} holds no records.jsonl")
    pairs = [(system, baseline) for system, baseline in args.pair]
    output = files.require_writable(args.output)
    labels = args.draw_labelled
    write_report(paths, output, args.title, args.nearest, labels is not None and (labels or True), pairs)
