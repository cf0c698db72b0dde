"""Training by GRPO: `train`, the call that a recipe's `grpo` section makes.

The run folder, resume, validation, the published checkpoint and the result are those of SFT (`resumable_run.py`).
`completions.jsonl` in the folder holds outputs to read. The model is validated before the first step too: a run that
makes it worse publishes the weights that it started from.

    step          0                 4                 8
    generation    |-- generation 0 --|-- generation 1 --|-- generation 2 --      here: four updates with each
    validation    *          *          *          *
    checkpoint         |          |     X kill
    resume                        '-- generation 1 is read from the checkpoint, its last update is made again
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from colar import files, progress
from colar.data.example import Example
from colar.engine.prompt import fitting_questions
from colar.methods import registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.training.config import TrainingConfig
from colar.training.grpo import rewards, rollout
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.generation import QuestionSchedule, RolloutSampler
from colar.training.grpo.loss import GrpoObjective
from colar.training.grpo.rollout import RollOut
from colar.training.grpo.trainer import GrpoTrainer, dropout_rates_zeroed
from colar.training.resumable_run import TrainResult, place, run_trainer
from colar.training.run_folder import RunFolder
from colar.training.trainer import Validate

__all__ = ["GrpoConfig", "train"]


def train(
    lm: LatentLM,
    method: Method,
    examples: Iterable[Example],
    config: TrainingConfig,
    grpo: GrpoConfig,
    output: str | Path,
    *,
    reward_funcs: Mapping[str, rewards.Reward] | None = None,
    roll_out: RollOut | None = None,
    validate: Validate | None = None,
    run_info: Mapping[str, Any] | None = None,
    resume: bool = True,
    callbacks: Iterable[TrainerCallback] = (),
) -> TrainResult:
    """Train `lm`, which has learnt to think by `method`, on its own outputs to the questions of `examples`.

    `reward_funcs` by name take the place of those that `grpo.reward_funcs` names. To resume, hand over the model that
    the run was started with. `roll_out` samples in place of this process, where `grpo.rollout_workers` says so.
    Otherwise as `sft.train`.

    Raises ValueError before the first step for wrong questions or configuration, and `NonFiniteError` when a loss, a
    gradient or an output is not finite.
    """
    config.check_installed()
    folder = RunFolder(files.require_writable(output))
    trainer = make_trainer(
        lm, method, examples, config, grpo, folder,
        reward_funcs=reward_funcs, roll_out=roll_out, validate=validate,
    )  # fmt: skip
    stopping = EarlyStopping(grpo.early_stopping_patience)
    info = {"grpo": dataclasses.asdict(grpo), **(run_info or {})}
    # Also in train mode: ratios compare the model that is scored with the one that sampled.
    with dropout_rates_zeroed(lm):
        return run_trainer(trainer, folder, info, resume, [stopping, *callbacks], stopping.out_of_patience)


def make_trainer(
    lm: LatentLM,
    method: Method,
    examples: Iterable[Example],
    config: TrainingConfig,
    grpo: GrpoConfig,
    folder: RunFolder,
    *,
    reward_funcs: Mapping[str, rewards.Reward] | None = None,
    roll_out: RollOut | None = None,
    validate: Validate | None = None,
) -> GrpoTrainer:
    """The trainer of `train`, before anything is sampled. ValueError for wrong questions or configuration."""
    if config.fsdp:
        raise ValueError(
            "training.fsdp is for SFT: grpo samples from the model, of which no process would have all weights"
        )
    if grpo.rollout_workers and roll_out is None:
        raise ValueError(
            "grpo.rollout_workers is for a recipe, by colar.train; here it must be 0, or roll_out given"
        )
    objective = GrpoObjective(lm, method, grpo)  # an error for a method without log-probs
    funcs = rewards.by_name(grpo.reward_funcs) if reward_funcs is None else dict(reward_funcs)
    config = config.resolved()
    args = place(lm, config, folder)
    # The start can be the best: it is published where nothing after it was better.
    args.eval_on_start = True
    plan = grpo.plan(config, args.world_size)
    examples = list(examples)
    # The rows that it would make are for SFT.
    method.prepare(lm, examples)
    examples = _checked_questions(lm, method, grpo, examples)
    schedule = QuestionSchedule(examples, config.seed, plan)
    sampler = RolloutSampler(lm, method, grpo, schedule, config.seed, funcs, roll_out or rollout.roll_out)
    return GrpoTrainer(objective, args, config, sampler, folder.completions, validate)


def _checked_questions(
    lm: LatentLM, method: Method, grpo: GrpoConfig, examples: Sequence[Example]
) -> list[Example]:
    """The examples whose questions fit the context within the limits of generation; logs how many do not.

    ValueError for twin ids, a factor that cannot work, and where more than half of the questions are too long.
    """
    ids = {example.id for example in examples}
    if len(ids) < len(examples):
        raise ValueError("some questions are there twice: draws are functions of a question's id")
    # Each value once, in their order.
    values_of = {name: list(dict.fromkeys(values)) for name, values in grpo.param_choices.items()}
    params = []
    for combination in itertools.product(*values_of.values()):
        params.append(registry.make_params(method, dict(zip(values_of, combination, strict=True))))
    for values in params:
        warning = method.check_params(values)
        if warning:
            progress.say(f"warning: {method.name}: {warning}")
    remedy = "lower grpo.max_latents or grpo.max_completion_length to take them"
    return fitting_questions(lm, method, examples, params, grpo.decoding, "questions", remedy)


class EarlyStopping(TrainerCallback):  # type: ignore[misc]
    """Stops after `patience` validations without a new best.

    It reads them off the history: a resumed run stops where an uninterrupted one does.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.out_of_patience(state):
            progress.say(
                f"no better validation in {self.patience}: the run stops at step {state.global_step}"
            )
            # The checkpoint holds the history, by which a resumed run finds that it has ended.
            control.should_training_stop = True
            control.should_save = True

    def out_of_patience(self, state: TrainerState) -> bool:
        """True where the last `patience` validations were no better than one before them."""
        # The validation before the first step counts too.
        accuracies = [row["eval_accuracy"] for row in state.log_history if "eval_accuracy" in row]
        if self.patience is None or len(accuracies) <= self.patience:
            return False
        return bool(max(accuracies[-self.patience :]) <= max(accuracies[: -self.patience]))
