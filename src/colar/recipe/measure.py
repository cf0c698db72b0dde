"""`colar train --check`: a recipe's longest batch, a few of its updates and a validation batch, measured here.

Data and model are loaded as for the run, in a folder that is gone at the end. The device at hand is the one that is
measured: on another one, or with other processes beside it, numbers differ.
"""

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

from colar.data.example import Example
from colar.evaluation.evaluate import validate
from colar.progress import duration
from colar.recipe.run import load_method, load_model_and_rows, sampling_pool
from colar.recipe.schema import Recipe
from colar.training import preflight, sft
from colar.training.config import TrainingConfig
from colar.training.grpo import train as grpo_train
from colar.training.grpo.train import GrpoTrainer, dropout_rates_zeroed
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer

WARMUP, UPDATES, PROFILED = 2, 10, 3
"""Updates of SFT: those that allocate and compile, those that are timed, and those that show what a device does."""
WAITS = 0.6
"""A device that is busy for less of the time waits for the CPU."""
GIB = 2**30


class Updates(TrainerCallback):  # type: ignore[misc]
    """Seconds and tokens of some updates of SFT, reading the rows included, and a device's kernels in some more."""

    def __init__(self, trainer: LatentTrainer) -> None:
        self.trainer = trainer
        self.device = trainer.objective.lm.device
        supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        activities = supported - {torch.profiler.ProfilerActivity.CPU}
        self.profiler = torch.profiler.profile(activities=activities) if self.device.type != "cpu" else None
        self.marks: list[tuple[float, int]] = []
        """Time and tokens where the timed updates begin and end."""
        # Counted on the device: an update must not wait for it.
        self.tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        trainer.objective.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, tensors: dict[str, Any]) -> None:
        rows = {name: column for name, column in tensors.items() if name != "num_items_in_batch"}
        self.tokens += self.trainer.positions(rows).sum()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        n = state.global_step - WARMUP
        if n in (0, UPDATES):
            torch.get_device_module(self.device).synchronize()
            self.marks.append((time.perf_counter(), int(self.tokens)))
        if self.profiler is not None and n == UPDATES:
            self.profiler.start()
        if self.profiler is not None and n == UPDATES + PROFILED:
            torch.get_device_module(self.device).synchronize()
            self.profiler.stop()

    def per_update(self) -> tuple[float, float]:
        """Seconds, and tokens without padding."""
        (began, before), (ended, after) = self.marks
        return (ended - began) / UPDATES, (after - before) / UPDATES

    def busy(self) -> float | None:
        """Share of an update's time during which the device computes or copies; None where torch sees no kernel."""
        found = kernels(self.profiler) if self.profiler is not None else []
        seconds, _ = self.per_update()
        # The profiler slows down the CPU, and no kernel: the time is that of an update without it.
        busy = busy_seconds((begin, end) for _, begin, end in found) / PROFILED / seconds
        return min(1.0, busy) if found else None


def measure(recipe: Recipe) -> Table:
    """Measure a recipe on this machine, as a table for a terminal. ValueError for what is wrong with it."""
    recipe.training.check_installed()
    method = load_method(recipe)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        roll_out = stack.enter_context(sampling_pool(recipe, method))
        lm, examples, held_out = load_model_and_rows(recipe, method)
        run = RunFolder(Path(folder))
        trainer: LatentTrainer
        if recipe.grpo is None:
            trainer = sft.make_trainer(lm, method, examples, recipe.training, run, held_out=held_out)
        else:
            trainer = grpo_train.make_trainer(
                lm, method, examples, recipe.training, recipe.grpo, run, roll_out=roll_out
            )
            stack.enter_context(dropout_rates_zeroed(lm))
        return _table(recipe, trainer, held_out)


def _table(recipe: Recipe, trainer: LatentTrainer, held_out: list[Example]) -> Table:
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
    with preflight.prepared(
        lm, compiled=bool(config.compile), recomputed=config.gradient_checkpointing, packed=config.packing
    ):
        started = time.perf_counter()
        # Before its weights are split the model would have to fit into one device.
        if not trainer.fsdp:
            longest = preflight.before_training(trainer, curriculum.stage_epochs())
            peak, _ = peak_memory(lm.device)
            memory = "" if peak is None else f", {peak / GIB:.1f} GiB"
            size = f"{longest.rows} rows, {longest.positions:,} positions at once{memory}"
            table.add_row("longest batch", duration(longest.seconds), size)
            # What it has sampled for that batch stays in the time of an update of reinforcement.
            started += longest.seconds
        trainer.remove_callback(PrinterCallback)
        trainer.args.save_strategy = "no"
        trainer.args.eval_on_start = False
        update = _grpo_update(table, trainer, started) if trainer.samples else _sft_update(table, trainer)
    table.add_row("an epoch", duration(update * per_epoch), f"{per_epoch:,} updates, without validation")
    table.add_row("the run", duration(update * max_steps), f"{max_steps:,} updates")
    _validation(table, recipe, trainer, held_out)
    peak, total_memory = peak_memory(lm.device)
    if peak is not None:
        table.add_row("peak memory", f"{peak / GIB:.1f} GiB", f"of {total_memory / GIB:.1f} GiB")
    return table


def _grpo_update(table: Table, trainer: LatentTrainer, started: float) -> float:
    """Make the updates of one generation, whose sampling has `started`, and add a row; returns the seconds of one."""
    assert isinstance(trainer, GrpoTrainer), "the trainer that samples"
    # A generation is sampled once, and learnt from in several updates: all of these are made.
    trainer.args.max_steps = trainer.plan.updates_per_generation
    trainer.train()
    seconds = (time.perf_counter() - started) / trainer.plan.updates_per_generation
    table.add_row("an update", duration(seconds), "with its share of the sampling of a generation")
    return seconds


def _sft_update(table: Table, trainer: LatentTrainer) -> float:
    """Make some updates of SFT and add rows about them; returns the seconds of one."""
    updates = Updates(trainer)
    trainer.add_callback(updates)
    trainer.args.max_steps = WARMUP + UPDATES + (PROFILED if updates.profiler else 0)
    trainer.train()
    seconds, tokens = updates.per_update()
    tokens *= trainer.args.world_size
    table.add_row("an update", duration(seconds), f"mean of {UPDATES}, after {WARMUP} others")
    table.add_row("tokens a second", f"{tokens / seconds:,.0f}", f"{tokens:,.0f} an update, without padding")
    busy = updates.busy()
    if busy is not None:
        table.add_row("device busy", f"{busy:.0%}", waiting(busy, trainer.config))
    return seconds


def waiting(busy: float, config: TrainingConfig) -> str:
    """Advice where the device waits for the CPU; "" where it does not."""
    if busy >= WAITS:
        return ""
    helps = ["a larger training.per_device_train_batch_size"]
    if config.tokens_per_batch is not None:
        helps.append("a larger training.tokens_per_batch")
    if not config.compile:
        helps.append("training.compile true")
    if config.dataloader_num_workers == 0:
        helps.append("training.dataloader_num_workers 2")
    return f"it waits for the CPU: set {', or '.join(helps)}"


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
    table.add_row("a validation", duration((time.perf_counter() - started) * batches), note)


# The device


def peak_memory(device: torch.device) -> tuple[int | None, int]:
    """Bytes that were allocated at most on the device, or that this process had at most on a CPU; and all there are.

    None where torch, or the operating system, does not count them.
    """
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        if hasattr(module, "max_memory_allocated"):
            return module.max_memory_allocated(device), int(module.mem_get_info(device)[1])
        # Apple's: counted by torch.accelerator alone, from torch 2.9 on.
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


def kernels(profiled: Any) -> list[tuple[str, float, float]]:
    """Kernels and copies of a device under `torch.profiler.profile`: name, begin and end in seconds."""
    spans = []
    for event in profiled.events():
        # An annotation spans the kernels below it.
        if event.device_type.name != "CPU" and not event.is_user_annotation:
            spans.append((event.name, event.time_range.start / 1e6, event.time_range.end / 1e6))
    return spans


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the intervals (begin, end) runs: kernels of several streams overlap."""
    busy = 0.0
    latest = float("-inf")
    for begin, end in sorted(intervals):
        busy += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return busy
