"""Memory: an engine that survives where it runs out, budgets that hold, and what is given back."""

import dataclasses
from collections import deque

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine import GREEDY, QUESTIONS, SAMPLED, case_of, same
from test_engine_failures import Hooked, check_others, reference_of, run
from test_scheduling import ids

from colar.engine.cache import EMPTY, CacheSize, SlotCache
from colar.engine.completion import completions_of
from colar.engine.engine import Engine, out_of_memory
from colar.engine.request import Decoding, Request
from colar.engine.scheduler import Scheduler
from colar.methods.colar import Colar, ColarParams


@pytest.fixture(scope="module")
def colar():
    return case_of("llama", "colar")


# Memory that runs out


def kinds(events):
    """What each request has said since it last started."""
    said = {}
    for event in events:
        own = said.setdefault(event.number, [])
        own.append((event.kind, event.token_id))
        if event.kind == "restarted":
            own.clear()
    return said


@pytest.fixture(scope="module")
def quiet(colar):
    """What each request says where memory suffices."""
    events, _ = run(Engine(colar.lm, colar.method, 6), colar.requests)
    return kinds(events)


class Runs:
    """Raises at some calls of something."""

    def __init__(self, at, error):
        self.at = at
        self.error = error
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1
        if self.calls in self.at:
            raise self.error


OOM = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] not enough memory: you tried to allocate 8 bytes"),
)


def test_what_says_that_memory_ran_out():
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes. Error code 12"
    assert all(out_of_memory(error) for error in (*OOM, MemoryError(), RuntimeError(said)))
    assert not any(out_of_memory(error) for error in (RuntimeError("shape"), ValueError("not enough memory")))


@pytest.mark.parametrize("at", [{9, 10}, {4, 20}, {4}])
def test_forwards_without_memory(colar, quiet, at):
    """All rows wait again, and come to the same answers."""
    engine = Engine(colar.lm, colar.method, 6)
    fails = Runs(at, OOM[len(at) % 2])
    with Hooked(colar.lm, fails):
        events, found = run(engine, colar.requests)
    assert fails.calls > max(at)
    check_others(colar, colar.requests, found)
    assert kinds(events) == quiet
    assert engine.cache.positions == 0


def test_an_answer_is_never_of_two_runs(colar, quiet):
    """Weights that change where memory runs out, in place of rounding: each answer is of one of the two, whole."""
    weight = colar.lm.causal_lm.get_output_embeddings().weight.data
    saved = weight.clone()

    class Changes(Runs):
        def __call__(self, *_):
            if self.calls + 1 in self.at:
                weight.copy_(saved.flip(0))
            super().__call__()

    try:
        with Hooked(colar.lm, Changes({12}, OOM[0])):
            events, found = run(Engine(colar.lm, colar.method, 6), colar.requests)
        others = kinds(run(Engine(colar.lm, colar.method, 6), colar.requests)[0])
    finally:
        weight.copy_(saved)
    for number, said in kinds(events).items():
        assert said in (quiet[number], others[number])
        assert len(found[number].thought_ids) == [kind for kind, _ in said].count("thought")


@pytest.mark.parametrize("at", [{9, 10, 11}, {4, 20, 36}])
def test_a_row_that_finds_no_memory_alone_fails(colar, quiet, at):
    """The others come to their answers, together again."""
    engine = Engine(colar.lm, colar.method, 6)
    with Hooked(colar.lm, Runs(at, OOM[0])):
        events, found = run(engine, colar.requests)
    (failed,) = [number for number, done in found.items() if done.error is not None]
    assert found[failed].error is OOM[0]
    said = kinds(events)
    started, ended = said.pop(failed)[:-1], quiet[failed]
    assert started == ended[: len(started)]
    assert said == {number: each for number, each in quiet.items() if number != failed}
    assert engine.cache.positions == 0


@pytest.mark.parametrize("at", [{1}, {2, 3}])
def test_rows_that_find_no_memory_to_move(colar, quiet, at):
    """When others end: their ends are not said twice, or lost."""
    engine = Engine(colar.lm, colar.method, 6)
    fails, copy = Runs(at, OOM[0]), engine.cache.copy

    def starved(*moved):
        fails()
        copy(*moved)

    engine.cache.copy = starved
    events, found = run(engine, colar.requests)
    assert fails.calls >= max(at)
    check_others(colar, colar.requests, found)
    assert kinds(events) == quiet


class Starved(Colar):
    """`think` finds no memory at some calls."""

    def think(self, lm, state):
        self.fails()
        return super().think(lm, state)


@pytest.mark.parametrize("at", [{1}, {3, 4}])
def test_thinking_without_memory(colar, quiet, at):
    method = Starved(colar.method.config)
    method.fails = Runs(at, OOM[0])
    events, found = run(Engine(colar.lm, method, 6), colar.requests)
    check_others(colar, colar.requests, found)
    assert kinds(events) == quiet


def starve(cache, fails):
    """Call `fails(size)` before each of the cache's allocations."""
    for layer in cache.layers:

        def zeros(like, size, plain=layer._zeros):
            fails(size)
            return plain(like, size)

        layer._zeros = zeros


@pytest.mark.parametrize("at", [1, 4, 6, 11, 15])
def test_a_cache_that_cannot_grow(colar, at):
    """An allocation fails once: in the first, or in a layer after others have grown."""
    wide = [dataclasses.replace(r, id=f"{r.id}/w", decoding=dataclasses.replace(r.decoding, max_completion_length=30)) for r in colar.requests[:3]]  # fmt: skip
    requests = [*colar.requests[:4], *wide, *colar.requests[8:12]]
    engine = Engine(colar.lm, colar.method, 5)
    fails = Runs({at}, OOM[at % 2])
    starve(engine.cache, fails)
    events = []
    engine.submit(requests[0])
    for request in requests[1:]:  # one by one: slots are doubled, columns grow
        engine.submit(request)
        events += engine.step()
    found = {done.request.id: done for done in completions_of(engine.lm, [*events, *run(engine, [])[0]])}
    assert fails.calls > at
    assert len(found) == len(requests)
    for request in requests:
        same(found[request.id], reference_of(colar, request))


def test_a_machine_with_little_memory(colar):
    """More is never there: those that fit run, and one that fits nowhere fails."""
    room = 4 * 48
    tries = 0

    def fails(size):
        nonlocal tries
        if size.positions > room:
            tries += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    small = [r for r in colar.requests if len(ids(colar, r)) + r.decoding.positions_after_question <= 48]
    assert len(small) > 6
    engine = Engine(colar.lm, colar.method, 16)
    starve(engine.cache, fails)
    _, found = run(engine, small)
    check_others(colar, small, found)
    assert tries > 0

    room = 16
    tries = 0
    _, found = run(engine, small[:2])
    assert [type(found[number].error) for number in sorted(found)] == [torch.OutOfMemoryError] * 2
    assert tries == 3
    room = 1000
    same(engine.generate(small[:1])[0], colar.expected[small[0].id])


def test_a_cache_can_be_used_again_after_an_error(colar):
    """A layer, its keys or its values may have grown and others not: all is released."""
    lm = colar.lm
    embeds = lm.embed(torch.tensor([ids(colar, colar.requests[0])] * 2))
    length = embeds.shape[1]
    position = torch.full((2,), length)
    with torch.no_grad():
        whole = lm.hidden(torch.cat([embeds, embeds[:, :1]], 1))[:, -1]

    def read_and_feed():
        columns = torch.arange(length).expand(2, -1)
        mask = kept.at_prefill(0, columns, length, embeds)
        lm.hidden(embeds, mask, columns, kept)
        mask = kept.at_decode(position, length + 1, embeds)
        return lm.hidden(embeds[:, :1], mask, position[:, None], kept)[:, -1]

    for at in range(1, 5):
        kept = SlotCache(lm.causal_lm)
        kept.reserve(CacheSize(2, 48))
        with torch.no_grad():
            read_and_feed()
            starve(kept, Runs({at}, OOM[0]))
            with pytest.raises(torch.OutOfMemoryError):
                kept.reserve(CacheSize(4, 64), rows=2)
            assert (kept.positions, kept.size) == (0, EMPTY)
            for size in (CacheSize(2, 48), CacheSize(3, 64), CacheSize(2, 48)):
                kept.reserve(size)
                assert kept.positions == size.positions
                torch.testing.assert_close(read_and_feed(), whole, rtol=1e-4, atol=1e-4)


# The budget


ASKED = st.builds(
    dict,
    question=st.sampled_from(QUESTIONS[1:4]),
    decoding=st.sampled_from([GREEDY, SAMPLED]),
    limits=st.sampled_from([(0, 1), (0, 30), (1, 4), (3, 30), (8, 1), (8, 4)]),
    after=st.integers(0, 6),
)
"""A request, and how many steps after the one before it comes. Few different ones: the reference takes longest."""


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(ASKED, min_size=1, max_size=14),
    budget=st.integers(112, 480),
    slots=st.integers(1, 12),
)
def test_what_is_allocated_stays_within_the_budget(colar, asked, budget, slots):
    """Random arrivals and lengths: measured at every step; and the reference's answers."""
    engine = Engine(colar.lm, colar.method, slots, token_budget=budget)
    arrivals = deque()
    at = 0
    for i, one in enumerate(asked):
        latents, tokens = one["limits"]
        decoding = dataclasses.replace(one["decoding"], max_latents=latents, max_completion_length=tokens)
        at += one["after"]
        arrivals.append((at, Request(str(i), one["question"], ColarParams(2), decoding)))
    requests = [request for _, request in arrivals]
    events = []
    step = 0
    while arrivals or engine.busy:
        while arrivals and arrivals[0][0] <= step:
            engine.submit(arrivals.popleft()[1])
        events += engine.step()
        step += 1
        assert engine.cache.positions <= budget
        assert len(engine.running) <= slots
    assert engine.cache.positions == 0
    found = {done.request.id: done for done in completions_of(engine.lm, events)}
    for request in requests:
        expected = reference_of(colar, dataclasses.replace(request, id=""))
        same(found[request.id], dataclasses.replace(expected, request=request))


def test_one_wide_request_does_not_make_all_slots_wide_for_ever(colar):
    """Today's failure: (slots + 1) x the widest request ever seen, for good."""
    narrow = [dataclasses.replace(r, id=str(i)) for i, r in enumerate(colar.requests * 6)]
    wide = dataclasses.replace(
        narrow[4], id="wide", decoding=Decoding(max_latents=6, max_completion_length=80)
    )
    engine = Engine(colar.lm, colar.method, 64, token_budget=1000)
    most = 0
    for request in (*narrow[:20], wide, *narrow[20:]):
        engine.submit(request)
    together = []
    events = []
    while engine.busy:
        events += engine.step()
        most = max(most, engine.cache.positions)
        together.append(len(engine.running))
    assert 800 < most <= 1000
    assert max(together) > 8
    assert len(list(completions_of(colar.lm, events))) == len(narrow) + 1
    assert engine.cache.positions == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cache_sizes(data):
    """Never below what is needed, never above the budget where that is possible, and stable while nothing changes."""
    scheduler = Scheduler(data.draw(st.integers(1, 64)), for_graphs=data.draw(st.booleans()))
    now = EMPTY
    for _ in range(10):
        rows, widest = data.draw(st.integers(1, scheduler.max_batch)), data.draw(st.integers(1, 500))
        least = scheduler.smallest_size(rows, widest)
        budget = scheduler.token_budget = data.draw(st.one_of(st.none(), st.integers(1, 20_000)))
        found = scheduler.next_size(now, rows, widest)
        assert (
            least.slots
            <= found.slots
            <= max(scheduler.smallest_size(scheduler.max_batch, 1).slots, now.slots)
        )
        assert least.columns <= found.columns
        assert found == least or budget is None or found.positions <= budget
        assert scheduler.next_size(found, rows, widest) == found or found == least
        assert found.slots < max(2 * least.slots, now.slots + 1)
        assert found.columns == max(now.columns, least.columns) or found == least
        now = found


# Cached prompts


def test_cached_prompts_are_bounded(colar, monkeypatch):
    template = colar.lm.template
    expected = [template.question(f"How many {i}?") for i in range(60)]
    monkeypatch.setattr("colar.template.template.CACHED", 100)
    template._cached.clear()
    for _ in range(2):
        for i in range(500):
            found = template.question(f"How many {i}?")
            assert i >= 60 or found == expected[i]
            assert 0 < len(template._cached) <= 100
    before = dict(template._cached)
    template.question("x" * 10_000)
    template.question("never cached", cached=False)
    assert template._cached == before
