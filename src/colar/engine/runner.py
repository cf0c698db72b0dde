"""Forwards of one model into its cache: a chunk of questions, or one position of every running row.

    read     slots 2..3, columns 0..4         feed     slots 0..1, each at its own column

    slot 0   q q q l l                                 q q q l l w
    slot 1   q q l                                     q q l w
    slot 2   w w w w .                                 q q q q
    slot 3   w w w w w                                 q q q q q

Shape suffixes: N rows, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colar.engine.cache import SlotCache
from colar.engine.compiled import CompiledHidden
from colar.engine.packed import can_pack, packed_copy, refresh
from colar.model.latent_lm import LatentLM


class Runner:
    """A model, its cache and its forward, compiled or not."""

    def __init__(self, lm: LatentLM, compile: bool, max_batch: int) -> None:
        self.lm = packed_copy(lm) if compile and can_pack(lm) else lm
        self.cache = SlotCache(self.lm.causal_lm)
        self.hidden = CompiledHidden(self.lm) if compile else self.lm.hidden
        # A compiled step of one row would be a graph of its own: a row that is alone runs beside a copy of itself.
        self.never_alone = compile and max_batch > 1

    def refresh(self) -> None:
        """Follow weights that were trained since the last requests."""
        refresh(self.lm)

    def read(self, questions: Sequence[Sequence[int]], slot: int, start: int, length: int) -> Tensor:
        """Feed `length` columns of the questions from column `start` on, into slots from `slot` on.

        Returns the hidden states after the questions' last tokens, (N, D): they end in these columns, or are alone and
        go on.
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
        # One question is short: it is not compiled.
        forward = self.hidden if n > 1 else self.lm.hidden
        hidden_NTD = forward(embeds_NTD, mask, position_NT, self.cache)

        last_N = torch.tensor(lengths, device=device).clamp(max=end) - 1 - start
        row_N = torch.arange(n, device=device)
        hidden_ND: Tensor = hidden_NTD[row_N, last_N]
        return hidden_ND

    def feed(self, embeds_ND: Tensor, position_N: Tensor, slot: int = 0) -> Tensor:
        """Feed each row's embedding at its own column, slots from `slot` on. Returns their hidden states, (N, D)."""
        n = len(embeds_ND)
        span = int(position_N.max()) + 1
        copies = 0
        if self.never_alone and n == 1:
            embeds_ND = embeds_ND.repeat(2, 1)
            position_N = position_N.repeat(2)
            copies = 1
        mask = self.cache.at_decode(position_N, span, embeds_ND, copies, slot)
        hidden_N1D = self.hidden(embeds_ND[:, None], mask, position_N[:, None], self.cache)
        hidden_ND: Tensor = hidden_N1D[:n, -1]
        return hidden_ND
