"""What several commands share: the parser, common options, loading a checkpoint, writing a report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from colar import files, progress

DECODING_HELP = "greedy: argmax and mean latent; sampled: temperature 1, top-p 0.9, latent_temperature 1"


class Formatter(argparse.HelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, [], argparse.SUPPRESS) and action.option_strings
        return f"{action.help} (default: %(default)s)" if shown else action.help


class Parser(argparse.ArgumentParser):
    """argparse with exact names only."""

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
        help="folder or Hub id, with the name for its rows",
    )


def data_options(parser: Parser) -> None:
    parser.add_argument("--data_dir", help="folder with upstream files (else $COLAR_DATA_DIR, else the Hub)")
    parser.add_argument("--data_seed", type=int, default=0, help="seed of a generated source")
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="[SOURCE.]KEY=VALUE",
        help="of sources that have options, e.g. arithmetic.max_number=30",
    )
    parser.add_argument("--skip_malformed", action="store_true", help="go on without malformed rows")


def model_options(parser: Parser) -> None:
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the weights"
    )
    parser.add_argument("--backbone", help="where to find an adapter's backbone, if not where it was trained")
    parser.add_argument("--device", help="cpu, cuda, ... (the GPU where there is one)")


def batching_options(parser: Parser) -> None:
    parser.add_argument("--batch_size", type=int, default=32, help="requests at once")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the decode step: takes a minute, pays from some thousand steps on",
    )


def params_options(parser: Parser) -> None:
    """An option for each per-request value that some method has."""
    from colar.methods import registry

    for name, kind in registry.param_types().items():
        parser.add_argument(
            f"--{name}",
            type=truth if kind is bool else number,
            nargs="+",
            metavar="true|false" if kind is bool else None,
            help="one or several, for methods that have it",
        )


def number(text: str) -> float:
    """A number off the command line; whole ones as int (argparse names this function in its error)."""
    value = float(text)
    return int(value) if value.is_integer() else value


def truth(text: str) -> bool:
    """true or false off the command line."""
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def options(pairs: list[str], source: str, called: str = "") -> dict[str, Any]:
    """The options of one source, or of one that is `called` so: KEY=VALUE is every source's, SOURCE.KEY=VALUE and
    NAME.KEY=VALUE are its own. Values are YAML; of two for a key the later one counts."""
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--options takes KEY=VALUE or SOURCE.KEY=VALUE, got {pair!r}")
        owner, dot, key = name.rpartition(".")
        if not dot or owner in (source, called):
            try:
                options[key] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ValueError(f"--options {pair}: the value is not valid YAML") from error
    return options


def named(text: str) -> tuple[str, str]:
    """NAME=PATH, or a path that names itself (the run's folder, where the checkpoint is its `best`)."""
    name, equals, path = text.partition("=")
    if equals:
        return name, path
    folder = Path(text).resolve()
    return (folder.parent.name if folder.name == "best" else folder.name), text


@collector_off()
def load(path: str, args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """A checkpoint for inference, on its device, its adapter merged; and how it was trained."""
    import torch

    from colar.methods import pretrained
    from colar.model import checkpoint

    quiet_libraries()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # unknown, not built in, or not there
        raise ValueError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error
    folder = checkpoint.resolve(path)
    run = checkpoint.read_info(folder)["run"]
    lm, method = pretrained.load(folder, args.dtype, args.backbone)
    lm.merge()
    return lm.to(device), method, run


def param_grid(method: Any, args: argparse.Namespace, strict: bool = False) -> list[Any]:
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


def write_report(
    records: list[Path],
    output: Path,
    title: str | None = None,
    nearest: str | None = None,
    draw_labelled: bool | Sequence[str] = False,
    pairs: Sequence[tuple[str, str]] = (),
) -> None:
    """Fold records into `output`; how they were made (`evaluation.json` beside them) goes into the provenance."""
    from rich.console import Console

    from colar.evaluation import report

    settings = [files.read_json(p) for path in records if (p := path.parent / "evaluation.json").exists()]
    provenance = files.provenance()
    for key in dict.fromkeys(key for each in settings for key in each if key != "questions"):
        provenance[key] = _together([each[key] for each in settings if key in each])
    made = report.write(
        output,
        report.load_records(records),
        title=title,
        provenance=provenance,
        nearest=nearest,
        draw_labelled=draw_labelled,
        pairs=pairs,
    )
    console = Console()
    console.print(report.render_console(made, console.width))
    progress.say(f"wrote {output}/report.md, {output}/report.json and {output}/accuracy_vs_length.png")


def _together(values: list[Any]) -> Any:
    """A setting of several evaluations: what they share, all of their models, or each different value once."""
    if all(isinstance(value, dict) for value in values) and not any(
        one.get(key, value[key]) != value[key] for one in values for value in values for key in value
    ):
        return {key: value[key] for value in values for key in value}
    different = [value for i, value in enumerate(values) if value not in values[:i]]
    return different[0] if len(different) == 1 else different
