"""Packed linear layers compute what plain ones do, share all parameters, and follow them when they are trained."""

import pytest
import torch
from families import EXAMPLES, FAMILIES, liven, tiny_lm
from torch import nn

from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.engine.runner import PackedLinear, can_pack, pack_again, packed_copy
from colar.methods import pretrained, registry
from colar.ops import devices

pytestmark = pytest.mark.skipif(
    not devices.computes_bfloat16(torch.device("cpu")),
    reason="this CPU's oneDNN does not compute in bfloat16",
)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3,), (16,), (40,), (2, 5), (7, 1), (0,)])
def test_a_packed_layer_computes_what_the_layer_does(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias).bfloat16()
    x = torch.randn(*shape, 24).bfloat16()
    with torch.no_grad():
        want = nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float() if bias else None)
        found = PackedLinear(linear)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_copy_shares_parameters_and_leaves_the_model_alone(family):
    lm = liven(tiny_lm(family)).bfloat16().train()
    kinds = [type(module) for module in lm.modules()]
    assert can_pack(lm)
    twin = packed_copy(lm)
    assert [type(module) for module in lm.modules()] == kinds
    assert lm.training
    assert not twin.training
    mine = {id(parameter) for parameter in lm.parameters()}
    assert {id(parameter) for parameter in twin.parameters()} == mine
    assert twin.tokenizer is lm.tokenizer
    assert twin.template is lm.template
    lm.eval()
    with torch.no_grad():
        want, found = (model.logits(model.hidden(model.embed(IDS))) for model in (lm, twin))
    torch.testing.assert_close(found, want, rtol=0.05, atol=0.05 * want.abs().max().item())


def test_training_in_place_is_followed_after_a_refresh():
    lm = liven(tiny_lm("llama")).bfloat16().eval()
    twin = packed_copy(lm)
    weight = lm.causal_lm.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        before = twin.hidden(twin.embed(IDS))
        weight.mul_(-1)
        first = [module.packed for module in twin.modules() if isinstance(module, PackedLinear)]
        pack_again(twin)
        again = [module.packed for module in twin.modules() if isinstance(module, PackedLinear)]
        after, want = twin.hidden(twin.embed(IDS)), lm.hidden(lm.embed(IDS))
    assert sum(a is not b for a, b in zip(first, again, strict=True)) == 1  # only what was changed
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, want, rtol=0.05, atol=0.05 * want.abs().max().item())


def test_a_fused_optimiser_is_followed_too():
    """It changes weights without counting: their counter alone would say that nothing happened."""
    lm = liven(tiny_lm("llama")).bfloat16().eval()
    twin = packed_copy(lm)
    weight = lm.causal_lm.model.layers[0].mlp.up_proj.weight
    weight.grad = torch.randn_like(weight)
    before = weight._version
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    assert weight._version == before
    with torch.no_grad():
        pack_again(twin)
        after, want = twin.hidden(twin.embed(IDS)), lm.hidden(lm.embed(IDS))
    torch.testing.assert_close(after, want, rtol=0.05, atol=0.05 * want.abs().max().item())


def test_nothing_is_packed_where_there_is_nothing_to_gain():
    assert not can_pack(tiny_lm("llama"))  # float32


def test_the_engine_packs_what_it_compiles(monkeypatch):
    """Without a compiler the packed layers alone are left; the same answers as plain bfloat16 to rounding."""
    monkeypatch.setattr(torch, "compile", lambda run: run)
    lm = liven(tiny_lm("llama")).bfloat16().eval()
    method = registry.build("cot")
    pretrained.attach(lm, method, 0)
    requests = [
        Request(e.id, e.question, method.Params(), Decoding(max_latents=4, max_completion_length=3))
        for e in EXAMPLES
    ]
    engine = Engine(lm, method, compile=True)
    assert engine.lm is not lm
    assert Engine(lm, method).lm is lm
    plain = Engine(lm, method).generate(requests)
    found = engine.generate(requests)
    same = sum(
        a.token_ids == b.token_ids and a.thought_ids == b.thought_ids
        for a, b in zip(plain, found, strict=True)
    )
    assert same >= len(requests) - 1
