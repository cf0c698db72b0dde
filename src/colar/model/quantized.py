"""Linear layers in 8 or 4 bits: only weights are quantised, and inputs stay in the model's dtype.

    int8    for inference: one scale a row of a weight. On a CPU by `Int8Linear`, on a GPU by torchao
    int4    for inference, torchao: one scale and one offset for each GROUP numbers of a row, chosen by HQQ
    nf4     below an adapter that is trained, bitsandbytes (QLoRA, Dettmers et al. 2023): scales are quantised as well

Only linears below the LM head are quantised. The embedding is not, because thoughts are sums of its rows and are fed
back, so that their error would grow with the chain. The LM head is not, because it is often the same weight, nor are
the method's modules, because they are small.
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from colar.checks import check_choice
from colar.model.latent_lm import LatentLM
from colar.ops import devices

QUANTIZATIONS = ("int8", "int4")
GROUP = 32
"""The smallest group of all kernels, and the most accurate. It divides the sizes of all known families."""
FEW_ROWS = 8
"""Rows up to which torch's int8 product is faster than a bfloat16 product, on a CPU with bfloat16 arithmetic."""


class Int8Linear(nn.Module):
    """A linear layer of int8 weights with one scale a row, for a CPU and without gradient.

    torch's kernel rounds its inputs and outputs to bfloat16 and accumulates in float32.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        # For a row of zeros any scale above 0 is right.
        scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8))
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.most_rows = FEW_ROWS if devices.computes_bfloat16(torch.device("cpu")) else sys.maxsize

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if x.dtype == torch.bfloat16 and len(rows) > self.most_rows:
            y = F.linear(rows, self.weight.to(x.dtype)) * self.scale
        else:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale).to(x.dtype)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def check(quantization: str, dtype: str, device: torch.device) -> None:
    """ValueError if weights cannot be quantised so; called before a model is loaded. The option is named `weights`."""
    check_choice("weights", quantization, QUANTIZATIONS)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"weights {quantization} runs on cpu and cuda, not on {device.type}")
    if (quantization, device.type) != ("int8", "cpu") and importlib.util.find_spec("torchao") is None:
        raise ValueError(
            f"weights {quantization} on {device.type} needs torchao: from your clone of colar, pip install '.[quant]'"
        )
    if quantization == "int4" and dtype != "bfloat16":
        raise ValueError(f"weights int4 computes in bfloat16: give dtype bfloat16, not {dtype}")


def quantize(lm: LatentLM, quantization: str, device: torch.device) -> None:
    """Quantise the linears below the LM head in place, one after another on `device`.

    ValueError for a model with most of its weights outside linears, such as GPT-2.
    """
    on_cpu = device.type == "cpu"
    # torch's int8 kernel for CPUs reads a row in blocks of 16: other rows give garbage, or kill the process.
    columns = GROUP if quantization == "int4" else 16 if on_cpu else 1
    rows = GROUP if quantization == "int4" else 1

    def fits(module: nn.Module, name: str = "") -> bool:
        return _is_linear(module) and module.in_features % columns == module.out_features % rows == 0

    _check_share(f"weights {quantization}", lm.causal_lm, fits)
    lm.quantization = quantization
    if quantization == "int8" and on_cpu:
        _replace(lm.causal_lm.base_model, Int8Linear, fits)
        return
    from torchao.quantization import quantize_

    quantize_(lm.causal_lm.base_model, _config(quantization, device), fits, device=device)


def quantize_below_adapter(causal_lm: PreTrainedModel) -> None:
    """Replace the linears below the LM head by bitsandbytes' 4-bit linears, in place. ValueError as in `quantize`.

    peft's `prepare_model_for_kbit_training` is not called: it casts all other weights to float32, but model.dtype
    decides that here, and freezes them, which the adapter does already.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    def quantized(linear: nn.Linear) -> nn.Module:
        linear_4bit = Linear4bit(linear.in_features, linear.out_features, bias=False, device="meta")
        linear_4bit.weight = Params4bit(linear.weight.data, quant_type="nf4", module=linear_4bit)
        linear_4bit.bias = linear.bias
        # In evaluation mode bitsandbytes packs weights for the CPU, and training would continue with packed weights.
        linear_4bit.support_avx512bf16_for_cpu = False
        # Moving the layer quantises it, even if it is on that device already.
        moved: nn.Module = linear_4bit.to(linear.weight.device)
        return moved

    _check_share("model.load_in_4bit", causal_lm, _is_linear)
    _replace(causal_lm.base_model, quantized, _is_linear)
    # peft chooses the class of its layers by this flag.
    causal_lm.is_loaded_in_4bit = True


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for torch's own linear only, because a subclass may compute something else than x W^T + b."""
    return type(module) is nn.Linear


def _replace(model: nn.Module, make: Callable[[Any], nn.Module], fits: Callable[[nn.Module], bool]) -> None:
    """Replace linears in place, one after another, so that the memory of each is freed before the next is made."""
    # Listed by name, because a list of the linears would keep all of them in memory.
    places = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if fits(child)
    ]
    for parent, name in places:
        setattr(parent, name, make(getattr(parent, name)))


def _check_share(what: str, causal_lm: PreTrainedModel, fits: Callable[[nn.Module], bool]) -> None:
    """Reject a model of which less than half would be quantised, embeddings aside."""
    counts = {True: 0, False: 0}
    for module in causal_lm.base_model.modules():
        if not isinstance(module, nn.Embedding):
            counts[fits(module)] += sum(weight.numel() for weight in module.parameters(recurse=False))
    if counts[True] < counts[False]:
        raise ValueError(
            f"{what} does not fit {type(causal_lm).__name__}: only {counts[True]:,} of {sum(counts.values()):,} "
            "weights of its layers are in linears that it can quantise"
        )


def _config(quantization: str, device: torch.device) -> Any:
    """torchao's config. Inductor's settings are left unchanged, because they are global."""
    from torchao import quantization as schemes
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm, Int4PackingFormat

    if quantization == "int8":
        return schemes.Int8WeightOnlyConfig(set_inductor_config=False)
    own: dict[str, Any] = {
        "group_size": GROUP,
        "int4_choose_qparams_algorithm": Int4ChooseQParamsAlgorithm.HQQ,
        "set_inductor_config": False,
    }
    # The layout of each device is that of torch's own kernel, which needs no further package.
    if device.type == "cpu":
        return PrototypeInt4WeightOnlyConfig(**own)
    return schemes.Int4WeightOnlyConfig(int4_packing_format=Int4PackingFormat.TILE_PACKED_TO_4D, **own)
