"""Linears of 8 and 4 bits: near the plain model's numbers, trained above, refused in one line where they cannot run."""

import importlib.util
import weakref
from random import Random
from types import SimpleNamespace

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from torch import nn

from colar.ask import load
from colar.cli import main
from colar.methods import pretrained, registry
from colar.methods.base import Batch
from colar.model import backbones, quantized
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.recipe.schema import ModelConfig, Recipe
from colar.training.config import TrainingConfig

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install '.[quant]'"
)


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install bitsandbytes"
)


def hidden(lm):
    with torch.no_grad():
        return lm.hidden(lm.embed(IDS)).float()


@pytest.mark.parametrize(
    ("weights", "dtype", "most"),
    [
        ("int8", "float32", 0.03),
        ("int8", "bfloat16", 0.05),
        pytest.param("int4", "bfloat16", 0.4, marks=needs_torchao),
    ],
)
def test_only_linears_of_layers_are_quantised_and_little_changes(weights, dtype, most):
    lm = LatentLM.from_backbone(backbones.load("tiny", dtype)).eval()
    before = hidden(lm)
    quantized.quantize(lm, weights, CPU)
    plain = {
        name
        for name, module in lm.causal_lm.named_modules()
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter
    }
    assert plain == {"lm_head"}
    assert type(lm.causal_lm.get_input_embeddings().weight) is nn.Parameter
    error = (hidden(lm) - before).norm() / before.norm()
    assert 0 < error < most


@pytest.mark.parametrize("rows", [1, quantized.FEW_ROWS, quantized.FEW_ROWS + 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_the_product_with_the_nearest_of_255_numbers_a_row(rows, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(48, 32).to(dtype)
    linear.weight.data[3] = 0
    linear.weight.data[4] *= 1e3
    made = quantized.Int8Linear(linear)
    weight = linear.weight.detach().float()
    restored = made.weight.float() * made.scale.float()[:, None]
    # Scales are rounded to 8 bits, which may cut the largest number of a row by half of that.
    most = weight.abs().amax(1, keepdim=True)
    assert ((restored - weight).abs() <= most * (0.5 / 127 + 2**-9)).all()
    x = torch.randn(2, rows, 48, dtype=dtype)
    expected = x.bfloat16().float() @ restored.T + linear.bias.detach().float()
    with torch.no_grad():
        y = made(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("width", [72, 100])
def test_rows_that_the_int8_kernel_cannot_read_stay_as_they_are(width):
    """It returns nonsense for them, or kills the process."""
    layers = nn.ModuleDict({"wide": nn.Linear(64, width), "odd": nn.Linear(width, 64)})
    lm = SimpleNamespace(causal_lm=SimpleNamespace(base_model=layers), quantization=None)
    quantized.quantize(lm, "int8", CPU)
    assert [type(layers[name]) for name in ("wide", "odd")] == [quantized.Int8Linear, nn.Linear]


def test_each_linear_is_freed_before_the_next_is_made():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    alive = weakref.WeakSet(model)
    counts = []

    def made(linear):
        counts.append(len(alive))
        return nn.Identity()

    quantized._replace(model, made, lambda module: isinstance(module, nn.Linear))
    assert counts == [4, 3, 2, 1]


def test_a_quantised_model_is_not_saved(tmp_path):
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build("cot", {})
    pretrained.save(lm, method, tmp_path / "model", {}, "card")
    small, _ = pretrained.load_for_inference(tmp_path / "model", quantization="int8")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    with pytest.raises(
        ValueError, match="weights int8 cannot be saved: they are made when a checkpoint is loaded"
    ):
        pretrained.save(small, method, tmp_path / "model", {}, "card")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before


def test_int8_rows_do_not_depend_on_each_other():
    made = quantized.Int8Linear(nn.Linear(48, 32))
    x = torch.randn(33, 48)
    with torch.no_grad():
        assert torch.equal(made(x)[:1], made(x[:1]))


def test_an_adapter_is_merged_before_and_answers_come(tmp_path):
    method = registry.build("colar", {"sigma_e": 1.0})
    lm = LatentLM.from_backbone(backbones.load("tiny"), lora=LoraSettings(r=2))
    pretrained.attach(lm, method, 0)
    pretrained.save(liven(lm), method, tmp_path / "best", {}, "")
    model = load(tmp_path, weights="int8")
    assert not model.lm.has_adapter
    assert type(model.lm.decoder_layers()[0].self_attn.q_proj) is quantized.Int8Linear
    asked = {"max_latents": 4, "max_completion_length": 4}
    # Batch mates change nothing here either.
    together = model.ask([example.question for example in EXAMPLES], **asked)
    alone = [model.ask(example.question, **asked) for example in EXAMPLES]
    assert [each.answer for each in together] == [each.answer for each in alone]


def test_a_model_without_linears_is_refused():
    with pytest.raises(
        ValueError,
        match="weights int8 does not fit GPT2LMHeadModel: only 0 of",
    ):
        quantized.quantize(tiny_lm("gpt2"), "int8", CPU)


def test_wrong_values_are_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for weights, dtype, device, message in (
        ("int3", "float32", "cpu", "weights must be one of int8, int4, got 'int3'"),
        ("int4", "float32", "cpu", "weights int4 computes in bfloat16: give dtype bfloat16, not float32"),
        ("int8", "float32", "meta", "weights int8 runs on cpu and cuda, not on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrained.load_for_inference("nowhere", dtype, device=device, quantization=weights)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"weights int4 on cpu needs torchao: from your clone of colar, pip install '.\[quant\]'",
    ):
        pretrained.load_for_inference("nowhere", "bfloat16", device="cpu", quantization="int4")
    with pytest.raises(SystemExit):
        main(["generate", "nowhere", "How many?", "--weights", "int2"])
    assert "invalid choice: 'int2'" in capsys.readouterr().err


@needs_bitsandbytes
def test_an_adapter_trains_above_4_bits_and_loads_without_them(tmp_path):
    lora = LoraSettings(r=2, target_modules="all-linear")
    base = backbones.load("tiny")
    quantized.quantize_below_adapter(base.lm)
    lm = LatentLM.from_backbone(base, lora=lora)
    method = registry.build("colar", {"sigma_e": 1.0})
    pretrained.attach(lm, method, 0)
    layer = lm.decoder_layers()[0].self_attn.q_proj.get_base_layer()
    assert layer.weight.dtype == torch.uint8
    packed = layer.weight.clone()
    batch = Batch.collate([method.encode(lm.template, row, Random(0), 0) for row in EXAMPLES])
    optimiser = torch.optim.SGD([weight for weight in lm.parameters() if weight.requires_grad], lr=0.05)
    found = []
    for _ in range(4):
        optimiser.zero_grad()
        loss = method.loss(lm, batch)["ce"].mean()
        loss.backward()
        optimiser.step()
        found.append(loss.item())
        # A validation merges nothing: the weights would be rounded to 4 bits again.
        with lm.evaluating(), lm.merged():
            hidden(lm)
    assert found == sorted(found, reverse=True)
    assert torch.equal(layer.weight, packed)
    pretrained.save(lm.eval(), method, tmp_path / "best", {}, "")
    again = pretrained.load_for_training(tmp_path / "best", method, lora, "float32", 0, load_in_4bit=True)
    torch.testing.assert_close(hidden(again.eval()), hidden(lm))
    plain, _ = pretrained.load_for_inference(tmp_path / "best")
    error = (hidden(plain) - hidden(lm)).norm() / hidden(plain).norm()
    assert 0 < error < 0.4


def test_4_bits_are_refused_where_they_cannot_be_trained(monkeypatch):
    lora = LoraSettings(r=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="model.load_in_4bit needs model.lora: weights of 4 bits"):
        ModelConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match="model.load_in_4bit needs bitsandbytes: pip install bitsandbytes"):
        ModelConfig(load_in_4bit=True, lora=lora)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="model.load_in_4bit and training.fsdp exclude each other"):
        Recipe("out", model=ModelConfig(load_in_4bit=True, lora=lora), training=TrainingConfig(fsdp=True))
