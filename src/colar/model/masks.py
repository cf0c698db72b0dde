"""Our attention masks, for rows of a cache and for rows that share a sequence.

transformers uses a 4-D mask as it is. Models with layers of several types take a mask for each type. `probes.py` checks
that a backbone computes the same with these masks.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from colar.ops.trees import Tree

MASKED = ("eager", "sdpa")
"""Attention implementations that take an additive mask."""


def why_no_masks(causal_lm: PreTrainedModel) -> str | None:
    """The reason why a backbone cannot take a mask of ours, as the end of a sentence about it; None if it can."""
    config = causal_lm.config.get_text_config()
    known = {"full_attention", "sliding_attention"}
    others = set(getattr(config, "layer_types", None) or ()) - known
    if others:
        return f"has layers of type {', '.join(sorted(others))}, not only full or sliding-window attention"
    # GPT-Neo: its window is in no key that other families have, and applies to columns.
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "has layers of local attention, not only full or sliding-window attention"
    if getattr(causal_lm, "_is_stateful", False):
        return "has a recurrent state, not only full or sliding-window attention"
    if config._attn_implementation not in MASKED:
        return f"has attn_implementation {config._attn_implementation}, which takes no masks of ours"
    return None


def of_tree(config: Any, tree: Tree, like: Tensor) -> Any:
    """`additive` masks of rows that share sequences."""
    seen_SPP = tree.seen()
    window: int | None = getattr(config, "sliding_window", None)
    # `behind` has int64 numbers, eight times the size of bools, so it is computed for windows alone.
    return additive(config, seen_SPP, seen_SPP if window is None else tree.behind(), like)


def additive(config: Any, seen_NTC: Tensor, behind_NTC: Tensor, like: Tensor) -> Any:
    """Additive masks (N, 1, T, C): a dict by layer type if the config names windowed layers, else one for all.

    `seen_NTC` is True where full attention sees a key. `behind_NTC` is the number of positions by which a key precedes
    the query, from which a window ends. `like` has the dtype and the device.

        a query at column 4, where the window is 3

        columns     0    1    2    3    4    5
        behind      4    3    2    1    0   -1
        full        0    0    0    0    0  min       nothing after the position itself
        near      min  min    0    0    0  min       and nothing as far behind as the window
    """
    window = getattr(config, "sliding_window", None)
    near_NTC = seen_NTC if window is None else seen_NTC & (behind_NTC < window)
    types = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in types:
        return {"full_attention": _values(seen_NTC, like), "sliding_attention": _values(near_NTC, like)}
    # Mistral names no layer types: its window, if it has one, applies to all layers.
    return _values(seen_NTC if types else near_NTC, like)


def _values(seen_NTC: Tensor, like: Tensor) -> Tensor:
    mask = like.new_zeros(seen_NTC.shape)
    return mask.masked_fill_(~seen_NTC, torch.finfo(like.dtype).min)[:, None]


@contextlib.contextmanager
def attention(config: Any, implementation: str) -> Iterator[None]:
    """Use another attention implementation inside the block."""
    before = config._attn_implementation
    if before != implementation:
        config._attn_implementation = implementation
    try:
        yield
    finally:
        if before != implementation:
            config._attn_implementation = before


@contextlib.contextmanager
def masks_without_waiting() -> Iterator[None]:
    """Keep transformers from reading positions and masks to make its own masks, inside the block.

    Each read synchronises with a GPU, one a forward. It looks for rows that are packed by position ids, which ours
    never are, or for a mask that hides nothing, for which a kernel without a mask would serve.
    """
    replaced: dict[str, Any] = {
        "find_packed_sequence_indices": lambda position_ids: None,
        "fast_all": lambda mask: False,
    }
    theirs = {name: getattr(masking_utils, name) for name in replaced}
    vars(masking_utils).update(replaced)
    try:
        yield
    finally:
        vars(masking_utils).update(theirs)
