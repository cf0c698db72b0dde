"""`colar report`."""

from __future__ import annotations

import argparse
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
        help="compare each system also with the one of this method whose #L is nearest, e.g. colar",
    )
    report.add_argument(
        "--pair",
        nargs=2,
        action="append",
        default=[],
        metavar=("SYSTEM", "BASELINE"),
        help='add the paired difference between these two, named as in the tables: "colar c=5" coconut; may be '
        "given several times",
    )
    report.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from colar.evaluation.records import find_records

    records = find_records(args.records)
    output = files.require_writable(args.output)
    write_report(
        records,
        output,
        title=args.title,
        nearest=args.nearest,
        pairs=[(system, baseline) for system, baseline in args.pair],
    )
