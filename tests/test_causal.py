"""One thought changed at a time: what is fed, against the reference engine; and that nothing changes nothing."""

import dataclasses

import pytest
import torch
from families import EXAMPLES, FAMILIES, liven, tiny_lm

from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.evaluation import controls
from colar.evaluation.controls import GivenThoughts, Thoughts
from colar.look import effects
from colar.look.chains import requests_of
from colar.look.effects import Prefixed
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


def given(counts):
    """Thought k of request r is (r, k)."""
    embeds = torch.zeros(len(counts), max(counts), 2)
    for r, count in enumerate(counts):
        for k in range(count):
            embeds[r, k] = torch.tensor([float(r), float(k)])
    requests = [Request(str(r), f"question {r}", seed=r) for r in range(len(counts))]
    return Thoughts(embeds, torch.tensor(counts)), requests


# By hand


def test_places_by_hand():
    counts = torch.tensor([1, 2, 5])
    assert effects.positions(counts, "first").tolist() == [0, 0, 0]
    assert effects.positions(counts, "middle").tolist() == [0, 1, 2]
    assert effects.positions(counts, "last").tolist() == [0, 1, 4]


def test_a_swap_takes_the_others_thought_of_that_place_and_nothing_else():
    thoughts, requests = given([3, 1])
    found = effects.changed_thoughts(thoughts, requests, "swap", torch.tensor([2, 0]), seed=0).embeds_RKD
    # The other chain has one thought alone: it is its last.
    assert found[0].tolist() == [[0, 0], [0, 1], [1, 0]]
    assert found[1, 0].tolist() == [0, 0]
    assert thoughts.embeds_RKD[0, 2].tolist() == [0, 2]


def test_a_dropped_thought_leaves_the_others_in_their_order():
    thoughts, requests = given([3, 1, 3])
    found = effects.changed_thoughts(thoughts, requests, "drop", torch.tensor([1, 0, 2]), seed=0)
    assert found.counts_R.tolist() == [2, 0, 2]
    assert found.embeds_RKD[0, :2].tolist() == [[0, 0], [0, 2]]
    assert found.embeds_RKD[2, :2].tolist() == [[2, 0], [2, 1]]


# On models


@torch.no_grad()
def by_hand(lm, method, request, given, think_on):
    """Feed the given thoughts, let the model think on where it may, and answer: no engine, no cache."""
    begun = method.begin(lm, [request])
    question = lm.template.question(request.question, method.speed_text(request.params))
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


def answered(lm, method, examples=EXAMPLES, limits=LIMITS):
    requests = requests_of(examples, params_of(method), limits)
    return Engine(lm, method).generate(requests)


@pytest.mark.parametrize("name", ["colar", "sequential"])
@pytest.mark.parametrize("family", FAMILIES)
def test_changed_thoughts_are_answered_as_the_plain_loop_answers_them(family, name):
    lm, method = build(family, name)
    own = [completion for completion in answered(lm, method) if completion.length]
    assert len(own) > 2
    requests = [completion.request for completion in own]
    thoughts = controls.thoughts_of(lm, own)
    at = effects.positions(thoughts.counts_R, "middle")
    changed = effects.changed_thoughts(thoughts, requests, "swap", at, seed=0)
    cut = Thoughts(changed.embeds_RKD, at + 1)
    for kind, fed in ((GivenThoughts, changed), (Prefixed, cut)):
        completions = Engine(lm, kind(method, requests, fed), 3).generate(requests)
        for r, completion in enumerate(completions):
            given = fed.embeds_RKD[r, : fed.counts_R[r]]
            expected, _ = by_hand(lm, method, requests[r], given, kind is Prefixed)
            assert completion.token_ids == expected
            torch.testing.assert_close(completion.latents[: len(given)], given)


@pytest.mark.parametrize("name", ["colar", "sequential", "cot"])
def test_effects_of_a_random_model(name):
    lm, method = build("llama", name)
    completions = answered(lm, method)
    found = effects.causal_tests(lm, method, EXAMPLES, completions)
    own = [(each, example) for each, example in zip(completions, EXAMPLES, strict=True) if each.length]
    assert 2 < found.n == len(own)
    assert len(found.effects) == 3 * 2 * 3
    by_change = {}
    for effect in found.effects:
        by_change.setdefault(effect.change, []).append(effect)
    # A check of the test itself, both ways: fed again, its own thoughts give its own answers.
    assert all(effect.n == found.n and effect.changed == 0 for effect in by_change["none"])
    assert any(effect.changed for effect in by_change["swap"])
    (last,) = [e for e in by_change["drop"] if e.position == "last" and e.then == "rethought"]
    assert (last.n, last.changed, last.accuracy_before, last.accuracy_after) == (0, None, None, None)

    # Each share against the plain loop with that change alone.
    thoughts = controls.thoughts_of(lm, [each for each, _ in own])
    requests = [each.request for each, _ in own]
    for effect in (by_change["swap"] + by_change["drop"])[::3] if name == "colar" else []:
        at = effects.positions(thoughts.counts_R, effect.position)
        changed = effects.changed_thoughts(thoughts, requests, effect.change, at, seed=0)
        think_on = effect.then == "rethought"
        differ = []
        for r, (each, _) in enumerate(own):
            if think_on and effect.change == "drop" and at[r] + 1 >= thoughts.counts_R[r]:
                continue
            given = changed.embeds_RKD[r, : at[r] + 1 if think_on else changed.counts_R[r]]
            expected, _ = by_hand(lm, method, requests[r], given, think_on)
            differ.append(expected != each.token_ids)
        assert effect.n == len(differ)
        assert effect.changed == (sum(differ) / len(differ) if differ else None)


def test_a_model_that_never_thinks_has_no_effects_and_one_question_has_no_swap():
    lm, method = build()
    none = dataclasses.replace(LIMITS, max_latents=0)
    found = effects.causal_tests(lm, method, EXAMPLES, answered(lm, method, limits=none))
    assert (found.n, found.effects) == (0, [])
    found = effects.causal_tests(lm, method, EXAMPLES[:1], answered(lm, method, EXAMPLES[:1]))
    assert {effect.change for effect in found.effects} == {"none", "drop"}
