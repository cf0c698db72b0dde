"""The run of a trainer in its folder: callbacks, resume, the published checkpoint. SFT and GRPO share it.

A run has one folder (`run_folder.py`). Started again, it resumes from its last whole checkpoint, and ends as an
uninterrupted run of the same budget would have: rows, draws, order, optimiser and random numbers are the same.

    steps          1 .. 20      21 .. 40      41 .. 47          41 .. 60     ...
    checkpoint           save 20       save 40     X kill  resume 40     save 60
    best/                   published when validation improves                          loaded at the end

A checkpoint that a kill left incomplete is dropped on resume, and the one before it is used. Updates after it are made
again, with the same numbers.
"""

import dataclasses
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import IntervalStrategy, PrinterCallback, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.utils import logging

from colar import checks, processes, progress
from colar.checks import NonFiniteError
from colar.data.example import Example
from colar.methods import pretrained
from colar.model import weights
from colar.model.latent_lm import LatentLM
from colar.training import preflight, run_folder
from colar.training.callbacks import (
    Clock,
    Epochs,
    ProgressBar,
    Publisher,
    RunFiles,
    StopAtSigterm,
    best_evaluation,
)
from colar.training.config import TrainingConfig
from colar.training.rows import digest_of
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer

OURS = {"eval_steps", "fsdp", "gradient_checkpointing", "load_best_model_at_end", "report_to"}
"""Keys of `TrainingConfig` that `TrainingArguments` has, too, but that colar handles itself."""


class Arguments(TrainingArguments):  # type: ignore[misc]
    """Trainer's arguments for a process with one device, on which the model already is."""

    @property
    def n_gpu(self) -> int:
        """1 or 0: without torchrun one of several GPUs is used, never DataParallel."""
        return min(int(super().n_gpu), 1)

    @property
    def place_model_on_device(self) -> bool:
        return False


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. The model that was trained holds the weights of `best`."""

    best: Path
    """Checkpoint folder."""
    metrics: dict[str, float]
    """Its validation metrics; empty without validation."""
    history: list[dict[str, Any]]
    """Everything logged."""
    steps: int
    """Updates made."""
    seconds: float
    """Wall-clock from Trainer's start, evaluations included, summed over resumes."""


def run_trainer(
    trainer: LatentTrainer,
    folder: RunFolder,
    run_info: Mapping[str, Any] | None,
    resume: bool,
    held_out: Sequence[Example],
    stopped_for_good: Callable[[TrainerState], bool] = lambda state: False,
) -> TrainResult:
    """Run a trainer in its folder, or resume the run that is there.

    `run_info` goes into the checkpoint's colar.json, and its `recipe` also into recipe.json. `held_out` are the
    validation rows. `stopped_for_good` is True for a saved state whose run has ended and must not resume.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "training runs on one device, by DDP (torchrun), or by training.fsdp; not by accelerate's FSDP or DeepSpeed"
        )
    objective, config = trainer.objective, trainer.config
    info = {"seed": config.seed, "training": dataclasses.asdict(config), **(run_info or {})}
    # Checked before any file of an earlier run is touched.
    pretrained.check_loadable(objective.lm)
    processes.require_shared(folder.path)
    processes.from_main(folder.check_replaceable)
    with processes.locked(folder.path):
        resume_from = processes.from_main(lambda: _resume_point(folder)) if resume else None
        if resume and resume_from is None and folder.finished.exists():
            raise ValueError(
                f"{folder.path} holds a finished run without its checkpoints, from which it would go on: name another "
                "output, or --no_resume to train it anew"
            )
        saved = TrainerState() if resume_from is None else run_folder.read_state(resume_from)
        # A resumed run is not validated at its start: its history has that row.
        trainer.args.eval_on_start &= resume_from is None and trainer.validate is not None
        clock = _clock(trainer, saved, held_out)
        curriculum = trainer.curriculum
        publisher = Publisher(objective.lm, objective.method, folder, info, clock, curriculum)
        if saved.global_step > curriculum.max_steps:
            raise ValueError(
                f"{folder.path} is at update {saved.global_step:,}, and with these settings the run would end at "
                f"{curriculum.max_steps:,}: give the length that it has (training.num_train_epochs or max_steps), "
                "another output, or --no_resume"
            )
        # Files of an earlier run are touched only now, after all checks of the call.
        processes.from_main(lambda: folder.begin(info.get("recipe"), resume))
        if trainer.args.should_save:
            # Those after the last checkpoint of a killed run: only now is it certain that the run resumes there.
            folder.drop_completions(saved.global_step)
        if resume_from is not None:
            progress.say(f"resumes after update {saved.global_step:,} of {curriculum.max_steps:,}")
        is_over = saved.global_step >= curriculum.max_steps or clock.is_up or stopped_for_good(saved)
        if resume_from is not None and is_over:
            # Trainer would still make one more step.
            weights.load_into(objective.lm, resume_from)
            state = saved
        else:
            state = _train(trainer, publisher, resume_from)
        if trainer.args.should_save:
            folder.write_history(state.log_history)
        curriculum.require_end(state.global_step, config.max_hours)
        found_best = config.load_best_model_at_end and best_evaluation(state, curriculum) is not None
        return _finish(trainer, publisher, state, publish_last=not found_best)


def _resume_point(folder: RunFolder) -> Path | None:
    """The newest checkpoint that is whole; None if there is none. Drops newer ones, which a kill left incomplete."""
    newest_whole = folder.last_resume_state()
    states = folder.resume_states()
    torn = states if newest_whole is None else states[: states.index(newest_whole)]
    for path in torn:
        progress.say(f"dropped {path}, which is not whole: its save was interrupted")
    folder.drop_states(torn)
    return newest_whole


def _train(trainer: LatentTrainer, publisher: Publisher, resume_from: Path | None) -> TrainerState:
    """Train to the end, from the start or from the checkpoint `resume_from`.

    The error for numbers that are not finite names the checkpoints that are still good.
    """
    config, curriculum = trainer.config, publisher.curriculum
    curriculum.warn()
    preflight.warn_of_slow_bfloat16(trainer)
    bar, stop = ProgressBar(), StopAtSigterm()
    _add_callbacks(trainer, publisher, bar, stop)
    # transformers would show a bar, "Writing model shards", at every save.
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with preflight.prepared(
            publisher.lm, compiled=bool(config.compile), recomputed=config.gradient_checkpointing
        ):
            # A resumed run is measured on a GPU only, to fit its parts to the device again, and not if batches would be
            # sampled for it. With fsdp nothing is: before its weights are split the model need not fit on one device.
            on_gpu = trainer.args.device.type == "cuda"
            measures = resume_from is None or (on_gpu and not trainer.samples)
            if measures and not trainer.fsdp:
                preflight.before_training(trainer)
            with stop.listening():
                trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}. {_still_good(publisher.folder)}") from error
    finally:
        bar.close()
        if shows_bars:
            logging.enable_progress_bar()
    # Also where it came after the last update: nothing else of the command begins.
    if processes.any_process(stop.received):
        progress.say(f"SIGTERM: update {trainer.state.global_step:,} is saved, and a run resumes from there")
        # A launcher that sees one process end would end the others, of which one may still write.
        PartialState().wait_for_everyone()
        signal.raise_signal(signal.SIGTERM)
        # Only where a handler of the caller's has returned.
        raise SystemExit(128 + signal.SIGTERM)
    return trainer.state


def _add_callbacks(
    trainer: LatentTrainer, publisher: Publisher, bar: ProgressBar, stop: StopAtSigterm
) -> None:
    """Give the trainer our callbacks (`callbacks.py`)."""
    config = trainer.config
    # It writes to stdout, which is for results.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(stop)
    trainer.add_callback(RunFiles(publisher.folder))
    trainer.add_callback(Epochs(trainer.schedule, publisher.curriculum))
    if trainer.validate is not None:
        every = publisher.curriculum.steps_per_epoch if config.eval_steps is None else config.eval_steps
        # Set here, because the constructor of Trainer would ask for an eval_dataset.
        trainer.args.eval_strategy = IntervalStrategy.STEPS
        trainer.args.eval_steps = every
    trainer.add_callback(publisher.clock)
    if config.load_best_model_at_end:
        trainer.add_callback(publisher)
    trainer.add_callback(bar)
    if config.report_to == "tensorboard":
        board = TensorBoardCallback()
        board.logging_dir = str(publisher.folder.logs)
        trainer.add_callback(board)


def _still_good(folder: RunFolder) -> str:
    """A sentence that names the checkpoints on disk."""
    uses = {folder.last_resume_state(): "to resume from", folder.best: "the best so far"}
    good = [f"{path} ({use})" for path, use in uses.items() if path is not None and path.exists()]
    return (
        f"Still good: {', '.join(good) or 'nothing was saved yet'}. "
        "A lower learning_rate or max_grad_norm, or more warmup_steps, may help"
    )


def _finish(
    trainer: LatentTrainer, publisher: Publisher, state: TrainerState, publish_last: bool
) -> TrainResult:
    """Publish the last weights if `publish_last` or if nothing is published; leave the published ones in the model."""
    # All processes take part: with fsdp each has a share of every weight.
    gathered = weights.gathered(publisher.lm)
    if trainer.is_world_process_zero() and (publish_last or not publisher.folder.best.exists()):
        publisher.publish(state, gathered)
    # All processes end with the published weights; where they are split, these are the last ones.
    metrics = publisher.load() if gathered is None else {}
    publisher.lm.eval()
    return TrainResult(
        best=publisher.folder.best,
        metrics=metrics,
        history=state.log_history,
        steps=state.global_step,
        seconds=publisher.clock.seconds,
    )


def _clock(trainer: LatentTrainer, saved: TrainerState, held_out: Sequence[Example]) -> Clock:
    """The clock at its saved time. ValueError if rows, or the backbone under an adapter, are not those of before."""
    lm = trainer.objective.lm
    begun_with = {
        "rows_per_update": trainer.get_total_train_batch_size(trainer.args),
        "rows": digest_of(trainer.schedule.examples),
        "digest of the validation rows": digest_of(held_out, "answer_type", "judge"),
        # A checkpoint holds all weights but those of an adapter's backbone.
        "fingerprint of the frozen backbone": lm.fingerprint if lm.has_adapter else None,
    }
    saved_clock = run_folder.clock_of(saved)
    # A new run has saved none of these values, and earlier versions did not save all.
    before = {key: saved_clock.get(key, value) for key, value in begun_with.items()}
    names = {"rows_per_update": "rows per update", "rows": "digest of the training rows"}
    checks.check_same_run(
        trainer.args.output_dir,
        {names.get(key, key): value for key, value in before.items()},
        {names.get(key, key): value for key, value in begun_with.items()},
        "some of the rows would be seen twice and others never: give the model and rows that it was begun with, "
        "and the same per_device_train_batch_size x gradient_accumulation_steps x processes, or another folder",
    )
    config = trainer.config
    return Clock(saved_clock.get("seconds", 0.0), config.max_hours, config.save_steps, begun_with)


def arguments(config: TrainingConfig, folder: RunFolder) -> TrainingArguments:
    """Trainer's arguments: the configuration's fields under their names, and those that colar sets."""
    processes.join(config.ddp_timeout)
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)} - OURS
    args = Arguments(
        output_dir=str(folder.checkpoints),
        run_name=str(folder.path),
        save_strategy="steps",
        # Trainer would use Apple's mps by default; here it must be requested.
        use_cpu=config.on_cpu,
        remove_unused_columns=False,
        # A loss that is not finite is an error here, not a gap in the log.
        logging_nan_inf_filter=False,
        dataloader_pin_memory=torch.cuda.is_available() and not config.on_cpu,
        # With fsdp gradients are split after each batch: else each process would hold them whole until the last one.
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": config.fsdp}},
        # TensorBoard gets a callback of ours, with a folder of its own.
        report_to="none" if config.report_to == "tensorboard" else config.report_to,
        disable_tqdm=True,
        # Buffers are constants, such as rotary frequencies.
        ddp_broadcast_buffers=False,
        **{name: value for name, value in vars(config).items() if name in theirs},
    )
    # The recipe decides, not the configuration of `accelerate launch`, which Trainer would take.
    args.mixed_precision = "bf16" if config.bf16 else "no"
    _ = args.device  # sets the devices up
    return args


def put_on_device(lm: LatentLM, config: TrainingConfig, folder: RunFolder) -> TrainingArguments:
    """Put a model on its training device; returns Trainer's arguments."""
    args = arguments(config, folder)
    # With fsdp each device gets its share of the weights when training begins.
    if not config.fsdp:
        lm.to(args.device)
    # Probed before weights are split between processes and layers are compiled.
    lm.why_no_trees()
    return args
