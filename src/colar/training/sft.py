"""Supervised fine-tuning of any method: `train`.

The same call again resumes a run from its last whole checkpoint (`resumable_run.py`). On several devices start it with
torchrun: processes divide rows, validation and the initial check of all rows; the main process writes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import files
from colar.data.example import Example
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.training.config import TrainingConfig
from colar.training.curriculum import Curriculum
from colar.training.objective import Objective
from colar.training.resumable_run import TrainResult, put_on_device, run_trainer
from colar.training.rows import RowSchedule, TrainingRows
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer, Validate


def train(
    lm: LatentLM,
    method: Method,
    examples: Iterable[Example],
    config: TrainingConfig,
    output: str | Path,
    *,
    validate: Validate | None = None,
    held_out: Iterable[Example] = (),
    run_info: Mapping[str, Any] | None = None,
    resume: bool = True,
) -> TrainResult:
    """Train `lm` by `method` on `examples` in the run folder `output`, or resume the run that is there.

    `validate` returns at least {"accuracy": 0..1}. The checkpoint with the highest accuracy is published in `best/`;
    ties are broken by the lower held-out loss, then by the earlier step. Without `validate`, or with
    `load_best_model_at_end` false, the last weights are published. `lm` ends with the published weights. The loss on
    the examples `held_out` (only those with a chain, if any has one) is logged at each validation. `run_info` is stored
    in the checkpoint's colar.json. With `resume` false the files of an earlier run in the folder are removed.

    Raises ValueError before the first step for wrong rows or configuration, `NonFiniteError` when loss or gradient is
    NaN or infinite, and `UnfinishedCurriculumError` when `max_hours` ends training before the curriculum's last stage.
    """
    # All checks come first, before any file of an earlier run is touched.
    config.check_installed()
    folder = RunFolder(files.require_writable(output))
    held_out = list(held_out)
    trainer = make_trainer(lm, method, examples, config, folder, validate=validate, held_out=held_out)
    return run_trainer(trainer, folder, run_info, resume, held_out)


def make_trainer(
    lm: LatentLM,
    method: Method,
    examples: Iterable[Example],
    config: TrainingConfig,
    folder: RunFolder,
    *,
    validate: Validate | None = None,
    held_out: Sequence[Example] = (),
) -> LatentTrainer:
    """The trainer of `train`, before a step is made and a file written. ValueError for wrong rows or configuration."""
    config = config.resolved()
    config.check_method(method)
    args = put_on_device(lm, config, folder)
    config.check_validation(validate is not None)
    if config.fsdp and args.world_size == 1:
        raise ValueError("training.fsdp splits weights between processes: start them with torchrun")
    examples = list(method.prepare(lm, examples))
    # The rows of one update on all devices: together they are of like length.
    rows_per_update = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    rows, first_lengths, curriculum = fitting_rows(lm, method, examples, config, rows_per_update)
    schedule = RowSchedule(
        rows.examples, first_lengths, config.seed, rows_per_update, config.draws_per_example
    )
    # If some examples have chains, those without one would make the loss another quantity.
    scored = [example for example in held_out if example.steps] or held_out
    held_out_rows = TrainingRows(lm, method, scored, config.seed) if scored else None
    if held_out_rows is not None:
        # Checked now, as the first validation may be hours away.
        lengths = held_out_rows.lengths(curriculum.stage_epochs(), "validation")
        held_out_rows.examples = held_out_rows.fitting(lengths, "validation rows")
    return LatentTrainer(Objective(lm, method), args, config, rows, schedule, validate, held_out_rows)


def fitting_rows(
    lm: LatentLM, method: Method, examples: list[Example], config: TrainingConfig, rows_per_update: int
) -> tuple[TrainingRows, list[int], Curriculum]:
    """The rows that fit the model's context in every stage, their lengths in the first one, and the curriculum."""
    n_draws = config.draws_per_example
    epochs: list[float] = []
    lengths: list[list[int]] = []
    # Repeated without those that are too long, because with fewer rows the stages may begin at other epochs.
    while True:
        rows = TrainingRows(lm, method, examples, config.seed, n_draws)
        # Trainer computes the same, but its loader needs rows whose lengths are known.
        per_epoch = math.ceil(len(examples) * n_draws / rows_per_update)
        by_epochs = math.ceil(per_epoch * config.num_train_epochs)
        curriculum = Curriculum(method, per_epoch, config.max_steps if config.max_steps > 0 else by_epochs)
        if curriculum.stage_epochs() != epochs:
            epochs = curriculum.stage_epochs()
            lengths = rows.lengths(epochs)
        fitting = rows.fitting(lengths, "training rows")
        if len(fitting) == len(examples):
            return rows, [of_row[0] for of_row in lengths], curriculum
        examples = fitting
        lengths = [of_row for of_row in lengths if max(of_row) <= rows.context]
