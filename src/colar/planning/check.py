"""What a recipe takes here, measured: data and model are loaded, the longest batch goes forward and backward.

Nothing is written, and no step is made. A curriculum's longest batch goes through as it is in each stage. Under GRPO
one generation is sampled, and its longest batch learnt from.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from colar.data.example import Example
from colar.engine import cache
from colar.evaluation.evaluate import require_fit
from colar.methods import registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.planning.estimate import Estimate, disk
from colar.recipe import Recipe, check_start, load_examples, load_model, make_validate
from colar.training import peak, preflight, recompute, room, sft
from colar.training.curriculum import Curriculum
from colar.training.grpo import run as grpo_run
from colar.training.grpo.trainer import GrpoTrainer, fed_positions, without_dropout
from colar.training.room import GIB, gib
from colar.training.run_folder import RunFolder
from colar.training.stages import stages_of
from colar.training.trainer import LatentTrainer


def check(recipe: Recipe) -> Estimate:
    """The table of a recipe on this machine. ValueError for what is wrong with it."""
    if recipe.training.fsdp:
        raise ValueError(
            "training.fsdp cannot be measured before training, as each device would need the whole model: `colar plan` "
            "computes what a device holds"
        )
    recipe.training.check_installed()
    check_start(recipe)
    examples, held_out = load_examples(recipe.data)
    lm, method = load_model(recipe)
    if recipe.generates:
        cache.check(lm.causal_lm)
    params = [registry.make_params(method, values) for values in recipe.validation.params]
    require_fit(lm, method, held_out, params, recipe.validation.limits)
    # A trainer wants a run's folder: this one is gone at the end, with whatever was written to it.
    with tempfile.TemporaryDirectory() as folder:
        if recipe.grpo is None:
            # Held-out rows are for their errors alone.
            trainer = sft.make_trainer(
                lm, method, examples, recipe.training, RunFolder(Path(folder)), held_out=held_out
            )
            return _sft(recipe, trainer, held_out)
        grpo_trainer = grpo_run.make_trainer(
            lm, method, examples, recipe.training, recipe.grpo, RunFolder(Path(folder))
        )
        with without_dropout(lm):
            return _grpo(recipe, grpo_trainer, held_out)


def _sft(recipe: Recipe, trainer: LatentTrainer, held_out: list[Example]) -> Estimate:
    training = recipe.training
    estimate = _begun(trainer)
    loader = trainer.get_train_dataloader()
    _, per_epoch, *_, max_steps = trainer.set_initial_training_values(trainer.args, loader)
    curriculum = Curriculum(trainer.objective.method, per_epoch, max_steps)
    stages = stages_of(curriculum)
    found = [
        _measured(trainer, batch, training.gradient_checkpointing)
        for batch in preflight.longest_batches(trainer, stages)
    ]
    _memory(estimate, trainer, max(found, key=lambda each: each.peak_bytes))
    pace = preflight.pace_of(trainer, stages, found)
    mean = "; the mean over all stages" if len(stages) > 1 else ""
    estimate.add_seconds("an epoch", pace.epoch, f"{per_epoch:,} updates, without validation{mean}")
    estimate.add_seconds("the run", pace.run, f"{max_steps:,} updates")
    problem = preflight.too_few_hours(curriculum, pace, training.max_hours)
    if problem is not None:
        estimate.problems.append(problem)
    return _ended(estimate, recipe, trainer, held_out)


def _grpo(recipe: Recipe, trainer: GrpoTrainer, held_out: list[Example]) -> Estimate:
    estimate = _begun(trainer)
    started = time.perf_counter()
    with torch.compiler.set_stance("force_eager"), peak.measured(trainer.objective.lm.device) as sampling:
        generation = trainer.sampler.generate(0)
    seconds = time.perf_counter() - started
    plan = trainer.plan
    estimate.add_seconds(
        "a generation", seconds, f"{plan.outputs} outputs, {gib(sampling.bytes)} beside the weights"
    )
    lengths = fed_positions(generation.tensors)
    longest = lengths.argsort(descending=True)[: plan.batch]
    # The batch below names outputs by their slots in it: the trainer must not sample another.
    trainer.generation = generation
    batch = {"generations": torch.zeros_like(longest), "slots": longest}
    found = _measured(trainer, batch, recipe.training.gradient_checkpointing)
    # Sampling and learning take turns: the larger of both is what must fit.
    beside = peak.held(trainer.objective) + peak.ADAM_MOMENTS * peak.trained(trainer.objective)
    _memory(estimate, trainer, replace(found, peak_bytes=max(found.peak_bytes, beside + sampling.bytes)))
    updates = plan.updates_per_generation
    # A generation is sampled once, and learnt from in several updates.
    step = seconds / updates + found.seconds * plan.accumulate
    estimate.add_seconds("an update", step, "its share of the generation included")
    epoch = step * updates * trainer.sampler.schedule.generations_per_epoch
    estimate.add_seconds("an epoch", epoch, f"{trainer.sampler.schedule.generations_per_epoch:,} generations")
    return _ended(estimate, recipe, trainer, held_out)


def _begun(trainer: LatentTrainer) -> Estimate:
    preflight.warn_of_slow_bfloat16(trainer)
    lm = trainer.objective.lm
    estimate = Estimate(f"{lm.name} on {trainer.args.world_size} x {lm.device}, measured")
    parameters = sum(weight.numel() for weight in trainer.objective.parameters())
    weights, trained = peak.held(trainer.objective), peak.trained(trainer.objective)
    estimate.add("parameters", f"{parameters / 1e6:,.1f} M", f"{gib(weights)}; trained {gib(trained)}")
    return estimate


def _measured(
    trainer: LatentTrainer, batch: dict[str, torch.Tensor], checkpoints: bool
) -> preflight.Measured:
    # A run switches it on before it trains; here no training begins.
    if checkpoints:
        recompute.enable(trainer.objective.lm)
    return preflight.measure(trainer, batch)


def _memory(estimate: Estimate, trainer: LatentTrainer, found: preflight.Measured) -> None:
    estimate.add("longest batch", f"{found.rows} rows", f"{found.positions:,} positions at once")
    estimate.peak_bytes = found.peak_bytes
    memory = room.memory_of(trainer.objective.lm.device)
    estimate.add_bytes(
        "peak memory", found.peak_bytes, f"of {memory / GIB:.0f} GiB; AdamW's moments included"
    )
    problem = preflight.too_little_memory(trainer, found)
    if problem is not None:
        estimate.problems.append(problem)


def _ended(estimate: Estimate, recipe: Recipe, trainer: LatentTrainer, held_out: list[Example]) -> Estimate:
    """Validation and disk."""
    size = recipe.validation.limits.batch_size
    validate = make_validate(recipe, held_out[:size])
    if validate is not None:
        seconds = _validation_seconds(trainer.objective.lm, trainer.objective.method, validate)
        batches = -(-len(held_out) // size)
        note = f"{len(held_out):,} questions; timed on {min(size, len(held_out))}"
        estimate.add_seconds("a validation", seconds * batches, note)
    trained = peak.trained(trainer.objective)
    kept = recipe.training.save_total_limit
    estimate.add_bytes("checkpoints on disk", disk(trained, kept, peak.ADAM_MOMENTS))
    return estimate


def _validation_seconds(
    lm: LatentLM, method: Method, validate: Callable[[LatentLM, Method], dict[str, float]]
) -> float:
    lm.eval()
    started = time.perf_counter()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        validate(lm, method)
    return time.perf_counter() - started
