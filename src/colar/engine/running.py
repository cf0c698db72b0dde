"""The running requests as columns, one row for each, and the choice of their next inputs.

    slot of the cache      0        1        2
    entries                r7       r3       r9         the requests
    thinks                 True     False    True       r3 answers
    step_N, n_fed          2        9        0          embeddings fed since the question
    position_N             14       31       11         column of the cache that is fed next

Index i of every column belongs to slot i of the cache: if a row moves to another slot, its columns move with it.

Tensors are what the device computes with. Values that Python branches on are in lists: reading a
tensor synchronises.

    row            does        feeds next                    ends
    0   thinks     l3          the latent
    1   thinks     is done     the separator
    2   answers    a1          the token's embedding
    3   answers    EOS         nothing                       stop

All of a choice is requested of the device first, and then read in one synchronisation: a GPU would wait at each. The
rows are changed after that, when nothing can fail any more, so a step that raises has reported nothing.

Shape suffixes: N rows, B some of them or those of one kind (thinking or answering), D width.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colar.engine.cache import SlotCache
from colar.engine.completion import Event, EventKind
from colar.engine.runner import Runner
from colar.engine.scheduler import Entry
from colar.methods.thinking import StepConditions, ThinkState, Thought, param_columns, sampling_columns
from colar.model.head import PartialHead
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
    """Events since the row started, with those that it reported before it had to start anew (`Entry.reported`)."""
    next_ND: Tensor | None = None
    """The embedding that is fed next; None for all rows until it is chosen."""
    _conditions: StepConditions | None = None
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

    def position(self, i: int) -> int:
        """`position_N` of a row, in Python."""
        return len(self.entries[i].ids) + self.n_fed[i]

    # Rows join and leave

    def append(self, other: "RunningRows") -> None:
        """Add these rows behind the others."""
        self._conditions = None
        if not len(self):
            vars(self).update(vars(other))
            return
        # A loop over all fields: one that is added cannot be forgotten here, which would mix up requests.
        joined: dict[str, Any] = {}
        for name, column in vars(self).items():
            more = getattr(other, name)
            if isinstance(column, Tensor):
                joined[name] = torch.cat([column, more])
            elif isinstance(column, dict):
                joined[name] = {key: torch.cat([value, more[key]]) for key, value in column.items()}
            elif isinstance(column, list):
                joined[name] = column + more
        # All at once: where memory runs out in between, the rows are as before.
        vars(self).update(joined)

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self._conditions = None
        rows_N = devices.numbers(rows, self.hidden_ND.device)
        kept: dict[str, Any] = {}
        for name, column in vars(self).items():
            if isinstance(column, Tensor):
                kept[name] = column[rows_N]
            elif isinstance(column, dict):
                kept[name] = _taken(column, rows_N)
            elif isinstance(column, list):
                kept[name] = [column[i] for i in rows]
        vars(self).update(kept)

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

    def restarted(self, i: int) -> Entry:
        """The request of a row that has to start anew."""
        entry = self.entries[i]
        return dataclasses.replace(entry, reported=max(self.reported[i], entry.reported))

    # A step

    @property
    def conditions(self) -> StepConditions:
        """The conditions of a step of these rows."""
        if self._conditions is None:
            self._conditions = StepConditions.of_requests([entry.request for entry in self.entries])
        return self._conditions

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
            conditions=self.conditions,
            begun=_taken(self.begun, rows_B),
            wants_info=any(entry.request.keep_latents for entry in self.entries),
            make_partial_head=partial_head,
        )


def _taken(columns: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """These rows of columns by name."""
    return {name: column[rows] for name, column in columns.items()}


# A step


@dataclass
class Chosen:
    """The result of a step."""

    embeds_ND: Tensor
    """The next embedding of every row."""
    events: list[Event] = field(default_factory=list)
    """In their order, "finished" left out."""
    ended: dict[int, str] = field(default_factory=dict)
    """The rows that end, each with its reason."""


def choose_inputs(runner: Runner, rows: RunningRows) -> Chosen:
    """Choose the next embedding of every row."""
    lm, device = runner.lm, rows.hidden_ND.device
    chosen = Chosen(torch.zeros_like(rows.hidden_ND))

    # Nothing can be thought or sampled from a NaN. Such a row ends; until Python knows of it, zeros take its place.
    finite_N = torch.isfinite(rows.hidden_ND).all(-1)
    hidden_ND = torch.where(finite_N[:, None], rows.hidden_ND, 0)
    thinking = [i for i, thinks in enumerate(rows.thinks) if thinks]
    answering = [i for i, thinks in enumerate(rows.thinks) if not thinks]
    # If rows of both kinds run, the head runs once for all of them: it reads all its weights each time.
    head = functools.cache(lm.logits)
    both = bool(thinking and answering)

    def state_of(rows_B: Tensor) -> ThinkState:
        def logits(own_BD: Tensor) -> Tensor:
            return head(hidden_ND)[rows_B] if both else lm.logits(own_BD)

        return rows.think_state(rows_B, hidden_ND, logits, runner.partial_head)

    # What Python needs to know of each row: is it finite, is it done, which token.
    readback_3N = torch.zeros(3, len(rows), dtype=torch.int64, device=device)
    readback_3N[0] = finite_N
    if thinking:
        rows_B = devices.numbers(thinking, device)
        thoughts = runner.think(state_of(rows_B))
        # While a row thinks, each of its steps has fed one thought. Rows at their limit think too: that tells whether
        # they are cut. A row that answers next feeds the separator, which is filled on the device: nothing is sent.
        ends_B = thoughts.done | (rows.step_N[rows_B] >= rows.max_latents_N[rows_B])
        separator_1D = lm.embed(rows_B.new_full((1,), lm.template.separator_id)).to(hidden_ND.dtype)
        fed_BD = torch.where(ends_B[:, None], separator_1D, thoughts.embeds.to(hidden_ND.dtype))
        chosen.embeds_ND[rows_B] = fed_BD
        readback_3N[1:, rows_B] = torch.stack([thoughts.done.long(), thoughts.token_ids])
    if answering:
        rows_B = devices.numbers(answering, device)
        tokens = runner.answer(state_of(rows_B))
        chosen.embeds_ND[rows_B] = tokens.embeds.to(hidden_ND.dtype)
        readback_3N[1:, rows_B] = torch.stack([tokens.done.long(), tokens.token_ids])

    # The one synchronisation.
    finite, done, token_ids = readback_3N.tolist()
    chosen.ended = {i: "error" for i, is_finite in enumerate(finite) if not is_finite}
    for j, i in enumerate(thinking):
        if finite[i]:
            _report_thought(rows, chosen, i, bool(done[i]), token_ids[i], _details(rows, i, thoughts, j))
    for j, i in enumerate(answering):
        if finite[i]:
            _report_token(rows, chosen, i, bool(done[i]), token_ids[i], _details(rows, i, tokens, j))
    return chosen


def _details(rows: RunningRows, i: int, thoughts: Thought, j: int) -> dict[str, Any]:
    """Embedding and info of row i, row j of these, for its event; {} unless its request keeps them."""
    if not rows.entries[i].request.keep_latents:
        return {}
    return {"embed": thoughts.embeds[j], "info": {name: column[j] for name, column in thoughts.info.items()}}


def _report(rows: RunningRows, chosen: Chosen, i: int, kind: EventKind, **what: Any) -> None:
    """Note an event of row i, unless it was reported before the row had to start anew."""
    entry = rows.entries[i]
    rows.reported[i] += 1
    if rows.reported[i] > entry.reported:
        chosen.events.append(Event(entry.request, kind, number=entry.number, **what))


def _report_thought(
    rows: RunningRows, chosen: Chosen, i: int, done: bool, token_id: int, details: dict[str, Any]
) -> None:
    """Report what a row has thought, and note whether it stops thinking, or has met its limit."""
    if done:
        rows.thinks[i] = False
        _report(rows, chosen, i, "stop", info=details.get("info", {}))
    elif rows.n_fed[i] >= rows.entries[i].request.decoding.max_latents:
        rows.thinks[i] = False
        rows.cut[i] = True
    else:
        _report(rows, chosen, i, "thought", token_id=token_id, **details)


def _report_token(
    rows: RunningRows, chosen: Chosen, i: int, done: bool, token_id: int, details: dict[str, Any]
) -> None:
    """Report an answer token of a row: EOS or the limit ends it."""
    rows.n_tokens[i] += 1
    _report(rows, chosen, i, "token", token_id=token_id, info=details.get("info", {}))
    if done:
        chosen.ended[i] = "stop"
    elif rows.n_tokens[i] >= rows.entries[i].request.decoding.max_completion_length:
        chosen.ended[i] = "length"
