"""Actions around the steps of a run: epochs, evaluations, the clock, the progress bar.

    on_train_begin      Clock starts, ProgressBar opens
    on_epoch_begin      Epochs sets the schedule's epoch
    on_step_begin       Epochs forgets the optimiser's moments where a stage begins
      one update
    on_step_end         Evaluations, LogAtSaves and Clock set flags of `control`: evaluate, save, log, stop
      Trainer does what the flags say: log, evaluate, save, in this order
    on_save             Checkpoints writes the digests of the files that were saved, and deletes old checkpoints
    on_train_end        Clock stops

None holds a state that a resumed run could miss, but for the clock, whose seconds are saved in `trainer_state.json`.
"""

from __future__ import annotations

import math
import time
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from colar import processes, progress
from colar.methods.base import Method
from colar.training.rows import Schedule
from colar.training.run_folder import PREFIX, RunFolder, write_digests


class Epochs(TrainerCallback):  # type: ignore[misc]
    """Sets the schedule's epoch, and forgets the optimiser's moments where the method's stage changes."""

    def __init__(self, schedule: Schedule, method: Method, steps_per_epoch: int) -> None:
        self.schedule = schedule
        self.method = method
        self.steps_per_epoch = steps_per_epoch

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # From the step, not by counting calls: a resumed run begins in the middle of an epoch.
        self.schedule.epoch = state.global_step // self.steps_per_epoch

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if step > 0 and self.stage(step) != self.stage(step - 1):
            # AdamW's moments belong to the gradients of the stage before (iCoT and Coconut forget them, too).
            kwargs["optimizer"].state.clear()

    def stage(self, step: int) -> int:
        """The stage of the update that follows `step` updates."""
        return self.method.stage(step / self.steps_per_epoch)


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Requests an evaluation `per_epoch` times an epoch (or every `every` steps) and at the end."""

    def __init__(self, steps_per_epoch: int, per_epoch: float, every: float | None) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.per_epoch = per_epoch
        self.every = every

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        # Counted, not divided: also a number of evaluations that does not divide the epoch is met.
        due = self.count(step, state.max_steps) > self.count(step - 1, state.max_steps)
        if due or step >= state.max_steps:
            control.should_evaluate = True

    def count(self, step: int, max_steps: int) -> int:
        """Evaluations that fall into the first `step` steps."""
        if self.every is None:
            # 100 x 0.29 is 28.999999999999996 in binary, and must count as 29.
            return math.floor(step * self.per_epoch / self.steps_per_epoch + 1e-9)
        if self.every < 1:
            return step // math.ceil(self.every * max_steps)
        return step // int(self.every)


class LogAtSaves(TrainerCallback):  # type: ignore[misc]
    """Requests a log where a checkpoint is due.

    A row of the log is a mean over the steps since the last row, in the same process. Without a row at the checkpoint,
    a resumed run's next row would cover fewer steps than an uninterrupted run's.
    """

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save:
            control.should_log = True


class Checkpoints(TrainerCallback):  # type: ignore[misc]
    """Writes a checkpoint's digests, and only then deletes the oldest of more than `limit` checkpoints."""

    def __init__(self, folder: RunFolder, limit: int) -> None:
        self.folder = folder
        self.limit = limit

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        saved = self.folder.checkpoints / f"{PREFIX}{state.global_step}"
        # Every process has saved its random numbers.
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            write_digests(saved)
            self.folder.keep_newest(self.limit)


class Clock(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Wall-clock seconds since the first step, evaluations included, summed over resumes; stops at a limit.

    Its saved state also has the rows of an update and a digest of all rows: a step means the same only while these
    stay, on any number of devices.
    """

    def __init__(
        self, seconds: float = 0.0, max_hours: float | None = None, rows_per_update: int = 0, rows: str = ""
    ) -> None:
        self.earlier_seconds = seconds
        self.limit = math.inf if max_hours is None else 3600 * max_hours
        self.rows_per_update = rows_per_update
        self.rows = rows
        self.started: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the earlier processes and of this one."""
        if self.started is None:
            return self.earlier_seconds
        return self.earlier_seconds + time.monotonic() - self.started

    def state(self) -> dict[str, Any]:
        """The part of `trainer_state.json` that a resumed run reads."""
        attributes = {"seconds": self.seconds, "rows_per_update": self.rows_per_update, "rows": self.rows}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if math.isinf(self.limit):
            return
        # Clocks differ between processes, but all must stop at the same step: the main process decides, by way of the
        # CPU, so that no GPU waits for it.
        if processes.from_main(lambda: self.seconds >= self.limit):
            # A validation and a checkpoint of the last step: with a longer limit the run resumes from it.
            control.should_training_stop = True
            control.should_evaluate = True
            control.should_save = True
            control.should_log = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.earlier_seconds = self.seconds
        self.started = None


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """The project's progress bar on stderr, in the place of Trainer's, which writes logs to stdout."""

    def __init__(self) -> None:
        self.bar: progress.Bar | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.bar = progress.Bar("train", state.max_steps)
            # A resumed run's bar begins where the run stopped.
            self.bar.advance(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.advance()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if self.bar is not None and "loss" in logs:
            self.bar.note(f"epoch {state.epoch:.2f} loss {logs['loss']:.4f}")

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        metrics = kwargs.get("metrics") or {}
        if self.bar is None or "eval_accuracy" not in metrics:
            return
        found = f"accuracy {metrics['eval_accuracy']:.4f}"
        if "eval_length" in metrics:
            found += f", #L {metrics['eval_length']:.2f}"
        progress.say(f"step {state.global_step}, epoch {state.epoch:.2f}: {found}")

    def close(self) -> None:
        """Take the bar off the terminal, also after an error."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
