"""colar: fine-tune a causal language model to think in compressed latents, at any speed.

    model = colar.load("runs/mine")    # or a Hub id
    model.ask("How many?", compression_factor=2).answer

The names below are imported on first use, so that `import colar` is instant.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "from_pretrained": ("colar.methods.pretrained", "load"),
    "save_pretrained": ("colar.methods.pretrained", "save_pretrained"),
    "push_to_hub": ("colar.model.checkpoint", "push_to_hub"),
    "make_params": ("colar.methods.registry", "make_params"),
    "train": ("colar.recipe.auto_run", "train"),
    "load": ("colar.ask", "load"),
    "Engine": ("colar.engine.engine", "Engine"),
    "Request": ("colar.engine.request", "Request"),
    "Decoding": ("colar.engine.request", "Decoding"),
    "Example": ("colar.data.example", "Example"),
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'colar' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)
