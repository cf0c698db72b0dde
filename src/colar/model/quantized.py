"""Linear layers in 8 or 4 bits for inference, by torchao: the weights alone, their inputs stay in the model's dtype.

    int8    one scale a row of a weight
    int4    one scale and one offset for each GROUP numbers of a row, chosen by HQQ

Only the linears of the decoder layers are quantised. The embedding stays as it is, because thoughts are sums of its
rows and are fed back: their error would grow with the chain. So does the LM head, which is often the same weight, and
so do the method's modules, which are small and were trained beside the embedding.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from colar.checks import check_choice
from colar.model.latent_lm import LatentLM

WEIGHTS = ("int8", "int4")
GROUP = 32
"""The smallest group of all kernels, and the most accurate. It divides the sizes of all known families."""


def check(weights: str, dtype: str, device: torch.device) -> None:
    """ValueError where weights cannot be quantised so; called before a model is loaded."""
    check_choice("weights", weights, WEIGHTS)
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"weights {weights} needs torchao: from your clone of colar, pip install '.[quant]'")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"weights {weights} runs on cpu and cuda, not on {device.type}")
    if weights == "int4" and dtype != "bfloat16":
        raise ValueError(f"weights int4 computes in bfloat16: give dtype bfloat16, not {dtype}")


def quantize(lm: LatentLM, weights: str, device: torch.device) -> None:
    """Quantise the linears of the decoder layers in place, one after another on `device`.

    ValueError for a model that has its weights in something else than linears, as GPT-2 and mixtures of experts.
    """
    from torchao.quantization import quantize_

    # int8 takes a row of any length.
    group = GROUP if weights == "int4" else 1

    def fits(module: nn.Module, name: str = "") -> bool:
        return type(module) is nn.Linear and module.in_features % group == module.out_features % group == 0

    layers = nn.ModuleList(lm.decoder_layers())
    total = sum(weight.numel() for weight in layers.parameters())
    fitting = sum(module.get_parameter("weight").numel() for module in layers.modules() if fits(module))
    if 2 * fitting < total:
        raise ValueError(
            f"weights {weights} does not fit {type(lm.causal_lm).__name__}: linear layers, their sizes multiples of "
            f"{group}, hold {fitting:,} of the {total:,} weights of its decoder layers"
        )
    quantize_(layers, _config(weights, device), fits, device=device)


def _config(weights: str, device: torch.device) -> Any:
    """torchao's config. Inductor's settings are global: they are left alone."""
    from torchao import quantization
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm, Int4PackingFormat

    if weights == "int8":
        return quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    own: dict[str, Any] = {
        "group_size": GROUP,
        "int4_choose_qparams_algorithm": Int4ChooseQParamsAlgorithm.HQQ,
        "set_inductor_config": False,
    }
    # The layout of each device is that of torch's own kernel, which needs no further package.
    if device.type == "cpu":
        return PrototypeInt4WeightOnlyConfig(**own)
    return quantization.Int4WeightOnlyConfig(int4_packing_format=Int4PackingFormat.TILE_PACKED_TO_4D, **own)
