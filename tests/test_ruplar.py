"""RuPLaR: the prior by its rule in words, every term by one full forward, soft tokens by a loop over the vocabulary."""

import dataclasses
import math
from random import Random

import pytest
import torch
from families import EXAMPLES, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from colar.data.example import Example
from colar.engine.request import GREEDY, Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch
from colar.methods.ruplar import LIKELIEST, RuplarConfig, divergence, prior_loss, soft_token
from colar.methods.thinking import ThinkState
from colar.model.latent_lm import LatentLM

FAMILIES = ("llama", "gemma3", "gpt2")
ROWS = (
    *EXAMPLES,
    Example("r/0", "Ann has pens?", ("Ann has <<12*5=60>> pens", "eggs are there", "3+4"), "60"),
    Example("r/1", "Half of 9?", ("<<9/2=4.5>>", "", "4.5=4.5=4.5"), "4.5"),
)
"""Steps with words, with words alone, without "=", with two of them, and an empty one."""


def build(family="llama", digits=True, **config):
    lm = tiny_lm(family, digits=digits)
    method = registry.build("ruplar", config)
    pretrained.attach(lm, method, seed=3)
    return lm, method


def encode(lm, method, examples=ROWS):
    return [method.encode(lm.template, example, Random(i), 0.0) for i, example in enumerate(examples)]


def naive_prior(texts, result_share):
    """Text of each of a step's tokens -> the weight of each: the rule as its docstring has it, token by token."""
    n = len(texts)
    results = []
    for i in range(n):
        before = [text for text in texts[:i] if "=" in text]
        after = [text for text in texts[i:] if "=" in text]
        if before and not after:
            results.append(i)
    weights = []
    for i in range(n):
        if not results:
            weights.append(1 / n)
        else:
            weights.append((1 - result_share) / n + (result_share / len(results) if i in results else 0))
    return weights


def test_the_rule_by_hand():
    """The figure's step, from the paper: 600 * 30 / 100 = 180, a digit a token here."""
    lm, method = build()
    example = Example("x", "q?", ("<<600*3=18>>", "Ann has 2+2"), "1")
    row = method.encode(lm.template, example, Random(0), 0.0)
    texts = [[lm.template.token(token) for token in step] for step in row.steps]
    assert texts == [[*"600*3=18"], [*"2+2"]]
    prior, sizes = method.priors(lm, Batch.collate([row]))
    assert sizes.tolist() == [[8, 3]]
    first = [0.2 / 8] * 6 + [0.2 / 8 + 0.8 / 2] * 2
    assert prior[0].tolist() == [pytest.approx([*first, 0, 0, 0]), pytest.approx([0.0] * 8 + [1 / 3] * 3)]


def test_steps_of_words_keep_their_tokens_and_empty_ones_are_no_thoughts():
    lm, method = build()
    words = Example("w", "q?", ("Ann has pens.", "", "eggs", "a well-known rule - yes."), "1")
    row = method.encode(lm.template, words, Random(0), 0.0)
    whole = lm.template.steps(words.steps)
    assert row.steps == [step for step in whole if step]
    empty = method.encode(lm.template, dataclasses.replace(words, steps=()), Random(0), 0.0)
    assert empty.steps == []


def test_a_full_stop_is_no_part_of_a_result():
    lm, method = build(digits=True)
    step = "She pays 5 + 3 = 8 dollars."
    row = method.encode(lm.template, Example("w", "q?", (step,), "8"), Random(0), 0.0)
    assert [lm.tokenizer.decode(token).strip() for token in row.steps[0]] == ["5", "+", "3", "=", "8"]


@pytest.mark.parametrize("share", [0.8, 0.0, 1.0])
@pytest.mark.parametrize("digits", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_priors_are_those_of_a_loop_over_texts(family, digits, share):
    lm, method = build(family, digits, result_share=share)
    rows = encode(lm, method)
    prior, sizes = method.priors(lm, Batch.collate(rows))
    assert any(len(row.steps) > 1 for row in rows)
    for b, row in enumerate(rows):
        assert [n for n in sizes[b].tolist() if n] == list(map(len, row.steps)), "a step is a group"
        start = 0
        for k, step in enumerate(row.steps):
            texts = [lm.template.token(token) for token in step]
            expected = torch.zeros(prior.shape[2])
            expected[start : start + len(step)] = torch.tensor(naive_prior(texts, share))
            torch.testing.assert_close(prior[b, k], expected)
            start += len(step)
        assert not prior[b, len(row.steps) :].any()
    totals = prior.sum(-1)
    torch.testing.assert_close(totals[totals > 0], torch.ones(int((sizes > 0).sum())))


@torch.no_grad()
def naive_terms(lm, row, config):
    """One row's terms: dictionaries over the vocabulary, Hugging Face's own forward, no batch."""
    embed = lambda token: lm.embed(torch.tensor([token]))[0]  # noqa: E731
    thoughts, priors = [], []
    for step in row.steps:
        prior = {}
        for token, weight in zip(
            step, naive_prior([lm.template.token(t) for t in step], config.result_share), strict=True
        ):
            prior[token] = prior.get(token, 0.0) + weight
        priors.append(prior)
        thoughts.append(sum(weight * embed(token) for token, weight in prior.items()))
    fed = [*map(embed, row.question), *thoughts, *map(embed, row.answer)]
    output = lm.causal_lm(inputs_embeds=torch.stack(fed)[None], output_hidden_states=True)
    log_probs, hidden = output.logits[0].float().log_softmax(-1), output.hidden_states[-1][0].float()
    opening = len(row.question) - 1
    answer = [-log_probs[opening + len(thoughts) + i, token] for i, token in enumerate(row.answer)]
    kls, apart = [], []
    question = hidden[opening - 1].softmax(-1)
    for k, prior in enumerate(priors):
        kls.append(sum(p * (math.log(p) - log_probs[opening + k, v]) for v, p in prior.items() if p > 0))
        thought = hidden[opening + 1 + k].softmax(-1)
        apart.append(sum(q * (q.log() - z.log()) for q, z in zip(question, thought, strict=True)))
    zero = torch.tensor(0.0)
    return (
        torch.stack(answer).mean(),
        torch.stack(kls).mean() if kls else zero,
        torch.stack(apart).mean() if apart else zero,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_terms_are_those_of_one_full_forward(family):
    config = {"result_share": 0.7, "kl_weight": 2.0, "align_weight": 0.5}
    lm, method = build(family, **config)
    rows = encode(lm, method)
    found = method.loss(lm, Batch.collate(rows))
    close = {"rtol": 1e-3, "atol": 1e-4}
    for b, row in enumerate(rows):
        ce, kl, align = naive_terms(lm, row, method.config)
        torch.testing.assert_close(found["ce"][b], ce, **close)
        torch.testing.assert_close(found["kl"][b], 2 * kl, **close)
        torch.testing.assert_close(found["align"][b], 0.5 * align, **close)
        assert (kl > 0) == bool(row.steps)


def test_the_divergence_is_0_where_the_model_has_the_prior():
    """An LM head that gives exactly the prior: 1 and 2 with a half each, of which 1 stands there twice."""
    lm, _ = build()
    V = lm.vocabulary_size
    logits = torch.full((1, 1, V), -1e9)
    logits[0, 0, 1], logits[0, 0, 2] = math.log(0.5), math.log(0.5)
    lm.logits = lambda hidden, part=None: hidden
    lm.reduce_logits = lambda reduce, hidden, *columns: reduce(hidden, *columns)
    prior, chain = torch.tensor([[[0.25, 0.5, 0.25]]]), torch.tensor([[1, 2, 1]])
    assert prior_loss(lm, logits, chain, prior).item() == pytest.approx(0.0, abs=1e-6)
    # One token with all of the prior: -log(1/2).
    assert prior_loss(lm, logits, chain, torch.tensor([[[0.0, 1.0, 0.0]]])).item() == pytest.approx(
        math.log(2)
    )


def test_alignment_by_hand():
    """softmax of (log 3, 0) is (3/4, 1/4); of (0, 0), halves."""
    question, thoughts = (
        torch.tensor([[[math.log(3), 0.0]]]),
        torch.tensor([[[0.0, 0.0], [math.log(3), 0.0]]]),
    )
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert divergence(question, thoughts)[0].tolist() == pytest.approx([expected, 0.0], abs=1e-6)


@settings(deadline=None, max_examples=25)
@given(order=st.permutations(range(len(ROWS))), n=st.integers(1, len(ROWS)))
def test_neither_order_nor_batch_mates_change_a_row(lm_and_terms, order, n):
    lm, method, rows, expected = lm_and_terms
    found = method.loss(lm, Batch.collate([rows[i] for i in order[:n]]))
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name][list(order[:n])], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def lm_and_terms():
    lm, method = build()
    rows = encode(lm, method)
    with torch.no_grad():
        return lm, method, rows, method.loss(lm, Batch.collate(rows))


# Thinking


def think_state(lm: LatentLM, logits, decoding=GREEDY, seed=0, step=0):
    """A state whose LM head gives these logits."""
    requests = [Request(str(i), "q", decoding=decoding, seed=seed + i) for i in range(len(logits))]
    hidden = torch.zeros(len(logits), lm.width)
    return ThinkState.of(requests, hidden, torch.full((len(logits),), step), lambda _: logits, {})


def naive_soft(lm, logits, n):
    """A sum over tokens, the likeliest first, of one row."""
    probabilities = logits.double().softmax(-1).tolist()
    likeliest = sorted(range(len(logits)), key=lambda v: -probabilities[v])[:n]
    kept = {token: probabilities[token] for token in likeliest}
    return sum(
        p / sum(kept.values()) * lm.embed(torch.tensor([v]))[0].double() for v, p in kept.items()
    ).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thought_is_the_likeliest_tokens_mixed(family):
    lm, method = build(family)
    logits = torch.randn(3, lm.vocabulary_size, generator=torch.Generator().manual_seed(0)) * 3
    logits[1, lm.template.separator_id] = 20.0
    thought = method.think(lm, think_state(lm, logits))
    assert thought.done.tolist() == [False, True, False]
    assert thought.token_ids.tolist() == [-1, -1, -1]
    for b in range(3):
        torch.testing.assert_close(
            thought.embeds[b], naive_soft(lm, logits[b], LIKELIEST), rtol=1e-4, atol=1e-5
        )
    stop = logits.softmax(-1)[:, lm.template.separator_id]
    torch.testing.assert_close(thought.info["stop_probability"], stop)


@pytest.fixture(scope="module")
def lm():
    return tiny_lm("llama")


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12))
def test_a_soft_token_is_that_of_a_loop_in_any_batch(lm, seed, n):
    logits = torch.randn(4, lm.vocabulary_size, generator=torch.Generator().manual_seed(seed)) * 4
    found = soft_token(lm, logits, n)
    torch.testing.assert_close(found[2:], soft_token(lm, logits[2:], n))
    torch.testing.assert_close(found[0], naive_soft(lm, logits[0], n), rtol=1e-3, atol=1e-4)


def test_one_token_is_its_embedding(lm):
    logits = torch.randn(2, lm.vocabulary_size)
    assert torch.equal(soft_token(lm, logits, 1), lm.embed(logits.argmax(-1)))


def test_the_stop_is_drawn_by_the_rows_own_noise():
    """At a probability of a half: about half of 400 seeds stop, each as it does alone, and greedy rows as argmax has it."""
    lm, method = build()
    other = 7 if lm.template.separator_id != 7 else 8
    logits = torch.full((400, lm.vocabulary_size), -30.0)
    logits[:, [other, lm.template.separator_id]] = torch.tensor([0.0, 0.01])
    sampled = Decoding(1.0, 1.0, 1.0)
    done = method.think(lm, think_state(lm, logits, sampled)).done
    assert 150 < int(done.sum()) < 250
    for i in range(0, 400, 57):
        alone = method.think(lm, think_state(lm, logits[:1], sampled, seed=i))
        assert bool(alone.done) == bool(done[i])
    later = method.think(lm, think_state(lm, logits, sampled, step=1)).done
    assert not torch.equal(later, done)
    assert method.think(lm, think_state(lm, logits)).done.all()


def test_the_defaults_are_the_papers():
    assert RuplarConfig() == RuplarConfig(0.8, 1.0, 1.0), "the paper's"
