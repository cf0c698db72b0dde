"""`colar train --check`: a recipe's longest batch, a few of its updates and a validation batch, measured here.

Data and model are loaded as for the run, in a folder that is gone at the end. The device at hand is the one that is
measured: on another one, or with other processes beside it, numbers differ.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

from colar.data.example import Example
from colar.evaluation.evaluate import validate
from colar.recipe.run import load
from colar.recipe.schema import Recipe
from colar.recipe.start import start_method
from colar.training import preflight, sft
from colar.training.grpo import run as grpo_run
from colar.training.grpo.trainer import GrpoTrainer, dropout_rates_zeroed
from colar.training.preflight import clock
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer

UPDATES = 4
"""Updates of SFT that are timed. The first is left out of the median: it allocates, and compiles."""
GIB = 2**30


class UpdateSeconds(TrainerCallback):  # type: ignore[misc]
    """Seconds of each update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)


def check(recipe: Recipe) -> Table:
    """Measure a recipe on this machine, as a table for a terminal. ValueError for what is wrong with it."""
    recipe.training.check_installed()
    method = start_method(recipe)
    lm, examples, held_out = load(recipe, method)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run = RunFolder(Path(folder))
        trainer: LatentTrainer
        if recipe.grpo is None:
            trainer = sft.make_trainer(lm, method, examples, recipe.training, run, held_out=held_out)
        else:
            trainer = grpo_run.make_trainer(lm, method, examples, recipe.training, recipe.grpo, run)
            stack.enter_context(dropout_rates_zeroed(lm))
        return _measured(recipe, trainer, held_out)


def _measured(recipe: Recipe, trainer: LatentTrainer, held_out: list[Example]) -> Table:
    preflight.warn_of_slow_bfloat16(trainer)
    lm = trainer.objective.lm
    curriculum = trainer.curriculum()
    per_epoch, max_steps = curriculum.steps_per_epoch, curriculum.max_steps
    title = f"{lm.name} on {trainer.args.world_size} x {lm.device}"
    table = Table("", "", "", title=title, title_justify="left", box=None)
    trained = sum(weight.numel() for weight in trainer.objective.parameters() if weight.requires_grad)
    total = sum(weight.numel() for weight in trainer.objective.parameters())
    table.add_row("parameters", f"{total / 1e6:,.1f} M", f"{trained / 1e6:,.2f} M of them trained")

    config = recipe.training
    with preflight.prepared(lm, compiled=config.compile, recomputed=config.gradient_checkpointing):
        started = time.perf_counter()
        # Before its weights are split the model would have to fit into one device.
        if not trainer.shards:
            found = preflight.before_training(trainer, curriculum.stage_epochs())
            size = f"{found.rows} rows, {found.positions:,} positions at once"
            table.add_row("longest batch", clock(found.seconds), size)
        update, note = _update_seconds(trainer, started)
    table.add_row("an update", clock(update), note)
    table.add_row("an epoch", clock(update * per_epoch), f"{per_epoch:,} updates, without validation")
    table.add_row("the run", clock(update * max_steps), f"{max_steps:,} updates")
    _validation(table, recipe, trainer, held_out)
    peak, whole = peak_memory(lm.device)
    if peak is not None:
        table.add_row("peak memory", f"{peak / GIB:.1f} GiB", f"of {whole / GIB:.1f} GiB")
    return table


def _update_seconds(trainer: LatentTrainer, started: float) -> tuple[float, str]:
    """Make some updates: seconds of one, and how they were measured."""
    reinforced = isinstance(trainer, GrpoTrainer)
    # A generation is sampled once, and learnt from in several updates: all of these are made.
    n = trainer.plan.updates_per_generation if isinstance(trainer, GrpoTrainer) else UPDATES
    seconds = UpdateSeconds()
    trainer.add_callback(seconds)
    trainer.remove_callback(PrinterCallback)
    trainer.args.max_steps = n
    trainer.args.save_strategy = "no"
    trainer.args.eval_on_start = False
    trainer.train()
    if reinforced:
        return (time.perf_counter() - started) / n, "with its share of the sampling of a generation"
    timed = seconds.seconds[1:] or seconds.seconds
    return statistics.median(timed), f"median of {len(timed)}"


def _validation(table: Table, recipe: Recipe, trainer: LatentTrainer, held_out: list[Example]) -> None:
    """Time the first batch of the validation questions."""
    settings = recipe.validation
    first = held_out[: settings.limits.batch_size]
    if not first:
        return
    lm, method = trainer.objective.lm, trainer.objective.method
    lm.eval()
    started = time.perf_counter()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), lm.merged():
        validate(lm, method, first, settings.method_params(method), settings.decoding, settings.limits)
    batches = math.ceil(len(held_out) / settings.limits.batch_size)
    note = f"{len(held_out):,} questions; timed on {len(first)}"
    table.add_row("a validation", clock((time.perf_counter() - started) * batches), note)


def peak_memory(device: torch.device) -> tuple[int | None, int]:
    """Bytes that were allocated at most on a CUDA device, or that this process had at most; and all there are.

    None where the operating system does not count them.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), int(torch.cuda.mem_get_info(device)[1])
    try:
        import os
        import resource
    except ImportError:
        return None, 0
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if torch.backends.mps.is_available() else 1024
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, whole
