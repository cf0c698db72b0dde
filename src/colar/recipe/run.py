"""From a `Recipe` to a run: rows, model, method, validation and training wired together."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState

from colar import files, processes, progress
from colar.data.example import Example
from colar.engine import cache
from colar.engine.request import fitting_questions
from colar.evaluation import evaluate
from colar.look.inspect import Inspection, inspect_system, key_of
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint, quantized
from colar.model.latent_lm import LatentLM
from colar.recipe.example_sets import load_example_sets
from colar.recipe.schema import Recipe, Stage, ValidationConfig, build_method, to_json
from colar.training import sft
from colar.training.grpo import rollout
from colar.training.grpo import train as grpo_train
from colar.training.grpo.rollout import RollOut
from colar.training.run_folder import RunFolder
from colar.training.sft import TrainResult


def run_stages(stages: Sequence[Stage], resume: bool = True) -> Path:
    """Run stages one after another, those that are finished excepted. Returns the last one's published checkpoint.

    A stage that was stopped resumes. A finished one that began from other weights than its start has now is an error.
    """
    # They join once: the longest time that any stage may take to answer counts.
    processes.join(max(stage.recipe.training.ddp_timeout for stage in stages))
    for stage in stages:
        folder = RunFolder(stage.recipe.output)
        best = folder.best
        finished = partial(folder.has_finished, to_json(stage.recipe))
        if stage.name and resume and processes.from_main(finished):
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
    # A package that is not installed is named before a model is loaded.
    recipe.training.check_installed()
    folder = RunFolder(files.require_writable(recipe.output))
    method = load_method(recipe)
    processes.join(recipe.training.ddp_timeout)
    # Under torchrun the main process holds the lock for all.
    with ExitStack() as lock:
        processes.from_main(lambda: lock.enter_context(processes.locked(folder.path)))
        processes.from_main(lambda: folder.claim(to_json(recipe), resume))
        roll_out = lock.enter_context(rollouts(recipe, method))
        lm, examples, held_out = load_model_and_rows(recipe, method)
        result = _train(recipe, folder, lm, method, examples, held_out, resume, roll_out)
        if PartialState().is_main_process:
            _write_page(recipe.validation, folder, lm, method, held_out)
            files.write_json(folder.finished, {"steps": result.steps, "seconds": round(result.seconds, 1)})
        return result


def load_method(recipe: Recipe) -> Method:
    """The method as the run trains it; ValueError, before rows are read, for a start that is no checkpoint or no fit.

    Reinforcement continues with the method that the weights have learnt, a measured sigma_e and the checkpoint's own
    default speed and limits included: the recipe may not name another method, give a key another value than the
    checkpoint has, or set what that method has no use for. A checkpoint of the Hub is downloaded.
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
    recipe.grpo.check_method(trained)
    recipe.validation.check_params(trained)
    return trained


def load_model(recipe: Recipe, method: Method) -> LatentLM:
    """The model, with the modules that the method (`load_method`) adds to it, ready to train."""
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
        pretrained.attach(lm, method, seed)
    # The engine would refuse the backbone at the first validation, or once training has ended. It is asked before the
    # attention is replaced: a run that never generates may train with one that takes no mask.
    cache.check_attention(lm.causal_lm)
    if model.attn_implementation is not None:
        try:
            lm.causal_lm.set_attn_implementation(model.attn_implementation)
        except (ValueError, ImportError) as error:
            raise ValueError(f"model.attn_implementation: {error}") from error
    return lm


def load_model_and_rows(recipe: Recipe, method: Method) -> tuple[LatentLM, list[Example], list[Example]]:
    """Model, training rows, and those validation rows that fit the model's context."""
    examples, held_out = load_example_sets(recipe.data)
    lm = load_model(recipe, method)
    if not held_out:
        return lm, examples, held_out
    settings = recipe.validation
    params, decoding = settings.method_params(method), settings.limits.decoding(settings.decoding)
    remedy = "lower validation.limits (max_latents, max_completion_length) to take them"
    held_out = fitting_questions(lm, method, held_out, params, decoding, "validation questions", remedy)
    return lm, examples, held_out


@contextmanager
def rollouts(recipe: Recipe, method: Method) -> Iterator[RollOut | None]:
    """The pool that samples for a run with `grpo.rollout_workers`; None where the process that trains does."""
    if recipe.grpo is None or recipe.grpo.rollout_workers == 0:
        yield None
        return
    n = recipe.grpo.rollout_workers
    launched = processes.launched()
    if launched > 1:
        raise ValueError(
            f"grpo.rollout_workers must be 0 under torchrun, whose {launched} processes divide the questions, got {n}"
        )
    # Nothing of Ray is imported without them.
    from colar.integrations import ray_rollout

    # Their working directories are their own.
    start = str(checkpoint.resolve(str(recipe.model.init_from)).resolve())
    there = replace(recipe, model=replace(recipe.model, init_from=start))
    with ray_rollout.pool(n, partial(load_model, there, method), start, rollout.roll_out) as pool:
        yield pool


def _train(
    recipe: Recipe,
    folder: RunFolder,
    lm: LatentLM,
    method: Method,
    examples: list[Example],
    held_out: list[Example],
    resume: bool,
    roll_out: RollOut | None,
) -> TrainResult:
    validation = recipe.validation
    validate = None
    if held_out:
        validate = partial(
            evaluate.validate,
            examples=held_out,
            params=validation.method_params(method),
            decoding=validation.decoding,
            settings=validation.limits,
        )
    info = {"recipe": to_json(recipe), "seed": recipe.training.seed, "label": recipe.label}
    if recipe.grpo is not None:
        result = grpo_train.train(
            lm, method, examples, recipe.training, recipe.grpo, folder.path,
            roll_out=roll_out, validate=validate, run_info=info, resume=resume,
        )  # fmt: skip
    else:
        result = sft.train(
            lm, method, examples, recipe.training, folder.path,
            held_out=held_out, validate=validate, run_info=info, resume=resume,
        )  # fmt: skip
    written = [f"{result.best} (the checkpoint)"]
    if folder.history.exists():
        written.append(str(folder.history))
    if recipe.training.report_to == "tensorboard" and folder.logs.exists():
        written.append(f"{folder.logs} (TensorBoard)")
    progress.say(f"wrote {', '.join(written)}")
    return result


def _write_page(
    settings: ValidationConfig, folder: RunFolder, lm: LatentLM, method: Method, held_out: Sequence[Example]
) -> None:
    """Write what the published weights think of a few validation questions: a page and its numbers.

    They are those of `colar inspect` without controls, which take long. A failure is reported and harmless.
    """
    examples = list(held_out[: settings.page_size])
    if not examples:
        return
    decoding = settings.limits.decoding(settings.decoding)
    name = folder.path.resolve().name
    eager = torch.compiler.set_stance("force_eager")
    with progress.warn_on_error("the page"), torch.no_grad(), eager, lm.merged():
        systems = [
            inspect_system(key_of(name, params), lm, method, examples, params, decoding, controls=False)
            for params in settings.method_params(method)
        ]
        inspection = Inspection(examples, systems, {"title": name, "asked": {"limit": len(examples)}})
        files.write_json(folder.numbers, inspection.to_json())
        inspection.save(folder.page)
        progress.say(f"page of the best checkpoint: {folder.page}")
