"""Supervised fine-tuning of any method: `train`, its configuration and what comes out of it.

A run lives in one folder (`run_folder.py`). The same call goes on from its last whole checkpoint, and ends as
an uninterrupted run would have: rows, draws, order, optimiser and random numbers are the same. On several
devices start it with torchrun: the main process validates and writes, the others wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from colar import files
from colar.data.example import Example
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.training.batches import RowSchedule, TrainingRows
from colar.training.config import TrainingConfig
from colar.training.objective import Objective
from colar.training.run import TrainResult, arguments, run_trainer
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer, Validate

__all__ = ["TrainResult", "TrainingConfig", "train"]


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
    """Train `lm` by `method` on `examples` in the run folder `output`, or go on where that run stopped.

    `validate` returns at least {"accuracy": 0..1}; the checkpoint with the highest is published in `best/`, the
    first of equals (without it, or with `load_best_model_at_end` false, the last weights), and `lm` ends with those
    weights. The loss on the examples `held_out` is logged at each validation. `run_info` is kept in its colar.json.
    With `resume` false what an earlier run left in the folder is removed.

    Raises ValueError before the first step for whatever is wrong with rows and configuration, and
    `NonFiniteError` when loss or gradient is NaN or infinite.
    """
    config.check_installed()
    folder = RunFolder(files.require_writable(output))
    args = arguments(config, folder)
    lm.to(args.device)
    examples = list(method.prepare(lm, examples))
    rows = TrainingRows(lm, method, examples, config.seed)
    rows_per_update = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    schedule = RowSchedule(examples, rows.lengths(), config.seed, rows_per_update)
    others = [example for example in held_out if example.steps]
    trainer = LatentTrainer(
        Objective(lm, method),
        args,
        rows,
        schedule,
        config.modules_learning_rate,
        validate,
        TrainingRows(lm, method, others, config.seed) if others else None,
    )
    info = {"seed": config.seed, "training": dataclasses.asdict(config), **(run_info or {})}
    return run_trainer(trainer, config, folder, info, resume)
