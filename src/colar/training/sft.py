"""Supervised fine-tuning of any method: `train`, its configuration and what comes out of it.

A run lives in one folder (`run_folder.py`). The same call goes on from its last whole checkpoint, and ends as
an uninterrupted run would have: rows, draws, order, optimiser and random numbers are the same. On several
devices start it with torchrun: the main process validates and writes, the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.utils import logging

from colar import files
from colar.data.example import Example
from colar.methods.base import Method
from colar.model import checkpoint
from colar.model.latent_lm import LatentLM
from colar.training import run_folder
from colar.training.best import KeepBest, Publisher
from colar.training.callbacks import Bar, Clock, Epochs, Evaluations
from colar.training.data import Order, Rows
from colar.training.objective import Objective
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer, NonFiniteError, Validate

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
)
TRACKERS = ("tensorboard", "wandb", "trackio", "none")


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how fast. Names are those of transformers' `TrainingArguments` where they exist there."""

    seed: int = 0
    """Fixes new weights, the order of rows and every draw."""
    num_train_epochs: float = 1.0
    """Passes over the rows."""
    max_steps: int = -1
    """Stop after so many updates; -1: as many as the epochs have."""
    max_hours: float | None = None
    """Stop after so many hours of wall-clock, evaluations included, summed over resumes; null: no limit."""
    per_device_train_batch_size: int = 32
    """Rows that go through the model at once on each device."""
    gradient_accumulation_steps: int = 1
    """Batches per update; 8 x 1 and 1 x 8 train alike."""
    learning_rate: float = 1e-4
    """Of AdamW, after warm-up."""
    modules_learning_rate: float | None = None
    """Of what the method adds to the backbone (a latent head); null: the same."""
    lr_scheduler_type: str = "constant"
    """constant | constant_with_warmup | linear | cosine | cosine_with_restarts | polynomial | inverse_sqrt."""
    warmup_steps: float = 0
    """Updates of linear warm-up; below 1: a share of all."""
    weight_decay: float = 0.01
    """Decoupled (AdamW); biases, norms and embeddings with frozen rows have none."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm; 0: never."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    bf16: bool = False
    """Compute in bfloat16 where it is safe (autocast); weights keep their dtype."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    dataloader_num_workers: int = 0
    """Processes that encode rows; 0: the training process itself."""
    logging_steps: float = 10
    """Updates between two rows of the log; below 1: a share of all."""
    evals_per_epoch: float = 1.0
    """Validations an epoch (0.5: every second epoch); one more at the end. Unused where eval_steps is given."""
    eval_steps: float | None = None
    """Updates between two validations; below 1: a share of all."""
    save_steps: float = 0.05
    """Updates between two checkpoints to resume from; below 1: a share of all. One more at the end."""
    save_total_limit: int = 1
    """Checkpoints to resume from that are kept."""
    report_to: str = "tensorboard"
    """tensorboard | wandb | trackio | none. history.json is written in any case."""
    reset_optimizer_at_stage: bool = False
    """Forget AdamW's moments where a curriculum enters a new stage (iCoT and Coconut do)."""

    def __post_init__(self) -> None:
        _among("lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        _among("report_to", self.report_to, TRACKERS)
        positive = ("num_train_epochs", "learning_rate", "logging_steps", "evals_per_epoch", "save_steps")
        for name in (*positive, "per_device_train_batch_size", "gradient_accumulation_steps"):
            _require(name, getattr(self, name) > 0, getattr(self, name), "above 0")
        for name in ("max_hours", "modules_learning_rate", "eval_steps"):
            value = getattr(self, name)
            _require(name, value is None or value > 0, value, "above 0 or null")
        for name in ("weight_decay", "max_grad_norm", "warmup_steps", "dataloader_num_workers"):
            _require(name, getattr(self, name) >= 0, getattr(self, name), "0 or more")
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(self, name)
            fits = value is None or value < 1 or value == int(value)
            _require(name, fits, value, "a whole number, or below 1 for a share of all updates")
        _require("max_steps", self.max_steps == -1 or self.max_steps > 0, self.max_steps, "above 0 or -1")
        _require("adam_beta2", 0 <= self.adam_beta2 < 1, self.adam_beta2, "in [0, 1)")
        _require("save_total_limit", self.save_total_limit >= 1, self.save_total_limit, "1 or more")
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ValueError(
                "training.warmup_steps has no effect with lr_scheduler_type constant: use constant_with_warmup"
            )

    def check_installed(self) -> None:
        """ValueError where the tracker of `report_to` is not installed."""
        if self.report_to != "none" and importlib.util.find_spec(self.report_to) is None:
            raise ValueError(
                f"training.report_to {self.report_to} is not installed: pip install {self.report_to}, "
                f"or use one of {', '.join(TRACKERS)}"
            )


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. The model that was trained holds the weights of `best`."""

    best: Path
    """Checkpoint folder."""
    metrics: dict[str, float]
    """Its validation metrics; empty without validation."""
    history: list[dict[str, Any]]
    """Everything logged."""
    steps: int
    """Updates made."""
    seconds: float
    """Wall-clock from the first step, summed over resumes."""


def train(
    lm: LatentLM,
    method: Method,
    examples: Iterable[Example],
    config: TrainingConfig,
    output: str | Path,
    *,
    validate: Validate | None = None,
    run_info: Mapping[str, Any] | None = None,
    resume: bool = True,
) -> TrainResult:
    """Train `lm` by `method` on `examples` in the run folder `output`, or go on where that run stopped.

    `validate` returns at least {"accuracy": 0..1}; the checkpoint with the highest is published in `best/`, the
    first of equals (without it, the last weights), and `lm` ends with those weights. `run_info` is kept in its
    colar.json. With `resume` false what an earlier run left in the folder is removed.

    Raises ValueError before the first step for whatever is wrong with rows and configuration, and
    `NonFiniteError` when loss or gradient is NaN or infinite.
    """
    config.check_installed()
    folder = RunFolder(files.require_writable(output))
    args = arguments(config, folder)
    if args.should_save:
        folder.drop_torn() if resume else folder.clear()
    lm.to(args.device)
    examples = list(method.prepare(lm, examples))
    rows = Rows(lm, method, examples, config.seed)
    order = Order(examples, rows.lengths(), config.seed)
    trainer = LatentTrainer(Objective(lm, method), args, rows, order, config.modules_learning_rate, validate)
    trainer.accelerator.wait_for_everyone()
    last = folder.last_checkpoint() if resume else None
    before = run_folder.read_state(last) if last else TrainerState()
    clock = _clock(trainer, before, config)
    info = {"seed": config.seed, "training": dataclasses.asdict(config), **(run_info or {})}
    publisher = Publisher(lm, method, folder, info, clock)
    _, per_epoch, *_, max_steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    if before.global_step >= max_steps or clock.seconds >= clock.limit:
        # Trainer would make one more step. The run is over; at most its publication was cut short.
        assert last is not None, "a run without a step has no clock and no steps"
        checkpoint.load_weights(lm, last)
        return _finish(trainer, publisher, before)
    with _session(trainer, config, publisher, per_epoch):
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    return _finish(trainer, publisher, trainer.state)


def arguments(config: TrainingConfig, folder: RunFolder) -> TrainingArguments:
    """Trainer's arguments: the configuration's fields under their names, and what is ours to decide."""
    own = {"max_hours", "modules_learning_rate", "gradient_checkpointing", "evals_per_epoch", "eval_steps"}
    own |= {"reset_optimizer_at_stage", "report_to"}
    named = {key: value for key, value in dataclasses.asdict(config).items() if key not in own}
    args = TrainingArguments(
        output_dir=str(folder.checkpoints),
        save_strategy="steps",
        use_cpu=not torch.accelerator.is_available(),
        remove_unused_columns=False,
        logging_nan_inf_filter=False,  # what is not finite is an error, not a gap
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none" if config.report_to == "tensorboard" else config.report_to,
        run_name=folder.path.name,
        disable_tqdm=True,
        ddp_timeout=24 * 3600,  # the others wait while the main process validates
        **named,
    )
    assert args.device is not None  # sets the devices up
    args._n_gpu = min(args.n_gpu, 1)  # several GPUs without torchrun: one is used, DataParallel never
    return args


@contextlib.contextmanager
def _session(trainer: LatentTrainer, config: TrainingConfig, publisher: Publisher, per_epoch: int) -> Any:
    """Trainer with our callbacks, gradient checkpointing, and an error that names what is still good."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    bar = Bar()
    trainer.add_callback(Epochs(trainer.order, publisher.method, per_epoch, config.reset_optimizer_at_stage))
    if trainer.validate is not None:
        trainer.add_callback(Evaluations(per_epoch, config.evals_per_epoch, config.eval_steps))
    for callback in (publisher.clock, KeepBest(publisher, per_epoch), bar):
        trainer.add_callback(callback)
    if config.report_to == "tensorboard":
        board = TensorBoardCallback()
        board.logging_dir = str(publisher.folder.logs)
        trainer.add_callback(board)
    if config.gradient_checkpointing:
        publisher.lm.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # "Writing model shards" at every save
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}. {_still_good(publisher.folder)}") from error
    finally:
        bar.close()
        if bars:
            logging.enable_progress_bar()
        if config.gradient_checkpointing:
            publisher.lm.causal_lm.gradient_checkpointing_disable()


def _finish(trainer: LatentTrainer, publisher: Publisher, state: TrainerState) -> TrainResult:
    """Publish where no evaluation did, and end with the best weights in the model."""
    if trainer.is_world_process_zero():
        if state.best_metric is None or not publisher.folder.best.exists():
            publisher.publish(state)
        publisher.refresh(state)
    trainer.accelerator.wait_for_everyone()
    metrics = publisher.load()
    publisher.lm.eval()
    return TrainResult(
        publisher.folder.best, metrics, state.log_history, state.global_step, publisher.clock.seconds
    )


def _clock(trainer: LatentTrainer, before: TrainerState, config: TrainingConfig) -> Clock:
    """The clock where it stood. ValueError where the run's steps counted other rows than they would now."""
    kept = run_folder.clock_of(before)
    rows = trainer.get_total_train_batch_size(trainer.args)
    if kept and kept["rows_per_update"] != rows:
        raise ValueError(
            f"the run in {trainer.args.output_dir} has updates of {kept['rows_per_update']} rows, this call of {rows}: "
            "per_device_train_batch_size x gradient_accumulation_steps x processes must stay the same"
        )
    return Clock(kept.get("seconds", 0.0), config.max_hours, rows)


def _still_good(folder: RunFolder) -> str:
    last, best = folder.last_checkpoint(), folder.best
    good = [f"{last} (to resume from)"] if last else []
    good += [f"{best} (the best so far)"] if best.exists() else []
    return (
        f"Still good: {', '.join(good) or 'nothing was saved yet'}. "
        "A lower learning_rate or max_grad_norm, or more warmup_steps, may help"
    )


def _among(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"training.{name} must be one of {', '.join(allowed)}, got {value!r}")


def _require(name: str, holds: bool, value: Any, what: str) -> None:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not (holds and finite):
        raise ValueError(f"training.{name} must be {what}, got {value!r}")
