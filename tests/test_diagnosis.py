"""Given thoughts against the reference engine, groups and classes by hand, and a model that knows its problems."""

import dataclasses
import math
from random import Random

import pytest
import torch
from families import EXAMPLES, tiny_lm

from colar.checks import NonFiniteError
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.evaluation.controls import ThoughtTable, given_thoughts
from colar.evaluation.evaluate import answer_all
from colar.look import diagnosis, reference_chain, thought
from colar.look.diagnosis import classify, missing
from colar.look.page import CAUSES
from colar.look.reference_chain import (
    Token,
    can_be_compared,
    groups_thought,
    reference_groups,
    reference_passes,
    reference_rows,
    reference_tokens,
)
from colar.methods import grouping, pretrained, registry
from colar.methods.base import Batch
from colar.methods.colar import ColarParams
from colar.methods.sequential import SequentialParams

LIMITS = Decoding(max_latents=30, max_completion_length=6)
CHAIN = Example("x", "3 pens and 4 pens, twice?", ("<<3+4=7>>", "<<7*2=14>>"), "14")


def build(name, **config):
    lm = tiny_lm("llama")
    method = registry.build(name, config)
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return lm.eval(), method


@torch.no_grad()
def reference_thoughts(lm, method, examples, params):
    """The thoughts of the reference chains as training feeds them."""
    batch = Batch.collate(reference_rows(lm, method, examples, params))
    embeds_RKD, sizes_RK = method.training_thoughts(lm, batch)
    return ThoughtTable(embeds_RKD, (sizes_RK > 0).sum(-1))


@pytest.mark.parametrize("batch", [1, 3])
def test_forced_thoughts_are_fed_to_their_own_request_and_then_it_stops(batch):
    lm, method = build("colar")
    params = ColarParams(2)
    thoughts = reference_thoughts(lm, method, EXAMPLES, params)
    requests = [Request(e.id, e.question, params, LIMITS, keep_latents=True) for e in EXAMPLES]
    forced = given_thoughts(method, requests, thoughts)
    for r, done in enumerate(Engine(lm, forced, batch).generate(requests)):
        assert done.length == int(thoughts.counts_R[r])
        if done.length:
            torch.testing.assert_close(done.latents, thoughts.embeds_RKD[r, : done.length])


def test_forced_answers_equal_one_forward_over_question_latents_and_answer():
    lm, method = build("colar")
    params = ColarParams(2)
    row = reference_rows(lm, method, EXAMPLES, params)[0]
    thoughts = reference_thoughts(lm, method, EXAMPLES[:1], params)
    request = Request("x", EXAMPLES[0].question, params, LIMITS)
    done = Engine(lm, given_thoughts(method, [request], thoughts)).generate([request])[0]
    ids = torch.tensor([lm.template.separator_id, *done.token_ids])
    fed = torch.cat(
        [lm.embed(torch.tensor(row.question)), thoughts.embeds_RKD[0, : thoughts.counts_R[0]], lm.embed(ids)]
    )
    best = lm.logits(lm.hidden(fed[None])[0, -len(ids) :]).argmax(-1).tolist()
    assert best[: len(done.token_ids)] == done.token_ids


def test_reference_rows_ask_as_the_engine_does():
    lm, method = build("colar")
    row = reference_rows(lm, method, EXAMPLES, ColarParams(3))[0]
    assert row.question == lm.template.question(EXAMPLES[0].question, "(Thinking speed: 3)")
    assert row.chain == [t for step in lm.template.steps(EXAMPLES[0].steps) for t in step]


def test_a_token_after_the_equals_sign_is_a_result():
    lm, method = build("colar")
    row = method.encode(lm.template, CHAIN, Random(0), 0.0)
    flat = reference_tokens(lm, row)
    assert [token.token_id for token in flat] == row.chain
    results = "".join(lm.template.token(token.token_id) for token in flat if token.is_result)
    assert results == "714"
    words = dataclasses.replace(CHAIN, steps=("3+4=7 eggs in 2 days", "5+6=11"))
    flat = reference_tokens(lm, method.encode(lm.template, words, Random(0), 0.0))
    results = "".join(lm.template.token(token.token_id) for token in flat if token.is_result)
    assert results.replace(" ", "") == "711"


PLAN, RESULT = Token(1, False), Token(2, True)


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        ([{1, 9}, {2, 9}], "misread"),
        ([{9}, {2}], "wrong plan"),
        ([{1}, {9}], "wrong result"),
        ([{9}], "wrong plan"),
        ([{1}], "stopped early"),
        ([{1}, {2}, {1}], "stopped late"),
    ],
)
def test_a_wrong_answer_is_put_down_to_its_first_wrong_latent(read, kind):
    assert classify([[PLAN], [RESULT]], read) == kind
    assert kind in CAUSES


def test_a_group_with_an_operand_missing_is_a_wrong_plan():
    assert classify([[PLAN, RESULT]], [{9}]) == "wrong plan"
    assert classify([[PLAN, RESULT]], [{1}]) == "wrong result"


def test_a_token_that_was_chosen_once_is_said_once():
    """Where the reference has 11, a thought of 12 is wrong: it has one 1."""
    eleven = [Token(5, False), Token(1, True), Token(1, True)]
    assert diagnosis.covered([5, 1, 1], [5, 1, 2]) == [True, True, False]
    assert missing(eleven, [5, 1, 2]) == [Token(1, True)]
    assert missing(eleven, [1, 5, 1]) == []
    assert classify([eleven], [[5, 1, 2]]) == "wrong result"
    # Nearest tokens are a set: the sum of two equal embeddings is near one token.
    assert missing(eleven, {5, 1}) == []


def test_writing_is_judged_position_by_position():
    """An untrained model whose head always says one token is right where the group is that token, and only there."""
    lm, method = build("cot")
    row = reference_rows(lm, method, [CHAIN], method.Params())[0]
    said = row.chain[2]
    head = lm.causal_lm.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
    head.bias.data[said] = 1e4
    passes = list(reference_passes(lm, method, [CHAIN], method.Params()))
    assert diagnosis.groups_written(passes[0], method.Params(), thought.vocabulary_of(lm)) == row.chain.count(
        said
    )
    found = diagnosis.diagnose(lm, method, passes, method.Params(), LIMITS)
    assert found["write"] == row.chain.count(said) / len(row.chain)
    assert found["whole_chain"] == found["stop"] == 0


def test_diagnosis_of_a_model_that_knows_its_problems():
    """Taught four problems by heart, it reads, writes, stops and answers them all right."""
    torch.manual_seed(0)
    lm = tiny_lm("llama", scale=0.1)
    method = registry.build("cot", {})
    pretrained.attach(lm, method, seed=3)
    examples = [example for example in EXAMPLES if example.steps]
    rows = [method.encode(lm.template, example, Random(0), 0.0) for example in examples]
    optimiser = torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        optimiser.zero_grad()
        sum(method.loss(lm, Batch.collate(rows)).values()).mean().backward()
        optimiser.step()
    lm.eval()
    limits = Decoding(max_latents=40, max_completion_length=12)
    all_right(lm, method, examples, method.Params(), limits)


def all_right(lm, method, examples, params, limits):
    """It reads, writes, stops and answers all of them right, in groups of the reference's sizes."""
    passes = list(reference_passes(lm, method, examples, params))
    shares = {"n": len(examples), "read": 1.0, "write": 1.0, "whole_chain": 1.0, "stop": 1.0}
    assert diagnosis.diagnose(lm, method, passes, params, limits) == shares
    completions = answer_all(lm, method, diagnosis.requests_of(examples, params, limits))
    for answer in diagnosis.decoded_answers(lm, method, examples, params, completions):
        assert answer["cause"] == "right"
        assert {thought["mark"] for thought in answer["thoughts"]} == {"right"}
        assert (answer["length"], answer["missing"]) == (answer["reference_length"], [])


def tokens_of(example):
    """How many tokens its chain has."""
    return sum(map(len, tiny_lm("llama").template.steps(example.steps)))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("no_cot", {}),
        ("pause", {}),
        ("coconut", {}),
        ("distill", {}),
        # What a model thinks counts, not what the first stage of its curriculum taught.
        ("icot", {}),
        # As many thoughts of its own as the chain has tokens, by chance.
        ("distill", {"n_latents": tokens_of(EXAMPLES[0])}),
        ("tokenskip", {}),
    ],
)
def test_thoughts_that_stand_for_no_tokens_are_not_compared(name, config):
    lm, method = build(name, **config)
    assert not can_be_compared(lm, method, EXAMPLES, method.Params())


def test_soft_tokens_are_not_compared_though_each_stands_for_a_step():
    """A thought is read as as many tokens as its compression factor has: a step's one soft token would be wrong."""
    lm, method = build("ruplar")
    for examples in (EXAMPLES, EXAMPLES[:1], [CHAIN]):
        assert not can_be_compared(lm, method, examples, method.Params())


def test_a_whole_chain_of_tokenskip_is_compared_and_a_share_of_it_is_not():
    lm, method = build("tokenskip")
    assert can_be_compared(lm, method, EXAMPLES[:1], method.Params(1.0))
    assert not can_be_compared(lm, method, EXAMPLES[:1], method.Params(0.7))
    assert not can_be_compared(lm, method, [], method.Params(1.0))


def test_a_long_question_and_anothers_long_chain_fit_into_the_context_one_by_one():
    lm, method = build("cot")
    asked = [
        Example("long question", "Ann has pens. " * 21, ("<<3+4=7>>",), "7"),
        Example("long chain", "Bo?", ("<<3+4=7>>",) * 9, "7"),
    ]
    longest = [max(sizes) for sizes in zip(*[sizes_of(lm, each) for each in asked], strict=True)]
    assert sum(longest) > lm.context
    limits = Decoding(max_latents=20, max_completion_length=4)
    passes = list(reference_passes(lm, method, asked, method.Params()))
    assert len(diagnosis.read(lm, method, passes, method.Params(), limits)) == 2


def sizes_of(lm, example):
    """Tokens of the question and of the chain."""
    return len(lm.template.question(example.question)), sum(map(len, lm.template.steps(example.steps)))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cot", {}),
        ("colar", {"compression_factor": 2}),
        ("sequential", {"compression_factor": 1.5, "confidence_threshold": 0.5}),
    ],
)
def test_parts_of_two_positions_give_the_same_as_one_piece(name, values, monkeypatch):
    lm, method = build(name)
    params = registry.make_params(method, values)
    think, cosines = method.think, thought.EmbeddingIndex.cosines
    rows = []
    marks = torch.tensor([[1.0, 2.0]])

    def watched_think(lm, state):
        rows.append(len(state.hidden))
        # The method's own columns have a row for each position of the part.
        assert torch.equal(state.begun["marks"], marks.expand(len(state.hidden), -1))
        return think(lm, state)

    def watched_cosines(index, latents_KD):
        rows.append(len(latents_KD))
        return cosines(index, latents_KD)

    monkeypatch.setattr(method, "begin", lambda lm, requests: {"marks": marks.expand(len(requests), -1)})
    monkeypatch.setattr(method, "think", watched_think)
    monkeypatch.setattr(thought.EmbeddingIndex, "cosines", watched_cosines)

    def measured():
        [found] = reference_passes(lm, method, [CHAIN], params)
        near = thought.vocabulary_of(lm).nearest(found.thought.embeds, 5)
        written = diagnosis.groups_written(found, params, thought.vocabulary_of(lm))
        return found.thought, near, written

    whole, near, written = measured()
    assert max(rows) == len(whole.done) > 4
    rows.clear()
    for module in (thought, reference_chain):
        monkeypatch.setattr(module, "POSITIONS_AT_ONCE", 2)
    in_parts, near_in_parts, written_in_parts = measured()
    assert max(rows) == 2
    assert written_in_parts == written
    # Products of other shapes round differently.
    torch.testing.assert_close(vars(in_parts), vars(whole))
    for each, other in zip(near_in_parts, near, strict=True):
        assert [token_id for token_id, _ in each] == [token_id for token_id, _ in other]
        assert [cosine for _, cosine in each] == pytest.approx([cosine for _, cosine in other], abs=1e-5)


def test_no_latents_have_no_nearest_tokens():
    lm, _ = build("cot")
    assert thought.vocabulary_of(lm).nearest(torch.zeros(0, lm.width), 5) == []


def test_numbers_that_are_not_finite_are_no_diagnosis():
    lm, method = build("colar")
    with torch.no_grad():
        next(iter(lm.extra["latent_head"].parameters())).fill_(math.nan)
    with pytest.raises(NonFiniteError, match=f"the model's numbers for {EXAMPLES[0].id} are not finite"):
        list(reference_passes(lm, method, EXAMPLES[:1], ColarParams(2)))


# Factors that are not whole, thoughts that are chosen as tokens


SEPARATOR = 5


def chosen(token_ids):
    """What a method says of a thought that it chose as these tokens, in a group of four places."""
    return {"group_ids": torch.tensor([*token_ids, *[-1] * (4 - len(token_ids))])}


FACTORS = (1, 1.5, 2, 2.75, 3)
TAUGHT = (EXAMPLES[0], EXAMPLES[1], EXAMPLES[4])


def taught(steps):
    """A sequential head that was taught three problems for some steps."""
    torch.manual_seed(0)
    lm = tiny_lm("llama", scale=0.1)
    method = registry.build("sequential", {"compression_factors": FACTORS})
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, TAUGHT)
    optimiser = torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        rows = [
            method.encode(lm.template, example, Random(step * 10 + i), 0.0)
            for i, example in enumerate(TAUGHT)
        ]
        # Rates that go to zero: the last updates forget nothing.
        optimiser.param_groups[0]["lr"] = 5e-3 * (1 - step / steps)
        optimiser.zero_grad()
        sum(method.loss(lm, Batch.collate(rows)).values()).mean().backward()
        optimiser.step()
    return lm.eval(), method


@pytest.fixture(scope="module")
def expert():
    return taught(160)


def most(k, c, phase):
    return math.floor((k + 1) * c + phase) - math.floor(k * c + phase)


@pytest.mark.parametrize(("c", "threshold"), [(1, 0), (1.5, 0.5), (2, 0), (2.75, 0.5), (2.75, 0), (3, 0.5)])
def test_who_knows_its_problems_knows_them_in_groups_of_any_size(expert, c, threshold):
    """Reference, writing and thinking agree on every group's size: their phases are the same."""
    lm, method = expert
    limits = Decoding(max_latents=40, max_completion_length=12)
    params = SequentialParams(c, confidence_threshold=threshold)
    all_right(lm, method, TAUGHT, params, limits)


def test_reference_groups_are_those_of_training(expert):
    lm, method = expert
    sizes = set()
    for example in EXAMPLES:
        (row,) = reference_rows(lm, method, [example], SequentialParams(1.5))
        phase = grouping.draw_phase(torch.tensor([row.seed])).item()
        found = reference_groups(lm, method, row)
        assert [token.token_id for group in found for token in group] == row.chain
        for k, group in enumerate(found[:-1]):
            assert len(group) == most(k, 1.5, phase)
            sizes.add((len(group), k % 2))
    # Rows differ in their phase: some begin with one token, others with two.
    assert sizes == {(1, 0), (2, 0), (1, 1), (2, 1)}


class Thought:
    """As much of a completion as `groups_thought` reads."""

    def __init__(self, *infos):
        self.infos = list(infos)

    def thought_info(self):
        return self.infos


def test_a_chosen_thought_stands_for_as_many_tokens_as_it_has():
    lm, _ = build("cot")
    lm.template.separator_id = SEPARATOR
    a, b, c = PLAN, RESULT, Token(3, "operand")
    training = [[a, b], [c]]
    assert groups_thought(lm, training, Thought()) == training
    assert groups_thought(lm, training, Thought({"sigma": torch.ones(2)})) == training
    assert groups_thought(lm, training, Thought(chosen([1]), chosen([2, 3]))) == [[a], [b, c]]
    assert groups_thought(lm, training, Thought(chosen([1, 2]))) == [[a, b], [c]]
    # A separator too early stands where a token should be; the one behind the chain stands for nothing.
    assert groups_thought(lm, training, Thought(chosen([1, SEPARATOR]), chosen([2, 3]))) == [[a, b], [b, c]]
    assert groups_thought(lm, training, Thought(chosen([1, 2]), chosen([3, SEPARATOR]))) == [[a, b], [c]]
    # Thoughts behind the chain's end have no group.
    assert groups_thought(lm, training, Thought(chosen([1, 2, 3]), chosen([9]))) == [[a, b, c]]


@pytest.mark.parametrize("c", [1.5, 3])
@pytest.mark.parametrize("threshold", [0, 0.9])
@pytest.mark.parametrize("most_latents", [2, 30])
def test_the_references_length_does_not_follow_what_was_thought(c, threshold, most_latents):
    """Untrained thoughts have other sizes than the reference's; a chain that is cut leaves one large group."""
    lm, method = build("sequential", compression_factors=FACTORS)
    params = SequentialParams(c, confidence_threshold=threshold)
    limits = Decoding(max_latents=most_latents, max_completion_length=4)
    examples = [example for example in EXAMPLES if example.steps]
    completions = answer_all(lm, method, diagnosis.requests_of(examples, params, limits))
    answers = diagnosis.decoded_answers(lm, method, examples, params, completions)
    rows = reference_rows(lm, method, examples, params)
    expected = [len(reference_groups(lm, method, row)) for row in rows]
    assert [answer["reference_length"] for answer in answers] == expected
    without = diagnosis.decoded_answers(lm, method, examples, params, completions, compare=False)
    assert {answer["reference_length"] for answer in without} == {None}
