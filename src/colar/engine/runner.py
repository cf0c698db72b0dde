"""Forward passes of one model into its cache: a chunk of prefill, or one decode step of every running row.

    prefill  slots 2..3, columns 0..4         decode   slots 0..3, each at its own column

    slot 0   q q q l l                                 q q q l l w
    slot 1   q q l                                     q q l w
    slot 2   w w w w .                                 q q q q w
    slot 3   w w w w w                                 q q q q q w

Shape suffixes: N rows, T positions, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colar.engine.cache import SlotCache, check
from colar.engine.compiled import CompiledHidden, can_pack, grouped_heads, packed_copy, refresh
from colar.engine.graphs import GraphedHidden, columns_of, rows_of
from colar.model.latent_lm import LatentLM


class Runner:
    """A model, its cache and its forward pass: as it is, compiled, or recorded as CUDA graphs."""

    def __init__(self, lm: LatentLM, compile: bool, max_batch: int, cuda_graphs: bool) -> None:
        check(lm.causal_lm)
        self.lm = packed_copy(lm) if compile and can_pack(lm) else lm
        self.cache = SlotCache(self.lm.causal_lm)
        self.hidden = CompiledHidden(self.lm) if compile else self.lm.hidden
        self.graphs = GraphedHidden(self.lm) if cuda_graphs else None
        self.max_batch = max_batch
        # A compiled step of one row would be a graph of its own: a row that is alone runs beside a copy of itself.
        self.never_alone = compile and max_batch > 1

    def refresh(self) -> None:
        """Follow weights that were trained since the last requests."""
        refresh(self.lm)
        if self.graphs is not None:
            self.graphs.refresh()

    def prefill(self, questions: Sequence[Sequence[int]], slot: int, start: int, length: int) -> Tensor:
        """Feed `length` columns of the questions from column `start` on, into slots from `slot` on.

        Returns the hidden states after the questions' last tokens, (N, D); only a single question may go on beyond
        these columns.
        """
        device = self.lm.device
        n = len(questions)
        lengths = [len(ids) for ids in questions]
        end = min(start + length, max(lengths))

        # Padded on the right, where a row's own next columns come to lie; no row sees beyond its own position.
        #
        #     slot 3     q q q q .
        #     slot 4     q q q q q
        ids_NT = torch.zeros(n, end - start, dtype=torch.int64)
        for row, ids in enumerate(questions):
            part = torch.tensor(ids[start:end], dtype=torch.int64)
            ids_NT[row, : len(part)] = part
        embeds_NTD = self.lm.embed(ids_NT.to(device))
        mask = self.cache.at_prefill(slot, n, start, end - start, embeds_NTD)
        position_NT = torch.arange(start, end, device=device).expand(n, -1)
        # A single question is short: it is not compiled.
        forward = self.hidden if n > 1 else self.lm.hidden
        hidden_NTD = forward(embeds_NTD, mask, position_NT, self.cache)

        last_N = torch.tensor(lengths, device=device).clamp(max=end) - 1 - start
        hidden_ND: Tensor = hidden_NTD[torch.arange(n, device=device), last_N]
        return hidden_ND

    def decode(self, embeds_ND: Tensor, position_N: Tensor, span: int) -> Tensor:
        """Feed each row's embedding at its own column, below `span`. Returns the hidden states, (N, D)."""
        n = len(embeds_ND)
        forward: Callable[..., Tensor] = self.hidden
        total = max(n, 2) if self.never_alone else n
        if self.graphs is not None:
            forward = self.graphs
            total = rows_of(n, self.max_batch)
            span = columns_of(span, self.cache.size.columns)
        copies = total - n
        if copies:
            embeds_ND = torch.cat([embeds_ND, embeds_ND[:1].expand(copies, -1)])
            position_N = torch.cat([position_N, position_N[:1].expand(copies)])
        mask = self.cache.at_decode(position_N, span, embeds_ND, copies)
        # On a CPU transformers itself does without copies of keys and values.
        own = grouped_heads(self.lm) if embeds_ND.device.type != "cpu" else contextlib.nullcontext()
        with own:
            hidden_N1D = forward(embeds_ND[:, None], mask, position_N[:, None], self.cache)
        hidden_ND: Tensor = hidden_N1D[:n, -1]
        return hidden_ND
