"""Compiled forwards: all layers in one graph, for any number of rows, positions and columns.

    forward                   embeddings (N, T, D)      graph
    a step of several rows    N > 1, T = 1              one
    reading questions         N > 1, T > 1              another
    a step of one row         N = 1, T = 1              in an engine of one row only: torch treats a size of 1 apart
    reading one question      N = 1, T > 1              none: that is short

Each graph is compiled when its kind is first met, and takes about a minute. It is one for all sizes, which needs care:
torch compiles a size in that it takes for a constant, and compiles again when it changes.

Shape suffixes: N rows, T positions, C columns, D width.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from colar import progress
from colar.engine.cache import SlotCache
from colar.model.latent_lm import LatentLM

SHAPES: Any = _config
"""torch's settings for sizes that vary."""
PACKED = "colar_packed"
"""Name under which transformers finds `packed_attention`."""


class CompiledHidden:
    """`lm.hidden` into a `SlotCache`, compiled. Where it cannot be compiled it runs as it is, and says why."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.compiled: set[str] = set()
        """The kinds of forward that have been met."""
        self.run: Any = torch.compile(lm.hidden)
        self.gave_up = False
        # On a CPU torch.compile writes C++.
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        if lm.device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
            self._give_up("there is no C++ compiler (g++ or clang++)")

    def __call__(self, embeds_NTD: Tensor, mask: Any, position_NT: Tensor, cache: SlotCache) -> Tensor:
        """Last hidden states, (N, T, D)."""
        several = embeds_NTD.shape[0] > 1
        reads = embeds_NTD.shape[1] > 1
        if self.gave_up or (reads and not several):
            return self.lm.hidden(embeds_NTD, mask, position_NT, cache)
        if reads:
            kind = "reading questions"
        elif several:
            kind = "a step of several rows"
        else:
            kind = "a step of one row"

        # A graph that allocates the cache would be of use only once.
        if not cache.filled:
            self._fill(embeds_NTD, position_NT, cache)
        with packed_heads(self.lm):
            if kind not in self.compiled:
                self.compiled.add(kind)
                return self._compile(kind, embeds_NTD, mask, position_NT, cache)
            hidden: Tensor = self.run(embeds_NTD, mask, position_NT, cache)
            return hidden

    def _fill(self, embeds_NTD: Tensor, position_NT: Tensor, cache: SlotCache) -> None:
        """Allocate a new cache, by feeding one position as it is."""
        place = cache.place
        one_11D = embeds_NTD[:1, :1]
        mask = cache.at_prefill(0, 1, 0, 1, one_11D)
        self.lm.hidden(one_11D, mask, position_NT[:1, :1], cache)
        cache.place = place

    def _compile(self, kind: str, *fed: Any) -> Tensor:
        """Compile by the first forward of its kind. Where that fails, a plain one writes the same again."""
        progress.say(f"compiling {kind}: about a minute, less where it was compiled before")
        _name_sizes(*fed)
        started = time.perf_counter()
        try:
            # Sizes that happen to be equal now are not the same size.
            with SHAPES.patch(use_duck_shape=False):
                hidden: Tensor = self.run(*fed)
        except Exception as error:
            # torch's errors are pages long; the first line says what is wrong.
            first_line = str(error).strip().partition("\n")[0]
            self._give_up(f"{type(error).__name__}: {first_line}")
            return self.lm.hidden(*fed)
        progress.say(f"compiled in {time.perf_counter() - started:.0f} s")
        return hidden

    def _give_up(self, why: str) -> None:
        progress.say(f"the engine runs without compilation: {why}")
        self.gave_up = True


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as SDPA does, with less copying: query heads that share a key head become queries of that head.

    transformers does the same in a plain step on a CPU, but copies keys and values for each query head in a compiled
    one. Its older versions do so in all steps on a GPU, where SDPA's own `enable_gqa` does, too: its kernels for a mask
    have no such heads. Returns (N, T, heads, d), and no attention weights.
    """
    #     query   (N, 6 heads, T, d)   ->   (N, 2 heads, 3 T, d)
    #     key     (N, 2 heads, C, d)        as it is, and the values too
    n, heads, length, width = query.shape
    key_heads = key.shape[1]
    shared = heads // key_heads
    packed = query.reshape(n, key_heads, shared * length, width)
    # A query's mask goes with it. That of a single position serves any number of queries.
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, shared, 1)
    out = nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, scale=kwargs.get("scaling")
    )
    return out.reshape(n, heads, length, width).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


@contextlib.contextmanager
def packed_heads(lm: LatentLM) -> Iterator[None]:
    """Put `packed_attention` in the place of sdpa inside the block."""
    config = lm.config
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = before


def _name_sizes(embeds_NTD: Tensor, mask: Any, position_NT: Tensor, cache: SlotCache) -> None:
    """Tell torch which sizes vary: it would find out by compiling again and again."""
    mark = torch._dynamo.maybe_mark_dynamic
    place = cache.place

    # N and T, where they are more than 1: a size of 1 stays a constant, which makes its kind of forward.
    varying = [dimension for dimension, size in enumerate(position_NT.shape) if size > 1]
    for tensor_NT in (embeds_NTD, position_NT, place.columns):
        mark(tensor_NT, varying)
    if 0 in varying:
        mark(place.rows, 0)

    # Columns read, the first slot (the size of `before`), and how many slots and columns there are.
    mark(place.seen, 0)
    mark(place.before, 0)
    for layer in cache.layers:
        mark(layer.keys, [0, 2])
        mark(layer.values, [0, 2])

    # N and T are dimensions 0 and 2 of a mask, C is 3.
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    for mask_N1TC in masks:
        mark(mask_N1TC, [2 * dimension for dimension in varying] + [3])
