"""From a `Recipe` to a run: rows, model, method, validation and training wired together."""

import gc
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from accelerate import PartialState

from colar import files, processes, progress
from colar.data.example import Example
from colar.engine import cache
from colar.engine.request import fitting_questions
from colar.evaluation import evaluate
from colar.look import inspect
from colar.look.thought import group_size
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint, quantized
from colar.model.latent_lm import LatentLM
from colar.recipe.example_sets import load_example_sets
from colar.recipe.schema import (
    Recipe,
    Stage,
    ValidationConfig,
    build_method,
    defaults,
    to_json,
)
from colar.template.template import SEPARATORS
from colar.training import sft
from colar.training.grpo import train as grpo_train
from colar.training.resumable_run import TrainResult
from colar.training.run_folder import RunFolder

MEASURED = 500
"""Training rows, or up to twice as many, whose lengths are compared with the limits of validation."""


@dataclass(frozen=True)
class Validation:
    """Questions that select the checkpoint, and the settings to answer them. Calling it validates a model."""

    examples: list[Example]
    params: list[Any]
    """Per-request values of the method; each question is answered at every one."""
    decoding: str
    limits: evaluate.AnswerSettings

    def __call__(self, lm: LatentLM, method: Method) -> dict[str, float]:
        return evaluate.validate(lm, method, self.examples, self.params, self.decoding, self.limits)


def run_stages(stages: Sequence[Stage], resume: bool = True) -> Path:
    """Run stages one after another, skipping those that are finished. Returns the last one's published checkpoint.

    A stage that was stopped resumes. ValueError if the weights that a finished stage started from have changed, or
    would be trained further.
    """
    # Processes join once for all stages, with the longest of their timeouts.
    processes.join(max(stage.recipe.training.ddp_timeout for stage in stages))
    for stage in stages:
        stage.recipe.training.check_installed()
    if resume:
        processes.from_main(partial(_check_budgets, stages))
    for stage in stages:
        folder = RunFolder(stage.recipe.output)
        if stage.name:
            finished = partial(folder.has_finished, to_json(stage.recipe), defaults())
            if resume and processes.from_main(finished):
                progress.say(f"stage {stage.name}: finished, {folder.best}")
                continue
            progress.say(f"stage {stage.name}: {stage.recipe.output}")
        run(stage.recipe, resume)
        # The model of one stage is freed before the next one is loaded.
        gc.collect()
    return folder.best


def _check_budgets(stages: Sequence[Stage]) -> None:
    """ValueError if a stage would be trained further although a later one has begun from its weights."""
    budget = "max_steps" if stages[-1].recipe.training.max_steps > 0 else "num_train_epochs"
    for stage, later in itertools.combinations(stages, 2):
        folder = RunFolder(stage.recipe.output)
        starts_here = Path(later.recipe.model.init_from or "") == folder.best
        begun = starts_here and RunFolder(later.recipe.output).has_weights
        if begun and folder.goes_on(to_json(stage.recipe), defaults()):
            raise ValueError(
                f"stage {stage.name} has finished, and {later.name} began from its weights, so only the last stage can "
                f"be trained for longer (--stages.{stages[-1].name}.training.{budget}); or give a new --output"
            )


def run(recipe: Recipe, resume: bool = True) -> TrainResult:
    """Train a recipe in its own folder. ValueError, before the first step, if it is invalid."""
    folder = RunFolder(files.require_writable(recipe.output))
    method = load_method(recipe)
    if recipe.data.validation_size != 0:
        # A checkpoint answers within the limits by which it was validated, or those of the one that it started from.
        validated, before = recipe.validation.limits, method.default_limits
        method.default_limits = {
            name: max(getattr(validated, name), before.get(name, 0))
            for name in ("max_latents", "max_completion_length")
        }
    processes.join(recipe.training.ddp_timeout)
    processes.from_main(folder.check_replaceable)
    with processes.locked(folder.path):
        if resume:
            processes.from_main(lambda: folder.check_recipe(to_json(recipe), defaults()))
        lm, examples, validation = load_model_and_rows(recipe, method)
        result = _train(recipe, folder, lm, method, examples, validation, resume)
        if PartialState().is_main_process:
            if validation is not None and recipe.validation.page_size > 0:
                _write_page(folder, lm, method, validation, recipe.validation.page_size)
            files.write_json(folder.finished, {"steps": result.steps, "seconds": round(result.seconds, 1)})
        return result


def load_method(recipe: Recipe) -> Method:
    """The method that the run trains. Downloads the checkpoint to start from if it is on the Hub.

    Reinforcement continues with the checkpoint's method, including its measured sigma_e, default speed and limits.
    ValueError, before rows are read, if `model.init_from` is no checkpoint; under reinforcement also if the recipe
    names another method, gives a key another value than the checkpoint has, or validates at values that the
    checkpoint's method cannot work with.
    """
    method = build_method(recipe)
    if recipe.model.init_from is None:
        return method
    try:
        folder = checkpoint.check_folder(checkpoint.resolve(recipe.model.init_from))
    except ValueError as error:
        raise ValueError(f"model.init_from: {error}") from error
    if recipe.grpo is None:
        return method
    trained = registry.rebuild(checkpoint.read_info(folder)["method"], folder)
    if trained.name != method.name:
        raise ValueError(f"method.name is {method.name}, but {folder} was trained by {trained.name}")
    for key in recipe.method.keys() - {"name"}:
        mine, theirs = getattr(method.config, key), getattr(trained.config, key)
        if mine != theirs:
            raise ValueError(
                f"method.{key} is {mine!r}, but {folder} was trained with {theirs!r}: leave it out"
            )
    recipe.validation.check_params(trained)
    return trained


def load_model(recipe: Recipe, method: Method) -> LatentLM:
    """The model to train, with the modules that the method (`load_method`) adds to it."""
    model, seed = recipe.model, recipe.training.seed
    # peft draws an adapter's first weights from the global generator.
    torch.manual_seed(seed)
    if model.init_from is not None:
        lm = pretrained.load_for_training(
            model.init_from, method, model.lora, model.dtype, seed, model.load_in_4bit
        )
    else:
        backbone = backbones.load(model.backbone, model.dtype, seed)
        if model.load_in_4bit:
            quantized.quantize_below_adapter(backbone.lm)
        lm = LatentLM.from_backbone(backbone, recipe.template, model.lora)
        if recipe.template.separator is None and lm.template.config.separator != SEPARATORS[0]:
            progress.say(
                f"separator: {lm.template.config.separator} ({SEPARATORS[0]} is not one token of this tokenizer)"
            )
        pretrained.attach(lm, method, seed)
    if not recipe.training.fsdp:
        # A check of a large model on a CPU takes minutes.
        lm.to(recipe.training.device_type)
    # Otherwise the engine would refuse the backbone at the first validation, or once training has ended. Checked before
    # the attention is replaced, because the engine uses this one if the other takes no mask.
    cache.check_attention(lm.causal_lm)
    if model.attn_implementation is not None:
        try:
            lm.causal_lm.set_attn_implementation(model.attn_implementation)
        except (ValueError, ImportError) as error:
            raise ValueError(f"model.attn_implementation: {error}") from error
    return lm


def load_model_and_rows(recipe: Recipe, method: Method) -> tuple[LatentLM, list[Example], Validation | None]:
    """The model, the training rows, and the validation with the questions that fit the model's context, if any."""
    examples, held_out = load_example_sets(recipe.data)
    lm = load_model(recipe, method)
    if not held_out:
        return lm, examples, None
    settings = recipe.validation
    params, decoding = settings.method_params(method), settings.limits.decoding(settings.decoding)
    _warn_of_cuts(lm, method, examples, settings)
    remedy = "lower validation.limits (max_latents, max_completion_length) to take them"
    fitting = fitting_questions(lm, method, held_out, params, decoding, "validation questions", remedy)
    return lm, examples, Validation(fitting, params, settings.decoding, settings.limits)


def _warn_of_cuts(
    lm: LatentLM, method: Method, examples: Sequence[Example], settings: ValidationConfig
) -> None:
    """Warn if the limits of validation, which become the checkpoint's own, cut more than 5% of the training rows."""
    # Under the values that think most. A threshold only adds thoughts, so that these are the fewest.
    params = min(settings.method_params(method), key=group_size)
    needed = []
    for example in examples[:: max(1, len(examples) // MEASURED)]:
        thoughts = 0
        if method.thinks_whole_chain(params):
            row = method.encode(lm.template, example, Random(0), math.inf)
            thoughts = row.n_latents or math.ceil(sum(map(len, row.steps)) / group_size(params))
        # Without the separator and the end of the text.
        needed.append((thoughts, len(lm.template.answer(example.answer)) - 2))
    limits = (settings.limits.max_latents, settings.limits.max_completion_length)
    n_cut = sum(thoughts > limits[0] or answer > limits[1] for thoughts, answer in needed)
    if n_cut > 0.05 * len(needed):
        most = " and ".join(str(max(column)) for column in zip(*needed, strict=True))
        progress.say(
            f"warning: validation.limits (max_latents {limits[0]}, max_completion_length {limits[1]}) are shorter than "
            f"{n_cut:,} of {len(needed):,} training rows, which need up to {most}: answers are cut, and count as wrong"
        )


def _train(
    recipe: Recipe,
    folder: RunFolder,
    lm: LatentLM,
    method: Method,
    examples: list[Example],
    validation: Validation | None,
    resume: bool,
) -> TrainResult:
    """Train by SFT or GRPO, and log which files were written."""
    training = recipe.training
    how: dict[str, Any] = {
        "held_out": [] if validation is None else validation.examples,
        "validate": validation,
        "run_info": {"recipe": to_json(recipe), "seed": training.seed, "label": recipe.label},
        "resume": resume,
    }
    if recipe.grpo is None:
        result = sft.train(lm, method, examples, training, folder.path, **how)
    else:
        result = grpo_train.train(lm, method, examples, training, recipe.grpo, folder.path, **how)
    written = [f"{result.best} (the checkpoint)"]
    if folder.history.exists():
        written.append(str(folder.history))
    if training.report_to == "tensorboard" and folder.logs.exists():
        written.append(f"{folder.logs} (TensorBoard)")
    progress.say(f"wrote {', '.join(written)}")
    return result


def _write_page(
    folder: RunFolder, lm: LatentLM, method: Method, validation: Validation, page_size: int
) -> None:
    """Write a page of the published weights' thoughts on the first validation questions, and the numbers on it.

    Both are those of `colar inspect` without controls, which take long. A failure is only a warning.
    """
    examples = validation.examples[:page_size]
    decoding = validation.limits.decoding(validation.decoding)
    name = folder.path.resolve().name
    eager = torch.compiler.set_stance("force_eager")
    with progress.warn_on_error("the page"), torch.no_grad(), eager, lm.merged():
        systems = [
            inspect.inspect_system(name, lm, method, examples, params, decoding, controls=False)
            for params in validation.params
        ]
        inspection = inspect.Inspection(examples, systems, {"title": name, "asked": {"limit": len(examples)}})
        files.write_json(folder.numbers, inspection.to_json())
        inspection.save(folder.page)
        progress.say(f"page of the best checkpoint: {folder.page}")
