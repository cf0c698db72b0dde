"""The loss of a batch of rows, as the module that Trainer wraps, and the division of a batch into parts.

A batch with more positions than `training.tokens_per_batch` goes through the model in parts:

    batch           ------------            8 rows, in any order
                    ---
                    --------     ...
    parts           ------------ | -------- | ---- ---- ---         the longest first, rows of like length together
                                 | -------  | --- --- --

The parts' losses add up to the batch's, so rows, updates and the course of a run are the same with any limit.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from colar.methods.base import Batch, Method, Row
from colar.methods.rollouts import Rollouts
from colar.model import lora
from colar.model.latent_lm import LatentLM
from colar.ops import devices
from colar.ops.ragged import round_up

PADDED = {**Batch.padded, **Rollouts.padded}


class Objective(nn.Module):
    """The module that Trainer wraps: `forward(batch=Batch.tensors())` -> {"loss": scalar, term: mean over rows}.

        loss of an update = sum over the rows of its global batch of (sum of the row's terms) / number of those rows

    The loss and its gradient are the same for any split of the rows into devices and accumulation steps. The objective
    must be the module's forward: a `compute_loss` that called `method.loss(unwrapped_model)` would bypass
    DistributedDataParallel, and gradients would not be synchronised between processes.
    """

    accepts_loss_kwargs = True
    """Trainer passes `num_items_in_batch`."""

    def __init__(self, lm: LatentLM, method: Method) -> None:
        super().__init__()
        self.lm = lm
        self.method = method
        self.adapted_layers = lora.adapted_layers(lm)

    def casts_left_to_autocast(self) -> AbstractContextManager[None]:
        """`lora.casts_left_to_autocast` of this model's layers."""
        # A backward pass outside of the block may compute layers again, and their dropout has to see the same dtype.
        # Without an adapter the property is not asked: it searches the whole model.
        recomputes = bool(self.adapted_layers) and self.lm.causal_lm.is_activation_checkpointing
        return lora.casts_left_to_autocast([] if recomputes else self.adapted_layers, self.lm.device)

    def forward(
        self,
        num_items_in_batch: Tensor | int | None = None,
        batch: Mapping[str, Tensor] | None = None,
        **tensors: Tensor,
    ) -> dict[str, Any]:
        """The rows' losses summed and divided by `num_items_in_batch`, the rows of the global batch.

        Without `num_items_in_batch`, divided by the number of rows given. The tensors, in `batch` or by name, are on
        the CPU, so that Python can branch on them without synchronising with a GPU. Rows for which `counted` (B,) is
        False have weight 0 (`mark_copies`). A term whose name starts with "_" is logged without the underscore, and not
        part of the loss.
        """
        tensors = {**(batch or {}), **tensors}
        with self.casts_left_to_autocast():
            terms = self.method.loss(self.lm, Batch.from_tensors(tensors))
        losses_B = sum(term for name, term in terms.items() if not name.startswith("_"))
        assert isinstance(losses_B, Tensor), "a method's loss has at least one term"
        everyone_B = torch.ones(losses_B.shape, dtype=torch.bool)
        counted_B = devices.beside(tensors.get("counted", everyone_B), losses_B)
        rows = counted_B.sum().clamp(min=1)
        # Not this batch's mean: its rows are a part of the update, and the parts must add up to the update's mean.
        count = rows if num_items_in_batch is None else num_items_in_batch
        outputs: dict[str, Any] = {}
        for name, term_B in terms.items():
            term_B = devices.beside(term_B.detach(), losses_B)
            own_B = torch.where(counted_B, term_B.float(), 0.0)
            outputs[name.removeprefix("_")] = own_B.sum() / rows
        outputs["loss"] = torch.where(counted_B, losses_B, 0.0).sum() / count
        return outputs


def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows as the flat dict of tensors that `Objective.forward` takes."""
    return Batch.collate(rows).tensors()


def count_rows(batch: dict[str, Tensor]) -> int:
    """Number of rows of a batch; copies (`mark_copies`) do not count."""
    if "counted" in batch:
        return int(batch["counted"].sum())
    return len(next(iter(batch.values())))


def mark_copies(
    batches: Sequence[dict[str, Tensor]], first: int, size: int, process: int, n_processes: int, n_rows: int
) -> None:
    """Add a column `counted`, False for copies, to the batches that hold copies.

        epoch of 10 rows, batches of 2, three processes      process 0     process 1     process 2
        first turn                                           0 1           2 3           4 5
        second turn                                          6 7           8 9           copies of 0 1

    accelerate fills the last turn with the epoch's first rows, so that every process has a batch. `first` is the turn
    of the first of `batches`, `size` the rows of a batch.
    """
    for turn, batch in enumerate(batches, first):
        rows = count_rows(batch)
        own = n_rows - (turn * n_processes + process) * size
        if own < rows:
            batch["counted"] = torch.arange(rows) < own


def part_indices(lengths_B: Tensor, most: int | None) -> list[Tensor]:
    """Divide rows of these lengths into parts of at most `most` positions, padding included; returns rows' indices.

    A longer row is a part of its own. Rows that fit together, or have no limit, are one part in their given order.
    """
    B = lengths_B.shape[0]
    if most is None or B == 0 or B * round_up(int(lengths_B.max())) <= most:
        return [torch.arange(B, device=lengths_B.device)]
    # The longest first, so that a run that does not fit into memory fails at the first part.
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
    """The same rows in `n` parts or more: the largest part of at least two rows is halved until there are `n`.

    `positions` gives the length of each row of a part. ValueError for fewer rows than parts.
    """

    def size(part: dict[str, Tensor]) -> tuple[bool, int]:
        lengths_B = positions(part)
        # A part of one row cannot be divided, however long it is.
        return len(lengths_B) > 1, int(lengths_B.max()) * len(lengths_B)

    parts = list(parts)
    while len(parts) < n:
        largest = max(range(len(parts)), key=lambda place: size(parts[place]))
        part = parts.pop(largest)
        B = len(positions(part))
        if B < 2:
            raise ValueError(f"{len(parts) + 1} rows cannot be divided into {n} parts")
        rows_B = torch.arange(B)
        parts += [take(part, rows_B[: B // 2]), take(part, rows_B[B // 2 :])]
    return parts


def take(batch: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Some rows of an SFT batch or of outputs, with padded segments cut to the longest of these rows."""
    rows = {name: column[index] for name, column in batch.items()}
    for name, lengths in PADDED.items():
        if name in rows:
            rows[name] = rows[name][:, : int(rows[lengths].max())]
    return rows
