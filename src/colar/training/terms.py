"""The terms of the loss between two logs: their means, and the first update in which a number is not finite.

All stays on the device until `means` or `require_finite`, so that no step synchronises with a GPU.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from colar.checks import NonFiniteError
from colar.ops import devices


class LossTerms:
    """Terms of the loss, added batch by batch. `gather` joins a tensor of every process along its first dimension."""

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        self.gather = gather
        self.sums: dict[str, Tensor] = {}
        self.rows = 0
        self.of_update: dict[str, Tensor] = {}
        """Each term, the loss included, in the present update: its last value, or the first that is not finite."""
        self.last_update: Tensor | None = None
        """Step, gradient norm and terms of the last update, or of the first in which one is not finite: a row for each
        process."""

    def add(self, means: dict[str, Tensor], rows: int) -> None:
        """Add the means of each term over the rows of a batch, or of a part of one."""
        self.rows += rows
        for name, mean in means.items():
            mean = mean.detach()
            before = self.of_update.get(name)
            self.of_update[name] = mean if before is None else torch.where(before.isfinite(), mean, before)
            if name != "loss":
                # Weighted by rows, because the last batch of an epoch may be shorter.
                self.sums[name] = self.sums.get(name, 0) + mean * rows

    def end_update(self, step: int, norm: Tensor | float) -> Tensor:
        """True, as a tensor, if loss, terms and gradient norm of all updates so far are finite in every process."""
        # The norm alone is not enough: a term may be infinite where its gradient is 0.
        terms = [term.float().reshape(()) for term in self.of_update.values()]
        norm = torch.as_tensor(norm, dtype=torch.float32, device=terms[0].device)
        # A term may be infinite in one process alone, but all must skip the update and end with the same error.
        update = self.gather(torch.stack([torch.full_like(norm, step), norm, *terms])[None])
        before = self.last_update
        self.last_update = update if before is None else torch.where(before.isfinite().all(), update, before)
        return self.last_update.isfinite().all()

    def require_finite(self) -> None:
        """Raise NonFiniteError if an update had a loss or a gradient that is not finite."""
        if self.last_update is None:
            return
        for step, norm, *terms in self.last_update.tolist():
            found = dict(zip(self.of_update, terms, strict=True)) | {"gradient norm": norm}
            if not all(map(math.isfinite, found.values())):
                values = ", ".join(f"{name} {value:g}" for name, value in found.items())
                raise NonFiniteError(
                    f"step {step:.0f}: {values}; training stops before it reaches the weights"
                )

    def means(self, device: torch.device) -> dict[str, float]:
        """Mean of each term over the rows of all processes since the last call."""
        # One vector [sum of term 1, sum of term 2, ..., rows] and one gather: every gather waits for all processes.
        sums = [devices.to_widest(value).reshape(()) for value in self.sums.values()]
        rows_here = devices.send(torch.tensor(float(self.rows), dtype=torch.float64), device)
        *totals, rows = self.gather(torch.stack([*sums, rows_here])[None]).sum(0).tolist()
        means = {name: total / max(rows, 1) for name, total in zip(self.sums, totals, strict=True)}
        self.sums, self.rows = {}, 0
        return means
