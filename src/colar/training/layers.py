"""The backbone's decoder layers in training: each compiled in place, or recomputed in the backward pass.

Compiling the whole model would take minutes and break at every data-dependent shape of a method's loss. A layer sees
one (rows, positions, width) tensor, and all layers share one graph; its lengths are symbolic, so later batches need no
new graph. A layer that is recomputed (gradient checkpointing) keeps its input only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

from torch import nn

from colar import progress
from colar.model.latent_lm import LatentLM


def decoder_layers(lm: LatentLM) -> list[nn.Module]:
    """The backbone's stack of layers. ValueError where it has none."""
    # Families name it differently (layers, h, blocks): it is known by its length.
    count = lm.config.num_hidden_layers
    for module in lm.causal_lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"{type(lm.causal_lm).__name__} has no list of {count} layers: train with compile false")


@contextlib.contextmanager
def prepared(lm: LatentLM, *, compiled: bool = False, recomputed: bool = False) -> Iterator[None]:
    """Compile or recompute the layers inside the block; the model is as before after it, its state dict throughout."""
    if recomputed:
        _checkpointing(lm, "enable", {"use_reentrant": False})
    layers = _compile(lm) if compiled else []
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
        if recomputed:
            _checkpointing(lm, "disable")


def _compile(lm: LatentLM) -> list[nn.Module]:
    layers = decoder_layers(lm)
    # torch would fail on this at the first update, with a traceback of its own.
    compilers = [os.environ.get("CXX"), "g++", "clang++"]
    if lm.device.type == "cpu" and not any(name and shutil.which(name) for name in compilers):
        raise ValueError("training.compile needs a C++ compiler on a CPU (g++ or clang++); or set it false")
    progress.say("compiling the layers: the first updates take about half a minute")
    for layer in layers:
        # In place: a wrapper module would change the names in the state dict.
        layer.compile(dynamic=True)
    return layers


def _checkpointing(lm: LatentLM, verb: str, *options: dict[str, Any]) -> None:
    # Its name differs between releases of transformers 5.
    new = getattr(lm.causal_lm, f"activation_checkpointing_{verb}", None)
    (new or getattr(lm.causal_lm, f"gradient_checkpointing_{verb}"))(*options)
