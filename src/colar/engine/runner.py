"""Forward passes of one model into its cache: prefill of some questions, or one decode step of every running row.

    prefill  slots 2..3, columns 0..4         decode   slots 0..3, each at its own column

    slot 0   q q q l l                                 q q q l l w
    slot 1   q q l                                     q q l w
    slot 2   w w w w .                                 q q q q w
    slot 3   w w w w w                                 q q q q q w

Shape suffixes: N rows, T positions, C columns, D width.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from colar.engine.cache import SlotCache, check_attention
from colar.engine.graphs import Graphs, Think, columns_of, has_hooks, rows_of
from colar.engine.scheduler import CHUNK
from colar.methods.base import Method
from colar.methods.thinking import ThinkState, Thought, token_thought
from colar.model import masks
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged


class Runner:
    """A model, its cache and its forward pass, which runs directly or is recorded as CUDA graphs."""

    def __init__(self, lm: LatentLM, method: Method, max_batch: int, cuda_graphs: bool) -> None:
        self.lm = lm
        with self.masked_attention():
            check_attention(lm.causal_lm)
        self.method = method
        self.cache = SlotCache(lm.causal_lm)
        # Gathered once for all steps between two trainings.
        self.partial_head = functools.lru_cache(maxsize=1)(lm.partial_head)
        self.cuda_graphs = cuda_graphs
        self.graphs: Graphs | None = None
        """Set while requests run; an idle engine hands its graphs, and their cache, to the model's next engine."""
        self.max_batch = max_batch

    def refresh_weights(self) -> None:
        """Adapt to weights that may have been trained since the last requests."""
        self.partial_head.cache_clear()
        if self.cuda_graphs and not has_hooks(self.lm):
            self.graphs = self.graphs or Graphs.of(self.lm)
            self.graphs.refresh(self.lm, self.method)
            self.cache = self.graphs.cache

    def free_memory(self) -> None:
        """Free the cache, and the graphs that were recorded with it: they would read memory that is gone."""
        self.cache.release()
        if self.graphs is not None:
            self.graphs.drop()

    def release(self) -> None:
        """Free memory. Called when no requests are left."""
        if self.graphs is None:
            self.cache.release()
        else:
            self.graphs.give_back(self.lm)
            self.graphs = None
            self.cache = SlotCache(self.lm.causal_lm)

    def think(self, state: ThinkState) -> Thought:
        """Run one step of thinking for the state's rows."""
        return self._chosen("thoughts", self.method.think, state)

    def answer(self, state: ThinkState) -> Thought:
        """Choose the next token of each row's answer."""
        # One graph for all speeds and methods: a token of an answer does not depend on them.
        own = dataclasses.replace(state, conditions=state.conditions.of_tokens(), params={}, begun={})
        return self._chosen("answers", answer_token, own)

    def _chosen(self, name: str, think: Think, state: ThinkState) -> Thought:
        if self.graphs is None:
            return think(self.lm, state)
        return self.graphs.think(name, think, self.lm, state, self.max_batch)

    def masked_attention(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, use the attention implementation of the load if the current one takes no additive mask."""
        name: str = self.lm.config._attn_implementation
        return masks.attention(self.lm.config, name if name in masks.MASKED else self.lm.loaded_attention)

    def prefill(self, questions: Sequence[Sequence[int]], slot: int) -> Tensor:
        """Feed the questions into slots from `slot` on. Returns the hidden states after their last tokens, (N, D)."""
        device = self.lm.device
        # Padded on the right, in columns that a row's own next positions overwrite; no row sees beyond its position.
        #
        #     slot 3     q q q q .
        #     slot 4     q q q q q
        ids_NT, lengths_N = ragged.pad(questions)
        n, longest = ids_NT.shape
        embeds_NTD = self.lm.embed(devices.send(ids_NT, device))
        position_NT = torch.arange(longest, device=device).expand(n, -1)
        # A long question, which is prefilled by itself, is fed in chunks: the mask of all its positions at once would
        # grow with the square of its length.
        for first in range(0, longest, CHUNK):
            chunk = slice(first, min(first + CHUNK, longest))
            mask = self.cache.at_prefill(slot, position_NT[:, chunk], chunk.stop, embeds_NTD)
            hidden_NTD = self.lm.hidden(embeds_NTD[:, chunk], mask, position_NT[:, chunk], self.cache)

        last_N = devices.send(lengths_N - 1 - first, device)
        hidden_ND: Tensor = hidden_NTD[torch.arange(n, device=device), last_N]
        return hidden_ND

    def decode(self, embeds_ND: Tensor, position_N: Tensor, span: int) -> Tensor:
        """Feed each row's embedding at its own column, below `span`. Returns the hidden states, (N, D)."""
        n = len(embeds_ND)
        copies = 0
        if self.graphs is not None:
            copies = rows_of(n, self.max_batch) - n
            span = columns_of(span)
        if copies:
            embeds_ND = torch.cat([embeds_ND, embeds_ND[:1].expand(copies, -1)])
            position_N = torch.cat([position_N, position_N[:1].expand(copies)])
        mask = self.cache.at_decode(position_N, span, embeds_ND, copies)
        fed = (embeds_ND[:, None], mask, position_N[:, None])
        if self.graphs is None:
            hidden_N1D = self.lm.hidden(*fed, self.cache)
        else:
            hidden_N1D = self.graphs.hidden(self.lm.hidden, *fed)
        hidden_ND: Tensor = hidden_N1D[:n, -1]
        return hidden_ND


def answer_token(lm: LatentLM, state: ThinkState) -> Thought:
    """Choose a token of the answer, in the form of a thought that is a token; the row is done at EOS."""
    return token_thought(lm, state, lm.template.eos_id)
