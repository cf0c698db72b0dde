"""The stages of a run, in which its rows are encoded (iCoT and Coconut have several).

    epochs        0 ......... 1 ......... 2 ......... 3
    stages            1           2           3            the model thinks as in the last one
    published         no          no          best of these

A checkpoint of an earlier stage would think in a way that it was not trained for, so nothing is published before the
stage that the run ends with. If `max_hours` stops the run before that stage, it ends with an error, and can be resumed
with a larger limit.
"""

from bisect import bisect_right
from dataclasses import dataclass

from colar import progress
from colar.methods.base import Method

MOST_STAGES = 8
"""Most stages whose rows are checked. Of more (iCoT has one for each token), evenly spread ones are checked."""


class UnfinishedCurriculumError(ValueError):
    """Training stopped before the stage that the run was to end with: there is nothing to publish."""


@dataclass(frozen=True)
class Curriculum:
    """The stage of each update. With `applies` false (reinforcement learning), all updates are in the last stage."""

    method: Method
    steps_per_epoch: int
    max_steps: int
    applies: bool = True

    def epoch(self, step: int) -> float:
        """The (fractional) epoch at which the last of `step` updates began."""
        return max(step - 1, 0) / self.steps_per_epoch

    def stage(self, step: int) -> int:
        """The stage that the last of `step` updates was made in."""
        return self.method.stage(self.epoch(step)) if self.applies else self.method.last_stage()

    @property
    def end_stage(self) -> int:
        """The stage that the run ends with."""
        return self.stage(self.max_steps)

    def ends_with(self, step: int) -> bool:
        """True where the last of `step` updates was made in the stage that the run ends with."""
        return self.stage(step) == self.end_stage

    def stage_epochs(self) -> list[float]:
        """The epochs at which stages begin: all of them, or `MOST_STAGES` that include the first and the last."""
        updates = range(1, self.max_steps + 1)
        begins: list[int] = []
        update = 0
        while update < self.max_steps:
            begins.append(update)
            # Stages never decrease, and a run by hours may have a billion updates, so a stage's last one is bisected.
            update = bisect_right(updates, self.stage(update + 1), key=self.stage)
        if len(begins) > MOST_STAGES:
            spread = [round(i * (len(begins) - 1) / (MOST_STAGES - 1)) for i in range(MOST_STAGES)]
            begins = [begins[i] for i in spread]
        return [begin / self.steps_per_epoch for begin in begins]

    def warn(self) -> None:
        """Warn if training ends before the curriculum does: the model would think in a way that it never learnt."""
        final = self.method.last_stage()
        if self.end_stage < final:
            progress.say(
                f"warning: training ends in stage {self.end_stage} of {self.method.name}'s curriculum, which thinks as "
                f"in stage {final}: train for more epochs, or shorten its stages"
            )

    def require_end(self, step: int, hours: float | None) -> None:
        """Raise UnfinishedCurriculumError if `step` updates have not reached the stage that the run was to end with."""
        if self.stage(step) >= self.end_stage:
            return
        limit = "" if hours is None else f" by training.max_hours {hours:g}"
        raise UnfinishedCurriculumError(
            f"training was stopped{limit} at epoch {step / self.steps_per_epoch:.2f}, in stage {self.stage(step)} of "
            f"{self.method.name}'s curriculum. It ends with stage {self.end_stage}: a checkpoint from before would "
            "think in a way that it was not trained to, so nothing is published. Resume with a larger "
            "training.max_hours, or start again with shorter stages"
        )
