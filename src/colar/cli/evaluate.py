"""`colar evaluate` and `colar report`, which folds its records again."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colar import files, progress
from colar.cli.options import (
    DECODING_HELP,
    batching_options,
    checkpoint_options,
    data_options,
    dtype_of,
    judge_option,
    limit_options,
    limits_of,
    model_options,
    params_options,
    source_options,
)
from colar.cli.shared import (
    check_backbone,
    data_of_runs,
    examples_of,
    fill_limits,
    load,
    name_and_path,
    param_grids,
    say_judged_by,
    say_trained_on,
)


def add_parser(commands: Any, method_options: bool) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="answer test questions, keep a record of each, and report",
        description="Answer test questions with one or more checkpoints and write records.jsonl, report.json, "
        "report.md and the accuracy-versus-length picture. After an interruption, the same command resumes. "
        "Under torchrun the processes divide the questions.",
    )
    checkpoint_options(evaluate)
    data_options(evaluate)
    judge_option(evaluate)
    evaluate.add_argument(
        "--data",
        nargs="+",
        metavar="[NAME=]DATA",
        help="sources, or files; one source may stand under several names, with options each (default: the questions "
        "that a run of `colar train auto` held out, or else arithmetic)",
    )
    evaluate.add_argument("--split", default="test", help="split of the sources")
    evaluate.add_argument("--limit", type=int, help="use the first LIMIT questions of each")
    if method_options:
        params_options(evaluate)
    evaluate.add_argument(
        "--decoding", nargs="+", default=["greedy"], choices=["greedy", "sampled"], help=DECODING_HELP
    )
    evaluate.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
        help="decoding seeds (greedy decoding draws nothing: its records have seed 0)",
    )
    evaluate.add_argument(
        "--control",
        nargs="+",
        choices=["own", "zeroed", "shuffled", "random", "halved"],
        help="answer with the latents replaced or halved (docs/methods.md), in rows labelled control-...",
    )
    evaluate.add_argument("--label", help="label of the rows, in place of the checkpoint's own")
    evaluate.add_argument("--output", required=True, help="folder for records and report")
    limit_options(evaluate, max_completion_length=64)
    batching_options(evaluate)
    model_options(evaluate)
    evaluate.add_argument(
        "--timeout",
        type=float,
        default=6 * 3600,
        metavar="SECONDS",
        help="under torchrun: end when one process has waited this long for another",
    )
    evaluate.set_defaults(run=run, resumes=True)


def add_report_parser(commands: Any) -> None:
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
    report.set_defaults(run=run_report)


def run(args: argparse.Namespace) -> None:
    # Imported here, because it loads torch: `colar --help` must not wait for it.
    from colar import processes

    output = files.require_writable(args.output)
    processes.join(args.timeout)
    # Under torchrun the main process holds the lock for all.
    with contextlib.ExitStack() as lock:
        processes.from_main(lambda: lock.enter_context(files.locked(output)))
        _evaluate(args, output)
    processes.leave()


def _evaluate(args: argparse.Namespace, output: Path) -> None:
    from accelerate import PartialState

    from colar import processes
    from colar.evaluation import controls, evaluate
    from colar.evaluation.folder import claim_evaluation, name_checkpoints
    from colar.model import checkpoint

    paths = [name_and_path(text)[1] for text in args.checkpoints]
    args.data = args.data or [data_of_runs(paths)]
    say_judged_by(args.judge, paths)
    fill_limits(args, paths)
    limits = evaluate.Limits(
        **limits_of(args),
        batch_size=args.batch_size,
        compile=args.compile,
        eager=args.eager,
    )
    datasets = _datasets(args)
    for dataset, examples in datasets.items():
        say_trained_on(dataset, examples, paths)
    checkpoints = name_checkpoints([name_and_path(text) for text in args.checkpoints], args.label)
    settings = {
        "limits": limits_of(args),
        "split": args.split,
        "options": args.options,
        "data_seed": args.data_seed,
        "dtype": dtype_of(args),
        **({"judge": args.judge} if args.judge else {}),
    }
    # Before any model is loaded: a wrong folder then costs a second, not a minute.
    folders = {str(name): checkpoint.resolve(path) for name, path in checkpoints.items()}
    check_backbone(folders.values(), args)
    params = param_grids(folders, args)
    # No process reads records before they are known to be of this evaluation.
    processes.from_main(lambda: claim_evaluation(output, settings, datasets, folders))

    models = []
    grid = []
    for name, path in checkpoints.items():
        lm, method = load(path, args)
        models.append(evaluate.EvaluatedModel(name.model, lm, method, name.label, name.train_seed))
        grid += evaluate.make_grid(models[-1], datasets, params[str(name)], args.decoding, args.seeds)
    if args.control:
        models = controls.require_latent(models)
        grid = [point for point in grid if point.model in models]

    records = output / "records.jsonl"
    if args.control:
        controls.evaluate_controls(grid, args.control, datasets, records, limits)
    else:
        evaluate.evaluate(grid, datasets, records, limits)
    if PartialState().is_main_process:
        _write_report([records], output)


def _datasets(args: argparse.Namespace) -> dict[str, Any]:
    """The examples of each data set under the name that its rows have."""
    from colar.evaluation.folder import name_sources

    named_sources = name_sources(args.data)
    # An option may name the data set or its source.
    known = {*named_sources.keys(), *named_sources.values()}
    for pair in args.options:
        owner = pair.partition("=")[0].rpartition(".")[0]
        if owner and owner not in known:
            raise ValueError(f"--options {pair}: --data names no {owner} (it has {', '.join(sorted(known))})")
    datasets = {}
    for name, source in named_sources.items():
        datasets[name] = examples_of(args, source, args.split, source_options(args.options, source, name))
    return datasets


def run_report(args: argparse.Namespace) -> None:
    from colar.evaluation.records import find_records

    records = find_records(args.records)
    output = files.require_writable(args.output)
    _write_report(
        records,
        output,
        title=args.title,
        nearest=args.nearest,
        pairs=[(system, baseline) for system, baseline in args.pair],
    )


def _write_report(
    records: list[Path],
    output: Path,
    title: str | None = None,
    nearest: str | None = None,
    pairs: Sequence[tuple[str, str]] = (),
) -> None:
    """Fold records into a report in `output` and print its tables; the records' settings go into the provenance."""
    from rich.console import Console

    from colar.evaluation import report, tables
    from colar.evaluation.records import RecordFiles

    made = report.write(
        output,
        RecordFiles(records),
        title=title,
        provenance=files.provenance() | report.settings_of(records),
        nearest=nearest,
        pairs=pairs,
    )
    console = Console()
    console.print(tables.render_console(made, console.width))
    written = [output / name for name in ("report.md", "report.json", f"{report.PICTURE}.png")]
    progress.say(f"wrote {', '.join(str(path) for path in written if path.is_file())}")
