"""The stages of a run in time: where each begins, how many epochs it takes, and how long these are.

    epochs      0 ....... 1 ....... 2 ....... 3 ....... 4
    stages      |--- 0 ---|--- 1 ---|------- 2 ---------|       iCoT: rows are shorter from one to the next
    seconds     |- 3,600 -|- 3,000 -|- 1,500 -|- 1,500 -|       of an epoch: each stage has its own

A stage's rows are those of its first update. A method without a curriculum has one stage, the whole run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from colar.training.curriculum import Curriculum

MOST = 8
"""Stages that are looked at. Of more (iCoT has one for each token) some stand for those that follow them."""


@dataclass(frozen=True)
class Stage:
    """A part of a run, in epochs."""

    begins: float
    epochs: float
    """How many it takes."""


def stages_of(curriculum: Curriculum) -> list[Stage]:
    """The stages of a run, one after another; the first and the last are always among them."""
    updates = range(1, curriculum.max_steps + 1)
    edges = [0]
    while edges[-1] < curriculum.max_steps:
        stage = curriculum.stage(edges[-1] + 1)
        # Stages only grow: the last update of this one is found by halving.
        edges.append(bisect_right(updates, stage, key=curriculum.stage))
    *begins, end = edges
    if len(begins) > MOST:
        # As far from one another as they can be.
        begins = [begins[round(i * (len(begins) - 1) / (MOST - 1))] for i in range(MOST)]
    edges = [*begins, end]
    per_epoch = curriculum.steps_per_epoch
    return [Stage(begin / per_epoch, (end - begin) / per_epoch) for begin, end in pairwise(edges)]


@dataclass(frozen=True)
class Pace:
    """How long the stages of a run take."""

    stages: Sequence[Stage]
    seconds: Sequence[float]
    """Of an epoch in each stage."""

    @property
    def run(self) -> float:
        """Seconds of all stages."""
        return sum(self._parts())

    @property
    def epoch(self) -> float:
        """Seconds of an epoch, the mean over the run."""
        return self.run / sum(stage.epochs for stage in self.stages)

    @property
    def before_last(self) -> float:
        """Seconds until the last stage begins."""
        return sum(self._parts()[:-1])

    def epoch_after(self, seconds: float) -> float:
        """The epoch that the run comes to in so many seconds; where they suffice, the one it ends with."""
        for stage, took in zip(self.stages, self._parts(), strict=True):
            if seconds < took:
                return stage.begins + stage.epochs * seconds / took
            seconds -= took
        return self.stages[-1].begins + self.stages[-1].epochs

    def _parts(self) -> list[float]:
        return [stage.epochs * each for stage, each in zip(self.stages, self.seconds, strict=True)]
