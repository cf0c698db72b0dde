"""Which questions are due when: an epoch is cut into generations, a generation into updates, an update into batches.

    epoch         every question once, shuffled
                  |-- generation 0 --|-- generation 1 --| ... | rest (left out) |
    generation    q1: o1 .. oG | q2: o1 .. oG | q3: o1 .. oG | q4: o1 .. oG        the slots of its outputs, 0, 1, 2 ...
    updates       '-------- update 1 --------'-------- update 2 --------'          then once more for each iteration
    batches       '-- batch --'-- batch --'   '-- batch --'-- batch --'

The outputs of a question are neighbours, so that an update holds whole groups wherever sizes allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from colar.data.example import Example
from colar.training.batches import RowSchedule, Schedule
from colar.training.grpo.config import Plan

SlotKey = tuple[int, int]
"""(number of the generation, slot of the output in it)."""


class QuestionSchedule(Schedule):
    """One epoch's keys: each question once, in generations of `plan.questions`; a rest that fills none is left out.

    Questions are shuffled whatever their lengths, unlike the rows of SFT. Questions of like length are of like
    difficulty, and a generation that is all easy or all hard teaches nothing.
    """

    def __init__(self, examples: Sequence[Example], seed: int, plan: Plan) -> None:
        self.examples = examples
        self.plan = plan
        self.epoch = 0
        self.generations_per_epoch = len(examples) // plan.questions
        if not self.generations_per_epoch:
            raise ValueError(f"{len(examples)} questions do not fill a generation of {plan.questions}")
        # With all lengths equal, sorting by length leaves the shuffle as it is.
        equal_lengths = [0] * len(examples)
        self._shuffle = RowSchedule(examples, equal_lengths, seed, plan.questions)
        self.digest = self._shuffle.digest
        self._shuffled_epoch = -1
        self._shuffled: list[int] = []

    def __len__(self) -> int:
        return self.generations_per_epoch * self.plan.outputs * self.plan.iterations

    def __iter__(self) -> Iterator[SlotKey]:
        first = self.epoch * self.generations_per_epoch
        for number in range(first, first + self.generations_per_epoch):
            for _ in range(self.plan.iterations):
                for slot in range(self.plan.outputs):
                    yield number, slot

    def questions(self, number: int) -> list[int]:
        """Indices of the questions of a generation."""
        epoch, place = divmod(number, self.generations_per_epoch)
        if self._shuffled_epoch != epoch:
            self._shuffled_epoch = epoch
            self._shuffled = self._shuffle.permutation(epoch)
        start = place * self.plan.questions
        return self._shuffled[start : start + self.plan.questions]


class Slots(Dataset[SlotKey]):
    """Keys as they are: an output is sampled when its turn comes, by the weights of that moment."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: SlotKey) -> SlotKey:
        return key


def collate_slots(keys: Sequence[SlotKey]) -> dict[str, Tensor]:
    """The keys of a batch as two columns, (B,) int64 each."""
    generations, slots = torch.tensor(keys, dtype=torch.int64).T
    return {"generations": generations, "slots": slots}
