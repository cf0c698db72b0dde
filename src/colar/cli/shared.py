"""Shared by several commands: the parser, common options, loading a checkpoint, writing a report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from colar import files, progress, yaml_files

DECODING_HELP = "greedy: argmax and mean latent; sampled: temperature 1, top-p 0.9, latent_temperature 1"


class Formatter(argparse.HelpFormatter):
    """Adds the default value to an option's help, where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # By identity: 0 equals False, and is a default to show.
        shows = not any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS))
        has_default = shows and action.default != []
        if action.option_strings and has_default:
            return f"{action.help} (default: %(default)s)"
        return action.help


class Parser(argparse.ArgumentParser):
    """argparse that accepts full option names only."""

    # An abbreviation that is understood today means two things when another option comes.
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **kwargs)


HARMLESS = (
    # peft asks transformers under a name that the next transformers will not have; it has peft's new name as well.
    ("`is_gradient_checkpointing` is deprecated", FutureWarning),
    # peft's remark on GPT-2, whose linears are stored transposed: it has seen that and does the right thing.
    ("fan_in_fan_out is set to False but the target module is `Conv1D`", UserWarning),
)
"""Warnings of libraries that a user can do nothing about: how each begins, and its category."""


def quiet_libraries() -> None:
    """Keep the libraries' own bars, advice and known harmless warnings off the terminal. For commands alone:
    who uses colar as a library sees everything."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for beginning, category in HARMLESS:
        warnings.filterwarnings("ignore", message=re.escape(beginning), category=category)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Leave Python's garbage collector off inside the block, which imports libraries or loads a model.

    Both make a million objects that stay: looking for garbage among them takes a fifth of an import's time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def checkpoint_options(parser: Parser) -> None:
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="[NAME=]CHECKPOINT",
        help="folder or Hub id, perhaps with a name for it",
    )


def data_options(parser: Parser) -> None:
    parser.add_argument("--data_dir", help="folder with upstream files (else $COLAR_DATA_DIR, else the Hub)")
    parser.add_argument("--data_seed", type=int, default=0, help="seed of a generated source")
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="[SOURCE.]KEY=VALUE",
        help="options of a source that has some, e.g. arithmetic.max_number=30",
    )
    parser.add_argument("--skip_malformed", action="store_true", help="skip malformed rows")


def judge_option(parser: Any) -> None:
    parser.add_argument(
        "--judge",
        metavar="MODULE:FUNCTION",
        help="judge of your own, called as function(question, gold, answer) (default: by the kind of answer)",
    )


def model_options(parser: Parser) -> None:
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="dtype of the weights"
    )
    parser.add_argument(
        "--backbone",
        help="folder or Hub id of an adapter's backbone, if not the one that its checkpoint names",
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")


LIMITS = ("max_latents", "max_completion_length")
"""Limits of a request: options of every command that generates, and fields of `Decoding` and `Limits`."""


def limit_options(parser: Parser, max_completion_length: int) -> None:
    """The options of LIMITS; the default for answers is the command's own."""
    defaults = {"max_latents": 128, "max_completion_length": max_completion_length}
    meanings = {
        "max_latents": "maximum number of thoughts",
        "max_completion_length": "maximum tokens of an answer",
    }
    for name in LIMITS:
        text = f"{meanings[name]} (default: the checkpoint's own, or else {defaults[name]})"
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.set_defaults(default_limits=defaults)


def settle_limits(args: argparse.Namespace, checkpoints: Iterable[str | Path]) -> None:
    """Fill in the limits that were not given: the largest of the checkpoints' own, or the command's defaults."""
    from colar.model import checkpoint

    if all(getattr(args, name) is not None for name in LIMITS):
        return
    known = [
        checkpoint.read_info(checkpoint.resolve(each))["method"].get("limits", {}) for each in checkpoints
    ]
    for name in LIMITS:
        if getattr(args, name) is None:
            setattr(args, name, max(own.get(name, args.default_limits[name]) for own in known))


def data_of_runs(checkpoints: Iterable[str]) -> str:
    """The data of a command that names none: the questions that a run of `auto` held out, or else arithmetic."""
    held_out = {Path(each) / "data" for each in checkpoints if (Path(each) / "data" / "test.jsonl").exists()}
    source = str(held_out.pop()) if len(held_out) == 1 else "arithmetic"
    progress.say(f"--data {source}, by default")
    return source


def say_trained_on(name: str, examples: Sequence[Any], checkpoints: Iterable[str]) -> None:
    """Say how many questions a run of `auto` was trained on."""
    for folder in checkpoints:
        path = Path(folder) / "data" / "train.jsonl"
        if path.exists():
            trained = {row["question"] for _, row in files.read_jsonl(path)}
            n = sum(example.question in trained for example in examples)
            if n:
                progress.say(
                    f"warning: {folder} was trained on {n:,} of {len(examples):,} questions of {name}"
                )


def limits_of(args: argparse.Namespace) -> dict[str, int]:
    """The values of LIMITS, by name."""
    return {name: getattr(args, name) for name in LIMITS}


def batching_options(parser: Parser) -> None:
    parser.add_argument("--batch_size", type=int, default=32, help="requests computed together")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the decode step: takes about a minute, faster from some thousand steps on",
    )
    parser.add_argument(
        "--cuda_graphs",
        action="store_true",
        help="record decode steps as CUDA graphs: several times faster on a GPU (not with --compile)",
    )


def params_options(parser: Parser) -> None:
    """An option for each per-request value that some method has."""
    from colar.methods import registry

    # Several values make several rows of a table: accuracy at c = 1, 2 and 5 is one command.
    for name, kind in registry.param_types().items():
        parser.add_argument(
            f"--{name}",
            type=truth if kind is bool else number,
            nargs="+",
            metavar="true|false" if kind is bool else None,
            help="one or several values, for methods that have this parameter",
        )


def number(text: str) -> float:
    """A number of the command line, as int where it is whole."""
    # argparse names this function in its error: "invalid number value: 'two'".
    value = float(text)
    return int(value) if value.is_integer() else value


def truth(text: str) -> bool:
    """true or false, as the command line says it."""
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def options(pairs: list[str], source: str, called: str = "") -> dict[str, Any]:
    """The options of one source, or of the source that has the name `called`, from the texts of --options.

    KEY=VALUE is for every source, SOURCE.KEY=VALUE and NAME.KEY=VALUE for one. Values are YAML. Of two values for a
    key the later one counts.
    """
    chosen = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--options takes KEY=VALUE or SOURCE.KEY=VALUE, got {pair!r}")
        owner, dot, key = name.rpartition(".")
        if not dot or owner in (source, called):
            chosen[key] = yaml_files.yaml_value(f"--options {pair}", value)
    return chosen


def columns_of(text: str) -> dict[str, str]:
    """The columns of --columns question=problem,steps=rationale,answer=result."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(key and column for key, _, column in pairs):
        raise ValueError(f"--columns takes KEY=COLUMN,KEY=COLUMN, got {text!r}")
    return {key.strip(): column.strip() for key, _, column in pairs}


def own_options(pairs: list[str], source: str) -> dict[str, Any]:
    """`options` of a command that reads one source: those of another would do nothing, and are an error."""
    for pair in pairs:
        owner = pair.partition("=")[0].rpartition(".")[0]
        if owner not in ("", source):
            raise ValueError(f"--options {pair}: the source is {source}, not {owner}")
    return options(pairs, source)


def named(text: str) -> tuple[str, str]:
    """NAME=PATH, or a path that names itself (the run's folder, where the checkpoint is its `best`)."""
    from colar.evaluation.folder import split_name

    name, path = split_name(text)
    if name is not None:
        return name, path
    folder = Path(text).resolve()
    # Every run publishes its checkpoint under one name: the folder above tells runs apart.
    own = folder.parent if folder.name == "best" else folder
    return own.name, text


def named_all(texts: Iterable[str]) -> dict[str, str]:
    """Checkpoints, folder or Hub id, by the name of each. ValueError where two have one name."""
    found: dict[str, str] = {}
    for text in texts:
        name, path = named(text)
        if name in found:
            raise ValueError(
                f"two checkpoints have one name ({name}); give them their own: cot=runs/a/best cot2=runs/b/best"
            )
        found[name] = path
    return found


@collector_off()
def load(path: str, args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """A checkpoint for inference, on its device, its adapter merged; and how it was trained."""
    from colar.methods import pretrained
    from colar.model import checkpoint
    from colar.ops import devices

    quiet_libraries()
    device = _device(args)
    folder = checkpoint.resolve(path)
    run = checkpoint.read_info(folder)["run"]
    lm, method = pretrained.load(folder, args.dtype, args.backbone)
    # Nothing is trained here: a step then costs what a step of the backbone costs.
    lm.merge()
    lm = lm.to(device)
    if args.dtype == "bfloat16" and not devices.computes_bfloat16(lm.device):
        progress.say("warning: this CPU has no bfloat16 arithmetic: --dtype float32 is faster")
    return lm, method, run


def _device(args: argparse.Namespace) -> str:
    """--device, or the GPU if there is one. ValueError where it is unknown, not built in, or not there."""
    import torch

    device: str = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # A tensor tells: torch raises one error or another for each reason.
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def check_params(args: argparse.Namespace) -> None:
    """Reject per-request values that are out of range, before a model is loaded."""
    from colar.methods import registry

    for name in registry.param_names():
        for value in getattr(args, name) or ():
            registry.check_param(name, value)


def check_backbone(folders: Iterable[str | Path], args: argparse.Namespace) -> None:
    """Reject --backbone where no checkpoint is an adapter: it would be read by none."""
    from colar.model import checkpoint

    folders = list(folders)
    if args.backbone and not any(checkpoint.read_info(each)["weights"] == "adapter" for each in folders):
        given = ", ".join(str(each) for each in folders)
        raise ValueError(f"--backbone is for adapters, and {given} holds all weights: leave it out")


def check_anyone_has_params(methods: Sequence[Any], args: argparse.Namespace) -> None:
    """A value that none of the methods has is a mistake; one that only some have fills their rows of the table."""
    from colar.methods import registry

    for name in registry.param_names():
        if not getattr(args, name):
            continue
        if not any(name in method.Params.__dataclass_fields__ for method in methods):
            given = ", ".join(method.name for method in methods)
            raise ValueError(f"--{name}: none of the methods ({given}) has it")


def param_grid(method: Any, args: argparse.Namespace, strict: bool = False) -> list[Any]:
    """Every combination of the given per-request values that this method has; its defaults where none is given.

    `strict` rejects a value that the method does not have: right for one checkpoint, while a table of several leaves
    those cells out.
    """
    from colar.methods import registry

    has = [field.name for field in dataclasses.fields(method.Params)]
    names = []
    for name in registry.param_names():
        # In `strict` a name that the method lacks stays, for `make_params` to reject.
        if getattr(args, name) and (strict or name in has):
            names.append(name)

    grid = []
    # Without names there is one empty combination: the method's defaults.
    for values in itertools.product(*(getattr(args, name) for name in names)):
        chosen = dict(zip(names, values, strict=True))
        grid.append(registry.make_params(method, chosen))
    for params in grid:
        warning = method.warning_for(params)
        if warning:
            progress.say(f"warning: {method.name}: {warning}")
    return grid


def write_report(
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
