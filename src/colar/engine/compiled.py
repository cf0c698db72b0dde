"""A compiled decode step: all layers in one graph, for any number of rows and columns.

One row and several are two graphs (torch treats a size of 1 apart), each compiled when it is first met. Prefill
stays as it is: its shapes vary, and its time goes into matrix products that compilation does not change.
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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from colar import progress
from colar.engine.cache import SlotCache
from colar.model.latent_lm import LatentLM


class CompiledHidden:
    """`lm.hidden` for one position a row; as it is where it cannot be compiled, with a word on why."""

    def __init__(self, lm: LatentLM) -> None:
        self.lm = lm
        self.met: set[bool] = set()
        self.run: Any = torch.compile(lm.hidden)
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        if lm.device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
            self._give_up("there is no C++ compiler (g++ or clang++)")

    def __call__(self, embeds_N1D: Tensor, mask: Any, position_N1: Tensor, cache: SlotCache) -> Tensor:
        several = embeds_N1D.shape[0] > 1
        with _packed(self.lm):
            if several in self.met:
                hidden: Tensor = self.run(embeds_N1D, mask, position_N1, cache)
                return hidden
            self.met.add(several)
            return self._first(embeds_N1D, mask, position_N1, cache)

    def _first(self, *fed: Any) -> Tensor:
        """A step that compiles. It writes the same keys and values again where it has to be taken anew."""
        if self.run is not self.lm.hidden:
            progress.say("compiling the decode step: about a minute, less where it was compiled before")
        _name_sizes(*fed)
        started = time.perf_counter()
        try:
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
        progress.say(f"the decode step is not compiled: {why}")
        self.run = self.lm.hidden


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """SDPA of one position a row: the queries that share a key head are its queries. Returns (N, 1, heads, d).

    transformers does the same in a plain step, but copies keys and values for each query head in a compiled one.
    """
    n, heads, _, width = query.shape
    groups = key.shape[1]
    packed = query.reshape(n, groups, heads // groups, width)
    scale = kwargs.get("scaling")
    out = nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=scale
    )
    return out.reshape(n, heads, 1, width).transpose(1, 2).contiguous(), None


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


def _name_sizes(embeds_N1D: Tensor, mask: Any, position_N1: Tensor, cache: SlotCache) -> None:
    """Tell torch which sizes vary, rows and columns read: it would find out by compiling again and again."""
    place, several = cache.place, embeds_N1D.shape[0] > 1
    for by_row in (embeds_N1D, position_N1, place.rows, place.columns):
        if several:
            torch._dynamo.maybe_mark_dynamic(by_row, 0)
    torch._dynamo.maybe_mark_dynamic(place.seen, 0)
    for layer in cache.layers:
        for kept in (layer.keys, layer.values):
            torch._dynamo.maybe_mark_dynamic(kept, [0, 2])
    for mask_N11C in mask.values() if isinstance(mask, dict) else [mask]:
        torch._dynamo.maybe_mark_dynamic(mask_N11C, [0, 3] if several else [3])
