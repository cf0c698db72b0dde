"""From a `Recipe` to a run: rows, model, method, validation and training wired together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from colar import files, processes, progress, recipes
from colar.checks import check_same_run
from colar.data.example import Example
from colar.engine import cache
from colar.evaluation.evaluate import require_fit, score
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM
from colar.recipe import inputs, run_page
from colar.recipe.parsing import build_method
from colar.recipe.rows import load_examples
from colar.recipe.schema import ModelConfig, Recipe, plain, to_json
from colar.training.grpo import run as grpo_run
from colar.training.run_folder import RunFolder
from colar.training.sft import TrainResult, train


def run(recipe: Recipe, resume: bool = True) -> TrainResult:
    """Train as the recipe says, in its own folder. ValueError for what is wrong with it, before the first step."""
    output = files.require_writable(recipe.output)
    check_start(recipe)
    processes.join(recipe.training.ddp_timeout)
    # Under torchrun the main process holds the lock for all.
    with ExitStack() as lock:
        processes.from_main(lambda: lock.enter_context(files.alone(output)))
        processes.from_main(lambda: claim(recipe, output))
        result = _run(recipe, output, resume)
        if PartialState().is_main_process:
            finished = {"steps": result.steps, "seconds": round(result.seconds, 1)}
            files.write_json(RunFolder(output).finished, finished)
        return result


def _run(recipe: Recipe, output: Path, resume: bool) -> TrainResult:
    examples, held_out = load_examples(recipe.data)
    lm, method = load_model(recipe)
    # A validation question beyond the model's context would fail after the first epoch: it is looked for now.
    params = [registry.make_params(method, values) for values in recipe.validation.params]
    require_fit(lm, method, held_out, params, recipe.validation.limits)

    validate = make_validate(recipe, held_out)
    run_info = {"recipe": to_json(recipe), "seed": recipe.training.seed, "label": recipe.label}
    if recipe.grpo is not None:
        result = grpo_run.train(
            lm, method, examples, recipe.training, recipe.grpo, output,
            validate=validate, run_info=run_info, resume=resume,
        )  # fmt: skip
    else:
        result = train(
            lm, method, examples, recipe.training, output,
            held_out=held_out, validate=validate, run_info=run_info, resume=resume,
        )  # fmt: skip
    progress.say(f"wrote {', '.join(_written(recipe, result, RunFolder(output)))}")
    if PartialState().is_main_process:
        run_page.write(recipe.validation, RunFolder(output), lm, method, held_out)
    return result


def _written(recipe: Recipe, result: TrainResult, folder: RunFolder) -> list[str]:
    """The files of a run that are worth a look, as far as it wrote them."""
    written = [f"{result.best} (the checkpoint)"]
    if folder.history.exists():
        written.append(str(folder.history))
    if recipe.training.report_to == "tensorboard" and folder.logs.exists():
        written.append(f"{folder.logs} (TensorBoard)")
    return written


def claim(recipe: Recipe, output: Path) -> None:
    """Write the recipe into its run folder. ValueError where the folder holds another run: two must not mix.

    A folder or file that is named in other words, or was moved, is the same one: inputs.json has digests of the inputs.
    """
    path, digests = output / "recipe.json", output / "inputs.json"
    now = to_json(recipe)
    flat_now = _comparable(now)
    folder = RunFolder(output)
    # A run that failed before it saved anything leaves nothing to mix with: its mistake may be corrected in place.
    if path.exists() and (folder.best.exists() or folder.last_checkpoint()):
        before = _comparable(files.read_json(path))
        known = files.read_json(digests) if digests.exists() else {}
        for key in inputs.named(before).keys() & inputs.named(flat_now).keys():
            if inputs.is_same(before[key], flat_now[key], known.get(key)):
                flat_now[key] = before[key]
        check_same_run(
            output, before, flat_now, "give this run its own --output, or the values that it was begun with"
        )
    folder.finished.unlink(missing_ok=True)
    files.write_json(path, now)
    found = {key: inputs.fingerprint(text) for key, text in inputs.named(_comparable(now)).items()}
    files.write_json(digests, {key: digest for key, digest in found.items() if digest is not None})


REMOVED = (
    "grpo.top_p",
    "grpo.reward_weights",
    "grpo.dr_grpo_length",
    "grpo.log_completions",
    "grpo.factor_drawn_per",
    "training.eval_on_start",
    "training.reset_optimizer_at_stage",
)
"""Keys that recipes once had: an older run folder may name them."""
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
