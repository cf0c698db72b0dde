"""What the methods beside CoLaR feed, label and train: by hand, against one full forward, and by gradients."""

import dataclasses
import math
from collections import Counter
from random import Random

import pytest
import torch
from families import CONTEXT, EXAMPLES, OWN_LOSS, WINDOW, tiny_lm
from torch.nn import functional as F

from colar.data.arithmetic import ArithmeticConfig, generate
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import base, pretrained, registry
from colar.methods import tokenskip as importance
from colar.methods.base import Batch, keep_tokens
from colar.methods.coconut import Coconut, CoconutConfig
from colar.methods.distill import alignment
from colar.methods.icot import Icot, IcotConfig, offset
from colar.methods.tokenskip import ScoredExample, TokenSkipParams, prune
from colar.methods.unroll import Unrolled, unroll
from colar.model import backbones
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training import preflight
from colar.training.config import TrainingConfig
from colar.training.sft import train

FAMILIES = ("llama", "gemma3", "gpt2")
LAST = math.inf
NEW = ("icot", "coconut", "distill", "tokenskip", "pause", "ruplar", "sim_cot")


def build(name, family="llama", lora=None, **config):
    """Model and method, prepared as before training."""
    lm = tiny_lm(family, lora=lora)
    method = registry.build(name, config)
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return lm, method


def encode(lm, method, examples=EXAMPLES, epoch=0.0):
    return [method.encode(lm.template, example, Random(i), epoch) for i, example in enumerate(examples)]


def row_loss(lm, method, rows):
    """(B,) the rows' losses."""
    terms = method.loss(lm, Batch.collate(rows))
    return sum(value for name, value in terms.items() if not name.startswith("_"))


def ids(*tokens):
    return torch.tensor(tokens, dtype=torch.int64)


# One full forward over what was fed


def naive_latents(lm, question, n, latent):
    """n latents of one row, each from a full forward over all before it: no cache, no batch, no padding."""
    fed = [*lm.embed(ids(*question))]
    for _ in range(n):
        fed.append(latent(lm.hidden(torch.stack(fed)[None])[0, -1]))
    return fed


def naive_ce(lm, fed, labels):
    """Mean of -log p(label) over the last positions of `fed`, the last label predicted from the last but one."""
    log_probs = lm.logits(lm.hidden(torch.stack(fed)[None])[0]).log_softmax(-1)
    first = len(fed) - len(labels) - 1
    return -torch.stack([log_probs[first + i, label] for i, label in enumerate(labels)]).mean()


STAGES = [0.0, 1.0, LAST]


@pytest.mark.parametrize(("family", "checkpointing"), [("gemma3", False), ("gemma3", True), ("gpt2", True)])
def test_coconuts_loss_and_gradient_are_those_of_one_full_forward(family, checkpointing):
    """PITFALLS 1: rows of all stages in one batch, through a cache; and without one, under gradient checkpointing."""
    lm, method = build("coconut", family, epochs_per_stage=1, n_stages=2)
    lm.double()
    # Of one step, of none, and of three.
    rows = [row for epoch in STAGES for row in encode(lm, method, (EXAMPLES[0], *EXAMPLES[2:4]), epoch)]
    assert {row.n_latents for row in rows} == {2, 4}
    assert max(len(row.question) for row in rows) > 2 * WINDOW
    if checkpointing:
        undropped(lm.train())
        lm.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert Unrolled(lm).cache is None
    found = row_loss(lm, method, rows)
    found.sum().backward()
    gradient = {name: p.grad for name, p in lm.named_parameters()}
    lm.zero_grad()
    lm.eval()
    assert Unrolled(lm).cache is not None
    expected = []
    for row in rows:
        fed = naive_latents(lm, row.question, row.n_latents, lambda hidden: hidden)
        tail = [*row.chain, *row.answer]
        expected.append(naive_ce(lm, [*fed, *lm.embed(ids(*tail))], tail))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=1e-6)
    torch.stack(expected).sum().backward()
    for name, p in lm.named_parameters():
        torch.testing.assert_close(gradient[name], p.grad, rtol=1e-3, atol=1e-4, msg=name)


def undropped(lm):
    """Without GPT-2's dropout, which would make two forwards differ."""
    for module in lm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_distills_terms_are_those_of_two_full_forwards(family):
    lm, method = build("distill", family, align_weight=5.0)
    lm.double()
    rows = encode(lm, method)
    found = method.loss(lm, Batch.collate(rows))
    for b, (row, example) in enumerate(zip(rows, EXAMPLES, strict=True)):
        assert row.steps == lm.template.steps(example.steps)[:-1], "the last step's result is the answer"
        chain, answer = [*lm.embed(ids(*row.chain))], [*lm.embed(ids(*row.answer))]
        latents = naive_latents(lm, row.question, 6, lambda hidden: method.project(lm, hidden))
        teacher = [*lm.embed(ids(*row.question)), *chain, *answer]
        close = {"rtol": 1e-5, "atol": 1e-6}
        student_ce = naive_ce(lm, [*latents, *answer], row.answer[1:])
        torch.testing.assert_close(found["student"][b], student_ce, **close)
        teacher_ce = naive_ce(lm, teacher, [*row.chain, *row.answer])
        torch.testing.assert_close(found["teacher"][b], teacher_ce, **close)
        # Their states at the separator before the answer, by the backbone's own forward: embeddings, then layers.
        states = [
            lm.causal_lm(inputs_embeds=torch.stack(fed)[None], output_hidden_states=True).hidden_states
            for fed in ([*latents, *answer], teacher)
        ]
        at = [[layer[0, -len(answer)] for layer in one[1:]] for one in states]
        assert len(at[0]) == lm.config.num_hidden_layers
        parts = [F.smooth_l1_loss(s, t) / t.std() for s, t in zip(*at, strict=True)]
        torch.testing.assert_close(
            found["align"][b].double(), 5 * torch.stack(parts).mean(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_is_cot_and_does_not_know_of_the_student(family):
    """PITFALLS 6: a cache that both wrote to would change one of them."""
    lm, method = build("distill", family)
    cot = registry.build("cot")
    rows = encode(lm, method)
    batch = Batch.collate(rows)
    # Of a chain without its last step.
    shorter = [dataclasses.replace(row, steps=row.steps[:-1]) for row in encode(lm, cot)]
    expected = cot.loss(lm, Batch.collate(shorter))["ce"]
    teacher, _ = method._teacher(lm, batch)
    student, states = method._student(lm, batch)
    torch.testing.assert_close(teacher, expected)
    both = method.loss(lm, batch)
    torch.testing.assert_close(both["teacher"], expected)
    torch.testing.assert_close(both["student"], student)
    # The student's side does not depend on the chain that the teacher reads.
    without = Batch.collate([dataclasses.replace(row, steps=[]) for row in rows])
    alone, alone_states = method._student(lm, without)
    torch.testing.assert_close(alone, student)
    torch.testing.assert_close(alone_states, states)


def test_alignment_by_hand():
    student = [torch.tensor([[1.0, 5.0]]), torch.tensor([[0.0, 0.0]])]
    teacher = [torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, -0.5]])]
    std = [math.sqrt(2), math.sqrt(0.5)]
    # smooth-L1: d - 1/2 from 1 on, d^2 / 2 below
    assert alignment(student, teacher).item() == pytest.approx((1.5 / std[0] + 0.125 / std[1]) / 2)


@pytest.mark.parametrize("name", ["coconut", "distill"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_training_fed_is_what_thinking_feeds(family, name):
    """The step-by-step latents of a request are those of the loss's forward, and of one forward over all of them."""
    lm, method = build(name, family)
    lm.double()
    rows = encode(lm, method, epoch=LAST)
    batch = Batch.collate(rows)
    if name == "coconut":
        _, latents = method.ce_and_latents(lm, batch)
    else:
        _, _, latents = method._unroll(lm, batch)
    assert latents.shape[:2] == (len(rows), 6)
    for b, row in enumerate(rows):
        fed = torch.cat([lm.embed(ids(*row.question)), latents[b]])
        hidden = lm.hidden(fed[None])[0, len(row.question) - 1 : -1]
        again = hidden if name == "coconut" else method.project(lm, hidden)
        torch.testing.assert_close(latents[b], again, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2"])
def test_layers_end_with_the_hidden_states(family):
    lm = tiny_lm(family)
    embeds = lm.embed(ids(5, 6, 7, 8)[None])
    layers = lm.layers(embeds)
    theirs = lm.causal_lm(inputs_embeds=embeds, output_hidden_states=True).hidden_states
    assert len(layers) == lm.config.num_hidden_layers == len(theirs) - 1
    torch.testing.assert_close(layers[-1], lm.hidden(embeds))
    torch.testing.assert_close(list(layers), list(theirs[1:]))


# The suite over all methods, or over all losses


@pytest.mark.parametrize("name", list(registry.METHODS))
def test_a_checkpoint_brings_the_method_back(tmp_path, name):
    lm, method = build(name)
    examples = list(method.prepare(lm, EXAMPLES))
    pretrained.save(lm, method, tmp_path / "made", {}, "a card")
    again, loaded = pretrained.load(tmp_path / "made")
    assert (loaded.name, loaded.config) == (method.name, method.config)
    rows = encode(lm, method, examples, LAST)
    assert encode(again, loaded, examples, LAST) == rows
    # A published checkpoint has no loss to compute: what only that needs is made of the weights that came back.
    again.add_modules(loaded.training_modules(again), training_only=True)
    torch.testing.assert_close(row_loss(again, loaded, rows), row_loss(lm, method, rows))


@pytest.mark.parametrize("name", OWN_LOSS)
@pytest.mark.parametrize("lora", [None, LoraSettings(r=2)], ids=["full", "lora"])
def test_gradients_reach_the_trainable_set_and_nothing_else(name, lora):
    """The method's modules included; the spread of CoLaR's head too."""
    lm, method = build(name, lora=lora)
    rows = encode(lm, method, list(method.prepare(lm, EXAMPLES)), epoch=4.0)
    for parameter_name, p in lm.named_parameters():
        if "lora_B" in parameter_name or "group_decoder.mlp.2" in parameter_name:
            torch.nn.init.normal_(p)  # zero at first, which would hide the gradients of what comes before
    row_loss(lm, method, rows).sum().backward()
    trainable = {n for n, p in lm.named_parameters() if p.requires_grad}
    reached = {n for n, p in lm.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached == trainable
    assert any(n.startswith("extra.") for n in trainable) == bool(lm.extra)
    assert any("lora_" in n for n in trainable) == (lora is not None)


# Where gradients flow, and where not


def reaches_the_question(lm, row, fed_KD):
    """Whether -log p(answer | latents), with the question itself out of sight, has a gradient at the question's words."""
    (token, *_) = [t for t in row.question if row.question.count(t) == 1 and t not in row.answer]
    lm.zero_grad()
    naive_ce(lm, [*fed_KD, *lm.embed(ids(*row.answer))], row.answer[1:]).backward()
    return lm.causal_lm.get_input_embeddings().weight.grad[token].abs().sum() > 1e-6


def test_gradients_flow_through_latents_of_coconut_and_distill():
    """What the answer knows of the question it knows through the latents alone here: they must carry gradient."""
    lm, coconut = build("coconut")
    (row, *_) = encode(lm, coconut, epoch=LAST)
    tail, real = lm.embed(ids(*[0] * 6)[None]), torch.ones(1, 6, dtype=torch.bool)
    _, _, fed = unroll(lm, Batch.collate([row]), tail, real, lambda hidden: hidden)
    assert reaches_the_question(lm, row, fed[0])
    assert not reaches_the_question(lm, row, fed[0].detach()), "the test can fail"
    lm, distill = build("distill")
    (row, *_) = encode(lm, distill)
    _, _, fed = distill._unroll(lm, Batch.collate([row]))
    assert reaches_the_question(lm, row, fed[0])
    assert lm.extra["projection"][0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", list(registry.METHODS))
def test_a_method_says_whether_it_thinks_in_latents(name):
    """What controls go by: latents are fed, or tokens (or nothing)."""
    lm, method = build(name)
    method.prepare(lm, EXAMPLES)
    decoding = Decoding(max_latents=4, max_completion_length=2)
    requests = [Request(e.id, e.question, method.Params(), decoding) for e in EXAMPLES]
    thoughts = [done.thought_ids for done in Engine(lm, method, 4).generate(requests)]
    latents = sum(ids.count(-1) for ids in thoughts)
    assert (latents > 0) == method.thinks_in_latents


@pytest.mark.parametrize("name", OWN_LOSS)
def test_gradient_checkpointing_changes_nothing(name):
    """Layers that recompute drop their cache without a word: latents would then not see the question.

    With an adapter: tests/test_methods.py and tests/test_training.py.
    """
    lm, method = build(name)
    rows = encode(lm, method, epoch=4.0)
    lm.train()
    found = []
    for _ in range(2):
        lm.zero_grad()
        loss = row_loss(lm, method, rows)
        loss.sum().backward()
        found.append((loss.detach(), {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}))
        lm.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-3)
    assert found[0][1].keys() == found[1][1].keys()
    for parameter_name, gradient in found[0][1].items():
        again = found[1][1][parameter_name]
        assert torch.nn.functional.cosine_similarity(
            gradient.flatten(), again.flatten(), dim=0
        ) > 0.999 or not (gradient.any() or again.any())


def test_alignment_moves_the_student_and_not_the_teacher():
    """A token that only the chain holds is the teacher's alone: the alignment gives it no gradient, the other does."""
    lm, method = build("distill")
    row = encode(lm, method)[1]
    (token, *_) = [t for t in row.chain if t not in (*row.question, *row.answer)]
    terms = method.loss(lm, Batch.collate([row]))
    lm.zero_grad()
    terms["align"].sum().backward(retain_graph=True)
    weight = lm.causal_lm.get_input_embeddings().weight
    assert weight.grad[token].abs().sum() == 0
    assert weight.grad[row.question[3]].abs().sum() > 0, "through the latents"
    assert lm.extra["projection"][0].weight.grad.abs().sum() > 0
    lm.zero_grad()
    terms["teacher"].sum().backward()
    assert weight.grad[token].abs().sum() > 0
    projection = lm.extra["projection"][0].weight.grad
    assert projection is None or projection.abs().sum() == 0


# Stages


@pytest.mark.parametrize(
    ("config", "table"),
    [
        # Three epochs a stage: 0-2, 3-5, 6-8, then no steps are left (PITFALLS 2: not one stage an epoch).
        ({}, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4]),
        ({"epochs_per_stage": 1, "n_stages": 2}, [1, 2, 3, 3]),
        ({"epochs_per_stage": 0.5, "n_stages": 3}, [1, 3, 4, 4]),
    ],
    ids=str,
)
def test_coconuts_stage_table(config, table):
    method = Coconut(CoconutConfig(**config))
    assert [method.stage(float(epoch)) for epoch in range(len(table))] == table
    assert method.stage(LAST) == max(table)


def test_a_stage_begins_where_its_epoch_does():
    method = Coconut(CoconutConfig(epochs_per_stage=0.1, n_stages=5))
    assert [method.stage(i / 10) for i in range(7)] == [1, 2, 3, 4, 5, 6, 6]
    assert method.stage(0.29) == 3
    icot = Icot(IcotConfig(removed_per_epoch=10))
    assert [icot.stage(i / 10) for i in range(10)] == list(range(10))


CHAIN = Example("c/0", "3 pens and 4 pens, twice?", ("<<3+4=7>>", "<<7*2=14>>", "<<14+1=15>>"), "15")


@pytest.mark.parametrize(
    ("epoch", "n_latents", "steps_left"),
    [(0, 2, 2), (2.99, 2, 2), (3, 4, 1), (6, 6, 0), (9, 6, 0)],
)
def test_coconut_trades_steps_for_latents(epoch, n_latents, steps_left):
    lm, method = build("coconut")
    row = method.encode(lm.template, CHAIN, Random(0), float(epoch))
    steps = lm.template.steps(CHAIN.steps)
    assert (row.n_latents, row.steps) == (n_latents, steps[len(steps) - steps_left :])
    assert len(row) == len(row.question) + n_latents + len(row.chain) + len(row.answer)
    # A chain that is longer than the stages goes in the last one, a shorter one keeps its stage's latents.
    long = dataclasses.replace(CHAIN, steps=CHAIN.steps * 2)
    expected = [] if epoch >= 9 else lm.template.steps(long.steps)[n_latents // 2 :]
    assert method.encode(lm.template, long, Random(0), float(epoch)).steps == expected
    short = method.encode(lm.template, EXAMPLES[2], Random(0), float(epoch))
    assert (short.n_latents, short.steps) == (n_latents, [])


@pytest.mark.parametrize(
    ("config", "table"),
    [
        ({"removed_per_epoch": 2, "remove_all_at": 5}, {0: 0, 0.49: 0, 0.5: 1, 1: 2, 2: 4, 2.5: 5, 9: 5}),
        ({"removed_per_epoch": 8}, {0.25: 2, 1: 8, 4.75: 38, 4.875: 39, LAST: 39}),
        ({"removed_per_epoch": 0.5, "remove_all_at": 3}, {1.99: 0, 2: 1, 4: 2, 6: 3, 7: 3}),
    ],
    ids=str,
)
def test_icots_stage_table(config, table):
    method = Icot(IcotConfig(**config))
    assert {epoch: method.stage(epoch) for epoch in table} == table


def test_icot_removes_the_front_of_the_chain():
    lm, _ = build("icot")
    steps = lm.template.steps(CHAIN.steps)
    chain = [token for step in steps for token in step]
    config = {"smoothing_lambda": None, "removed_per_epoch": 1, "remove_all_at": 5}
    method = registry.build("icot", config)
    for epoch in range(5):
        row = method.encode(lm.template, CHAIN, Random(0), float(epoch))
        assert row.chain == chain[epoch:]
    assert method.encode(lm.template, CHAIN, Random(0), 5.0).chain == [], "all at once, however long"


def test_a_step_that_has_lost_all_its_tokens_is_gone():
    assert keep_tokens([[1, 2], [3], [4, 5]], range(5)) == [[1, 2], [3], [4, 5]]
    assert keep_tokens([[1, 2], [3], [4, 5]], range(1, 5)) == [[2], [3], [4, 5]]
    assert keep_tokens([[1, 2], [3], [4, 5]], range(4, 5)) == [[5]]
    assert keep_tokens([[1, 2], [3], [4, 5]], range(9, 5)) == []


def test_removal_smoothing_is_exponential():
    """P(o) = (1 - exp(-lambda)) exp(-lambda o), by 20,000 draws, and in the rows themselves."""
    rng = Random(0)
    counts = Counter(offset(rng.random(), 0.7) for _ in range(20_000))
    for o in range(5):
        expected = (1 - math.exp(-0.7)) * math.exp(-0.7 * o)
        assert counts[o] / 20_000 == pytest.approx(expected, abs=0.012)
    assert offset(0.999, None) == 0
    lm, method = build("icot", smoothing_lambda=0.7)
    chain = [token for step in lm.template.steps(CHAIN.steps) for token in step]
    rows = [method.encode(lm.template, CHAIN, Random(i), 0.25) for i in range(300)]
    removed = Counter(len(chain) - len(row.chain) for row in rows)
    assert min(removed) == 2
    assert removed[2] / 300 == pytest.approx(1 - math.exp(-0.7), abs=0.09)
    assert all(row.chain == chain[len(chain) - len(row.chain) :] for row in rows)


# TokenSkip


def test_pruning_keeps_the_most_important_tokens_in_order():
    steps, scores = [[1, 2], [3, 4, 5]], (0.5, 0.1, 0.9, 0.1, 0.7)
    assert prune(steps, scores, 1.0) == steps
    assert prune(steps, scores, 0.6) == [[1], [3, 5]]
    assert prune(steps, scores, 0.5) == [[1], [3, 5]], "three of five: the count is rounded up"
    assert prune(steps, scores, 0.4) == [[3, 5]]
    assert prune(steps, scores, 0.8) == [[1, 2], [3, 5]], "of equals the earlier stays"
    assert prune(steps, scores, 0.01) == [[3]]
    assert prune([], (), 0.5) == []


def test_a_ratio_is_drawn_named_and_kept():
    lm, method = build("tokenskip")
    (scored,) = method.prepare(lm, [CHAIN])
    assert isinstance(scored, ScoredExample)
    whole = [token for step in lm.template.steps(CHAIN.steps) for token in step]
    assert len(scored.importance) == len(whole)
    rows = [method.encode(lm.template, scored, Random(i), 0.0) for i in range(60)]
    assert {row.params.ratio for row in rows} == {0.5, 0.6, 0.7, 0.8, 0.9, 1.0}
    for row in rows:
        ratio = row.params.ratio
        assert row.question == lm.template.question(CHAIN.question, f"(Tokens kept: {ratio:g})")
        assert len(row.chain) == math.ceil(ratio * len(whole) - 1e-9)
    assert rows == [method.encode(lm.template, scored, Random(i), 0.0) for i in range(60)]
    plain = method.encode(lm.template, CHAIN, Random(0), 0.0)
    assert (plain.chain, plain.params) == (whole, TokenSkipParams(1.0)), "not scored: whole, and it says so"


@pytest.mark.parametrize("family", FAMILIES)
def test_surprisal_is_the_backbones_own(family):
    """One row, by Hugging Face's forward; more rows than are scored at once come back in order."""
    lm, _ = build("tokenskip", family)
    examples = [EXAMPLES[i % len(EXAMPLES)] for i in range(importance.ROWS + 5)]
    lm.train()
    found = list(importance.surprisal(lm, examples))
    assert lm.training, "as it was"
    lm.eval()
    assert len(found) == len(examples)
    for example, scores in zip(examples[-8:], found[-8:], strict=True):
        question = lm.template.question(example.question)
        chain = [token for step in lm.template.steps(example.steps) for token in step]
        log_probs = lm.causal_lm(ids(*question, *chain)[None]).logits[0].log_softmax(-1)
        expected = [-log_probs[len(question) - 1 + i, token].item() for i, token in enumerate(chain)]
        assert scores == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_chain_beyond_the_context_is_not_scored():
    """And long ones are not scored together: by parts they have the scores that they have alone."""
    lm, method = build("tokenskip")
    far = Example("far", "q", ("1 " * CONTEXT,), "1")
    rows = list(method.prepare(lm, [EXAMPLES[0], far, EXAMPLES[1]]))
    assert [isinstance(row, ScoredExample) for row in rows] == [True, False, True]
    assert [row.id for row in rows] == [EXAMPLES[0].id, "far", EXAMPLES[1].id]
    assert len(method.encode(lm.template, rows[1], Random(0), 0.0)) > CONTEXT
    fed = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(importance, "POSITIONS", 2 * 64)
        hidden = lm.hidden
        patched.setattr(
            lm, "hidden", lambda embeds, *more: fed.append(embeds.shape[0]) or hidden(embeds, *more)
        )
        found = importance.surprisal(lm, EXAMPLES[:4])
    assert len(fed) > 1
    for scores, example in zip(found, EXAMPLES, strict=False):
        assert scores == pytest.approx(importance.surprisal(lm, [example])[0], abs=1e-4)


def test_ratios_beyond_what_was_trained():
    method = registry.build("tokenskip", {"ratios": [0.5, 1]})
    assert method.check_params(TokenSkipParams(0.5)) is None
    assert method.check_params(TokenSkipParams(1.0)) is None
    assert (
        method.check_params(TokenSkipParams(0.3))
        == "ratio 0.3 was not trained (trained: 0.5, 1): expect less"
    )


# Pause


def test_pauses_are_multiples_of_the_embeddings_scale():
    """Gemma's embeddings are scaled in their module: what is fed must be of that scale, whatever the family."""
    for family in FAMILIES:
        lm, method = build("pause", family, n_pauses=40)
        vocabulary = lm.embedding_table()
        assert method.pauses(lm).std().item() == pytest.approx(vocabulary.std().item(), rel=0.1)


def test_an_unprepared_pause_says_so():
    lm = tiny_lm("llama")
    method = registry.build("pause")
    pretrained.attach(lm, method, seed=0)
    with pytest.raises(ValueError, match="sigma_e"):
        row_loss(lm, method, encode(lm, method))


@pytest.mark.parametrize("family", FAMILIES)
def test_pauses_loss_is_the_answers_after_them(family):
    lm, method = build("pause", family)
    rows = encode(lm, method)
    found = row_loss(lm, method, rows)
    for b, row in enumerate(rows):
        assert row.chain == []
        fed = [*lm.embed(ids(*row.question)), *method.pauses(lm), *lm.embed(ids(*row.answer))]
        torch.testing.assert_close(found[b], naive_ce(lm, fed, row.answer[1:]), rtol=1e-4, atol=1e-5)
    decoding = Decoding(max_latents=8, max_completion_length=2)
    request = Request("q", EXAMPLES[0].question, method.Params(), decoding, keep_latents=True)
    (done,) = Engine(lm, method).generate([request])
    torch.testing.assert_close(done.latents, method.pauses(lm))


# Configs


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "coconut",
            {"n_latents_per_step": 0},
            "method.n_latents_per_step must be a whole number, 1 or more, got 0",
        ),
        ("coconut", {"n_stages": 1.5}, "method.n_stages must be a whole number, got 1.5"),
        (
            "coconut",
            {"epochs_per_stage": 0},
            "method.epochs_per_stage must be a number, 1e-06 or more, got 0",
        ),
        ("coconut", {"epochs_per_stage": math.nan}, "method.epochs_per_stage must be a number, got nan"),
        (
            "coconut",
            {"n_latents": 6},
            "unknown key 'method.n_latents', did you mean 'method.n_latents_per_step'?",
        ),
        (
            "icot",
            {"removed_per_epoch": -1},
            "method.removed_per_epoch must be a number, 1e-06 or more, got -1",
        ),
        (
            "icot",
            {"smoothing_lambda": "4"},
            "method.smoothing_lambda must be a number or null, got '4'",
        ),
        ("icot", {"remove_all_at": 0}, "method.remove_all_at must be a whole number, 1 or more, got 0"),
        ("distill", {"n_latents": 0}, "method.n_latents must be a whole number, 1 or more, got 0"),
        ("distill", {"align_weight": -1}, "method.align_weight must be a number, 0 or more, got -1"),
        ("tokenskip", {"ratios": []}, "method.ratios must be a list of numbers, got ()"),
        (
            "tokenskip",
            {"ratios": [0.5, 1.2]},
            "each of method.ratios must be a number, from 1e-06 to 1, got 1.2",
        ),
        ("tokenskip", {"ratios": 0.5}, "method.ratios must be a list (a number each), got 0.5"),
        ("pause", {"n_pauses": 0}, "method.n_pauses must be a whole number, 1 or more, got 0"),
        ("pause", {"sigma_e": -1}, "method.sigma_e must be above 0 or null, got -1"),
        ("ruplar", {"result_share": 1.5}, "method.result_share must be a number, from 0 to 1, got 1.5"),
        ("ruplar", {"kl_weight": -1}, "method.kl_weight must be a number, 0 or more, got -1"),
        ("ruplar", {"align_weight": "1"}, "method.align_weight must be a number"),
        ("ruplar", {"kl_wight": 1}, "unknown key 'method.kl_wight', did you mean 'method.kl_weight'?"),
        ("sim_cot", {"decoder_weight": -1}, "method.decoder_weight must be a number, 0 or more, got -1"),
        ("sim_cot", {"n_stages": 0}, "method.n_stages must be a whole number, 1 or more, got 0"),
        (
            "sim_cot",
            {"decoder_wight": 1},
            "unknown key 'method.decoder_wight', did you mean 'method.decoder_weight'?",
        ),
    ],
    ids=str,
)
def test_config_errors_name_the_key_and_the_allowed(name, config, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (checked below, as plain text)
        registry.build(name, config)
    assert message in str(error.value)


@pytest.mark.parametrize("ratio", [0, 1.5, -1, math.nan, True, "1", None])
def test_a_ratio_that_is_none(ratio):
    with pytest.raises(ValueError, match="ratio (is blank .*: it )?must be"):
        registry.make_params(registry.build("tokenskip"), {"ratio": ratio})


def test_a_row_with_its_latents_fits_the_context():
    """What is checked before training counts the latents too."""
    lm, method = build("pause", n_pauses=CONTEXT)
    (row,) = encode(lm, method, EXAMPLES[:1])
    assert len(row) > CONTEXT
    assert base.Batch.collate([row]).n_latents.tolist() == [CONTEXT]


def test_positions_are_those_of_all_forwards():
    """Distill feeds a teacher and a student; the decoder of SIM-CoT reads latents and texts again."""
    lm, method = build("distill", n_latents=5)
    rows = encode(lm, method)
    found = method.positions(base.Batch.collate(rows)).tolist()
    assert found == [len(row) + len(row.question) + len(row.answer) for row in rows]
    lm, method = build("sim_cot", epochs_per_stage=1, n_latents_per_step=2)
    rows = encode(lm, method, epoch=2.0)
    texts = [sum(map(len, row.latent_texts)) for row in rows]
    assert all(row.n_latents and text for row, text in zip(rows, texts, strict=True))
    found = method.positions(base.Batch.collate(rows)).tolist()
    assert found == [len(row) + row.n_latents + text for row, text in zip(rows, texts, strict=True)]


# Through training


TOY = list(generate(ArithmeticConfig(), "train", 16, seed=0))


def trained(folder, name, held_out=(), **config):
    """A run of two updates an epoch on the tiny backbone; what each loss saw (held-out rows included)."""
    seen = []
    watched = type(
        "Watched", (registry.METHODS[name],), {"loss": watching(registry.METHODS[name].loss, seen)}
    )
    made = registry.build(name, config.pop("method", {}))
    method = watched(made.config)
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    pretrained.attach(lm, method, 0)
    settings = {"per_device_train_batch_size": 8, "report_to": "none", "logging_steps": 1, "save_steps": 1000}
    validate = (lambda lm, method: {"accuracy": 0.0}) if held_out else None
    config = TrainingConfig(**{**settings, **config})
    with pytest.MonkeyPatch.context() as patched:
        # Losses are counted: those before the first step are no updates.
        patched.setattr(preflight, "before_training", lambda *_: None)
        result = train(lm, method, TOY, config, folder, held_out=held_out, validate=validate)
    return lm, seen, result


def watching(loss, seen):
    def watched(self, lm, batch):
        seen.append(batch)
        return loss(self, lm, batch)

    return watched


def test_a_curriculum_is_trained_stage_by_stage(tmp_path, capsys):
    method = {"epochs_per_stage": 1, "n_stages": 2}
    _, seen, result = trained(tmp_path / "a", "coconut", method=method, num_train_epochs=4)
    assert [batch.n_latents.unique().tolist() for batch in seen] == [[n] for n in (2, 2, 4, 4, 4, 4, 4, 4)]
    assert [bool(batch.chain_lengths.any()) for batch in seen[-2:]] == [False, False]
    assert len(result.history) >= 8
    assert "warning" not in capsys.readouterr().err
    trained(tmp_path / "b", "coconut", method=method, max_steps=1)
    said = capsys.readouterr().err
    assert "warning: training ends in stage 1 of coconut's curriculum, which thinks as in stage 3" in said


def test_tokenskip_is_trained_on_pruned_chains_and_measured_on_whole_ones(tmp_path):
    held_out = list(generate(ArithmeticConfig(), "validation", 4, seed=0))
    method = {"ratios": [0.5]}
    lm, seen, _ = trained(tmp_path, "tokenskip", method=method, held_out=held_out, num_train_epochs=1)

    def chain_lengths(examples):
        return {sum(map(len, lm.template.steps(example.steps))) for example in examples}

    ratios = [(batch.params["ratio"].unique().tolist(), set(batch.chain_lengths.tolist())) for batch in seen]
    assert [ratio for ratio, _ in ratios] == [[0.5], [0.5], [1.0]]
    assert ratios[0][1] | ratios[1][1] == {math.ceil(n / 2) for n in chain_lengths(TOY)}
    assert ratios[2][1] == chain_lengths(held_out)


@pytest.mark.parametrize("name", NEW)
def test_every_method_trains_and_its_checkpoint_answers(tmp_path, name):
    _, _, result = trained(tmp_path, name, num_train_epochs=1)
    lm, method = pretrained.load(result.best)
    decoding = Decoding(max_latents=16, max_completion_length=4)
    (done,) = Engine(lm, method).generate([Request("x", TOY[0].question, method.Params(), decoding)])
    assert done.reason in ("stop", "length")
    assert name in ("icot", "tokenskip", "ruplar") or done.length == getattr(method.config, "n_latents", 6)
