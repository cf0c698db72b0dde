"""What a method does with a batch: which forwards, how many logits, which modules. Read off a small twin of the model.

The twin has the method, the rows' lengths and one narrow layer: it computes in a moment what a large model would
compute in the same shapes. Its work is repeated on shapes alone (`replay.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM

from colar.data.example import Example
from colar.methods.base import Batch, Method, Row
from colar.model.backbones import Backbone
from colar.model.head_rows import HeadRows
from colar.model.latent_lm import LatentLM, Reduce
from colar.planning import shapes
from colar.prompts import Template

WIDTH = 40
"""Of the twin: a size that no other has, so that widths are known by it."""
VOCABULARY = 4096
"""Of the twin: large, so that a sampled output rarely ends by chance."""


@dataclass
class Work:
    """The work of one batch."""

    passes: list[list[int]] = field(default_factory=list)
    """(rows, positions) of each forward; those that extend one cache are one."""
    logits: list[int] = field(default_factory=list)
    """Positions that logits are made at, call by call."""
    modules: list[tuple[str, list[tuple[int, ...]]]] = field(default_factory=list)
    """Names of the method's modules, and the shapes that they get, without the width."""

    @property
    def positions(self) -> int:
        """Positions of all forwards, padding included."""
        return sum(rows * length for rows, length in self.passes)


class Twin(LatentLM):
    """A `LatentLM` that writes down its work."""

    work: Work
    of_cache: dict[int, list[int]]

    def begin(self) -> None:
        """Write down from here on."""
        self.work = Work()
        self.of_cache = {}
        self.caches: list[Cache] = []  # an id is free for another once its cache is gone
        for name, module in self.extra.items():
            module.register_forward_pre_hook(self._noted(name))

    def _forward(
        self,
        embeds_BTD: Tensor,
        attention_mask: Any,
        position_ids: Tensor | None,
        cache: Cache | None,
        **wanted: bool,
    ) -> Any:
        rows, length = embeds_BTD.shape[:2]
        if cache is not None and id(cache) in self.of_cache:
            self.of_cache[id(cache)][1] += length
        else:
            self.work.passes.append([rows, length])
        if cache is not None and id(cache) not in self.of_cache:
            self.caches.append(cache)
            self.of_cache[id(cache)] = self.work.passes[-1]
        return super()._forward(embeds_BTD, attention_mask, position_ids, cache, **wanted)

    def hidden_of_rows(self, embeds_BTD: Tensor, starts: tuple[Tensor, Tensor], lengths_B: Tensor) -> Tensor:
        # All its tokens are one: rows would seem to share what they do not. What rows share in a run spares more.
        return self.hidden(embeds_BTD)

    def reduce_logits(
        self, reduce: Reduce, hidden_XD: Tensor, *columns: Tensor, rows: HeadRows | None = None
    ) -> tuple[Tensor, ...]:
        # Some rows of the head are a small part of it.
        if rows is None:
            self.work.logits.append(len(hidden_XD))
        return super().reduce_logits(reduce, hidden_XD, *columns, rows=rows)

    def _noted(self, name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            # Of inputs as wide as the model: the replay puts hidden states of the large model in their place.
            shapes = [tuple(each.shape[:-1]) for each in inputs if each.shape[-1] == WIDTH]
            self.work.modules.append((name, shapes))

        return note


def twin_of(method: Method, examples: Sequence[Example]) -> Twin:
    """A twin with the method's modules; `method.prepare` runs on these examples."""
    config = shapes.config(LlamaConfig, WIDTH, WIDTH, 1, 4, 4, VOCABULARY, tied=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = Backbone("twin", LlamaForCausalLM(config), shapes.counting_tokenizer())
        twin = Twin.from_backbone(backbone)
        assert isinstance(twin, Twin)
        # `prepare` may run the twin, which notes that too; it begins anew below.
        twin.begin()
        twin.add_modules(method.modules(twin))
        # What it says there of the twin's words would mislead.
        with contextlib.redirect_stderr(io.StringIO()):
            list(method.prepare(twin, examples))
    # All logits at once: calls are counted, not chunks.
    twin.chunk_bytes = 2**62
    twin.begin()
    return twin


def trace(twin: Twin, method: Method, rows: Sequence[Row], template: Template) -> Work:
    """The work of a batch of rows that were encoded by `template`."""
    batch = Batch.collate([in_words_of(twin, row, template) for row in rows])
    twin.work = Work()
    with torch.no_grad():
        method.loss(twin, batch)
    return twin.work


def in_words_of(twin: Twin, row: Row, template: Template) -> Row:
    """The row with as many tokens, all of them known to the twin."""
    ids = {template.separator_id: twin.template.separator_id, template.eos_id: twin.template.eos_id}

    def known(tokens: list[int]) -> list[int]:
        # The backbone's ids may lie beyond the twin's small vocabulary; no shape depends on them.
        return [ids.get(token, 0) for token in tokens]

    return dataclasses.replace(
        row, question=known(row.question), steps=[known(step) for step in row.steps], answer=known(row.answer)
    )
