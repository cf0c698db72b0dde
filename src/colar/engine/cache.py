"""The key-value cache of the engine: slots, each with a length of its own.

    layer.keys (S slots, H heads, C columns, d)         column = position: nothing is padded on the left

    slot 0   q q q q l l # a .        row 0 feeds its answer
    slot 1   q q l . . . . . .        row 1 thinks
    slot 2   . . . . . . . . .        free

The running rows are slots 0..n-1, so that a decode step reads a slice and copies nothing: when a row ends, the last
one moves into its slot. Columns beyond a row's length hold leftovers of earlier rows, and are masked.

There are about as many slots as rows, each as wide as the widest row may become. The scheduler chooses the size, and
`reserve` allocates it. An idle engine frees all of it (`release`); with CUDA graphs the next engine reuses the cache.

A backbone's layers call `SlotLayer.update` with the keys and values of the fed positions. Before the forward pass,
`SlotCache.at_prefill` or `at_decode` sets the slots and columns to write them to, and returns the attention mask.

Shape suffixes: S slots, N rows, H heads, T positions fed, C columns.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from colar.model import backbones, masks, probes
from colar.ops import devices, ragged

ROUND_TO = backbones.CONTEXT_MULTIPLE
"""Attention reads columns up to a multiple of this, so that there are few shapes."""
FED = 3
"""Positions that the check of a backbone decodes after its prefill."""


def round_columns(columns: int) -> int:
    """The next multiple of `ROUND_TO`."""
    return ragged.round_up(columns, ROUND_TO)


@dataclass(frozen=True)
class CacheSize:
    """The allocated size of a layer. Each of its slots x columns positions holds a key and a value for each head."""

    slots: int
    columns: int

    @property
    def positions(self) -> int:
        return self.slots * self.columns


EMPTY = CacheSize(0, 0)


@dataclass
class SlotMapping:
    """Columns that the next forward pass writes keys and values to, and columns that its rows read."""

    first: int
    """The first slot."""
    rows: Tensor
    """(N, 1) slots, from `first` on."""
    columns: Tensor
    """(N, T) columns written."""
    span: int
    """Columns read, from 0 on."""

    def read(self, cached: Tensor) -> Tensor:
        """The keys or values of a layer that these rows read, (N, H, C, d)."""
        return cached[self.first : self.first + len(self.rows), :, : self.span]


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, (S, H, C, d) each, in the dtype and on the device of the backbone."""

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._zeros(key_states, self.owner.size)
        self.values = self._zeros(value_states, self.owner.size)
        self.is_initialized = True

    def _zeros(self, like: Tensor, size: CacheSize) -> Tensor:
        """Zeros for all slots, with the heads, width, dtype and device of `like` (N, H, T, d)."""
        # Zeros, not uninitialised memory: a masked NaN is still a NaN once it is multiplied by 0.
        shape = (size.slots, like.shape[1], size.columns, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def resize(self, size: CacheSize, rows: int) -> None:
        """Change the size; the first `rows` slots are preserved."""
        for name in ("keys", "values"):
            before: Tensor = getattr(self, name)
            if (before.shape[0], before.shape[2]) == (size.slots, size.columns):
                continue
            after = self._zeros(before, size)
            columns = min(before.shape[2], size.columns)
            after[:rows, :, :columns] = before[:rows, :, :columns]
            setattr(self, name, after)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the fed positions, (N, H, T, d) each. Returns all that their rows read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        mapping = self.owner.mapping
        # Indexed by slot and column, a write has the shape (N, T, H, d).
        self.keys[mapping.rows, :, mapping.columns] = key_states.transpose(1, 2)
        self.values[mapping.rows, :, mapping.columns] = value_states.transpose(1, 2)
        return mapping.read(self.keys), mapping.read(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.mapping.span, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given

    def get_max_length(self) -> int:
        return self.owner.size.columns


class SlotCache(Cache):  # type: ignore[misc]
    """The cache of a backbone that passes `check_attention`. The first forward pass allocates `size`."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        self.config = causal_lm.config.get_text_config()
        self.size = EMPTY
        super().__init__(layers=[SlotLayer(self) for _ in range(self.config.num_hidden_layers)])

    # Memory

    def reserve(self, size: CacheSize, rows: int = 0) -> None:
        """Change the size; the first `rows` slots are preserved.

        While a layer is resized, its old keys or values stay allocated beside the new ones. After an error, for example
        if memory runs out, the cache is empty.
        """
        if not rows and size != self.size:
            self.release()
        try:
            for layer in self._allocated_layers():
                layer.resize(size, rows)
        except BaseException:
            self.release()
            raise
        self.size = size

    def release(self) -> None:
        """Free all memory; cached keys and values are lost."""
        self.size = EMPTY
        for layer in self._allocated_layers():
            # Copies, because a view would keep the memory.
            layer.keys = layer.keys[:0, :, :0].clone()
            layer.values = layer.values[:0, :, :0].clone()

    @property
    def positions(self) -> int:
        """The allocated positions, those of the largest layer."""
        return max((tensor.shape[0] * tensor.shape[2] for tensor in self.tensors()), default=0)

    def tensors(self) -> list[Tensor]:
        """The keys and values of all layers that have been allocated."""
        layers = self._allocated_layers()
        return [*(layer.keys for layer in layers), *(layer.values for layer in layers)]

    def copy(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Copy the first `columns` columns of slots `sources` into slots `targets`."""
        tensors = self.tensors()
        if not tensors:
            return
        # A list as an index would synchronise for each tensor.
        sources_X, targets_X = (devices.numbers(slots, tensors[0].device) for slots in (sources, targets))
        for cached in tensors:
            cached[targets_X, :, :columns] = cached[sources_X, :, :columns]

    def wipe(self, slots: list[int]) -> None:
        """Zero these slots, because a NaN that a failed request has left there passes through any mask."""
        tensors = self.tensors()
        if not slots or not tensors:
            return
        slots_X = devices.numbers(slots, tensors[0].device)
        for cached in tensors:
            cached[slots_X] = 0

    def _allocated_layers(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if layer.is_initialized]

    # The next forward pass

    def at_prefill(self, first: int, columns_NT: Tensor, span: int, like: Tensor) -> Any:
        """Prepare a forward pass of these columns of N slots from `first` on, which follow the columns fed before.

        Columns are below `span`. Returns the attention mask, in the dtype and on the device of `like`.
        """
        # at_prefill(first=1, columns_NT=[[0, 1, 2, 3], [0, 1, 2, 3]], span=4), w is written:
        #
        #     slot 0   q q q l l
        #     slot 1   w w w w          padding too: the row's own next columns replace it
        #     slot 2   w w w w
        slots_N1 = torch.arange(first, first + len(columns_NT), device=like.device)[:, None]
        return self._prepare(first, slots_N1, columns_NT, span, like)

    def at_decode(self, position_N: Tensor, span: int, like: Tensor, copies: int = 0) -> Any:
        """Prepare a forward pass of one position a row: the first N slots, each at its own column of `position_N`.

        Columns are below `span`. The last `copies` rows only fill up the shape: they write into the last slot, which
        nothing reads then. Returns the attention mask, in the dtype and on the device of `like`.
        """
        # at_decode(position_N=[4, 2]), w is written:
        #
        #     slot 0   q q q l w        sees columns 0..4
        #     slot 1   q q w            sees columns 0..2
        n_rows = position_N.shape[0]
        slots_N1 = torch.arange(n_rows, device=like.device)[:, None]
        slots_N1[n_rows - copies :] = self.size.slots - 1
        return self._prepare(0, slots_N1, position_N[:, None], round_columns(span), like)

    def _prepare(self, first: int, slots_N1: Tensor, columns_NT: Tensor, span: int, like: Tensor) -> Any:
        """Set the slot mapping. Returns masks (N, 1, T, C): a dict by type of layer where there are windows."""
        self.mapping = SlotMapping(first, slots_N1, columns_NT, span)
        seen_C = torch.arange(span, device=like.device)
        behind_NTC = columns_NT[..., None] - seen_C
        return masks.additive(self.config, behind_NTC >= 0, behind_NTC, like)


def check_attention(causal_lm: PreTrainedModel) -> None:
    """ValueError for a backbone that the engine cannot run.

    Such a backbone keeps a state other than a key-value cache (Mamba, linear attention), has an attention that takes no
    mask, or computes other hidden states if masks and positions are given.
    """
    reason = probes.probe(causal_lm, _through_slots)
    if reason is not None:
        raise ValueError(f"{type(causal_lm).__name__} {reason}: the engine cannot run it")


def _through_slots(causal_lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Hidden states of a short row that runs beside a long one, (T, D), and of the same row in isolation.

    The positions of the long row, not its length, reach the end of the context. Rotary embeddings that depend on the
    largest position of a batch would then change the short row.
    """
    embeds_NTD = probes.embeds_of_rows(causal_lm, 2)
    n, length, _ = embeds_NTD.shape
    theirs_NTD = causal_lm.base_model(inputs_embeds=embeds_NTD, use_cache=False).last_hidden_state
    limit = backbones.context_of(causal_lm.config.get_text_config())
    ahead_N = torch.tensor(
        [0 if limit == backbones.UNLIMITED else limit - length, 0], device=causal_lm.device
    )
    cache = SlotCache(causal_lm)
    cache.reserve(CacheSize(slots=n, columns=round_columns(length)))
    forward = functools.partial(causal_lm.base_model, past_key_values=cache, use_cache=True)

    # Both are prefilled at once, as in the engine; the short row's positions after its question are padding.
    long = length - FED
    columns_NT = torch.arange(long, device=causal_lm.device).expand(n, -1)
    mask = cache.at_prefill(0, columns_NT, long, embeds_NTD)
    position_NT = columns_NT + ahead_N[:, None]
    forward(inputs_embeds=embeds_NTD[:, :long], attention_mask=mask, position_ids=position_NT)
    # Then both are fed, each at its own column.
    position_N = torch.tensor([long, long // 4], device=causal_lm.device)
    row_N = torch.arange(n, device=causal_lm.device)
    first = int(position_N[1])
    ours = []
    for _ in range(FED):
        embeds_N1D = embeds_NTD[row_N, position_N][:, None]
        mask = cache.at_decode(position_N, length, embeds_NTD)
        position_N1 = (position_N + ahead_N)[:, None]
        output = forward(inputs_embeds=embeds_N1D, attention_mask=mask, position_ids=position_N1)
        ours.append(output.last_hidden_state[1, 0])
        position_N = position_N + 1
    return torch.stack(ours), theirs_NTD[1, first : first + FED]
