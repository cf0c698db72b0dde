"""Trainer for GRPO: `LatentTrainer` whose batches are taken from a generation that is sampled when it is due.

The order of rows says which outputs of which generation a batch holds; `_prepare_inputs`, where Trainer moves a batch
to the device, samples the generation if it is a new one. Everything else is Trainer's. A checkpoint in the middle of a
generation holds its outputs (`rollouts.safetensors`): they were sampled by weights that are gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainingArguments

from colar import checks, files
from colar.methods.rollouts import Rollouts
from colar.model.latent_lm import LatentLM
from colar.training.grpo.generation import Generation
from colar.training.grpo.loss import GrpoObjective
from colar.training.grpo.sampler import RolloutSampler
from colar.training.grpo.schedule import Slots, collate_slots
from colar.training.trainer import LatentTrainer, Validate

STATE = "grpo.json"
ROLLOUTS = "rollouts.safetensors"
SIZES_STAY = (
    "the questions, per_device_train_batch_size, gradient_accumulation_steps, grpo.steps_per_generation, "
    "grpo.num_iterations and grpo.num_generations must stay the same"
)


class GrpoTrainer(LatentTrainer):
    """`completions` is the file that outputs to read are appended to."""

    def __init__(
        self,
        objective: GrpoObjective,
        args: TrainingArguments,
        sampler: RolloutSampler,
        completions: Path,
        modules_learning_rate: float | None = None,
        validate: Validate | None = None,
    ) -> None:
        schedule = sampler.schedule
        super().__init__(objective, args, Slots(len(schedule)), schedule, modules_learning_rate, validate)
        self.data_collator = collate_slots
        self.policy, self.sampler, self.plan, self.completions = (
            objective,
            sampler,
            schedule.plan,
            completions,
        )
        self.reference = ReferenceWeights(objective.lm) if objective.grpo.beta > 0 else None
        self.generation: Generation | None = None
        self.unlogged_metrics: list[dict[str, float]] = []

    # Outputs

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        number = int(inputs["generations"][0])
        if self.generation is None or self.generation.number != number:
            self.generation = self._generate(number)
        batch: dict[str, Tensor] = super()._prepare_inputs(self.generation.take(inputs["slots"].cpu()))
        return batch

    def _generate(self, number: int) -> Generation:
        """Sample, score where the weights will have moved before the outputs are used up, and write some down."""
        # Compiled layers would be compiled anew for every shape of a decode step.
        with torch.compiler.set_stance("force_eager"):
            generation = self.sampler.generate(number)
        if self.plan.updates_per_generation > 1:
            generation.tensors["old_logps"] = self.score(generation.tensors)
        if self.reference is not None:
            with self.reference.weights():
                generation.tensors["ref_logps"] = self.score(generation.tensors)
        self.unlogged_metrics.append(generation.metrics)
        with files.append_jsonl(self.completions) as write:
            for record in generation.records:
                write({"step": self.state.global_step, "generation": number, **record})
        return generation

    @torch.no_grad()
    def score(self, tensors: dict[str, Tensor]) -> Tensor:
        """The present weights' log-probs of a generation, (R, N) on the CPU, batch by batch as they will be learnt
        from and in the same precision: at the first of them the ratio is 1."""
        rollouts = Rollouts.from_tensors(tensors)
        R = rollouts.token_lengths.shape[0]
        logps_RN = torch.zeros(R, int(rollouts.positions().max()))
        for start in range(0, R, self.plan.batch):
            batch = {name: column[start : start + self.plan.batch] for name, column in tensors.items()}
            with self.accelerator.autocast():  # as in the objective's own forward, which Trainer wraps
                logps = self.policy.score(super()._prepare_inputs(batch)).logps
            logps_RN[start : start + self.plan.batch, : logps.shape[1]] = logps.float().cpu()
        return logps_RN

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.unlogged_metrics:
            names = dict.fromkeys(name for metrics in self.unlogged_metrics for name in metrics)
            for name in names:
                values = [metrics[name] for metrics in self.unlogged_metrics if name in metrics]
                logs[name] = sum(values) / len(values)
            self.unlogged_metrics = []
        super().log(logs, start_time)

    # Resume state

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        used_up = self.generation is None or self.state.global_step % self.plan.updates_per_generation == 0
        state = {"plan": self._plan(), "length": self.sampler.dr_grpo_length, "generation": None}
        if self.generation is not None and not used_up:
            state["generation"] = self.generation.number
            tensors = {name: column.contiguous() for name, column in self.generation.tensors.items()}
            save_file(tensors, folder / ROLLOUTS)
        files.write_json(folder / STATE, state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        folder = Path(resume_from_checkpoint)
        state = files.read_json(folder / STATE)
        checks.check_same_run(folder, state["plan"], self._plan(), SIZES_STAY)
        self.sampler.dr_grpo_length = state["length"]
        if state["generation"] is not None:
            self.generation = Generation(state["generation"], load_file(folder / ROLLOUTS), {}, [])

    def _plan(self) -> dict[str, int]:
        """What the number of a generation and the place of an output stand for."""
        return {
            "questions": self.sampler.schedule.generations_per_epoch * self.plan.questions,
            **asdict(self.plan),
        }


class ReferenceWeights:
    """The trained weights as they were when this was made, for the KL divergence."""

    def __init__(self, lm: LatentLM) -> None:
        self.trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
        self.kept = [parameter.detach().clone() for parameter in self.trained]

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """They are the model's inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, kept in zip(self.trained, self.kept, strict=True):
            now = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(now)


@contextlib.contextmanager
def without_dropout(lm: LatentLM) -> Iterator[None]:
    """No dropout inside the block, in train mode either: the model that is scored is the one that sampled."""
    found: list[tuple[nn.Module, str, Any]] = []
    for module in lm.modules():
        names = ("p",) if isinstance(module, nn.Dropout) else ("attention_dropout", "attn_dropout", "dropout")
        found += [
            (module, name, getattr(module, name)) for name in names if is_rate(getattr(module, name, None))
        ]
    try:
        for module, name, _ in found:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def is_rate(value: object) -> bool:
    return isinstance(value, float) and value > 0
