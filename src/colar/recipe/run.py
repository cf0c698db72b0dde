"""From a `Recipe` to a run: rows, model, method, validation and training wired together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState

from colar import files, processes, progress, recipes
from colar.data.example import Example
from colar.engine import cache
from colar.evaluation.evaluate import fitting_questions, score
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM
from colar.recipe import run_page
from colar.recipe.examples import load_examples
from colar.recipe.ownership import claim, is_finished
from colar.recipe.parsing import Stage, build_method
from colar.recipe.schema import ModelConfig, Recipe, plain, to_json
from colar.training.grpo import run as grpo_run
from colar.training.run_folder import RunFolder
from colar.training.sft import TrainResult, train


def run_stages(stages: Sequence[Stage], resume: bool = True) -> Path:
    """Run stages one after another, those that are finished excepted. Returns the last one's published checkpoint.

    A stage that was stopped resumes. A finished one that began from other weights than its start has now is an error.
    """
    for stage in stages:
        processes.join(stage.recipe.training.ddp_timeout)
        best = RunFolder(stage.recipe.output).best
        if stage.name and resume and processes.from_main(partial(is_finished, stage.recipe)):
            progress.say(f"stage {stage.name}: finished, {best}")
            continue
        if stage.name:
            progress.say(f"stage {stage.name}: {stage.recipe.output}")
        best = run(stage.recipe, resume).best
        # The model of one stage is gone before the next one is loaded.
        gc.collect()
    return best


def run(recipe: Recipe, resume: bool = True) -> TrainResult:
    """Train as the recipe says, in its own folder. ValueError for what is wrong with it, before the first step."""
    output = files.require_writable(recipe.output)
    check_start(recipe)
    processes.join(recipe.training.ddp_timeout)
    # Under torchrun the main process holds the lock for all.
    with ExitStack() as lock:
        processes.from_main(lambda: lock.enter_context(files.locked(output)))
        processes.from_main(lambda: claim(recipe, output, resume))
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
    held_out = fitting_questions(lm, method, held_out, params, recipe.validation.limits)

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
    folder = RunFolder(output)
    written = [f"{result.best} (the checkpoint)"]
    if folder.history.exists():
        written.append(str(folder.history))
    if recipe.training.report_to == "tensorboard" and folder.logs.exists():
        written.append(f"{folder.logs} (TensorBoard)")
    progress.say(f"wrote {', '.join(written)}")
    if PartialState().is_main_process:
        run_page.write(recipe.validation, folder, lm, method, held_out)
    return result


def load_model(recipe: Recipe) -> tuple[LatentLM, Method]:
    """Model and method, ready to train: from a checkpoint's weights or from a backbone."""
    method = build_method(recipe)
    model, seed = recipe.model, recipe.training.seed
    _check_start(model)
    # Before the method's modules are made: their shapes follow from its config.
    if recipe.grpo is not None:
        _take_config(recipe, method)
    # peft draws an adapter's first weights from the global generator.
    torch.manual_seed(seed)
    if model.init_from is not None:
        lm = pretrained.load_for_training(model.init_from, method, model.lora, model.dtype, seed)
    else:
        backbone = backbones.load(model.backbone, model.dtype, seed)
        lm = LatentLM.from_backbone(backbone, recipe.template, model.lora)
        pretrained.attach(lm, method, seed)
    # The engine would refuse the backbone at the first validation, or once training has ended. It is asked before the
    # attention is replaced: a run that never generates may train with one that takes no mask.
    cache.check(lm.causal_lm)
    if model.attn_implementation is not None:
        try:
            lm.causal_lm.set_attn_implementation(model.attn_implementation)
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
    """Check the start weights. Without a checkpoint, the message names the shipped recipe that makes it."""
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


def _take_config(recipe: Recipe, method: Method) -> None:
    """Give `method` the config that the checkpoint was trained with, a measured sigma_e included.

    Reinforcement continues with the method that the weights have learnt. ValueError where the recipe names another
    method, gives a key another value than the checkpoint has, or sets what that method has no use for.
    """
    folder = checkpoint.resolve(str(recipe.model.init_from))
    trained = registry.rebuild(checkpoint.read_info(folder)["method"], folder)
    if trained.name != method.name:
        raise ValueError(f"method.name is {method.name}, but {folder} was trained by {trained.name}")
    for key in recipe.method:
        if key == "name":
            continue
        mine = getattr(method.config, key)
        theirs = getattr(trained.config, key)
        # JSON made lists of the checkpoint's tuples.
        if plain(mine) != plain(theirs):
            raise ValueError(
                f"method.{key} is {mine!r}, but {folder} was trained with {theirs!r}: leave it out"
            )
    method.config = trained.config
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
