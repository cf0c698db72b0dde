"""`colar evaluate`."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

from colar import files
from colar.cli.shared import (
    DECODING_HELP,
    batching_options,
    checkpoint_options,
    data_options,
    load,
    model_options,
    named,
    options,
    param_grid,
    params_options,
    write_report,
)


def add_parser(commands: Any, method_options: bool) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="answer test questions, keep a record of each, and report",
        description="Answer test questions with one or more checkpoints and write records.jsonl, report.json, "
        "report.md and the accuracy-versus-length picture. Stopped, the same command goes on.",
    )
    checkpoint_options(evaluate)
    data_options(evaluate)
    evaluate.add_argument(
        "--data", nargs="+", default=["arithmetic"], help="sources, or .json / .jsonl files"
    )
    evaluate.add_argument("--split", default="test", help="split of the sources")
    evaluate.add_argument("--limit", type=int, help="first so many questions of each")
    if method_options:
        params_options(evaluate)
    evaluate.add_argument(
        "--decoding", nargs="+", default=["greedy"], choices=["greedy", "sampled"], help=DECODING_HELP
    )
    evaluate.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="decoding seeds (greedy takes the first)"
    )
    evaluate.add_argument("--output", required=True, help="folder for records and report")
    evaluate.add_argument("--max_latents", type=int, default=128, help="most thoughts of a request")
    evaluate.add_argument("--max_completion_length", type=int, default=64, help="most tokens of an answer")
    batching_options(evaluate)
    model_options(evaluate)
    evaluate.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from colar.data import sources
    from colar.evaluation import evaluate

    output = files.require_writable(args.output)
    limits = evaluate.Limits(args.max_latents, args.max_completion_length, args.batch_size, args.compile)
    names = {name: Path(name).stem if name.endswith((".json", ".jsonl")) else name for name in args.data}
    if len(set(names.values())) < len(names):
        raise ValueError(f"two files of --data have one name: {', '.join(names)}; rename one")
    datasets = {
        shown: sources.load(
            name, args.split, data_dir=args.data_dir, limit=args.limit, seed=args.data_seed,
            skip_malformed=args.skip_malformed, options=options(args.options, name),
        )
        for name, shown in names.items()
    }  # fmt: skip
    paths = dict(named(text) for text in args.checkpoints)
    if len(paths) < len(args.checkpoints):
        raise ValueError(
            "two checkpoints have one name; give them their own: cot=runs/a/best cot2=runs/b/best"
        )
    _claim(output, limits, args, paths, datasets)
    systems = []
    for name, path in paths.items():
        lm, method, run = load(path, args)
        systems.append(evaluate.System(name, lm, method, run.get("label", ""), run.get("seed")))
    _check_params([system.method for system in systems], args)
    grid = []
    for system in systems:
        params = param_grid(system.method, args)
        grid += evaluate.cells(system, datasets, params, args.decoding, args.seeds)
    records = output / "records.jsonl"
    evaluate.evaluate(grid, datasets, records, limits)
    write_report([records], output)


def _check_params(methods: list[Any], args: argparse.Namespace) -> None:
    """A value that none of the methods has is a mistake; one that only some have fills their rows of the table."""
    from colar.methods import registry

    for name in registry.param_names():
        if getattr(args, name) and not any(name in method.Params.__dataclass_fields__ for method in methods):
            raise ValueError(f"--{name}: none of the methods ({', '.join(m.name for m in methods)}) has it")


def _claim(
    output: Path, limits: Any, args: argparse.Namespace, paths: dict[str, str], datasets: dict[str, Any]
) -> None:
    """Records of another checkpoint, of other questions, or made in another way, must not be taken for these."""
    from colar.model import checkpoint

    settings = {
        "limits": {"max_latents": limits.max_latents, "max_completion_length": limits.max_completion_length},
        "split": args.split,
        "options": args.options,
        "data_seed": args.data_seed,
        "dtype": args.dtype,
        "questions": {name: _questions_digest(examples) for name, examples in datasets.items()},
        "models": {name: _digest(checkpoint.resolve(path)) for name, path in paths.items()},
    }
    path, records = output / "evaluation.json", output / "records.jsonl"
    if path.exists() and records.exists() and records.stat().st_size:
        earlier = files.read_json(path)
        for key in settings:
            if key not in ("models", "questions") and earlier[key] != settings[key]:
                raise ValueError(
                    f"{output} holds records with {key} {earlier[key]}, now it is {settings[key]}"
                )
        for name, digest in earlier["models"].items():
            if settings["models"].setdefault(name, digest) != digest:
                raise ValueError(
                    f"{output} holds records of another checkpoint called {name}: give it another name"
                )
        for name, questions in earlier["questions"].items():
            now = settings["questions"].setdefault(name, questions)
            changed = sorted(key for key in questions.keys() & now.keys() if questions[key] != now[key])
            if changed:
                raise ValueError(
                    f"{output} holds answers to other questions of {name} (not the same: {changed[0]})"
                )
            settings["questions"][name] = questions | now
    files.write_json(path, settings)


def _questions_digest(examples: list[Any]) -> dict[str, str]:
    """Question id -> what was asked and expected, as 8 hex digits."""
    return {e.id: hashlib.sha256(f"{e.question}\x1f{e.answer}".encode()).hexdigest()[:8] for e in examples}


def _digest(folder: Path) -> str:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: there is no checkpoint there")
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("colar.json")]):
        with open(path, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]
