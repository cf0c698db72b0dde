"""Linear layers in int8 and int4 (torchao): near the plain model's numbers, refused in one line where they cannot run."""

import importlib.util

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from torch import nn

from colar.ask import load
from colar.cli import main
from colar.engine.runner import PackedLinear, packed_copy
from colar.methods import pretrained, registry
from colar.model import backbones, quantized
from colar.model.latent_lm import LatentLM, LoraSettings

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install '.[quant]'"
)


def hidden(lm):
    with torch.no_grad():
        return lm.hidden(lm.embed(IDS)).float()


@needs_torchao
@pytest.mark.parametrize(
    ("weights", "dtype", "most"),
    [("int8", "float32", 0.03), ("int8", "bfloat16", 0.05), ("int4", "bfloat16", 0.4)],
)
def test_only_linears_of_layers_are_quantised_and_little_changes(weights, dtype, most):
    lm = LatentLM.from_backbone(backbones.load("tiny", dtype)).eval()
    before = hidden(lm)
    quantized.quantize(lm, weights, CPU)
    kinds = {
        name: type(module.weight)
        for name, module in lm.causal_lm.named_modules()
        if isinstance(module, nn.Linear)
    }
    plain = {name for name, kind in kinds.items() if kind is nn.Parameter}
    assert plain == {"lm_head"}
    assert type(lm.causal_lm.get_input_embeddings().weight) is nn.Parameter
    error = (hidden(lm) - before).norm() / before.norm()
    assert 0 < error < most
    # Compiled steps pack plain bfloat16 weights only.
    packed = [
        name for name, module in packed_copy(lm).causal_lm.named_modules() if isinstance(module, PackedLinear)
    ]
    assert packed == (["lm_head"] if dtype == "bfloat16" else [])


@needs_torchao
def test_an_adapter_is_merged_before_and_answers_come(tmp_path):
    method = registry.build("colar", {"sigma_e": 1.0})
    lm = LatentLM.from_backbone(backbones.load("tiny"), lora=LoraSettings(r=2))
    pretrained.attach(lm, method, 0)
    pretrained.save(liven(lm), method, tmp_path / "best", {}, "")
    model = load(tmp_path, weights="int8")
    assert not model.lm.has_adapter
    assert type(model.lm.decoder_layers()[0].self_attn.q_proj.weight) is not nn.Parameter
    asked = {"max_latents": 4, "max_completion_length": 4}
    # Batch mates change nothing here either.
    together = model.ask([example.question for example in EXAMPLES], **asked)
    alone = [model.ask(example.question, **asked) for example in EXAMPLES]
    assert [each.answer for each in together] == [each.answer for each in alone]


@needs_torchao
def test_a_model_without_linears_is_refused():
    with pytest.raises(
        ValueError,
        match="weights int8 does not fit GPT2LMHeadModel: linear layers, their sizes multiples of 1, hold 0 of",
    ):
        quantized.quantize(tiny_lm("gpt2"), "int8", CPU)


def test_wrong_values_are_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for weights, dtype, device, message in (
        ("int3", "float32", "cpu", "weights must be one of int8, int4, got 'int3'"),
        ("int4", "float32", "cpu", "weights int4 computes in bfloat16: give dtype bfloat16, not float32"),
        ("int8", "float32", "mps", "weights int8 runs on cpu and cuda, not on mps"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrained.load_for_inference("nowhere", dtype, device=device, weights=weights)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"weights int8 needs torchao: from your clone of colar, pip install '.\[quant\]'"
    ):
        pretrained.load_for_inference("nowhere", weights="int8")
    with pytest.raises(SystemExit):
        main(["generate", "nowhere", "How many?", "--weights", "int2"])
    assert "invalid choice: 'int2'" in capsys.readouterr().err
