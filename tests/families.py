"""Tiny random `LatentLM`s of four architectures, each with a tokenizer in the style of its family.

    llama    byte-level BPE, BOS, an untied head, `###` one token                (Llama 3)
    qwen2    byte-level BPE with NFC, no BOS, a tied head, `###` one token       (Qwen 2)
    gemma3   SentencePiece-like BPE: "▁" for a space, byte fallback, <unk>, BOS; embeddings scaled in their
             module, sliding-window layers of 8 positions, tied, `###` a token that was added   (Gemma 3)
    gpt2     byte-level BPE, bos = eos, learnt positions, tied, dropout          (GPT-2)

Random models rarely stop and repeat themselves; `liven` makes their rows think 0, 1 or several times.
"""

from __future__ import annotations

import copy
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from colar.data.example import Example
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM, LoraSettings

FAMILIES = ("llama", "qwen2", "gemma3", "gpt2")
WINDOW = 8
CONTEXT = 128
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

EXAMPLES = (
    Example("t/0", "Ann has 3 pens and buys 4. How many?", ("<<3+4=7>>",), "7"),
    Example("t/1", "What is 2 times 6 minus 5?", ("<<2*6=12>>", "<<12-5=7>>"), "7"),
    Example("t/2", "Bo is 9.", (), "9"),
    Example(
        "t/3",
        "A box holds 12 eggs; 5 boxes hold x eggs, and 8 break. Find x - 8, please.",
        ("<<12*5=60>>", "<<60-8=52>>", "<<52*1=52>>"),
        "52",
    ),
    Example("t/4", "Sum of 10 and 11?", ("<<10+11=21>>",), "21"),
    Example("t/5", "Half of 18, then half of 10, summed: how much?", ("<<18/2=9>>", "<<9+5=14>>"), "14"),
)
"""Hand-written rows, one without reasoning; questions of different lengths, the longest beyond WINDOW."""
OWN_LOSS = [name for name, method in registry.METHODS.items() if "loss" in vars(method)]
"""Methods with a loss of their own. The others train by CoT's, on rows of their own."""


def tiny_lm(
    family: str,
    *,
    lora: LoraSettings | None = None,
    tied: bool | None = None,
    seed: int = 0,
    scale: float = 0.5,
    digits: bool = False,
) -> LatentLM:
    """A fresh model in eval mode. `tied` overrides the family's.

    `scale` is the weights' standard deviation: 0.5 makes rows differ a lot, 0.1 learns more easily. With `digits`
    the tokenizer splits numbers into digits.
    """
    made = backbone(family, tied=tied, seed=seed, scale=scale, digits=digits)
    return LatentLM.from_backbone(made, lora=lora).eval()


def backbone(
    family: str,
    *,
    tied: bool | None = None,
    seed: int = 0,
    scale: float = 0.5,
    digits: bool = False,
) -> Backbone:
    """Weights and tokenizer, untouched by colar."""
    tied = family != "llama" if tied is None else tied
    lm = copy.deepcopy(_drawn(family, digits, tied, scale, seed))
    return Backbone(f"tiny-{family}", lm, build_tokenizer(family, digits))


@cache
def _drawn(family: str, digits: bool, tied: bool, scale: float, seed: int) -> PreTrainedModel:
    """The weights, to be copied: transformers takes twice as long to build a model as to copy it."""
    tokenizer = build_tokenizer(family, digits)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _model(family, tokenizer, tied=tied, scale=scale).eval()


@torch.no_grad()
def liven(lm: LatentLM, stop: float = 0.3, end: float = 0.25) -> LatentLM:
    """Give the head a bias with which the separator, and EOS, is the most probable token at about this share
    of positions (measured where `EXAMPLES` think and answer)."""
    template, head = lm.template, lm.causal_lm.get_output_embeddings()
    probes = []
    for example in EXAMPLES:
        chain = [token for step in template.steps(example.steps) for token in step]
        question = template.question(example.question, "(Thinking speed: 2)")
        probes.append((len(question) - 1, [*question, *chain, *template.answer(example.answer)]))
    wanted = {template.separator_id: stop, template.eos_id: end}
    # Most tests make the same models again.
    key = hashlib.sha256(repr((probes, wanted, type(lm.causal_lm))).encode())
    for name, weight in lm.causal_lm.named_parameters():
        key.update(f"{name} {weight.dtype}".encode())
        key.update(weight.detach().cpu().double().numpy().tobytes())
    if key.digest() not in _BIASES:
        _BIASES[key.digest()] = _bias_that_stops(lm, probes, wanted)
    bias = _BIASES[key.digest()].clone()
    head.bias = torch.nn.Parameter(bias)
    return lm


_BIASES: dict[bytes, torch.Tensor] = {}
"""What `liven` has found, by the weights."""


def _bias_that_stops(
    lm: LatentLM, probes: list[tuple[int, list[int]]], wanted: dict[int, float]
) -> torch.Tensor:
    states = [lm.hidden(lm.embed(torch.tensor([ids])))[0, first:] for first, ids in probes]
    logits = lm.logits(torch.cat(states))
    bias = torch.zeros(logits.shape[1])
    logits_others = logits.index_fill(1, torch.tensor(list(wanted)), float("-inf")).amax(1)
    for token_id, share in wanted.items():
        bias[token_id] = (logits_others - logits[:, token_id]).quantile(share)
    return bias


def _model(family: str, tokenizer: PreTrainedTokenizerFast, tied: bool, scale: float) -> PreTrainedModel:
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "tie_word_embeddings": tied,
        "initializer_range": scale,
    }
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **common))
    common |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**common))
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**common))
    if family == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        common |= {"num_hidden_layers": 3, "layer_types": layers, "sliding_window": WINDOW, "head_dim": 8}
        common["vocab_size"] -= 1
        return _with_separator(Gemma3ForCausalLM(Gemma3TextConfig(**common)), tokenizer)
    raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")


@torch.no_grad()
def _with_separator(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Add the weights of the added `###`, as people do: the mean of those before it."""
    lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    separator = tokenizer.convert_tokens_to_ids("###")
    for module in (lm.get_input_embeddings(), lm.get_output_embeddings()):
        module.weight[separator] = module.weight[:separator].mean(0)
    return lm


def of_config(config: Any, std: float = 0.2) -> PreTrainedModel:
    """A random causal LM of any architecture that transformers has a config of."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.normal_(std=std) if weight.dim() > 1 else weight.uniform_(0.2, 1.0)
    return lm.eval()


def build_tokenizer(family: str, digits: bool = False) -> PreTrainedTokenizerFast:
    """A new copy. With `digits` each digit is a token, as in SmolLM2, Qwen 2 and Gemma."""
    special: dict[str, dict[str, str]] = {
        "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        "qwen2": {"eos_token": "<|endoftext|>"},
        "gemma3": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    }
    names = special[family]
    text = _trained(family, digits, tuple(dict.fromkeys(names.values())))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **names)
    if family == "gemma3":
        tokenizer.add_tokens([AddedToken("###", normalized=False, special=False)])
    return tokenizer


@cache
def _trained(family: str, digits: bool, special: tuple[str, ...]) -> str:
    words = [
        "how",
        "many",
        "pens",
        "are",
        "there",
        "Ann",
        "has",
        "box",
        "eggs",
        "times",
        "plus",
        "sum",
        "of",
        "speed",
    ]
    texts = [f"{a} {b} <<{i}+{j}={i + j}>>" for i, a in enumerate(words) for j, b in enumerate(words)]
    texts += (
        ["(Thinking speed: 2)"] * 200 if family == "gemma3" else ["### 12", "(Thinking speed: 2)\n###"] * 200
    )
    if family == "gemma3":
        return _sentencepiece(texts, digits, special)
    tokenizer = Tokenizer(models.BPE())
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family != "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if digits:
        each_digit = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each_digit, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, _trainer(350, special, alphabet))
    if family == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], tokenizer.token_to_id(special[0]))]
        )
    return str(tokenizer.to_str())


def _sentencepiece(texts: list[str], digits: bool, special: tuple[str, ...]) -> str:
    """BPE over "▁"-marked text whose unknown characters fall back to bytes, as in Gemma's tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    if digits:
        each_digit = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, each_digit])
    # One word a text: without a space to split on, merges would run over whole sentences.
    pieces = [
        piece for text in texts for piece in (text.split(" ")[0], *(f" {w}" for w in text.split(" ")[1:]))
    ]
    signs = list("+-*/=") if digits else []
    tokenizer.train_from_iterator(pieces, _trainer(120, special, signs))
    spec = json.loads(tokenizer.to_str())
    vocabulary = spec["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    spec["model"]["byte_fallback"] = True
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    return json.dumps(spec)


def _trainer(size: int, special: tuple[str, ...], alphabet: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )


def _with_head_bias(model: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The architecture with a bias in its head, known to transformers' Auto classes under a name of its own."""
    name = f"Lively{model.__name__}"
    settings = model.config_class
    config = type(f"{name}Config", (settings,), {"model_type": f"lively_{settings.model_type}"})

    def make(self: PreTrainedModel, config: Any) -> None:
        model.__init__(self, config)
        head = self.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))

    made = type(name, (model,), {"__init__": make, "config_class": config})
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, made)
    return made


LIVELY = {
    model: _with_head_bias(model)
    for model in (LlamaForCausalLM, Qwen2ForCausalLM, Gemma3ForCausalLM, GPT2LMHeadModel)
}


def publishable(lm: LatentLM) -> LatentLM:
    """A livened model as an architecture whose config makes the head's bias: without one, its weights could be trained
    and not be read back, which every run refuses."""
    model = lm.causal_lm
    model.__class__ = LIVELY[type(model)]
    model.config.__class__ = type(model).config_class
    return lm


def save_untrained(path: Path) -> Path:
    """A checkpoint of a model that has learnt nothing: what it answers is noise, which shows every change."""
    lm = LatentLM.from_backbone(backbones.load("tiny", seed=1))
    method = registry.build("colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    return pretrained.save(lm, method, path, {"seed": 7, "label": ""}, "# card\n")
