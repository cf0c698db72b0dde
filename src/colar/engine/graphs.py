"""Steps as CUDA graphs: one call starts the thousand small kernels of a step. The default on a GPU.

    Graphs.hidden    the backbone, one position a row
    Graphs.think     a method's thought: heads, draws, the tokens of a group, the stop; and an answer's token

A graph reads and writes at fixed addresses, for one shape. So the rows of a step are filled up to one of a few
numbers, the columns that are read to one of a few widths, and what is fed is copied to where the graph reads it.

    rows that run     rows of the graph      columns that are read
    1                 1                      64
    2                 2                      128
    3, 4              4                      256
    5 .. 8            8                      ...

These are functions of the rows that run: what an engine has answered before changes no bit of an answer. Rows that fill
up are copies of the first one: they write into the last slot, which nothing reads. What a method branches by in Python
(`StepConditions`) is decided for good in a recording, so thoughts of other conditions are another graph.

A graph belongs to the tensors that it was recorded with: if the cache or the weights have moved, all graphs are
recorded anew. So the cache only grows, and it goes with its graphs from one engine of a model to the next:

    engine 1     busy |====|           |====|
    engine 2               |====|         |=======|      both busy: engine 2 records its own, and drops them at its end
    the model    ====|     .    |======|          |==    `idle_graphs`: those that no busy engine has

What cannot be recorded runs as it is, from then on, and the reason is logged once.

On a CPU the same copies are made, and the work is called where a graph would be replayed: tests compare that with the
plain step.

Shape suffixes: N rows, D width.
"""

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from colar import progress
from colar.engine.cache import SlotCache, SlotMapping
from colar.methods.base import Method
from colar.methods.thinking import ThinkState, Thought
from colar.model.head import uncached_autocast
from colar.model.latent_lm import LatentLM
from colar.model.weights import is_sharded

Think = Callable[[LatentLM, ThinkState], Thought]

NARROWEST = 64
"""Columns of the narrowest graph."""
REPLAYED_ON = "cuda"
"""Type of the devices that have graphs."""
WARM_UP = 2
"""Runs before one is recorded: libraries make their workspaces in the first."""
MOST_GRAPHS = 256
"""Graphs of one cache; where there are more shapes, all are recorded anew."""
CAPTURING = threading.Lock()
"""Of the thread that records: each engine may have its own, and a process takes one recording at a time."""


def can_record(lm: LatentLM) -> bool:
    """True for whole weights on a GPU: the layers of sharded ones are gathered by other processes' calls."""
    return lm.device.type == REPLAYED_ON and not is_sharded(lm)


def rows_of(rows: int, most: int) -> int:
    """The rows of the graph for this many: the next power of 2, at most `most`."""
    return min(most, 1 << (rows - 1).bit_length())


def columns_of(span: int) -> int:
    """The columns that the graph for `span` columns reads: the next power of 2 from NARROWEST on."""
    return max(NARROWEST, 1 << (span - 1).bit_length())


def leave_room(lm: LatentLM) -> None:
    """Drop the model's idle graphs where the GPU has no room for their cache beside the peak so far: training's."""
    idle: Graphs | None = lm.idle_graphs
    if idle is not None and lm.device.type == REPLAYED_ON:
        taken = sum(tensor.nbytes for tensor in idle.cache.tensors())
        there_is = torch.cuda.mem_get_info(lm.device)[0] + torch.cuda.memory_reserved(lm.device)
        if torch.cuda.max_memory_allocated(lm.device) + taken > there_is:
            lm.idle_graphs = None


@dataclass
class Recorded:
    """A graph, and the tensors that it reads."""

    inputs: list[Tensor]
    replay: Callable[[], Any]
    """Returns the work's result, which the next replay overwrites."""


class Graphs:
    """A cache and the graphs that were recorded with it, of one model."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.recorded: dict[Any, Recorded] = {}
        self._failed: set[Any] = set()
        """Work that cannot be recorded: its name and kind."""
        self._weights: Any = None
        self._cached: Any = None
        self._state: Any = None
        self._pool: Any = None

    @classmethod
    def of(cls, lm: LatentLM) -> "Graphs":
        """The model's idle ones, which are the caller's until `give_back`; new ones if there are none."""
        idle: Graphs | None = lm.idle_graphs
        lm.idle_graphs = None
        return idle or cls(SlotCache(lm.causal_lm))

    def give_back(self, lm: LatentLM) -> None:
        """Leave these to the model's next engine, unless there are idle ones already."""
        lm.idle_graphs = lm.idle_graphs or self

    def refresh(self, lm: LatentLM, method: Method) -> None:
        """Drop all graphs if the weights have moved, or another method thinks."""
        weights = ([weight.data_ptr() for weight in lm.parameters()], method, method.config)
        if weights != self._weights:
            self._drop()
            self._weights = weights
        # Neither moves a weight, and both change the operations: an adapter that is folded in for a while, autocast.
        adapted = [module for module in lm.lm.modules() if isinstance(module, BaseTunerLayer)]
        self._state = (tuple(module.merged for module in adapted), torch.is_autocast_enabled(lm.device.type))

    def _drop(self, name: str = "") -> None:
        """Forget the graphs of one work, or all."""
        self.recorded = {key: graph for key, graph in self.recorded.items() if name not in ("", key[0])}
        if not self.recorded:
            # Nothing can be recorded into the pool of memory of graphs that are gone.
            self._pool = None

    def hidden(
        self, forward: Callable[..., Tensor], embeds_N1D: Tensor, mask: Any, position_N1: Tensor
    ) -> Tensor:
        """`forward` of one position a row: last hidden states, (N, 1, D)."""
        cached = [(tensor.data_ptr(), tensor.shape) for tensor in self.cache.tensors()]
        if cached != self._cached:
            self._drop("decode steps")
            self._cached = cached
        now = self.cache.mapping

        def work(embeds: Tensor, mask: Any, position: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            self.cache.mapping = SlotMapping(now.first, rows, columns, now.span)
            return forward(embeds, mask, position, self.cache)

        inputs = (embeds_N1D, mask, position_N1, now.rows, now.columns)
        # If it cannot be recorded, it writes the same keys and values as the attempt before it.
        hidden_N1D: Tensor = self._run("decode steps", now.span, len(embeds_N1D), inputs, work)
        return hidden_N1D

    def think(self, name: str, think: Think, lm: LatentLM, state: ThinkState, most_rows: int) -> Thought:
        """`think(lm, state)`, in an engine of `most_rows`."""
        columns = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        columns = {name: value for name, value in columns.items() if isinstance(value, Tensor | dict)}

        def work(columns: dict[str, Any]) -> Any:
            # A part of the head that is cached between steps would be read by the graph after it is gone.
            own = dataclasses.replace(state, **columns, make_logits=lm.logits, make_partial_head=None)
            thought = think(lm, own)
            return thought.embeds, thought.done, thought.token_ids, thought.info

        kind = (state.wants_info, state.conditions)
        rows = rows_of(len(state.step), most_rows)
        return Thought(*self._run(name, kind, rows, (columns,), work))

    def _run(self, name: str, kind: Any, rows: int, inputs: Any, work: Callable[..., Any]) -> Any:
        """The result of `work(*inputs)`; inputs and result are trees of tensors with a row each, at most `rows`."""
        tensors, layout = tree_flatten(inputs)
        n = len(tensors[0])
        key = (name, kind, self._state, rows)
        if key not in self.recorded and (name, kind) not in self._failed:
            # Rows that fill up are copies of the first one.
            own = [torch.cat([each, each[:1].expand(rows - n, *each.shape[1:])]) for each in tensors]
            self._record(key, own, lambda: work(*tree_unflatten(own, layout)))
        graph = self.recorded.get(key)
        if graph is None:
            return work(*inputs)
        for own_tensor, tensor in zip(graph.inputs, tensors, strict=True):
            own_tensor[:n].copy_(tensor)
        # Copies: the next graph may use the same memory.
        return tree_map(lambda output: output[:n].clone(), graph.replay())

    # Recording

    def _record(self, key: Any, own: list[Tensor], work: Callable[[], Any]) -> None:
        """Record work on tensors of its own. A failure is noted, and logged once for each name."""
        if len(self.recorded) >= MOST_GRAPHS:
            self._drop()
        device = own[0].device

        def uncached() -> Any:
            # Weights that autocast had cast before would be read by the graph after they are gone.
            with uncached_autocast(device.type):
                return work()

        try:
            with CAPTURING:
                replay = self._capture(uncached, device) if device.type == REPLAYED_ON else uncached
            self.recorded[key] = Recorded(own, replay)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._drop()
            name, kind, *_ = key
            if not any(name == other for other, _ in self._failed):
                reason = str(error).strip().partition("\n")[0]
                progress.say(f"warning: {name} run without CUDA graphs, which is slower: {reason}")
            self._failed.add((name, kind))

    def _capture(self, work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
        """The work as a CUDA graph: a call that does it again, on the tensors that it has read."""
        graph = torch.cuda.CUDAGraph()
        # The current device may be another one than the model's.
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            # thread_local: another thread, which reads thoughts, may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                result = work()
        # Graphs run one after another: they share what is between their first and last tensors.
        self._pool = self._pool or graph.pool()

        def replay() -> Any:
            graph.replay()
            return result

        return replay
