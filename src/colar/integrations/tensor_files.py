"""Files of tensors that others wrote: safetensors and what torch.save wrote, read without running any code.

A file of Lightning also pickles its settings, perhaps in omegaconf's containers. `torch.load(weights_only=True)` would
refuse these: their names stand for a class that does nothing here (`Container`).
"""

from __future__ import annotations

import collections
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.serialization import safe_globals

from colar.checks import in_library
from colar.model import checkpoint


class Container:
    """Stands for omegaconf's containers and nodes: has no code, and holds what is in them."""


# What omegaconf pickles, by name. A name can do no more than make an empty object of these types.
KINDS = ("Any", "String", "Integer", "Float", "Boolean")
NAMES = ["base.ContainerMetadata", "base.Metadata", "dictconfig.DictConfig", "listconfig.ListConfig"]
NAMES += [f"nodes.{kind}Node" for kind in KINDS]
CONTAINERS: list[Any] = [
    *((Container, f"omegaconf.{name}") for name in NAMES),
    *((kind, f"builtins.{kind.__name__}") for kind in (dict, list, int, str, float, bool)),
    (collections.defaultdict, "collections.defaultdict"),
    (typing.Any, "typing.Any"),
]


@dataclass(frozen=True)
class File:
    """The tensors of a published checkpoint, by name, and its settings where it holds some."""

    path: Path
    tensors: dict[str, Tensor]
    settings: dict[str, Any]


def read(path: str | Path) -> File:
    """A file, or the one checkpoint of a folder (in shards, perhaps). ValueError says what is wrong with it."""
    path = checkpoint.resolve(path)
    if not path.exists():
        raise ValueError(f"no published checkpoint at {path}: there is no such file or folder")
    file = File(path, {}, {})
    for each in _files_of(path) if path.is_dir() else [path]:
        loaded = _load(each)
        state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"{each} is no published checkpoint: it holds other things than tensors by name")
        file.tensors.update({str(name).removeprefix("module."): value for name, value in state.items()})
        settings = _plain(loaded.get("hyper_parameters"))
        file.settings.update(settings if isinstance(settings, dict) else {})
    return file


def _files_of(folder: Path) -> list[Path]:
    # A model may be sharded, and a run leaves several checkpoints.
    for pattern in ("model*.safetensors", "pytorch_model*.bin", "*.ckpt", "checkpoint_*"):
        found = sorted(folder.glob(pattern))
        if len(found) > 1 and pattern in ("*.ckpt", "checkpoint_*"):
            raise ValueError(
                f"{folder} holds {', '.join(path.name for path in found)}: give one of these files"
            )
        if found:
            return found
    raise ValueError(
        f"{folder} holds no .safetensors, pytorch_model.bin, .ckpt or checkpoint_N: give the file"
    )


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        with in_library(f"{path} cannot be read"):
            return load_file(path)
    try:
        with safe_globals(CONTAINERS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused is None:
            raise ValueError(f"{path} is no file of torch.save with tensors, or it is damaged") from error
        raise ValueError(
            f"{path} holds pickled code ({refused[1]}), which colar does not run: where you trust the file, load it "
            "with its own code, and torch.save its state_dict() alone"
        ) from error


def _plain(value: Any) -> Any:
    """The contents of omegaconf's containers and nodes, as dicts, lists and values."""
    if isinstance(value, Container):
        return _plain(vars(value).get("_content", vars(value).get("_val")))
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
