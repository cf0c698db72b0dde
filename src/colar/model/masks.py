"""Attention masks of our own, for rows of a cache and for rows that share a beginning.

transformers takes a mask of four dimensions as it is. Models with layers of several types take one for each type.
`probes.py` shows at load whether a backbone computes the same with them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

MASKED = ("eager", "sdpa")
"""Attention implementations that take a mask of ours."""


def why_no_masks(causal_lm: PreTrainedModel) -> str | None:
    """The reason why a backbone cannot take a mask of ours, as the end of a sentence about it; None where it can."""
    config = causal_lm.config.get_text_config()
    known = {"full_attention", "sliding_attention"}
    others = set(getattr(config, "layer_types", None) or ()) - known
    if others:
        return f"has layers of type {', '.join(sorted(others))}, not only full or sliding-window attention"
    # GPT-Neo: its window is in no key that other families have, and is laid over columns.
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "has layers of local attention, not only full or sliding-window attention"
    if getattr(causal_lm, "_is_stateful", False):
        return "has a recurrent state, not only full or sliding-window attention"
    if config._attn_implementation not in MASKED:
        return f"was loaded with attn_implementation {config._attn_implementation}, not {' or '.join(MASKED)}"
    return None


def additive(config: Any, seen_NTC: Tensor, behind_NTC: Tensor, like: Tensor) -> Any:
    """Additive masks (N, 1, T, C): a dict by type of layer where there are windows, else the one of all layers.

    `seen_NTC` says what full attention sees. `behind_NTC` is how many positions before the query a key stands, by
    which a window ends. `like` has the dtype and the device.

        a query at column 4, where the window is 3

        columns     0    1    2    3    4    5
        behind      4    3    2    1    0   -1
        full        0    0    0    0    0  min       nothing after the position itself
        near      min  min    0    0    0  min       and nothing as far behind as the window
    """
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    near_NTC = seen_NTC if window is None else seen_NTC & (behind_NTC < window)
    if "sliding_attention" in types:
        return {"full_attention": _values(seen_NTC, like), "sliding_attention": _values(near_NTC, like)}
    # Mistral names no types: its window, where it has one, is over all layers.
    return _values(seen_NTC if types else near_NTC, like)


def _values(seen_NTC: Tensor, like: Tensor) -> Tensor:
    mask = like.new_zeros(seen_NTC.shape)
    return mask.masked_fill_(~seen_NTC, torch.finfo(like.dtype).min)[:, None]


@contextlib.contextmanager
def masks_without_waiting() -> Iterator[None]:
    """Keep transformers from reading positions and masks to make its own masks, inside the block.

    Python waits for a GPU at each reading, one a forward: to find rows that are packed by position ids, which ours
    never are, and to find that a mask hides nothing, for which a kernel without a mask would serve.
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
