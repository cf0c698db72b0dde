"""LoRA through peft: settings, the adapter that they add to a backbone, and the weights under the adapter."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from colar.checks import check_holds, in_library


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters through peft. `model.lora: null` trains all weights instead."""

    r: int = 128
    """Rank ("LoRA modules are configured with alpha = 32 and r = 128", appendix A)."""
    lora_alpha: int = 32
    """Scale; the update is lora_alpha / r times B A."""
    lora_dropout: float = 0.0
    """Dropout on the adapter's input."""
    target_modules: tuple[str, ...] | str = ("q_proj", "v_proj")
    """Linears that get an adapter: names, or "all-linear". The paper's code took peft's default for Llama."""

    def __post_init__(self) -> None:
        check_holds("model.lora.r", self.r >= 1, self.r, "1 or more")
        check_holds("model.lora.lora_dropout", 0 <= self.lora_dropout < 1, self.lora_dropout, "in [0, 1)")

    def check_same(self, peft_lm: PeftModel, where: object) -> None:
        """ValueError for a model whose adapter was made with other settings than these."""
        mine = dataclasses.asdict(self)
        theirs = {name: getattr(peft_lm.peft_config["default"], name) for name in mine}
        same = all(mine[name] == theirs[name] for name in ("r", "lora_alpha", "lora_dropout"))
        # peft stores the targets as it resolved them: names, patterns and "all-linear" may mean the same, and those of
        # stacked experts become parameters. So adapters are compared, on a meta model, which takes no memory.
        base = peft_lm.get_base_model()
        with torch.device("meta"):
            twin = type(base)(copy.deepcopy(base.config))
        if not same or _lora_weights(with_adapter(twin, self)) != _lora_weights(peft_lm):
            raise ValueError(f"model.lora {mine} is not what the adapter in {where} has: {theirs}")


def _lora_weights(lm: nn.Module) -> dict[str, tuple[int, ...]]:
    """The weights of a low-rank adapter, by name, with their shapes."""
    return {name: tuple(weight.shape) for name, weight in lm.named_parameters() if ".lora_" in name}


def with_adapter(causal_lm: PreTrainedModel, lora: LoraSettings) -> PeftModel:
    """The model with a fresh adapter. ValueError for settings that peft rejects."""
    targets = lora.target_modules
    shown = targets if isinstance(targets, str) else f"[{', '.join(targets)}]"
    # peft raises errors of many types: for an invalid pattern, or for a kind of module that it does not support.
    with in_library(f"model.lora with target_modules {shown} does not fit {type(causal_lm).__name__}"):
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=lora.lora_alpha,
            lora_dropout=lora.lora_dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            exclude_modules=_outside_of_text(causal_lm) or None,
        )
        adapted = get_peft_model(causal_lm, config)
    check_ends(adapted)
    return adapted


def _outside_of_text(causal_lm: PreTrainedModel) -> list[str]:
    """Names of the linears that no text goes through, such as a vision tower's (Gemma 3 from 4b on): they never have a
    gradient."""
    decoder, head = causal_lm.get_decoder(), causal_lm.get_output_embeddings()
    of_text = {head, *decoder.modules()}
    return [
        name
        for name, module in causal_lm.named_modules()
        if isinstance(module, nn.Linear) and module not in of_text
    ]


def check_ends(peft_lm: PeftModel) -> None:
    """ValueError for an adapter on one end of a model whose embedding and LM head are one weight.

    Merging it into that weight would change both ends, and give another model than the one that was trained.
    """
    base: Any = peft_lm.get_base_model()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    tied = None not in ends and ends[0].weight is ends[1].weight
    if tied and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise ValueError(
            f"model.lora.target_modules: the embedding and the LM head of {type(base).__name__} are one weight here, "
            "which an adapter of one of them would change for both: leave them out"
        )


def adapted_layers(lm: nn.Module) -> list[BaseTunerLayer]:
    """The layers with an adapter; none if there is no adapter."""
    return [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]


@contextlib.contextmanager
def casts_left_to_autocast(layers: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Inside autocast, leave the dtype of the input of these adapted layers to autocast.

    peft casts each input to the adapter's float32, and autocast casts it back: up to four operations more for each
    adapted linear in an update, for the same numbers. Outside autocast peft's cast is needed. (peft's own
    `disable_input_dtype_casting` searches the whole model twice for each forward.)
    """
    switched = layers if torch.is_autocast_enabled(device.type) else ()
    for layer in switched:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in switched:
            layer.cast_input_dtype_enabled = True


def adapted_weights(peft_lm: PeftModel) -> list[nn.Parameter]:
    """The weights under an adapter, each once.

    One layer may have two adapted weights, neither of them called `weight` (the stacked experts of a mixture). Such a
    layer has an adapter for each, one around the other.
    """
    weights: dict[int, nn.Parameter] = {}
    for layer in adapted_layers(peft_lm):
        for weight in layer.get_base_layer().parameters(recurse=False):
            weights[id(weight)] = weight
    return list(weights.values())
