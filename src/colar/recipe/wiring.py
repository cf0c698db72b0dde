"""From a `Recipe` to a run: rows, model, method, validation and training wired together."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from colar import files, processes, progress, recipes
from colar.checks import check_same_run
from colar.data.example import Example
from colar.engine import cache
from colar.engine.request import DECODINGS
from colar.evaluation.evaluate import require_fit, score
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM
from colar.recipe.parsing import build_method
from colar.recipe.rows import load_examples
from colar.recipe.schema import ModelConfig, Recipe, plain, to_json
from colar.training.grpo import run as grpo_run
from colar.training.run_folder import RunFolder
from colar.training.run_page import PageCallback, RunPage
from colar.training.sft import TrainResult, train


def run(recipe: Recipe, resume: bool = True) -> TrainResult:
    """Train as the recipe says, in its own folder. ValueError for what is wrong with it, before the first step."""
    output = files.require_writable(recipe.output)
    check_start(recipe)
    # Joined first: which process owns the folder is settled among all of them.
    processes.join(recipe.training.ddp_timeout)
    # One lock for a run on each disk: under torchrun one process holds it for all.
    owner = processes.owns(output)
    with files.alone(output) if owner else nullcontext():
        if owner:
            claim(recipe, output)
        return _run(recipe, output, resume)


def _run(recipe: Recipe, output: Path, resume: bool) -> TrainResult:
    examples, held_out = load_examples(recipe.data)
    lm, method = load_model(recipe)
    # A validation question beyond the model's context would fail after the first epoch: it is looked for now.
    params = [registry.make_params(method, values) for values in recipe.validation.params]
    require_fit(lm, method, held_out, params, recipe.validation.limits)

    validate = make_validate(recipe, held_out)
    run_info = {"recipe": to_json(recipe), "seed": recipe.training.seed, "label": recipe.label}
    page = make_page(recipe, held_out, params, output)
    watch = []
    if page is not None:
        reinforced = recipe.grpo is not None
        watch.append(PageCallback(page, lm, method, before=reinforced, retrieval=not reinforced))
    if recipe.grpo is not None:
        result = grpo_run.train(
            lm, method, examples, recipe.training, recipe.grpo, output,
            validate=validate, run_info=run_info, resume=resume, callbacks=watch,
        )  # fmt: skip
    else:
        result = train(
            lm, method, examples, recipe.training, output,
            held_out=held_out, validate=validate, run_info=run_info, resume=resume, callbacks=watch,
        )  # fmt: skip
    shows = page is not None and processes.is_main() and page.write(lm, method)
    progress.say(f"wrote {', '.join(_written(recipe, result, RunFolder(output)))}")
    if shows:
        progress.say(f"what it thinks: {RunFolder(output).page}")
    return result


def _written(recipe: Recipe, result: TrainResult, folder: RunFolder) -> list[str]:
    """The files of a run that are worth a look, as far as it wrote them."""
    written = [f"{result.best} (the checkpoint)"]
    # A run that is shorter than its first log has nothing to draw.
    if folder.curves.exists():
        written.append(str(folder.curves))
    if recipe.training.report_to == "tensorboard" and folder.logs.exists():
        written.append(f"{folder.logs} (TensorBoard)")
    return written


def make_page(recipe: Recipe, held_out: list[Example], params: Sequence[Any], output: Path) -> RunPage | None:
    """The page of the run; None where the recipe wants none, or has no validation rows."""
    settings = recipe.validation
    if settings.page_size == 0 or not held_out:
        return None
    decoding = replace(
        DECODINGS[settings.decoding],
        max_latents=settings.limits.max_latents,
        max_completion_length=settings.limits.max_completion_length,
    )
    return RunPage(RunFolder(output), held_out[: settings.page_size], params, decoding)


def claim(recipe: Recipe, output: Path) -> None:
    """Write the recipe into its run folder. ValueError where the folder holds another run: two must not mix.

    A folder or file that is named in other words, or was moved, is the same one: inputs.json has digests of the inputs.
    """
    path, inputs = output / "recipe.json", output / "inputs.json"
    now = to_json(recipe)
    flat_now = _comparable(now)
    folder = RunFolder(output)
    # A run that failed before it saved anything leaves nothing to mix with: its mistake may be corrected in place.
    if path.exists() and (folder.best.exists() or folder.last_checkpoint()):
        before = _comparable(files.read_json(path))
        known = files.read_json(inputs) if inputs.exists() else {}
        for key in _inputs(before).keys() & _inputs(flat_now).keys():
            if _is_same_input(before[key], flat_now[key], known.get(key)):
                flat_now[key] = before[key]
        check_same_run(
            output, before, flat_now, "give this run its own --output, or the values that it was begun with"
        )
    files.write_json(path, now)
    found = {key: fingerprint(text) for key, text in _inputs(_comparable(now)).items()}
    files.write_json(inputs, {key: digest for key, digest in found.items() if digest is not None})


REMOVED = ("grpo.top_p",)
"""Keys that recipes once had, and that could have one value only: an older run folder may name them."""
RESUMABLE = (
    "output",
    "data_dir",
    "num_train_epochs",
    "max_hours",
    "max_steps",
    "report_to",
    "ddp_timeout",
    "tokens_per_batch",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "save_total_limit",
    "page_size",
)
"""Keys that may change when a run resumes: where it lies, and where its rows do; a longer budget, where it is logged,
what is kept of it, its page, a limit of memory, how an update's rows are divided. That their number stays the same is
checked where it is known (`training/run.py`), and so are the rows, by their digest."""
INPUTS = ("model.backbone", "model.init_from", "data.source", "data.validation_source")
"""Keys that name a folder or a file of the user's, if they do not name one of ours or of the Hub."""
PIECE, PIECES = 1 << 18, 64
"""Bytes of a piece of a file that are digested, and the number of pieces."""


def _comparable(tree: dict[str, Any]) -> dict[str, Any]:
    """The keys of a recipe that must stay as they are when a run resumes, each by its dotted name.

    An older recipe.json lacks the keys that have come since: that run had their defaults. It may also have keys that
    are gone.
    """
    flat = {**_flat(to_json(Recipe(output=""))), **_flat(tree)}
    for number, entry in enumerate(flat.pop("data.mixed_in")):
        flat.update(_flat({"data": {"mixed_in": {str(number): entry}}}))
    return {
        key: value
        for key, value in flat.items()
        if key.rpartition(".")[2] not in RESUMABLE and key not in REMOVED
    }


def _inputs(flat: dict[str, Any]) -> dict[str, str]:
    """The keys that may name a folder or file of the user's, and do not say null."""
    of_mixed = [key for key in flat if key.startswith("data.mixed_in.") and key.endswith(".source")]
    return {key: flat[key] for key in (*INPUTS, *of_mixed) if isinstance(flat.get(key), str)}


def _is_same_input(before: str, now: str, digest: str | None) -> bool:
    """Whether two texts name one folder or file, or two with the same weights or rows.

    `digest` is that of `before` when the run began; without one it is made now, if `before` is still there.
    """
    if os.path.normpath(before) == os.path.normpath(now):
        return True
    found = fingerprint(now)
    return found is not None and found == (digest or fingerprint(before))


def fingerprint(path: str | Path) -> str | None:
    """16 hex digits of a file, or of the weights in a folder, or where it has none of its files; None for no path.

    A file of more than 16 MiB by its size and 64 pieces of it: a model of 8B parameters takes a second.
    """
    path = Path(path)
    paths = [path] if path.is_file() else []
    if path.is_dir():
        # The settings of a checkpoint name when it was written, and a run that is finished may publish it again.
        paths = [*path.glob("*.safetensors"), *path.glob("*.bin")] or [
            file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")
        ]
    if not paths:
        return None
    digest = hashlib.sha256()
    for file in sorted(paths):
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        starts: Iterable[int] = range(0, size, PIECE)
        if size > PIECES * PIECE:
            starts = [(size - PIECE) * number // (PIECES - 1) for number in range(PIECES)]
        with open(file, "rb") as stream:
            for start in starts:
                stream.seek(start)
                digest.update(stream.read(PIECE))
    return digest.hexdigest()[:16]


def load_model(recipe: Recipe) -> tuple[LatentLM, Method]:
    """Model and method, ready to train: from a checkpoint's weights or from a backbone."""
    method = build_method(recipe)
    lm = _load_lm(recipe, method)
    # The engine would refuse the backbone at the first validation, or once training has ended. It is asked before the
    # attention is replaced: a run that never generates may train with one that takes no mask.
    cache.check(lm.causal_lm)
    if recipe.model.attn_implementation is not None:
        try:
            lm.causal_lm.set_attn_implementation(recipe.model.attn_implementation)
        except (ValueError, ImportError) as error:
            raise ValueError(f"model.attn_implementation: {error}") from error
    return lm, method


def check_start(recipe: Recipe) -> None:
    """Reject, before rows are read, a `model.init_from` that has no checkpoint, or one that `grpo` cannot go on with.

    A checkpoint of the Hub is downloaded.
    """
    _check_start(recipe.model)
    if recipe.grpo is not None:
        # Looked at for its errors alone: `load_model` takes it over.
        _take_config(recipe, build_method(recipe))


def _check_start(model: ModelConfig) -> None:
    """Where there is no checkpoint, the message names the shipped recipe that makes it."""
    if model.init_from is None:
        return
    try:
        checkpoint.check_folder(checkpoint.resolve(model.init_from))
    except ValueError as error:
        start = Path(model.init_from)
        maker = None if start.exists() else recipes.that_writes(start.parent)
        if maker is None:
            raise ValueError(f"model.init_from: {error}") from error
        raise ValueError(
            f"model.init_from: no checkpoint at {start}: there is no such folder; `colar train {maker}` makes it"
        ) from error


def _load_lm(recipe: Recipe, method: Method) -> LatentLM:
    model = recipe.model
    _check_start(model)
    seed = recipe.training.seed
    # Before the method's modules are made: their shapes follow from its config.
    if recipe.grpo is not None:
        _take_config(recipe, method)
    # peft draws an adapter's first weights from the global generator.
    torch.manual_seed(seed)
    if model.init_from is not None:
        return pretrained.load_for_training(
            model.init_from, method, model.lora, model.dtype, seed, model.number_tokens
        )
    backbone = backbones.load(model.backbone, model.dtype, seed)
    lm = LatentLM.from_backbone(backbone, recipe.template, model.lora, model.number_tokens)
    pretrained.attach(lm, method, seed)
    return lm


def _take_config(recipe: Recipe, method: Method) -> None:
    """Give `method` the config that the checkpoint was trained with, a measured sigma_e included.

    Reinforcement continues with the method that the weights have learnt. ValueError where the recipe names another
    method, gives a key another value than the checkpoint has, or sets what that method has no use for.
    """
    folder = checkpoint.resolve(str(recipe.model.init_from))
    trained = checkpoint.read_info(folder)["method"]
    if trained["name"] != method.name:
        raise ValueError(f"method.name is {method.name}, but {folder} was trained by {trained['name']}")
    config = registry.rebuild(trained, folder).config
    for key in recipe.method:
        if key == "name":
            continue
        mine = getattr(method.config, key)
        theirs = getattr(config, key)
        # JSON made lists of the checkpoint's tuples.
        if plain(mine) != plain(theirs):
            raise ValueError(
                f"method.{key} is {mine!r}, but {folder} was trained with {theirs!r}: leave it out"
            )
    method.config = config
    assert recipe.grpo is not None
    recipe.grpo.check_method(method)


def make_validate(
    recipe: Recipe, examples: list[Example]
) -> Callable[[LatentLM, Method], dict[str, float]] | None:
    """A function that validates by generation; None where the recipe has no validation rows."""
    if not examples:
        return None
    settings = recipe.validation

    def validate(lm: LatentLM, method: Method) -> dict[str, float]:
        params = [registry.make_params(method, values) for values in settings.params]
        return score(lm, method, examples, params, settings.decoding, settings.limits)

    return validate


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """{"model": {"lora": {"r": 8}}} -> {"model.lora.r": 8}; a dict without keys stays as it is."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            for inner_key, inner_value in _flat(value).items():
                flat[f"{key}.{inner_key}"] = inner_value
        else:
            flat[key] = value
    return flat
