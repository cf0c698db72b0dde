"""An engine that survives: steps that raise, long questions, callers who never hang. Memory: tests/test_engine_memory.py."""

import asyncio
import dataclasses
import gc
import time
from collections import Counter
from functools import cache

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from test_engine import QUESTIONS, case_of, same
from test_scheduling import drain, ids, widths

from colar.engine import reference
from colar.engine.async_engine import AsyncEngine
from colar.engine.completion import completions_of
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.methods.base import NoParams
from colar.methods.colar import Colar, ColarParams
from colar.methods.tokenskip import TokenSkipParams

CULPRIT = 666
"""The seed of requests that fail."""


@pytest.fixture(scope="module")
def colar():
    return case_of("llama", "colar")


def run(engine, requests):
    """All events, and completions by number."""
    for request in requests:
        engine.submit(request)
    events = []
    while engine.busy:
        events += engine.step()
    return events, {done.number: done for done in completions_of(engine.lm, events)}


def culprits(case, n=1):
    """Requests that think several times."""
    thinkers = [r for r in case.requests if case.expected[r.id].length > 1]
    return [dataclasses.replace(r, id=f"bad{i}", seed=CULPRIT + i) for i, r in enumerate(thinkers[:n])]


def mixed(case, bad):
    """Culprits among the others: first, between, last."""
    requests = list(case.requests)
    for i, request in enumerate(bad):
        requests.insert(i * len(requests) // max(1, len(bad) - 1), request)
    return requests


def check_others(case, requests, found):
    """Every request has ended, and those that are no culprits have the reference's answers."""
    assert sorted(found) == list(range(len(requests)))
    for number, request in enumerate(requests):
        if request.id in case.expected:
            same(found[number], case.expected[request.id])
            assert found[number].error is None


# Checked before it runs


IMPOSSIBLE = [
    ({"seed": 2**63}, r"seed must be a whole number from -2\^63 to 2\^63 - 1, got 9223372036854775808"),
    ({"seed": -(2**63) - 1}, "seed must be a whole number"),
    ({"seed": 1.5}, "seed must be a whole number .* got 1.5"),
    ({"seed": True}, "seed must be a whole number .* got True"),
    ({"sample": 2**64}, "sample must be a whole number"),
    ({"params": NoParams()}, "params must be ColarParams, those of method colar, got NoParams"),
    ({"params": TokenSkipParams()}, "params must be ColarParams"),
    ({"params": None}, "params must be ColarParams"),
    ({"params": ColarParams(20000)}, "compression_factor must be 32 or less .*, got 20000"),
    ({"params": ColarParams(1e300)}, "compression_factor must be 32 or less .*, got 1e.300"),
    ({"params": ColarParams(1.5)}, "compression_factor 1.5 is not whole and was not trained"),
    ({"question": "\ud800"}, "question holds half of a surrogate pair"),
]


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_what_cannot_run_is_refused_at_submit(colar, changes, message):
    engine = Engine(colar.lm, colar.method, 2)
    started = time.perf_counter()
    with pytest.raises(ValueError, match=f"request no: {message}"):
        engine.submit(dataclasses.replace(colar.requests[0], id="no", **changes))
    assert time.perf_counter() - started < 2
    assert not engine.busy


def test_the_largest_seeds_run(colar):
    for seed in (2**63 - 1, -(2**63)):
        request = dataclasses.replace(colar.requests[-1], seed=seed, sample=2**63 - 1)
        (found,) = Engine(colar.lm, colar.method, 2).generate([request])
        same(found, reference.complete(colar.lm, colar.method, request))


# Steps that raise


class Raises(Colar):
    """Raises at its second step where a culprit is among the rows."""

    def think(self, lm, state):
        bad = (state.seed >= CULPRIT) & (state.step == 1)
        if bool(bad.any()):
            raise ZeroDivisionError("think")
        return super().think(lm, state)


class NeverBegins(Colar):
    def begin(self, lm, requests):
        if any(request.seed >= CULPRIT for request in requests):
            raise KeyError("begin")
        return {}


class Poison(Colar):
    """A culprit's second thought is one that the forward cannot take (`breaks_on`)."""

    VALUE = 12345.0

    def think(self, lm, state):
        thought = super().think(lm, state)
        bad = (state.seed >= CULPRIT) & (state.step == 1)
        embeds = thought.embeds.masked_fill(bad[:, None], self.VALUE)
        return dataclasses.replace(thought, embeds=embeds, done=thought.done & ~bad)


class Hooked:
    """Calls `hear(embeds)` before every forward of the backbone, inside the block."""

    def __init__(self, lm, hear):
        self.lm = lm
        self.hear = hear

    def __enter__(self):
        def hook(_, args, kwargs):
            self.hear(kwargs["inputs_embeds"])

        self.handle = self.lm.causal_lm.base_model.register_forward_pre_hook(hook, with_kwargs=True)

    def __exit__(self, *_):
        self.handle.remove()


def breaks_on(value):
    def hear(embeds):
        if bool((embeds == value).all(-1).any()):
            raise ArithmeticError("forward")

    return hear


@pytest.mark.parametrize(
    ("kind", "error", "slots"),
    [
        (Raises, ZeroDivisionError, 1),
        (Raises, ZeroDivisionError, 3),
        (NeverBegins, KeyError, 3),
        (Poison, ArithmeticError, 3),
    ],
)
def test_a_step_that_raises_ends_all_that_have_started(colar, kind, error, slots):
    """In its thinking, in its beginning, in its forward; those that wait come to their answers."""
    requests = mixed(colar, culprits(colar, 2))
    engine = Engine(colar.lm, kind(colar.method.config), slots)
    with Hooked(colar.lm, breaks_on(Poison.VALUE)):
        events, found = run(engine, requests)
    ends = Counter(event.number for event in events if event.kind == "finished")
    assert ends == Counter(range(len(requests)))
    failed = {done.request.id for done in found.values() if done.error}
    assert {"bad0", "bad1"} <= failed
    assert len(failed) <= 2 * slots
    for done in found.values():
        if done.error:
            assert (done.reason, done.truncated, type(done.error)) == ("error", True, error)
        else:
            same(done, colar.expected[done.request.id])


def test_a_stream_raises_when_the_others_have_finished(colar):
    bad = culprits(colar)
    engine = Engine(colar.lm, Raises(colar.method.config), 1)
    seen = []
    with pytest.raises(ZeroDivisionError, match="think"):
        seen.extend(engine.stream([*bad, *colar.requests]))
    done = list(completions_of(colar.lm, seen))
    assert {each.request.id for each in done} == {request.id for request in colar.requests}
    assert not engine.busy
    with pytest.raises(ZeroDivisionError, match="think"):
        engine.generate(bad)
    same(engine.generate(colar.requests[:1])[0], colar.expected[colar.requests[0].id])


def test_an_engine_is_as_new_after_a_step_that_raised(colar, monkeypatch):
    """Forwards all over the run, also of a question while others wait for theirs, fail once."""
    monkeypatch.setattr("colar.engine.scheduler.CHUNK", 8)
    requests = colar.requests[::2]
    for at in (1, 2, 4, 6, 8):
        calls = 0

        def hear(_, at=at):
            nonlocal calls
            calls += 1
            if calls == at:
                raise RuntimeError("once")

        engine = Engine(colar.lm, colar.method, 5)
        with Hooked(colar.lm, hear):
            _, found = run(engine, requests)
        assert calls > at
        failed = [done for done in found.values() if done.error]
        assert 1 <= len(failed) <= 5
        for number, done in found.items():
            if done.error is None:
                same(done, colar.expected[requests[number].id])
        assert engine.cache.positions == 0


def test_what_fails_for_all_fails_each_and_the_queue_lives(colar):
    def hear(_):
        raise ArithmeticError("always")

    engine = Engine(colar.lm, colar.method, 2)
    with Hooked(colar.lm, hear):
        _, found = run(engine, colar.requests[:5])
    assert [type(found[i].error) for i in range(5)] == [ArithmeticError] * 5
    same(engine.generate(colar.requests[:1])[0], colar.expected[colar.requests[0].id])


def test_an_interrupt_drops_what_runs_and_leaves_the_engine_usable(colar):
    def hear(_):
        raise KeyboardInterrupt

    engine = Engine(colar.lm, colar.method, 2)
    for request in colar.requests[:4]:
        engine.submit(request)
    with Hooked(colar.lm, hear), pytest.raises(KeyboardInterrupt):
        engine.step()
    found = drain(engine)
    assert set(found) == {request.id for request in colar.requests[2:4]}


@cache
def _complete(case, request):
    return reference.complete(case.lm, case.method, request)


def reference_of(case, request):
    return _complete(case, request)


# Long questions


class Endless(Colar):
    """Thinks until its limit."""

    def think(self, lm, state):
        thought = super().think(lm, state)
        return dataclasses.replace(thought, done=torch.zeros_like(thought.done))


def test_running_rows_wait_for_one_batch_of_questions_at_most(monkeypatch):
    """More questions come while others run: these take a step after each forward that reads."""
    monkeypatch.setattr("colar.engine.scheduler.CHUNK", 4)
    lm = liven(tiny_lm("gemma3")).double()
    method = Endless(registry.build("colar").config)
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    lm.double()
    decoding = Decoding(max_latents=28, max_completion_length=2)
    *short, middle, long = sorted(
        (Request(str(i), question, ColarParams(2), decoding, i) for i, question in enumerate(QUESTIONS)),
        key=lambda request: len(request.question),
    )
    short = short[:2]
    samples = [dataclasses.replace(long, id=f"long/{i}", sample=i) for i in range(3)]
    asked = [samples[0], middle, *samples[1:]]
    engine = Engine(lm, method, 8)
    events = []
    for request in short:
        engine.submit(request)
    for _ in range(30):
        if len(engine.running) < len(short):
            events += engine.step()
    assert len(engine.running) == len(short)
    for request in asked:
        engine.submit(request)

    n_reads = 0
    seen, handle = widths(lm)
    try:
        while engine.busy:
            seen.clear()
            rows = len(engine.running)
            new = engine.step()
            events += new
            reads = [shape for shape in seen if shape[1] > 1]
            assert len(reads) <= 1
            assert all(n == 1 for n, _ in reads)
            if reads:
                n_reads += 1
                assert rows >= len(short)
                assert {event.request.id for event in new} >= {request.id for request in short}
    finally:
        handle.remove()
    assert n_reads == 2
    found = {done.request.id: done for done in completions_of(lm, events)}
    assert set(found) == {request.id for request in (*short, *asked)}
    for request in (*short, *asked):
        same(found[request.id], reference.complete(lm, method, request))


def test_a_question_that_is_cancelled_before_its_turn(colar, monkeypatch):
    """Its other samples read it; and the rows that run are as ever."""
    monkeypatch.setattr("colar.engine.scheduler.CHUNK", 4)
    *others, long = sorted(colar.requests, key=lambda request: len(ids(colar, request)))
    samples = [dataclasses.replace(long, id=f"s{i}", sample=i) for i in range(3)]
    engine = Engine(colar.lm, colar.method, 8)
    for request in (others[0], *samples):
        engine.submit(request)
    events = engine.step()
    assert len(engine.running) == 1
    assert len(engine.scheduler.in_prefill) == 3
    assert engine.cancel(samples[0])
    assert not engine.cancel(samples[0])
    found = drain(engine, events)
    assert set(found) == {others[0].id, "s1", "s2"}
    for done in found.values():
        same(done, reference_of(colar, done.request))


# Serving


class Refusing(Engine):
    def cancel(self, request):
        raise RuntimeError("cancel")


class Dying(Engine):
    """Its worker ends at the third step, as by an error of the interpreter."""

    def step(self):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 3:
            raise SystemExit("died")
        return super().step()


def serve(coroutine):
    async def in_time():
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(in_time())


def test_work_whose_caller_has_left_fails_without_a_word(colar):
    """The samples of a request that has been refused, for one."""
    said = []

    def fails():
        time.sleep(0.05)
        raise ValueError("refused")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        engine = AsyncEngine(Engine(colar.lm, colar.method, 2))
        caller = asyncio.create_task(engine.run(fails))
        await asyncio.sleep(0.01)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        # The worker goes on.
        assert await engine.run(lambda: 7) == 7
        await engine.close()
        gc.collect()

    serve(main())
    assert said == []


def test_a_cancel_that_raises_leaves_the_worker_alive(colar):
    async def main():
        engine = AsyncEngine(Refusing(colar.lm, colar.method, 2))
        leaving = engine.stream(colar.requests[0])
        await anext(leaving)
        await leaving.aclose()
        found = await asyncio.gather(*map(engine.generate, colar.requests))
        await engine.close()
        return found

    for request, done in zip(colar.requests, serve(main()), strict=True):
        same(done, colar.expected[request.id])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_hangs_when_the_worker_dies(colar):
    async def main():
        engine = AsyncEngine(Dying(colar.lm, colar.method, 1))
        found = await asyncio.gather(*map(engine.generate, colar.requests), return_exceptions=True)
        told = [each for each in found if isinstance(each, RuntimeError)]
        assert len(told) > len(found) - 3  # some may have been answered before
        assert {str(each) for each in told} == {"the engine is closed"}
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await engine.generate(colar.requests[0])
        await engine.close()

    serve(main())


def test_callers_of_other_batches_do_not_see_an_error(colar):
    """Nor that of an impossible request."""

    async def main():
        bad = culprits(colar, 2)
        impossible = dataclasses.replace(colar.requests[0], seed=2**63)
        engine = AsyncEngine(Engine(colar.lm, Raises(colar.method.config), 1))
        asked = [bad[0], *colar.requests, bad[1], impossible]
        found = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
        await engine.close()
        return found

    found = serve(main())
    assert [type(each) for each in (found[0], *found[-2:])] == [
        ZeroDivisionError,
        ZeroDivisionError,
        ValueError,
    ]
    for request, done in zip(colar.requests, found[1:-2], strict=True):
        same(done, colar.expected[request.id])
