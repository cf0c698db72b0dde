"""Continuous batching: who comes, who goes, who is left alone by it; the cache's slots; serving."""

import asyncio
import dataclasses
import random
import threading

import pytest
import torch
from families import EXAMPLES, WINDOW, backbone, liven, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import QUESTIONS, case_of, same
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from colar.engine import reference
from colar.engine.async_engine import AsyncEngine, run_in_temporary_thread
from colar.engine.cache import check_attention
from colar.engine.completion import completions_of
from colar.engine.engine import Engine, QueueFull
from colar.engine.request import Decoding, Request
from colar.engine.scheduler import MAX_WAIT_STEPS, SHARED_PREFILL_SLOTS, Entry, Scheduler
from colar.methods import pretrained, registry
from colar.methods.colar import Colar, ColarParams
from colar.model import masks
from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM


@pytest.fixture(scope="module")
def colar():
    return case_of("llama", "colar")


def drain(engine, events=()):
    """Completions by request id, of what has happened and what still does."""
    events = list(events)
    while engine.busy:
        events += engine.step()
    return {done.request.id: done for done in completions_of(engine.lm, events)}


# Coming and going


@pytest.mark.parametrize("slots", [1, 5])
def test_requests_join_a_running_batch(colar, slots):
    """One at a time, while others think or answer: each comes out as it would alone."""
    engine, events = Engine(colar.lm, colar.method, slots), []
    for request in colar.requests:
        engine.submit(request)
        events += engine.step()
    found = drain(engine, events)
    assert len(found) == len(colar.requests)
    for request in colar.requests:
        same(found[request.id], colar.expected[request.id])


def test_hundreds_of_requests(colar):
    """None lost, none starved, memory flat, and each as when it runs alone."""
    rng = random.Random(0)
    # The batch is filled eight times.
    n = 256
    requests = []
    for i in range(n):
        limits = {"max_latents": rng.randrange(12), "max_completion_length": rng.randrange(1, 7)}
        decoding = dataclasses.replace(rng.choice(colar.requests).decoding, **limits)
        params = ColarParams(rng.choice([1, 2, 5]))
        requests.append(Request(str(i), rng.choice(QUESTIONS), params, decoding, seed=i, sample=i % 4))
    engine = Engine(colar.lm, colar.method, 32)
    sizes, order, running, done, events = set(), [], set(), [], []
    for event in engine.stream(requests):
        events.append(event)
        if event.request.id not in running:
            running.add(event.request.id)
            order.append(int(event.request.id))
        if event.kind == "finished":
            done.append(event.request.id)
            sizes.add(engine.cache.positions)
    assert sorted(map(int, done)) == list(range(n))
    assert len(sizes) <= 5  # the slots grow to the widest request and stay, while there is work
    assert engine.cache.positions == 0
    # First come, first served: nobody starts before one who came a batch and its company earlier.
    assert all(place >= index - 64 for index, place in enumerate(order))
    completions = sorted(completions_of(colar.lm, events), key=lambda done: done.number)
    for found in rng.sample(completions, 15):
        (alone,) = Engine(colar.lm, colar.method, 32).generate([found.request])
        same(found, alone)


def test_cancelled_requests_leave_the_others_untouched(colar):
    engine, events = Engine(colar.lm, colar.method, 4), []
    for request in colar.requests:
        engine.submit(request)
    for _ in range(3):
        events += engine.step()
    running = [entry.request for entry in engine.running.entries]
    waiting = colar.requests[-1]
    assert waiting not in running
    gone = [running[0], running[-1], waiting]
    assert all(engine.cancel(request) for request in gone)
    assert not engine.cancel(gone[0])
    before = len(events)
    found = drain(engine, events)
    assert not [event for event in events[before:] if event.request in gone]
    kept = [request for request in colar.requests if request not in gone]
    assert set(found) == {request.id for request in kept}
    for request in kept:
        same(found[request.id], colar.expected[request.id])


class Poisoned(Colar):
    """Thinks NaN from the second step on, for requests with this seed."""

    def think(self, lm, state):
        thought = super().think(lm, state)
        bad = (state.seed == 666) & (state.step > 0)
        embeds = thought.embeds.masked_fill(bad[:, None], float("nan"))
        return dataclasses.replace(thought, embeds=embeds, done=thought.done & ~bad)


def test_a_failing_request_leaves_the_others_untouched(colar):
    """Its slot is used again by others, whom its NaN must not reach through the mask."""
    method = Poisoned(colar.method.config)
    bad = next(r for r in colar.requests if colar.expected[r.id].length > 1 and r.decoding.temperature == 0)
    bad = dataclasses.replace(bad, id="bad", seed=666)
    for slots, others in ((1, colar.requests[::3]), (3, colar.requests)):
        found = Engine(colar.lm, method, slots).generate([bad, *others, bad])
        assert [(c.reason, c.truncated, c.text) for c in (found[0], found[-1])] == [("error", True, "")] * 2
        for request, completion in zip(others, found[1:-1], strict=True):
            same(completion, colar.expected[request.id])


def test_a_stream_that_is_left_cancels_its_requests(colar):
    engine = Engine(colar.lm, colar.method, 3)
    stream = engine.stream(colar.requests)
    next(stream)
    with pytest.raises(RuntimeError, match="busy with other requests"):
        engine.generate(colar.requests[:1])
    stream.close()
    assert not engine.busy
    (done,) = engine.generate(colar.requests[:1])
    same(done, colar.expected[done.request.id])


def test_requests_that_are_alike_are_told_apart_by_number(colar):
    """The same object twice: each has events and a completion of its own."""
    request = colar.requests[-2]
    engine = Engine(colar.lm, colar.method, 2)
    assert [engine.submit(request) for _ in range(3)] == [0, 1, 2]
    events = []
    while engine.busy:
        events += engine.step()
    assert {event.number for event in events} == {0, 1, 2}
    for done in completions_of(engine.lm, events):
        assert done.request is request
        same(done, colar.expected[request.id])
    found = engine.generate([request, colar.requests[0], request])
    assert [done.number for done in found] == [3, 4, 5]
    assert [done.request for done in found] == [request, colar.requests[0], request]


def test_a_stream_ends_when_its_last_request_is_cancelled(colar):
    engine = Engine(colar.lm, colar.method, 2)
    first, second = colar.requests[:2]
    seen = []
    for event in engine.stream([first, second]):
        seen.append(event)
        engine.cancel(second)
    assert not engine.busy
    assert [event.request.id for event in seen if event.kind == "finished"] == [first.id]


# The queue


def test_the_line_is_bounded_and_says_what_can_never_run(colar):
    engine = Engine(colar.lm, colar.method, 1, token_budget=60, max_waiting=2)
    short = Request("s", "x?", ColarParams(1), Decoding(max_latents=2, max_completion_length=2))
    for _ in range(3):  # one of them has the slot
        engine.submit(dataclasses.replace(short))
    with pytest.raises(QueueFull, match="2 requests wait for a slot"):
        engine.submit(dataclasses.replace(short))
    engine.step()  # the slot is taken as before
    with pytest.raises(QueueFull, match="2 requests wait for a slot"):
        engine.submit(dataclasses.replace(short))
    with pytest.raises(ValueError, match="request long needs 80 positions; token_budget is 60"):
        engine.submit(
            Request("long", "x?", ColarParams(1), Decoding(max_latents=50, max_completion_length=4))
        )
    assert len(drain(engine)) == 1  # all have one id
    long = Request("long", "x?", ColarParams(1), Decoding(max_latents=50, max_completion_length=4))
    with pytest.raises(ValueError, match="request long needs"):
        next(engine.stream([short, long]))  # before anything runs
    assert not engine.busy
    for bad in ({"max_batch": 0}, {"token_budget": 0}, {"max_waiting": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be 1 or more, got 0"):
            Engine(colar.lm, colar.method, **bad)


def admitted(scheduler, running):
    """What starts beside these running requests; it leaves prefill at once."""
    scheduler.schedule(running)
    new = scheduler.in_prefill
    scheduler.batches.clear()
    return new


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_admission(data):
    """Slots and budget are kept, the order is kept, and everybody runs in the end."""
    slots = data.draw(st.integers(1, 20))
    budget = data.draw(st.one_of(st.none(), st.integers(100, 400)))
    scheduler = Scheduler(slots, budget)
    sizes = data.draw(st.lists(st.integers(1, 90), max_size=60))
    for i, size in enumerate(sizes):
        request = Request(str(i), "?", decoding=Decoding(max_latents=0, max_completion_length=1))
        scheduler.add(Entry(i, request, (0,) * size), [])
    running: list[Entry] = []
    started = []
    idle = 0
    while scheduler.waiting or running:
        new = admitted(scheduler, running)
        idle = 0 if new or len(running) == slots else idle + 1
        running += new
        # Those of one admission are prefilled by their length.
        started += sorted(int(entry.request.id) for entry in new)
        assert len(running) <= slots
        if budget is not None:
            assert (
                len(running) * max(entry.most_positions for entry in running) <= budget or len(running) == 1
            )
        elif scheduler.waiting:
            assert idle <= MAX_WAIT_STEPS
        ending = data.draw(st.integers(0, len(running)))
        running = running[ending:] if ending or not running else running[1:]
    assert started == list(range(len(sizes)))


def test_company_is_waited_for_at_a_free_slot():
    """Steps in which nobody could have started do not count."""
    slots = 2 * SHARED_PREFILL_SLOTS
    scheduler = Scheduler(slots)
    for i in range(3 * slots):
        scheduler.add(Entry(i, Request(str(i), "?"), (0,)), [])
    running = admitted(scheduler, [])
    assert len(running) == slots
    assert [admitted(scheduler, running) for _ in range(3 * MAX_WAIT_STEPS)] == [[]] * 3 * MAX_WAIT_STEPS
    # One slot becomes free: it is filled when nobody has joined it for some steps.
    joined = [len(admitted(scheduler, running[1:])) for _ in range(MAX_WAIT_STEPS + 1)]
    assert joined == [0] * MAX_WAIT_STEPS + [1]
    # Two are one in `SHARED_PREFILL_SLOTS`, and two that run alone could not bring more.
    assert len(admitted(scheduler, running[2:])) == 2
    assert len(admitted(scheduler, [])) == slots


def batch_lengths(on_gpu: bool, lengths: list[int]) -> list[list[int]]:
    """The lengths of the questions that are prefilled together."""
    scheduler = Scheduler(64, on_gpu=on_gpu)
    for i, length in enumerate(lengths):
        scheduler.add(Entry(i, Request(str(i), "?"), tuple(range(i, i + length))), [])
    scheduler.schedule([])
    return [[len(entry.ids) for entry in batch] for batch in scheduler.batches]


def test_a_gpu_prefills_more_questions_at_once() -> None:
    """But none beside one that is fed in chunks, whose last positions are those of its last chunk."""
    assert batch_lengths(False, [1000] * 5) == [[1000] * 2, [1000] * 2, [1000]]
    assert batch_lengths(True, [1000] * 9) == [[1000] * 8, [1000]]
    assert batch_lengths(True, [3000, 2048, 5, 2500]) == [[5, 2048], [2500], [3000]]


# Questions


def widths(lm):
    """Positions of every forward from now on, and how to stop listening."""
    # The first engine of an architecture tries a few tokens: that is done here.
    check_attention(lm.causal_lm)
    seen = []
    model = lm.causal_lm.base_model

    def hear(_, args, kwargs):
        seen.append(tuple(kwargs["inputs_embeds"].shape[:2]))

    return seen, model.register_forward_pre_hook(hear, with_kwargs=True)


def test_a_question_is_read_once_for_all_its_samples(colar):
    """Also for those who come while another sample of it runs; and every sample is what it would be alone."""
    base = dataclasses.replace(colar.requests[-3], sample=0)
    requests = [dataclasses.replace(base, id=str(i), sample=i) for i in range(8)]
    other = colar.requests[1]
    seen, handle = widths(colar.lm)
    try:
        found = Engine(colar.lm, colar.method, 16).generate([*requests[:4], other, *requests[4:]])
        prefills = [shape for shape in seen if shape[1] > 1]
        assert prefills == [(2, max(len(ids(colar, r)) for r in (base, other)))]
        seen.clear()
        few = Engine(colar.lm, colar.method, 2).generate(requests)
        assert sum(shape[1] > 1 for shape in seen) < len(requests) / 2
    finally:
        handle.remove()
    assert len({tuple(c.token_ids) for c in few}) > 1
    expected = {done.request.id: reference.complete(colar.lm, colar.method, done.request) for done in found}
    for done in (*found, *few):
        same(done, expected[done.request.id])


def ids(case, request):
    return case.lm.template.question(request.question, case.method.speed_text(request.params))


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_questions_share_a_forward_within_some_positions(family, monkeypatch):
    """And one that is longer has forwards of its own, chunk by chunk, whatever is left for the last one."""
    case = case_of(family, "colar")
    longest = max(len(ids(case, request)) for request in case.requests)
    for most in (longest - 1, longest // 2, 7):
        for module in ("runner", "scheduler"):
            monkeypatch.setattr(f"colar.engine.{module}.CHUNK", most)
        seen, handle = widths(case.lm)
        try:
            found = Engine(case.lm, case.method, 4).generate(case.requests)
        finally:
            handle.remove()
        for completion in found:
            same(completion, case.expected[completion.request.id])
        reads = [shape for shape in seen if shape[1] > 1]
        assert max(rows * length for rows, length in reads) <= most
        assert (1, most) in reads
        assert most < longest - 1 or any(rows > 1 for rows, _ in reads)


def test_both_kinds_of_row_share_one_forward_and_one_head(colar):
    """A step is one forward of one position a row, whatever the rows are doing."""
    seen, handle = widths(colar.lm)
    heads = []
    other = colar.lm.causal_lm.get_output_embeddings().register_forward_hook(
        lambda _, args, out: heads.append(args[0].shape[:-1])
    )
    try:
        engine = Engine(colar.lm, colar.method, 8)
        for request in colar.requests[:8]:
            engine.submit(request)
        mixed = 0
        while engine.busy:
            seen.clear()
            heads.clear()
            n = len(engine.running)
            both = 0 < sum(entry.thinks for entry in engine.running.entries) < n
            engine.step()
            decodes = [shape for shape in seen if shape[1] == 1]
            assert len(decodes) <= 1
            if both:
                mixed += 1
                assert heads == [(n,)]
    finally:
        handle.remove()
        other.remove()
    assert mixed > 2


# The cache


def test_slots_grow_and_keep_what_they_hold(colar):
    short = dataclasses.replace(colar.requests[4], id="short")
    long = dataclasses.replace(
        short, id="long", decoding=dataclasses.replace(short.decoding, max_completion_length=60)
    )
    engine = Engine(colar.lm, colar.method, 4)
    engine.submit(short)
    events = engine.step()
    columns = engine.cache.size.columns
    engine.submit(long)
    while len(engine.running) == 1:
        events += engine.step()
    assert engine.cache.size.columns > columns
    found = drain(engine, events)
    same(found["short"], reference.complete(colar.lm, colar.method, short))
    same(found["long"], reference.complete(colar.lm, colar.method, long))


def test_a_window_over_all_layers():
    """Mistral has one `sliding_window` and no layer types."""
    made = backbone("llama")
    config = MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=WINDOW,
        vocab_size=len(made.tokenizer), initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = liven(LatentLM.from_backbone(Backbone("mistral", MistralForCausalLM(config).eval(), made.tokenizer)))
    method = registry.build("colar", {"stop": "argmax"})
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    requests = [
        Request(str(i), question, ColarParams(2), Decoding(max_latents=20, max_completion_length=8))
        for i, question in enumerate(QUESTIONS)
    ]
    found = Engine(lm, method, 3).generate(requests)
    assert max(c.forward_passes for c in found) > WINDOW
    for done in found:
        same(done, reference.complete(lm, method, done.request))


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_eager_attention(family):
    """What validation runs in when a recipe trains with it."""
    case = case_of(family, "colar")
    case.lm.causal_lm.set_attn_implementation("eager")
    try:
        case.check(case.requests, 5)
    finally:
        case.lm.causal_lm.set_attn_implementation("sdpa")


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_attention_of_training_that_takes_no_masks(family):
    """The engine answers with the attention of the load."""
    case = case_of(family, "colar")
    with masks.attention(case.lm.config, "flash_attention_2"):
        found = Engine(case.lm, case.method, 5).generate(case.requests)
        assert case.lm.config._attn_implementation == "flash_attention_2"
    for done in found:
        same(done, case.expected[done.request.id])


def test_backbones_that_the_engine_cannot_run(colar):
    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=8, state_size=2))
    with pytest.raises(ValueError, match="MambaForCausalLM has layers of type linear_attention"):
        check_attention(mamba)
    stateful = tiny_lm("llama")
    stateful.causal_lm._is_stateful = True
    with pytest.raises(ValueError, match="LlamaForCausalLM has a recurrent state"):
        Engine(stateful, colar.method)  # before any request
    lm = tiny_lm("llama").causal_lm
    lm.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation flash_attention_2, which takes no masks"):
        check_attention(lm)


# Serving


def serve(coroutine):
    return asyncio.run(coroutine)


def test_many_callers_at_once(colar):
    async def main():
        engine = AsyncEngine(Engine(colar.lm, colar.method, 3))
        found = await asyncio.gather(*map(engine.generate, colar.requests))
        events = [event async for event in engine.stream(colar.requests[0])]
        await engine.close()
        return found, events

    found, events = serve(main())
    for request, completion in zip(colar.requests, found, strict=True):
        same(completion, colar.expected[request.id])
    expected = colar.expected[colar.requests[0].id]
    assert [event.kind for event in events].count("thought") == expected.length
    assert events[-1].kind == "finished"


def test_callers_of_two_loops_at_once_are_refused(colar):
    """The events of the first one would come to the second one's loop."""

    async def main():
        engine = AsyncEngine(Engine(colar.lm, colar.method, 2))
        events = engine.stream(colar.requests[0])
        await anext(events)

        async def other():
            return await engine.generate(colar.requests[1])

        with pytest.raises(RuntimeError, match="callers of one event loop at a time"):
            await asyncio.to_thread(asyncio.run, other())
        rest = [event async for event in events]
        await engine.close()
        return rest

    assert serve(main())[-1].kind == "finished"


def test_callers_who_leave_or_ask_for_the_impossible(colar):
    async def main():
        engine = AsyncEngine(Engine(colar.lm, colar.method, 2))
        impossible = Request("no", "x " * 70, ColarParams(2), Decoding(max_latents=60))
        with pytest.raises(ValueError, match="request no: the question has"):
            await engine.generate(impossible)
        tasks = [asyncio.create_task(engine.generate(request)) for request in colar.requests]
        leaving = engine.stream(colar.requests[0])
        await anext(leaving)
        await leaving.aclose()
        tasks[3].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(lambda: None)
        await engine.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await engine.generate(colar.requests[0])
        return engine, found

    engine, found = serve(main())
    assert isinstance(found[3], asyncio.CancelledError)
    for i, request in enumerate(colar.requests):
        if i != 3:
            same(found[i], colar.expected[request.id])
    assert not engine.engine.busy


def test_the_worker_does_other_things_between_steps(colar):
    """One thread alone computes with a model that is served."""

    async def main():
        engine = AsyncEngine(Engine(colar.lm, colar.method, 2))
        answering = asyncio.create_task(engine.generate(colar.requests[0]))
        names = [await engine.run(lambda: threading.current_thread().name) for _ in range(3)]
        with pytest.raises(ZeroDivisionError):
            await engine.run(lambda: 1 / 0)
        same(await answering, colar.expected[colar.requests[0].id])
        await engine.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await engine.run(lambda: None)
        return names

    assert serve(main()) == ["colar-engine_0"] * 3


def test_what_is_done_apart_leaves_no_thread_behind():
    thread = run_in_temporary_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    with pytest.raises(ZeroDivisionError):
        run_in_temporary_thread(lambda: 1 / 0)


def test_a_full_line_refuses_and_a_broken_step_is_told_to_all(colar, monkeypatch):
    async def main():
        engine = AsyncEngine(Engine(colar.lm, colar.method, 1, max_waiting=1))
        found = await asyncio.gather(*map(engine.generate, colar.requests), return_exceptions=True)
        refused = [each for each in found if isinstance(each, QueueFull)]
        assert refused
        assert len(refused) < len(found)
        with monkeypatch.context() as patched:
            patched.setattr(colar.lm, "_forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await engine.generate(colar.requests[0])
        assert not engine.engine.busy
        same(await engine.generate(colar.requests[0]), colar.expected[colar.requests[0].id])
        waiting = asyncio.create_task(engine.generate(colar.requests[1]))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(RuntimeError, match="engine .* closed"):
            await waiting

    serve(main())


def test_a_request_that_is_submitted_while_the_engine_closes_is_told_so(colar, monkeypatch):
    async def main():
        engine = AsyncEngine(Engine(colar.lm, colar.method, 2))
        submit, began, closed = engine.engine.submit, threading.Event(), threading.Event()

        def slow(*args):
            began.set()
            closed.wait(5)
            return submit(*args)

        monkeypatch.setattr(engine.engine, "submit", slow)
        asked = asyncio.create_task(engine.generate(colar.requests[0]))
        await asyncio.to_thread(began.wait, 5)
        closing = asyncio.create_task(engine.close())
        # Until the executor takes no more work.
        while not engine._worker._shutdown:
            await asyncio.sleep(0.001)
        closed.set()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await asked
        await closing

    serve(main())
