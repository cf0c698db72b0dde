"""Trainer for GRPO: `LatentTrainer` whose batches are taken from a generation that is sampled when it is due.

    schedule      (generation 7, slot 0), (7, 1), ...          which outputs a batch holds
    get_batch_samples    is it a new generation? -> sample it, reward it, score it; then take the batches' rows
    objective     loss of the rows -> gradient
    optimiser     after `accumulate` batches: one update; the weights are no longer those that sampled

A save in the middle of a generation:

    generation 7    update 1 | update 2 | save | update 3 | update 4
                                          '-- rollouts.safetensors holds its outputs and old log-probs

The outputs were sampled by weights that are gone by then, so they cannot be made again. A save between two generations
holds no outputs: the next generation follows from the weights, the seed and its number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainingArguments

from colar import checks, files
from colar.methods.rollouts import Rollouts
from colar.model.latent_lm import LatentLM
from colar.training.config import TrainingConfig
from colar.training.grpo.generation import Generation, RolloutSampler, Slots, collate_slots
from colar.training.grpo.loss import GrpoObjective
from colar.training.rows import part_indices, take
from colar.training.trainer import LatentTrainer, Validate

STATE = "grpo.json"
ROLLOUTS = "rollouts.safetensors"
SIZES_STAY = (
    "the questions, per_device_train_batch_size, gradient_accumulation_steps, grpo.steps_per_generation, "
    "grpo.num_iterations and grpo.num_generations must stay the same"
)
DROPOUT_ATTRIBUTES = ("attention_dropout", "attn_dropout", "dropout")
"""Names under which attention modules keep a rate of dropout of their own."""


class GrpoTrainer(LatentTrainer):
    """`completions` is the file that outputs to read are appended to."""

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
        """The outputs of one update, and their number; a new generation is sampled first."""
        keys, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return [self._rows(batch) for batch in keys], count

    def positions(self, inputs: dict[str, Tensor]) -> Tensor:
        """At least the positions that are fed for each output, (B,): question, thoughts, the separator, the answer."""
        rollouts = Rollouts.from_tensors(inputs)
        return rollouts.question_lengths + rollouts.action_positions()

    def longest_sampled(self) -> dict[str, Tensor]:
        """Of generation 0, which is sampled here and cached: the first update learns from it."""
        if self.generation is None:
            self.generation = self._generate(0)
        positions_R = self.positions(self.generation.tensors)
        return take(self.generation.tensors, positions_R.argsort(descending=True)[: self.plan.batch])

    def _rows(self, keys: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs that a batch's keys stand for."""
        number = int(keys["generations"][0])
        if self.generation is None or self.generation.number != number:
            self.generation = self._generate(number)
        return take(self.generation.tensors, keys["slots"].cpu())

    def _generate(self, number: int) -> Generation:
        """Sample a generation, score it where a later update will need that, and write some outputs down."""
        # Outputs are scored in the mode of the updates.
        self.objective.train()
        # Compiled layers would be compiled anew for every shape of a decode step.
        with torch.compiler.set_stance("force_eager"):
            generation = self.sampler.generate(number)
        # With a single update the present weights are the old ones, and the ratio is 1 without a score.
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
        """The present weights' log-probs of a generation, (R, N) on the CPU.

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
            places = torch.arange(start, min(start + size, R))
            positions_B = self.positions(take(tensors, places))
            for index in part_indices(positions_B, self.tokens_per_batch):
                # Trainer wraps the objective's own forward in the same autocast.
                with self.accelerator.autocast():
                    logps_BN = self.objective.score_actions(take(tensors, places[index])).logps
                scored.append((places[index], logps_BN.float()))
        # A GPU is waited for once, not at every part.
        for index, logps_BN in gather_object([(places, logps_BN.cpu()) for places, logps_BN in scored]):
            # A part may be shorter than the generation: its longest output decides.
            logps_RN[index, : logps_BN.shape[1]] = logps_BN
        return logps_RN

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a row of training the means over the generations that were sampled since the last row."""
        if "loss" in logs:
            collected: dict[str, list[float]] = {}
            for metrics in self.unlogged_metrics:
                for name, value in metrics.items():
                    collected.setdefault(name, []).append(value)
            # A generation may lack a metric, where no output had a value for it.
            for name, values in collected.items():
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
        state: dict[str, Any] = {
            "plan": self._plan(),
            "length": self.sampler.dr_grpo_length,
            "generation": None,
            "tokens_per_batch": None,
        }
        # Where the longest batch did not fit: a run that resumes does not sample one to measure it.
        if self.tokens_per_batch != self.config.tokens_per_batch:
            state["tokens_per_batch"] = self.tokens_per_batch
        used_up = self.state.global_step % self.plan.updates_per_generation == 0
        if self.generation is not None and not used_up:
            state["generation"] = self.generation.number
            # safetensors takes contiguous tensors only.
            tensors = {name: column.contiguous() for name, column in self.generation.tensors.items()}
            save_file(tensors, folder / ROLLOUTS)
        files.write_json(folder / STATE, state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        state = files.read_json(folder / STATE)
        checks.check_same_run(folder, state["plan"], self._plan(), SIZES_STAY)
        self.sampler.dr_grpo_length = state["length"]
        # Absent in earlier checkpoints.
        fitted = state.get("tokens_per_batch")
        if fitted is not None:
            self.tokens_per_batch = min(fitted, self.tokens_per_batch or fitted)
        if state["generation"] is not None:
            # Its metrics and records were logged before the save.
            tensors = load_file(folder / ROLLOUTS)
            self.generation = Generation(state["generation"], tensors, metrics={}, records=[])

    def _plan(self) -> dict[str, int]:
        """The sizes that give meaning to the number of a generation and the slot of an output."""
        questions = self.sampler.schedule.generations_per_epoch * self.plan.questions
        return {"questions": questions, **asdict(self.plan)}


class ReferenceWeights:
    """The trained weights as they were when this was made, for the KL divergence."""

    def __init__(self, lm: LatentLM) -> None:
        self.trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
        self.stored = [parameter.detach().clone() for parameter in self.trained]

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Put them into the model inside the block, and the present weights back after it."""
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


@contextlib.contextmanager
def dropout_rates_zeroed(lm: LatentLM) -> Iterator[None]:
    """No dropout inside the block, in train mode either: the model that is scored is the one that sampled."""
    rates: list[tuple[nn.Module, str, float]] = []
    for module in lm.modules():
        names = ("p",) if isinstance(module, nn.Dropout) else DROPOUT_ATTRIBUTES
        for name in names:
            value = getattr(module, name, None)
            # Under the same name some families keep a Dropout module, which is met by itself.
            if isinstance(value, float) and value > 0:
                rates.append((module, name, value))
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)
