"""LoRA through peft: settings, the adapter that they make of a backbone, and the weights under it."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn
from transformers import PreTrainedModel

from colar.checks import check_holds, in_library
from colar.model import vocabulary
from colar.template.template import Template


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
        """Reject a model whose adapter was made with other settings than these: ValueError."""
        trained: Any = peft_lm.peft_config["default"]
        names = ("r", "lora_alpha", "lora_dropout")
        mine = {name: getattr(self, name) for name in names}
        theirs = {name: getattr(trained, name) for name in names}
        # peft stores what it has made of the targets: names, patterns and "all-linear" may mean the same, and those of
        # stacked experts become parameters. So the weights are compared that it makes of them.
        base = peft_lm.get_base_model()
        # A model of shapes: its weights take no memory.
        with torch.device("meta"):
            twin = type(base)(copy.deepcopy(base.config))
        if mine != theirs or _lora_weights(_adapt(twin, self)) != _lora_weights(peft_lm):
            mine["target_modules"], theirs["target_modules"] = (
                targets if isinstance(targets, str) else set(targets)
                for targets in (self.target_modules, trained.target_modules)
            )
            raise ValueError(f"model.lora {mine} is not what the adapter in {where} has: {theirs}")

    def to_peft(self, tokens: dict[str, list[int]] | None = None) -> LoraConfig:
        """peft's config; the weights of `tokens` in some modules are trained too."""
        targets = self.target_modules
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            trainable_token_indices=tokens,
        )


def _lora_weights(lm: nn.Module) -> dict[str, tuple[int, ...]]:
    """The weights of a low-rank adapter, by name, with their shapes."""
    return {name: tuple(weight.shape) for name, weight in lm.named_parameters() if ".lora_" in name}


def with_adapter(causal_lm: PreTrainedModel, lora: LoraSettings, template: Template) -> PeftModel:
    """The model with a fresh adapter; an added separator is trained where it is read and where it is chosen.

    ValueError for settings that peft refuses, or that the separator excludes.
    """
    if not template.separator_added:
        return _adapt(causal_lm, lora)
    config = lora.to_peft(vocabulary.adapter_token_ids(causal_lm, template.separator_id))
    with in_library(_misfit(causal_lm, lora)):
        _check_separator(causal_lm, template, config)
    return _adapt(causal_lm, lora, config)


def _adapt(causal_lm: PreTrainedModel, lora: LoraSettings, config: LoraConfig | None = None) -> PeftModel:
    # peft raises the errors that it meets: of a pattern that is none, of a module that it does not know.
    with in_library(_misfit(causal_lm, lora)):
        return get_peft_model(causal_lm, config or lora.to_peft())


def _misfit(causal_lm: PreTrainedModel, lora: LoraSettings) -> str:
    targets = lora.target_modules
    shown = targets if isinstance(targets, str) else f"[{', '.join(targets)}]"
    return f"model.lora with target_modules {shown} does not fit {type(causal_lm).__name__}"


def _check_separator(causal_lm: PreTrainedModel, template: Template, config: LoraConfig) -> None:
    """Reject an adapter on the embedding or the LM head where the added separator is trained in these.

    peft refuses both in one layer. With a tied head it does not, but the head would not see the trained weights.
    """
    wanted = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    for name, module in causal_lm.named_modules():
        if any(module is one for one in wanted) and check_target_module_exists(config, name):
            raise ValueError(
                f"it names {name}, in which the added separator {template.config.separator!r} is trained: "
                f"leave {name} out, or set template.separator to one token of the tokenizer"
            )


@contextlib.contextmanager
def casts_left_to_autocast(lm: nn.Module) -> Iterator[None]:
    """Inside autocast, leave the dtype of an adapter's input to it.

    peft casts each input to the adapter's float32, and autocast casts it back: up to four operations more for each
    adapted linear in an update, and the same numbers. Outside autocast peft's cast is needed. (peft's own
    `disable_input_dtype_casting` fails where tokens of an embedding are trained.)
    """
    inside = torch.is_autocast_enabled(next(lm.parameters()).device.type)
    layers: list[Any] = [
        module for module in lm.modules() if inside and getattr(module, "cast_input_dtype_enabled", False)
    ]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


def adapted_weights(peft_lm: PeftModel) -> list[nn.Parameter]:
    """The weights under an adapter, each once.

    One weight may have two adapted layers (a tied embedding is read by one and chosen by the other), and one layer two
    adapted weights, neither of them called `weight` (the stacked experts of a mixture).
    """
    weights: dict[int, nn.Parameter] = {}
    for module in peft_lm.modules():
        if isinstance(module, BaseTunerLayer):
            for weight in module.get_base_layer().parameters(recurse=False):
                weights[id(weight)] = weight
    return list(weights.values())
