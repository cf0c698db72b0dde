"""From a `Recipe` to a run: rows, model, method, validation and training wired together."""

import gc
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from colar import files, processes, progress
from colar.data import sources
from colar.data.example import Example
from colar.engine import cache
from colar.engine.request import fitting_questions
from colar.evaluation import evaluate
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import backbones, checkpoint, quantized
from colar.model.latent_lm import LatentLM
from colar.recipe.schema import DataConfig, Recipe, SourceRows, Stage, ValidationConfig, build_method, to_json
from colar.template.template import SEPARATORS
from colar.training import sft
from colar.training.run_folder import RunFolder
from colar.training.sft import TrainResult

if TYPE_CHECKING:
    from colar.training.grpo.rollout import RollOut

VALIDATION = "validation"
"""The split that selects the checkpoint."""


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
    with processes.locked(folder.path):
        if resume:
            processes.from_main(lambda: folder.check_recipe(to_json(recipe)))
        with sampling_pool(recipe, method) as roll_out:
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
        if recipe.template.separator is None and lm.template.config.separator != SEPARATORS[0]:
            progress.say(
                f"separator: {lm.template.config.separator} ({SEPARATORS[0]} is not one token of this tokenizer)"
            )
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
def sampling_pool(recipe: Recipe, method: Method) -> "Iterator[RollOut | None]":
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
    from colar.training.grpo import rollout

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
    roll_out: "RollOut | None",
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
        # SFT does without.
        from colar.training.grpo import train as grpo_train

        result = grpo_train.train(
            lm, method, examples, recipe.training, recipe.grpo, folder.path,
            roll_out=roll_out, held_out=held_out, validate=validate, run_info=info, resume=resume,
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
    # Needed when training has ended, and not by runs without a page.
    from colar.look.inspect import Inspection, inspect_system

    decoding = settings.limits.decoding(settings.decoding)
    name = folder.path.resolve().name
    eager = torch.compiler.set_stance("force_eager")
    with progress.warn_on_error("the page"), torch.no_grad(), eager, lm.merged():
        systems = [
            inspect_system(name, lm, method, examples, params, decoding, controls=False)
            for params in settings.method_params(method)
        ]
        inspection = Inspection(examples, systems, {"title": name, "asked": {"limit": len(examples)}})
        files.write_json(folder.numbers, inspection.to_json())
        inspection.save(folder.page)
        progress.say(f"page of the best checkpoint: {folder.page}")


# Rows: none is both trained on and validated with. A question may be, in two rows of their own: published sets overlap
# a little, so that is only said.


def load_example_sets(data: DataConfig) -> tuple[list[Example], list[Example]]:
    """Training rows, and validation rows ([] where the recipe has none).

    ValueError where validation would be on training rows, where rows occur twice, or where none are left. Says on
    stderr how many validation questions are also trained on, if any.
    """
    held_out = _validation_rows(data)
    limit = None if data.train_size is None else data.train_skip + data.train_size
    main = SourceRows(data.source, data.train_split, limit, data.seed, data.options)
    sections = {"data": main} | {f"data.mixed_in[{i}]": source for i, source in enumerate(data.mixed_in)}
    rows_of: dict[str, list[Example]] = {}
    for key, source in sections.items():
        seed = data.seed if source.seed is None else source.seed
        rows = _load_source(data, source.source, source.train_split, source.train_size, seed, source.options)
        rows_of[key] = _selected(data, rows) if source is main else rows
    train_rows = list(itertools.chain.from_iterable(rows_of.values()))
    # A row's random draws are a function of its id: two rows of one id would see the same draws.
    repeated = [id for id, n in Counter(example.id for example in train_rows).items() if n > 1]
    if repeated:
        where = " and ".join(
            key for key, rows in rows_of.items() if any(row.id == repeated[0] for row in rows)
        )
        raise ValueError(
            f"{where}: some rows occur twice, {repeated[0]!r} for one: name a source once, and give rows of files of "
            "one name ids of their own"
        )
    trained = {(example.id, example.conversation) for example in train_rows}
    shared = [example.id for example in held_out if (example.id, example.conversation) in trained]
    if shared:
        raise ValueError(
            f"data.validation_source: {len(shared)} of its rows are trained on, {shared[0]!r} for one: name other "
            "rows, there or in data.train_split, or set data.validation_size 0"
        )
    _say_asked_twice(train_rows, held_out)
    return train_rows, held_out


def _say_asked_twice(train_rows: list[Example], held_out: list[Example]) -> None:
    """Say how many validation questions are also trained on, under any id; log nothing if there are none.

    Ids name their split or file, so two copies of a question have two. A generated source's splits share no question.
    """
    trained = {example.conversation for example in train_rows}
    both = [example.id for example in held_out if example.conversation in trained]
    if both:
        progress.say(
            f"validation: {len(both)} of {len(held_out)} questions are also trained on, {both[0]!r} for one; accuracy "
            "on these says little about new questions"
        )


def _selected(data: DataConfig, rows: list[Example]) -> list[Example]:
    """The main source's rows from train_skip on, without those of too many steps."""
    if len(rows) <= data.train_skip:
        raise ValueError(
            f"data.train_skip is {data.train_skip}, but {data.source} has no more rows than that"
        )
    rows = rows[data.train_skip :]
    longest = data.max_reasoning_steps
    if longest is None:
        return rows
    short_rows = [row for row in rows if len(row.steps) <= longest]
    if not short_rows:
        raise ValueError(
            f"data.max_reasoning_steps is {longest}, and every row of {data.source} has more steps"
        )
    progress.say(
        f"{data.source}: {len(short_rows):,} of {len(rows):,} rows have at most {longest} steps of reasoning"
    )
    return short_rows


def _validation_rows(data: DataConfig) -> list[Example]:
    """The rows that select the checkpoint."""
    if data.validation_size == 0:
        return []
    source = data.validation_source or data.source
    # Its rows have ids by their split; and the same file may be written in several ways.
    file = sources.user_file(source, VALIDATION)
    trained: list[DataConfig | SourceRows] = [data, *data.mixed_in]
    for section in trained:
        if file is not None and file == sources.user_file(section.source, section.train_split):
            raise ValueError(
                f"{section.source} is one file, {file}, which would validate on its own training rows: name another in "
                "data.validation_source, or set data.validation_size 0"
            )
    # The main source's options mean nothing to another one.
    options = data.options if source == data.source else {}
    return _load_source(data, source, VALIDATION, data.validation_size, data.seed, options)


def _load_source(
    data: DataConfig, source: str, split: str, limit: int | None, seed: int, options: dict[str, Any]
) -> list[Example]:
    """The first rows of a source, with what all sources of a recipe share."""
    return sources.load_examples(
        source,
        split,
        data_dir=Path(data.data_dir) if data.data_dir else None,
        limit=limit,
        seed=seed,
        skip_malformed=data.skip_malformed,
        options=options,
        judge=data.judge,
    )
