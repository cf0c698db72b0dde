"""Forced thoughts against the reference engine, groups and classes by hand, and a model that knows its problems."""

from random import Random

import pytest
import torch
from families import EXAMPLES, tiny_lm

from colar.analysis import diagnosis
from colar.analysis.controls import Forced
from colar.analysis.diagnosis import Token, classify, reference_groups, reference_rows, reference_thoughts
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch, variant
from colar.methods.colar.method import ColarParams

LIMITS = Decoding(max_latents=30, max_completion_length=6)
CHAIN = Example("x", "3 pens and 4 pens, twice?", ("<<3+4=7>>", "<<7*2=14>>"), "14")


def build(name, **config):
    lm = tiny_lm("llama")
    method = registry.build(name, config)
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return lm.eval(), method


@pytest.mark.parametrize("batch", [1, 3])
def test_forced_thoughts_are_fed_to_their_own_request_and_then_it_stops(batch):
    lm, method = build("colar")
    params = ColarParams(2)
    thoughts = reference_thoughts(lm, method, EXAMPLES, params)
    requests = [Request(e.id, e.question, params, LIMITS, keep_latents=True) for e in EXAMPLES]
    forced = Forced(method, requests, thoughts)
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
    done = Engine(lm, Forced(method, [request], thoughts)).generate([request])[0]
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
    flat = [token for group in reference_groups(lm, row, 3) for token in group]
    assert [token.token_id for token in flat] == row.chain
    results = "".join(lm.template.token(token.token_id) for token in flat if token.is_result)
    assert results == "714"


PLAN, RESULT = Token(1, False), Token(2, True)


@pytest.mark.parametrize(
    ("read", "parsed", "correct", "kind"),
    [
        ([{1, 9}, {2, 9}], True, True, "right"),
        ([], True, True, "right"),
        ([{1}, {2}], False, False, "unparsable"),
        ([{1, 9}, {2, 9}], True, False, "misread"),
        ([{9}, {2}], True, False, "wrong plan"),
        ([{1}, {9}], True, False, "wrong result"),
        ([{9}], True, False, "wrong plan"),
        ([{1}], True, False, "stopped early"),
        ([{1}, {2}, {1}], True, False, "stopped late"),
    ],
)
def test_a_wrong_answer_is_put_down_to_its_first_wrong_latent(read, parsed, correct, kind):
    assert classify([[PLAN], [RESULT]], read, parsed, correct) == kind
    assert kind in diagnosis.CLASSES


def test_a_group_with_an_operand_missing_is_a_wrong_plan():
    assert classify([[PLAN, RESULT]], [{9}], True, False) == "wrong plan"
    assert classify([[PLAN, RESULT]], [{1}], True, False) == "wrong result"


def test_writing_is_judged_position_by_position():
    """An untrained model whose head always says one token is right where the group is that token, and only there."""
    lm, method = build("cot")
    row = reference_rows(lm, method, [CHAIN], method.Params())[0]
    said = row.chain[2]
    head = lm.causal_lm.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
    head.bias.data[said] = 1e4
    (line,) = diagnosis.write(lm, method, [CHAIN], method.Params())
    assert line["groups"] == len(row.chain)
    assert line["right"] == row.chain.count(said)
    assert not line["stop_right"]


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
    found, lines = diagnosis.diagnose(lm, method, EXAMPLES, method.Params(), limits)
    assert found["n"] == len(examples) == len(lines)
    assert [found[name] for name in ("read", "write_group", "write_chain", "stop", "free")] == [1.0] * 5
    assert found["length"] == found["reference_length"]
    assert found["classes"]["right"] == 1.0
    row = {"model": "m", "compression_factor": None, "variant": "", **found}
    assert diagnosis.table([row]).row_count == 1
    assert (
        diagnosis.markdown([row])
        .splitlines()[2]
        .startswith("| m | - | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 |")
    )


def test_a_variant_names_what_is_not_the_default():
    assert variant(ColarParams(5)) == ""
    assert variant(ColarParams(5, snap=True)) == "snap"


@pytest.mark.parametrize("name", ["no_cot", "pause", "coconut", "distill"])
def test_thoughts_that_stand_for_no_tokens_are_refused(name):
    lm, method = build(name)
    with pytest.raises(ValueError, match=f"method {name} does not think in the reference chain's tokens"):
        diagnosis.diagnose(lm, method, EXAMPLES, method.Params(), LIMITS)
    with pytest.raises(ValueError, match="none of these rows has a reference chain"):
        diagnosis.diagnose(lm, method, [Example("t/2", "Bo is 9.", (), "9")], method.Params(), LIMITS)
