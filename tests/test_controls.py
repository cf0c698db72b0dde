"""Thoughts replaced by others: what is fed, and that a model which reads its latents is hurt by it."""

import dataclasses
from random import Random

import pytest
import torch
from families import EXAMPLES, tiny_lm

from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.evaluation import controls
from colar.evaluation.evaluate import AnswerSettings, EvaluatedModel, evaluate, make_grid, make_request
from colar.files import read_jsonl
from colar.methods import pretrained, registry
from colar.methods.base import Batch

LIMITS = Decoding(max_latents=8, max_completion_length=4)
METHODS = ("cot", "colar", "coconut", "distill", "pause", "ruplar")


def build(name, family="llama", **config):
    lm = tiny_lm(family)
    method = registry.build(name, config)
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    # A rounding error grows where probabilities of random weights are fed back.
    return (lm.double() if name == "ruplar" else lm), method


def requests_for(method, decoding=LIMITS):
    return [
        Request(e.id, e.question, method.Params(), decoding, seed=1000 - 7 * i, keep_latents=True)
        for i, e in enumerate(EXAMPLES)
    ]


def answers(lm, method, requests, batch=3):
    return Engine(lm, method, batch).generate(requests)


def control(kind, lm, method, requests):
    """The method with its thoughts replaced, or, for the kind own, fed again."""
    own = controls.thoughts_of(lm, answers(lm, method, requests))
    replaced = own if kind == "own" else controls.KINDS[kind](own, requests)
    return controls.given_thoughts(method, requests, replaced)


@pytest.mark.parametrize(
    ("name", "sampled"), [(name, name in ("cot", "colar", "ruplar")) for name in METHODS]
)
def test_its_own_thoughts_give_its_own_answers(name, sampled):
    lm, method = build(name)
    decoding = dataclasses.replace(LIMITS, temperature=1.0, latent_temperature=1.0) if sampled else LIMITS
    requests = requests_for(method, decoding)
    before = answers(lm, method, requests)
    for mine, theirs in zip(answers(lm, control("own", lm, method, requests), requests), before, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.length == theirs.length
    assert sum(completion.length for completion in before) > len(before)


@pytest.mark.parametrize("name", ["cot", "colar", "pause"])
def test_what_each_control_feeds(name):
    lm, method = build(name)
    requests = requests_for(method)
    own = answers(lm, method, requests)

    def fed(kind):
        return answers(lm, control(kind, lm, method, requests), requests, batch=4)

    for done, mine in zip(fed("zeroed"), own, strict=True):
        assert done.length == mine.length
        assert done.latents is None or not done.latents.any()
    for done, mine in zip(fed("halved"), own, strict=True):
        assert done.length == -(-mine.length // 2)
        if done.length:
            torch.testing.assert_close(done.latents, mine.latents[: done.length], rtol=1e-3, atol=1e-3)
    sources = []
    for r, done in enumerate(fed("shuffled")):
        same = [
            s
            for s, other in enumerate(own)
            if other.length == done.length and torch.allclose(done.latents, other.latents, atol=1e-2)
        ]
        sources.append(next((s for s in same if s != r), None))
    assert None not in sources
    assert name == "pause" or sorted(sources) == list(range(len(own))), "each one's once, and never to itself"


def test_samples_of_one_question_never_get_each_others():
    lm, method = build("coconut")
    requests = [
        Request(f"{e.id}/{i}", e.question, decoding=LIMITS, seed=10 * i + j, keep_latents=True)
        for j, e in enumerate(EXAMPLES[:3])
        for i in range(3 - j)
    ]
    own = controls.thoughts_of(lm, Engine(lm, method, 32).generate(requests))
    marked = dataclasses.replace(
        own, embeds_RKD=torch.arange(len(requests)).float()[:, None, None].expand(-1, 6, 32)
    )
    for turn in range(5):
        # Other questions are shuffled otherwise.
        asked = [dataclasses.replace(each, question=f"{each.question} {turn}") for each in requests]
        found = controls.shuffled(marked, asked).embeds_RKD[:, 0, 0].long().tolist()
        for request, source in zip(asked, found, strict=True):
            assert request.question != asked[source].question


def test_errors_name_what_is_wrong():
    lm, method = build("coconut")
    requests = requests_for(method)
    with pytest.raises(ValueError, match="there is only one"):
        control("shuffled", lm, method, requests[:1])
    zeroed = control("zeroed", lm, method, requests[:2])
    for changes in ({"id": "t/9"}, {"question": "Why?"}, {"seed": 7}, {"sample": 1}):
        with pytest.raises(KeyError):
            answers(lm, zeroed, [dataclasses.replace(requests[0], **changes)])


def test_requests_keep_their_own_seeds_and_need_none():
    """Samples of one seed, and questions of one seed, are each fed their own thoughts."""
    lm, method = build("colar")
    sampled = Decoding(1.0, 1.0, 1.0, max_latents=8, max_completion_length=4)
    requests = [
        Request(e.id, e.question, method.Params(c), sampled, seed=5, sample=i, keep_latents=True)
        for e in EXAMPLES[:2]
        for c in (1, 3)
        for i in range(3)
    ]
    before = answers(lm, method, requests)
    assert len({done.latents.sum().item() for done in before if done.length}) == len(requests)
    fed_again = control("own", lm, method, requests)
    again = Random(0).sample(range(len(requests)), len(requests))
    for r, mine in zip(again, answers(lm, fed_again, [requests[r] for r in again]), strict=True):
        assert mine.request == requests[r]
        assert mine.token_ids == before[r].token_ids
        torch.testing.assert_close(mine.latents, before[r].latents)


@pytest.mark.parametrize("name", METHODS)
def test_all_but_the_thinking_is_the_methods(name):
    lm, method = build(name)
    forced = control("zeroed", lm, method, requests_for(method))
    for attribute in ("name", "config", "Params"):
        assert getattr(forced, attribute) == getattr(method, attribute)
    params = method.Params()
    assert forced.speed_text(params) == method.speed_text(params)
    assert forced.check_params(params) == method.check_params(params)


def test_a_control_can_be_evaluated_as_its_method(tmp_path):
    """Rows under the method's name, with a label that says what was done to it."""
    lm, method = build("coconut")
    limits = AnswerSettings(max_latents=8, max_completion_length=4, batch_size=4)
    (point,) = make_grid(EvaluatedModel("m", lm, method), ["d"], [method.Params()], ["greedy"], [0])
    requests = [make_request(point, example, limits) for example in EXAMPLES]
    zeroed = control("zeroed", lm, method, requests)
    controlled = EvaluatedModel("m", lm, zeroed, label="control-zeroed")
    grid = make_grid(controlled, ["d"], [method.Params()], ["greedy"], [0])
    assert evaluate(grid, {"d": EXAMPLES}, tmp_path / "r.jsonl", limits) == len(EXAMPLES)
    records = [record for _, record in read_jsonl(tmp_path / "r.jsonl")]
    assert {(r["method"], r["label"], r["length"]) for r in records} == {("coconut", "control-zeroed", 6)}


STEPS = 90
HEART = (
    Example("h/0", "3 plus 4?", ("<<3+4=7>>",), "7"),
    Example("h/1", "5 plus 4?", ("<<5+4=9>>",), "9"),
    Example("h/2", "2 times 4?", ("<<2*4=8>>",), "8"),
    Example("h/3", "8 times 2?", ("<<8*2=16>>",), "16"),
)


def test_a_model_that_reads_its_chain_is_misled_by_anothers():
    """CoT learnt by heart answers the question whose chain it is fed, and not its own."""
    lm = tiny_lm("llama", scale=0.1)
    method = registry.build("cot")
    # The answer depends on the chain alone: the same question text is met with every chain.
    rows = [
        dataclasses.replace(
            method.encode(lm.template, e, Random(0), 0.0), question=lm.template.question(q.question)
        )
        for e in HEART
        for q in HEART
    ]
    batch = Batch.collate(rows)
    optimiser = torch.optim.Adam(lm.parameters(), lr=1e-2)
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * (1 - step / STEPS)
        optimiser.zero_grad()
        method.loss(lm, batch)["ce"].mean().backward()
        optimiser.step()
    lm.eval()
    decoding = Decoding(max_latents=30, max_completion_length=6)
    requests = [Request(e.id, e.question, method.Params(), decoding) for e in HEART]
    chains = [lm.embed(torch.tensor(row.chain)) for row in rows[:: len(HEART)]]
    own = controls.ThoughtTable(
        torch.nn.utils.rnn.pad_sequence(chains, batch_first=True).detach(),
        torch.tensor([len(c) for c in chains]),
    )
    right = answers(lm, controls.given_thoughts(method, requests, own), requests)
    assert [done.text for done in right] == [e.answer for e in HEART]
    other = controls.shuffled(own, requests)
    source = [int((own.embeds_RKD == row).all(-1).all(-1).nonzero()[0]) for row in other.embeds_RKD]
    misled = answers(lm, controls.given_thoughts(method, requests, other), requests)
    assert [done.text for done in misled] == [HEART[s].answer for s in source]
    assert all(s != r for r, s in enumerate(source))
    assert not any(done.text == e.answer for done, e in zip(misled, HEART, strict=True))
