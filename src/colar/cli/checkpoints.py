"""Checkpoints on the command line, for all commands that load some: names, default data, methods, limits, per-request
values, and the weights."""

import argparse
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from colar import files, progress
from colar.cli import options
from colar.cli.options import dtype_of
from colar.data import data_files
from colar.data.catalogue import SOURCES
from colar.data.example import Example, conversation
from colar.engine.request import decoding_of
from colar.evaluation.report_rows import AVERAGE
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import checkpoint
from colar.model.latent_lm import LatentLM
from colar.ops import devices
from colar.training.run_folder import AutoFolder

Name = TypeVar("Name")


# Names: unique for each checkpoint and each data set of a command


class CheckpointName(NamedTuple):
    """The fields that name a checkpoint's rows; params and decoding are fields of each request."""

    model: str
    method: str
    label: str
    train_seed: int | None

    def __str__(self) -> str:
        run = "" if self.train_seed is None else f"run {self.train_seed}"
        return ", ".join(filter(None, (f"{self.model} {self.method}", self.label, run)))


def name_checkpoints(texts: Iterable[str], label: str | None) -> dict[CheckpointName, str]:
    """Checkpoints of a command line (folders or Hub ids), by the name of their rows.

    Method, label and training seed are read from the checkpoint; `label` replaces the checkpoint's own label. Raises
    ValueError if two checkpoints have one name, or if there is no checkpoint at a path.
    """
    named = []
    for model, path in map(name_and_path, texts):
        info = checkpoint.read_info(checkpoint.resolve(path))
        # A checkpoint that was made in code, not by `colar train`, has neither label nor seed.
        own_label, seed = info["run"].get("label", ""), info["run"].get("seed")
        method = registry.rebuild(info["method"], path).name
        named.append((CheckpointName(model, method, own_label if label is None else label, seed), path))
    return _by_unique_name(named)


def _by_unique_name(pairs: Iterable[tuple[Name, str]]) -> dict[Name, str]:
    by_name: dict[Name, str] = {}
    for name, path in pairs:
        if name in by_name:
            raise ValueError(
                f"two checkpoints have one name ({name}); give them their own: cot=runs/a/best cot2=runs/b/best"
            )
        by_name[name] = path
    return by_name


def name_sources(texts: Iterable[str]) -> dict[str, str]:
    """Sources of data by the name of their data set, from NAME=SOURCE or SOURCE.

    Without NAME, a source keeps its own name, a file is named after its file name without endings, and a folder of
    files after the folder. Raises ValueError if two have one name, or one has the name of the report's means.
    """
    pairs = []
    for text in texts:
        name, source = split_name(text)
        if name is None:
            # A path would make a wide column heading, and may be written in several ways.
            if Path(text).is_dir() and text not in SOURCES:
                name = Path(text).resolve().name
            else:
                name = data_files.name_of(Path(text)) if data_files.is_user_file(text) else text
        pairs.append((name, source))
    names = [name for name, _ in pairs]
    # Checked now, because the report would reject the records only after all questions are answered.
    if AVERAGE in names:
        raise ValueError(
            f"no data set of --data may be called {AVERAGE!r}, as the report's mean is; write NAME=..."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"two data sets of --data have one name: {', '.join(names)}; write NAME=... for one")
    return dict(pairs)


def split_name(text: str) -> tuple[str | None, str]:
    """NAME=PATH -> (NAME, PATH); (None, text) if there is no name.

    A path may itself contain "=", as runs/lr=1e-4/best does. So a text has no name if it is an existing path, or if a
    "/" comes before its first "=".
    """
    name, equals, path = text.partition("=")
    if not equals or "/" in name or os.path.exists(text):
        return None, text
    return name, path


def name_and_path(text: str) -> tuple[str, str]:
    """Name and path from NAME=PATH, or from a path, whose folder is the name (the run's folder for a run's `best`)."""
    name, path = split_name(text)
    if name is not None:
        return name, path
    folder = Path(text).resolve()
    # Every run publishes its checkpoint under the same name, so that only the folder above distinguishes runs.
    own = folder.parent if folder.name == "best" else folder
    return own.name, text


def paths_by_name(texts: Iterable[str]) -> dict[str, str]:
    """Checkpoints of a command line, folder or Hub id, by their names. ValueError if two have one name."""
    return _by_unique_name(map(name_and_path, texts))


# Methods, limits, data and per-request values of checkpoints

LIMITS = ("max_latents", "max_completion_length")


def methods_of(folders: Mapping[str, Path]) -> dict[str, Method]:
    """The methods of checkpoints, by name. The weights, which take seconds to load, are not read."""
    infos = {name: checkpoint.read_info(folder) for name, folder in folders.items()}
    return {name: registry.rebuild(info["method"], folders[name]) for name, info in infos.items()}


def shared_limits(args: argparse.Namespace, methods: Mapping[str, Method]) -> dict[str, int]:
    """The limits of requests to several checkpoints. One that was not given is the largest of the checkpoints' own."""
    given = {name: getattr(args, name) for name in LIMITS}
    decodings = [decoding_of(method, **given) for method in methods.values()]
    return {name: max(getattr(decoding, name) for decoding in decodings) for name in LIMITS}


def data_of_runs(checkpoints: Iterable[str]) -> str:
    """The default data of a command: the questions that a run of `auto` held out, or else arithmetic.

    ValueError if several runs held out questions.
    """
    runs = map(AutoFolder.of, checkpoints)
    held_out = {str(run.data): run.data.resolve() for run in runs if run.rows("test").exists()}
    if len(set(held_out.values())) > 1:
        raise ValueError(f"--data is needed: each run held out questions of its own ({', '.join(held_out)})")
    source = next(iter(held_out), "arithmetic")
    progress.say(f"--data {source}, by default")
    return source


def say_judged_by(judge: str | None, checkpoints: Iterable[str]) -> None:
    """Warn if a run of `auto` was judged by a function of the user's and this command has no judge."""
    for folder in checkpoints:
        # The warning only names the function, because a folder must not choose code that runs.
        own = AutoFolder.of(folder).judge()
        if own is not None and judge is None:
            progress.say(
                f"warning: {folder} was judged by {own}, here by the kind of answer: give --judge {own}"
            )


def say_trained_on(name: str, examples: Sequence[Example], checkpoints: Iterable[str]) -> None:
    """Warn if a run of `auto` was trained on some of the questions of the data set `name`."""
    for folder in checkpoints:
        path = AutoFolder.of(folder).rows("train")
        if not path.exists():
            continue
        trained = {conversation(row["question"], row.get("context", ())) for _, row in files.read_jsonl(path)}
        n = sum(example.conversation in trained for example in examples)
        if n:
            progress.say(f"warning: {folder} was trained on {n:,} of {len(examples):,} questions of {name}")


def absolute(path_or_id: str) -> str:
    """A path in its absolute form; a Hub id unchanged, because each machine resolves it."""
    return str(Path(path_or_id).resolve()) if Path(path_or_id).exists() else path_or_id


def load_checkpoint(path: str, args: argparse.Namespace) -> tuple[LatentLM, Method]:
    """The model and the method of a checkpoint for inference, on the command's device, with the adapter merged."""
    lm, method = pretrained.load_for_inference(
        path, args.dtype, _backbone_of(path, args), args.device, args.weights
    )
    if args.dtype == "bfloat16" and args.weights != "int4" and not devices.computes_bfloat16(lm.device):
        progress.say(f"warning: {lm.device} has no bfloat16 arithmetic: --dtype float32 is faster")
    return lm, method


def _backbone_of(path: str | Path, args: argparse.Namespace) -> str | None:
    """The absolute value of --backbone for an adapter; None without one, or for a checkpoint with all weights."""
    if not args.backbone or checkpoint.read_info(checkpoint.resolve(path))["weights"] != "adapter":
        return None
    return absolute(args.backbone)


def engine_settings(path: str, args: argparse.Namespace) -> Any:
    """The `EngineSettings` of a checkpoint, for engines on other machines."""
    # Nothing of Ray is imported without --ray.
    from colar.integrations.ray_answers import EngineSettings

    return EngineSettings(
        checkpoint=absolute(path),
        dtype=dtype_of(args),
        backbone=_backbone_of(path, args),
        device=args.device,
        quantization=args.weights,
        batch_size=options.batch_size(args),
        eager=args.eager,
    )


def check_backbone(folders: Iterable[str | Path], args: argparse.Namespace) -> None:
    """Reject --backbone if no checkpoint is an adapter, because it would have no effect."""
    folders = list(folders)
    if args.backbone and not any(_backbone_of(folder, args) for folder in folders):
        names = ", ".join(map(str, folders))
        raise ValueError(f"--backbone is for adapters, and {names} holds all weights: leave it out")


def unchecked_backbone(folders: Iterable[str | Path], args: argparse.Namespace) -> dict[str, str]:
    """--backbone as a setting of a run, if a checkpoint lacks its backbone's fingerprint or a tokenizer; else {}."""
    infos = map(checkpoint.read_info, folders)
    unchecked = any(not info["fingerprint"] or not info["tokenizer"] for info in infos)
    return {"backbone": absolute(args.backbone)} if args.backbone and unchecked else {}


def param_combinations(methods: Mapping[str, Method], args: argparse.Namespace) -> dict[str, list[Any]]:
    """Every combination of the given per-request values for each method, by its key, or the method's defaults.

    ValueError for a value that is out of range, and for a parameter that none of the methods has. One that only some
    methods have applies to these alone.
    """
    values_of = {name: getattr(args, name) for name in registry.all_param_names() if getattr(args, name)}
    for name in values_of:
        if not any(name in registry.param_names(method) for method in methods.values()):
            has_none = (
                f"method {method.name} has no {name}; it takes {', '.join(registry.param_names(method)) or 'none'}"
                for method in methods.values()
            )
            raise ValueError("; ".join(dict.fromkeys(has_none)))
    combinations = {}
    for key, method in methods.items():
        names = [name for name in values_of if name in registry.param_names(method)]
        # Without names there is one empty combination, the method's defaults. A value that is given twice counts once.
        given = (
            registry.make_params(method, dict(zip(names, values, strict=True)))
            for values in itertools.product(*(values_of[name] for name in names))
        )
        combinations[key] = list(dict.fromkeys(given))
        for params in combinations[key]:
            warning = method.check_params(params)
            if warning:
                progress.say(f"warning: {method.name}: {warning}")
    return combinations
