"""Compiled forwards: all layers in one graph, for any number of rows, positions and columns.

A step of several rows and reading several questions are two graphs, each compiled when it is first met; an engine of
one row has one for its step (torch treats a size of 1 apart). One question by itself is read as it is: that is short.
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


class CompiledHidden:
    """`lm.hidden` into a `SlotCache`; as it is where it cannot be compiled, with a word on why."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.met: set[str] = set()
        self.run: Any = torch.compile(lm.hidden)
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        if lm.device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
            self._give_up("there is no C++ compiler (g++ or clang++)")

    def __call__(self, embeds_NTD: Tensor, mask: Any, position_NT: Tensor, cache: SlotCache) -> Tensor:
        several, reads = embeds_NTD.shape[0] > 1, embeds_NTD.shape[1] > 1
        if reads and not several:
            return self.lm.hidden(embeds_NTD, mask, position_NT, cache)
        if not cache.filled:
            self._fill(embeds_NTD, position_NT, cache)
        kind = "reading questions" if reads else "a step of several rows" if several else "a step of one row"
        with _packed(self.lm):
            if kind in self.met:
                hidden: Tensor = self.run(embeds_NTD, mask, position_NT, cache)
                return hidden
            self.met.add(kind)
            return self._first(kind, embeds_NTD, mask, position_NT, cache)

    def _fill(self, embeds_NTD: Tensor, position_NT: Tensor, cache: SlotCache) -> None:
        """One position through a new cache: a graph would allocate it, and be of use only once."""
        place, one = cache.place, embeds_NTD[:1, :1]
        self.lm.hidden(one, cache.at_prefill(0, 1, 0, 1, one), position_NT[:1, :1], cache)
        cache.place = place

    def _first(self, kind: str, *fed: Any) -> Tensor:
        """A forward that compiles. It writes the same keys and values again where it has to be taken anew."""
        if self.run is not self.lm.hidden:
            progress.say(f"compiling {kind}: about a minute, less where it was compiled before")
        _name_sizes(*fed)
        started = time.perf_counter()
        try:
            # Sizes that happen to be equal now are not the same size.
            with SHAPES.patch(use_duck_shape=False):
                hidden: Tensor = self.run(*fed)
        except Exception as error:
            if self.run is self.lm.hidden:
                raise
            self._give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
            hidden = self.lm.hidden(*fed)
        else:
            progress.say(f"compiled in {time.perf_counter() - started:.0f} s")
        return hidden

    def _give_up(self, why: str) -> None:
        progress.say(f"the engine goes on without compilation: {why}")
        self.run = self.lm.hidden


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """SDPA: the query heads that share a key head are queries of that head. Returns (N, T, heads, d).

    transformers does the same in a plain step, but copies keys and values for each query head in a compiled one.
    """
    n, heads, length, width = query.shape
    shared = heads // key.shape[1]
    packed = query.reshape(n, key.shape[1], shared * length, width)
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, shared, 1)
    scale = kwargs.get("scaling")
    out = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return out.reshape(n, heads, length, width).transpose(1, 2).contiguous(), None


PACKED = "colar_packed"
ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


@contextlib.contextmanager
def _packed(lm: LatentLM) -> Iterator[None]:
    """`packed_attention` in the place of sdpa, which is left to itself outside."""
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
    place = cache.place
    by_row = [i for i, size in enumerate(position_NT.shape) if size > 1]  # of rows and positions
    for fed in (embeds_NTD, position_NT, place.columns):
        torch._dynamo.maybe_mark_dynamic(fed, by_row)
    if 0 in by_row:
        torch._dynamo.maybe_mark_dynamic(place.rows, 0)
    for whole in (place.seen, place.before):
        torch._dynamo.maybe_mark_dynamic(whole, 0)
    for layer in cache.layers:
        for kept in (layer.keys, layer.values):
            torch._dynamo.maybe_mark_dynamic(kept, [0, 2])
    for mask_N1TC in mask.values() if isinstance(mask, dict) else [mask]:
        torch._dynamo.maybe_mark_dynamic(mask_N1TC, [2 * i for i in by_row] + [3])
