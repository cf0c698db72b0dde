"""Latents read as tokens: an embedding is nearest to itself, a merged group to its members."""

import pytest
import torch
from families import tiny_lm

from colar.engine import reference
from colar.engine.request import Decoding, Request
from colar.look import retrieval
from colar.methods import pretrained, registry
from colar.ops.compress import compress


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_embedding_is_nearest_to_its_own_token_and_a_group_to_its_members(family):
    lm = tiny_lm(family)
    ids = torch.tensor([[30, 41, 52, 63]])
    with torch.no_grad():
        latents = compress(lm.embed(ids), torch.tensor([[2, 2]]))
        own = retrieval.nearest_tokens(lm, lm.embed(ids)[0], 3)
    assert [near[0].token_id for near in own] == [30, 41, 52, 63]
    assert all(near[0].cosine == pytest.approx(1, abs=1e-5) for near in own)
    assert own[0][0].token == lm.template.token(30)
    merged = retrieval.nearest_tokens(lm, latents[0], 2)
    assert [{n.token_id for n in near} for near in merged] == [{30, 41}, {52, 63}]
    by_hand = torch.cosine_similarity(latents[0, 0], lm.embed(torch.tensor(merged[0][0].token_id)), dim=0)
    assert merged[0][0].cosine == pytest.approx(by_hand.item(), abs=1e-5)


def test_a_chain_is_read_as_its_tokens_and_latents_by_their_neighbours():
    lm = tiny_lm("llama")
    for name in ("cot", "colar"):
        method = registry.build(name)
        pretrained.attach(lm, method, 0)
        method.prepare(lm, [])
        short = Decoding(max_latents=3, max_completion_length=2)
        request = Request("a", "How many?", method.Params(), short, keep_latents=True)
        completion = reference.complete(lm, method, request)
        readings = retrieval.read(lm, completion, 4)
        assert len(readings) == completion.length == 3
        if name == "cot":
            assert [r.token for r in readings] == [lm.template.token(i) for i in completion.thought_ids]
        else:
            assert all(r.token is None and len(r.neighbours) == 4 and r.sigma > 0 for r in readings)
            assert all(0 <= r.stop_probability <= 1 for r in readings)
    assert (
        retrieval.read(lm, reference.complete(lm, method, Request("a", "q", method.Params(), short)), 4) == []
    )
