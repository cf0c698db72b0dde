"""Where a run does not fit into a device's memory: how much there is, and what would help.

    weights, moments and gradients fit      fewer positions at once, or activations that are recomputed
    they do not                             an adapter, weights in bfloat16, training.fsdp, or another device

Fewer positions are no help in the second case, however few they are.
"""

from __future__ import annotations

import os

import torch

from colar.model.latent_lm import LatentLM

GIB = 2**30
BFLOAT16 = 2
"""Bytes of a weight."""


def memory_of(device: torch.device) -> int:
    """Bytes of the device's memory, whoever uses them."""
    if device.type == "cuda":
        # (free, total): what others use now is not counted as lost.
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gib(size: float) -> str:
    """`12.3 GiB`; `4.5 MiB` below a tenth of one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def smaller_weights(lm: LatentLM, memory: float, divisible: bool, cards: int | None = None) -> str:
    """What helps where weights, moments and gradients do not fit into `memory` bytes of a device.

    `divisible`: training.fsdp can train it. `cards` are those that the weights are divided between; None: each has all.
    """
    weights = sum(weight.numel() for weight in lm.parameters())
    half_fits = BFLOAT16 * weights / (cards or 1) < memory
    helps = []
    if half_fits and not lm.has_adapter:
        helps.append("train an adapter (model.lora) of weights in bfloat16 (model.dtype)")
    elif half_fits and lm.causal_lm.get_input_embeddings().weight.dtype == torch.float32:
        helps.append("keep the backbone's weights in bfloat16 (model.dtype)")
    if cards is not None:
        helps.append("divide the weights between more cards")
    elif divisible:
        helps.append("divide the weights between several cards (training.fsdp)")
    return ", ".join([*helps, "take a smaller backbone or a device with more memory"])
