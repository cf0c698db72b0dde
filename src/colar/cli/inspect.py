"""`colar inspect`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from colar import checks, files, progress
from colar.cli.problems import decoding_of, each_system, load_problems, problem_options
from colar.cli.shared import model_options


def add_parser(commands: Any, method_options: bool) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="measure what a checkpoint thinks: tokens in its latents, calibration, layers, attention, causes, probes",
        description="Measure what a checkpoint thinks, and write it as JSON: whether its thoughts can be read as the "
        "tokens that they stand for; whether stop and sigma are calibrated; norms and a logit lens layer by layer; "
        "attention; what one changed thought does to the answer; linear probes with their controls.",
    )
    problem_options(inspect, method_options)
    inspect.add_argument(
        "--look",
        type=int,
        default=32,
        help="first N problems for what takes long: layers, attention, changed thoughts",
    )
    inspect.add_argument("--output", required=True, metavar="FILE.json", help="file to write")
    model_options(inspect)
    inspect.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from rich.console import Console

    from colar.analysis.inside import look_inside

    output = Path(args.output)
    checks.check_holds("--output", output.suffix == ".json", args.output, "a file that ends in .json")
    checks.check_holds("--look", args.look >= 1, args.look, "1 or more")
    files.require_writable(output.parent)
    examples = load_problems(args)
    limits = decoding_of(args)
    systems = []
    tables = []
    for key, lm, method, params in each_system(args):
        found = look_inside(lm, method, examples, params, limits, look=args.look)
        systems.append({**key, **found.to_json()})
        tables.append((key, found.retrieval_table()))
    asked = {"data": args.data, "split": args.split, "limit": args.limit, "look": args.look}
    whole = {"asked": asked, "provenance": files.provenance(), "systems": systems}
    # On one line: most of it are ranks of tokens, which nobody reads.
    files.write_text(output, json.dumps(whole, ensure_ascii=False, allow_nan=False) + "\n")
    Console().print(_table(tables))
    progress.say(f"wrote {output}")


def _table(tables: Any) -> Any:
    """The retrieval table of all systems, for the terminal."""
    from rich.table import Table

    from colar.analysis.diagnosis_tables import percent
    from colar.analysis.inside import TABLE_MEASURES

    table = Table(
        title="% of tokens found in the latents that stand for them, after a right prefix",
        title_justify="left",
    )
    for name in ("system", "c", "token", *TABLE_MEASURES):
        table.add_column(name, justify="left" if name in ("system", "token") else "right", overflow="fold")
    for key, by_kind in tables:
        system = f"{key['model']} ({key['variant']})" if key["variant"] else key["model"]
        factor = "-" if key["compression_factor"] is None else f"{key['compression_factor']:g}"
        for kind, measures in by_kind.items():
            table.add_row(system, factor, kind, *(percent(measures[name]) for name in TABLE_MEASURES))
    return table
