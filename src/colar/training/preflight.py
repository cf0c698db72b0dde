"""A model made ready for training: its layers fused, compiled or recomputed, its longest batch measured before step 1.

Compiling the whole model would take minutes and break at every data-dependent shape of a method's loss. A layer takes
one (rows, positions, width) tensor, and all layers share one graph; its lengths are symbolic, so later batches need no
new graph. A layer that is recomputed (gradient checkpointing) saves only its input.

The longest batch goes forward and backward once before training, and leaves weights, random numbers and gradients as
they were. If it does not fit into the device's memory, this is found now, not after hours, and the batch is split into
smaller parts (`training.tokens_per_batch`) until they fit. Under GRPO it is the longest batch of generation 0, which is
sampled now, and not again.

A curriculum's rows change from stage to stage: the rows that are longest in the first are measured in the stage where
they have the most positions. A later epoch's may be longer: TokenSkip may draw more of a chain, and iCoT more tokens.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar import progress
from colar.engine.engine import out_of_memory
from colar.model.fused import fused
from colar.model.latent_lm import LatentLM
from colar.model.masks import masks_without_waiting
from colar.ops import devices
from colar.training.objective import count_rows
from colar.training.trainer import LatentTrainer

ADVICE = (
    "set training.gradient_checkpointing true, model.lora (an adapter) and model.dtype bfloat16 as far as they are not "
    "set yet, or leave out the longest rows"
)


@contextlib.contextmanager
def prepared(lm: LatentLM, *, compiled: bool = False, recomputed: bool = False) -> Iterator[None]:
    """Inside the block, fuse or compile the layers, and recompute them if requested. The model is restored after it,
    and its state dict is the same throughout."""
    # torch would only fail at the first update, with a traceback of its own.
    if compiled and not devices.can_compile(lm.device):
        raise ValueError(
            "training.compile needs a compiler: on a CPU g++ or clang++, on a GPU gcc or clang, and Triton; or set it "
            "false"
        )
    layers = lm.decoder_layers() if compiled else []
    if recomputed:
        lm.causal_lm.activation_checkpointing_enable({"use_reentrant": False})
    if layers:
        progress.say("compiling the layers: the first updates take about half a minute")
    for layer in layers:
        # In place: a wrapper module would change the names in the state dict.
        layer.compile(dynamic=True)
    try:
        # Not on a CPU, which has memory enough, and no kernels to launch.
        plain = compiled or lm.device.type == "cpu"
        with (
            masks_without_waiting(),
            _more_variants() if compiled else contextlib.nullcontext(),
            contextlib.nullcontext() if plain else fused(lm.causal_lm),
        ):
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
        if recomputed:
            lm.causal_lm.activation_checkpointing_disable()


def _more_variants() -> Any:
    """Raise torch's limit of variants of a compiled layer: a full mask, a near one or none, one sequence or several,
    with and without a backward pass. Beyond the default of 8, layers would run uncompiled."""
    from torch._dynamo import config  # seconds

    return config.patch(recompile_limit=64)


@dataclass(frozen=True)
class LongestBatch:
    """Forward and backward of a run's longest batch, measured on one device."""

    rows: int
    positions: int
    """Positions of its largest part, padding included: those in memory at once."""
    seconds: float


def warn_of_slow_bfloat16(trainer: LatentTrainer) -> None:
    """Warn if a run computes in bfloat16 on a device that has no such arithmetic."""
    lm = trainer.objective.lm
    overrides = ["--training.bf16 false"] if trainer.args.bf16 else []
    if any(weight.dtype == torch.bfloat16 for weight in lm.parameters()):
        overrides.append("--model.dtype float32")
    if overrides and not devices.computes_bfloat16(lm.device):
        progress.say(
            f"warning: {lm.device} has no bfloat16 arithmetic, and training in it takes ten times as long as in "
            f"float32 or more: set {' '.join(overrides)}"
        )


def before_training(trainer: LatentTrainer) -> LongestBatch:
    """Measure the run's longest batch, and log it.

    If it does not fit into the device's memory, `trainer.tokens_per_batch` is halved until it does: updates and
    results stay the same. ValueError if one row alone does not fit.
    """
    batch, causal_lm = trainer.longest_batch(), trainer.objective.lm.causal_lm
    # Compiled layers would be compiled for this one batch. On a GPU fused ones need about as little memory.
    like_compiled = causal_lm.device.type != "cpu" and trainer.config.compile
    with (
        torch.compiler.set_stance("force_eager"),
        fused(causal_lm) if like_compiled else contextlib.nullcontext(),
    ):
        measured = measure_batch(trainer, batch)
        while measured is None:
            halve(trainer, batch)
            measured = measure_batch(trainer, batch)
    progress.say(
        f"longest batch: {measured.rows} rows, {measured.positions} positions at once, "
        f"{progress.duration(measured.seconds)} forward and backward"
    )
    return measured


def halve(trainer: LatentTrainer, batch: dict[str, Tensor]) -> None:
    """Halve `tokens_per_batch`. ValueError if a batch's parts have no more positions than its longest row already."""
    rows, longest = count_rows(batch), int(trainer.positions(batch).max())
    at_once = min(rows * longest, trainer.tokens_per_batch or rows * longest)
    device = trainer.objective.lm.device
    if at_once <= longest:
        raise ValueError(
            f"the longest row ({longest} positions) does not fit into the memory of {device}: {ADVICE}"
        )
    # Not below the longest row, a part by itself: a part of several shorter rows may be the one that does not fit.
    trainer.tokens_per_batch = max(at_once // 2, longest)
    progress.say(
        f"{at_once} positions at once do not fit into the memory of {device}: "
        f"training.tokens_per_batch is {trainer.tokens_per_batch} now"
    )


def measure_batch(trainer: LatentTrainer, batch: dict[str, Tensor]) -> LongestBatch | None:
    """Forward and backward of a batch, part by part as in training; None if memory runs out."""
    objective = trainer.objective
    device = objective.lm.device
    parts = trainer.parts(batch)
    positions = max(int(trainer.positions(part).max()) * count_rows(part) for part in parts)
    was_training = objective.training
    objective.train()
    started = time.perf_counter()
    reserved: list[Tensor] = []
    loss: Tensor | None = None
    try:
        # Reserves memory for the optimiser's moments, which the first update allocates.
        reserved = moments(trainer) if device.type != "cpu" else []
        with devices.forked_rng(device):
            for part in parts:
                with trainer.accelerator.autocast():
                    loss = objective(**part)["loss"]
                loss.backward()
        torch.get_device_module(device).synchronize()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None
    finally:
        # Freed before the cache is emptied, so that a smaller part finds their memory.
        del reserved, loss
        for weight in objective.parameters():
            weight.grad = None
        objective.train(was_training)
        devices.empty_cache(device)
    return LongestBatch(count_rows(batch), positions, time.perf_counter() - started)


def moments(trainer: LatentTrainer) -> list[Tensor]:
    """AdamW's two moments of each trained weight, as large as the run's optimiser has them."""
    trained = [weight for weight in trainer.objective.parameters() if weight.requires_grad]
    in_8_bits = trainer.args.optim != "adamw_torch_fused"
    return [
        torch.empty_like(weight, dtype=torch.uint8 if in_8_bits else weight.dtype) for weight in trained * 2
    ]
