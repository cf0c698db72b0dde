"""Decode steps as CUDA graphs: a step's thousand small kernels are started by one call. Off by default.

A graph reads and writes at fixed places, for one shape. So the rows of a step are filled up to one of a few numbers,
the columns read to one of a few widths, and what is fed is copied to where the graph reads it.

    rows that run     rows of the graph      columns that are read
    1                 1                      64
    2                 2                      128
    3, 4              4                      256
    5 .. 8            8                      ...

Rows that fill up are copies of the first one: they write into the last slot, which nobody reads. A graph belongs to the
tensors that it was recorded with: where the cache or the weights lie elsewhere, or an adapter is folded in, all are
recorded anew.

No GPU has run this. On a CPU the same copies are made, and the forward is called where a graph would be replayed: tests
compare that with the plain step.

Shape suffixes: N rows, C columns, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from colar.engine.cache import Place, SlotCache
from colar.model.latent_lm import LatentLM

NARROWEST = 64
"""Columns of the narrowest graph."""
WARM_UP = 2
"""Forwards before one is recorded: libraries make their workspaces in the first."""


def columns_of(span: int, most: int) -> int:
    """The columns that the graph for `span` columns reads: the next power of 2 from NARROWEST on, at most `most`."""
    return min(most, max(NARROWEST, 1 << (span - 1).bit_length()))


@dataclass
class Recorded:
    """A graph, and the tensors that it reads and writes."""

    embeds_N1D: Tensor
    position_N1: Tensor
    mask: Any
    place: Place
    replay: Callable[[], Tensor]
    """Runs it on what those tensors hold. Returns the hidden states (N, 1, D), which the next replay overwrites."""


class GraphedHidden:
    """`lm.hidden` for steps of one position a row, recorded once for each shape."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.recorded: dict[tuple[int, int], Recorded] = {}
        self._cache_at: list[int] = []
        self._model: Any = None
        self._pool: Any = None

    def __call__(self, embeds_N1D: Tensor, mask: Any, position_N1: Tensor, cache: SlotCache) -> Tensor:
        """Last hidden states, (N, 1, D)."""
        # The first forward allocates the cache; questions are read in any shape; rows are fed apart after a failure.
        first = cache.place.before.shape[0] - 2
        if not cache.filled or embeds_N1D.shape[1] > 1 or first:
            return self.lm.hidden(embeds_N1D, mask, position_N1, cache)
        lies_at = [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]
        if lies_at != self._cache_at:
            self.recorded.clear()
            self._cache_at = lies_at
        key = (embeds_N1D.shape[0], cache.place.seen.shape[0])
        if key not in self.recorded:
            self.recorded[key] = self._record(embeds_N1D, mask, position_N1, cache)
        graph = self.recorded[key]
        graph.embeds_N1D.copy_(embeds_N1D)
        graph.position_N1.copy_(position_N1)
        for kept, now in zip(_masks(graph.mask), _masks(mask), strict=True):
            kept.copy_(now)
        graph.place.rows.copy_(cache.place.rows)
        graph.place.columns.copy_(cache.place.columns)
        # A copy: the next graph may use the same memory.
        return graph.replay().clone()

    def refresh(self) -> None:
        """Drop all graphs where the weights lie elsewhere now, or an adapter was folded in or taken out.

        Weights that were trained where they lie need nothing.
        """
        weights = [weight.data_ptr() for weight in self.lm.causal_lm.parameters()]
        adapted = [module for module in self.lm.lm.modules() if isinstance(module, BaseTunerLayer)]
        model = (weights, [module.merged for module in adapted])
        if model != self._model:
            self.recorded.clear()
            self._model = model

    def _record(self, embeds_N1D: Tensor, mask: Any, position_N1: Tensor, cache: SlotCache) -> Recorded:
        """Record the forward of this shape; tensors of its own take the place of those given."""
        embeds, position = embeds_N1D.clone(), position_N1.clone()
        kept_mask = (
            {name: value.clone() for name, value in mask.items()} if isinstance(mask, dict) else mask.clone()
        )
        now = cache.place
        # Sizes say where a place is, so two of its tensors are never written.
        place = Place(now.before, now.rows.clone(), now.columns.clone(), now.seen)

        def forward() -> Tensor:
            cache.place = place
            return self.lm.hidden(embeds, kept_mask, position, cache)

        if embeds.device.type != "cuda":
            return Recorded(embeds, position, kept_mask, place, forward)
        return Recorded(embeds, position, kept_mask, place, self._capture(forward))

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
