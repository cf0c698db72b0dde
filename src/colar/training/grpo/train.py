"""GRPO: `train`, the call that a recipe's `grpo` section makes, and its trainer.

The run folder, resume, validation, the published checkpoint and the result are those of SFT (`resumable_run.py`). The
model is also validated before the first step: a run that makes it worse publishes the weights that it started from.

    step          0                 4                 8
    generation    |-- generation 0 --|-- generation 1 --|-- generation 2 --      here: four updates with each
    validation    *          *          *          *
    checkpoint         |          |     X kill
    resume                        '-- generation 1 is read from the checkpoint, its last update is made again

The outputs of a generation were sampled by weights that are gone after its first update, so they cannot be made again:
a save in the middle of one holds them and their old log-probs (rollouts.safetensors). A save between two generations
holds no outputs: the next generation follows from the weights, the seed and its number.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from colar import checks, files, progress
from colar.data.example import Example
from colar.engine.request import fitting_questions
from colar.methods import registry
from colar.methods.base import Method
from colar.methods.rollouts import Rollouts
from colar.model.latent_lm import LatentLM
from colar.training.config import TrainingConfig
from colar.training.grpo import rewards
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.generation import Generation, QuestionSchedule, RolloutSampler, Slots, collate_slots
from colar.training.grpo.loss import GrpoObjective
from colar.training.objective import part_indices, take
from colar.training.resumable_run import TrainResult, put_on_device, run_trainer
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer, Validate

STATE = "grpo.json"
ROLLOUTS = "rollouts.safetensors"
SIZES_STAY = (
    "the questions, per_device_train_batch_size, gradient_accumulation_steps, grpo.steps_per_generation, "
    "grpo.num_iterations and grpo.num_generations must stay the same"
)
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
) -> "GrpoTrainer":
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


class GrpoTrainer(LatentTrainer):
    """Trainer of GRPO. `completions` is the file to which records of outputs are appended."""

    samples: ClassVar[bool] = True
    objective: GrpoObjective

    def __init__(
        self,
        objective: GrpoObjective,
        args: TrainingArguments,
        config: TrainingConfig,
        sampler: RolloutSampler,
        completions: Path,
        validate: Validate | None = None,
    ) -> None:
        schedule = sampler.schedule
        super().__init__(objective, args, config, Slots(len(schedule)), schedule, validate)
        self.data_collator = collate_slots
        self.sampler = sampler
        self.plan = schedule.plan
        self.completions = completions
        self.reference = ReferenceWeights(objective.lm) if objective.grpo.beta > 0 else None
        self.generation: Generation | None = None
        self.unlogged_metrics: list[dict[str, float]] = []

    # Outputs

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The outputs of one update, and their number; a new generation is sampled, rewarded and scored first."""
        keys, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = []
        for batch in keys:
            tensors = self._tensors_of(int(batch["generations"][0]))
            batches.append(take(tensors, self._learnt(tensors, batch["slots"])))
        return batches, count

    def _learnt(self, tensors: dict[str, Tensor], slots_B: Tensor) -> Tensor:
        """Those of a batch's outputs that have a gradient: none in a group without spread, whose advantages are 0.

        The others are not computed. They still count in the number of outputs that the loss is divided by.
        """
        # The KL divergence has a gradient in every output.
        if self.reference is not None:
            return slots_B
        learnt_B = slots_B[(tensors["advantages"][slots_B] != 0) & tensors["kept"][slots_B]]
        # At least one, because processes add up their gradients in the backward pass.
        return learnt_B if len(learnt_B) else slots_B[:1]

    def positions(self, inputs: dict[str, Tensor]) -> Tensor:
        """Upper bound of the positions fed for each output, (B,): question, thoughts, the separator, the answer."""
        rollouts = Rollouts.from_tensors(inputs)
        return rollouts.question_lengths + rollouts.action_positions()

    def longest_batch(self) -> dict[str, Tensor]:
        """The longest batch of generation 0, which is sampled here and cached: the first update learns from it."""
        tensors = self._tensors_of(0)
        return take(tensors, self.positions(tensors).argsort(descending=True)[: self.plan.batch])

    def _tensors_of(self, number: int) -> dict[str, Tensor]:
        """The outputs of a generation, which is sampled when it is due."""
        if self.generation is None or self.generation.number != number:
            self.generation = self._generate(number)
        return self.generation.tensors

    def _generate(self, number: int) -> Generation:
        """Sample a generation, score it if its updates need old or reference log-probs, and record some outputs."""
        # Outputs are scored in the mode of the updates.
        self.objective.train()
        # Compiled layers would recompile for every shape of a decode step.
        with torch.compiler.set_stance("force_eager"):
            generation = self.sampler.generate(number)
        # With a single update the current weights are the old ones, so the ratio is 1 without scoring.
        if self.plan.updates_per_generation > 1:
            generation.tensors["old_logps"] = self.action_logps(generation.tensors)
        if self.reference is not None:
            with self.reference.in_model():
                generation.tensors["ref_logps"] = self.action_logps(generation.tensors)
        self.unlogged_metrics.append(generation.metrics)
        if self.is_world_process_zero():
            with files.append_jsonl(self.completions) as write:
                for record in generation.records:
                    write({"step": self.state.global_step, "generation": number, **record})
        return generation

    @torch.no_grad()
    def action_logps(self, tensors: dict[str, Tensor]) -> Tensor:
        """The present weights' log-probs of a generation, (R, N) on the CPU; 0 in outputs that no update computes.

        Batches and precision are those of the updates, so that the very first ratio is exactly 1. Each process scores
        the batches that it learns from.
        """
        rollouts = Rollouts.from_tensors(tensors)
        R = rollouts.token_lengths.shape[0]
        logps_RN = torch.zeros(R, int(rollouts.action_positions().max()))
        size = self.plan.batch
        state = self.accelerator.state
        scored = []
        for start in range(size * state.process_index, R, size * state.num_processes):
            places = self._learnt(tensors, torch.arange(start, min(start + size, R)))
            positions_B = self.positions(take(tensors, places))
            for index in part_indices(positions_B, self.tokens_per_batch):
                # Trainer wraps the objective's own forward in the same autocast.
                with self.accelerator.autocast():
                    logps_BN = self.objective.score_actions(take(tensors, places[index])).logps
                scored.append((places[index], logps_BN.float()))
        # Moved to the CPU after the loop, so that no part waits for a GPU before the next one is queued.
        for index, logps_BN in gather_object([(places, logps_BN.cpu()) for places, logps_BN in scored]):
            # A part is as wide as its own longest output, which may be less than the generation's.
            logps_RN[index, : logps_BN.shape[1]] = logps_BN
        return logps_RN

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a training row the means over the generations that were sampled since the last row."""
        if "loss" in logs:
            # A generation may lack a metric, where no output had a value for it.
            for name in dict.fromkeys(itertools.chain.from_iterable(self.unlogged_metrics)):
                values = [metrics[name] for metrics in self.unlogged_metrics if name in metrics]
                logs[name] = sum(values) / len(values)
            self.unlogged_metrics = []
        super().log(logs, start_time)

    # Resume state

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained weights, and the generation that is in use."""
        super().save_model(output_dir, _internal_call)
        # Every process has the whole generation; one writes.
        if not self.args.should_save:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        used_up = self.state.global_step % self.plan.updates_per_generation == 0
        in_use = None if used_up else self.generation
        if in_use is not None:
            # safetensors takes contiguous tensors only.
            tensors = {name: column.contiguous() for name, column in in_use.tensors.items()}
            save_file(tensors, folder / ROLLOUTS)
        lowered = self.tokens_per_batch != self.config.tokens_per_batch
        state = {
            "plan": self._plan(),
            "length": self.sampler.dr_grpo_length,
            "generation": None if in_use is None else in_use.number,
            # Saved if the longest batch did not fit, because a resumed run does not sample one to measure it.
            "tokens_per_batch": self.tokens_per_batch if lowered else None,
        }
        files.write_json(folder / STATE, state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        state = files.read_json(folder / STATE)
        checks.check_same_run(folder, state["plan"], self._plan(), SIZES_STAY)
        self.sampler.dr_grpo_length = state["length"]
        fitted = state["tokens_per_batch"]
        if fitted is not None:
            self.tokens_per_batch = min(fitted, self.tokens_per_batch or fitted)
        if state["generation"] is not None:
            # Its metrics and records were logged before the save.
            tensors = load_file(folder / ROLLOUTS)
            self.generation = Generation(state["generation"], tensors, metrics={}, records=[])

    def _plan(self) -> dict[str, int]:
        """The sizes by which a generation's number and an output's slot refer to questions and outputs."""
        questions = self.sampler.schedule.generations_per_epoch * self.plan.questions
        return {"questions": questions, **dataclasses.asdict(self.plan)}


class ReferenceWeights:
    """A copy of the trained weights at construction, for the KL divergence."""

    def __init__(self, lm: LatentLM) -> None:
        self.trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
        self.stored = [parameter.detach().clone() for parameter in self.trained]

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the reference weights into the model inside the block, and the current ones back after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, stored in zip(self.trained, self.stored, strict=True):
            present = parameter.detach().clone()
            parameter.copy_(stored)
            stored.copy_(present)


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
