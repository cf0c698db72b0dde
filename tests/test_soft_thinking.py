"""Soft Thinking of a CoT model: its thoughts by a loop over the vocabulary, and rows beside others that think in tokens."""

import dataclasses

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.cot import SOFT_TOKENS, SOFT_TOP_P, CotParams
from colar.methods.thinking import ThinkState

LIMITS = Decoding(max_latents=6, max_completion_length=4)
SAMPLED = Decoding(1.0, 0.9, 1.0, max_latents=6, max_completion_length=4)


@pytest.fixture(scope="module")
def model():
    # A rounding error grows where probabilities of random weights are fed back.
    lm = liven(tiny_lm("llama")).double()
    method = registry.build("cot")
    pretrained.attach(lm, method, seed=0)
    return lm, method


def requests(temperatures, decoding=LIMITS):
    return [
        Request(f"{i}/{t}", e.question, CotParams(t), decoding, seed=i, keep_latents=True)
        for i, e in enumerate(EXAMPLES)
        for t in temperatures
    ]


@torch.no_grad()
def naive_chain(lm, question, temperature):
    """(embeddings, likeliest tokens) of a greedy soft chain, one full forward a thought, and its answer's first token."""
    fed = [*lm.embed(torch.tensor(lm.template.question(question)))]
    thoughts, tokens = [], []
    for _ in range(LIMITS.max_latents):
        logits = lm.logits(lm.hidden(torch.stack(fed)[None])[0, -1]).double()
        if int(logits.argmax()) == lm.template.closing_id:
            break
        probabilities = (logits / temperature).softmax(-1).tolist()
        kept, mass = [], 0.0
        for v in sorted(range(len(probabilities)), key=lambda v: -probabilities[v])[:SOFT_TOKENS]:
            if mass < SOFT_TOP_P:
                kept.append(v)
                mass += probabilities[v]
        mixed = sum(probabilities[v] / mass * lm.embed(torch.tensor([v]))[0] for v in kept)
        thoughts.append(mixed)
        tokens.append(int(logits.argmax()))
        fed.append(mixed)
    fed.append(lm.embed(torch.tensor([lm.template.closing_id]))[0])
    return thoughts, tokens, int(lm.logits(lm.hidden(torch.stack(fed)[None])[0, -1]).argmax())


@pytest.mark.parametrize("temperature", [0.3, 0.6, 2.0])
def test_a_soft_chain_is_that_of_a_loop(model, temperature):
    lm, method = model
    found = Engine(lm, method, 4).generate(requests([temperature]))
    lengths, mixed = set(), 0.0
    for done, example in zip(found, EXAMPLES, strict=True):
        thoughts, tokens, first = naive_chain(lm, example.question, temperature)
        assert (done.thought_ids, done.length) == (tokens, len(thoughts))
        assert (done.token_ids or [lm.template.eos_id])[0] == first
        lengths.add(done.length)
        if thoughts:
            torch.testing.assert_close(done.latents, torch.stack(thoughts), rtol=1e-3, atol=1e-4)
            hard = lm.embed(torch.tensor(tokens))
            mixed = max(mixed, float((done.latents - hard).abs().max()))
    assert len(lengths) > 1
    assert mixed > 0.1


@pytest.mark.parametrize("decoding", [LIMITS, SAMPLED], ids=["greedy", "sampled"])
def test_the_engine_equals_the_reference_with_both_ways_in_one_batch(model, decoding):
    lm, method = model
    asked = requests([0, 0.6, 0.2], decoding)
    for found in (Engine(lm, method, 4).generate(asked), Engine(lm, method, 64).generate(asked[::-1])[::-1]):
        for request, done in zip(asked, found, strict=True):
            expected = reference.complete(lm, method, request)
            assert (done.thought_ids, done.token_ids) == (expected.thought_ids, expected.token_ids)
            assert (done.length, done.reason) == (expected.length, expected.reason)
            if expected.latents is not None:
                torch.testing.assert_close(done.latents, expected.latents, rtol=1e-3, atol=1e-4)


def test_thinking_is_the_same_however_the_answer_is_decoded(model):
    lm, method = model
    greedy, sampled = (Engine(lm, method, 8).generate(requests([0.6], d)) for d in (LIMITS, SAMPLED))
    assert [d.thought_ids for d in greedy] == [d.thought_ids for d in sampled]
    assert [d.token_ids for d in greedy] != [d.token_ids for d in sampled]


def state(lm, logits, temperatures, decoding, seed):
    asked = [Request(str(i), "q", CotParams(t), decoding, seed=seed + i) for i, t in enumerate(temperatures)]
    hidden = torch.zeros(len(asked), lm.width, dtype=torch.float64)
    return ThinkState.of(asked, hidden, torch.zeros(len(asked), dtype=torch.int64), lambda _: logits, {})


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    temperatures=st.lists(st.sampled_from([0, 0.01, 0.3, 0.6, 1, 100]), min_size=1, max_size=6),
    decoding=st.sampled_from([LIMITS, SAMPLED]),
)
def test_a_row_is_the_same_alone_and_beside_any_others(model, seed, temperatures, decoding):
    """Bit for bit: rows without a temperature too, which alone mix nothing."""
    lm, method = model
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(temperatures), lm.vocabulary_size, generator=generator) * 4
    logits[0, lm.template.closing_id] = 12.0
    together = method.think(lm, state(lm, logits, temperatures, decoding, seed))
    for i, temperature in enumerate(temperatures):
        alone = method.think(lm, state(lm, logits[i : i + 1], [temperature], decoding, seed + i))
        assert torch.equal(alone.embeds[0], together.embeds[i])
        assert (alone.done[0], alone.token_ids[0]) == (together.done[i], together.token_ids[i])
        assert torch.equal(alone.info["logp"][0], together.info["logp"][i])
        if temperature == 0:
            assert torch.equal(alone.embeds, lm.embed(alone.token_ids))


def test_near_0_it_is_greedy_cot(model):
    lm, method = model
    soft, hard = (Engine(lm, method, 8).generate(requests([t])) for t in (0.01, 0))
    assert [(d.thought_ids, d.token_ids) for d in soft] == [(d.thought_ids, d.token_ids) for d in hard]


@pytest.mark.parametrize("value", [-0.1, 0.001, 101, float("nan"), "0.6", None, True])
def test_a_temperature_that_is_none(value):
    with pytest.raises(ValueError, match="soft_temperature (is blank .*: it )?must be"):
        registry.make_params(registry.build("cot"), {"soft_temperature": value})


@pytest.mark.parametrize("name", ["no_cot", "icot", "tokenskip"])
def test_methods_over_cot_have_no_such_value(name):
    method = registry.build(name)
    with pytest.raises(ValueError, match=f"method {name} has no soft_temperature"):
        registry.make_params(method, {"soft_temperature": 0.6})
    assert "soft_temperature" not in {field.name for field in dataclasses.fields(method.Params)}
