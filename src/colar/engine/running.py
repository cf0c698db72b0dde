"""The running requests as columns: one row for each, its state and its limits.

    slot of the cache      0        1        2
    entries                r7       r3       r9         the requests
    thinks                 True     False    True       r3 answers
    step_N, n_fed          2        9        0          embeddings fed since the question
    position_N             14       31       11         column of the cache that is fed next

Index i of every column belongs to slot i of the cache: if a row moves to another slot, its columns move with it.

Tensors are what the device computes with. Values that Python branches on are in lists: reading a
tensor synchronises.

Shape suffixes: N rows, B some of them, D width.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar.engine.cache import SlotCache
from colar.engine.scheduler import Entry
from colar.methods.thinking import Branches, ThinkState, param_columns, sampling_columns
from colar.model.vocabulary import PartialHead
from colar.ops import devices


@dataclass
class RunningRows:
    """All running rows. Every field is a column: a tensor, a list, or a dict of tensors."""

    entries: list[Entry]
    hidden_ND: Tensor
    """Last hidden state: the next thought or token comes from it."""
    first_ND: Tensor
    """The hidden state after the question: another sample of it starts there."""
    position_N: Tensor
    """The column of the cache that is fed next, which is the position too."""
    step_N: Tensor
    """Embeddings fed since the question. While a row thinks, these are its thoughts."""
    max_latents_N: Tensor
    sampling: dict[str, Tensor]
    """The requests' columns (N,) by which thoughts and tokens are drawn (`sampling_columns`)."""
    params: dict[str, Tensor]
    """The requests' params, a column (N,) for each field."""
    begun: dict[str, Tensor]
    """The method's own columns (N, ...), made by its `begin`."""
    thinks: list[bool]
    """True while the row thinks, False while it answers."""
    n_fed: list[int]
    """`step_N`, in Python."""
    n_tokens: list[int]
    """Tokens of the answer that have been chosen."""
    seconds: list[float]
    """Share of wall-clock time until now."""
    cut: list[bool]
    """True once the thinking has met its limit."""
    reported: list[int]
    """Events since the row started, those included that were reported before it was preempted (`Entry.reported`)."""
    next_ND: Tensor | None = None
    """The embedding that is fed next; None for all rows until it is chosen."""
    _branches: Branches | None = None
    """Until a row joins or leaves."""

    @classmethod
    def start(
        cls, entries: Sequence[Entry], hidden_ND: Tensor, begun: dict[str, Tensor], seconds: float
    ) -> "RunningRows":
        """Rows whose questions are in the cache, with the hidden states after them; each took `seconds`."""
        device = hidden_ND.device
        requests = [entry.request for entry in entries]
        limits = [request.decoding.max_latents for request in requests]
        # Limits and temperatures become columns once, here: a step does arithmetic on tensors.
        n = len(requests)
        return cls(
            entries=list(entries),
            hidden_ND=hidden_ND,
            first_ND=hidden_ND,
            position_N=devices.numbers([len(entry.ids) for entry in entries], device),
            step_N=devices.numbers([0] * n, device),
            max_latents_N=devices.numbers(limits, device),
            sampling=sampling_columns(requests, device),
            params=param_columns([request.params for request in requests], device),
            begun=begun,
            thinks=[True] * n,
            n_fed=[0] * n,
            n_tokens=[0] * n,
            seconds=[seconds] * n,
            cut=[False] * n,
            reported=[0] * n,
        )

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def widest(self) -> int:
        """The most positions that one of the rows may need."""
        return max((entry.most_positions for entry in self.entries), default=0)

    def position(self, i: int) -> int:
        """`position_N` of a row, in Python."""
        return len(self.entries[i].ids) + self.n_fed[i]

    # Rows join and leave

    def append(self, other: "RunningRows") -> None:
        """Add these rows behind the others."""
        self._branches = None
        if not len(self):
            vars(self).update(vars(other))
            return
        # A loop over all fields: one that is added cannot be forgotten here, which would mix up requests.
        for name, column in list(vars(self).items()):
            more = getattr(other, name)
            if isinstance(column, Tensor):
                setattr(self, name, torch.cat([column, more]))
            elif isinstance(column, dict):
                setattr(self, name, {key: torch.cat([value, more[key]]) for key, value in column.items()})
            elif isinstance(column, list):
                setattr(self, name, column + more)

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self._branches = None
        rows_N = devices.numbers(rows, self.hidden_ND.device)
        for name, column in list(vars(self).items()):
            if isinstance(column, Tensor):
                setattr(self, name, column[rows_N])
            elif isinstance(column, dict):
                setattr(self, name, _taken(column, rows_N))
            elif isinstance(column, list):
                setattr(self, name, [column[i] for i in rows])

    def remove(self, done: Collection[int], cache: SlotCache) -> None:
        """Remove these rows; the last ones move into their slots."""
        # Rows lie in the first slots, without a gap.
        #
        #     slot       0    1    2    3    4        done: 1 and 3
        #     before     a    b    c    d    e
        #     after      a    e    c
        if not done:
            return
        n_left = len(self) - len(done)
        holes = [i for i in done if i < n_left]
        movers = [i for i in range(n_left, len(self)) if i not in done]
        if movers:
            cache.copy(movers, holes, max(map(self.position, movers)))
        left = list(range(n_left))
        for hole, mover in zip(holes, movers, strict=True):
            left[hole] = mover
        self.keep(left)

    def preempted(self, i: int) -> Entry:
        """The request of a row that has to start anew, later."""
        entry = self.entries[i]
        return dataclasses.replace(entry, reported=max(self.reported[i], entry.reported))

    # A step

    @property
    def branches(self) -> Branches:
        """The branches of a step of these rows."""
        if self._branches is None:
            self._branches = Branches.of_requests([entry.request for entry in self.entries])
        return self._branches

    def fed(self, hidden_ND: Tensor) -> None:
        """Note that each row was fed its next embedding, and the hidden state that came out."""
        self.next_ND = None
        self.hidden_ND = hidden_ND
        self.position_N = self.position_N + 1
        self.step_N = self.step_N + 1
        self.n_fed = [n + 1 for n in self.n_fed]

    def charge(self, seconds: float) -> None:
        """Divide the time of a step among the rows."""
        share = seconds / len(self)
        self.seconds = [spent + share for spent in self.seconds]

    def think_state(
        self,
        rows_B: Tensor,
        hidden_ND: Tensor,
        logits: Callable[[Tensor], Tensor],
        partial_head: Callable[[tuple[int, ...]], PartialHead],
    ) -> ThinkState:
        """Some of the rows as a method sees them; `hidden_ND` is that of all."""
        return ThinkState(
            hidden=hidden_ND[rows_B],
            step=self.step_N[rows_B],
            params=_taken(self.params, rows_B),
            **_taken(self.sampling, rows_B),
            make_logits=logits,
            branches=self.branches,
            begun=_taken(self.begun, rows_B),
            wants_info=any(entry.request.keep_latents for entry in self.entries),
            make_partial_head=partial_head,
        )


def _taken(columns: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """These rows of columns by name."""
    return {name: column[rows] for name, column in columns.items()}
