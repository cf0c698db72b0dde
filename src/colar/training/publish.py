"""The published checkpoint: written when validation says so, and loaded again at the end.

The first of equals wins: a later checkpoint must be strictly better. A curriculum is judged in its last stage
only, where the model thinks as it will at test time: before that, the best of iCoT or Coconut would be plain CoT.
Where the last weights are asked for, they are published at the end and nothing before it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from colar import files
from colar.methods import pretrained
from colar.methods.base import Method
from colar.model import card, checkpoint
from colar.model.latent_lm import LatentLM
from colar.training.callbacks import Clock, stage_of_last_step
from colar.training.run_folder import RunFolder

REFRESH_EVERY_S = 10.0
"""History and picture are written at evaluations, saves and the end, but in between not more often than this."""


@dataclass
class Publisher:
    """Writes `best/` with everything that says where it came from, and what shows how the run goes."""

    lm: LatentLM
    method: Method
    folder: RunFolder
    info: dict[str, Any]
    clock: Clock

    def publish(self, state: TrainerState) -> None:
        """Write model, method and model card; the old folder stays until the new one is whole."""
        run = {
            **self.info,
            "metrics": evaluation_metrics(state),
            "step": state.global_step,
            "epoch": state.epoch,
            "seconds": round(self.clock.seconds, 1),
            "provenance": files.provenance(),
        }
        text = card.text(self.lm, self.method.name, run, asdict(self.method.Params()))
        pretrained.save(self.lm, self.method, self.folder.best, run, text)

    def load(self) -> dict[str, float]:
        """Put the best weights into the model, really (`Trainer` would only warn), and return their metrics."""
        checkpoint.load_weights(self.lm, self.folder.best, leave_out=self.method.training_only)
        metrics: dict[str, float] = checkpoint.read_info(self.folder.best)["run"]["metrics"]
        return metrics

    def refresh(self, state: TrainerState) -> None:
        """Write history and learning curves."""
        name = self.lm.name.rstrip("/").split("/")[-1]
        parts = (self.method.name, self.info.get("label"), "on", name)
        self.folder.write_history(state.log_history, " ".join(part for part in parts if part))


class KeepBest(TrainerCallback):  # type: ignore[misc]
    """Publishes at an evaluation with a higher accuracy than any before it, and keeps history and picture fresh.

    With `publish_last` it publishes at none: the last weights are published when the run ends.
    """

    def __init__(self, publisher: Publisher, steps_per_epoch: int, publish_last: bool = False) -> None:
        self.publisher, self.steps_per_epoch, self.publish_last = publisher, steps_per_epoch, publish_last
        self.refreshed = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A longer budget may have made an earlier stage's best one that must not be compared with.
        if not self.publisher.folder.best.exists() or not self.final_stage(state):
            state.best_metric = None

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        accuracy = kwargs["metrics"]["eval_accuracy"]
        better = state.best_metric is None or accuracy > state.best_metric
        if better and self.final_stage(state):
            state.best_metric = accuracy
            if state.is_world_process_zero and not self.publish_last:
                self.publisher.publish(state)
        self.refresh(state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.refresh(state)

    def final_stage(self, state: TrainerState) -> bool:
        """Whether the last update was made in the stage that the run ends with."""
        stages = [
            stage_of_last_step(self.publisher.method, step, self.steps_per_epoch)
            for step in (state.global_step, state.max_steps)
        ]
        return stages[0] == stages[1]

    def refresh(self, state: TrainerState) -> None:
        if state.is_world_process_zero and time.monotonic() - self.refreshed > REFRESH_EVERY_S:
            self.publisher.refresh(state)
            self.refreshed = time.monotonic()


def evaluation_metrics(state: TrainerState) -> dict[str, float]:
    """Metrics of the evaluation at the present step, without `eval_`; empty where there was none."""
    rows = [row for row in state.log_history if "eval_accuracy" in row and row["step"] == state.global_step]
    logged = rows[-1].items() if rows else ()
    names = {name: value for name, value in logged if name.startswith("eval_") and name != "eval_seconds"}
    return {name.removeprefix("eval_"): value for name, value in names.items()}
