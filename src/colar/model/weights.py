"""The weights of a `LatentLM`: in the files of a checkpoint folder, and split between processes.

    modules.safetensors                                     the modules of the method (absent where it has none)
    adapter_model.safetensors  or  model*.safetensors       the adapter, or all weights, as Hugging Face writes them

A resumed run's optimiser refers to the parameters, so loading copies values into them.

Split weights (FSDP2, torch's `fully_shard`), of which a share lies on each device:

    units        each decoder layer; and one for all else: embeddings, LM head, final norm, the method's modules
    a forward    a unit's weights are gathered when it begins, and dropped when it ends
    a backward   the same, and gradients are summed and split at once
    AdamW        on each process's own share

The last unit stays gathered from the beginning of the objective's forward to the end of its backward pass. So within
it, embeddings and LM head are ordinary tensors: chunks of logits, parts of the head and tied weights need no special
case. Outside of the objective they are shares.

accelerate shards on GPUs only. Here `fully_shard` is called directly, and Trainer is told that nothing is to be
wrapped, so that the same code runs on CPU processes, where it is tested.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import GenerationConfig, PreTrainedModel

from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.model.lora import check_ends

MODULES = "modules.safetensors"
ADAPTER = "adapter_model.safetensors"


def save(
    lm: LatentLM,
    folder: Path,
    leave_out: Collection[str] = (),
    gathered: dict[str, Tensor] | None = None,
) -> None:
    """Write the trained weights: the adapter, or all weights once (tied ones not twice), and the modules.

    Modules named in `leave_out` are not written. `gathered` are the whole weights, by the names of the state dict, if
    `lm` has only a share of each. ValueError for quantised weights.
    """
    if lm.quantization is not None:
        raise ValueError(
            f"weights {lm.quantization} cannot be saved: they are made when a checkpoint is loaded; save the one that "
            "this model was loaded from"
        )
    weights = None if gathered is None else _under("lm.", gathered)
    modules = lm.extra.state_dict() if gathered is None else _under("extra.", gathered)
    if isinstance(lm.lm, PeftModel):
        # peft would write the backbone's path on this machine.
        for config in lm.lm.peft_config.values():
            config.base_model_name_or_path = backbones.HUB_IDS.get(lm.name, lm.name)
        lm.lm.save_pretrained(
            str(folder), safe_serialization=True, save_embedding_layers=False, state_dict=weights
        )
    else:
        _forget_what_cannot_be_saved(lm.causal_lm)
        lm.causal_lm.save_pretrained(folder, state_dict=weights)
    state = {
        name: value.contiguous() for name, value in modules.items() if name.split(".")[0] not in leave_out
    }
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
    """Load a checkpoint's weights into an `lm` of the same shape, in place, as a resumed run does.

    Modules named in `leave_out` keep their weights. `checkpoint.load` builds a new `lm` from a folder.
    """
    if isinstance(lm.lm, PeftModel):
        load_adapter(lm.lm, folder / ADAPTER)
    else:
        _load_all(lm.causal_lm, folder)
    load_modules(lm.extra, folder, leave_out)


def _load_all(causal_lm: PreTrainedModel, folder: Path) -> None:
    """Load all weights of a folder into a model of the same shape, in place.

    `save_pretrained` renames, splits and stacks the weights of many families, and only `from_pretrained` reverses this.
    It makes new parameters, to which an optimiser would not refer, so their values are copied.
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
        """Start from a checkpoint's weights, by their names in the module. ValueError if they cannot fit."""
        ...


def load_modules(
    extra: nn.ModuleDict, folder: Path, leave_out: Collection[str] = (), starts: bool = False
) -> None:
    """Fill a method's modules from a checkpoint folder; those named in `leave_out` keep their weights.

    `starts` is for the beginning of another stage of training: a `Startable` module may start from weights of another
    shape, and keeps its own if the checkpoint has none for it.
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
    """The model with an adapter of a checkpoint's settings, whose weights are not filled yet."""
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    # The file names the backbone as other machines find it, and peft would warn if it was loaded from elsewhere.
    config.base_model_name_or_path = getattr(causal_lm, "name_or_path", None) or None
    # low_cpu_mem_usage: the adapter's weights are not drawn at random before they are read.
    adapted = get_peft_model(causal_lm, config, low_cpu_mem_usage=True)
    check_ends(adapted)
    for module in adapted.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_meta:
                empty = torch.empty_like(weight, device=causal_lm.device)
                setattr(module, name, nn.Parameter(empty, weight.requires_grad))
    return adapted


def load_adapter(peft_lm: PeftModel, path: Path) -> None:
    """Load an adapter's weights into a model that has one of the same shape, in place.

    `set_peft_model_state_dict` is not used, because it only warns of missing weights, and because it applies the
    renamings of old files to the names in this one, which turns some (Laguna's) into names that it then ignores.
    """
    stored = read(path)
    # The model's own tensors, under the names that an adapter's file has.
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
    """The tensors of a file. ValueError if it is missing or damaged."""
    if not path.exists():
        raise ValueError(f"checkpoint {path.parent} lacks {path.name}")
    try:
        state: dict[str, Tensor] = load_file(path)
        return state
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


# Weights split between processes


def shard(model: nn.Module, layers: list[nn.Module], device: torch.device) -> None:
    """Split the weights of `model` between all processes, in place. Each of `layers` is a unit of its own."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def gathered(lm: LatentLM) -> dict[str, Tensor] | None:
    """The tensors of a checkpoint of `lm`, whole and on the CPU, by name in `lm.state_dict()`; all processes must call
    it together. None if `lm` is not split.

    Frozen weights under an adapter are left out. Processes other than the main one get an empty dict.
    """
    if not is_sharded(lm):
        return None
    trained = {name for name, weight in lm.named_parameters() if weight.requires_grad}
    tensors = {}
    for name, value in lm.state_dict().items():
        if lm.has_adapter and name.startswith("lm.") and name not in trained:
            continue
        tensor = _whole(value)
        if tensor is not None:
            tensors[name] = tensor
    return tensors


def _whole(value: Tensor) -> Tensor | None:
    """The whole tensor on the CPU, of which each process may have a share; all must call it together.

    None in processes other than the main one: copies in all of them would fill the memory of a machine of many GPUs.
    """
    full: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu() if distributed.get_rank() == 0 else None


def whole_state(state: Any) -> Any:
    """An optimiser's state dict with whole tensors on the CPU, as without splitting. All processes call it together.

    Processes other than the main one get None in place of each tensor.
    """
    return tree_map(lambda leaf: _whole(leaf) if isinstance(leaf, Tensor) else leaf, state)


def share_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The inverse of `whole_state`: each process gets its share of the state of each of the optimiser's weights."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    shares = {
        index: {name: _share_like(weights[index], value) for name, value in of_weight.items()}
        for index, of_weight in state["state"].items()
    }
    return {**state, "state": shares}


def _share_like(weight: Tensor, value: Tensor) -> Tensor:
    """This process's share of a tensor, split as the weight is; AdamW's step is a number and stays whole."""
    if value.dim() == 0 or not isinstance(weight, DTensor):
        return value
    mesh = weight.device_mesh
    # Each process has read the whole tensor, so nothing is sent.
    return distribute_tensor(value.to(mesh.device_type), mesh, weight.placements, src_data_rank=None)
