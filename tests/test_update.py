"""An update of SmolLM2-135M as a GPU sees it: operations that it is sent, and memory that it keeps.

The operations are those below autograd, without views and bare allocations: each is about one kernel. All layers are
alike, so 30 of them have the operations and bytes of 29 times the difference between two layers and one, and of one.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from functools import partialmethod
from random import Random
from typing import Any

import pytest
import torch
from families import EXAMPLES, OWN_LOSS, build_tokenizer, tiny_lm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from colar.methods import pretrained, registry
from colar.model.backbones import Backbone
from colar.model.fused import fused
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training import preflight
from colar.training.objective import Objective, collate

LAYERS = 30
WIDTH = 576
ALL_LINEARS = LoraSettings(r=16, lora_alpha=32, target_modules="all-linear")


CALLS = re.compile(r"^ +(?:buf\d+ = )?(?:extern_kernels\.|cpp_fused|torch\.ops\.)[\w.]+\(", re.MULTILINE)
"""Kernels in the code that inductor writes."""


class Operations(TorchDispatchMode):
    """Counts operations by name, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name != "_unsafe_view" and not name.startswith("empty"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def made(layers: int, lora: LoraSettings | None, width: int = WIDTH) -> tuple[Objective, dict[str, Tensor]]:
    """The loss of a model of SmolLM2's shape with a small vocabulary, and a batch."""
    tokenizer = build_tokenizer("llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    backbone = LlamaForCausalLM(config)
    # Of frozen weights; those that are trained stay in float32.
    backbone = backbone if lora is None else backbone.bfloat16()
    lm = LatentLM.from_backbone(Backbone("smollm2-shape", backbone, tokenizer), lora=lora)
    method = registry.build("cot", {})
    pretrained.attach(lm, method, seed=1)
    list(method.prepare(lm, EXAMPLES))
    rows = [method.encode(lm.template, row, Random(0), 0.0) for row in EXAMPLES[:3]]
    lm.why_no_trees()  # as before a run
    return Objective(lm, method).train(), collate(rows)


@functools.cache
def operations(layers: int, lora: LoraSettings | None) -> int:
    """Of forward, backward and AdamW, which is fused as on a GPU. Widths do not change them."""
    objective, batch = made(layers, lora, width=72)
    trained = [weight for weight in objective.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    with fused(objective.lm.causal_lm):
        for _ in range(2):  # the second one: AdamW makes its moments in the first
            objective.zero_grad()
            with Operations() as seen:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = objective(**batch)["loss"]
                loss.backward()
                optimizer.step()
    return sum(seen.counts.values())


def bytes_kept(layers: int, lora: LoraSettings | None) -> float:
    """Bytes that a forward keeps for the backward pass, weights left out, by position that goes through the model."""
    objective, batch = made(layers, lora)
    weights = {weight.untyped_storage().data_ptr() for weight in objective.parameters()}
    kept: dict[int, Tensor] = {}
    positions = 0

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept.setdefault(storage.data_ptr(), tensor)
        return tensor

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal positions
        positions += kwargs["inputs_embeds"].shape[:2].numel()

    objective.lm.causal_lm.base_model.register_forward_pre_hook(count, with_kwargs=True)
    with (
        fused(objective.lm.causal_lm),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        objective(**batch)
    # Copies of weights in bfloat16 do not grow with the positions.
    sizes = [t.untyped_storage().nbytes() for t in kept.values() if t.numel() % positions == 0 or t.dim() > 2]
    return sum(sizes) / positions


def of_all_layers(one: float, two: float) -> float:
    return one + (LAYERS - 1) * (two - one)


LORA = pytest.param(ALL_LINEARS, id="lora")
ALL_WEIGHTS = pytest.param(None, id="all-weights")


@pytest.mark.parametrize(("lora", "most"), [(*LORA.values, 5700), (*ALL_WEIGHTS.values, 3900)])
def test_operations_of_an_update(lora: LoraSettings | None, most: int) -> None:
    assert of_all_layers(operations(1, lora), operations(2, lora)) <= most


@pytest.mark.parametrize(("lora", "most"), [(*LORA.values, 0.53e6), (*ALL_WEIGHTS.values, 0.7e6)])
def test_bytes_that_a_position_keeps(lora: LoraSettings | None, most: float) -> None:
    assert of_all_layers(bytes_kept(1, lora), bytes_kept(2, lora)) <= most


@pytest.mark.parametrize("lora", [LORA, ALL_WEIGHTS])
def test_fused_layers_learn_the_same(lora: LoraSettings | None) -> None:
    objective, batch = made(2, lora, width=72)
    for name, weight in objective.named_parameters():
        # An adapter that does something.
        weight.data = torch.randn(weight.shape) * 0.1 if "lora_B" in name else weight.data

    def update() -> tuple[Tensor, Tensor]:
        objective.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = objective(**batch)["loss"]
        loss.backward()
        return loss.detach(), torch.cat(
            [w.grad.flatten() for w in objective.parameters() if w.grad is not None]
        )

    loss, slope = update()
    with fused(objective.lm.causal_lm):
        fused_loss, fused_slope = update()
    # Forward the operations are the same; backward they are summed in another order.
    assert fused_loss == loss
    assert (fused_slope - slope).norm() < 0.005 * slope.norm()
    again, slope_again = update()
    assert torch.equal(slope, slope_again), "the layers are transformers' own again"
    assert loss == again


@pytest.mark.parametrize(("family", "replaced"), [("llama", 7), ("qwen2", 7), ("gemma3", 3), ("gpt2", 0)])
def test_only_modules_that_compute_the_same_are_replaced(family: str, replaced: int) -> None:
    lm = tiny_lm(family)
    before = lm.hidden(lm.embed(torch.arange(12)[None]))
    with fused(lm.causal_lm):
        # Gemma's norm multiplies by 1 + weight.
        assert sum("forward" in vars(module) for module in lm.modules()) == replaced
        assert torch.allclose(lm.hidden(lm.embed(torch.arange(12)[None])), before, atol=1e-5)
    assert not any("forward" in vars(module) for module in lm.modules())


@pytest.mark.parametrize(("lora", "most"), [(*LORA.values, 2900), (*ALL_WEIGHTS.values, 1500)])
def test_kernels_of_a_compiled_update(
    lora: LoraSettings | None, most: int, plain_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 times the calls in a compiled layer's code, forward and backward, and the operations outside of the layers.

    The code is a CPU's: of a GPU's kernels some are fused in other ways. It is counted, and its kernels compute nothing:
    the C++ compiler would take most of a minute.
    """
    # Seconds, which collecting tests need not take.
    from torch._inductor import config as inductor_config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *source: lambda *buffers: None)
    objective, batch = made(1, lora, width=72)

    def update() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective(**batch)["loss"]
        loss.backward()

    # Symbolic lengths would take three times as long to trace, and add a kernel or two.
    compiling = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **_: compiling(layer, dynamic=False))
    with preflight.prepared(objective.lm, compiled=True), inductor_config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(update)
    assert len(codes) == 2
    of_a_layer = sum(len(CALLS.findall(code.partition("def call(")[2])) for code in codes)
    one, two = operations(1, lora), operations(2, lora)
    assert of_a_layer > 30, of_a_layer
    assert LAYERS * of_a_layer + one - (two - one) <= most


def test_compiled_layers_take_any_length_without_another_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are symbolic: after each method's first batches nothing is compiled again, and the losses are the same.

    Graphs are traced, and run as they are: it is their number that counts. All methods train one model, whose layers
    are traced for the first.
    """
    compiling = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(compiling, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traced = 0
    methods = {
        "thresholds": registry.build("sequential", {"confidence_thresholds": [0.8]}),
        **{name: registry.build(name, {}) for name in OWN_LOSS},
    }
    lm = tiny_lm("llama")
    for name, method in methods.items():
        pretrained.attach(lm, method, seed=1)
        examples = list(method.prepare(lm, EXAMPLES))
        objective = Objective(lm, method).train()
        rows = [method.encode(lm.template, row, Random(0), 5.0) for row in examples]
        batches = [collate(rows[a:b]) for a, b in ((0, 6), (1, 3), (3, 6), (1, 4), (0, 3), (2, 6))]
        plain = losses(objective, batches)
        names, expected = list(lm.state_dict()), gradient(objective, batches[0])
        with preflight.prepared(lm, compiled=True):
            assert list(lm.state_dict()) == names
            first = losses(objective, batches[:3])
            # All methods have the layers of the first one.
            traced = traced or torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert traced, name
            torch.testing.assert_close(gradient(objective, batches[0]), expected, rtol=1e-3, atol=1e-5)
            torch._dynamo.utils.counters.clear()
            assert first + losses(objective, batches[3:]) == pytest.approx(plain, rel=1e-4), name
        assert not torch._dynamo.utils.counters["stats"]["unique_graphs"], name
        assert all(layer._compiled_call_impl is None for layer in lm.decoder_layers())
        torch.testing.assert_close(gradient(objective, batches[0]), expected)


def gradient(objective: Objective, batch: dict[str, Tensor]) -> Tensor:
    objective.zero_grad()
    objective(**batch)["loss"].backward()
    return objective.lm.decoder_layers()[0].mlp.up_proj.weight.grad.clone()


def losses(objective: Objective, batches: list[dict[str, Tensor]]) -> list[float]:
    found = []
    for batch in batches:
        loss = objective(**batch)["loss"]
        loss.backward()
        found.append(float(loss.detach()))
    return found


def test_an_mlp_that_drops_out_is_left_as_it_is() -> None:
    """It computes the same where the two are compared, which is without dropout."""
    config = AutoConfig.for_model(
        "seed_oss",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        residual_dropout=0.1,
    )
    lm = AutoModelForCausalLM.from_config(config).train()
    with fused(lm):
        assert "forward" in vars(lm.model.norm)
        assert "forward" not in vars(lm.model.layers[0].mlp)
