"""`colar evaluate`."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

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
        "--data",
        nargs="+",
        default=["arithmetic"],
        metavar="[NAME=]DATA",
        help="sources, or .json / .jsonl files; one source may stand under several names, with options each",
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
    evaluate.add_argument(
        "--control",
        nargs="+",
        choices=["own", "zeroed", "shuffled", "random"],
        help="answer with the latents replaced (docs/arena.md), in rows labelled control-...",
    )
    evaluate.add_argument("--label", help="label of the rows, in place of the checkpoint's own")
    evaluate.add_argument("--output", required=True, help="folder for records and report")
    evaluate.add_argument("--max_latents", type=int, default=128, help="most thoughts of a request")
    evaluate.add_argument("--max_completion_length", type=int, default=64, help="most tokens of an answer")
    batching_options(evaluate)
    model_options(evaluate)
    evaluate.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    output = files.require_writable(args.output)
    with files.alone(output):
        _evaluate(args, output)


def _evaluate(args: argparse.Namespace, output: Path) -> None:
    from colar.evaluation import controlled, evaluate

    limits = evaluate.Limits(args.max_latents, args.max_completion_length, args.batch_size, args.compile)
    datasets = _datasets(args)
    checkpoints = _checkpoints(args)
    _claim(output, limits, args, checkpoints, datasets)
    systems = []
    for key, path in checkpoints.items():
        lm, method, _ = load(path, args)
        systems.append(evaluate.EvaluatedModel(key.model, lm, method, key.label, key.train_seed))
    _check_params([system.method for system in systems], args)
    if args.control:
        systems = controlled.require_latent(systems)
    records = output / "records.jsonl"
    grid = []
    for system in systems:
        params = param_grid(system.method, args)
        grid += evaluate.make_grid(system, datasets, params, args.decoding, args.seeds)
    if args.control:
        controlled.evaluate_controls(grid, args.control, datasets, records, limits)
    else:
        evaluate.evaluate(grid, datasets, records, limits)
    write_report([records], output)


def _datasets(args: argparse.Namespace) -> dict[str, Any]:
    """The examples of each data set under the name that its rows bear."""
    from colar.data import sources

    named_sources = [_named_source(text) for text in args.data]
    names = [name for name, _ in named_sources]
    if len(set(names)) < len(names):
        raise ValueError(f"two data sets of --data have one name: {', '.join(names)}; write NAME=... for one")
    known = {part for pair in named_sources for part in pair}
    for pair in args.options:
        owner = pair.partition("=")[0].rpartition(".")[0]
        if owner and owner not in known:
            raise ValueError(f"--options {pair}: --data names no {owner} (it has {', '.join(sorted(known))})")
    return {
        name: sources.load(
            source, args.split, data_dir=args.data_dir, limit=args.limit, seed=args.data_seed,
            skip_malformed=args.skip_malformed, options=options(args.options, source, name),
        )
        for name, source in named_sources
    }  # fmt: skip


def _named_source(text: str) -> tuple[str, str]:
    """NAME=SOURCE, or a source that names itself, a file by its stem."""
    name, equals, source = text.partition("=")
    if equals:
        return name, source
    return (Path(text).stem if text.endswith((".json", ".jsonl")) else text), text


class _Key(NamedTuple):
    """What names a checkpoint's rows."""

    model: str
    method: str
    label: str
    train_seed: int | None

    def __str__(self) -> str:
        run = "" if self.train_seed is None else f"run {self.train_seed}"
        return ", ".join(part for part in (f"{self.model} {self.method}", self.label, run) if part)


def _checkpoints(args: argparse.Namespace) -> dict[_Key, str]:
    """The checkpoints' folders by what names their rows."""
    from colar.model import checkpoint

    found: dict[_Key, str] = {}
    for text in args.checkpoints:
        name, path = named(text)
        info = checkpoint.read_info(checkpoint.resolve(path))
        label = info["run"].get("label", "") if args.label is None else args.label
        key = _Key(name, info["method"]["name"], label, info["run"].get("seed"))
        if key in found:
            raise ValueError(
                f"two checkpoints have one name ({key}); give them their own: cot=runs/a/best cot2=runs/b/best"
            )
        found[key] = path
    return found


def _check_params(methods: list[Any], args: argparse.Namespace) -> None:
    """A value that none of the methods has is a mistake; one that only some have fills their rows of the table."""
    from colar.methods import registry

    for name in registry.param_names():
        if getattr(args, name) and not any(name in method.Params.__dataclass_fields__ for method in methods):
            raise ValueError(f"--{name}: none of the methods ({', '.join(m.name for m in methods)}) has it")


def _claim(
    output: Path,
    limits: Any,
    args: argparse.Namespace,
    checkpoints: dict[_Key, str],
    datasets: dict[str, Any],
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
        "models": {str(key): _digest(checkpoint.resolve(path)) for key, path in checkpoints.items()},
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
