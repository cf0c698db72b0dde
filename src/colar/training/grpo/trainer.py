"""The trainer of GRPO: it samples a generation when it is due, scores it, and saves it in mid-use.

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
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from colar import checks, files
from colar.methods.rollouts import Rollouts
from colar.model.latent_lm import LatentLM
from colar.training.config import TrainingConfig
from colar.training.grpo.generation import Generation, RolloutSampler, collate_outputs
from colar.training.grpo.loss import GrpoObjective
from colar.training.objective import part_indices, take
from colar.training.trainer import LatentTrainer, Validate

STATE = "grpo.json"
ROLLOUTS = "rollouts.safetensors"
SIZES_STAY = (
    "the questions, per_device_train_batch_size, gradient_accumulation_steps, grpo.steps_per_generation, "
    "grpo.num_iterations and grpo.num_generations must stay the same"
)


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
        # The loader hands on the outputs' numbers alone: one is sampled when it is due, by the weights at that time.
        super().__init__(objective, args, config, range(sys.maxsize), schedule, validate)
        self.data_collator = collate_outputs
        self.sampler = sampler
        self.plan = schedule.plan
        self.completions = completions
        self.reference = ReferenceWeights(objective.lm) if objective.grpo.beta > 0 else None
        self.generation: Generation | None = None
        self.unlogged_metrics: list[dict[str, float]] = []

    # Outputs

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """The outputs of an epoch, from which transformers computes rates."""
        return len(self.sampler.schedule)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The outputs of one update, and their number; a new generation is sampled, rewarded and scored first."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        learnt = []
        for batch in batches:
            # A batch's outputs are all of one generation.
            tensors = self._tensors_of(int(batch["outputs"][0]) // self.plan.outputs)
            learnt.append(take(tensors, self._learnt(tensors, batch["outputs"] % self.plan.outputs)))
        return learnt, count

    def _learnt(self, tensors: dict[str, Tensor], places_B: Tensor) -> Tensor:
        """Those of a batch's outputs that have a gradient: none in a group without spread, whose advantages are 0.

        The others are not computed. They still count in the number of outputs that the loss is divided by.
        """
        # The KL divergence has a gradient in every output.
        if self.reference is not None:
            return places_B
        learnt_B = places_B[(tensors["advantages"][places_B] != 0) & tensors["kept"][places_B]]
        # At least one, because processes add up their gradients in the backward pass.
        return learnt_B if len(learnt_B) else places_B[:1]

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
        """The sizes by which an output's number refers to questions and outputs."""
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
