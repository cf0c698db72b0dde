"""The batched engine against the reference loop, on four architectures, whatever the batch looks like."""

import dataclasses
import functools
import math
import random
import time

import pytest
import torch
from families import CONTEXT, EXAMPLES, FAMILIES, WINDOW, liven, tiny_lm

from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.colar import Colar, ColarParams

GREEDY = Decoding(max_latents=6, max_completion_length=5)
SAMPLED = Decoding(1.0, 0.9, 1.0, max_latents=6, max_completion_length=5)
METHODS = tuple(registry.METHODS)
FEEDBACK = ("coconut", "distill", "ruplar", "sim_cot")
"""Fed back through random weights a rounding error grows a thousandfold: these are compared in float64."""
QUESTIONS = (
    *(example.question for example in EXAMPLES),
    "x?",
    "How many eggs, if {n} = 3 pens and {} = 4 of 12?",
)


class Case:
    """A family with a method, its requests (greedy and sampled, several factors) and the reference's answers."""

    def __init__(self, family, name, questions=QUESTIONS):
        self.lm = liven(tiny_lm(family))
        # "argmax" ends more often among random logits than "majority".
        self.method = registry.build(name, {"stop": "argmax"} if name == "colar" else {})
        pretrained.attach(self.lm, self.method, seed=1)
        self.method.prepare(self.lm, EXAMPLES)
        if name in FEEDBACK:
            self.lm.double()
        params = (
            [ColarParams(1), ColarParams(2), ColarParams(5), ColarParams(3)]
            if name == "colar"
            else [self.method.Params()]
        )
        self.requests = [
            Request(
                f"{i}/{mode}", question, params[i % len(params)], decoding, i, sample=i % 3, keep_latents=True
            )
            for mode, decoding in (("greedy", GREEDY), ("sampled", SAMPLED))
            for i, question in enumerate(questions)
        ]
        self.expected = {r.id: reference.complete(self.lm, self.method, r) for r in self.requests}

    def check(self, requests, max_batch):
        for request, found in zip(
            requests, Engine(self.lm, self.method, max_batch).generate(requests), strict=True
        ):
            same(found, self.expected[request.id])


def same(found, expected):
    """Token for token, thought for thought."""
    fields = ("text", "token_ids", "thought_ids", "truncated", "stopped", "reason", "forward_passes")
    assert found.request == expected.request
    assert found.token_logps == pytest.approx(expected.token_logps, rel=1e-3, abs=1e-4)
    torch.testing.assert_close(found.info, expected.info, rtol=1e-3, atol=1e-4)
    for name in fields:
        assert getattr(found, name) == getattr(expected, name), (name, found.request.id)
    if expected.latents is None:
        assert found.latents is None
        return
    torch.testing.assert_close(found.latents, expected.latents, rtol=1e-3, atol=1e-4)


@functools.cache
def case_of(family, name):
    """Made once a process: the tests of the engine's other files take the same. Nothing may change its model."""
    # The two whose rows think 0, 1 and several times meet all questions.
    return Case(family, name, QUESTIONS if name in ("cot", "colar") else QUESTIONS[2:6])


@pytest.fixture(scope="session")
def cases():
    return case_of


@pytest.fixture(scope="session")
def colar():
    return case_of("llama", "colar")


# Against the reference


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in METHODS),
        # Here no_cot and icot think nothing, tokenskip is cot, and sim_cot is coconut.
        *(
            ("gemma3", name)
            for name in ("cot", "colar", "sequential", "coconut", "distill", "pause", "ruplar")
        ),
        # Of this family a method sees no more than positions and a head.
        *(("gpt2", name) for name in ("cot", "colar", "sequential", "coconut")),
        # Llama's layers with biases.
        *(("qwen2", name) for name in ("cot", "colar")),
    ],
)
def test_engine_equals_reference(cases, family, name):
    """Rows join and leave in a batch of three; where all questions are there, also all at once."""
    case = cases(family, name)
    case.check(case.requests, 3)
    if name in ("cot", "colar"):
        case.check(case.requests, 64)
        # A row by itself is what the reference has.
        case.check(case.requests[::5], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_order_nor_batch_mates_matter(cases, family):
    """PITFALLS 16: one multinomial over the batch, or a loop that ends for all, would show here."""
    case = cases(family, "colar")
    shuffled = random.Random(0).sample(case.requests, len(case.requests))
    case.check(shuffled, 5)
    case.check(shuffled[:4], 4)
    case.check([r for r in case.requests if r.decoding == SAMPLED], 3)
    case.check([shuffled[0]] * 3, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cases_above_show_something(cases, family):
    """Rows that think 0, 1 and several times, stop and are cut; questions of unequal length, beyond the window."""
    done = [c for name in ("cot", "colar") for c in cases(family, name).expected.values()]
    assert {0, 1} < {c.length for c in done}
    assert any(1 < c.length < GREEDY.max_latents for c in done)
    assert any(c.length == GREEDY.max_latents and c.truncated for c in done)
    assert {c.reason for c in done} == {"stop", "length"}
    assert any(c.reason == "stop" and not c.truncated for c in done)
    assert len({tuple(c.token_ids) for c in done}) > 6
    template = cases(family, "cot").lm.template
    lengths = {len(template.question(question)) for question in QUESTIONS}
    assert len(lengths) > 4
    assert max(lengths) > 2 * WINDOW


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_steps_equal_one_forward(cases, family):
    """PITFALLS 1: after k cached latents the chain still sees the question, as in one pass over both."""
    case = cases(family, "colar")
    lm, head = case.lm, case.lm.extra["latent_head"]
    several = 0
    for done in Engine(lm, case.method, 16).generate(case.requests):
        if done.length < 2:
            continue
        several += 1
        ids = lm.template.question(done.request.question, case.method.speed_text(done.request.params))
        with torch.no_grad():
            fed = torch.cat([lm.embed(torch.tensor([ids])), done.latents[None]], 1)
            hidden = lm.hidden(fed)[0, len(ids) - 1 : -1]
            mean, log_std = head(hidden)
            stop = lm.logits(hidden).softmax(-1)[:, lm.template.separator_id]
        for key, full in (("mu", mean), ("sigma", log_std.exp()), ("stop_probability", stop)):
            torch.testing.assert_close(done.info[key][: done.length], full, rtol=1e-3, atol=1e-4)
        if done.request.decoding == GREEDY:
            torch.testing.assert_close(done.latents, mean * case.method.config.sigma_e, rtol=1e-3, atol=1e-4)
    assert several > 3


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_do_not_depend_on_padding(family):
    """PITFALLS 5: a row alone through Hugging Face's own forward, and ours padded left and right."""
    lm = tiny_lm(family)
    ids = torch.tensor(lm.template.question(QUESTIONS[3]))
    n = len(ids)
    alone = lm.causal_lm(ids[None]).logits[0].float()
    garbage = torch.arange(20, 25)
    right = lm.logits(lm.hidden(lm.embed(torch.cat([ids, garbage])[None])))[0, :n]
    mask = torch.cat([torch.zeros(5), torch.ones(n)]).long()[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    left = lm.logits(lm.hidden(lm.embed(torch.cat([garbage, ids])[None]), mask, positions))[0, 5:]
    torch.testing.assert_close(right, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(left, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["no_cot", "pause", "coconut"])
def test_what_is_done_at_its_limit_was_not_cut(cases, name):
    """Of a fixed number of thoughts: the limit cuts those that would go on."""
    case = cases("llama", name)
    unlimited = dataclasses.replace(case.requests[0], decoding=Decoding(max_latents=40))
    n = reference.complete(case.lm, case.method, unlimited).length
    engine = Engine(case.lm, case.method)
    for limit in range(n + 2):
        request = dataclasses.replace(unlimited, decoding=Decoding(max_latents=limit), keep_latents=False)
        [found] = engine.generate([request])
        same(found, reference.complete(case.lm, case.method, request))
        assert (found.length, found.stopped) == (min(n, limit), limit >= n)
        assert found.truncated == (limit < n or found.reason == "length")


# Seeds


def test_a_seed_fixes_the_result(colar):
    request = dataclasses.replace(colar.requests[-1], decoding=SAMPLED, sample=0)

    def thoughts(**changes):
        (done,) = Engine(colar.lm, colar.method).generate([dataclasses.replace(request, **changes)])
        return done.latents, done.token_ids

    first, again = thoughts(seed=3), thoughts(seed=3)
    assert first[1] == again[1]
    torch.testing.assert_close(first[0], again[0], rtol=0, atol=0)
    for other in (thoughts(seed=6), thoughts(seed=3, sample=1)):
        assert other[0] is None or not torch.allclose(first[0][0], other[0][0])
    greedy = [thoughts(decoding=GREEDY, seed=seed)[1] for seed in (5, 6)]
    assert greedy[0] == greedy[1]


def test_sampled_latents_follow_the_head(colar):
    """Emitted = (mu + temperature sigma eps) sigma_e with eps standard normal, and half of it at temperature 1/2."""
    eps = []
    for temperature in (1.0, 0.5):
        decoding = dataclasses.replace(SAMPLED, latent_temperature=temperature)
        requests = [dataclasses.replace(colar.requests[4], decoding=decoding, seed=s) for s in range(40)]
        for done in Engine(colar.lm, colar.method).generate(requests):
            for latent, info in zip(done.latents if done.length else [], done.thought_info(), strict=True):
                eps.append((latent / colar.method.config.sigma_e - info["mu"]) / info["sigma"] / temperature)
    values = torch.cat(eps)
    assert len(values) > 3000
    assert abs(values.mean()) < 4 / math.sqrt(len(values))
    assert abs(values.std() - 1) < 4 / math.sqrt(2 * len(values))


# State of a method's own


class Soft(Colar):
    """Feeds soft embeddings before its thoughts, made of the question's text when a request begins, as SoftCoT does."""

    K = 3

    @staticmethod
    def n_soft(question):
        return question.count("o") % (Soft.K + 1)

    def begin(self, lm, requests):
        self.begun_ids = [*getattr(self, "begun_ids", []), *(request.id for request in requests)]
        soft_BKD, counts = torch.zeros(len(requests), self.K, lm.width), []
        for i, request in enumerate(requests):
            ids = lm.template.question(request.question)[-self.K :]
            soft_BKD[i, : len(ids)] = -lm.embed(torch.tensor(ids))
            counts.append(self.n_soft(request.question))
        return {"soft": soft_BKD, "n_soft": torch.tensor(counts)}

    def think(self, lm, state):
        thought = super().think(lm, state)
        soft_B = state.step < state.begun["n_soft"]
        rows = torch.arange(len(soft_B))
        soft_BD = state.begun["soft"][rows, state.step.clamp(max=self.K - 1)]
        embeds = torch.where(soft_B[:, None], soft_BD, thought.embeds)
        return dataclasses.replace(thought, embeds=embeds, done=thought.done & ~soft_B)


@pytest.fixture(scope="module")
def soft(colar):
    """Requests to `Soft`, further samples of some questions among them, and the reference's answers."""
    method = Soft(colar.method.config)
    some = colar.requests[: len(QUESTIONS)]
    more = [dataclasses.replace(r, id=f"{r.id}/{i}", sample=i) for r in colar.requests[-2:] for i in range(4)]
    requests = random.Random(1).sample([*some, *more], len(some) + len(more))
    return requests, [reference.complete(colar.lm, method, request) for request in requests]


@pytest.mark.parametrize("max_batch", [3, 64])
def test_what_begins_with_a_request_stays_with_its_row(colar, soft, max_batch):
    """Whoever joins, leaves and moves to another slot; also for further samples of a question that is running."""
    method = Soft(colar.method.config)
    requests, expected = soft
    found = Engine(colar.lm, method, max_batch).generate(requests)
    assert sorted(method.begun_ids) == sorted(request.id for request in requests)
    n_soft = set()
    for request, completion, alone in zip(requests, found, expected, strict=True):
        same(completion, alone)
        n = Soft.n_soft(request.question)
        ids = colar.lm.template.question(request.question)[-Soft.K :]
        fed = -colar.lm.embed(torch.tensor(ids))[:n]
        assert completion.length >= n
        if n:
            torch.testing.assert_close(completion.latents[:n], fed, rtol=0, atol=0)
        n_soft.add(n)
    assert n_soft == {0, 1, 2, 3}
    assert any(c.length > Soft.K for c in found)


class Begins(Colar):
    """`begin` gives what a test makes of its requests."""

    def __init__(self, config, make):
        super().__init__(config)
        self.make = make

    def begin(self, lm, requests):
        return self.make(requests)


@pytest.mark.parametrize(
    "later", [{"a": torch.zeros(1, dtype=torch.float64)}, {"b": torch.zeros(1)}, {}, {"a": torch.zeros(1), "b": torch.zeros(1)}]
)  # fmt: skip
def test_what_begins_later_must_be_like_what_runs(colar, later):
    """Rows that begin at different times share a batch; torch would promote a dtype without a word."""
    given = iter([{"a": torch.zeros(1)}, later])
    engine = Engine(colar.lm, Begins(colar.method.config, lambda requests: next(given)), 8)
    engine.submit(colar.requests[0])
    engine.step()
    engine.submit(colar.requests[1])
    errors = [str(event.error) for event in engine.step() if event.error is not None]
    assert len(errors) == 2
    assert all(error.startswith("`begin` gave other columns") for error in errors)


@pytest.mark.parametrize("column", [torch.zeros(2, 4), torch.zeros(0)])
def test_what_begins_must_have_a_row_for_each_request(colar, column):
    engine = Engine(colar.lm, Begins(colar.method.config, lambda requests: {"bad": column}), 3)
    with pytest.raises(AssertionError, match="`begin` gives each request a row"):
        engine.generate(colar.requests[:1])
    assert not engine.busy


# Limits


@pytest.mark.parametrize("name", ["cot", "colar"])
def test_max_latents_cuts_and_the_separator_is_still_fed(cases, name):
    case = cases("llama", name)
    lm = case.lm
    question = next(r for r in case.requests if r.decoding == GREEDY and case.expected[r.id].length >= 3)
    request = dataclasses.replace(question, decoding=dataclasses.replace(GREEDY, max_latents=2))
    (done,) = Engine(lm, case.method).generate([request])
    assert (done.length, done.truncated) == (2, True)
    ids = lm.template.question(request.question, case.method.speed_text(request.params))
    separator = torch.tensor([[lm.template.separator_id]])
    with torch.no_grad():
        fed = torch.cat([lm.embed(torch.tensor([ids])), done.latents[None], lm.embed(separator)], 1)
        first = int(lm.logits(lm.hidden(fed)[:, -1]).argmax())
    expected = [] if first == lm.template.eos_id else [first]
    assert done.token_ids[:1] == expected
    same(done, reference.complete(lm, case.method, request))


def test_no_latents_allowed(colar):
    request = dataclasses.replace(colar.requests[3], decoding=dataclasses.replace(GREEDY, max_latents=0))
    (done,) = Engine(colar.lm, colar.method).generate([request])
    assert (done.length, done.truncated, done.latents) == (0, True, None)
    same(done, reference.complete(colar.lm, colar.method, request))


def test_max_completion_length(colar):
    cut = [r for r in colar.requests if colar.expected[r.id].reason == "length"]
    assert cut
    for n in (1, 3):
        decoding = dataclasses.replace(cut[0].decoding, max_completion_length=n)
        (done,) = Engine(colar.lm, colar.method).generate([dataclasses.replace(cut[0], decoding=decoding)])
        assert done.token_ids == colar.expected[cut[0].id].token_ids[:n]
        assert (len(done.token_ids), done.reason, done.truncated) == (n, "length", True)


def test_a_finished_row_does_not_walk_out_of_the_context():
    """GPT-2's positions are a table: a row that is done, but still in the batch, must not count on past its end."""
    lm = tiny_lm("gpt2")  # not livened: the short rows run to their limits
    method = registry.build("cot")
    long = Request("long", "x " * 61, method.Params(), Decoding(max_latents=0, max_completion_length=1))
    assert CONTEXT - 8 < len(lm.template.question(long.question)) + 2 <= CONTEXT
    decoding = Decoding(1.0, 1.0, max_latents=12, max_completion_length=12)
    short = [Request(f"{i}", "x?", method.Params(), decoding, i) for i in range(3)]
    for done in Engine(lm, method, 8).generate([long, *short]):
        same(done, reference.complete(lm, method, done.request))


def test_a_request_beyond_the_context_is_refused_before_anything_runs(colar):
    too_long = Request(
        "long/1", "x " * 70, ColarParams(2), Decoding(max_latents=40, max_completion_length=30)
    )
    stream = Engine(colar.lm, colar.method).stream([colar.requests[0], too_long])
    with pytest.raises(
        ValueError, match=r"long/1: the question has \d+ tokens.*max_latents 40.*context is 128"
    ):
        next(stream)


# What comes back


def test_latents_are_kept_only_where_asked(colar):
    requests = [dataclasses.replace(r, keep_latents=i % 2 == 0) for i, r in enumerate(colar.requests)]
    found = Engine(colar.lm, colar.method).generate(requests)
    assert any(c.length and not c.request.keep_latents for c in found)
    for completion in found:
        kept = completion.request.keep_latents
        assert (completion.latents is not None) == (kept and completion.length > 0)
        assert len(completion.thought_info()) == (completion.length if kept else 0)
        assert completion.thought_ids == colar.expected[completion.request.id].thought_ids


def test_forward_passes_are_counted_as_they_happen(colar):
    calls = []
    engine = Engine(colar.lm, colar.method)
    handle = colar.lm.causal_lm.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        for request in colar.requests[::3]:
            calls.clear()
            (done,) = engine.generate([request])
            assert done.forward_passes == len(calls)
    finally:
        handle.remove()


def test_seconds_share_out_the_wall_clock(colar):
    engine = Engine(colar.lm, colar.method, 4)
    engine.generate(colar.requests)
    started = time.perf_counter()
    found = engine.generate(colar.requests)
    wall = time.perf_counter() - started
    assert all(c.seconds > 0 for c in found)
    assert 0.8 * wall < sum(c.seconds for c in found) <= wall


def test_events_are_what_generate_folds(colar):
    events = list(Engine(colar.lm, colar.method, 4).stream(colar.requests))
    for request in colar.requests:
        mine = [event for event in events if event.request is request]
        done = colar.expected[request.id]
        kinds = [event.kind for event in mine]
        n_tokens = len(done.token_ids) + (done.reason == "stop")
        thinking = ["thought"] * done.length + ["stop"] * done.stopped
        assert kinds == [*thinking, *["token"] * n_tokens, "finished"]
        assert (mine[-1].reason, mine[-1].truncated) == (done.reason, done.truncated)


def test_the_model_is_left_in_the_mode_it_was_in(cases):
    """PITFALLS 15: rollouts run without dropout (GPT-2 has some), and training goes on with it."""
    case = cases("gpt2", "colar")
    case.lm.train()
    try:
        case.check(case.requests, 8)
        assert case.lm.training
    finally:
        case.lm.eval()


def test_nothing_to_do(colar):
    assert Engine(colar.lm, colar.method).generate([]) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -1, "0, or from 1e-06 to 100, got -1"),
        ("temperature", math.nan, "0, or from 1e-06 to 100, got nan"),
        ("temperature", "1", "0, or from 1e-06 to 100, got '1'"),
        ("top_p", 0, r"in \(0, 1\], got 0"),
        ("top_p", None, r"in \(0, 1\], got None"),
        ("latent_temperature", -0.5, "0, or from 1e-06 to 100, got -0.5"),
        ("max_latents", -1, "0 or more, got -1"),
        ("max_latents", 1.5, "a whole number, got 1.5"),
        ("max_latents", True, "a whole number, got True"),
        ("max_completion_length", 0, "1 or more, got 0"),
        ("max_completion_length", 2.0, "a whole number, got 2.0"),
    ],
)
def test_wrong_settings_of_decoding(name, value, message):
    with pytest.raises(ValueError, match=f"{name} must be {message}"):
        Decoding(**{name: value})


def test_autocast_around_the_engine_changes_nothing():
    """The cache has the weights' dtype, whatever the caller's block says, and serves both."""
    lm = tiny_lm("llama")
    method = registry.build("cot")
    pretrained.attach(lm, method, seed=1)
    requests = [Request(str(i), text, method.Params(), SAMPLED, i) for i, text in enumerate(QUESTIONS)]
    engine = Engine(lm, method, 4)
    expected = engine.generate(requests)
    with torch.autocast("cpu", torch.bfloat16):
        found = engine.generate(requests)
    for one, other in zip(found, expected, strict=True):
        same(one, other)
