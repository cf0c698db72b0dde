"""The running requests as columns: one row for each, its state and its limits.

    slot of the cache      0        1        2
    entries                r7       r3       r9         the requests
    thinks                 True     False    True       r3 answers
    step_N, steps          2        9        0          embeddings fed since the question
    position_N             14       31       11         column of the cache that is fed next

Index i of every column belongs to slot i of the cache: when a row moves to another slot, its columns move along.

Tensors are what the device computes with. What Python decides by is in lists: to look at a tensor is to wait for a GPU.

Shape suffixes: N rows, D width, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar.engine.scheduler import Queued
from colar.methods.base import Method, ThinkState, param_columns
from colar.model.head import HeadRows
from colar.model.latent_lm import LatentLM
from colar.ops import devices


@dataclass
class Running:
    """All running rows. Every field is a column: a tensor, a list, or a dict of tensors."""

    entries: list[Queued]
    hidden_ND: Tensor
    """Last hidden state: the next thought or token comes from it."""
    first_ND: Tensor
    """The hidden state after the question: another sample of it starts there."""
    position_N: Tensor
    """The column of the cache that is fed next, which is the position too."""
    step_N: Tensor
    """Embeddings fed since the question. While a row thinks, these are its thoughts."""
    seed_N: Tensor
    sample_N: Tensor
    temperature_N: Tensor
    top_p_N: Tensor
    latent_temperature_N: Tensor
    max_latents_N: Tensor
    params: dict[str, Tensor]
    """The requests' params, a column (N,) for each field."""
    begun: dict[str, Tensor]
    """The method's own columns (N, ...), made by its `begin`."""
    thinks: list[bool]
    """Whether the row thinks; it answers otherwise."""
    steps: list[int]
    """`step_N`, in Python."""
    n_tokens: list[int]
    """Tokens of the answer that have been chosen."""
    seconds: list[float]
    """Share of wall-clock time until now."""
    cut: list[bool]
    """Whether the thinking met its limit."""
    said: list[int]
    """Events until now, those of an earlier start included (`Queued.said`)."""

    @classmethod
    def start(
        cls,
        entries: Sequence[Queued],
        hidden_ND: Tensor,
        begun: dict[str, Tensor],
        seconds: Sequence[float],
    ) -> Running:
        """Rows whose questions have been read; `hidden_ND` is the hidden state after them."""
        device = hidden_ND.device
        requests = [entry.request for entry in entries]
        decodings = [request.decoding for request in requests]
        params = param_columns([request.params for request in requests])

        def whole(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.int64)

        def real(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device, dtype=devices.widest(device))

        # Limits and temperatures become columns once, here: a step does arithmetic on tensors.
        n = len(requests)
        return cls(
            entries=list(entries),
            hidden_ND=hidden_ND,
            first_ND=hidden_ND,
            position_N=whole([len(entry.ids) for entry in entries]),
            step_N=whole([0] * n),
            seed_N=whole([request.seed for request in requests]),
            sample_N=whole([request.sample for request in requests]),
            temperature_N=real([decoding.temperature for decoding in decodings]),
            top_p_N=real([decoding.top_p for decoding in decodings]),
            latent_temperature_N=real([decoding.latent_temperature for decoding in decodings]),
            max_latents_N=whole([decoding.max_latents for decoding in decodings]),
            params={name: devices.send(column, device) for name, column in params.items()},
            begun=begun,
            thinks=[True] * n,
            steps=[0] * n,
            n_tokens=[0] * n,
            seconds=list(seconds),
            cut=[False] * n,
            said=[0] * n,
        )

    def __len__(self) -> int:
        return len(self.entries)

    def take(self, rows: list[int]) -> Running:
        """Only these rows, in this order."""
        rows_N = devices.numbers(rows, self.hidden_ND.device)
        # A loop over all fields: one that is added cannot be forgotten here, which would mix up requests.
        taken: dict[str, Any] = {}
        for name, column in vars(self).items():
            if isinstance(column, Tensor):
                taken[name] = column[rows_N]
            elif isinstance(column, dict):
                taken[name] = {key: value[rows_N] for key, value in column.items()}
            else:
                taken[name] = [column[i] for i in rows]
        return Running(**taken)

    def join(self, other: Running) -> Running:
        """These rows, then the others."""
        joined: dict[str, Any] = {}
        for name, column in vars(self).items():
            more = getattr(other, name)
            if isinstance(column, Tensor):
                joined[name] = torch.cat([column, more])
            elif isinstance(column, dict):
                joined[name] = {key: torch.cat([value, more[key]]) for key, value in column.items()}
            else:
                joined[name] = column + more
        return Running(**joined)

    def draft(self) -> Running:
        """The same rows, for a step that may fail: it may change the lists, and give columns a new tensor."""
        # A copy without a look at each field, as `replace` takes it: this is done in every step.
        draft = copy.copy(self)
        draft.thinks = list(self.thinks)
        draft.n_tokens = list(self.n_tokens)
        draft.cut = list(self.cut)
        draft.said = list(self.said)
        return draft

    def stopped(self, i: int) -> Queued:
        """The request of a row that has to start anew, later."""
        entry = self.entries[i]
        if self.said[i] <= entry.said:
            return entry
        return dataclasses.replace(entry, said=self.said[i], alone=0)

    def position(self, i: int) -> int:
        """`position_N` of a row, in Python."""
        return len(self.entries[i].ids) + self.steps[i]

    def fed(self, hidden_ND: Tensor) -> None:
        """Note that each row was fed its next embedding, and what came out."""
        self.hidden_ND = hidden_ND
        self.position_N = self.position_N + 1
        self.step_N = self.step_N + 1
        self.steps = [step + 1 for step in self.steps]

    def charge(self, seconds: float) -> None:
        """Divide the time of a step between the rows that ran in it."""
        share = seconds / len(self)
        self.seconds = [spent + share for spent in self.seconds]

    def think_state(
        self,
        rows: Sequence[int],
        rows_B: Tensor,
        hidden_ND: Tensor,
        logits: Callable[[Tensor], Tensor],
        head_rows: Callable[[tuple[int, ...]], HeadRows],
    ) -> ThinkState:
        """Some of the rows, in Python and on the device, as a method sees them; `hidden_ND` is that of all rows."""
        return ThinkState(
            hidden=hidden_ND[rows_B],
            step=self.step_N[rows_B],
            params={name: column[rows_B] for name, column in self.params.items()},
            temperature=self.temperature_N[rows_B],
            top_p=self.top_p_N[rows_B],
            latent_temperature=self.latent_temperature_N[rows_B],
            seed=self.seed_N[rows_B],
            sample=self.sample_N[rows_B],
            make_logits=logits,
            begun={name: column[rows_B] for name, column in self.begun.items()},
            wants_info=any(entry.request.keep_latents for entry in self.entries),
            make_head_rows=head_rows,
            asked=[self.entries[i].request for i in rows],
        )


def begin(
    lm: LatentLM, method: Method, entries: Sequence[Queued], running: Running | None
) -> dict[str, Tensor]:
    """Ask the method for its own columns of requests that start now, to be joined to those of the running rows.

    ValueError where a column has another number of rows than there are requests, or is not like the running ones.
    """
    begun = method.begin(lm, [entry.request for entry in entries])
    for name, column in begun.items():
        if column.shape[:1] != (len(entries),):
            raise ValueError(
                f"method {method.name}: begin gave column {name!r} the shape {tuple(column.shape)} for "
                f"{len(entries)} requests; it must have one row for each"
            )
    if running is not None:
        _check_alike(method, begun, running.begun)
    return begun


def _check_alike(method: Method, begun: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """ValueError where rows that begin now cannot share a batch with those that began before."""
    for name in sorted(begun.keys() | before.keys()):
        # Said in words first: the error shows the same that is compared.
        now = _row_kind(begun, name)
        then = _row_kind(before, name)
        if now != then:
            raise ValueError(
                f"method {method.name}: begin gave column {name!r} {now}, but {then} to the rows that are running; "
                "all rows share a batch, so it must not depend on the request"
            )


def _row_kind(begun: dict[str, Tensor], name: str) -> str:
    """Shape and dtype of one row of a column, as an error names them."""
    if name not in begun:
        return "no row"
    column = begun[name]
    return f"rows of shape {tuple(column.shape[1:])} in {column.dtype}"
