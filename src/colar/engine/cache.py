"""The key-value cache of the engine: slots, each with a length of its own.

    layer.keys (S slots, H heads, C columns, d)         column = position: nothing is padded on the left

    slot 0   q q q q l l # a .        row 0 feeds its answer
    slot 1   q q l . . . . . .        row 1 thinks
    slot 2   . . . . . . . . .        free

The running rows are slots 0..n-1, so that a decode step reads a slice and copies nothing: when a row ends, the last
one moves into its slot. What lies right of a row's length is left over from rows before it, and masked.

There are as many slots as rows, and they are as wide as the widest row may become: `shapes.py` chooses, `reserve`
allocates. An idle engine gives all of it back (`release`).

The engine knows transformers' `Cache` classes in this one place. A backbone's layers call `SlotLayer.update` with
the keys and values of what is fed. Where these go is settled before the forward, by `SlotCache.at_prefill` or
`at_decode`, which also give the attention mask.

Shape suffixes: S slots, N rows, H heads, T positions fed, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from colar.engine.shapes import NOTHING, Shape, round_up
from colar.model import backbones, masks, probes

FED = 3
"""Positions that a backbone's probe feeds after what it has read."""


@dataclass
class Place:
    """Where the next forward's keys and values go, and how far its rows can see.

    Sizes are those of tensors, which a compiled step takes as symbols; a number of its own would be compiled in.
    """

    before: Tensor
    """(2 + first,) where `first` is the first slot: two more, since torch treats sizes of 0 and 1 apart."""
    rows: Tensor
    """(N, 1) slots, from `first` on."""
    columns: Tensor
    """(N, T) columns written."""
    seen: Tensor
    """(C,) columns read, 0..C-1."""

    def read(self, kept: Tensor) -> Tensor:
        """A layer's keys or values as far as these rows may see them, (N, H, C, d)."""
        first = self.before.shape[0] - 2
        n_rows = self.rows.shape[0]
        n_columns = self.seen.shape[0]
        return kept[first : first + n_rows, :, :n_columns]


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, (S, H, C, d) each, on the backbone's own dtype and device."""

    is_compileable = True

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = self.owner.shape
        self.keys = self._zeros(key_states, shape)
        self.values = self._zeros(value_states, shape)
        self.is_initialized = True

    def _zeros(self, like: Tensor, shape: Shape) -> Tensor:
        """Zeros for all slots, with the heads, width, dtype and device of `like` (N, H, T, d)."""
        heads, width = like.shape[1], like.shape[3]
        # Zeros, not what lay in memory: a masked NaN is still a NaN once it is multiplied by 0.
        size = (shape.slots, heads, shape.columns, width)
        return self.owner.zeros(size, dtype=like.dtype, device=like.device)

    def resize(self, shape: Shape, rows: int) -> None:
        """Have this shape; the first `rows` slots keep what they hold. An error leaves old or new keys, and values."""
        for name in ("keys", "values"):
            before: Tensor = getattr(self, name)
            if (before.shape[0], before.shape[2]) == (shape.slots, shape.columns):
                continue
            after = self._zeros(before, shape)
            columns = min(before.shape[2], shape.columns)
            after[:rows, :, :columns] = before[:rows, :, :columns]
            setattr(self, name, after)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of what is fed, (N, H, T, d) each. Returns all that its rows may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.owner.place
        # Indexed by slot and column, a write has the shape (N, T, H, d).
        self.keys[place.rows, :, place.columns] = key_states.transpose(1, 2)
        self.values[place.rows, :, place.columns] = value_states.transpose(1, 2)
        return place.read(self.keys), place.read(self.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.place.seen.shape[0], 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given

    def get_max_length(self) -> int:
        return self.owner.shape.columns


class SlotCache(Cache):  # type: ignore[misc]
    """Rows of one backbone that `check` has let pass; the first forward allocates `shape`, `reserve` changes it."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self.config = lm.config.get_text_config()
        self.shape = NOTHING
        """What every layer has at least."""
        self.zeros: Callable[..., Tensor] = torch.zeros
        """Allocates: all of the cache's memory comes from here."""
        super().__init__(layers=[SlotLayer(self) for _ in range(self.config.num_hidden_layers)])

    # Room

    def reserve(self, shape: Shape, rows: int = 0) -> None:
        """Have this shape; the first `rows` slots keep what they hold.

        While a layer is changed, its old keys or values are there beside the new ones. An error, as where memory runs
        out, leaves a cache in which these rows can continue, and `reserve` may be called again.
        """
        if not rows:
            self.release()
        # Layers change one after another. Whatever fails between two of them, all have the smaller of both shapes.
        slots = min(self.shape.slots, shape.slots)
        columns = min(self.shape.columns, shape.columns)
        self.shape = Shape(slots, columns)
        for layer in self._filled():
            layer.resize(shape, rows)
        self.shape = shape

    def release(self) -> None:
        """Give all memory back; what is cached is lost."""
        self.shape = NOTHING
        for layer in self._filled():
            # Copies: a view would keep the memory.
            layer.keys = layer.keys[:0, :, :0].clone()
            layer.values = layer.values[:0, :, :0].clone()

    @property
    def positions(self) -> int:
        """Positions that are allocated: those of the largest layer."""
        most = 0
        for layer in self._filled():
            for tensor in (layer.keys, layer.values):
                most = max(most, tensor.shape[0] * tensor.shape[2])
        return most

    def copy(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Copy the first `columns` columns of slots `sources` into slots `targets`."""
        for layer in self._filled():
            for kept in (layer.keys, layer.values):
                kept[targets, :, :columns] = kept[sources, :, :columns]

    def wipe(self, slots: list[int]) -> None:
        """Forget what failed requests left: a NaN goes through any mask."""
        if not slots:
            return
        for layer in self._filled():
            layer.keys[slots] = 0
            layer.values[slots] = 0

    @property
    def filled(self) -> bool:
        """Whether it has been allocated once: the first forward does it."""
        return len(self._filled()) == len(self.layers)

    def _filled(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if layer.is_initialized]

    # Where the next forward writes, and its mask

    def at_prefill(self, first: int, rows: int, start: int, length: int, like: Tensor) -> Any:
        """Prepare a forward of `length` positions a row: `rows` slots from `first` on, columns from `start` on.

        Returns its attention mask, in the dtype and on the device of `like`.
        """
        # at_prefill(first=1, rows=2, start=0, length=4), w is written:
        #
        #     slot 0   q q q l l
        #     slot 1   w w w w          padding too: the row's own next columns replace it
        #     slot 2   w w w w
        device = like.device
        columns_NT = torch.arange(start, start + length, device=device).expand(rows, -1)
        slots_N1 = torch.arange(first, first + rows, device=device)[:, None]
        self._put(first, slots_N1, columns_NT, start + length)
        return self._mask(columns_NT, like)

    def at_decode(self, position_N: Tensor, span: int, like: Tensor, copies: int = 0, first: int = 0) -> Any:
        """Prepare a forward of one position a row: N slots from `first` on, each at its own column of `position_N`.

        Columns are below `span`. The last `copies` rows are only there for their shape: they write into the last slot,
        which nobody reads then. Returns the attention mask, in the dtype and on the device of `like`.
        """
        # at_decode(position_N=[4, 2]), w is written:
        #
        #     slot 0   q q q l w        sees columns 0..4
        #     slot 1   q q w            sees columns 0..2
        n_rows = position_N.shape[0]
        slots_N1 = torch.arange(first, first + n_rows, device=like.device)[:, None]
        slots_N1[n_rows - copies :] = self.shape.slots - 1
        self._put(first, slots_N1, position_N[:, None], round_up(span))
        return self._mask(position_N[:, None], like)

    def _put(self, first: int, slots_N1: Tensor, columns_NT: Tensor, span: int) -> None:
        # The numbers are in nobody's use, the size is: see `Place`.
        device = columns_NT.device
        before = torch.empty(2 + first, device=device)
        seen_C = torch.arange(span, device=device)
        self.place = Place(before, slots_N1, columns_NT, seen_C)

    def _mask(self, query_NT: Tensor, like: Tensor) -> Any:
        """Additive masks (N, 1, T, C): a dict by type of layer where there are windows, else the one of all layers."""
        behind_NTC = query_NT[..., None] - self.place.seen
        return masks.additive(self.config, behind_NTC >= 0, behind_NTC, like)


def check(lm: PreTrainedModel) -> None:
    """ValueError for a backbone that the engine cannot run.

    It keeps a state that is no key-value cache (Mamba, linear attention), has an attention that takes no mask, or
    computes something else where it is given masks and positions.
    """
    reason = masks.refusal(lm) or probes.ask(lm, _through_slots)
    if reason is not None:
        raise ValueError(f"{type(lm).__name__} {reason}: the engine cannot run it")


def _through_slots(lm: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Hidden states of a short row that runs beside a long one, (T, D), and of the same row by itself.

    The long one ends where the context does, by its positions: its cache is short. Rotary embeddings that follow the
    largest position of a batch would change the short one.
    """
    embeds_NTD = probes.embeds_of_rows(lm, 2)
    n, length, _ = embeds_NTD.shape
    theirs_NTD = lm.base_model(inputs_embeds=embeds_NTD, use_cache=False).last_hidden_state
    limit = backbones.context_of(lm.config.get_text_config()).length
    ahead_N = torch.tensor([0 if limit == backbones.UNLIMITED else limit - length, 0], device=lm.device)

    # As the engine does it: both are read at once, what the short row has behind its question is padding.
    cache = SlotCache(lm)
    cache.reserve(Shape(slots=n, columns=round_up(length)))

    def forward(embeds: Tensor, mask: Any, position: Tensor) -> Tensor:
        output = lm.base_model(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    long = length - FED
    mask = cache.at_prefill(0, n, 0, long, embeds_NTD)
    forward(embeds_NTD[:, :long], mask, torch.arange(long, device=lm.device) + ahead_N[:, None])
    # Then both are fed, each at its own column.
    position_N = torch.tensor([long, long // 4], device=lm.device)
    row_N = torch.arange(n, device=lm.device)
    first = int(position_N[1])
    ours = []
    for _ in range(FED):
        embeds_N1D = embeds_NTD[row_N, position_N][:, None]
        mask = cache.at_decode(position_N, length, embeds_NTD)
        ours.append(forward(embeds_N1D, mask, (position_N + ahead_N)[:, None])[1, 0])
        position_N = position_N + 1
    return torch.stack(ours), theirs_NTD[1, first : first + FED]
