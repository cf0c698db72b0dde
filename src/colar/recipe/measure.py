"""`colar train --check`: a recipe's longest batch, a few of its updates and a validation batch, measured here.

Data and model are loaded as for the run, with a temporary output folder. The numbers hold for this device, and change
if other processes run beside this one.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

from colar import processes, progress
from colar.progress import duration
from colar.recipe.run import Validation, load_method, load_model_and_rows
from colar.recipe.schema import Recipe, Stage
from colar.training import preflight, sft
from colar.training.grpo import train as grpo_train
from colar.training.grpo.trainer import GrpoTrainer
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer

WARMUP, UPDATES = 2, 10
"""Updates of SFT that allocate and compile, and updates that are timed."""
THOUGHTS = 256
"""Most thoughts of a validation question that are timed."""
GIB = 2**30


class Updates(TrainerCallback):  # type: ignore[misc]
    """Mean seconds of an update of SFT, reading the rows included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (WARMUP, WARMUP + UPDATES):
            torch.get_device_module(self.device).synchronize()
            self.seconds = (time.perf_counter() - self.began) / UPDATES
            self.began = time.perf_counter()


def measure_stages(stages: Sequence[Stage]) -> Iterator[Table]:
    """Measure the stages one after another; stop, with a message, at one whose start is yet to be trained."""
    for place, stage in enumerate(stages):
        start = stage.recipe.model.init_from
        # A start that no earlier stage trains must exist: if it is missing, `measure` raises an error.
        earlier_outputs = {earlier.recipe.output for earlier in stages[:place]}
        if start is not None and str(Path(start).parent) in earlier_outputs and not Path(start).exists():
            others = ", ".join(later.name for later in stages[place:])
            progress.say(f"not in these times: {others}; --check measures them once {start} is there")
            return
        table = measure(stage.recipe)
        if stage.name:
            table.title = f"stage {place + 1} of {len(stages)}, {stage.name}: {table.title}"
        yield table


def measure(recipe: Recipe) -> Table:
    """Measure a recipe on this machine, as a table for a terminal. ValueError if it is invalid."""
    recipe.training.check_installed()
    # No tracker should record it as a run.
    training = replace(recipe.training, report_to="none")
    method = load_method(recipe)
    processes.join(training.ddp_timeout)
    with tempfile.TemporaryDirectory() as folder:
        lm, examples, validation = load_model_and_rows(recipe, method)
        run = RunFolder(Path(folder))
        trainer: LatentTrainer
        if recipe.grpo is None:
            held_out = [] if validation is None else validation.examples
            trainer = sft.make_trainer(lm, method, examples, training, run, held_out=held_out)
        else:
            trainer = grpo_train.make_trainer(lm, method, examples, training, recipe.grpo, run)
        return _table(trainer, validation)


def _table(trainer: LatentTrainer, validation: Validation | None) -> Table:
    preflight.warn_of_slow_bfloat16(trainer)
    lm = trainer.objective.lm
    curriculum = trainer.curriculum
    per_epoch, max_steps = curriculum.steps_per_epoch, curriculum.max_steps
    title = f"{lm.name} on {trainer.args.world_size} x {lm.device}"
    table = Table("", "", "", title=title, title_justify="left", box=None)
    trained = sum(weight.numel() for weight in trainer.objective.parameters() if weight.requires_grad)
    total = sum(weight.numel() for weight in trainer.objective.parameters())
    table.add_row("parameters", f"{total / 1e6:,.1f} M", f"{trained / 1e6:,.2f} M of them trained")

    config = trainer.config
    if lm.device.type == "cuda":
        # Otherwise the peak of a stage before this one would count.
        torch.cuda.reset_peak_memory_stats(lm.device)
    with preflight.prepared(lm, compiled=bool(config.compile), recomputed=config.gradient_checkpointing):
        started = time.perf_counter()
        # With fsdp the weights are not split yet, and the whole model may not fit into one device.
        if not trainer.fsdp:
            longest = preflight.before_training(trainer)
            peak, _ = peak_memory(lm.device)
            memory = "" if peak is None else f", {peak / GIB:.1f} GiB"
            size = f"{longest.rows} rows, {longest.positions:,} positions at once{memory}"
            table.add_row("longest batch", duration(longest.seconds), size)
            # This batch is not part of an update. The outputs that GRPO sampled for it are, so their time is counted.
            started += longest.seconds
        trainer.remove_callback(PrinterCallback)
        trainer.args.save_strategy = "no"
        trainer.args.eval_on_start = False
        update = _grpo_update(table, trainer, started) if trainer.samples else _sft_update(table, trainer)
    table.add_row("an epoch", duration(update * per_epoch), f"{per_epoch:,} updates, without validation")
    seconds, note = update * max_steps, f"{max_steps:,} updates, without validation"
    limit = math.inf if config.max_hours is None else 3600 * config.max_hours
    if seconds > limit:
        note = f"by training.max_hours, some {limit / update:,.0f} of {max_steps:,} updates, validations included"
    table.add_row("the run", duration(min(seconds, limit)), note)
    if validation is not None:
        _validation_row(table, trainer, validation)
    peak, total_memory = peak_memory(lm.device)
    if peak is not None:
        table.add_row("peak memory", f"{peak / GIB:.1f} GiB", f"of {total_memory / GIB:.1f} GiB")
    return table


def _grpo_update(table: Table, trainer: LatentTrainer, started: float) -> float:
    """Make the updates of one generation, whose sampling began at `started`; add a row. Returns seconds per update."""
    assert isinstance(trainer, GrpoTrainer), "the trainer that samples"
    # A generation is sampled once and used in several updates, so all of these are timed.
    trainer.args.max_steps = trainer.plan.updates_per_generation
    trainer.train()
    seconds = (time.perf_counter() - started) / trainer.plan.updates_per_generation
    table.add_row("an update", duration(seconds), "with its share of the sampling of a generation")
    return seconds


def _sft_update(table: Table, trainer: LatentTrainer) -> float:
    """Make some updates of SFT; add a row. Returns seconds per update."""
    updates = Updates(trainer.objective.lm.device)
    trainer.add_callback(updates)
    trainer.args.max_steps = WARMUP + UPDATES
    trainer.train()
    table.add_row("an update", duration(updates.seconds), f"mean of {UPDATES}, after {WARMUP} others")
    return updates.seconds


def _validation_row(table: Table, trainer: LatentTrainer, validation: Validation) -> None:
    """Time the first thoughts of the first batch of each process of the validation questions, and add a row."""
    batch_size, n = validation.limits.batch_size * trainer.args.world_size, len(validation.examples)
    # After these few updates a model hardly stops: it would think up to the limit.
    thoughts = min(validation.limits.max_latents, THOUGHTS)
    limits = replace(validation.limits, max_latents=thoughts)
    first = replace(validation, examples=validation.examples[:batch_size], limits=limits)
    lm = trainer.objective.lm
    chain = statistics.fmean(sum(map(len, lm.template.steps(row.steps))) for row in first.examples)
    lm.eval()
    started = time.perf_counter()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), lm.merged():
        first(lm, trainer.objective.method)
    seconds = (time.perf_counter() - started) * math.ceil(n / batch_size) * max(1.0, chain / thoughts)
    note = f"{n:,} questions; timed on {len(first.examples)}"
    if chain > thoughts:
        note += f" with {thoughts} thoughts, reckoned for chains of {chain:,.0f} tokens"
    table.add_row("a validation", duration(seconds), note)


def peak_memory(device: torch.device) -> tuple[int | None, int]:
    """Peak and total bytes: the peak is that of torch's allocations on a device, and of this process on the CPU.

    The peak is None if neither torch nor the operating system counts it.
    """
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        if hasattr(module, "max_memory_allocated"):
            return module.max_memory_allocated(device), int(module.mem_get_info(device)[1])
        # On Apple's mps only torch.accelerator counts the peak, from torch 2.9 on.
        peak = getattr(torch.accelerator, "max_memory_allocated", lambda device: None)
        return peak(device), int(module.recommended_max_memory())
    try:
        import resource
    except ImportError:
        return None, 0
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if torch.backends.mps.is_available() else 1024
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, total
