"""The running rows as columns: what each of them is, has done, and asks for next.

Shape suffixes: N rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar.engine.request import Request
from colar.engine.scheduler import Queued
from colar.methods.base import Method, ThinkState, param_columns
from colar.model.latent_lm import LatentLM


@dataclass
class Running:
    """Index i of every column belongs to slot i of the cache."""

    entries: list[Queued]
    hidden_ND: Tensor
    """Last hidden state: what the next thought or token comes from."""
    first_ND: Tensor
    """The one after the question: where another sample of it starts."""
    position_N: Tensor
    """The column that is fed next, which is its position too."""
    thinking_N: Tensor
    n_thoughts_N: Tensor
    n_tokens_N: Tensor
    step_N: Tensor
    seed_N: Tensor
    sample_N: Tensor
    temperature_N: Tensor
    top_p_N: Tensor
    latent_temperature_N: Tensor
    max_latents_N: Tensor
    max_tokens_N: Tensor
    params: dict[str, Tensor]
    begun: dict[str, Tensor]
    """The method's own columns (N, ...), from its `begin`."""
    seconds: list[float]
    cut: list[bool]

    @classmethod
    def start(
        cls,
        entries: Sequence[Queued],
        hidden_ND: Tensor,
        begun: dict[str, Tensor],
        seconds: Sequence[float],
    ) -> Running:
        """Rows whose questions have been read."""
        device = hidden_ND.device
        requests = [entry.request for entry in entries]

        def whole(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=device, dtype=torch.int64)

        def real(name: str) -> Tensor:
            values = [getattr(request.decoding, name) for request in requests]
            return torch.tensor(values, device=device, dtype=torch.float64)

        zeros = whole(0 for _ in requests)
        return cls(
            entries=list(entries),
            hidden_ND=hidden_ND,
            first_ND=hidden_ND,
            position_N=whole(len(entry.ids) for entry in entries),
            thinking_N=zeros == 0,
            n_thoughts_N=zeros.clone(),
            n_tokens_N=zeros.clone(),
            step_N=zeros.clone(),
            seed_N=whole(request.seed for request in requests),
            sample_N=whole(request.sample for request in requests),
            temperature_N=real("temperature"),
            top_p_N=real("top_p"),
            latent_temperature_N=real("latent_temperature"),
            max_latents_N=whole(request.decoding.max_latents for request in requests),
            max_tokens_N=whole(request.decoding.max_completion_length for request in requests),
            params={k: v.to(device) for k, v in param_columns([r.params for r in requests]).items()},
            begun=begun,
            seconds=list(seconds),
            cut=[False] * len(requests),
        )

    def __len__(self) -> int:
        return len(self.entries)

    def request(self, i: int) -> Request:
        return self.entries[i].request

    def take(self, index: list[int]) -> Running:
        """The rows at these indices, in this order."""
        at = torch.tensor(index, device=self.hidden_ND.device, dtype=torch.int64)
        return self._map(lambda column: column[at], lambda column: [column[i] for i in index])

    def join(self, other: Running) -> Running:
        """These rows, then the others."""
        names = iter(_names(other))
        tensors = iter(_tensors(other))
        return self._map(
            lambda column: torch.cat([column, next(tensors)]),
            lambda column: column + getattr(other, next(names)),
        )

    def _map(self, tensor: Callable[[Tensor], Tensor], listed: Callable[[list[Any]], list[Any]]) -> Running:
        made: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, dict):
                made[name] = {key: tensor(column) for key, column in value.items()}
            else:
                made[name] = tensor(value) if isinstance(value, Tensor) else listed(value)
        return Running(**made)

    def charge(self, seconds: float) -> None:
        """Divide the time of a step between the rows that ran in it."""
        share = seconds / max(len(self), 1)
        self.seconds = [spent + share for spent in self.seconds]

    def think_state(self, at: Tensor, logits: Callable[[Tensor], Tensor]) -> ThinkState:
        """Rows `at` as a method sees them."""
        return ThinkState(
            hidden=self.hidden_ND[at],
            step=self.step_N[at],
            params={name: column[at] for name, column in self.params.items()},
            temperature=self.temperature_N[at],
            top_p=self.top_p_N[at],
            latent_temperature=self.latent_temperature_N[at],
            seed=self.seed_N[at],
            sample=self.sample_N[at],
            make_logits=logits,
            begun={name: column[at] for name, column in self.begun.items()},
        )


def begin(
    lm: LatentLM, method: Method, entries: Sequence[Queued], running: Running | None
) -> dict[str, Tensor]:
    """The method's own columns for requests that start now, to be joined to those of the running rows.

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
        now, then = _row_kind(begun, name), _row_kind(before, name)
        if now != then:
            raise ValueError(
                f"method {method.name}: begin gave column {name!r} {now}, but {then} to the rows that are running; "
                "all rows share a batch, so it must not depend on the request"
            )


def _row_kind(begun: dict[str, Tensor], name: str) -> str:
    """Shape and dtype of one row of a column, as an error names them."""
    if name not in begun:
        return "no row"
    return f"rows of shape {tuple(begun[name].shape[1:])} in {begun[name].dtype}"


def _names(running: Running) -> list[str]:
    return [name for name, value in vars(running).items() if isinstance(value, list)]


def _tensors(running: Running) -> list[Tensor]:
    found: list[Tensor] = []
    for value in vars(running).values():
        found += list(value.values()) if isinstance(value, dict) else [value] * isinstance(value, Tensor)
    return found
