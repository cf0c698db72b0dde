"""The published checkpoint: written when validation says so, and loaded again at the end.

The first of equals wins: a later checkpoint must be strictly better. A curriculum is judged in its last stage
only, where the model thinks as it will at test time: before that, the best of iCoT or Coconut would be plain CoT.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from colar import files
from colar.methods import registry
from colar.methods.base import Method
from colar.model import card, checkpoint
from colar.model.latent_lm import LatentLM
from colar.training.callbacks import Clock, stage_of_last_step
from colar.training.run_folder import RunFolder

REFRESH_EVERY_S = 60.0
"""Between evaluations history and picture are written at a save, but not more often than this."""


@dataclass
class Publisher:
    """Writes `best/` with everything that says where it came from."""

    lm: LatentLM
    method: Method
    folder: RunFolder
    info: dict[str, Any]
    clock: Clock
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""

    def publish(self, state: TrainerState) -> None:
        """Write model, method and model card; the old folder stays until the new one is whole."""
        run = {
            **self.info,
            "metrics": self.metrics,
            "step": state.global_step,
            "epoch": state.epoch,
            "seconds": round(self.clock.seconds, 1),
            "provenance": files.provenance(),
        }
        text = card.text(self.lm, self.method.name, run)
        registry.save(self.lm, self.method, self.folder.best, run, text)

    def load(self) -> dict[str, float]:
        """Put the best weights into the model, really (`Trainer` would only warn), and return their metrics."""
        checkpoint.load_weights(self.lm, self.folder.best)
        metrics: dict[str, float] = checkpoint.read_info(self.folder.best)["run"]["metrics"]
        return metrics


class KeepBest(TrainerCallback):  # type: ignore[misc]
    """Publishes at an evaluation with a higher accuracy than any before it; keeps history and picture fresh."""

    def __init__(self, publisher: Publisher, steps_per_epoch: int) -> None:
        self.publisher, self.steps_per_epoch = publisher, steps_per_epoch
        self.refreshed = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.publisher.folder.best.exists():
            state.best_metric = None

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logged = kwargs["metrics"].items()
        metrics = {name.removeprefix("eval_"): value for name, value in logged if name.startswith("eval_")}
        self.publisher.metrics = metrics
        better = state.best_metric is None or metrics["accuracy"] > state.best_metric
        if better and self.final_stage(state):
            state.best_metric = metrics["accuracy"]
            if state.is_world_process_zero:
                self.publisher.publish(state)
        self.refresh(state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if time.monotonic() - self.refreshed > REFRESH_EVERY_S:
            self.refresh(state)

    def final_stage(self, state: TrainerState) -> bool:
        """Whether the last update was made in the stage that the run ends with."""
        method, per_epoch = self.publisher.method, self.steps_per_epoch
        now = stage_of_last_step(method, state.global_step, per_epoch)
        return now == stage_of_last_step(method, state.max_steps, per_epoch)

    def refresh(self, state: TrainerState) -> None:
        self.refreshed = time.monotonic()
        if state.is_world_process_zero:
            self.publisher.folder.write_history(state.log_history, title(self.publisher))


def title(publisher: Publisher) -> str:
    """Over the learning curves."""
    name = publisher.lm.name.rstrip("/").split("/")[-1]
    label = publisher.info.get("label") or ""
    return " ".join(part for part in (publisher.method.name, label, "on", name) if part)
