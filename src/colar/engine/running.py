"""The running requests as columns, one row for each, and the choice of their next inputs.

    slot of the cache      0        1        2
    entries                r7       r3       r9         the requests: r3 answers, the others think
    step_N                 2        9        0          embeddings fed since the question
    position_N             14       31       11         column of the cache that is fed next

Index i of every column belongs to slot i of the cache: if a row moves to another slot, its columns move with it.

The device computes with the tensors. Values that Python branches on are in the entries, because reading a tensor
synchronises.

    row            does        feeds next                    ends
    0   thinks     l3          the latent
    1   thinks     is done     the separator
    2   answers    a1          the token's embedding
    3   answers    EOS         nothing                       stop

A choice is queued on the device as a whole, and then read in one synchronisation, because a GPU idles at each. The
rows are changed after that, when nothing can fail any more, so a step that raises has reported nothing.

Shape suffixes: N rows, B some of them or those of one kind (thinking or answering), D width.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colar.engine.cache import SlotCache
from colar.engine.completion import Event
from colar.engine.runner import Runner
from colar.engine.scheduler import Entry
from colar.methods.thinking import StepConditions, ThinkState, Thought, param_columns, sampling_columns
from colar.ops import devices


@dataclass
class RunningRows:
    """All running rows. Every field but the entries is a column: a tensor, or a dict of tensors."""

    entries: list[Entry]
    hidden_ND: Tensor
    """Last hidden state: the next thought or token comes from it."""
    first_ND: Tensor
    """The hidden state after the question, from which another sample of the same question starts."""
    position_N: Tensor
    """The column of the cache that is fed next; it is also the position."""
    step_N: Tensor
    """Embeddings fed since the question. While a row thinks, these are its thoughts."""
    max_latents_N: Tensor
    sampling: dict[str, Tensor]
    """The requests' columns (N,) by which thoughts and tokens are drawn (`sampling_columns`)."""
    params: dict[str, Tensor]
    """The requests' params, a column (N,) for each field."""
    begun: dict[str, Tensor]
    """The method's own columns (N, ...), made by its `begin`."""
    next_ND: Tensor | None = None
    """The embedding that is fed next; None for all rows until it is chosen."""
    _conditions: StepConditions | None = None

    @classmethod
    def start(cls, entries: Sequence[Entry], hidden_ND: Tensor, begun: dict[str, Tensor]) -> "RunningRows":
        """Rows whose questions are in the cache, with the hidden states after them."""
        device = hidden_ND.device
        # Otherwise requests would get each other's.
        assert all(len(column) == len(entries) for column in begun.values()), (
            "`begin` gives each request a row"
        )
        requests = [entry.request for entry in entries]
        limits = [request.decoding.max_latents for request in requests]
        # Limits and temperatures become columns once, here: a step does arithmetic on tensors.
        return cls(
            entries=list(entries),
            hidden_ND=hidden_ND,
            first_ND=hidden_ND,
            position_N=devices.numbers([len(entry.ids) for entry in entries], device),
            step_N=devices.numbers([0] * len(entries), device),
            max_latents_N=devices.numbers(limits, device),
            sampling=sampling_columns(requests, device),
            params=param_columns([request.params for request in requests], device),
            begun=begun,
        )

    def __len__(self) -> int:
        return len(self.entries)

    def position(self, i: int) -> int:
        """`position_N` of a row, without reading the tensor."""
        return len(self.entries[i].ids) + self.entries[i].n_fed

    # Rows join and leave

    def append(self, other: "RunningRows") -> None:
        """Add these rows after the others."""
        if not len(self):
            vars(self).update(vars(other))
            return
        # A loop over all fields, so that a new field cannot be forgotten here, which would mix up requests.
        joined: dict[str, Any] = {}
        for name, column in vars(self).items():
            more = getattr(other, name)
            if isinstance(column, Tensor):
                joined[name] = torch.cat([column, more])
            elif isinstance(column, dict):
                ours, theirs = ({key: each[key].dtype for key in each} for each in (column, more))
                if ours != theirs:
                    raise ValueError(
                        f"`begin` gave other columns to requests that run, {ours}, than to these: {theirs}"
                    )
                joined[name] = {key: torch.cat([value, more[key]]) for key, value in column.items()}
        # All at once, so that the rows are unchanged if memory runs out before.
        vars(self).update(joined, entries=[*self.entries, *other.entries], _conditions=None)

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        rows_N = devices.numbers(rows, self.hidden_ND.device)
        kept: dict[str, Any] = {}
        for name, column in vars(self).items():
            if isinstance(column, Tensor):
                kept[name] = column[rows_N]
            elif isinstance(column, dict):
                kept[name] = _taken(column, rows_N)
        vars(self).update(kept, entries=[self.entries[i] for i in rows], _conditions=None)

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

    # A step

    @property
    def conditions(self) -> StepConditions:
        """The conditions of a step of these rows; computed anew when a row has joined or left."""
        if self._conditions is None:
            self._conditions = StepConditions.of_requests([entry.request for entry in self.entries])
        return self._conditions

    def fed(self, hidden_ND: Tensor) -> None:
        """Record that each row was fed its next embedding, and the hidden states that resulted."""
        self.next_ND = None
        self.hidden_ND = hidden_ND
        self.position_N = self.position_N + 1
        self.step_N = self.step_N + 1
        for entry in self.entries:
            entry.n_fed += 1

    def charge(self, seconds: float) -> None:
        """Divide the time of a step among the rows."""
        for entry in self.entries:
            entry.seconds += seconds / len(self)


def _taken(columns: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """These rows of columns by name."""
    return {name: column[rows] for name, column in columns.items()}


def choose_inputs(runner: Runner, rows: RunningRows) -> list[Event]:
    """Choose the next embedding of every row. Returns the events; an entry that ends has its `reason` set."""
    lm, device = runner.lm, rows.hidden_ND.device
    next_ND = torch.zeros_like(rows.hidden_ND)

    # Nothing can be thought or sampled from a NaN. Such a row ends below; until then, zeros replace its hidden state.
    finite_N = torch.isfinite(rows.hidden_ND).all(-1)
    hidden_ND = torch.where(finite_N[:, None], rows.hidden_ND, 0)
    thinking = [i for i, entry in enumerate(rows.entries) if entry.thinks]
    answering = [i for i, entry in enumerate(rows.entries) if not entry.thinks]
    # If rows of both kinds run, the head runs once for all, because each run reads all its weights.
    head = functools.cache(lm.logits)
    both = bool(thinking and answering)

    def state_of(rows_B: Tensor) -> ThinkState:
        def logits(own_BD: Tensor) -> Tensor:
            return head(hidden_ND)[rows_B] if both else lm.logits(own_BD)

        return ThinkState(
            hidden=hidden_ND[rows_B],
            step=rows.step_N[rows_B],
            params=_taken(rows.params, rows_B),
            **_taken(rows.sampling, rows_B),
            make_logits=logits,
            conditions=rows.conditions,
            begun=_taken(rows.begun, rows_B),
            wants_info=any(entry.request.keep_latents for entry in rows.entries),
            make_partial_head=runner.partial_head,
        )

    # The values of each row that Python branches on: is it finite, is it done, which token.
    readback_3N = torch.zeros(3, len(rows), dtype=torch.int64, device=device)
    readback_3N[0] = finite_N
    chosen: list[tuple[list[int], Thought]] = []
    if thinking:
        rows_B = devices.numbers(thinking, device)
        thoughts = runner.think(state_of(rows_B))
        # While a row thinks, each of its steps has fed one thought. Rows at their limit think too, because only that
        # shows if they stop or are cut. Rows that answer next feed the separator, filled in on the device: no copy.
        ends_B = thoughts.done | (rows.step_N[rows_B] >= rows.max_latents_N[rows_B])
        separator_1D = lm.embed(rows_B.new_full((1,), lm.template.separator_id)).to(hidden_ND.dtype)
        next_ND[rows_B] = torch.where(ends_B[:, None], separator_1D, thoughts.embeds.to(hidden_ND.dtype))
        readback_3N[1:, rows_B] = torch.stack([thoughts.done.long(), thoughts.token_ids])
        chosen.append((thinking, thoughts))
    if answering:
        rows_B = devices.numbers(answering, device)
        tokens = runner.answer(state_of(rows_B))
        next_ND[rows_B] = tokens.embeds.to(hidden_ND.dtype)
        readback_3N[1:, rows_B] = torch.stack([tokens.done.long(), tokens.token_ids])
        chosen.append((answering, tokens))

    # The one synchronisation.
    finite, done, token_ids = readback_3N.tolist()
    rows.next_ND = next_ND
    events: list[Event] = []
    for own, thoughts in chosen:
        for j, i in enumerate(own):
            entry = rows.entries[i]
            if not finite[i]:
                entry.reason = "error"
                continue
            take = entry.take_thought if entry.thinks else entry.take_token
            events += take(bool(done[i]), token_ids[i], _details(entry, thoughts, j))
    return events


def _details(entry: Entry, thoughts: Thought, j: int) -> dict[str, Any]:
    """The embedding and info of row j, for the event of its entry; {} unless the request keeps them."""
    if not entry.request.keep_latents:
        return {}
    return {"embed": thoughts.embeds[j], "info": {name: column[j] for name, column in thoughts.info.items()}}
