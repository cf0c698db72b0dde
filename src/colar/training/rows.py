"""Rows for training, as functions of (seed, epoch, row id), and their order.

A row's draws (the factor c, the labels' seed) depend on nothing else. The order also depends on lengths and on the rows
of an update; how these are divided into batches, steps and processes changes nothing. The schedule yields (epoch,
index), so no worker holds a state that could go stale.

Order of an epoch:

    shuffle         rows in an order that only (seed, epoch, id) decides
    pools           `POOL` updates each, at most a quarter of the data, sorted by length inside
    updates         neighbours in a pool: the rows of one update, of like length
    shuffle         the updates, and the rows within each

The longest rows come at no fixed place of an epoch. A pool of all rows would make one update of all the longest: they
would be learnt together, in every epoch.

A batch of rows goes through the model in parts, where it has more positions than `training.tokens_per_batch`:

    batch           ------------            8 rows, in any order
                    ---
                    --------     ...
    parts           ------------ | -------- | ---- ---- ---         the longest first, rows of like length together
                                 | -------  | --- --- --

The parts' losses add up to the batch's, so rows, updates and the course of a run are the same with any limit.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from colar import files, processes, progress
from colar.data.example import Example, without_too_long
from colar.methods.base import Batch, Method, Row
from colar.methods.rollouts import Rollouts
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from
from colar.ops.ragged import round_up

POOL = 50
"""Most updates that are sorted together."""
POOLS = 4
"""Fewest pools of an epoch, where there are that many updates."""
WORKERS_FROM = 20_000
"""Rows that are encoded by several processes before a run: about 4,000 a second on each core."""
ENCODERS = 16
"""Most of these processes."""
LONGER = (
    "choose a model.backbone (--model) with a longer context, or limit chains by data.max_reasoning_steps"
)

PADDED = {**Batch.padded, **Rollouts.padded}

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
        # The draws of an example are wanted one after another.
        self._last: tuple[tuple[float, int, int], list[Row]] | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, key: RowKey) -> Row:
        epoch, index, draw = key
        return self.encoded(epoch, index, draws_of=int(epoch))[draw]

    def at(self, epoch: float, index: int) -> Row:
        """A row in the curriculum's stage at `epoch`, with the same draws at every epoch: to compare losses."""
        return self.encoded(epoch, index, draws_of=0)[0]

    def encoded(self, epoch: float, index: int, draws_of: int) -> list[Row]:
        """The rows of an example in the stage at `epoch`, with the draws of epoch `draws_of`."""
        key = (epoch, index, draws_of)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        example = self.examples[index]
        # The id, not the index: a row keeps its draws when others are added or removed.
        rng = Random(seed_from(self.seed, draws_of, example.id))
        rows = self.method.encode_draws(self.template, example, rng, epoch, self.n_draws)
        self._last = (key, rows)
        return rows

    def lengths(self, epochs: Sequence[float] = (0.0,), name: str = "training") -> list[list[int]]:
        """Positions that each example feeds, latents included, at each of `epochs`, at which the curriculum's stages
        begin: of the longest of its draws in the first epoch.

        ValueError names a row that cannot be encoded. Processes divide the rows, and call it together.
        """

        # All rows, before the first step: a wrong one must not stop a run after hours.
        def lengths_of(indices: Sequence[int]) -> Iterator[list[int]]:
            loader: DataLoader[Any] = DataLoader(
                _Lengths(self, epochs),
                batch_size=256,
                sampler=indices,
                collate_fn=list,
                num_workers=_workers(len(indices)),
                # One of its own: torch's would give other random numbers afterwards.
                generator=torch.Generator(),
            )
            lengths = itertools.chain.from_iterable(loader)
            for _, of_row in zip(progress.track(indices, f"check {name} rows"), lengths, strict=False):
                if isinstance(of_row, ValueError):
                    raise of_row
                yield of_row

        return processes.split_and_gather(range(len(self)), lengths_of)

    def fitting(self, lengths: Sequence[Sequence[int]], kind: str) -> list[Example]:
        """The examples that fit the model's context by all of their `lengths`; logs how many do not.

        ValueError where more than half do not.
        """
        too_long = {}
        for index, of_row in enumerate(lengths):
            if max(of_row) > self.context:
                too_long[index] = (
                    f"{self.examples[index].id}: the row has {max(of_row)} tokens, the model's context is "
                    f"{self.context}"
                )
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
            # Raised in a worker it would come back with the worker's traceback in its message.
            return error


def _workers(n_rows: int) -> int:
    """Processes that encode this many rows, each on a core of its own; 0: this one."""
    # Elsewhere processes start afresh, which takes longer than it saves.
    if n_rows < WORKERS_FROM or not hasattr(os, "sched_getaffinity"):
        return 0
    cores = len(os.sched_getaffinity(0)) // PartialState().num_processes
    return min(cores, ENCODERS) if cores > 1 else 0


class Schedule(Sampler[Any]):
    """The keys of one epoch, in the order in which a loader takes them. Set `epoch` before iterating."""

    epoch: int
    digest: str
    """Of the examples: a run that resumes must have those that it began with."""


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
        self.ids = [example.id for example in examples]
        self.digest = digest_of(examples)
        self.lengths = lengths
        self.seed = seed
        self.update_examples = update_rows // n_draws
        self.n_draws = n_draws
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.ids) * self.n_draws

    def __iter__(self) -> Iterator[RowKey]:
        for position, index in enumerate(self.permutation(self.epoch)):
            for draw in range(self.n_draws):
                yield self.epoch + position / len(self.ids), index, draw

    def permutation(self, epoch: int) -> list[int]:
        """All indices in the order of `epoch`, a function of (seed, epoch, ids, lengths, update_rows)."""
        return epoch_order(self.ids, self.seed, epoch, self.update_examples, self.lengths)


def epoch_order(
    ids: Sequence[str], seed: int, epoch: int, update_size: int, lengths: Sequence[int] | None = None
) -> list[int]:
    """The indices of all `ids` in the order of an epoch: updates of `update_size` and, last, a rest that fills none.

    With `lengths` those of an update are alike.
    """
    # Sorting by a hash of the id shuffles in a way that does not depend on where an example stands in the file.
    places = [seed_from(seed, "order", epoch, name) for name in ids]
    shuffled = sorted(range(len(ids)), key=lambda index: (places[index], index))

    # The rest comes last: a short update in the middle would cut all later ones anew.
    in_updates = len(ids) - len(ids) % update_size
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
    # Within an update too, so that the batches of an update are not sorted by length.
    for update in updates:
        rng.shuffle(update)
        order += update
    return order + shuffled[in_updates:]


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows as the flat dict of tensors that `Objective.forward` takes."""
    return Batch.collate(rows).tensors()


def count_rows(batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """Number of rows that some batches hold together, a scalar int64; copies (`mark_copies`) do not count."""
    count = 0
    for batch in batches:
        any_column = next(iter(batch.values()))
        count += int(batch["counted"].sum()) if "counted" in batch else any_column.shape[0]
    return torch.tensor(count)


def mark_copies(
    batches: Sequence[dict[str, Tensor]], first: int, size: int, process: int, n_processes: int, n_rows: int
) -> None:
    """Give batches a column `counted`, False for copies, where they hold some.

        epoch of 10 rows, batches of 2, three processes      process 0     process 1     process 2
        first turn                                           0 1           2 3           4 5
        second turn                                          6 7           8 9           copies of 0 1

    accelerate fills the last turn up with rows that the epoch began with, so that every process has a batch. `first`
    is the turn of the first of these batches, `size` the rows of a batch.
    """
    for turn, batch in enumerate(batches, first):
        begin = (turn * n_processes + process) * size
        rows = count_rows([batch])
        own = n_rows - begin
        if own < rows:
            batch["counted"] = torch.arange(int(rows)) < own


def part_indices(lengths_B: Tensor, most: int | None) -> list[Tensor]:
    """Rows of these lengths in parts of at most `most` positions, padding included: the indices of each part's rows.

    A row that is longer is a part of its own. Rows that fit together, or without a limit, are one part in their order.
    """
    B = lengths_B.shape[0]
    everyone = torch.arange(B, device=lengths_B.device)
    if most is None or B == 0 or B * round_up(int(lengths_B.max())) <= most:
        return [everyone]
    # The longest first: a run that does not fit into memory fails at the first part.
    order_B = lengths_B.argsort(descending=True, stable=True)
    widths = [round_up(length) for length in lengths_B[order_B].tolist()]
    parts = []
    start = 0
    while start < B:
        end = min(B, start + max(1, most // widths[start]))
        parts.append(order_B[start:end])
        start = end
    return parts


def divide(
    parts: list[dict[str, Tensor]], n: int, positions: Callable[[dict[str, Tensor]], Tensor]
) -> list[dict[str, Tensor]]:
    """The same rows in `n` parts or more: the largest part with two rows is cut in half until there are as many.

    `positions` gives the length of each row of a part. ValueError for fewer rows than parts.
    """

    def size(part: dict[str, Tensor]) -> tuple[bool, int]:
        lengths_B = positions(part)
        # A part of one row cannot be divided, however long it is.
        return len(lengths_B) > 1, int(lengths_B.max()) * len(lengths_B)

    parts = list(parts)
    while len(parts) < n:
        sizes = [size(part) for part in parts]
        largest = parts.pop(sizes.index(max(sizes)))
        B = len(positions(largest))
        if B < 2:
            raise ValueError(f"{len(sizes)} rows cannot be divided into {n} parts")
        rows_B = torch.arange(B)
        parts += [take(largest, rows_B[: B // 2]), take(largest, rows_B[B // 2 :])]
    return parts


def take(batch: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Some rows of a batch of SFT, or of outputs; their segments are cut to the longest of these rows."""
    rows = {name: column[index] for name, column in batch.items()}
    for name, lengths in PADDED.items():
        if name in rows:
            rows[name] = rows[name][:, : int(rows[lengths].max())]
    return rows
