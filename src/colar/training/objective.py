"""The one module that Trainer wraps: a model and its method's loss.

    loss of an update = sum over the rows of its global batch of (sum of the row's terms) / number of those rows

Whatever way the rows are split into devices and accumulation steps, the loss and its gradient are the same.
The forward IS the objective: a `compute_loss` that called `method.loss(unwrapped_model)` would go round
DistributedDataParallel, and the processes' gradients would never meet.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from colar.methods.base import Batch, Method
from colar.model.latent_lm import LatentLM


class Objective(nn.Module):
    """`forward(**Batch.tensors())` -> {"loss": scalar, name: detached mean over the rows of each term}."""

    accepts_loss_kwargs = True
    """Trainer hands over `num_items_in_batch`, and takes the loss as already scaled for accumulation."""

    def __init__(self, lm: LatentLM, method: Method) -> None:
        super().__init__()
        self.lm, self.method = lm, method

    def forward(self, num_items_in_batch: Tensor | int | None = None, **tensors: Tensor) -> dict[str, Any]:
        """The rows' losses summed and divided by `num_items_in_batch`, the rows of the global batch.

        Without it, by the rows given. Names that start with "_" are logged without it, and no part of the loss.
        """
        terms = self.method.loss(self.lm, Batch.from_tensors(tensors))
        rows_B = sum(term for name, term in terms.items() if not name.startswith("_"))
        assert isinstance(rows_B, Tensor), "a method's loss has at least one term"
        count = rows_B.shape[0] if num_items_in_batch is None else num_items_in_batch
        means = {name.removeprefix("_"): term.detach().float().mean() for name, term in terms.items()}
        return {**means, "loss": rows_B.sum() / count}
