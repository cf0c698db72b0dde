"""Gradient checkpointing: layers keep their inputs only, and compute the rest again in the backward pass."""

from __future__ import annotations

from typing import Any

from colar.model.latent_lm import LatentLM


def enable(lm: LatentLM) -> None:
    """From here on layers recompute in training."""
    _call(lm, "enable", {"use_reentrant": False})


def disable(lm: LatentLM) -> None:
    """Layers keep what their backward pass needs."""
    _call(lm, "disable")


def _call(lm: LatentLM, verb: str, *options: dict[str, Any]) -> None:
    # Its name differs between releases of transformers 5.
    for name in (f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}"):
        if hasattr(lm.causal_lm, name):
            getattr(lm.causal_lm, name)(*options)
            return
    raise AssertionError("transformers 5 has one of the two names")
