"""The weights of a checkpoint folder: written, and put into a model of the same shape in place.

    modules.safetensors                                     the modules of the method (absent where it has none)
    adapter_model.safetensors  or  model*.safetensors       the adapter, or all weights, as Hugging Face writes them

A resumed run's optimiser knows its parameters, so loading copies into them.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from colar.model import backbones
from colar.model.latent_lm import LatentLM

MODULES = "modules.safetensors"
ADAPTER = "adapter_model.safetensors"


def save(
    lm: LatentLM,
    folder: Path,
    leave_out: Collection[str] = (),
    gathered: dict[str, Tensor] | None = None,
) -> None:
    """Write the trained weights: the adapter, or all weights once (tied ones not twice), and the modules.

    Modules named in `leave_out` are not written. `gathered` are the weights where `lm` has only a share of each, by
    the names of its state dict (`sharded.py`).
    """
    weights = None if gathered is None else _under("lm.", gathered)
    if isinstance(lm.lm, PeftModel):
        # peft would write the path at which this machine keeps the backbone.
        for config in lm.lm.peft_config.values():
            config.base_model_name_or_path = backbones.HUB_IDS.get(lm.name, lm.name)
        lm.lm.save_pretrained(
            str(folder), safe_serialization=True, save_embedding_layers=False, state_dict=weights
        )
    else:
        _forget_what_cannot_be_saved(lm.causal_lm)
        lm.causal_lm.save_pretrained(folder, state_dict=weights)
    state = {}
    modules = lm.extra.state_dict() if gathered is None else _under("extra.", gathered)
    for key, value in modules.items():
        module_name = key.split(".")[0]
        if module_name not in leave_out:
            state[key] = value.contiguous()
    if state:
        save_file(state, folder / MODULES, metadata={"format": "pt"})


def _forget_what_cannot_be_saved(causal_lm: PreTrainedModel) -> None:
    """Drop settings of `generate` that transformers loads with a warning and refuses to save; colar uses none."""
    if not causal_lm.can_generate():
        return
    try:
        causal_lm.generation_config.validate(strict=True)
    except ValueError:
        causal_lm.generation_config = GenerationConfig.from_model_config(causal_lm.config)


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part, by their names in it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def load_into(lm: LatentLM, folder: Path, leave_out: Collection[str] = ()) -> None:
    """Put the weights of a checkpoint into an `lm` of the same shape, in place: a run that resumes.

    To make an `lm` of a folder is `checkpoint.load`, and the modules of its method `load_modules`.

    Modules named in `leave_out` keep the weights that they have.
    """
    if isinstance(lm.lm, PeftModel):
        load_adapter(lm.lm, folder / ADAPTER)
    else:
        _load_all(lm.causal_lm, folder)
    load_modules(lm.extra, folder, leave_out)


def _load_all(causal_lm: PreTrainedModel, folder: Path) -> None:
    """Put all weights of a folder into a model of the same shape, in place.

    The names in a file are not those of the model: `save_pretrained` renames, splits and stacks the weights of many
    families. Only `from_pretrained` knows the way back, and it makes new parameters, of which an optimiser would know
    nothing. So they are copied.
    """
    if not list(folder.glob("model*.safetensors")):
        raise ValueError(f"{folder} lacks model.safetensors")
    try:
        stored, loading = type(causal_lm).from_pretrained(
            folder, dtype=causal_lm.dtype, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder}: weights do not fit: {' '.join(str(error).split())}") from error
    missing, unexpected = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    if missing or unexpected:
        raise ValueError(f"{folder}: weights do not fit: missing {missing}, unexpected {unexpected}")
    causal_lm.load_state_dict(stored.state_dict())


@runtime_checkable
class Startable(Protocol):
    """A module that can start its training from weights of another shape, or from none: it changes nothing at first."""

    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """Take over a checkpoint's weights, by their names in the module. ValueError where they cannot fit."""
        ...


def load_modules(
    extra: nn.ModuleDict, folder: Path, leave_out: Collection[str] = (), starts: bool = False
) -> None:
    """Fill a method's modules from a checkpoint folder; those named in `leave_out` keep the weights that they have.

    With `starts` another stage of training begins: a module may start from weights of another shape, and one that the
    checkpoint lacks keeps its own (`Startable`).
    """
    wanted = nn.ModuleDict({name: module for name, module in extra.items() if name not in leave_out})
    if not wanted:
        return
    state = read(folder / MODULES)
    try:
        for name, module in list(wanted.items()):
            own = _under(f"{name}.", state)
            if starts and isinstance(module, Startable):
                if own:
                    module.start_from(own)
                del wanted[name]
                state = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
        wanted.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{folder / MODULES} does not fit the method's modules: {error}") from error


def with_empty_adapter(causal_lm: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with an adapter of a checkpoint's settings, whose weights hold nothing yet."""
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    # The file names the backbone as others find it: peft would warn that it lies elsewhere here.
    config.base_model_name_or_path = getattr(causal_lm, "name_or_path", None) or None
    # low_cpu_mem_usage: the adapter's weights are not drawn at random before they are read.
    adapted = get_peft_model(causal_lm, config, low_cpu_mem_usage=True)
    for module in adapted.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_meta:
                empty = torch.empty_like(weight, device=causal_lm.device)
                setattr(module, name, nn.Parameter(empty, weight.requires_grad))
    return adapted


def load_adapter(peft_lm: PeftModel, path: Path) -> None:
    """Put an adapter's weights into a model that has one of the same shape, in place.

    Not by `set_peft_model_state_dict`: it only warns of weights that are missing, and it applies the renamings
    of old files to the names in this one, which turns some (Laguna's) into names that it then ignores.
    """
    stored = read(path)
    # The tensors under the names of a file are the model's own.
    own = get_peft_model_state_dict(peft_lm, save_embedding_layers=False)
    if own.keys() != stored.keys():
        missing = sorted(own.keys() - stored.keys())
        unexpected = sorted(stored.keys() - own.keys())
        raise ValueError(f"{path}: weights do not fit: missing {missing}, unexpected {unexpected}")
    for name, value in stored.items():
        if own[name].shape != value.shape:
            raise ValueError(
                f"{path}: weights do not fit: {name} has shape {tuple(value.shape)}, not {tuple(own[name].shape)}"
            )
        own[name].detach().copy_(value)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. ValueError where it is missing or damaged."""
    if not path.exists():
        raise ValueError(f"checkpoint {path.parent} lacks {path.name}")
    try:
        state: dict[str, Tensor] = load_file(path)
        return state
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error
