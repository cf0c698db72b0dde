"""The context of a backbone: how many positions a row may have, and why it ends there.

It is the least of what the config names and of where longrope changes. longrope (Phi-3-128k, Phi-4-mini) computes a
whole forward by other rotary frequencies as soon as its largest position is beyond `original_max_position_embeddings`:
a row's result would depend on its batch mates, and the keys that are cached would not fit those that come after. Up to
there it does not. Dynamic NTK changes at `max_position_embeddings`, where the context ends anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NAMES = (
    "max_position_embeddings",
    "max_seq_len",
    "n_positions",
    "n_ctx",
    "seq_length",
    "max_sequence_length",
    "max_target_positions",
    "model_max_length",
)
"""Keys of configs. transformers maps most names of others to the first one itself (`attribute_map`)."""
UNLIMITED = 10**9
MULTIPLE = 16
"""Training pads rows to a multiple of 8, and the engine reads its cache in multiples of this: a table of positions, or
of ALiBi's biases, has no place for padding beyond its end."""


@dataclass(frozen=True)
class Context:
    """Most positions of a row."""

    length: int
    reason: str = ""
    """Why the context is shorter than that of the config; "" where it is not."""

    def __str__(self) -> str:
        """The end of a sentence about what exceeds it."""
        return f"the model's context is {self.length}{self.reason and f' ({self.reason})'}"


def of(config: Any) -> Context:
    """The context of a text config: `UNLIMITED` where nothing limits it."""
    named = next((int(getattr(config, name)) for name in NAMES if getattr(config, name, None)), UNLIMITED)
    switch = min(_switches(config), default=UNLIMITED)
    if switch >= named:
        return Context(_whole(named))
    reason = (
        f"original_max_position_embeddings of its longrope is {switch}: beyond, a row would change the results of "
        "those that run beside it"
    )
    return Context(_whole(switch), reason)


def _whole(length: int) -> int:
    return max(length // MULTIPLE * MULTIPLE, min(length, MULTIPLE))


def _switches(config: Any) -> Iterator[int]:
    """The positions beyond which a longrope takes its long factors."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Where layers of several types have rotary parameters of their own, they stand one level deeper.
    each = list(rope.values()) if all(isinstance(value, Mapping) for value in rope.values()) else [rope]
    for parameters in each:
        if parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            yield int(original or config.original_max_position_embeddings)
