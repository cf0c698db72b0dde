"""Decode steps as CUDA graphs: one call starts the thousand small kernels of a step. The default on a GPU.

    GraphedHidden    the backbone, one position a row
    GraphedThink     a method's thought: heads, draws, the tokens of a group, the stop

A graph reads and writes at fixed addresses, for one shape. So the rows of a step are filled up to one of a few
numbers, the columns that are read to one of a few widths, and what is fed is copied to where the graph reads it.

    rows that run     rows of the graph      columns that are read
    1                 1                      64
    2                 2                      128
    3, 4              4                      256
    5 .. 8            8                      ...

These are functions of the rows that run: what an engine has answered before changes no bit of an answer. Rows that fill
up are copies of the first one: they write into the last slot, which nothing reads.

A graph belongs to the tensors that it was recorded with: if the cache or the weights have moved, or an adapter is
folded in, all graphs are recorded anew. So the cache only grows while the engine lives, and an idle engine keeps its
memory. A forward pass that cannot be recorded runs as it is, from then on, and the reason is logged once.

On a CPU the same copies are made, and the forward pass is called where a graph would be replayed: tests compare that
with the plain step.

Shape suffixes: N rows, C columns, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from colar import progress
from colar.engine.cache import SlotCache, SlotMapping
from colar.methods.base import Method, ThinkState, Thought
from colar.model import chunks, sharded
from colar.model.latent_lm import LatentLM

T = TypeVar("T")

NARROWEST = 64
"""Columns of the narrowest graph."""
REPLAYED_ON = "cuda"
"""Type of the devices that have graphs."""
WARM_UP = 2
"""Runs before one is recorded: libraries make their workspaces in the first."""
MOST = 128
"""Graphs of one kind; where there are more shapes, all are recorded anew."""


def can_record(lm: LatentLM) -> bool:
    """True for whole weights on a GPU: the layers of sharded ones are gathered by other processes' calls."""
    return lm.device.type == REPLAYED_ON and not sharded.is_sharded(lm)


def rows_of(rows: int, most: int) -> int:
    """The rows of the graph for this many: the next power of 2, at most `most`."""
    return min(most, 1 << (rows - 1).bit_length())


def columns_of(span: int) -> int:
    """The columns that the graph for `span` columns reads: the next power of 2 from NARROWEST on."""
    return max(NARROWEST, 1 << (span - 1).bit_length())


class Recorder:
    """Graphs of one kind of work, by their shape; all are dropped where the weights have moved."""

    work: ClassVar[str]
    """Name of the work in a warning."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.recorded: dict[Any, Any] = {}
        self._model: Any = None
        self._pool: Any = None
        self._gave_up = False

    def refresh(self) -> None:
        """Drop all graphs if the weights have moved, or an adapter was folded in or taken out."""
        weights = [weight.data_ptr() for weight in self.lm.parameters()]
        adapted = [module for module in self.lm.lm.modules() if isinstance(module, BaseTunerLayer)]
        model = (weights, [module.merged for module in adapted])
        if model != self._model:
            self._drop()
            self._model = model

    def _drop(self) -> None:
        """Forget all graphs. Their pool of memory goes with them: none can be recorded into it any more."""
        self.recorded.clear()
        self._pool = None

    def _find(self, shape: Any, record: Callable[[], Any]) -> Any:
        """The graph of this shape, recorded where there is none; None if it cannot be."""
        if shape not in self.recorded:
            if len(self.recorded) >= MOST:
                self._drop()
            try:
                self.recorded[shape] = record()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._gave_up = True
                self._drop()
                reason = str(error).strip().partition("\n")[0]
                progress.say(f"warning: {self.work} run without CUDA graphs, which is slower: {reason}")
                return None
        return self.recorded[shape]

    def _replayed(self, work: Callable[[], T], device: torch.device) -> Callable[[], T]:
        """A call that does this work again, on the tensors that it reads and into those that it returns."""

        def whole() -> T:
            # Weights that autocast had cast before would be read by the graph after it is gone.
            with chunks.uncached_autocast(device.type):
                return work()

        return whole if device.type != REPLAYED_ON else self._capture(whole)

    def _capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """The work as a CUDA graph."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        # Graphs run one after another: they share what is between their first and last tensors.
        self._pool = self._pool or graph.pool()

        def replay() -> T:
            graph.replay()
            return result

        return replay


@dataclass
class Forward:
    """A recorded forward pass, and the tensors that it reads."""

    embeds_N1D: Tensor
    position_N1: Tensor
    mask: Any
    mapping: SlotMapping
    replay: Callable[[], Tensor]
    """Returns the hidden states (N, 1, D), which the next replay overwrites."""


class GraphedHidden(Recorder):
    """`lm.hidden` for steps of one position a row, recorded once for each shape."""

    work: ClassVar[str] = "decode steps"

    def __init__(self, lm: LatentLM) -> None:
        super().__init__(lm)
        self._addresses: list[int] = []

    def __call__(self, embeds_N1D: Tensor, mask: Any, position_N1: Tensor, cache: SlotCache) -> Tensor:
        """Last hidden states, (N, 1, D)."""
        graph: Forward | None = None
        if not self._gave_up:
            addresses = [tensor.data_ptr() for tensor in cache.tensors()]
            if addresses != self._addresses:
                self._drop()
                self._addresses = addresses
            shape = (embeds_N1D.shape[0], cache.mapping.seen.shape[0])
            graph = self._find(shape, lambda: self._record(embeds_N1D, mask, position_N1, cache))
        if graph is None:
            # It writes the same keys and values as an attempt before it.
            return self.lm.hidden(embeds_N1D, mask, position_N1, cache)
        graph.embeds_N1D.copy_(embeds_N1D)
        graph.position_N1.copy_(position_N1)
        for own, given in zip(_masks(graph.mask), _masks(mask), strict=True):
            own.copy_(given)
        graph.mapping.rows.copy_(cache.mapping.rows)
        graph.mapping.columns.copy_(cache.mapping.columns)
        # A copy: the next graph may use the same memory.
        return graph.replay().clone()

    def _record(self, embeds_N1D: Tensor, mask: Any, position_N1: Tensor, cache: SlotCache) -> Forward:
        """Record the forward of this shape; tensors of its own take the place of those given."""
        embeds, position = embeds_N1D.clone(), position_N1.clone()
        own_mask = (
            {name: value.clone() for name, value in mask.items()} if isinstance(mask, dict) else mask.clone()
        )
        now = cache.mapping
        # Of two of its tensors only the size is used, so they are never written.
        mapping = SlotMapping(now.before, now.rows.clone(), now.columns.clone(), now.seen)

        def forward() -> Tensor:
            cache.mapping = mapping
            return self.lm.hidden(embeds, own_mask, position, cache)

        replay = self._replayed(forward, embeds.device)
        return Forward(embeds, position, own_mask, mapping, replay)


def _masks(mask: Any) -> list[Tensor]:
    return list(mask.values()) if isinstance(mask, dict) else [mask]


@dataclass
class Thinking:
    """A recorded step of thinking, and the state that it reads."""

    state: ThinkState
    replay: Callable[[], Thought]
    """The next replay overwrites what it returns."""


class GraphedThink(Recorder):
    """`method.think` for rows that have one setting, recorded once for each setting and number of rows.

    A setting is all that a method may branch by in Python: params and temperatures of the requests. Rows of several
    settings think as they are.
    """

    work: ClassVar[str] = "thoughts"

    def __init__(self, lm: LatentLM, method: Method, most_rows: int) -> None:
        super().__init__(lm)
        self.method = method
        self.most_rows = most_rows

    def __call__(self, state: ThinkState) -> Thought:
        """The thoughts of the state's rows."""
        setting = _setting(state)
        if self._gave_up or setting is None:
            return self.method.think(self.lm, state)
        n = len(state.step)
        rows = rows_of(n, self.most_rows)
        graph: Thinking | None = self._find((rows, setting), lambda: self._record(state, rows))
        if graph is None:
            return self.method.think(self.lm, state)
        for own, given in zip(_columns(graph.state), _columns(state), strict=True):
            own[:n].copy_(given)
        thought = graph.replay()
        # Copies: the next graph may use the same memory.
        return Thought(
            thought.embeds[:n].clone(),
            thought.done[:n].clone(),
            thought.token_ids[:n].clone(),
            {name: column[:n].clone() for name, column in thought.info.items()},
        )

    def _record(self, state: ThinkState, rows: int) -> Thinking:
        """Record a step of this setting. Rows that fill up are copies of the first one."""
        n = len(state.step)

        def filled(column: Tensor) -> Tensor:
            return torch.cat([column, column[:1].expand(rows - n, *column.shape[1:])])

        assert state.requests is not None
        columns = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        for name, value in columns.items():
            if isinstance(value, Tensor):
                columns[name] = filled(value)
        own = ThinkState(
            **{
                **columns,
                "params": {name: filled(column) for name, column in state.params.items()},
                "begun": {name: filled(column) for name, column in state.begun.items()},
                "make_logits": self.lm.logits,
                # A part of the head that is kept between steps would be read by the graph after it is gone.
                "make_partial_head": None,
                "requests": [*state.requests, *[state.requests[0]] * (rows - n)],
            }
        )

        def think() -> Thought:
            # The logits that a state keeps are those of one step.
            return self.method.think(self.lm, dataclasses.replace(own))

        return Thinking(own, self._replayed(think, own.hidden.device))


def _setting(state: ThinkState) -> Any:
    """The values that all requests of the rows share, or None where they differ, or draw from a nucleus."""
    # A nucleus is sorted where its window is too small, which only the device knows.
    settings = set()
    for request in state.requests or ():
        decoding = request.decoding
        temperatures = (decoding.temperature, decoding.latent_temperature)
        settings.add((request.params, *temperatures, decoding.top_p if any(temperatures) else 1))
    return (*settings, state.wants_info) if len(settings) == 1 and next(iter(settings))[-1] == 1 else None


def _columns(state: ThinkState) -> list[Tensor]:
    """The tensors of a state, in one order."""
    found = [value for value in vars(state).values() if isinstance(value, Tensor)]
    return [*found, *state.params.values(), *(state.begun[name] for name in sorted(state.begun))]
