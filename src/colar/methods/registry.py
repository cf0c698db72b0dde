"""Names to methods, and checkpoints to a model with its method. A new method is one import and one line here."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from colar.methods.base import Method
from colar.methods.coconut import Coconut
from colar.methods.colar import Colar
from colar.methods.cot import Cot, NoCot
from colar.methods.distill import Distill
from colar.methods.icot import Icot
from colar.methods.pause import Pause
from colar.methods.tokenskip import TokenSkip
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM, LoraSettings

METHODS: dict[str, type[Any]] = {
    method.name: method for method in (Cot, NoCot, Colar, Icot, Coconut, Distill, TokenSkip, Pause)
}


def build(name: str, config: Mapping[str, Any] | None = None) -> Method:
    """The method of that name. ValueError names the nearest right name or key, and the allowed values."""
    if name not in METHODS:
        raise ValueError(
            f"method.name: unknown method {name!r}{nearest(name, METHODS)}; one of {', '.join(METHODS)}"
        )
    cls = METHODS[name]
    method: Method = cls(typed(cls.Config, config or {}, f"method ({name})"))
    return method


def make_params(method: Method, values: Mapping[str, Any]) -> Any:
    """The method's per-request values. ValueError for a key it does not have (a factor for CoT)."""
    allowed = [f.name for f in dataclasses.fields(method.Params)]
    for key in values:
        if key not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes none"
            raise ValueError(f"method {method.name} has no {key}; it {takes}")
    return typed(method.Params, values, f"{method.name} request")


def param_names() -> list[str]:
    """Every per-request value that some method has."""
    return list(param_types())


def param_types() -> dict[str, type]:
    """The type of each per-request value that some method has."""
    return {name: kind for method in METHODS.values() for name, kind in get_type_hints(method.Params).items()}


def typed(cls: type[Any], values: Mapping[str, Any], what: str) -> Any:
    """A dataclass from JSON-like values: unknown keys and wrong types are errors in words."""
    hints = get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            raise ValueError(
                f"{what}: unknown key {key!r}{nearest(key, hints)}; keys: {', '.join(hints) or 'none'}"
            )
        expected = hints[key]
        if expected is float or expected is int:
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            fits = fits and (expected is float or float(value).is_integer())
        else:
            fits = expected is not bool or isinstance(value, bool)
        if not fits:
            raise ValueError(f"{what}: {key} must be a {expected.__name__}, got {value!r}")
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def nearest(key: str, allowed: Any) -> str:
    """`, did you mean 'x'?` where some allowed key is close, else nothing."""
    close = difflib.get_close_matches(key, list(allowed), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def save(lm: LatentLM, method: Method, folder: str | Path, run: dict[str, Any], card: str) -> Path:
    """Write model and method as a checkpoint folder."""
    config = json.loads(json.dumps(dataclasses.asdict(method.config)))
    return checkpoint.save(lm, folder, {"name": method.name, "config": config}, run, card)


def load(
    path_or_id: str | Path, dtype: str = "float32", backbone: str | None = None
) -> tuple[LatentLM, Method]:
    """A checkpoint folder (or Hub id) as model and method, ready for inference or further training."""
    folder = checkpoint.resolve(path_or_id)
    lm, info = checkpoint.load(folder, dtype, backbone)
    method = build(info["method"]["name"], info["method"]["config"])
    lm.add_modules(method.modules(lm.config))
    if lm.extra:
        checkpoint.load_modules(lm.extra, folder)
    return lm.eval(), method


def merge(folder: str | Path, target: str | Path, dtype: str) -> Path:
    """Write the adapter checkpoint in `folder` as one of all weights: added up in float32, then rounded to `dtype`."""
    folder = Path(folder)
    info = checkpoint.read_info(folder)
    if info["weights"] != "adapter":
        raise ValueError(f"{folder} has no adapter to merge: it holds all weights already")
    lm, method = load(folder)
    lm.merge()
    return save(
        lm.to(backbones.DTYPES[dtype]), method, target, info["run"], (folder / "README.md").read_text("utf-8")
    )


def load_for_training(
    path_or_id: str | Path, method: Method, lora: LoraSettings | None, dtype: str, seed: int
) -> LatentLM:
    """A checkpoint's weights for another stage of training, with the modules of `method`.

    The modules are loaded where the checkpoint is of the same method, and made afresh where it is not. With
    `lora` an adapter goes on being trained (its settings must be the checkpoint's), or is laid on full weights.
    """
    folder = checkpoint.resolve(path_or_id)
    info = checkpoint.read_info(folder)
    adapter = info["weights"] == "adapter"
    if adapter and lora is None:
        raise ValueError(
            f"{folder} is an adapter: model.lora must be given, with the settings that it has "
            "(or make it full weights: colar export --merge)"
        )
    lm, _ = checkpoint.load(folder, dtype)
    if adapter and lora is not None:
        lora.check_same(lm.lm.peft_config["default"], folder)
    elif lora is not None:
        lm = LatentLM(backbones.Backbone(str(folder), lm.causal_lm, lm.tokenizer), lm.template, lora)
    attach(lm, method, seed)
    if lm.extra and info["method"]["name"] == method.name:
        checkpoint.load_modules(lm.extra, folder)
    return lm


def attach(lm: LatentLM, method: Method, seed: int) -> None:
    """Give `lm` the modules of a method that is about to be trained, initialised from `seed`."""
    lm.extra = nn.ModuleDict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm.add_modules(method.modules(lm.config))
