"""Linear layers in 8 or 4 bits: the weights alone, their inputs stay in the model's dtype.

    int8    for inference, torchao: one scale a row of a weight
    int4    for inference, torchao: one scale and one offset for each GROUP numbers of a row, chosen by HQQ
    nf4     below an adapter that is trained, bitsandbytes (QLoRA, Dettmers et al. 2023): scales are quantised as well

Only linears below the LM head are quantised. The embedding stays as it is, because thoughts are sums of its
rows and are fed back: their error would grow with the chain. So does the LM head, which is often the same weight, and
so do the method's modules, which are small and were trained beside the embedding.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

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
    """Quantise the linears below the LM head in place, one after another on `device`.

    ValueError for a model that has most of its weights in something else than linears, as GPT-2.
    """
    from torchao.quantization import quantize_

    # int8 takes a row of any length.
    group = GROUP if weights == "int4" else 1

    def fits(module: nn.Module, name: str = "") -> bool:
        return type(module) is nn.Linear and module.in_features % group == module.out_features % group == 0

    _check_share(f"weights {weights}", lm.causal_lm, fits)
    quantize_(lm.causal_lm.base_model, _config(weights, device), fits, device=device)


def quantize_below_adapter(lm: PreTrainedModel) -> None:
    """Replace the linears below the LM head by bitsandbytes' of 4 bits, in place. ValueError as of `quantize`.

    peft's `prepare_model_for_kbit_training` is not called: it casts all other weights to float32, for which there is
    model.dtype, and freezes them, which an adapter does.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    def fits(module: nn.Module) -> bool:
        return type(module) is nn.Linear

    _check_share("model.load_in_4bit", lm, fits)
    for parent in list(lm.base_model.modules()):
        for name, child in list(parent.named_children()):
            if not fits(child):
                continue
            made = Linear4bit(child.in_features, child.out_features, bias=False, device="meta")
            made.weight = Params4bit(child.weight.data, quant_type="nf4", module=made)
            made.bias = child.bias
            # In evaluation bitsandbytes packs weights for the CPU, and training would go on with those.
            made.support_avx512bf16_for_cpu = False
            # To move it, to the same device as well, is what quantises it.
            setattr(parent, name, made.to(child.weight.device))
    # peft chooses the kind of its layers by this.
    lm.is_loaded_in_4bit = True


def _check_share(what: str, lm: PreTrainedModel, fits: Callable[[nn.Module], bool]) -> None:
    """Reject a model of which less than half would be quantised, embeddings aside."""
    counts = {True: 0, False: 0}
    for module in lm.base_model.modules():
        if not isinstance(module, nn.Embedding):
            counts[fits(module)] += sum(weight.numel() for weight in module.parameters(recurse=False))
    if counts[True] < counts[False]:
        raise ValueError(
            f"{what} does not fit {type(lm).__name__}: only {counts[True]:,} of {sum(counts.values()):,} weights of "
            "its layers are in linears that it can quantise"
        )


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
