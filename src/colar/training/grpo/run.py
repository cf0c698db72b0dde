"""Training by GRPO: `train`, the call that a recipe's `grpo` section makes.

The run folder, resume, validation and the published checkpoint are those of SFT (`sft.py`), and so is what comes out;
`completions.jsonl` in it holds outputs to read. The model is validated before the first step too: a run that makes it
worse publishes what it started from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import files, progress
from colar.data.example import Example
from colar.engine.request import Request, prompt_ids
from colar.methods import registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.training import run_folder
from colar.training.config import TrainingConfig
from colar.training.grpo import rewards
from colar.training.grpo.callbacks import Collapse, EarlyStopping
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.loss import GrpoObjective
from colar.training.grpo.sampler import RolloutSampler
from colar.training.grpo.schedule import QuestionSchedule
from colar.training.grpo.trainer import GrpoTrainer, without_dropout
from colar.training.run import TrainResult, arguments, run_trainer
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
    validate: Validate | None = None,
    run_info: Mapping[str, Any] | None = None,
    resume: bool = True,
) -> TrainResult:
    """Train `lm`, which has learnt to think by `method`, on its own outputs to the questions of `examples`.

    `reward_funcs` by name take the place of those that `grpo.reward_funcs` names. To resume, hand over the model that
    the run was started with. Otherwise as `sft.train`.

    Raises ValueError before the first step for whatever is wrong with questions and configuration, and
    `NonFiniteError` when a loss, a gradient or an output is not finite.
    """
    config.check_installed()
    objective = GrpoObjective(lm, method, grpo)
    plan = grpo.plan(config)
    funcs = rewards.named(grpo.reward_funcs) if reward_funcs is None else dict(reward_funcs)
    if len(funcs) != len(grpo.weights()):
        raise ValueError(
            f"grpo.reward_weights has {len(grpo.weights())} values for {len(funcs)} reward functions"
        )
    folder = RunFolder(files.require_writable(output))
    args = arguments(config, folder)
    args.eval_on_start = True
    if args.world_size > 1:
        raise ValueError("grpo runs on one process, not under torchrun")
    lm.to(args.device)
    examples = list(method.prepare(lm, examples))
    check_questions(lm, method, grpo, examples)
    schedule = QuestionSchedule(examples, config.seed, plan)
    sampler = RolloutSampler(lm, method, grpo, schedule, config.seed, funcs)
    trainer = GrpoTrainer(
        objective, args, sampler, folder.completions, config.modules_learning_rate, validate
    )
    resume_from = folder.last_checkpoint() if resume else None
    if folder.completions.exists():
        with files.alone(folder.path):  # another process's outputs are not ours to drop
            forget_completions(
                folder.completions,
                0 if resume_from is None else run_folder.read_state(resume_from).global_step,
            )
    stopping = EarlyStopping(grpo.early_stopping_patience)
    info = {"seed": config.seed, "training": dataclasses.asdict(config), "grpo": dataclasses.asdict(grpo)}
    with without_dropout(lm):
        return run_trainer(
            trainer,
            config,
            folder,
            {**info, **(run_info or {})},
            resume,
            callbacks=[stopping, Collapse()],
            stopped_for_good=stopping.out_of_patience,
        )


def check_questions(lm: LatentLM, method: Method, grpo: GrpoConfig, examples: Sequence[Example]) -> None:
    """ValueError for a question that does not fit the context, twin ids, or a factor that cannot work."""
    if len({example.id for example in examples}) < len(examples):
        raise ValueError("some questions are there twice: draws are functions of a question's id")
    factors = grpo.compression_factors
    params = [method.Params()]
    if factors is not None:
        params = [registry.make_params(method, {"compression_factor": c}) for c in dict.fromkeys(factors)]
    for each in params:
        if warning := method.trained(each):
            progress.say(f"warning: {method.name}: {warning}")
    for example in progress.track(examples, "check questions"):
        for each in params:
            prompt_ids(lm, method, Request(example.id, example.question, each, grpo.decoding))


def forget_completions(completions: Path, step: int) -> None:
    """Drop the outputs that a killed run wrote down after its last checkpoint: they come again."""
    kept = [record for record in files.resume_jsonl(completions) if record["step"] < step]
    files.write_jsonl(completions, kept)
