"""Rows for training, as functions of (seed, epoch, row id), and their order.

A row's draws (the factor c, the labels' seed) depend on nothing else; its stage also depends on its place in the epoch.
The order also depends on lengths and on the number of rows per update, but not on how these are divided into batches,
steps and processes. The schedule yields (epoch, index, draw), so workers hold no state that could go stale.

Order of an epoch:

    shuffle         rows in an order that only (seed, epoch, id) decides
    pools           `POOL` updates each, at most a quarter of the data, sorted by length inside
    updates         neighbours in a pool: the rows of one update, of like length
    shuffle         the updates, and the rows within each

The longest rows have no fixed place in an epoch. A single pool of all rows would put the longest ones into one update,
in every epoch.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader, Dataset, Sampler

from colar import files, processes, progress
from colar.data.example import Example, without_too_long
from colar.methods.base import Method, Row
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from

POOL = 50
"""Most updates that are sorted together."""
POOLS = 4
"""Fewest pools of an epoch, if it has that many updates."""
WORKERS_FROM = 20_000
"""Fewest rows that several processes encode before a run. A core encodes about 4,000 a second."""
ENCODERS = 16
"""Most processes that encode rows."""
LONGER = (
    "choose a model.backbone (--model) with a longer context, or limit chains by data.max_reasoning_steps"
)

RowKey = tuple[float, int, int]
"""(fractional epoch at which the row is due, index of its example, which of the example's draws)."""


class TrainingRows(Dataset[Row]):
    """Examples encoded on the fly; an item's key is (epoch, index, draw). ValueError where there is no example."""

    def __init__(
        self, lm: LatentLM, method: Method, examples: Sequence[Example], seed: int, n_draws: int = 1
    ) -> None:
        if not examples:
            raise ValueError("there are no rows to train on")
        self.template = lm.template
        self.context = lm.context
        self.method = method
        self.examples = examples
        self.seed = seed
        self.n_draws = n_draws
        # Caches the last example, because its draws are requested one after another.
        self._last: tuple[tuple[float, int, int], list[Row]] | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, key: RowKey) -> Row:
        epoch, index, draw = key
        return self.encoded(epoch, index, draws_of=int(epoch))[draw]

    def encoded(self, epoch: float, index: int, draws_of: int) -> list[Row]:
        """The rows of an example in the stage at `epoch`, with the draws of epoch `draws_of`."""
        key = (epoch, index, draws_of)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        example = self.examples[index]
        # By the id, not the index, so that a row keeps its draws when others are added or removed.
        rng = Random(seed_from(self.seed, draws_of, example.id))
        rows = self.method.encode_draws(self.template, example, rng, epoch, self.n_draws)
        self._last = (key, rows)
        return rows

    def lengths(self, epochs: Sequence[float] = (0.0,), name: str = "training") -> list[list[int]]:
        """Positions of each example, latents included, at each of `epochs`, at which the curriculum's stages begin:
        those of its longest draw in the first epoch.

        Processes divide the rows, and call it together. ValueError names a row that cannot be encoded.
        """

        # All rows are checked before the first step, so that a malformed one does not stop a run after hours.
        def lengths_of(indices: Sequence[int]) -> Iterator[list[int]]:
            loader: DataLoader[Any] = DataLoader(
                _Lengths(self, epochs),
                batch_size=256,
                sampler=indices,
                collate_fn=list,
                num_workers=_workers(len(indices)),
                # Its own generator: drawing from torch's global one would change later random numbers.
                generator=torch.Generator(),
            )
            encoded = itertools.chain.from_iterable(loader)
            for of_row in progress.track(encoded, f"check {name} rows", len(indices)):
                if isinstance(of_row, ValueError):
                    raise of_row
                yield of_row

        return processes.split_and_gather(range(len(self)), lengths_of)

    def fitting(self, lengths: Sequence[Sequence[int]], kind: str) -> list[Example]:
        """The examples that fit the model's context by all of their `lengths`; logs how many do not.

        ValueError where more than half do not.
        """
        too_long = {
            index: f"{self.examples[index].id}: the row has {max(of_row)} tokens, the model's context is {self.context}"
            for index, of_row in enumerate(lengths)
            if max(of_row) > self.context
        }
        return without_too_long(self.examples, too_long, kind, LONGER)


class _Lengths(Dataset[Any]):
    """Tokens of each row at each epoch, or the ValueError of a row that cannot be encoded."""

    def __init__(self, rows: TrainingRows, epochs: Sequence[float]) -> None:
        self.rows = rows
        self.epochs = epochs

    def __getitem__(self, index: int) -> list[int] | ValueError:
        try:
            # A row may grow from stage to stage. Its texts are tokenised once: the template caches them.
            return [max(map(len, self.rows.encoded(epoch, index, draws_of=0))) for epoch in self.epochs]
        except ValueError as error:
            # An error raised in a worker would have the worker's traceback in its message.
            return error


def _workers(n_rows: int) -> int:
    """Worker processes that encode this many rows, each on its own core; 0: the current process encodes them."""
    # Systems without sched_getaffinity start processes afresh, which takes longer than it saves.
    if n_rows < WORKERS_FROM or not hasattr(os, "sched_getaffinity"):
        return 0
    cores = len(os.sched_getaffinity(0)) // PartialState().num_processes
    return min(cores, ENCODERS) if cores > 1 else 0


class Schedule(Sampler[Any]):
    """The keys of one epoch, in the order in which a loader takes them. Set `epoch` before iterating."""

    epoch: int = 0
    examples: Sequence[Example]


def digest_of(examples: Iterable[Example], *more: str) -> str:
    """16 hex digits of the examples' ids, questions, chains, answers and fields `more`, in any order."""
    names = ("id", "question", "steps", "answer", "context", *more)

    def fields(example: Example) -> str:
        return repr(tuple(getattr(example, name) for name in names))

    return files.digest(map(fields, sorted(examples, key=lambda example: example.id)))


class RowSchedule(Schedule):
    """One epoch's rows, in updates of `update_rows` rows of like length, an example's `n_draws` rows together."""

    def __init__(
        self,
        examples: Sequence[Example],
        lengths: Sequence[int],
        seed: int,
        update_rows: int,
        n_draws: int = 1,
    ) -> None:
        self.examples = examples
        self.lengths = lengths
        self.seed = seed
        self.update_examples = update_rows // n_draws
        self.n_draws = n_draws

    def __len__(self) -> int:
        return len(self.examples) * self.n_draws

    def __iter__(self) -> Iterator[RowKey]:
        for position, index in enumerate(self.permutation(self.epoch)):
            for draw in range(self.n_draws):
                yield self.epoch + position / len(self.examples), index, draw

    def permutation(self, epoch: int) -> list[int]:
        """All indices in the order of `epoch`, a function of (seed, epoch, ids, lengths, update_rows)."""
        return epoch_order(self.examples, self.seed, epoch, self.update_examples, self.lengths)


def epoch_order(
    examples: Sequence[Example],
    seed: int,
    epoch: int,
    update_size: int,
    lengths: Sequence[int] | None = None,
) -> list[int]:
    """All indices in the order of an epoch: updates of `update_size` examples and, last, a remainder that fills none.

    With `lengths`, the examples of an update have similar lengths.
    """
    # Sorting by a hash of the id shuffles independently of an example's place in the file.
    places = [seed_from(seed, "order", epoch, example.id) for example in examples]
    shuffled = sorted(range(len(examples)), key=lambda index: places[index])

    # The remainder comes last: a short update in the middle would shift the boundaries of all later ones.
    in_updates = len(examples) - len(examples) % update_size
    pool_size = update_size * min(POOL, max(1, in_updates // update_size // POOLS))
    updates = []
    for start in range(0, in_updates, pool_size):
        pool = shuffled[start : min(start + pool_size, in_updates)]
        if lengths is not None:
            pool.sort(key=lambda index: lengths[index])
        for first in range(0, len(pool), update_size):
            updates.append(pool[first : first + update_size])

    rng = Random(seed_from(seed, "groups", epoch))
    rng.shuffle(updates)
    order: list[int] = []
    # Shuffle within each update too, so that its batches are not sorted by length.
    for update in updates:
        rng.shuffle(update)
        order += update
    return order + shuffled[in_updates:]
