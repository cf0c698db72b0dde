"""Forced thoughts against the reference engine, groups and classes by hand, and a model that knows its problems."""

import io
import math
from random import Random

import pytest
import torch
from families import EXAMPLES, tiny_lm
from rich.console import Console

from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, NonFiniteError, Request
from colar.evaluation.controls import Forced
from colar.look import diagnosis, diagnosis_tables
from colar.look.diagnosis import classify, groups_thought, missing
from colar.look.places import Place, places, write_shares
from colar.look.reference_chain import (
    Token,
    kind_of,
    reference_groups,
    reference_rows,
    reference_thoughts,
    reference_tokens,
    require_groups,
)
from colar.methods import grouping, pretrained, registry
from colar.methods.base import Batch
from colar.methods.colar.method import ColarParams
from colar.methods.sequential import SequentialParams
from colar.ops import noise

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
    flat = reference_tokens(lm, row)
    assert [token.token_id for token in flat] == row.chain
    results = "".join(lm.template.token(token.token_id) for token in flat if token.is_result)
    assert results == "714"


PLAN, RESULT = Token(1, "operand"), Token(2, "result")


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


def test_a_token_that_was_chosen_once_is_said_once():
    """Where the reference has 11, a thought of 12 is wrong: it has one 1."""
    eleven = [Token(5, "sign"), Token(1, "result"), Token(1, "result")]
    assert diagnosis.says([5, 1, 1], [5, 1, 2]) == [True, True, False]
    assert missing(eleven, [5, 1, 2]) == [Token(1, "result")]
    assert missing(eleven, [1, 5, 1]) == []
    assert classify([eleven], [[5, 1, 2]], True, False) == "wrong result"
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
    assert [table.row_count for table in diagnosis_tables.tables([row])] == [1, 1]
    assert (
        diagnosis_tables.markdown([row])
        .splitlines()[2]
        .startswith("| m | - | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 |")
    )


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
        ("coconut", {"cot_epochs": 6.0}),
        # As many thoughts of its own as the chain has tokens, by chance.
        ("distill", {"n_latents": tokens_of(EXAMPLES[0])}),
        ("tokenskip", {}),
    ],
)
def test_thoughts_that_stand_for_no_tokens_are_refused(name, config):
    lm, method = build(name, **config)
    with pytest.raises(ValueError, match=f"method {name} does not think in the reference chain's tokens"):
        diagnosis.diagnose(lm, method, EXAMPLES, method.Params(), LIMITS)
    with pytest.raises(ValueError, match="none of these rows has a reference chain"):
        diagnosis.diagnose(lm, method, [Example("t/2", "Bo is 9.", (), "9")], method.Params(), LIMITS)


def test_a_whole_chain_of_tokenskip_is_compared_and_a_share_of_it_is_not():
    lm, method = build("tokenskip")
    require_groups(lm, method, EXAMPLES[:1], method.Params(1.0))
    with pytest.raises(ValueError, match=r"with TokenSkipParams\(ratio=0.7\): there is nothing to diagnose"):
        require_groups(lm, method, EXAMPLES[:1], method.Params(0.7))


def test_the_reference_of_a_curriculum_is_its_last_stages():
    lm, method = build("icot", most_removed=4, cot_epochs=2.0)
    (row,) = reference_rows(lm, method, EXAMPLES[:1], method.Params())
    whole = [token for step in lm.template.steps(EXAMPLES[0].steps) for token in step]
    assert row.chain == whole[4:]


def test_a_long_question_and_anothers_long_chain_fit_into_the_context_one_by_one():
    lm, method = build("cot")
    asked = [
        Example("long question", "Ann has pens. " * 21, ("<<3+4=7>>",), "7"),
        Example("long chain", "Bo?", ("<<3+4=7>>",) * 9, "7"),
    ]
    longest = [max(sizes) for sizes in zip(*[sizes_of(lm, each) for each in asked], strict=True)]
    assert sum(longest) > lm.context_length
    limits = Decoding(max_latents=20, max_completion_length=4)
    assert len(diagnosis.read(lm, method, asked, method.Params(), limits)) == 2


def sizes_of(lm, example):
    """Tokens of the question and of the chain."""
    return len(lm.template.question(example.question)), sum(map(len, lm.template.steps(example.steps)))


def test_numbers_that_are_not_finite_are_no_diagnosis():
    lm, method = build("colar")
    with torch.no_grad():
        next(iter(lm.extra["latent_head"].parameters())).fill_(math.nan)
    with pytest.raises(NonFiniteError, match=f"the model's numbers for {EXAMPLES[0].id} are not finite"):
        list(diagnosis.write(lm, method, EXAMPLES[:1], ColarParams(2)))


# Factors that are not whole, thoughts that are chosen as tokens


SEPARATOR = 5


def chosen(token_ids):
    """What a method says of a thought that it chose as these tokens, in a group of four places."""
    return {"group_ids": torch.tensor([*token_ids, *[-1] * (4 - len(token_ids))])}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2], [(0, "operand", True), (1, "result", True)]),
        ([1, 9], [(0, "operand", True), (1, "result", False)]),
        ([9, 2], [(0, "operand", False)]),
        ([SEPARATOR], [(0, "operand", False)]),
        ([1, SEPARATOR], [(0, "operand", True), (1, "result", False)]),
        ([1, 2, SEPARATOR], [(0, "operand", True), (1, "result", True), (2, "end", True)]),
        ([1, 2, 7], [(0, "operand", True), (1, "result", True), (2, "end", False)]),
        ([1], [(0, "operand", True)]),
    ],
)
def test_places_are_judged_up_to_the_first_wrong_token(ids, expected):
    lm, _ = build("cot")
    lm.template.separator_id = SEPARATOR
    assert places(lm, [PLAN, RESULT], ids) == [Place(*each) for each in expected]


def test_shares_by_place_by_hand():
    right = [Place(0, "operand", True), Place(1, "result", True)]
    second_wrong = [Place(0, "operand", True), Place(1, "result", False)]
    ended = [Place(0, "result", True), Place(1, "end", True), Place(2, "operand", True)]
    first_wrong = [Place(0, "operand", False)]
    found = write_shares([right, second_wrong, ended, first_wrong, first_wrong])
    assert found["write_by_place"] == [3 / 5, 2 / 3, 1]
    assert found["write_joint"] == 2 / 5
    assert found["write_by_kind"] == {
        "bracket": None,
        "sign": None,
        "operand": 3 / 5,
        "result": 2 / 3,
        "text": None,
        "end": 1,
    }
    assert write_shares([right])["write_by_kind"]["end"] is None
    # By what came before the group: t1 of the second one alone.
    behind = [Place(0, "sign", False, behind_number=True)]
    results = {"result_behind_one": 1, "result_behind_several": None}
    assert found["write_first"] == {"behind_number": None, "else": 3 / 5, **results}
    results["result_behind_one"] = None
    assert write_shares([right, behind])["write_first"] == {"behind_number": 0, "else": 1, **results}
    # Results, by how many tokens they had to be read from: those of later places do not count.
    read = [[Place(0, "result", i > 0, behind=2), Place(1, "result", False, behind=2)] for i in range(4)]
    once = write_shares([*read, [Place(0, "result", False, behind=1)]])["write_first"]
    assert (once["result_behind_several"], once["result_behind_one"]) == (3 / 4, 0)
    nothing = write_shares([])
    assert set(nothing) == {"write_by_place", "write_by_kind", "write_first", "write_joint"}
    assert not any(nothing.values())


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], False),
        ([RESULT], False),
        ([Token(4, "sign"), RESULT], False),
        ([PLAN, RESULT], True),
        ([RESULT, RESULT, Token(5, "bracket")], True),
    ],
)
def test_a_group_knows_whether_several_number_tokens_came_before(before, expected):
    lm, _ = build("cot")
    judged = places(lm, [PLAN, RESULT], [1, 2], before)
    assert [place.behind_number for place in judged] == [expected] * 2
    assert [place.behind for place in judged] == [len(before)] * 2


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (
            ["<<", "2", "0", "-", "4", "=", "1", "6", ">>"],
            "bracket operand operand sign operand sign result result bracket",
        ),
        (
            [" <<", "3.", "5", "*", "(", "2", ")", "="],
            "bracket operand operand sign sign operand sign sign",
        ),
        (["=-", "7", " apples", ">>"], "sign result result bracket"),
        (["Every", " lempus", " 12"], "text text operand"),
        (["a", "=", "b", "=", "8"], "text sign text sign result"),
        (["a", " ", "b", "\n"], "text text text text"),
    ],
)
def test_kinds_of_tokens_by_hand(step, kinds):
    last = max((i for i, text in enumerate(step) if "=" in text), default=len(step))
    assert [kind_of(text, i > last) for i, text in enumerate(step)] == kinds.split()


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
def beginner():
    return taught(40)


@pytest.fixture(scope="module")
def expert():
    return taught(160)


def most(k, c, phase):
    return math.floor((k + 1) * c + phase) - math.floor(k * c + phase)


@torch.no_grad()
def brute_force(lm, method, example, params):
    """(said, right, kind) of each place after a right prefix, group by group: plain loops over one row's tokens."""
    decoder, separator = lm.extra["group_decoder"], lm.template.separator_id
    embed = lambda ids: lm.embed(torch.tensor(ids))  # noqa: E731
    question = lm.template.question(example.question, method.prompt(params))
    steps = lm.template.steps(example.steps)
    kinds = []
    for step in steps:
        texts = [lm.template.token(token) for token in step]
        equals = max(i for i, text in enumerate(texts) if "=" in text)
        kinds += ["result" if i > equals and text.strip(" >") else "other" for i, text in enumerate(texts)]
    chain, kinds = [token for step in steps for token in step], [*kinds, "end"]
    phase = grouping.phase(torch.tensor([noise.seed_from(0, example.id)])).item()
    fed, start, k, judged = list(embed(question)), 0, 0, []
    while start < len(chain):
        size = most(k, params.compression_factor, phase)
        labels = [*chain, separator][start : start + size]
        state, group = lm.hidden(torch.stack(fed)[None])[0, -1], []
        for j, label in enumerate(labels):
            if j:
                state = decoder(state, embed([labels[j - 1]])[0])
            probabilities = lm.logits(state).softmax(-1)
            said = int(probabilities.argmax())
            if j and probabilities[said] < params.confidence_threshold:
                break
            group.append((j, kinds[start + j], said == label))
            if said != label:
                break
        judged.append(group)
        taken = chain[start : start + size]
        fed.append(embed(taken).sum(0) / math.sqrt(len(taken)))
        start += len(taken)
        k += 1
    return judged


@pytest.mark.parametrize("c", FACTORS)
def test_writing_by_place_equals_a_count(beginner, c):
    lm, method = beginner
    params = SequentialParams(c)
    expected, found = [], []
    for example, record in zip(TAUGHT, diagnosis.write(lm, method, TAUGHT, params), strict=True):
        expected += brute_force(lm, method, example, params)
        found += record["places"]
        # All tokens right, order included, is more than all tokens there.
        joint = sum(all(place.right for place in group) for group in record["places"])
        assert joint <= record["right"]
        assert len(record["places"]) == record["groups"]
    coarse = {"result": "result", "end": "end"}
    judged = [[(p.place, coarse.get(p.kind, "other"), p.right) for p in group] for group in found]
    assert judged == expected
    shares = write_shares(found)
    assert len(shares["write_by_place"]) <= math.ceil(c)
    assert 0.1 < shares["write_by_place"][0] < 1
    assert shares["write_joint"] == sum(all(right for *_, right in group) for group in expected) / len(
        expected
    )
    said = [group[0][2] for group in expected]
    assert shares["write_by_place"][0] == sum(said) / len(said)


def test_tokens_that_a_threshold_holds_back_are_not_counted(beginner):
    """Whole c, so that all groups that the reference has are those of training without a cut where none is unsure."""
    lm, method = beginner
    counts = []
    for threshold in (0, 0.6, 1):
        params = SequentialParams(3, confidence_threshold=threshold)
        records = list(diagnosis.write(lm, method, TAUGHT, params))
        judged = [place for record in records for group in record["places"] for place in group]
        counts.append([sum(place.place == j for place in judged) for j in range(3)])
        chains = sum(len(reference_tokens(lm, row)) for row in reference_rows(lm, method, TAUGHT, params))
        if threshold == 1:
            # One token a group: as many groups as tokens, each right or wrong by its first place.
            assert sum(record["groups"] for record in records) == chains
            assert counts[-1] == [chains, 0, 0]
            assert all(
                record["right"] == sum(group[0].right for group in record["places"]) for record in records
            )
    assert counts[0][1] > counts[1][1] > 0


@pytest.mark.parametrize("threshold", [0, 0.5])
@pytest.mark.parametrize("c", FACTORS)
def test_who_knows_its_problems_knows_them_in_groups_of_any_size(expert, c, threshold):
    """Reference, writing and thinking agree on every group's size: their phases are the same."""
    lm, method = expert
    limits = Decoding(max_latents=40, max_completion_length=12)
    params = SequentialParams(c, confidence_threshold=threshold)
    found, lines = diagnosis.diagnose(lm, method, TAUGHT, params, limits)
    assert [found[name] for name in ("read", "write_group", "write_chain", "stop", "free")] == [1.0] * 5
    assert found["length"] == found["reference_length"]
    assert found["classes"]["right"] == 1.0
    assert set(found["write_by_place"]) == {1.0}
    assert len(found["write_by_place"]) == math.ceil(c)
    assert found["write_joint"] == 1.0
    assert {line["class"] for line in lines} == {"right"}


def test_reference_groups_are_those_of_training(beginner):
    lm, method = beginner
    sizes = set()
    for example in EXAMPLES:
        (row,) = reference_rows(lm, method, [example], SequentialParams(1.5))
        phase = grouping.phase(torch.tensor([row.seed])).item()
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
        self.info = list(infos)


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


def test_places_have_columns_where_any_row_has_them():
    lm, method = build("colar")
    latent, _ = diagnosis.diagnose(lm, method, EXAMPLES, ColarParams(2), LIMITS)
    assert latent["write_by_place"] is None
    assert latent["write_by_kind"] is None
    assert latent["write_joint"] is None
    one = {"model": "paper", "compression_factor": 2, "variant": "", **latent}
    # As before there was such a thing: rows of an older diagnosis.json have no such keys.
    old = {
        key: value
        for key, value in one.items()
        if key not in ("write_by_place", "write_by_kind", "write_joint")
    }
    assert diagnosis_tables.markdown([old]) == diagnosis_tables.markdown([one])
    assert diagnosis_tables.markdown([one]).splitlines()[0].endswith("| wrong result | misread |")
    other = {
        **one,
        "model": "ours",
        "compression_factor": 1.5,
        "write_by_place": [0.5, 0.25],
        "write_joint": 0.125,
    }
    lines = diagnosis_tables.markdown([one, other]).splitlines()
    assert lines[0].endswith("| misread | t1 | t2 | joint |")
    # Systems are called as their folders are: no markup of a page, and none of a terminal.
    assert "| a\\|b\\*[/x] |" in diagnosis_tables.markdown([{**one, "model": "a|b*[/x]"}])
    console = Console(width=300, file=io.StringIO())
    for table in diagnosis_tables.tables([{**one, "model": "a|b*[/x]:star:"}]):
        console.print(table)
    assert "a|b*[/x]:star:" in console.file.getvalue()
    assert lines[2].endswith("| - | - | - |")
    assert lines[3].startswith("| ours | 1.5 |")
    assert lines[3].endswith("| 50.0 | 25.0 | 12.5 |")
    assert len(diagnosis_tables.tables([one])) == 2
    assert len(diagnosis_tables.tables([one, other])) == 3
