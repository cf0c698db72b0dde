"""Weights that are split between processes (FSDP2, torch's `fully_shard`): a share of each weight lies on each device.

    units        each decoder layer; and one for all else: embeddings, LM head, final norm, the method's modules
    a forward    a unit's weights are gathered when it begins, and dropped when it ends
    a backward   the same, and gradients are summed and split at once
    AdamW        on each process's own share

The last unit stays gathered from the beginning of the objective's forward to the end of its backward pass. So inside
of it embeddings and LM head are ordinary tensors: chunks of logits, parts of the head and tied weights need no case of
their own. Outside of it they are shares.

accelerate shards on GPUs only. Here `fully_shard` is called directly, and Trainer is told that nothing is to be
wrapped: the same code runs on CPU processes, where it is tested.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from colar.model.latent_lm import LatentLM


def shard(model: nn.Module, layers: list[nn.Module], device: torch.device) -> None:
    """Split the weights of `model`, of which `layers` are units of their own, between all processes, in place."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def gathered(lm: LatentLM) -> dict[str, Tensor]:
    """The tensors of a checkpoint of `lm`, whole and on the CPU, by name in `lm.state_dict()`; all call it together.

    Weights that an adapter leaves as they are stay away. Processes other than the main one get nothing.
    """
    trained = {name for name, weight in lm.named_parameters() if weight.requires_grad}
    tensors = {}
    for name, value in lm.state_dict().items():
        if lm.has_adapter and name.startswith("lm.") and name not in trained:
            continue
        tensor = whole_tensor(value)
        if distributed.get_rank() == 0:
            tensors[name] = tensor
    return tensors


def whole_tensor(value: Tensor) -> Tensor:
    """A tensor of which each process has a share, on the CPU; all call it together."""
    full: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu()


def whole_state(state: Any) -> Any:
    """An optimiser's state dict with whole tensors on the CPU: that of one process. All call it together."""
    return tree_map(lambda leaf: whole_tensor(leaf) if isinstance(leaf, Tensor) else leaf, state)


def share_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The inverse of `whole_state`: each process keeps its share of what belongs to a weight of the optimiser."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = {}
    for index, of_weight in state["state"].items():
        place = _place_like(weights[index])
        # A step is a number of its own.
        moments[index] = {
            name: value if value.dim() == 0 else place(value) for name, value in of_weight.items()
        }
    return {**state, "state": moments}


def _place_like(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def place(value: Tensor) -> Tensor:
        if not isinstance(weight, DTensor):
            return value
        mesh = weight.device_mesh
        # Each process has read the whole tensor: nothing is sent.
        return distribute_tensor(value.to(mesh.device_type), mesh, weight.placements, src_data_rank=None)

    return place
