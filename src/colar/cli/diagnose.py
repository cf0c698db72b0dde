"""`colar diagnose`."""

from __future__ import annotations

import argparse
from typing import Any

from colar import files, progress
from colar.cli.problems import decoding_of, each_system, load_problems, problem_options
from colar.cli.shared import model_options


def add_parser(commands: Any, method_options: bool) -> None:
    diagnose = commands.add_parser(
        "diagnose",
        help="find where a checkpoint fails: reading latents, writing them, stopping, plan or arithmetic",
        description="Test a checkpoint in three ways: it reads the reference chain's own latents (read); it writes "
        "each next latent after a correct prefix (write); it thinks by itself (free). Errors of the last are "
        "counted by their first cause.",
    )
    problem_options(diagnose, method_options)
    diagnose.add_argument(
        "--output", required=True, help="folder for diagnosis.md, diagnosis.json and thoughts.jsonl"
    )
    model_options(diagnose)
    diagnose.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from rich.console import Console

    from colar.look import diagnosis, diagnosis_tables

    output = files.require_writable(args.output)
    examples = load_problems(args)
    limits = decoding_of(args)
    rows = []
    problems = []
    for key, lm, method, params in each_system(args):
        row, thoughts = diagnosis.diagnose(lm, method, examples, params, limits)
        rows.append({**key, **row})
        for problem in thoughts:
            problems.append({**key, **problem})
    files.write_jsonl(output / "thoughts.jsonl", problems)
    asked = {"data": args.data, "split": args.split, "limit": args.limit, "dtype": args.dtype}
    files.write_json(
        output / "diagnosis.json", {"asked": asked, "provenance": files.provenance(), "rows": rows}
    )
    files.write_text(output / "diagnosis.md", diagnosis_tables.markdown(rows))
    console = Console()
    for table in diagnosis_tables.tables(rows):
        console.print(table)
    progress.say(f"wrote {output}/diagnosis.md, {output}/diagnosis.json and {output}/thoughts.jsonl")
