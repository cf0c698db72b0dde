"""Actions around the steps of a run: epochs, evaluations, the clock, the published checkpoint, the progress bar.

    on_train_begin      Clock starts, ProgressBar opens, RunFiles sets how often to evaluate, save and log
    on_epoch_begin      Epochs sets the schedule's epoch
    on_step_begin       Epochs clears the optimiser's moments where a stage begins
      one update
    on_step_end         RunFiles, Clock and StopAtSigterm set flags of `control`, beside Trainer's own: log, stop
      Trainer does what the flags say: log, evaluate, save, in this order
    on_evaluate         RunFiles writes history.json; Publisher writes `best/` where validation is better than before
    on_save             RunFiles marks the saved state as whole, deletes old ones, and writes history.json
    on_train_end        Clock stops

None holds state that a resumed run would lack, except the clock, whose seconds are saved in `trainer_state.json`.
With `load_best_model_at_end` false, only the last weights are published, at the end.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from colar import processes, progress
from colar.evaluation.provenance import collect_provenance
from colar.methods import pretrained
from colar.methods.base import Method
from colar.model import checkpoint, weights
from colar.model.latent_lm import LatentLM
from colar.training.curriculum import Curriculum
from colar.training.rows import Schedule
from colar.training.run_folder import RunFolder


class Epochs(TrainerCallback):  # type: ignore[misc]
    """Sets the schedule's epoch, and clears the optimiser's moments where the curriculum's stage changes."""

    def __init__(self, schedule: Schedule, curriculum: Curriculum) -> None:
        self.schedule = schedule
        self.curriculum = curriculum

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # From the step, not by counting calls, because a resumed run may begin in the middle of an epoch.
        self.schedule.epoch = state.global_step // self.curriculum.steps_per_epoch

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if self.curriculum.stage(step) != self.curriculum.stage(step + 1):
            # AdamW's moments belong to the previous stage's gradients (iCoT and Coconut reset them, too).
            kwargs["optimizer"].state.clear()


class RunFiles(TrainerCallback):  # type: ignore[misc]
    """Writes history.json, marks a resume state as whole once all processes have written it, deletes old ones.

    Requests a log when a save is due. A row of the log is a mean over the steps since the previous row of the same
    process, so a resumed run's first row would otherwise cover fewer steps than an uninterrupted run's.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Otherwise a resumed run would evaluate, save and log at the intervals of the saved state.
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Trainer's own callback, which runs first, has set `should_save`.
        if control.should_save:
            control.should_log = True

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.folder.write_history(state.log_history)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A state is whole only once every process has saved its random numbers.
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            self.folder.finish_state(state.global_step)
            self.folder.write_history(state.log_history)


class Clock(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Wall-clock seconds since Trainer's start, evaluations included, summed over resumes; stops the run at a limit.

    `save_steps` below 1 is a share of that limit, too: a run by hours may have any number of updates.

    GRPO's generation 0 is sampled before that start, so its time does not count. The saved state also holds the values
    that a resumed run must keep, on any number of devices: rows per update, digests of all rows, and the fingerprint of
    the frozen backbone (`resumable_run.py`).
    """

    def __init__(
        self, seconds: float, max_hours: float | None, save_steps: float, begun_with: dict[str, Any]
    ) -> None:
        self.earlier_seconds = self.saved_at = seconds
        self.limit = math.inf if max_hours is None else 3600 * max_hours
        self.save_every = self.limit * save_steps if save_steps < 1 else math.inf
        self.begun_with = begun_with
        self.started: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the earlier processes and of this one."""
        if self.started is None:
            return self.earlier_seconds
        return self.earlier_seconds + time.monotonic() - self.started

    @property
    def is_up(self) -> bool:
        """True when the limit is reached."""
        return self.seconds >= self.limit

    @property
    def is_due(self) -> bool:
        """True when a checkpoint is due."""
        return self.seconds - self.saved_at >= self.save_every

    def state(self) -> dict[str, Any]:
        """The part of `trainer_state.json` that a resumed run reads."""
        return {"args": {}, "attributes": {"seconds": self.seconds, **self.begun_with}}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if math.isinf(self.limit):
            return
        # Clocks differ between processes, but all must stop and save at the same steps.
        is_up, is_due = processes.from_main(lambda: (self.is_up, self.is_due))
        if is_up:
            # Validate and save at the last step, so that the run can resume from it with a longer limit.
            control.should_training_stop = True
            control.should_evaluate = True
        if is_up or is_due:
            control.should_save = True
            control.should_log = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saved_at = self.seconds

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.earlier_seconds = self.seconds
        self.started = None


class StopAtSigterm(TrainerCallback):  # type: ignore[misc]
    """Ends a run after the update, or the validation, in which SIGTERM reached one of its processes, with a checkpoint.

    torchrun and job queues send it some seconds (torchrun: 30) before they kill.
    """

    def __init__(self) -> None:
        self.received = False
        """True in a process that got the signal."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signal inside the block; in another thread than Python's main one it ends the process as before."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            self.received = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Each process may get the signal in another update, but all must stop at the same one.
        if processes.any_process(self.received):
            control.should_training_stop = True
            control.should_save = True

    # Trainer validates before it saves.
    on_evaluate = on_step_end


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """The project's progress bar on stderr, in place of Trainer's, which writes logs to stdout."""

    def __init__(self) -> None:
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A resumed run's bar begins where the run stopped.
        self.bar = progress.bar("train", state.max_steps, done=state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bar.update()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self.bar.set_postfix_str(f"epoch {state.epoch:.2f} loss {logs['loss']:.4f}", refresh=False)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        metrics = kwargs["metrics"]
        result = f"accuracy {metrics['eval_accuracy']:.4f}"
        if "eval_length" in metrics:
            result += f", #L {metrics['eval_length']:.2f}"
        progress.say(f"step {state.global_step}, epoch {state.epoch:.2f}: {result}")

    def close(self) -> None:
        """Remove the bar from the terminal, also after an error."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


@dataclass
class Publisher(TrainerCallback):  # type: ignore[misc]
    """Writes `best/` with its provenance, and loads it again. As a callback, publishes each new `best_evaluation`."""

    lm: LatentLM
    method: Method
    folder: RunFolder
    info: dict[str, Any]
    clock: Clock
    curriculum: Curriculum

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        best = best_evaluation(state, self.curriculum)
        if state.is_world_process_zero and best is not None and best["step"] == state.global_step:
            self.publish(state)

    def publish(self, state: TrainerState, gathered: dict[str, Tensor] | None = None) -> None:
        """Write model, method and model card; the old folder stays until the new one is whole.

        `gathered` holds the whole weights if the model has only a share of each (FSDP).
        """
        # The entry in colar.json by which these weights can be traced to their run.
        run = {
            **self.info,
            "metrics": evaluation_metrics(state),
            "step": state.global_step,
            "epoch": state.epoch,
            "seconds": round(self.clock.seconds, 1),
            "provenance": collect_provenance(),
        }
        card = pretrained.card_of(self.lm, self.method, run)
        pretrained.save(self.lm, self.method, self.folder.best, run, card, gathered)

    def load(self) -> dict[str, float]:
        """Load the published weights into every process's model, and return their metrics. All processes call it.

        `Trainer` would only warn about weights that do not fit; here they are an error.
        """

        def from_folder() -> dict[str, float]:
            # Modules that only training needs are not in a published checkpoint.
            weights.load_into(self.lm, self.folder.best, leave_out=self.lm.training_only)
            return dict(checkpoint.read_info(self.folder.best)["run"]["metrics"])

        metrics = processes.from_main(from_folder)
        for parameter in self.lm.parameters():
            if parameter.requires_grad:
                broadcast(parameter.data)
        return metrics


def best_evaluation(state: TrainerState, curriculum: Curriculum) -> dict[str, Any] | None:
    """The logged evaluation with the highest accuracy; None if the stage that the run ends with has none.

    Ties in accuracy, which are frequent with few questions, are broken by the lower loss on held-out rows, then by the
    earlier step. Only the curriculum's last stage counts, because there the model thinks as it will at test time:
    otherwise the best of iCoT would be plain CoT.
    """

    def rank(row: dict[str, Any]) -> tuple[float, float]:
        loss = row.get("eval_loss", math.inf)
        # Every comparison with a NaN is False, so the maximum would depend on the order of the rows.
        return row["eval_accuracy"], -loss if math.isfinite(loss) else -math.inf

    rows = [row for row in state.log_history if "eval_accuracy" in row]
    return max((row for row in rows if curriculum.ends_with(row["step"])), key=rank, default=None)


def evaluation_metrics(state: TrainerState) -> dict[str, float]:
    """Metrics of the evaluation at the current step, without the prefix `eval_`; empty if there was none."""
    rows = [row for row in state.log_history if "eval_accuracy" in row and row["step"] == state.global_step]
    logged = rows[-1] if rows else {}
    return {key.removeprefix("eval_"): value for key, value in logged.items() if key.startswith("eval_")}
