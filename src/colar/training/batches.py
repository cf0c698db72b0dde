"""Rows for training, as functions of (seed, epoch, row id) alone.

What a row's encoding draws (the factor c, the labels' seed) and its place in the epoch depend on nothing else: a
resumed run, another batch size or another number of processes sees the same draws in the same order. The
sampler yields (epoch, index), so no worker holds a state that could go stale.

Order of an epoch: rows are shuffled, cut into pools of `POOL` groups, sorted by length within a pool, cut into
groups of neighbours, and the groups are shuffled. A group is an update's rows: they are of like length, and
neither the first nor the last is the longest. (Larger groups would make successive updates see like lengths.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from colar import progress
from colar.data.example import Example
from colar.methods.base import Batch, Method, Row
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from

POOL = 50
"""Groups that are sorted together."""

RowKey = tuple[float, int]
"""(fractional epoch at which the row is due, index of its example)."""


class TrainingRows(Dataset[Row]):
    """Examples encoded on the fly; an item's key is (epoch, index)."""

    def __init__(self, lm: LatentLM, method: Method, examples: Sequence[Example], seed: int) -> None:
        if not examples:
            raise ValueError("there are no rows to train on")
        self.template, self.method, self.examples, self.seed = lm.template, method, examples, seed
        self.context_length = lm.context_length

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, key: RowKey) -> Row:
        epoch, index = key
        return self._encode(epoch, index, int(epoch))

    def at(self, epoch: float, index: int) -> Row:
        """A row as `epoch` has it (a curriculum's stage), with the draws that it has at every epoch: to compare."""
        return self._encode(epoch, index, 0)

    def _encode(self, epoch: float, index: int, draws: int) -> Row:
        example = self.examples[index]
        rng = Random(seed_from(self.seed, draws, example.id))
        return self.method.encode(self.template, example, rng, epoch)

    def lengths(self) -> list[int]:
        """Tokens of each row. ValueError names a row that cannot be encoded or exceeds the model's context."""
        lengths = []
        for index in progress.track(range(len(self)), "check rows"):
            lengths.append(len(self[0.0, index]))
            if lengths[-1] > self.context_length:
                raise ValueError(
                    f"{self.examples[index].id}: the row has {lengths[-1]} tokens, "
                    f"the model's context is {self.context_length}"
                )
        return lengths


class Schedule(Sampler[Any]):
    """What a loader is told to take next, epoch by epoch."""

    epoch: int


class RowSchedule(Schedule):
    """One epoch's keys, in groups of `group` rows of like length. Set `epoch` before iterating."""

    def __init__(self, examples: Sequence[Example], lengths: Sequence[int], seed: int, group: int) -> None:
        self.ids, self.lengths, self.seed, self.epoch = [e.id for e in examples], lengths, seed, 0
        self.group = group

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[RowKey]:
        for position, index in enumerate(self.permutation(self.epoch)):
            yield self.epoch + position / len(self), index

    def permutation(self, epoch: int) -> list[int]:
        """A permutation of the indices, a function of (seed, epoch, ids, lengths, group)."""
        places = [seed_from(self.seed, "order", epoch, name) for name in self.ids]
        shuffled = sorted(range(len(self)), key=lambda index: (places[index], index))
        whole = len(self) - len(self) % self.group  # a ragged last group keeps the others whole
        groups = []
        for start in range(0, whole, POOL * self.group):
            pool = shuffled[start : min(start + POOL * self.group, whole)]
            pool.sort(key=lambda index: self.lengths[index])
            groups += [pool[i : i + self.group] for i in range(0, len(pool), self.group)]
        rng = Random(seed_from(self.seed, "groups", epoch))
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
        return [index for group in groups for index in group] + shuffled[whole:]


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows as the flat dict of tensors that `Objective.forward` takes."""
    return Batch.collate(rows).tensors()


def count_rows(batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """How many rows some batches hold together, a scalar int64."""
    return torch.tensor(sum(next(iter(batch.values())).shape[0] for batch in batches))
