"""Before the first step: the longest batch goes forward and backward once, and nothing of it stays.

What would go wrong later is found now: memory that does not suffice, and a limit of hours that ends a curriculum before
its last stage. Weights, random numbers and gradients are as before.

Under GRPO it is the longest batch of generation 0, which is sampled now and not again.

    peak       weights + AdamW's moments + what the tensors of the longest batch hold at most
    an epoch   seconds of that batch a position, times all positions of an epoch, padding included

A curriculum's rows change from stage to stage: the longest batch is that of the stage where it has the most positions,
and each stage's epochs take as long as they have positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colar import progress
from colar.methods.base import Row
from colar.ops import devices
from colar.training import peak, room
from colar.training.batches import RowSchedule, TrainingRows, collate, count_rows
from colar.training.curriculum import Curriculum
from colar.training.room import gib
from colar.training.stages import Pace, Stage, stages_of
from colar.training.trainer import LatentTrainer

AGAIN_BELOW = 3.0
"""Seconds of a batch up to which it is timed a second time."""
SAMPLED = 8
"""Batches by which a curriculum's stages are compared."""

Encode = Callable[[float, Sequence[int]], list[Row]]
"""Epoch and indices of examples -> their rows, as a run has them there."""


@dataclass(frozen=True)
class Measured:
    """One batch, forward and backward, on one device."""

    rows: int
    positions: int
    """Of its longest part, padding included: what was in memory at once."""
    padded: int
    """Of the whole batch, padding included."""
    at_once: int
    """Rows of its longest part."""
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


def widest(schedule: RowSchedule, size: int) -> list[int]:
    """The batch with the most positions."""
    return max(batches(schedule, size), key=lambda indices: padded(schedule, indices))


def stage_positions(schedule: RowSchedule, size: int, encode: Encode, stages: Sequence[Stage]) -> list[float]:
    """Positions of an epoch in each stage, padding included.

    The schedule knows the lengths of the first stage. To encode all rows for the others would take minutes: they have
    more or fewer by as much as some batches have.
    """
    all_batches = list(batches(schedule, size))
    first = sum(padded(schedule, indices) for indices in all_batches)
    if len(stages) == 1:
        return [first]
    # Their order is random: every n-th is a sample.
    some = all_batches[:: -(-len(all_batches) // SAMPLED)]
    counts = [0] * len(stages)
    for i, stage in enumerate(stages):
        for indices in some:
            lengths = [len(row) for row in encode(stage.begins, indices)]
            counts[i] += len(lengths) * max(lengths)
    return [first * count / counts[0] for count in counts]


def encoder(rows: TrainingRows) -> Encode:
    """Rows as the run has them."""
    return lambda epoch, indices: [rows[epoch, i, draw] for i in indices for draw in range(rows.n_draws)]


def longest_batches(trainer: LatentTrainer, stages: Sequence[Stage]) -> list[dict[str, Tensor]]:
    """The batch with the most positions, as it is in each stage."""
    rows, schedule = trainer.train_dataset, trainer.schedule
    assert isinstance(rows, TrainingRows), "reinforcement samples its batches"
    assert isinstance(schedule, RowSchedule), "rows have a schedule"
    indices = widest(schedule, trainer.args.train_batch_size)
    encode = encoder(rows)
    return [collate(encode(stage.begins, indices)) for stage in stages]


def longest_batch(trainer: LatentTrainer, stages: Sequence[Stage]) -> dict[str, Tensor]:
    """The batch with the most positions, in the stage that makes it longest."""
    return max(longest_batches(trainer, stages), key=lambda batch: int(trainer.positions(batch).max()))


def measure(trainer: LatentTrainer, batch: dict[str, Tensor]) -> Measured:
    """Forward and backward of a batch, part by part as in training. ValueError where memory does not suffice."""
    objective = trainer.objective
    model = objective.lm
    trained = [weight for weight in objective.parameters() if weight.requires_grad]
    parts = trainer.parts(batch)
    widths = [int(trainer.positions(part).max()) * int(count_rows([part])) for part in parts]
    # The first part is the longest.
    at_once = int(count_rows(parts[:1]))
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
        advice = what_helps(trainer, at_once, room.memory_of(model.device))
        raise ValueError(
            f"the longest batch ({count_rows([batch])} rows, {widths[0]} positions at once) does not fit into the "
            f"device's memory: {advice}"
        ) from error
    finally:
        for weight in trained:
            weight.grad = None
        objective.train(was_training)
    moments = peak.ADAM_MOMENTS * peak.trained(objective)
    return Measured(
        rows=int(count_rows([batch])),
        positions=max(widths),
        padded=int(count_rows([batch])) * int(trainer.positions(batch).max()),
        at_once=at_once,
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


def what_helps(trainer: LatentTrainer, at_once: int, memory: int) -> str:
    """What to set where a batch of `at_once` rows in its longest part takes more than `memory` bytes of the device."""
    objective = trainer.objective
    lm = objective.lm
    alone = peak.held(objective) + (peak.ADAM_MOMENTS + 1) * peak.trained(objective)
    recomputes = any(getattr(layer, "gradient_checkpointing", False) for layer in lm.causal_lm.modules())
    helps = []
    if alone < memory and at_once > 1:
        helps.append("lower training.tokens_per_batch or training.per_device_train_batch_size")
    if alone < memory and not recomputes:
        helps.append("set training.gradient_checkpointing true")
    if helps:
        return ", or ".join(helps)
    too_little = "" if alone >= memory else ", which leaves too little for the longest row"
    # What training.fsdp rejects (sft.py, grpo/run.py).
    divisible = isinstance(trainer.schedule, RowSchedule) and not objective.method.unrolled
    advice = room.smaller_weights(lm, memory, divisible)
    return f"weights, moments and gradients alone take {gib(alone)}{too_little}: {advice}"


def too_little_memory(trainer: LatentTrainer, found: Measured) -> str | None:
    """What is wrong where the device has less memory than the run takes at most."""
    memory = room.memory_of(trainer.objective.lm.device)
    if found.peak_bytes <= memory:
        return None
    return f"{gib(found.peak_bytes)} of {gib(memory)}: {what_helps(trainer, found.at_once, memory)}"


def pace_of(trainer: LatentTrainer, stages: Sequence[Stage], found: Sequence[Measured]) -> Pace:
    """How long each stage takes, of the seconds of a batch that was measured for it."""
    rows, schedule = trainer.train_dataset, trainer.schedule
    assert isinstance(rows, TrainingRows), "reinforcement has no stages"
    assert isinstance(schedule, RowSchedule), "rows have a schedule"
    positions = stage_positions(schedule, trainer.args.train_batch_size, encoder(rows), stages)
    n = trainer.args.world_size
    seconds = [each.seconds / each.padded * count / n for each, count in zip(found, positions, strict=True)]
    return Pace(stages, seconds)


def too_few_hours(curriculum: Curriculum, pace: Pace, hours: float | None) -> str | None:
    """What is wrong where `hours` end training before the curriculum's last stage."""
    if hours is None or len(pace.stages) == 1 or pace.before_last < 3600 * hours:
        return None
    ends = pace.epoch_after(3600 * hours)
    return (
        f"training.max_hours {hours:g} ends training at about epoch {ends:.2f} (an epoch takes {pace.epoch / 3600:.2f} "
        f"hours), and the last stage of {curriculum.method.name}'s curriculum begins at epoch "
        f"{pace.stages[-1].begins:g}: nothing would be published"
    )


def before_training(trainer: LatentTrainer, curriculum: Curriculum, hours: float | None) -> Measured | None:
    """The check that every run begins with: a line of what it will take, and warnings of what will not suffice."""
    if not isinstance(trainer.schedule, RowSchedule):
        return _before_reinforcement(trainer)
    stages = stages_of(curriculum)
    found = _measure_once(trainer, longest_batch(trainer, stages))
    # One batch: a position takes as long in every stage.
    pace = pace_of(trainer, stages, [found] * len(stages))
    progress.say(f"{_longest(found)}; an epoch takes about {clock(pace.epoch)}")
    problem = too_few_hours(curriculum, pace, hours)
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
        found = measure(trainer, batch)
    problem = too_little_memory(trainer, found)
    if problem is not None:
        # The batch went through: AdamW's moments, which come with the first update, may not fit beside it.
        progress.say(f"warning: {problem}")
    return found


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
