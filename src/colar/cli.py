"""`colar`: train, evaluate, generate, report, data. Results on stdout, everything else on stderr.

The commands wire the rooms of the library together and hold no logic of their own. Options are written with
underscores or hyphens, as you like.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from colar import __version__, files, progress


class Parser(argparse.ArgumentParser):
    """argparse with exact names only, and every underscore also spelt as a hyphen."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:  # type: ignore[override]
        spelt = [name.replace("_", "-") for name in names if name.startswith("--") and "_" in name]
        return super().add_argument(*names, *spelt, **kwargs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 2 wrong input (said on stderr), 130 interrupted."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not train_command:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    try:
        args.run(args)
    except (ValueError, OSError, ArithmeticError) as error:
        progress.say(f"colar {args.command}: error: {error}")
        return 2
    except KeyboardInterrupt:
        progress.say("stopped; the same command goes on from here")
        return 130
    return 0


def build_parser() -> Parser:
    parser = Parser(
        prog="colar", description="Fine-tune a causal language model to think in compressed latents, at any speed."
    )
    parser.add_argument("--version", action="version", version=f"colar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _train_parser(commands)
    _evaluate_parser(commands)
    _generate_parser(commands)
    _report_parser(commands)
    _data_parser(commands)
    return parser


# --- train ---------------------------------------------------------------------------------------------


def _train_parser(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train as a recipe says; the same command resumes",
        description="Train as a recipe says. Any key can be overridden, exactly: --training.learning_rate 1e-4. "
        "The same command resumes a run that was stopped.",
    )
    train.add_argument("recipe", help="YAML file, e.g. recipes/tiny/colar.yaml")
    train.add_argument("--no_resume", action="store_true", help="start afresh, dropping the run's checkpoints")
    train.add_argument("--keys", action="store_true", help="list every key of a recipe with its meaning, and end")
    train.set_defaults(run=train_command)


def train_command(args: argparse.Namespace) -> None:
    from colar import recipe

    if args.keys:
        recipe.parser().print_help()
        return
    result = recipe.run(recipe.load(args.recipe, args.overrides), resume=not args.no_resume)
    print(result.best)


# --- evaluate ------------------------------------------------------------------------------------------


def _evaluate_parser(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="answer test questions, keep a record of each, and report",
        description="Answer test questions with one or more checkpoints and write records.jsonl, report.json, "
        "report.md and the accuracy-versus-length picture. Stopped, the same command goes on.",
    )
    evaluate.add_argument(
        "checkpoints", nargs="+", metavar="[NAME=]CHECKPOINT", help="folder or Hub id, with the name for its rows"
    )
    _data_options(evaluate)
    evaluate.add_argument("--data", nargs="+", default=["arithmetic"], help="sources, or .json / .jsonl files")
    evaluate.add_argument("--split", default="test", help="split of the sources")
    evaluate.add_argument("--limit", type=int, help="first so many questions of each")
    _params_options(evaluate)
    evaluate.add_argument("--decoding", nargs="+", default=["greedy"], choices=["greedy", "sampled"], help=" ")
    evaluate.add_argument("--seeds", nargs="+", type=int, default=[0], help="decoding seeds (greedy takes the first)")
    evaluate.add_argument("--output", required=True, help="folder for records and report")
    evaluate.add_argument("--max_latents", type=int, default=128, help="most thoughts of a request")
    evaluate.add_argument("--max_completion_length", type=int, default=64, help="most tokens of an answer")
    evaluate.add_argument("--batch_size", type=int, default=32, help="requests at once")
    _model_options(evaluate)
    evaluate.set_defaults(run=evaluate_command)


def evaluate_command(args: argparse.Namespace) -> None:
    from colar.data import sources
    from colar.evaluation import evaluate, report

    output = files.require_writable(args.output)
    limits = evaluate.Limits(args.max_latents, args.max_completion_length, args.batch_size)
    datasets = {
        Path(name).stem if name.endswith((".json", ".jsonl")) else name: sources.load(
            name, args.split, data_dir=args.data_dir, limit=args.limit, seed=args.data_seed,
            skip_malformed=args.skip_malformed, options=_options(args.options) if name == "arithmetic" else {},
        )
        for name in args.data
    }  # fmt: skip
    paths = dict(_named(text) for text in args.checkpoints)
    if len(paths) < len(args.checkpoints):
        raise ValueError("two checkpoints have one name; give them their own: cot=runs/a/best cot2=runs/b/best")
    _claim(output, limits, args, paths)
    grid = []
    for name, path in paths.items():
        lm, method, run = _load(path, args)
        system = evaluate.System(name, lm, method, run.get("label", ""), run.get("seed"))
        grid += evaluate.cells(system, datasets, _param_grid(method, args), args.decoding, args.seeds)
    records = output / "records.jsonl"
    evaluate.evaluate(grid, datasets, records, limits)
    _write_report([records], output)


def _claim(output: Path, limits: Any, args: argparse.Namespace, paths: dict[str, str]) -> None:
    """Records of another checkpoint, or made in another way, must not be taken for these."""
    from colar.model import checkpoint

    settings = {
        "limits": {"max_latents": limits.max_latents, "max_completion_length": limits.max_completion_length},
        "split": args.split,
        "options": _options(args.options),
        "data_seed": args.data_seed,
        "dtype": args.dtype,
        "models": {name: _digest(checkpoint.resolve(path)) for name, path in paths.items()},
    }
    path = output / "evaluation.json"
    if path.exists():
        earlier = files.read_json(path)
        for key in settings:
            if key != "models" and earlier[key] != settings[key]:
                raise ValueError(f"{output} holds records with {key} {earlier[key]}, now it is {settings[key]}")
        for name, digest in earlier["models"].items():
            if settings["models"].setdefault(name, digest) != digest:
                raise ValueError(f"{output} holds records of another checkpoint called {name}: give it another name")
    files.write_json(path, settings)


def _digest(folder: Path) -> str:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: there is no checkpoint there")
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("colar.json")]):
        with open(path, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


# --- generate ------------------------------------------------------------------------------------------


def _generate_parser(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="answer a question, or a file of questions",
        description="Answer one question, or every line of a JSONL file (resumable).",
    )
    generate.add_argument("checkpoint", help="folder or Hub id")
    generate.add_argument("question", nargs="?", help="the question; or use --input")
    generate.add_argument("--input", help='JSONL with "question" and, if you like, "id" in each line')
    generate.add_argument("--output", help="JSONL of answers, appended to; without it they are printed")
    _params_options(generate)
    generate.add_argument("--show_latents", action="store_true", help="print each thought, a latent by its nearest tokens")
    generate.add_argument("--neighbours", type=int, default=5, help="tokens shown for a latent")
    generate.add_argument("--decoding", default="greedy", choices=["greedy", "sampled"], help=" ")
    for name in ("temperature", "top_p", "latent_temperature"):
        generate.add_argument(f"--{name}", type=float, help="overrides the decoding's")
    generate.add_argument("--seed", type=int, default=0, help="fixes every draw")
    generate.add_argument("--max_latents", type=int, default=128, help="most thoughts")
    generate.add_argument("--max_completion_length", type=int, default=64, help="most tokens of the answer")
    generate.add_argument("--batch_size", type=int, default=32, help="requests at once")
    _model_options(generate)
    generate.set_defaults(run=generate_command)


def generate_command(args: argparse.Namespace) -> None:
    if (args.question is None) == (args.input is None):
        raise ValueError("give a question, or --input with a JSONL file, one of the two")
    if args.output and not args.input:
        raise ValueError("--output goes with --input")
    from colar.engine.engine import Engine
    from colar.engine.request import fold

    decoding = _decoding(args)
    rows = _questions(args)
    if args.output:
        files.require_writable(Path(args.output).resolve().parent)
    lm, method, _ = _load(args.checkpoint, args)
    grid = _param_grid(method, args, strict=True)
    requests = _requests(rows, grid, decoding, args)
    engine = Engine(lm, method, args.batch_size)
    if not args.output:
        gold = {row["id"]: row.get("answer") for row in rows}
        for completion in engine.generate(requests):
            _print_completion(lm, completion, gold[completion.request.id], args)
        return
    done = {(record["id"], json.dumps(record["params"])) for record in files.resume_jsonl(args.output)}
    requests = [r for r in requests if (r.id, json.dumps(dataclasses.asdict(r.params))) not in done]
    with files.append_jsonl(args.output) as write, progress.bar("generate", len(requests)) as bar:
        for completion in fold(lm, engine.stream(requests)):
            write(_answer(lm, completion, args))
            bar.advance()
    progress.say(f"wrote {args.output} ({len(requests)} new answers, {len(done)} were there)")


def _decoding(args: argparse.Namespace) -> Any:
    from colar.engine.request import DECODINGS

    named = {name: getattr(args, name) for name in ("temperature", "top_p", "latent_temperature")}
    return dataclasses.replace(
        DECODINGS[args.decoding],
        max_latents=args.max_latents,
        max_completion_length=args.max_completion_length,
        **{name: value for name, value in named.items() if value is not None},
    )


def _questions(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with `id` and `question` (and `answer`, to print beside ours), from the command line or the file."""
    if args.question is not None:
        return [{"id": "question", "question": args.question}]
    rows = []
    for number, row in files.read_jsonl(args.input):
        if not isinstance(row, dict) or not isinstance(row.get("question"), str) or not row["question"].strip():
            raise ValueError(f'{args.input}:{number}: no "question"')
        rows.append({**row, "id": str(row.get("id", number))})
    if not rows:
        raise ValueError(f"{args.input} has no rows")
    if len({row["id"] for row in rows}) < len(rows):
        raise ValueError(f"{args.input}: two rows have one id")
    return rows


def _requests(rows: list[dict[str, Any]], grid: list[Any], decoding: Any, args: argparse.Namespace) -> list[Any]:
    from colar.engine.request import Request
    from colar.ops.noise import seed_from

    return [
        Request(
            row["id"], row["question"], params, decoding, seed_from(args.seed, row["id"]), keep_latents=args.show_latents
        )
        for row in rows
        for params in grid
    ]


def _answer(lm: Any, completion: Any, args: argparse.Namespace) -> dict[str, Any]:
    from colar.analysis import retrieval

    params = dataclasses.asdict(completion.request.params)
    row = {"id": completion.request.id, "params": params, "answer": completion.text, "length": completion.length}
    row |= {"truncated": completion.truncated, "seconds": round(completion.seconds, 4)}
    if args.show_latents:
        readings = retrieval.read(lm, completion, args.neighbours)
        row["thoughts"] = [r.token if r.token is not None else [n.token for n in r.neighbours] for r in readings]
    return row


def _print_completion(lm: Any, completion: Any, gold: str | None, args: argparse.Namespace) -> None:
    from colar.analysis import retrieval

    if args.input:
        asked = ", ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(completion.request.params).items())
        print(f"\n{completion.request.question}" + (f"  [{asked}]" if asked else ""))
    for number, reading in enumerate(retrieval.read(lm, completion, args.neighbours), start=1):
        if reading.token is not None:
            print(f"{number:4d}  {reading.token!r}")
            continue
        near = "  ".join(f"{n.token!r} {n.cosine:.2f}" for n in reading.neighbours)
        sigma = "" if reading.sigma is None else f"   sigma {reading.sigma:.2f}"
        print(f"{number:4d}  {near}{sigma}")
    print(completion.text + (f"   (expected {gold})" if gold is not None else ""))
    cut = " (cut at a limit)" if completion.truncated else ""
    progress.say(f"{completion.length} thoughts{cut}, {completion.seconds:.2f} s")


# --- report --------------------------------------------------------------------------------------------


def _report_parser(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="fold records into a report again, or several into one",
        description="Fold records into a report: records.jsonl files, or folders that hold one.",
    )
    report.add_argument("records", nargs="+", help="records.jsonl[.gz], or folders")
    report.add_argument("--output", required=True, help="folder for report.json, report.md and the picture")
    report.add_argument("--title", help="heading of the report")
    report.set_defaults(run=report_command)


def report_command(args: argparse.Namespace) -> None:
    paths = []
    for text in args.records:
        path = Path(text)
        found = [path / name for name in ("records.jsonl", "records.jsonl.gz") if (path / name).exists()]
        paths += found[:1] if path.is_dir() else [path]
        if path.is_dir() and not found:
            raise ValueError(f"{path} holds no records.jsonl")
    _write_report(paths, files.require_writable(args.output), args.title)


# --- data ----------------------------------------------------------------------------------------------


def _data_parser(commands: Any) -> None:
    data = commands.add_parser("data", help="list, show or prepare data sources")
    actions = data.add_subparsers(dest="action", required=True, metavar="list | show | prepare")
    listed = actions.add_parser("list", help="every source and where it comes from")
    listed.add_argument("--data_dir", help="folder with upstream files (else $COLAR_DATA_DIR, else the Hub)")
    listed.set_defaults(run=data_list)
    show = actions.add_parser("show", help="a few rows of a source")
    show.add_argument("source", help="source, or .json / .jsonl file")
    show.add_argument("--n", type=int, default=3, help="rows")
    show.add_argument("--split", default="train", help="split")
    _data_options(show)
    show.set_defaults(run=data_show)
    prepare = actions.add_parser("prepare", help="write a source as JSONL, checked row by row")
    prepare.add_argument("source", help="source, or .json / .jsonl file")
    prepare.add_argument("--splits", nargs="+", default=["train", "validation", "test"], help="splits")
    prepare.add_argument("--limit", type=int, help="first so many rows of each")
    prepare.add_argument("--output", required=True, help="folder")
    _data_options(prepare)
    prepare.set_defaults(run=data_prepare)


def data_list(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from colar.data import sources

    table = Table("source", "splits", "answers", "found", "licence", "what it is")
    for row in sources.describe(args.data_dir):
        table.add_row(row.name, row.splits, row.answer_type, row.found, row.licence, row.about)
    Console().print(table)


def data_show(args: argparse.Namespace) -> None:
    from colar.data import sources

    examples = sources.load(
        args.source, args.split, data_dir=args.data_dir, limit=args.n, seed=args.data_seed,
        skip_malformed=args.skip_malformed, options=_options(args.options),
    )  # fmt: skip
    for example in examples:
        print(json.dumps(dataclasses.asdict(example), ensure_ascii=False, indent=2))


def data_prepare(args: argparse.Namespace) -> None:
    from colar.data import sources

    written = sources.prepare(
        args.source, args.splits, files.require_writable(args.output), data_dir=args.data_dir, limit=args.limit,
        seed=args.data_seed, skip_malformed=args.skip_malformed, options=_options(args.options),
    )  # fmt: skip
    for path in written:
        print(path)


# --- shared --------------------------------------------------------------------------------------------


def _data_options(parser: Parser) -> None:
    parser.add_argument("--data_dir", help="folder with upstream files (else $COLAR_DATA_DIR, else the Hub)")
    parser.add_argument("--data_seed", type=int, default=0, help="seed of a generated source")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="of a generated source")
    parser.add_argument("--skip_malformed", action="store_true", help="go on without malformed rows")


def _model_options(parser: Parser) -> None:
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the weights")
    parser.add_argument("--backbone", help="where to find an adapter's backbone, if not where it was trained")
    parser.add_argument("--device", help="cpu, cuda, ... (the GPU where there is one)")


def _params_options(parser: Parser) -> None:
    """An option for each per-request value that some method has."""
    from colar.methods import registry

    for name in registry.param_names():
        parser.add_argument(f"--{name}", type=number, nargs="+", help="one or several, for methods that have it")


def number(text: str) -> float:
    """A number off the command line; whole ones as int (argparse names this function in its error)."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--options takes KEY=VALUE, got {pair!r}")
        options[key] = yaml.safe_load(value)
    return options


def _named(text: str) -> tuple[str, str]:
    """NAME=PATH, or a path that names itself (the run's folder, where the checkpoint is its `best`)."""
    name, equals, path = text.partition("=")
    if equals:
        return name, path
    folder = Path(text).resolve()
    return (folder.parent.name if folder.name == "best" else folder.name), text


def _load(path: str, args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    import torch

    from colar.methods import registry
    from colar.model import checkpoint

    folder = checkpoint.resolve(path)
    run = checkpoint.read_info(folder)["run"]
    lm, method = registry.load(folder, args.dtype, args.backbone)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return lm.to(device), method, run


def _param_grid(method: Any, args: argparse.Namespace, strict: bool = False) -> list[Any]:
    """Every combination of the given per-request values that this method has; its defaults where it has none.

    `strict` refuses a value that the method does not have (one checkpoint is asked, not a table filled).
    """
    from colar.methods import registry

    given = [name for name in registry.param_names() if getattr(args, name)]
    has = [f.name for f in dataclasses.fields(method.Params)]
    names = given if strict else [name for name in given if name in has]
    grid = [
        registry.make_params(method, dict(zip(names, values, strict=True)))
        for values in itertools.product(*(getattr(args, name) for name in names))
    ]
    for params in grid:
        if warning := method.trained(params):
            progress.say(f"warning: {method.name}: {warning}")
    return grid


def _write_report(records: list[Path], output: Path, title: str | None = None) -> None:
    from rich.console import Console

    from colar.evaluation import report

    made = report.write(output, report.load_records(records), title=title)
    Console().print(report.render_console(made))
    progress.say(f"wrote {output}/report.md, {output}/report.json and {output}/accuracy_vs_length.png")


if __name__ == "__main__":
    sys.exit(main())
