"""One thought changed at a time: what is fed, against the reference engine; and that nothing changes nothing."""

import dataclasses

import pytest
import torch
from families import EXAMPLES, FAMILIES, liven, tiny_lm

from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.evaluation.controls import Forced, Thoughts
from colar.look import causal
from colar.look.causal import Change, Own, Prefixed
from colar.look.chains import requests_of
from colar.methods import pretrained, registry
from colar.methods.colar.method import ColarParams

LIMITS = Decoding(max_latents=6, max_completion_length=4)


def build(family="llama", name="colar"):
    lm = tiny_lm(family)
    method = registry.build(name)
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return liven(lm.eval()), method


def params_of(method):
    return ColarParams(2) if method.name == "colar" else method.Params()


def own_of(counts, sigma=True):
    """Thought k of request r is (r, k), its sigma (0.1, 0.2)."""
    n, most = len(counts), max(counts)
    embeds = torch.zeros(n, most, 2)
    for r in range(n):
        for k in range(counts[r]):
            embeds[r, k] = torch.tensor([float(r), float(k)])
    requests = [Request(str(r), f"question {r}", seed=r) for r in range(n)]
    spread = torch.tensor([0.1, 0.2]).expand(n, most, 2) if sigma else None
    return Own([], requests, [], [False] * n, Thoughts(embeds, torch.tensor(counts)), spread)


# By hand


def test_places_by_hand():
    counts = torch.tensor([1, 2, 5])
    assert causal.positions(counts, "first").tolist() == [0, 0, 0]
    assert causal.positions(counts, "middle").tolist() == [0, 1, 2]
    assert causal.positions(counts, "last").tolist() == [0, 1, 4]


def test_a_swap_takes_the_others_thought_of_that_place_and_nothing_else():
    own = own_of([3, 1])
    found = causal.swapped(own, torch.tensor([2, 0]), seed=0).embeds_RKD
    # The other chain has one thought alone: it is its last.
    assert found[0].tolist() == [[0, 0], [0, 1], [1, 0]]
    assert found[1, 0].tolist() == [0, 0]
    assert own.thoughts.embeds_RKD[0, 2].tolist() == [0, 2]


def test_a_dropped_thought_leaves_the_others_in_their_order():
    found = causal.dropped(own_of([3, 1, 3]), torch.tensor([1, 0, 2]))
    assert found.counts_R.tolist() == [2, 0, 2]
    assert found.embeds_RKD[0, :2].tolist() == [[0, 0], [0, 2]]
    assert found.embeds_RKD[2, :2].tolist() == [[2, 0], [2, 1]]


def test_noise_is_as_large_as_it_says_and_in_one_place():
    own = own_of([4] * 400)
    at = torch.full((400,), 2)
    by_sigma = causal.changed_thoughts(own, Change("noise", 3.0, "sigma"), at, seed=0)
    moved = by_sigma.embeds_RKD - own.thoughts.embeds_RKD
    assert not moved[:, [0, 1, 3]].any()
    torch.testing.assert_close(moved[:, 2].std(0), torch.tensor([0.3, 0.6]), rtol=0.15, atol=0)
    smaller = causal.changed_thoughts(own, Change("noise", 0.3, "sigma"), at, seed=0)
    torch.testing.assert_close(smaller.embeds_RKD - own.thoughts.embeds_RKD, moved / 10, atol=1e-4, rtol=1e-3)
    by_rms = causal.changed_thoughts(own, Change("noise", 1.0, "rms"), at, seed=0)
    # Thought 2 of request r is (r, 2).
    scale = ((torch.arange(400.0) ** 2 + 4) / 2).sqrt()
    drawn = (by_rms.embeds_RKD - own.thoughts.embeds_RKD)[:, 2] / scale[:, None]
    torch.testing.assert_close(drawn, moved[:, 2] / torch.tensor([0.3, 0.6]), atol=1e-3, rtol=1e-3)


def test_what_cannot_be_changed_is_none():
    at = torch.tensor([0])
    assert causal.changed_thoughts(own_of([2], sigma=False), Change("noise", 1.0, "sigma"), at, 0) is None
    assert causal.changed_thoughts(own_of([2]), Change("swap"), at, 0) is None
    assert causal.changed_thoughts(own_of([2], sigma=False), Change("noise", 1.0, "rms"), at, 0) is not None


# On models


@torch.no_grad()
def by_hand(lm, method, request, given, think_on):
    """Feed the given thoughts, let the model think on where it may, and answer: no engine, no cache."""
    begun = method.begin(lm, [request])
    question = lm.template.question(request.question, method.prompt(request.params))
    fed = torch.cat([reference.embed(lm, question)[0], given])
    for step in range(len(given), request.decoding.max_latents if think_on else 0):
        thought = method.think(lm, reference.think_state(lm, request, begun, fed[None], step))
        if thought.done.item():
            break
        fed = torch.cat([fed, thought.embeds])
    token, answer = lm.template.separator_id, []
    for _ in range(request.decoding.max_completion_length):
        fed = torch.cat([fed, lm.embed(torch.tensor([token]))])
        token = int(lm.logits(lm.hidden(fed[None])[0, -1]).argmax())
        if token == lm.template.eos_id:
            break
        answer.append(token)
    return answer, len(fed)


@pytest.mark.parametrize("name", ["colar", "sequential"])
@pytest.mark.parametrize("family", FAMILIES)
def test_changed_thoughts_are_answered_as_the_plain_loop_answers_them(family, name):
    lm, method = build(family, name)
    requests = requests_of(EXAMPLES, params_of(method), LIMITS)
    own = causal.own_of(lm, method, EXAMPLES, Engine(lm, method).generate(requests))
    assert len(own.requests) > 2
    at = causal.positions(own.thoughts.counts_R, "middle")
    changed = causal.changed_thoughts(own, Change("swap"), at, seed=0)
    cut = Thoughts(changed.embeds_RKD, at + 1)
    for kind, thoughts in ((Forced, changed), (Prefixed, cut)):
        completions = Engine(lm, kind(method, own.requests, thoughts), 3).generate(own.requests)
        for r, completion in enumerate(completions):
            given = thoughts.embeds_RKD[r, : thoughts.counts_R[r]]
            expected, _ = by_hand(lm, method, own.requests[r], given, kind is Prefixed)
            assert completion.token_ids == expected
            torch.testing.assert_close(completion.latents[: len(given)], given)


@pytest.mark.parametrize("name", ["colar", "sequential", "cot"])
def test_effects_of_a_random_model(name):
    lm, method = build("llama", name)
    found = causal.causal_tests(
        lm, method, EXAMPLES, params_of(method), LIMITS, sizes=(0.1, 3.0), max_batch=4
    )
    assert 2 < found.n <= len(EXAMPLES)
    assert len(found.effects) == 3 * 2 * (3 + 4)
    for effect in found.effects:
        assert effect.n == len(effect.answers)
        if effect.n:
            assert effect.changed == sum(each.changed for each in effect.answers) / effect.n
        else:
            assert effect.changed is effect.accuracy_before is effect.accuracy_after is None
    by_kind = {}
    for effect in found.effects:
        by_kind.setdefault((effect.kind, effect.unit), []).append(effect)
    # A check of the test itself, both ways: fed again, its own thoughts give its own answers.
    assert all(effect.n == found.n and effect.changed == 0 for effect in by_kind["none", None])
    assert any(effect.changed for effect in by_kind["swap", None])
    assert any(effect.changed for effect in by_kind["noise", "rms"] if effect.size == 3)
    assert all((effect.n > 0) == (name == "colar") for effect in by_kind["noise", "sigma"])
    last = [e for e in by_kind["drop", None] if e.place == "last" and e.then == "rethought"]
    assert [effect.n for effect in last] == [0]
    assert found.to_json()["effects"][0]["kind"] == "none"


def test_every_answer_is_that_of_its_own_change_and_question():
    """All changes run in one batch; each answer against the plain loop with that change alone."""
    lm, method = build()
    found = causal.causal_tests(lm, method, EXAMPLES, ColarParams(2), LIMITS, sizes=(3.0,), max_batch=4)
    completions = Engine(lm, method).generate(requests_of(EXAMPLES, ColarParams(2), LIMITS))
    own = causal.own_of(lm, method, EXAMPLES, completions)
    row_of = {request.id: r for r, request in enumerate(own.requests)}
    seen = set()
    for effect in found.effects:
        at = causal.positions(own.thoughts.counts_R, effect.place)
        thoughts = causal.changed_thoughts(own, Change(effect.kind, effect.size, effect.unit), at, seed=0)
        for answer in effect.answers:
            r = row_of[answer.id]
            think_on = effect.then == "rethought"
            n_given = at[r] + 1 if think_on else thoughts.counts_R[r]
            given = thoughts.embeds_RKD[r, :n_given]
            expected, _ = by_hand(lm, method, own.requests[r], given, think_on)
            assert answer.changed == (expected != own.completions[r].token_ids)
            assert answer.position == at[r]
            seen.add(answer.changed)
    assert seen == {False, True}


def test_a_model_that_never_thinks_has_no_effects():
    lm, method = build()
    none = dataclasses.replace(LIMITS, max_latents=0)
    found = causal.causal_tests(lm, method, EXAMPLES, ColarParams(2), none, sizes=(1.0,))
    assert found.n == 0
    assert all(effect.n == 0 and effect.changed is None for effect in found.effects)
