"""GRPO: `train`, the call that a recipe's `grpo` section makes.

The run folder, resume, validation, the published checkpoint and the result are those of SFT (`resumable_run.py`). The
model is also validated before the first step: a run that makes it worse publishes the weights that it started from.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from colar import files, progress
from colar.data.example import Example
from colar.engine.request import fitting_questions
from colar.methods import registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.training.config import TrainingConfig
from colar.training.grpo import rewards
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.generation import QuestionSchedule, RolloutSampler
from colar.training.grpo.loss import GrpoObjective
from colar.training.grpo.trainer import GrpoTrainer
from colar.training.resumable_run import TrainResult, put_on_device, run_trainer
from colar.training.run_folder import RunFolder
from colar.training.trainer import Validate

DROPOUT = re.compile("dropout|pdrop|jitter")
"""Attributes in which modules keep rates of dropout, or of noise in the choice of experts."""


def train(
    lm: LatentLM,
    method: Method,
    examples: Iterable[Example],
    config: TrainingConfig,
    grpo: GrpoConfig,
    output: str | Path,
    *,
    reward_funcs: Mapping[str, rewards.Reward] | None = None,
    validate: Validate | None = None,
    held_out: Iterable[Example] = (),
    run_info: Mapping[str, Any] | None = None,
    resume: bool = True,
) -> TrainResult:
    """Train `lm`, which has learnt to think by `method`, on its own outputs to the questions of `examples`.

    `reward_funcs`, by name, replace those of `grpo.reward_funcs`. `held_out` are the questions of `validate`. To
    resume, pass the same questions, and the model that the run was started with. The other arguments are those of
    `sft.train`.

    Raises ValueError before the first step for wrong questions or configuration, and `NonFiniteError` when a loss, a
    gradient or an output is not finite.
    """
    config.check_installed()
    folder = RunFolder(files.require_writable(output))
    trainer = make_trainer(
        lm, method, examples, config, grpo, folder, reward_funcs=reward_funcs, validate=validate
    )
    stopping = EarlyStopping(grpo.early_stopping_patience)
    trainer.add_callback(stopping)
    info = {"grpo": dataclasses.asdict(grpo), **(run_info or {})}
    return run_trainer(trainer, folder, info, resume, list(held_out), stopping.out_of_patience)


def make_trainer(
    lm: LatentLM,
    method: Method,
    examples: Iterable[Example],
    config: TrainingConfig,
    grpo: GrpoConfig,
    folder: RunFolder,
    *,
    reward_funcs: Mapping[str, rewards.Reward] | None = None,
    validate: Validate | None = None,
) -> GrpoTrainer:
    """The trainer of `train`, before anything is sampled. ValueError for wrong questions or configuration."""
    objective = GrpoObjective(lm, method, grpo)  # an error for a method without log-probs
    funcs = rewards.by_name(grpo.reward_funcs) if reward_funcs is None else dict(reward_funcs)
    config = config.resolved()
    args = put_on_device(lm, config, folder)
    zero_dropout(lm)
    # The initial weights can be the best: they are published if no later ones are better.
    args.eval_on_start = True
    plan = grpo.plan(config, args.world_size)
    examples = list(examples)
    # Called for its effects on method and weights: the rows that it returns are for SFT.
    method.prepare(lm, examples)
    examples = _checked_questions(lm, method, grpo, examples)
    schedule = QuestionSchedule(examples, config.seed, plan)
    sampler = RolloutSampler(lm, method, grpo, schedule, funcs)
    return GrpoTrainer(objective, args, config, sampler, folder.completions, validate)


def _checked_questions(
    lm: LatentLM, method: Method, grpo: GrpoConfig, examples: Sequence[Example]
) -> list[Example]:
    """The examples whose questions fit the context within the limits of generation; logs how many do not.

    ValueError for duplicate ids, values that cannot work, or if more than half of the questions are too long.
    """
    ids = {example.id for example in examples}
    if len(ids) < len(examples):
        raise ValueError("some questions are there twice: draws are functions of a question's id")
    params = []
    # Each combination of values once, in their order.
    for values in itertools.product(*map(dict.fromkeys, grpo.param_choices.values())):
        drawn = registry.make_params(method, dict(zip(grpo.param_choices, values, strict=True)))
        warning = method.check_params(drawn)
        if warning:
            progress.say(f"warning: {method.name}: {warning}")
        params.append(drawn)
    # Only the speed's text makes one prompt longer than another.
    params = list({method.speed_text(drawn): drawn for drawn in params}.values())
    remedy = "lower grpo.max_latents or grpo.max_completion_length to take them"
    return fitting_questions(lm, method, examples, params, grpo.decoding, "questions", remedy)


def zero_dropout(lm: LatentLM) -> None:
    """Turn dropout off, in train mode too: ratios compare the model that scores with the one that sampled."""
    for module in lm.modules():
        for name, value in vars(module).items():
            is_rate = name == "p" if isinstance(module, nn.Dropout) else DROPOUT.search(name)
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)


class EarlyStopping(TrainerCallback):  # type: ignore[misc]
    """Stops after `patience` validations without a new best.

    Counts them from the history, so that a resumed run stops where an uninterrupted one does.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.out_of_patience(state):
            progress.say(
                f"no better validation in {self.patience}: the run stops at step {state.global_step}"
            )
            # From the checkpoint's history, a resumed run knows that it has ended.
            control.should_training_stop = True
            control.should_save = True

    def out_of_patience(self, state: TrainerState) -> bool:
        """True where the last `patience` validations were no better than one before them."""
        # The validation before the first step counts too.
        accuracies = [row["eval_accuracy"] for row in state.log_history if "eval_accuracy" in row]
        if self.patience is None or len(accuracies) <= self.patience:
            return False
        return bool(max(accuracies[-self.patience :]) <= max(accuracies[: -self.patience]))
