"""Before the first step: the longest batch goes forward and backward once, and nothing of it stays.

What would go wrong later is found now: memory that does not suffice, and a limit of hours that ends a curriculum before
its last stage. Weights, random numbers and gradients are as before.

Under GRPO it is the longest batch of generation 0, which is sampled now and not again.

    peak       weights + AdamW's moments + what the tensors of the longest batch hold at most
    an epoch   seconds of that batch a position, times all positions of an epoch, padding included
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colar import progress
from colar.ops import devices
from colar.training import peak
from colar.training.batches import RowSchedule, TrainingRows, collate, count_rows
from colar.training.curriculum import Curriculum
from colar.training.trainer import LatentTrainer

AGAIN_BELOW = 3.0
"""Seconds of a batch up to which it is timed a second time."""


@dataclass(frozen=True)
class Measured:
    """One batch, forward and backward, on one device."""

    rows: int
    positions: int
    """Of its longest part, padding included: what was in memory at once."""
    seconds: float
    peak_bytes: int
    """Weights and AdamW's moments included."""


def warn_of_slow_bfloat16(trainer: LatentTrainer) -> None:
    """Say what to set where the run asks for bfloat16, and this CPU has no such arithmetic or is slower in it."""
    lm = trainer.objective.lm
    if lm.device.type != "cpu":
        return
    advice = []
    if trainer.args.bf16:
        advice.append("--training.bf16 false")
    if any(weight.dtype == torch.bfloat16 for weight in lm.parameters()):
        advice.append("--model.dtype float32")
    if not advice:
        return
    if not devices.computes_bfloat16(lm.device):
        progress.say(
            "warning: this CPU has no bfloat16 arithmetic, and training in it takes ten times as long as in float32 or "
            f"more: set {' '.join(advice)}"
        )
    elif devices.bfloat16_speed() < 1:
        progress.say(
            f"warning: this CPU multiplies in bfloat16 at {devices.bfloat16_speed():.1f} of the speed of float32: "
            f"set {' '.join(advice)}"
        )


def batches(schedule: RowSchedule, size: int) -> Iterator[list[int]]:
    """The first epoch's batches of one device, as indices of examples; each is there once, whatever its draws."""
    order = schedule.permutation(0)
    n_examples = size // schedule.n_draws
    for start in range(0, len(order), n_examples):
        yield order[start : start + n_examples]


def padded(schedule: RowSchedule, indices: list[int]) -> int:
    """Positions of a batch, padding included."""
    n_rows = len(indices) * schedule.n_draws
    return n_rows * max(schedule.lengths[index] for index in indices)


def longest_batch(trainer: LatentTrainer, epochs: float) -> dict[str, Tensor] | None:
    """The batch with the most positions, in the stage of a run of so many `epochs` that makes it longest.

    None where batches are sampled by the model.
    """
    rows, schedule = trainer.train_dataset, trainer.schedule
    if not isinstance(rows, TrainingRows) or not isinstance(schedule, RowSchedule):
        return None
    size = trainer.args.train_batch_size
    indices = max(batches(schedule, size), key=lambda each: padded(schedule, each))
    found: dict[str, Tensor] = {}
    most = -1
    # Stages of a curriculum have rows of different lengths.
    for epoch in (0.0, max(0.0, epochs - 1e-6)):
        batch = collate([rows[epoch, index, draw] for index in indices for draw in range(rows.n_draws)])
        positions = int(trainer.positions(batch).max())
        if positions > most:
            found, most = batch, positions
    return found


def measure(trainer: LatentTrainer, batch: dict[str, Tensor]) -> Measured:
    """Forward and backward of a batch, part by part as in training. ValueError where memory does not suffice."""
    objective = trainer.objective
    model = objective.lm
    trained = [weight for weight in objective.parameters() if weight.requires_grad]
    parts = trainer.parts(batch)
    widths = [int(trainer.positions(part).max()) * int(count_rows([part])) for part in parts]
    was_training = objective.training
    objective.train()
    devices = [model.device] if model.device.type == "cuda" else []
    # In training there is nothing yet, or what earlier batches of the update have left.
    if len(parts) > 1 or trainer.args.gradient_accumulation_steps > 1:
        _with_gradients(trained)
    kept = peak.bytes_of([weight.grad for weight in trained if weight.grad is not None])
    try:
        with torch.random.fork_rng(devices):
            with peak.measured(model.device) as found:
                seconds = _seconds(trainer, parts)
            # To count tensors takes time, and so does a device's first batch: where there is time, once more.
            if seconds < AGAIN_BELOW:
                seconds = _seconds(trainer, parts)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the longest batch ({count_rows([batch])} rows, {widths[0]} positions at once) does not fit into the "
            "device's memory: lower training.tokens_per_batch or training.per_device_train_batch_size, or set "
            "training.gradient_checkpointing true"
        ) from error
    finally:
        for weight in trained:
            weight.grad = None
        objective.train(was_training)
    moments = peak.ADAM_MOMENTS * peak.trained(objective)
    return Measured(
        rows=int(count_rows([batch])),
        positions=max(widths),
        seconds=seconds,
        peak_bytes=peak.held(objective) + moments + kept + found.bytes,
    )


def _seconds(trainer: LatentTrainer, parts: list[dict[str, Tensor]]) -> float:
    """Forward and backward of each part, in seconds."""
    started = time.perf_counter()
    for part in parts:
        inputs: dict[str, Any] = trainer._prepare_inputs(part)
        with trainer.accelerator.autocast():
            loss = trainer.objective(**inputs)["loss"]
        loss.backward()
    if loss.device.type == "cuda":
        torch.cuda.synchronize(loss.device)
    return time.perf_counter() - started


def _with_gradients(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.zeros_like(weight)


def epoch_seconds(trainer: LatentTrainer, found: Measured) -> float:
    """Seconds of an epoch's updates, of the seconds of one batch; 0 where batches are sampled by the model."""
    schedule = trainer.schedule
    if not isinstance(schedule, RowSchedule):
        return 0.0
    size = trainer.args.train_batch_size
    all_batches = [padded(schedule, indices) for indices in batches(schedule, size)]
    share = sum(all_batches) / max(all_batches)
    return found.seconds * share / float(trainer.args.world_size)


def too_few_hours(curriculum: Curriculum, seconds: float, hours: float | None) -> str | None:
    """What is wrong where `hours` end training before the curriculum's last stage, at so many `seconds` an epoch."""
    begins = curriculum.last_stage_begins() / curriculum.steps_per_epoch
    if hours is None or begins == 0 or seconds * begins < 3600 * hours:
        return None
    return (
        f"training.max_hours {hours:g} ends training at about epoch {3600 * hours / seconds:.2f} (an epoch takes "
        f"{seconds / 3600:.2f} hours), and the last stage of {curriculum.method.name}'s curriculum begins at epoch "
        f"{begins:g}: nothing would be published"
    )


def before_training(trainer: LatentTrainer, curriculum: Curriculum, hours: float | None) -> Measured | None:
    """The check that every run begins with: a line of what it will take, and a warning where hours do not suffice."""
    epochs = curriculum.max_steps / curriculum.steps_per_epoch
    batch = longest_batch(trainer, epochs)
    if batch is None:
        return _before_reinforcement(trainer)
    found = _measure_once(trainer, batch)
    seconds = epoch_seconds(trainer, found)
    progress.say(f"{_longest(found)}; an epoch takes about {clock(seconds)}")
    problem = too_few_hours(curriculum, seconds, hours)
    if problem is not None:
        progress.say(f"warning: {problem}")
    return found


def _before_reinforcement(trainer: LatentTrainer) -> Measured | None:
    """The same of the outputs that the first updates learn from: they are sampled now."""
    sampled = trainer.longest_sampled()
    if sampled is None:
        return None
    batch, took = sampled
    found = _measure_once(trainer, batch)
    accumulate = trainer.args.gradient_accumulation_steps
    update = clock(found.seconds * accumulate)
    progress.say(f"{_longest(found)}; {took}, an update with the longest of them takes about {update}")
    return found


def _measure_once(trainer: LatentTrainer, batch: dict[str, Tensor]) -> Measured:
    # Compiled layers would be compiled for this one batch.
    with torch.compiler.set_stance("force_eager"):
        return measure(trainer, batch)


def _longest(found: Measured) -> str:
    size = f"{found.peak_bytes / 2**30:.2f} GiB"
    return f"longest batch: {found.rows} rows, {found.positions} positions at once, {size}"


def clock(seconds: float) -> str:
    """`0.25 s`, `12 s`, `3.5 min`, `2.4 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
