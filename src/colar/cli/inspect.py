"""`colar inspect`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from colar import checks, files, progress
from colar.cli.problems import decoding_of, each_system, load_problems, problem_options
from colar.cli.shared import model_options

ENDINGS = (".html", ".json")


def add_parser(commands: Any, method_options: bool) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="a page that shows what checkpoints think, and the numbers behind it",
        description="Measure what checkpoints think: accuracy and cost, with controls; whether thoughts can be read as "
        "the tokens that they stand for; whether stop and sigma are calibrated; norms and a logit lens layer by layer; "
        "attention; what one changed thought does to the answer; linear probes with their controls. A page shows this, "
        "and every question's chains beside the reference's.",
    )
    problem_options(inspect, method_options)
    inspect.add_argument(
        "--look",
        type=int,
        default=32,
        help="first N problems for what takes long: layers, attention, changed thoughts",
    )
    inspect.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="FILE.html: the page, and FILE.json with the numbers beside it; FILE.json: the numbers alone",
    )
    model_options(inspect)
    inspect.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from rich.console import Console

    from colar.look.inspection import Inspection, system_of

    output = Path(args.output)
    allowed = " or ".join(f"a file that ends in {ending}" for ending in ENDINGS)
    checks.check_holds("--output", output.suffix in ENDINGS, args.output, allowed)
    checks.check_holds("--look", args.look >= 1, args.look, "1 or more")
    files.require_writable(output.parent)
    examples = load_problems(args)
    checks.check_holds("--data", bool(examples), args.data, "a source with rows")
    limits = decoding_of(args)
    systems = []
    for key, lm, method, params in each_system(args):
        system = system_of(key, lm, method, examples, params, limits, look=args.look)
        if system.numbers["retrieval"] is None:
            name = key["model"]
            progress.say(f"{name}: its thoughts stand for no tokens of the reference chain: not compared")
        systems.append(system)
    asked = {"data": args.data, "split": args.split, "limit": args.limit, "look": args.look}
    inspection = Inspection(examples, systems, {"asked": asked})
    # First the numbers, in the file and on the terminal: they are kept whatever happens to the page.
    written = [output.with_suffix(".json")]
    # On one line: most of it are ranks of tokens, which nobody reads.
    numbers = json.dumps(inspection.to_json(), ensure_ascii=False, allow_nan=False)
    files.write_text(written[0], numbers + "\n")
    Console().print(_table([system.numbers for system in systems]))
    if output.suffix == ".html":
        written.append(inspection.save(output))
    progress.say(f"wrote {' and '.join(map(str, written))}")


def _table(systems: Iterable[dict[str, Any]]) -> Any:
    """The retrieval table of all systems, for the terminal."""
    from rich.table import Table
    from rich.text import Text

    from colar.look.diagnosis_tables import percent
    from colar.look.inside import TABLE_KINDS, TABLE_MEASURES

    table = Table(
        title="% of tokens found in the latents that stand for them, after a right prefix",
        title_justify="left",
    )
    for name in ("system", "c", "token", *TABLE_MEASURES):
        table.add_column(name, justify="left" if name in ("system", "token") else "right", overflow="fold")
    for each in systems:
        if each["retrieval"] is None:
            continue
        system = f"{each['model']} ({each['variant']})" if each["variant"] else each["model"]
        factor = "-" if each["compression_factor"] is None else f"{each['compression_factor']:g}"
        for kind in TABLE_KINDS:
            shares = each["retrieval"]["written"]["by_kind"][kind]
            # A system is called as its folder is, brackets included.
            table.add_row(Text(system), factor, kind, *(percent(shares[name]) for name in TABLE_MEASURES))
    return table
