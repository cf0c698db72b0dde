"""Models as shapes: every tensor has its size and dtype, and no memory. And a tokenizer that counts.

A backbone's shapes are known for those of the shipped recipes; of another its config is read (a folder, the Hub).
Without a backbone's tokenizer, texts are cut as Llama 3's tokenizer cuts them before it merges: a word, a number of up
to three digits, or a run of signs is one token. Rare words have more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from colar.methods.base import Method
from colar.model import chunks, tiny
from colar.model.backbones import DTYPES, Backbone
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.prompts import TemplateConfig


@dataclass(frozen=True)
class Shape:
    """A backbone's config, and how its tokenizer writes numbers."""

    config: Any
    digits: int = 3
    """Most digits of a token."""


def config(
    kind: type, width: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, tied: bool
) -> Any:
    """The config of a backbone; families of this kind name their sizes alike."""
    return kind(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
    )


KNOWN = {
    "smollm2-135m": Shape(config(LlamaConfig, 576, 1536, 30, 9, 3, 49_152, True), digits=1),
    "meta-llama/Llama-3.2-1B-Instruct": Shape(config(LlamaConfig, 2048, 8192, 16, 32, 8, 128_256, True)),
    "meta-llama/Llama-3.2-3B-Instruct": Shape(config(LlamaConfig, 3072, 8192, 28, 24, 8, 128_256, True)),
    "meta-llama/Llama-3.1-8B-Instruct": Shape(config(LlamaConfig, 4096, 14_336, 32, 32, 8, 128_256, False)),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Shape(
        config(Qwen2Config, 1536, 8960, 28, 12, 2, 151_936, False), digits=1
    ),
}


def find(name: str) -> Shape:
    """The shape of a backbone. ValueError where it is not known here, and its config cannot be read."""
    if name in tiny.DIGITS:
        digits = tiny.DIGITS[name]
        return Shape(tiny.build(digits=digits)[0].config, digits=digits)
    if name in KNOWN:
        return KNOWN[name]
    try:
        return Shape(AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        known = ", ".join([*tiny.DIGITS, *KNOWN])
        raise ValueError(
            f"the shapes of {name} are not known ({known} are), and its config cannot be read: {error}"
        ) from error


def tokenizer_of(name: str, shape: Shape) -> Any:
    """The backbone's own tokenizer where it lies on this machine, else one that counts."""
    if name in tiny.DIGITS:
        return tiny.build_tokenizer(tiny.DIGITS[name])
    if Path(name).is_dir():
        return AutoTokenizer.from_pretrained(name)
    return counting_tokenizer(shape.digits)


def counting_tokenizer(digits: int = 3) -> PreTrainedTokenizerFast:
    """A tokenizer whose texts have about as many tokens as a backbone's. All are of one id, but for the separator, and
    for what groups may be cut by: digits, and the sign behind which a result stands."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1," + str(digits) + r"}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    # Without a token for the separator the template would add one, and a row to the embedding.
    vocabulary = {"<unk>": 0, "###": 1, "<eos>": 2, "<bos>": 3, "=": 4}
    for digit in range(10):
        vocabulary[str(digit)] = len(vocabulary)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<eos>", bos_token="<bos>"
    )


def without_memory(
    shape: Shape, method: Method, dtype: str, lora: LoraSettings | None, mode: FakeTensorMode
) -> LatentLM:
    """The model of a recipe, with its adapter and the method's modules, as shapes on a CPU of `mode`."""
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(shape.config, dtype=DTYPES[dtype])
        backbone = Backbone("shapes", causal_lm, counting_tokenizer(), fingerprint="shapes")
        lm = LatentLM.from_backbone(backbone, TemplateConfig(), lora)
        lm.add_modules(method.modules(lm))
    # Autocast knows the CPU, not "meta": tensors of this mode say that they are on the CPU.
    known: dict[int, Any] = {}
    originals = []
    with mode:
        for module in lm.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    originals.append(tensor)  # an id is free for another once its tensor is gone
                    # Tied weights are one tensor at two places, and must stay one.
                    if id(tensor) not in known:
                        known[id(tensor)] = _like(tensor)
                    tensors[name] = known[id(tensor)]
    # What stands for a card says that it is a CPU, whose chunks are smaller.
    lm.chunk_bytes = chunks.CHUNK_BYTES
    return lm


def _like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
