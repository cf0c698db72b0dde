"""Steps as CUDA graphs: one call launches the thousand small kernels of a step. The default on a GPU.

    Graphs.hidden    the backbone, one position a row
    Graphs.think     a method's thought: heads, draws, the tokens of a group, the stop; and an answer's token

A graph reads and writes at fixed addresses, for one shape. So the rows of a step are filled up to one of a few
numbers, the columns that are read to one of a few widths, and inputs are copied to the addresses that the graph reads.

    rows that run     rows of the graph      columns that are read
    1                 1                      64
    2                 2                      128
    3, 4              4                      256
    5 .. 8            8                      ...

Both numbers depend only on the running rows, so requests that an engine has answered before change no bit of an answer.
Rows that fill up are copies of the first one; they write into the last slot, which nothing reads. A recording fixes the
branches that a method takes in Python (by `StepConditions`), so thoughts under other conditions are another graph.

A graph is bound to the tensors that it was recorded with: if the weights have moved, all graphs are recorded anew, and
if the cache has, those of decode steps. So the cache only grows, and an engine hands it on with its graphs:

    engine 1     busy |====|           |====|
    engine 2               |====|         |=======|      both busy: engine 2 records its own, and drops them at its end
    the model    ====|     .    |======|          |==    `idle_graphs`: those that no busy engine has

Work that cannot be recorded runs without graphs from then on, and the reason is logged once.

On a CPU the same copies are made, and the work is called where a graph would be replayed, so that tests can compare
this with the plain step.

Shape suffixes: N rows, D width.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from colar import progress
from colar.engine.cache import SlotCache, SlotMapping
from colar.methods.base import Method
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.model.weights import is_sharded

Think = Callable[[LatentLM, ThinkState], Thought]

NARROWEST = 64
"""Columns of the narrowest graph."""
REPLAYED_ON = "cuda"
"""Type of the devices that support graphs."""
WARM_UP = 2
"""Runs of the work before it is recorded, because libraries make their workspaces in the first one."""
MOST_GRAPHS = 256
"""Most graphs of one cache. Before one more is recorded, all are dropped."""
CAPTURING = threading.Lock()
"""Held while a graph is recorded: each engine may have its own thread, but a process records one graph at a time."""


def can_record(lm: LatentLM) -> bool:
    """True for unsharded weights on a GPU: gathering sharded layers requires calls of other processes."""
    return lm.device.type == REPLAYED_ON and not is_sharded(lm)


def has_hooks(lm: LatentLM) -> bool:
    """True if a module has a user's forward hook, which would be called when a graph is recorded and in no replay.

    Those of transformers stay after gradient checkpointing, or a forward that returned all hidden states, and do
    nothing in a step.
    """
    hooks = (
        hook
        for module in lm.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks)


def rows_of(rows: int, most: int) -> int:
    """The rows of the graph for `rows` rows: the next power of 2, at most `most`."""
    return min(most, 1 << (rows - 1).bit_length())


def columns_of(span: int) -> int:
    """The columns that the graph for `span` columns reads: the next power of 2 from NARROWEST on."""
    return max(NARROWEST, 1 << (span - 1).bit_length())


def leave_room(lm: LatentLM) -> None:
    """Drop the model's idle graphs if the GPU has no room for their cache beside the peak so far, that of training."""
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
        self._method: Any = None
        self._cached: Any = None
        self._adapted: Any = None
        self._pool: Any = None

    @classmethod
    def of(cls, lm: LatentLM) -> "Graphs":
        """The model's idle graphs, which the caller owns until `give_back`; new ones if there are none."""
        idle: Graphs | None = lm.idle_graphs
        lm.idle_graphs = None
        return idle or cls(SlotCache(lm.causal_lm))

    def give_back(self, lm: LatentLM) -> None:
        """Leave these to the model's next engine, unless there are idle ones already."""
        lm.idle_graphs = lm.idle_graphs or self

    def refresh(self, lm: LatentLM, method: Method) -> None:
        """Drop all graphs if the weights have moved; those of thoughts if the method or its config is another one."""
        weights = [weight.data_ptr() for weight in lm.parameters()]
        if weights != self._weights:
            self.drop()
            self._weights = weights
        # Not kept alive: a control, a method too, holds the thoughts of all its requests.
        if self._method is None or (method, method.config) != (self._method[0](), self._method[1]):
            self.drop("thoughts")
            self._method = (weakref.ref(method), method.config)
        # An adapter that is merged, disabled, switched or scaled changes the operations without moving a weight.
        self._adapted = tuple(
            (layer.merged, layer.disable_adapters, tuple(layer.active_adapters), *layer.scaling.items())
            for layer in lm.lm.modules()
            if isinstance(layer, LoraLayer)
        )

    def drop(self, name: str = "") -> None:
        """Drop the graphs of the work of that name, or all."""
        self.recorded = {key: graph for key, graph in self.recorded.items() if name not in ("", key[0])}
        if not self.recorded:
            # No graph can be recorded into the memory pool of graphs that have been freed.
            self._pool = None

    def hidden(
        self, forward: Callable[..., Tensor], embeds_N1D: Tensor, mask: Any, position_N1: Tensor
    ) -> Tensor:
        """Run `forward` on one position a row. Returns last hidden states, (N, 1, D)."""
        cached = [(tensor.data_ptr(), tensor.shape) for tensor in self.cache.tensors()]
        if cached != self._cached:
            self.drop("decode steps")
            self._cached = cached
        now = self.cache.mapping

        def work(embeds: Tensor, mask: Any, position: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            self.cache.mapping = SlotMapping(now.first, rows, columns, now.span)
            return forward(embeds, mask, position, self.cache)

        inputs = (embeds_N1D, mask, position_N1, now.rows, now.columns)
        # If recording fails, the plain run writes the same keys and values again.
        hidden_N1D: Tensor = self._run("decode steps", now.span, len(embeds_N1D), inputs, work)
        return hidden_N1D

    def think(self, name: str, think: Think, lm: LatentLM, state: ThinkState, most_rows: int) -> Thought:
        """Run `think(lm, state)`, in an engine of at most `most_rows` rows."""
        columns = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        columns = {name: value for name, value in columns.items() if isinstance(value, Tensor | dict)}

        def work(columns: dict[str, Any]) -> Any:
            # No partial head that is cached between steps: the graph would read it after it has been freed.
            own = dataclasses.replace(state, **columns, make_logits=lm.logits, make_partial_head=None)
            thought = think(lm, own)
            return thought.embeds, thought.done, thought.token_ids, thought.info

        kind = (state.wants_info, state.conditions)
        rows = rows_of(len(state.step), most_rows)
        return Thought(*self._run(name, kind, rows, (columns,), work))

    def _run(self, name: str, kind: Any, rows: int, inputs: Any, work: Callable[..., Any]) -> Any:
        """The result of `work(*inputs)`. Both are trees of tensors with a row each, at most `rows`."""
        tensors, layout = tree_flatten(inputs)
        n = len(tensors[0])
        key = (name, kind, self._adapted, rows)
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
        """Record `work`, which reads the tensors `own`. A failure is noted, and logged once for each name."""
        if len(self.recorded) >= MOST_GRAPHS:
            self.drop()
        device = own[0].device
        try:
            with CAPTURING:
                replay = self._capture(work, device) if device.type == REPLAYED_ON else work
            self.recorded[key] = Recorded(own, replay)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.drop()
            name, kind, *_ = key
            if not any(name == other for other, _ in self._failed):
                reason = str(error).strip().partition("\n")[0]
                progress.say(f"warning: {name} run without CUDA graphs, which is slower: {reason}")
            self._failed.add((name, kind))

    def _capture(self, work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
        """Record the work as a CUDA graph. Returns a call that replays it, on the same tensors."""
        graph = torch.cuda.CUDAGraph()
        # The current device may differ from the model's.
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            # thread_local, because another thread that reads thoughts may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                result = work()
        # Graphs run one after another, so they can share the memory of their intermediate tensors.
        self._pool = self._pool or graph.pool()

        def replay() -> Any:
            graph.replay()
            return result

        return replay
