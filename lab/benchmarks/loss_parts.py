"""The part of an update that makes logits, alone: today's way in chunks, the way before, and torch's own.

    before    the logits of all positions at once, operation for operation as the package made them before
              `model/head.py`: 3 float32 numbers for each label and token of the vocabulary, 5 in GRPO's scores
    ours      in chunks
    torch     torch.nn.functional.linear_cross_entropy with chunks

`memory.py` measures them. Shape suffixes: N positions, L thoughts and M others among them, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colar.methods import losses
from colar.methods.rollouts import logps_and_entropy
from colar.model.head import CHUNK_BYTES_ON_CPU, ValuesOf, in_chunks, positions_of

V, D = 128_256, 256
Values = tuple[Tensor, ...]


def inputs(n: int, dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A frozen LM head, hidden states (N, D) that take gradient, ids (N,), and each position's temperature (N,)."""
    torch.manual_seed(0)
    head = nn.Linear(D, V, bias=False, dtype=dtype).requires_grad_(False)
    hidden_ND = torch.randn(n, D, dtype=dtype, requires_grad=True)
    return head, hidden_ND, torch.randint(V, (n,)), torch.full((n,), 0.9)


def part_alone(
    kind: str, system: str, head: nn.Linear, hidden_ND: Tensor, ids_N: Tensor, scale_N: Tensor
) -> Values:
    """The values at each position, and the gradient of their sum to the hidden states."""
    made: dict[str, Callable[..., Values]] = {
        "before:loss": loss_before,
        "before:score": score_before,
        "ours:loss": loss_ours,
        "ours:score": score_ours,
        "torch:loss": loss_torch,
    }
    values = made[f"{system}:{kind}"](head, hidden_ND, ids_N, scale_N)
    (gradient_ND,) = torch.autograd.grad(values[0].sum(), hidden_ND)
    return *values, gradient_ND


def loss_before(head: nn.Linear, hidden_ND: Tensor, ids_N: Tensor, scale_N: Tensor) -> Values:
    """As `methods/losses.py` was."""
    log_probs_NV = head(hidden_ND).float().log_softmax(-1)
    return (-(log_probs_NV.gather(1, ids_N[:, None]) * torch.ones(len(ids_N), 1)).sum(-1),)


def loss_ours(head: nn.Linear, hidden_ND: Tensor, ids_N: Tensor, scale_N: Tensor) -> Values:
    columns = (ids_N[:, None], torch.ones(len(ids_N), 1))
    return _in_chunks(losses.position_losses, head, hidden_ND, *columns)


def loss_torch(head: nn.Linear, hidden_ND: Tensor, ids_N: Tensor, scale_N: Tensor) -> Values:
    options = nn.LinearCrossEntropyOptions()
    return (F.linear_cross_entropy(hidden_ND, head.weight, ids_N, reduction="none", options=options),)


def score_before(head: nn.Linear, hidden_ND: Tensor, ids_N: Tensor, scale_N: Tensor) -> Values:
    """As `methods/rollouts.py` was, with every second action a thought of CoT's."""
    thought_N = torch.arange(len(ids_N)) % 2 == 0
    logits_NV = head(hidden_ND).float()
    scaled_NV = logits_NV / scale_N[:, None]
    total_N = scaled_NV.logsumexp(-1)
    logps_N = scaled_NV.gather(1, ids_N[:, None])[:, 0] - total_N
    # The thoughts' logits, before and after the division, were handed to the method.
    handed = (logits_NV[thought_N], scaled_NV[thought_N])
    chosen_L = handed[1].gather(1, ids_N[thought_N][:, None])[:, 0] - total_N[thought_N]
    logps_N = logps_N.masked_scatter(thought_N, chosen_L)
    with torch.no_grad():
        log_probs = scaled_NV[~thought_N] - total_N[~thought_N, None]
        entropy_M = -(log_probs.exp() * log_probs).sum(-1)
    return logps_N, entropy_M


def score_ours(head: nn.Linear, hidden_ND: Tensor, ids_N: Tensor, scale_N: Tensor) -> Values:
    thought_N = torch.arange(len(ids_N)) % 2 == 0
    written = (hidden_ND[~thought_N], ids_N[~thought_N], scale_N[~thought_N])
    logps_M, entropy_M = _in_chunks(logps_and_entropy, head, *written)
    thoughts = (hidden_ND[thought_N], ids_N[thought_N], scale_N[thought_N])
    (logps_L,) = _in_chunks(losses.chosen_logps, head, *thoughts)
    logps_N = logps_M.new_zeros(len(ids_N)).masked_scatter(~thought_N, logps_M)
    return logps_N.masked_scatter(thought_N, logps_L), entropy_M


def _in_chunks(reduce: ValuesOf, head: nn.Linear, hidden_ND: Tensor, *columns: Tensor) -> Values:
    size = positions_of(CHUNK_BYTES_ON_CPU, V)

    def values_of(hidden_CD: Tensor, *own: Tensor) -> Values:
        return reduce(head(hidden_CD).float(), *own)

    return in_chunks(values_of, hidden_ND, columns, size)
