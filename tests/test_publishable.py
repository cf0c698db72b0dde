"""What cannot be published is refused before the first step; what can, is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXAMPLES, backbone, tiny_lm
from test_checkpoint import completions, logits
from test_training import QUICK
from transformers import (
    ByT5Tokenizer,
    CTRLTokenizer,
    Emu3ForCausalLM,
    Emu3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from colar.methods import pretrained, registry
from colar.model import checkpoint
from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training.config import TrainingConfig
from colar.training.sft import train

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LORA = LoraSettings(r=2)


def byt5(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens(["###"])
    return tokenizer


def ctrl(folder: Path) -> PreTrainedTokenizerBase:
    """One of words and merges, in files of its own."""
    letters = sorted({letter for example in EXAMPLES for letter in f"{example.question} {example.steps}#"})
    names = ["<unk>", "<eos>", *letters, *(f"{letter}</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(dict.fromkeys(names))}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), eos_token="<eos>")
    tokenizer.add_tokens(["###"])
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}


def llama(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **ids_of(tokenizer), pad_token_id=None))


def go(lm: LatentLM, folder: Path) -> None:
    method = registry.build("cot", {})
    pretrained.attach(lm, method, 0)
    train(lm, method, EXAMPLES, TrainingConfig(**QUICK, max_steps=1), folder)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapter"])
@pytest.mark.parametrize("make", [byt5, ctrl])
def test_a_tokenizer_without_tokenizer_json_comes_back(tmp_path: Path, make: Any, lora: Any) -> None:
    """Nor do the tokens that were added to it get lost, of which the separator is one."""
    tokenizer = make(tmp_path)
    llama(tokenizer).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    made = Backbone(str(tmp_path / "base"), llama(tokenizer), tokenizer)
    lm = LatentLM.from_backbone(made, lora=lora)
    go(lm, tmp_path / "run")
    folder = tmp_path / "run" / "best"
    assert not (folder / "tokenizer.json").exists()
    back, method = pretrained.load(folder)
    torch.testing.assert_close(logits(back), logits(lm))
    assert completions(back, method) == completions(lm, method)
    converted, _ = pretrained.load(checkpoint.convert(folder, tmp_path / "converted", "float32"))
    torch.testing.assert_close(logits(converted), logits(lm))
    # What the folder holds is known, and so is what it lacks.
    lost = checkpoint.read_info(folder)["tokenizer"][0]
    (folder / lost).unlink()
    with pytest.raises(ValueError, match=f"lacks {lost}"):
        pretrained.load(folder)


class Own(LlamaForCausalLM):  # type: ignore[misc]
    """A class that the config does not lead to."""


def own_class() -> LatentLM:
    made = backbone("llama")
    return LatentLM.from_backbone(Backbone("own", Own(made.lm.config), made.tokenizer))


def text_of_emu3() -> LatentLM:
    """A model of the Hub of which transformers saves the config of its text alone."""
    made = backbone("llama")
    sizes = SIZES | ids_of(made.tokenizer) | {"bos_token_id": 0}
    lm = Emu3ForCausalLM(Emu3TextConfig(**sizes, pad_token_id=0))
    return LatentLM.from_backbone(Backbone("emu3", lm, made.tokenizer))


REFUSED = {
    "a class that no config leads to": (
        own_class,
        "own cannot be saved with all weights: transformers loads no Own from the config that it saves",
    ),
    "a config that leads to no class": (
        text_of_emu3,
        "emu3 cannot be saved with all weights: transformers loads no Emu3ForCausalLM from the config that",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_published_is_refused_before_the_first_step(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    lm = make()
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    with pytest.raises(ValueError, match=message) as error:
        go(lm, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    assert not (tmp_path / "run" / "best").exists()


def test_settings_of_generate_that_transformers_refuses_to_save_are_dropped(tmp_path: Path) -> None:
    """Models of the Hub have such: they are loaded with a warning."""
    lm = tiny_lm("llama")
    lm.causal_lm.generation_config.temperature = 0.5
    go(lm, tmp_path / "run")
    back, _ = pretrained.load(tmp_path / "run" / "best")
    torch.testing.assert_close(logits(back), logits(lm))


ADAPTERS = {
    # target_modules, message
    "no layer": (("nope",), r"model.lora with target_modules \[nope\] does not fit Llama"),
    "no pattern": ("*", r"model.lora with target_modules \* does not fit Llama.*repeat"),
    "a norm": (("norm",), r"model.lora with target_modules \[norm\] does not fit Llama"),
    "nothing": ((), r"model.lora with target_modules \[\] does not fit Llama"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_that_peft_refuses_is_named(case: str) -> None:
    targets, message = ADAPTERS[case]
    lora = LoraSettings(r=2, target_modules=targets)
    with pytest.raises(ValueError, match=message) as error:
        tiny_lm("llama", lora=lora)
    assert "\n" not in str(error.value)
