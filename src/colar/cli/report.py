"""`colar report`: records to tables and a picture. It loads no model, and imports none of what does."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from colar import files, progress
from colar.cli.options import Parser
from colar.evaluation import report, tables
from colar.evaluation.provenance import collect_provenance
from colar.evaluation.records import RecordFiles, find_records
from colar.evaluation.settings import settings_of
from colar.evaluation.tables import print_tables


def add_report(parser: Parser) -> None:
    parser.description = "Aggregate records into a report: records.jsonl files, or folders that hold one."
    parser.add_argument("records", nargs="+", help="records.jsonl[.gz], or folders")
    parser.add_argument("--output", required=True, help="folder for report.json, report.md and the picture")
    parser.add_argument("--title", help="heading of the report")
    parser.add_argument(
        "--pair",
        nargs=2,
        action="append",
        default=[],
        metavar=("SYSTEM", "BASELINE"),
        help='add the paired difference between these two, named as in the tables: "colar c=5" coconut; may be '
        "given several times",
    )
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> None:
    records = find_records(args.records)
    output = files.require_writable(args.output)
    write_report(records, output, title=args.title, pairs=args.pair)


def write_report(records: list[Path], output: Path, **how: Any) -> None:
    """Aggregate records into a report in `output`, with their settings in the provenance, and print its tables."""
    provenance = collect_provenance() | settings_of(records)
    written = report.write(output, RecordFiles(records), provenance=provenance, **how)
    print_tables(tables.report_tables(written), Console())
    # A picture that could not be drawn is missing; a warning has been printed.
    pictures = filter(Path.exists, report.picture_paths(output, written).values())
    paths = [output / "report.md", output / "report.json", *pictures]
    progress.say(f"wrote {', '.join(map(str, paths))}")
