"""The published checkpoint: written when validation is better than before, and loaded again at the end.

    update   ...   evaluation: accuracy 0.2 -> publish    ...   0.6 -> publish    ...   0.6, 0.1: kept as it is

The first of equals wins: a later checkpoint must be strictly better. A curriculum is judged in its last stage only,
where the model thinks as it will at test time: before that, the best of iCoT or Coconut would be plain CoT. With
`load_best_model_at_end` false the last weights are published at the end, and nothing before it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from accelerate.utils import broadcast
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from colar import files, processes, progress
from colar.methods import pretrained
from colar.methods.base import Method
from colar.model import card, checkpoint, weights
from colar.model.latent_lm import LatentLM
from colar.training.callbacks import Clock
from colar.training.curriculum import Curriculum
from colar.training.run_folder import RunFolder

REFRESH_EVERY_S = 10.0
"""The history is written at evaluations, saves and the end, but in between not more often than this."""


@dataclass
class Publisher:
    """Writes `best/` with its provenance, and the history that shows how the run goes."""

    lm: LatentLM
    method: Method
    folder: RunFolder
    info: dict[str, Any]
    clock: Clock

    def publish(self, state: TrainerState, gathered: dict[str, Tensor] | None = None) -> None:
        """Write model, method and model card; the old folder stays until the new one is whole.

        `gathered` are the weights where the model has only a share of each.
        """
        run, text = self._describe(state)
        pretrained.save(self.lm, self.method, self.folder.best, run, text, gathered)

    def rehearse(self) -> None:
        """Publish an empty model, and read it back: ValueError before the first step for one that cannot be saved."""
        run, text = self._describe(TrainerState())
        pretrained.rehearse(self.lm, self.method, run, text)

    def _describe(self, state: TrainerState) -> tuple[dict[str, Any], str]:
        """The run's entry in colar.json, by which these weights can be traced to their run; and the model card."""
        run = {
            **self.info,
            "metrics": evaluation_metrics(state),
            "step": state.global_step,
            "epoch": state.epoch,
            "seconds": round(self.clock.seconds, 1),
            "provenance": files.provenance(),
        }
        return run, card.text(self.lm, self.method.chosen(), run, asdict(self.method.Params()))

    def load(self) -> dict[str, float]:
        """Put the published weights into the model of every process, and return their metrics. All call it together.

        `Trainer` would load them with a warning only where some do not fit; here that is an error.
        """
        metrics = processes.from_main(self._load)
        trained = [parameter for parameter in self.lm.parameters() if parameter.requires_grad]
        for tensor in (*trained, *self.lm.extra.buffers()):
            broadcast(tensor.data)
        return metrics

    def _load(self) -> dict[str, float]:
        # Modules that only training needs are not in a published checkpoint.
        weights.load(self.lm, self.folder.best, leave_out=self.method.training_only)
        metrics: dict[str, float] = checkpoint.read_info(self.folder.best)["run"]["metrics"]
        return metrics

    def refresh(self, state: TrainerState) -> None:
        """Write the history."""
        # It only shows the run: where that fails, the run goes on, and its weights are still published.
        with progress.harmless("the history"):
            self.folder.write_history(state.log_history)


class KeepBest(TrainerCallback):  # type: ignore[misc]
    """Publishes at an evaluation with a higher accuracy than any before it, and refreshes the history.

    Of equal accuracies, as few questions often give them, the lower loss on held-out rows counts, and then the first.
    With `publish_last` it publishes at none.
    """

    def __init__(self, publisher: Publisher, curriculum: Curriculum, publish_last: bool = False) -> None:
        self.publisher = publisher
        self.curriculum = curriculum
        self.publish_last = publish_last
        self.refreshed = time.monotonic()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A resumed run with a longer budget may have moved the last stage: the best of an earlier stage must not be
        # compared with.
        published = processes.from_main(self.publisher.folder.best.exists)
        if not published or not self.curriculum.ends_with(state.global_step):
            state.best_metric = None

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        accuracy = kwargs["metrics"]["eval_accuracy"]
        # `best_metric` is saved in trainer_state.json: a resumed run compares with the best before the stop.
        better = state.best_metric is None or accuracy > state.best_metric or self._wins_tie(state, accuracy)
        if better and self.curriculum.ends_with(state.global_step):
            state.best_metric = accuracy
            if state.is_world_process_zero and not self.publish_last:
                self.publisher.publish(state)
        self.on_save(args, state, control)

    def _wins_tie(self, state: TrainerState, accuracy: float) -> bool:
        """True where the present weights are as accurate as the best ones, and have a lower loss on held-out rows."""
        # Rows of stages before the last one were never published.
        tied = [row for row in state.log_history if self.curriculum.ends_with(row["step"])]
        tied = [row for row in tied if row.get("eval_accuracy") == accuracy == state.best_metric]
        losses = {row["step"]: row["eval_loss"] for row in tied if "eval_loss" in row}
        own = losses.pop(state.global_step, None)
        return own is not None and bool(losses) and own < min(losses.values())

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Not more often than the interval: a short run may save at every step.
        if state.is_world_process_zero and time.monotonic() - self.refreshed > REFRESH_EVERY_S:
            self.publisher.refresh(state)
            self.refreshed = time.monotonic()


def evaluation_metrics(state: TrainerState) -> dict[str, float]:
    """Metrics of the evaluation at the present step, without `eval_`; empty where there was none."""
    found: dict[str, float] = {}
    for row in state.log_history:
        if "eval_accuracy" in row and row["step"] == state.global_step:
            found = row
    return {
        name.removeprefix("eval_"): value
        for name, value in found.items()
        if name.startswith("eval_") and name != "eval_seconds"
    }
