"""The loss of a batch of rows, as the module that Trainer wraps, and the sums of its terms for the log."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colar.methods.base import Batch, Method
from colar.model import lora
from colar.model.latent_lm import LatentLM
from colar.ops import devices


class Objective(nn.Module):
    """The module that Trainer wraps: `forward(**Batch.tensors())` -> {"loss": scalar, term: detached mean over rows}.

        loss of an update = sum over the rows of its global batch of (sum of the row's terms) / number of those rows

    However the rows are split into devices and accumulation steps, the loss and its gradient are the same. The forward
    IS the objective: a `compute_loss` that called `method.loss(unwrapped_model)` would go round
    DistributedDataParallel, and the processes' gradients would never meet.
    """

    accepts_loss_kwargs = True
    """Trainer passes `num_items_in_batch`, and takes the loss as already scaled for accumulation."""

    def __init__(self, lm: LatentLM, method: Method) -> None:
        super().__init__()
        self.lm = lm
        self.method = method

    def forward(self, num_items_in_batch: Tensor | int | None = None, **tensors: Tensor) -> dict[str, Any]:
        """The rows' losses summed and divided by `num_items_in_batch`, the rows of the global batch.

        The tensors are on the CPU, so that all that Python decides by them waits for no GPU. Without
        `num_items_in_batch`, by the rows given. Rows for which `counted` (B,) is False weigh nothing: copies that give
        every process a batch at the end of an epoch. A term whose name starts with "_" is no part of the loss, and is
        logged without the underscore.
        """
        with lora.casts_left_to_autocast(self.lm.causal_lm):
            terms = self.method.loss(self.lm, Batch.from_tensors(tensors))
        losses_B = sum(term for name, term in terms.items() if not name.startswith("_"))
        assert isinstance(losses_B, Tensor), "a method's loss has at least one term"
        # Not this batch's mean: its rows are a part of the update, and the parts must add up to the update's mean.
        counted_B = tensors.get("counted")
        if counted_B is None:
            counted_B = torch.ones(losses_B.shape, dtype=torch.bool)
        counted_B = devices.beside(counted_B, losses_B)
        rows = counted_B.sum().clamp(min=1)
        count = rows if num_items_in_batch is None else num_items_in_batch
        outputs: dict[str, Any] = {}
        for name, term_B in terms.items():
            term_B = devices.beside(term_B.detach(), losses_B)
            own_B = torch.where(counted_B, term_B.float(), 0.0)
            outputs[name.removeprefix("_")] = own_B.sum() / rows
        outputs["loss"] = torch.where(counted_B, losses_B, 0.0).sum() / count
        return outputs


class LossTermSums:
    """Sums of the loss's terms since the last log, on the device: no synchronisation at a step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew, after a log."""
        self.sums: dict[str, Tensor] = {}
        self.rows = 0

    def add(self, means: dict[str, Tensor], rows: int) -> None:
        """Add the means of each term over the rows of a batch."""
        self.rows += rows
        for name, mean in means.items():
            if name != "loss":
                self.sums[name] = self.sums.get(name, 0) + mean * rows

    def means(self, gather: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, float]:
        """Mean of each term over the summed rows of all processes."""
        # One vector [sum of term 1, sum of term 2, ..., rows] and one gather, for every gather waits for all processes.
        parts = [devices.to_widest(value).reshape(()) for value in self.sums.values()]
        parts.append(devices.send(torch.tensor(float(self.rows), dtype=torch.float64), device))
        *totals, rows = gather(torch.stack(parts)[None]).sum(0).tolist()
        return {name: total / max(rows, 1) for name, total in zip(self.sums, totals, strict=True)}
