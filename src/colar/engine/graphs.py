"""Decode steps as CUDA graphs: one call starts the thousand small kernels of a step. The default on a GPU.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from colar import progress
from colar.engine.cache import SlotCache, SlotMapping
from colar.model import chunks, sharded
from colar.model.latent_lm import LatentLM

NARROWEST = 64
"""Columns of the narrowest graph."""
REPLAYED_ON = "cuda"
"""Type of the devices that have graphs."""
WARM_UP = 2
"""Forwards before one is recorded: libraries make their workspaces in the first."""


def can_record(lm: LatentLM) -> bool:
    """True for whole weights on a GPU: the layers of sharded ones are gathered by other processes' calls."""
    return lm.device.type == REPLAYED_ON and not sharded.is_sharded(lm)


def rows_of(rows: int, most: int) -> int:
    """The rows of the graph for this many: the next power of 2, at most `most`."""
    return min(most, 1 << (rows - 1).bit_length())


def columns_of(span: int) -> int:
    """The columns that the graph for `span` columns reads: the next power of 2 from NARROWEST on."""
    return max(NARROWEST, 1 << (span - 1).bit_length())


@dataclass
class Recorded:
    """A graph, and the tensors that it reads and writes."""

    embeds_N1D: Tensor
    position_N1: Tensor
    mask: Any
    mapping: SlotMapping
    replay: Callable[[], Tensor]
    """Runs it on what those tensors hold. Returns the hidden states (N, 1, D), which the next replay overwrites."""


class GraphedHidden:
    """`lm.hidden` for steps of one position a row, recorded once for each shape."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.recorded: dict[tuple[int, int], Recorded] = {}
        self._addresses: list[int] = []
        self._model: Any = None
        self._pool: Any = None
        self._gave_up = False

    def __call__(self, embeds_N1D: Tensor, mask: Any, position_N1: Tensor, cache: SlotCache) -> Tensor:
        """Last hidden states, (N, 1, D)."""
        if self._gave_up:
            return self.lm.hidden(embeds_N1D, mask, position_N1, cache)
        addresses = [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]
        if addresses != self._addresses:
            self._drop()
            self._addresses = addresses
        key = (embeds_N1D.shape[0], cache.mapping.seen.shape[0])
        if key not in self.recorded:
            try:
                self.recorded[key] = self._record(embeds_N1D, mask, position_N1, cache)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                return self._give_up(error, embeds_N1D, mask, position_N1, cache)
        graph = self.recorded[key]
        graph.embeds_N1D.copy_(embeds_N1D)
        graph.position_N1.copy_(position_N1)
        for own, given in zip(_masks(graph.mask), _masks(mask), strict=True):
            own.copy_(given)
        graph.mapping.rows.copy_(cache.mapping.rows)
        graph.mapping.columns.copy_(cache.mapping.columns)
        # A copy: the next graph may use the same memory.
        return graph.replay().clone()

    def refresh(self) -> None:
        """Drop all graphs if the weights have moved, or an adapter was folded in or taken out."""
        weights = [weight.data_ptr() for weight in self.lm.causal_lm.parameters()]
        adapted = [module for module in self.lm.lm.modules() if isinstance(module, BaseTunerLayer)]
        model = (weights, [module.merged for module in adapted])
        if model != self._model:
            self._drop()
            self._model = model

    def _drop(self) -> None:
        """Forget all graphs. Their pool of memory goes with them: none can be recorded into it any more."""
        self.recorded.clear()
        self._pool = None

    def _give_up(self, error: RuntimeError, *fed: Any) -> Tensor:
        """Run the step as it is, now and from then on: it writes the same keys and values as the attempt before it."""
        self._gave_up = True
        self._drop()
        reason = str(error).strip().partition("\n")[0]
        progress.say(f"warning: decode steps run without CUDA graphs, which is slower: {reason}")
        embeds_N1D, mask, position_N1, cache = fed
        return self.lm.hidden(embeds_N1D, mask, position_N1, cache)

    def _record(self, embeds_N1D: Tensor, mask: Any, position_N1: Tensor, cache: SlotCache) -> Recorded:
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
            # Weights that autocast had cast before would be read by the graph after they are gone.
            with chunks.uncached_autocast(embeds.device.type):
                return self.lm.hidden(embeds, own_mask, position, cache)

        if embeds.device.type != REPLAYED_ON:
            return Recorded(embeds, position, own_mask, mapping, forward)
        return Recorded(embeds, position, own_mask, mapping, self._capture(forward))

    def _capture(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The forward as a CUDA graph. It writes the same keys and values each time."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden_N1D = forward()
        # Graphs run one after another: they share what is between a forward's first and last tensors.
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return hidden_N1D

        return replay


def _masks(mask: Any) -> list[Tensor]:
    return list(mask.values()) if isinstance(mask, dict) else [mask]
