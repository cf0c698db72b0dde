"""What happens around the steps of a run: epochs, evaluations, the clock, the progress bar.

Each is a `TrainerCallback` of its own and holds no state that a resumed run could miss, but for the clock,
whose seconds are saved in `trainer_state.json`.
"""

from __future__ import annotations

import math
import time
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from colar import progress
from colar.methods.base import Method
from colar.training.batches import Schedule


class Epochs(TrainerCallback):  # type: ignore[misc]
    """Tells the order of rows its epoch, and forgets the optimiser's moments where the method's stage changes."""

    def __init__(
        self, schedule: Schedule, method: Method, steps_per_epoch: int, reset_optimizer: bool
    ) -> None:
        self.schedule, self.method = schedule, method
        self.steps_per_epoch, self.reset_optimizer = steps_per_epoch, reset_optimizer

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.schedule.epoch = state.global_step // self.steps_per_epoch

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        if self.reset_optimizer and step > 0 and self.stage(step) != self.stage(step - 1):
            kwargs["optimizer"].state.clear()

    def stage(self, step: int) -> int:
        """The stage of the update that follows `step` updates."""
        return self.method.stage(step / self.steps_per_epoch)


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Asks for an evaluation `per_epoch` times an epoch (or every `every` steps) and at the end."""

    def __init__(self, steps_per_epoch: int, per_epoch: float, every: float | None) -> None:
        self.steps_per_epoch, self.per_epoch, self.every = steps_per_epoch, per_epoch, every

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        due = self.count(step, state.max_steps) > self.count(step - 1, state.max_steps)
        control.should_evaluate |= due or step >= state.max_steps

    def count(self, step: int, max_steps: int) -> int:
        """Evaluations that fall into the first `step` steps."""
        if self.every is None:
            return math.floor(step * self.per_epoch / self.steps_per_epoch + 1e-9)
        return step // (math.ceil(self.every * max_steps) if self.every < 1 else int(self.every))


class LogAtSaves(TrainerCallback):  # type: ignore[misc]
    """Asks for a log where a checkpoint is due: a row of the log is a mean since the last one in the same process, so
    without it a resumed run's next row would cover less than an uninterrupted one's."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_log |= control.should_save


class Clock(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Wall-clock seconds since the first step, evaluations included, summed over resumes; stops at a limit.

    Beside the seconds it keeps the rows of an update: steps are counted in them, on whatever devices.
    """

    def __init__(
        self, seconds: float = 0.0, max_hours: float | None = None, rows_per_update: int = 0
    ) -> None:
        self.earlier_seconds, self.limit = seconds, math.inf if max_hours is None else 3600 * max_hours
        self.rows_per_update = rows_per_update
        self.started: float | None = None

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + (0.0 if self.started is None else time.monotonic() - self.started)

    def state(self) -> dict[str, Any]:
        attributes = {"seconds": self.seconds, "rows_per_update": self.rows_per_update}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if math.isinf(self.limit):
            return
        out_of_time = [self.seconds >= self.limit]
        if args.world_size > 1:  # clocks differ, the processes must stop together
            broadcast_object_list(out_of_time)
        if out_of_time[0]:
            control.should_training_stop = control.should_evaluate = control.should_save = True
            control.should_log = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.earlier_seconds, self.started = self.seconds, None


class Bar(TrainerCallback):  # type: ignore[misc]
    """The project's progress bar on stderr, in the place of Trainer's, whose log lines go to stdout."""

    def __init__(self) -> None:
        self.bar: progress.Bar | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.bar = progress.Bar("train", state.max_steps)
            self.bar.advance(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.advance()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs.get("logs") or {}
        if self.bar is not None and "loss" in logs:
            self.bar.note(f"epoch {state.epoch:.2f} loss {logs['loss']:.4f}")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        metrics = kwargs.get("metrics") or {}
        if self.bar is not None and "eval_accuracy" in metrics:
            length = f", #L {metrics['eval_length']:.2f}" if "eval_length" in metrics else ""
            progress.say(
                f"step {state.global_step}, epoch {state.epoch:.2f}: accuracy {metrics['eval_accuracy']:.4f}{length}"
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def stage_of_last_step(method: Method, step: int, steps_per_epoch: int) -> int:
    """The stage that the last of `step` updates was made in."""
    return method.stage(max(step - 1, 0) / steps_per_epoch)
