"""Chains beside the reference's, and a system's cost with its controls: by hand, then on tiny models."""

import json
import math

import pytest
from families import EXAMPLES, liven, tiny_lm
from sequential import made

import colar
from colar.engine.completion import Completion
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.evaluation.evaluate import answer_all
from colar.look import diagnosis
from colar.look import inspect as inspection
from colar.look.page import CAUSES
from colar.look.reference_chain import Token, reference_groups, reference_rows
from colar.look.thought import NEIGHBOURS
from colar.methods import pretrained, registry
from colar.methods.colar import ColarParams

PLAIN_CAUSES = ("right", "unparsable", "wrong")
LIMITS = Decoding(max_latents=8, max_completion_length=4)


def gaussian():
    lm = liven(tiny_lm("llama"))
    method = registry.build("colar", {"stop": "argmax"})
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    return lm, method


def cot():
    return liven(tiny_lm("qwen2"), stop=0.1), registry.build("cot", {})


MODELS = {"gaussian": gaussian, "sequential": lambda: made("llama", live=True), "cot": cot}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


def params_of(method):
    return ColarParams(2) if method.name == "colar" else method.Params()


def opened(lm, method, examples, params):
    """Let the model answer, and read its answers."""
    completions = answer_all(lm, method, diagnosis.requests_of(examples, params, LIMITS))
    return diagnosis.decoded_answers(lm, method, examples, params, completions)


def tokens(*ids):
    return [Token(token_id, False) for token_id in ids]


# By hand


@pytest.mark.parametrize(
    ("groups", "decoded_as", "marks"),
    [
        ([tokens(1, 2), tokens(3)], [{1, 2}, {3, 9}], ["right", "right"]),
        ([tokens(1, 2), tokens(3), tokens(4), tokens(5)], [{1}, {3}, {9}], ["wrong", "right", "after"]),
        ([tokens(1)], [{1}, {7}, {8}], ["right", "extra", "extra"]),
        ([tokens(1)], [], []),
        # A sum of two equal embeddings has one nearest token; what was chosen was chosen so many times.
        ([tokens(1, 1)], [{1, 9}], ["right"]),
        ([tokens(1, 1)], [[1, 9]], ["wrong"]),
        ([tokens(1, 1), tokens(1, 2)], [[1, 1], [2, 1]], ["right", "right"]),
    ],
)
def test_marks_by_hand(groups, decoded_as, marks):
    assert diagnosis.marks_of(groups, decoded_as) == marks


def completion(text, length, seconds):
    request = Request("x", "q")
    return Completion(request, 0, text, [], [-1] * length, False, "stop", length + 2, seconds)


def test_a_variant_by_hand():
    """Four questions of which two are one cluster; three are right, and they take 1, 2, 3 and 6 thoughts."""
    answers = ["7", "7", "9", "1"]
    examples = [colar.Example(str(i), "q", (), answer) for i, answer in enumerate("7791")]
    completions = [completion(text, n, n / 10) for text, n in zip(answers, (1, 2, 3, 6), strict=True)]
    completions[3] = completion("no idea", 6, 0.6)
    found = inspection.outcome_of(examples, completions)
    assert found["right"] == [True, True, True, False]
    assert (found["n"], found["accuracy"]["mean"], found["length"]) == (4, 0.75, 3.0)
    assert found["seconds"] == pytest.approx(0.3)
    assert found["forward_passes"] == 5.0
    # sd of 1, 1, 1, 0 is 1/2.
    half = 1.959964 / 4
    assert found["accuracy"]["interval"] == pytest.approx((0.75 - half, 0.75 + half))


def test_a_difference_is_paired():
    examples = [colar.Example(str(i), "q", (), "1") for i in range(4)]
    found = inspection.difference(examples, [True, True, True, False], [False, False, True, False])
    # Differences 1, 1, 0, 0: their standard error is sqrt(1 / 3) / 2.
    half = 1.959964 * math.sqrt(1 / 3) / 2
    assert (found["mean"], found["interval"]) == (0.5, pytest.approx((0.5 - half, 0.5 + half)))


# On models


def test_chains_are_what_the_engine_says(model):
    lm, method = model
    params = params_of(method)
    requests = diagnosis.requests_of(EXAMPLES, params, LIMITS)
    completions = Engine(lm, method, 3).generate(requests)
    found = diagnosis.decoded_answers(lm, method, EXAMPLES, params, completions)
    for example, one, chain in zip(EXAMPLES, completions, found, strict=True):
        assert (chain["id"], chain["answer"], chain["length"]) == (example.id, one.text, one.length)
        assert len(chain["thoughts"]) == one.length
        if not example.steps:
            assert chain["cause"] in PLAIN_CAUSES
            assert chain["reference_length"] is None
            assert all(thought["mark"] is None for thought in chain["thoughts"])
            continue
        assert chain["cause"] in CAUSES
        marks = [thought["mark"] for thought in chain["thoughts"]]
        assert marks.count("wrong") <= 1
        if chain["cause"] == "stopped early":
            assert chain["missing"]
        if "extra" in marks:
            assert not chain["missing"]
        json.dumps(chain, allow_nan=False)


def test_the_reference_below_the_thoughts_is_the_whole_chain(model):
    lm, method = model
    params = params_of(method)
    for chain in opened(lm, method, EXAMPLES, params):
        example = next(example for example in EXAMPLES if example.id == chain["id"])
        if not example.steps:
            continue
        (row,) = reference_rows(lm, method, [example], params)
        wanted = []
        for group in reference_groups(lm, method, row):
            wanted += [lm.template.token(token.token_id) for token in group]
        shown = []
        for group in [*(thought["reference"] for thought in chain["thoughts"]), *chain["missing"]]:
            shown += [token["text"] for token in group]
        # A head that ends a group early sees tokens twice; the others see each once.
        if method.name != "sequential":
            assert shown == wanted
        else:
            assert set(shown) <= set(wanted)


def test_latents_show_their_nearest_tokens():
    lm, method = gaussian()
    (chain,) = opened(lm, method, EXAMPLES[:1], ColarParams(5))
    for thought in chain["thoughts"]:
        assert len(thought["neighbours"]) == NEIGHBOURS
        cosines = [token["cosine"] for token in thought["neighbours"]]
        assert cosines == sorted(cosines, reverse=True)
        texts = [token["text"] for token in thought["tokens"]]
        assert texts == [token["text"] for token in thought["neighbours"][:5]]
        assert thought["sigma"] > 0
        assert 0 <= thought["stop_probability"] <= 1


def test_controls_of_a_system(model):
    lm, method = model
    requests = diagnosis.requests_of(EXAMPLES, params_of(method), LIMITS)
    completions = Engine(lm, method, 4).generate(requests)
    found = inspection.measured_cost(lm, method, EXAMPLES, requests, completions)
    outcomes = found["outcomes"]
    assert list(outcomes) == (
        ["own", "none"] if method.name == "cot" else ["own", "shuffled", "zeroed", "none"]
    )
    assert outcomes["none"]["length"] == 0
    for kind, variant in outcomes.items():
        if kind in inspection.REPLACED:
            assert variant["length"] == outcomes["own"]["length"]
        if kind != "own":
            own = outcomes["own"]["accuracy"]["mean"]
            assert found["differences"][kind]["mean"] == pytest.approx(own - variant["accuracy"]["mean"])
    alone = inspection.measured_cost(lm, method, EXAMPLES, requests, completions, with_controls=False)
    assert list(alone["outcomes"]) == ["own"]
    # One question has no other to take thoughts from.
    one = inspection.measured_cost(lm, method, EXAMPLES[:1], requests[:1], completions[:1])
    assert "shuffled" not in one["outcomes"]


def test_a_method_whose_thoughts_stand_for_no_tokens_is_shown_and_not_compared(tmp_path):
    lm = liven(tiny_lm("llama"))
    method = registry.build("coconut", {})
    pretrained.attach(lm, method, seed=0)
    system = inspection.inspect_system("coconut", lm, method, EXAMPLES, method.Params(), LIMITS)
    assert system["diagnosis"] is None
    assert system["cost"]["outcomes"]["shuffled"]["n"] == len(EXAMPLES)
    assert {chain["cause"] for chain in system["answers"]} <= set(PLAIN_CAUSES)
    path = inspection.Inspection(list(EXAMPLES), [system]).save(tmp_path / "page.html")
    assert "Question by question" in path.read_text(encoding="utf-8")
