"""The loop of a run, whatever it trains by: callbacks, resume, the published checkpoint. SFT and GRPO share it.

A run lives in one folder (`run_folder.py`). Run again, it resumes from its last whole checkpoint, and ends as an
uninterrupted run would have: rows, draws, order, optimiser and random numbers are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.utils import logging

from colar import checks, files, progress
from colar.methods.base import Method
from colar.model import checkpoint
from colar.model.latent_lm import LatentLM
from colar.training import run_folder
from colar.training.callbacks import Bar, Clock, Epochs, Evaluations, LogAtSaves, stage_of_last_step
from colar.training.compiled_layers import compiled_layers
from colar.training.config import TrainingConfig
from colar.training.publish import KeepBest, Publisher
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer, NonFiniteError


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


def run_trainer(
    trainer: LatentTrainer,
    config: TrainingConfig,
    folder: RunFolder,
    info: dict[str, Any],
    resume: bool,
    callbacks: Iterable[TrainerCallback] = (),
    stopped_for_good: Callable[[TrainerState], bool] = lambda state: False,
) -> TrainResult:
    """Run a trainer in its folder, or go on where that run stopped: what every way of training shares.

    `callbacks` come beside ours; `stopped_for_good` says of a saved state that its run must not be resumed.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("training runs on one device or by DDP (torchrun), not by FSDP or DeepSpeed")
    writes = trainer.args.should_save
    with files.alone(folder.path) if writes else contextlib.nullcontext():
        if writes:  # only now that nothing is wrong with the call
            folder.drop_torn() if resume else folder.clear()
        trainer.accelerator.wait_for_everyone()
        resume_from = folder.last_checkpoint() if resume else None
        trainer.args.eval_on_start &= resume_from is None and trainer.validate is not None
        saved = run_folder.read_state(resume_from) if resume_from else TrainerState()
        objective = trainer.objective
        publisher = Publisher(objective.lm, objective.method, folder, info, _clock(trainer, saved, config))
        for callback in callbacks:
            trainer.add_callback(callback)
        state = _train_or_load(trainer, config, publisher, resume_from, saved, stopped_for_good(saved))
        return _finish(trainer, publisher, state, publish_last=not config.load_best_model_at_end)


def _train_or_load(
    trainer: LatentTrainer,
    config: TrainingConfig,
    publisher: Publisher,
    resume_from: Path | None,
    saved: TrainerState,
    is_over: bool,
) -> TrainerState:
    """Train from the checkpoint `resume_from`, or load it where the run is over: Trainer would make one more step."""
    loader = trainer.get_train_dataloader()
    _, per_epoch, *_, max_steps = trainer.set_initial_training_values(trainer.args, loader)
    is_over |= saved.global_step >= max_steps or publisher.clock.seconds >= publisher.clock.limit
    if resume_from and is_over:
        checkpoint.load_weights(publisher.lm, resume_from)
        return saved
    _warn_of_stages(publisher.method, max_steps, per_epoch)
    with _during_training(trainer, config, publisher, per_epoch):
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    return trainer.state


def _warn_of_stages(method: Method, max_steps: int, per_epoch: int) -> None:
    """Say so where training is over before the curriculum is: the model would think as it was never trained to."""
    reached, final = stage_of_last_step(method, max_steps, per_epoch), method.last_stage()
    if reached < final:
        progress.say(
            f"warning: training ends in stage {reached} of {method.name}'s curriculum, "
            f"which thinks as in stage {final}: "
            "train for more epochs, or shorten its stages"
        )


def arguments(config: TrainingConfig, folder: RunFolder) -> TrainingArguments:
    """Trainer's arguments: the configuration's fields under their names, and what is ours to decide."""
    own = {"max_hours", "modules_learning_rate", "gradient_checkpointing", "evals_per_epoch", "eval_steps"}
    own |= {"reset_optimizer_at_stage", "report_to", "compile", "load_best_model_at_end"}
    named = {key: value for key, value in dataclasses.asdict(config).items() if key not in own}
    args = TrainingArguments(
        output_dir=str(folder.checkpoints),
        save_strategy="steps",
        use_cpu=not torch.cuda.is_available(),  # noise and factors are float64, which MPS does not have
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
def _during_training(
    trainer: LatentTrainer, config: TrainingConfig, publisher: Publisher, per_epoch: int
) -> Iterator[None]:
    """Trainer with our callbacks, gradient checkpointing, and an error that names what is still good."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    bar = Bar()
    trainer.add_callback(
        Epochs(trainer.schedule, publisher.method, per_epoch, config.reset_optimizer_at_stage)
    )
    if trainer.validate is not None:
        trainer.add_callback(Evaluations(per_epoch, config.evals_per_epoch, config.eval_steps))
    keep = KeepBest(publisher, per_epoch, publish_last=not config.load_best_model_at_end)
    for callback in (publisher.clock, keep, bar, LogAtSaves()):
        trainer.add_callback(callback)
    if config.report_to == "tensorboard":
        board = TensorBoardCallback()
        board.logging_dir = str(publisher.folder.logs)
        trainer.add_callback(board)
    if config.gradient_checkpointing:
        _checkpointing(publisher.lm, "enable", {"use_reentrant": False})
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # "Writing model shards" at every save
    try:
        with compiled_layers(publisher.lm) if config.compile else contextlib.nullcontext():
            yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}. {_still_good(publisher.folder)}") from error
    finally:
        bar.close()
        if bars:
            logging.enable_progress_bar()
        if config.gradient_checkpointing:
            _checkpointing(publisher.lm, "disable")


def _finish(
    trainer: LatentTrainer, publisher: Publisher, state: TrainerState, publish_last: bool
) -> TrainResult:
    """Publish where no evaluation did, or the last weights, and end with what was published in the model."""
    if trainer.is_world_process_zero():
        if publish_last or state.best_metric is None or not publisher.folder.best.exists():
            publisher.publish(state)
        publisher.refresh(state)
    trainer.accelerator.wait_for_everyone()
    metrics = publisher.load()
    publisher.lm.eval()
    return TrainResult(
        publisher.folder.best, metrics, state.log_history, state.global_step, publisher.clock.seconds
    )


def _clock(trainer: LatentTrainer, saved: TrainerState, config: TrainingConfig) -> Clock:
    """The clock where it stood. ValueError where the run's steps counted other rows than they would now."""
    kept = run_folder.clock_of(saved)
    rows = trainer.get_total_train_batch_size(trainer.args)
    if kept:
        checks.check_same_run(
            trainer.args.output_dir,
            {"rows per update": kept["rows_per_update"]},
            {"rows per update": rows},
            "per_device_train_batch_size x gradient_accumulation_steps x processes must stay the same",
        )
    return Clock(kept.get("seconds", 0.0), config.max_hours, rows)


def _checkpointing(lm: LatentLM, what: str, *options: dict[str, Any]) -> None:
    """Gradient checkpointing on or off, by the name that this transformers 5 has for it."""
    names = (f"activation_checkpointing_{what}", f"gradient_checkpointing_{what}")
    getattr(lm.causal_lm, next(name for name in names if hasattr(lm.causal_lm, name)))(*options)


def _still_good(folder: RunFolder) -> str:
    checkpoint_folder, best = folder.last_checkpoint(), folder.best
    good = [f"{checkpoint_folder} (to resume from)"] if checkpoint_folder else []
    good += [f"{best} (the best so far)"] if best.exists() else []
    return (
        f"Still good: {', '.join(good) or 'nothing was saved yet'}. "
        "A lower learning_rate or max_grad_norm, or more warmup_steps, may help"
    )
