"""`colar diagnose`."""

from __future__ import annotations

import argparse
from typing import Any

from colar import files, progress
from colar.cli.shared import (
    check_params,
    checkpoint_options,
    data_options,
    limit_options,
    limits_of,
    load,
    model_options,
    named,
    options,
    param_grid,
    params_options,
)


def add_parser(commands: Any, method_options: bool) -> None:
    diagnose = commands.add_parser(
        "diagnose",
        help="find where a checkpoint fails: reading latents, writing them, stopping, plan or arithmetic",
        description="Test a checkpoint in three ways: it reads the reference chain's own latents (read); it writes "
        "each next latent after a correct prefix (write); it thinks by itself (free). Errors of the last are "
        "counted by their first cause.",
    )
    checkpoint_options(diagnose)
    data_options(diagnose)
    diagnose.add_argument(
        "--data", default="arithmetic", help="source or file; its rows must have reasoning steps"
    )
    diagnose.add_argument("--split", default="test", help="split of the source")
    diagnose.add_argument("--limit", type=int, default=200, help="first N problems")
    if method_options:
        params_options(diagnose)
    limit_options(diagnose, max_completion_length=16)
    diagnose.add_argument(
        "--output", required=True, help="folder for diagnosis.md, diagnosis.json and thoughts.jsonl"
    )
    model_options(diagnose)
    diagnose.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from rich.console import Console

    from colar.analysis import diagnosis, diagnosis_tables
    from colar.data import sources
    from colar.engine.request import Decoding
    from colar.methods.base import variant

    output = files.require_writable(args.output)
    check_params(args)
    examples = sources.load(
        args.data, args.split, data_dir=args.data_dir, limit=args.limit, seed=args.data_seed,
        skip_malformed=args.skip_malformed, options=options(args.options, args.data),
    )  # fmt: skip
    limits = Decoding(**limits_of(args))
    rows = []
    problems = []
    for text in args.checkpoints:
        name, path = named(text)
        lm, method, _ = load(path, args)
        for params in param_grid(method, args):
            # Only some methods have one; the row shows null for the others.
            factor = getattr(params, "compression_factor", None)
            key = {"model": name, "compression_factor": factor, "variant": variant(params)}
            row, thoughts = diagnosis.diagnose(lm, method, examples, params, limits)
            rows.append({**key, **row})
            for problem in thoughts:
                problems.append({**key, **problem})
    asked = {"data": args.data, "split": args.split, "limit": args.limit, "dtype": args.dtype}
    files.write_json(
        output / "diagnosis.json", {"asked": asked, "provenance": files.provenance(), "rows": rows}
    )
    files.write_jsonl(output / "thoughts.jsonl", problems)
    files.write_text(output / "diagnosis.md", diagnosis_tables.markdown(rows))
    console = Console()
    for table in diagnosis_tables.tables(rows):
        console.print(table)
    progress.say(f"wrote {output}/diagnosis.md, {output}/diagnosis.json and {output}/thoughts.jsonl")
