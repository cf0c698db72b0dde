"""Steps recorded as CUDA graphs: in fixed shapes, they are the steps. On a CPU all but the replay is the same."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from peft.tuners.lora import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode
from torch_trees import tensors_of

from colar.engine import graphs, runner
from colar.engine.async_engine import AsyncEngine
from colar.engine.cache import EMPTY, CacheSize
from colar.engine.completion import Completion, Event, completions_of
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.engine.scheduler import Scheduler
from colar.evaluation.evaluate import AnswerSettings, validate
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.model.lora import LoraSettings
from colar.ops import devices
from colar.training.config import TrainingConfig
from colar.training.grpo import rewards
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.generation import QuestionSchedule, RolloutSampler

GREEDY = Decoding(max_latents=12, max_completion_length=12)
SAMPLED = Decoding(1.0, 1.0, 1.0, max_latents=12, max_completion_length=12)
NUCLEUS = Decoding(1.0, 0.9, 0.7, max_latents=12, max_completion_length=12)
LORA = LoraSettings(r=4, target_modules="all-linear")


@pytest.mark.parametrize(
    ("rows", "most", "wanted"), [(1, 32, 1), (2, 32, 2), (3, 32, 4), (5, 32, 8), (17, 32, 32), (9, 12, 12)]
)
def test_rows_are_filled_up(rows: int, most: int, wanted: int) -> None:
    assert graphs.rows_of(rows, most) == wanted
    size = Scheduler(most, for_graphs=True).smallest_size(rows, 50)
    assert (size.slots, size.columns) == (wanted + 1, 64), "the last slot is for copies"


def test_columns_are_read_in_a_few_widths() -> None:
    assert [graphs.columns_of(span) for span in (1, 64, 65, 128, 129, 300, 512)] == [
        *(64, 64, 128, 128, 256, 512, 512)
    ]


def test_a_cache_with_graphs_only_grows_within_its_budget() -> None:
    scheduler = Scheduler(32, for_graphs=True)
    size = scheduler.next_size(EMPTY, 3, 100)
    assert size == CacheSize(5, 128)
    assert scheduler.next_size(size, 1, 20) == size
    assert scheduler.next_size(size, 2, 300) == CacheSize(5, 512)
    assert Scheduler(32, token_budget=1100, for_graphs=True).next_size(size, 1, 300) == CacheSize(2, 512)


class Tape(TorchDispatchMode):
    """What a CUDA graph is: the operations of a run, which are done again with the tensors of that run.

    What Python decided in between is decided for good.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {each.untyped_storage().data_ptr() for each in tensors_of((args, kwargs))}
        # A view has what it is a view of.
        made = [each for each in tensors_of(result) if each.untyped_storage().data_ptr() not in read]
        self.done.append((func, args, kwargs or {}, made))
        return result

    def replay(self) -> None:
        for func, args, kwargs, made in self.done:
            again = tensors_of(func(*args, **kwargs))
            for own, new in zip(made, again, strict=False):
                own.copy_(new)


THINKERS = {
    "cot": ("cot", {}, {}),
    "colar": ("colar", {}, {"compression_factor": 2}),
    "majority": ("colar", {"stop": "majority"}, {"compression_factor": 3}),
    "sequential": ("sequential", {}, {"compression_factor": 3}),
    "real": ("sequential", {"compression_factors": [1, 1.5, 2, 5]}, {"compression_factor": 1.5}),
    "threshold": ("sequential", {"confidence_thresholds": [0, 0.6]}, {"compression_factor": 3, "confidence_threshold": 0.02}),
    "ordered": ("sequential", {"merge": "ordered"}, {"compression_factor": 2}),
    "coconut": ("coconut", {}, {}),
    "pause": ("pause", {}, {}),
    "ruplar": ("ruplar", {}, {}),
}  # fmt: skip


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps are recorded on the CPU, on a tape, as on a GPU. Returns what was recorded: the name of each work."""
    recordings: list[str] = []

    def capture(recorder: Any, work: Any, device: torch.device) -> Any:
        with Tape() as tape:
            result = work()

        def replay() -> Any:
            tape.replay()
            return result

        return replay

    record = graphs.Graphs._record

    def counted(recorder: Any, key: Any, own: Any, work: Any) -> None:
        recordings.append(key[0])
        record(recorder, key, own, work)

    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(graphs, "REPLAYED_ON", "cpu")
    monkeypatch.setattr(graphs, "can_record", lambda lm: True)
    monkeypatch.setattr(graphs, "leave_room", lambda lm: None)
    monkeypatch.setattr(graphs.Graphs, "_capture", capture)
    monkeypatch.setattr(graphs.Graphs, "_record", counted)
    return recordings


def thinker(name: str) -> tuple[LatentLM, Method, Any]:
    kind, config, params = THINKERS[name]
    torch.manual_seed(0)
    lm = liven(tiny_lm("llama"))
    method = registry.build(kind, config)
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    # A rounding error grows where hidden states or probabilities of random weights are fed back.
    lm = lm.double() if name in ("coconut", "ruplar") else lm
    return lm, method, registry.make_params(method, params)


def requests_of(params: Any, *decodings: Decoding, keep: bool = False) -> list[Request]:
    """A request for each example; the decodings take turns."""
    return [
        Request(
            example.id, example.question, params, decodings[i % len(decodings)], seed=i, keep_latents=keep
        )
        for i, example in enumerate(EXAMPLES)
    ]


def same(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.text, mine.thought_ids, mine.length) == (theirs.text, theirs.thought_ids, theirs.length)
        if mine.latents is not None and theirs.latents is not None:
            torch.testing.assert_close(mine.latents, theirs.latents, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "decodings", "wants_info"),
    [
        # What is kept of a thought differs from method to method; how it is drawn, in `sequential`'s ways.
        *((name, (NUCLEUS,), True) for name in ("cot", "colar", "threshold", "coconut", "ruplar")),
        *((name, (NUCLEUS, GREEDY, SAMPLED), False) for name in THINKERS),
        # Where no row, or every row, is drawn from all tokens: branches of the sampling that methods share.
        *((name, (decoding,), False) for name in ("colar", "sequential") for decoding in (GREEDY, SAMPLED)),
    ],
)
def test_recorded_thoughts_are_the_thoughts(
    name: str, decodings: tuple[Decoding, ...], wants_info: bool, taped: list[str]
) -> None:
    """Several numbers of rows, filled up or not, replayed for many steps and for other requests' seeds: nothing that
    Python decides may depend on them."""
    lm, method, params = thinker(name)
    asked = requests_of(params, *decodings, keep=wants_info)
    wanted = Engine(lm, method, 4, cuda_graphs=False).generate(asked)
    assert not taped
    same(Engine(lm, method, 4).generate(asked), wanted)
    assert len({rows for name, *_, rows in lm.idle_graphs.recorded if name == "thoughts"}) > 1
    assert not lm.idle_graphs._failed


def test_rows_of_several_params_are_recorded_together(taped: list[str]) -> None:
    lm, method, _ = thinker("real")
    asked = []
    for i, c in enumerate((1, 2.5, 3.5, 4, 1.5, 2)):
        params = registry.make_params(method, {"compression_factor": c})
        asked.append(Request(f"{i}", EXAMPLES[0].question, params, (NUCLEUS, GREEDY)[i % 2], seed=i))
    wanted = Engine(lm, method, 4, cuda_graphs=False).generate(asked)
    same(Engine(lm, method, 4).generate(asked), wanted)
    assert "thoughts" in taped


# Engines of one model


@pytest.mark.parametrize(("name", "decoding"), [("colar", "sampled"), ("sequential", "greedy")])
def test_a_second_engine_records_nothing(name: str, decoding: str, taped: list[str]) -> None:
    """Nor does one with another limit of rows that runs no more of them; nor a second evaluation."""
    lm, method, params = thinker(name)
    asked = requests_of(params, NUCLEUS)
    wanted = Engine(lm, method, 4).generate(asked)
    n = len(taped)
    assert n > 0
    same(Engine(lm, method, 4).generate(asked), wanted)
    assert len(taped) == n
    limits = AnswerSettings(max_latents=12, max_completion_length=12, batch_size=4)
    first = validate(lm, method, EXAMPLES, [params], decoding, limits)
    n = len(taped)
    # Training in place: the weights stay where they are.
    assert validate(lm, method, EXAMPLES, [params], decoding, limits) == first
    assert len(taped) == n


def test_training_between_two_validations_records_nothing(taped: list[str]) -> None:
    """Of an adapter that is folded in for each: its graphs and those of the adapter as it is stay apart."""
    torch.manual_seed(0)
    lm = liven(tiny_lm("llama", lora=LORA))
    method = registry.build("cot")
    # Enough for every number of rows to be there in the first turn.
    asked = 2 * requests_of(method.Params(), NUCLEUS)

    def answers(cuda_graphs: bool | None = None) -> list[Completion]:
        return Engine(lm, method, 4, cuda_graphs=cuda_graphs).generate(asked)

    def train() -> None:
        for weight in lm.parameters():
            if weight.requires_grad:
                weight.data += 0.05 * torch.randn(weight.shape)

    for turn in range(2):
        with lm.merged():
            same(answers(), answers(False))
        same(answers(), answers(False))
        if turn == 0:
            n = len(taped)
        train()
    assert len(taped) == n


def test_graphs_go_where_weights_or_the_method_are_others(taped: list[str]) -> None:
    lm, method, params = thinker("colar")
    asked = requests_of(params, SAMPLED)
    Engine(lm, method, 4).generate(asked)
    for change in ("weights", "sigma", "method"):
        n = len(taped)
        before = {key: graph for key, graph in lm.idle_graphs.recorded.items() if key[0] != "thoughts"}
        if change == "weights":
            weight = lm.causal_lm.get_input_embeddings().weight
            weight.data = weight.data.clone()
        elif change == "sigma":
            method.config = dataclasses.replace(method.config, sigma_e=3.0)
        else:
            method = registry.build("cot")
            asked = requests_of(method.Params(), SAMPLED)
        same(Engine(lm, method, 4).generate(asked), Engine(lm, method, 4, cuda_graphs=False).generate(asked))
        assert "thoughts" in taped[n:], change
        if change != "weights":
            # Decode steps and answers do not depend on the method.
            assert {key[0] for key in before} == {"decode steps", "answers"}
            assert all(lm.idle_graphs.recorded[key] is graph for key, graph in before.items())


def test_idle_graphs_keep_no_method_alive(taped: list[str]) -> None:
    """A control is a method that holds the thoughts of all its requests."""
    lm, method, params = thinker("colar")
    Engine(lm, method, 4).generate(requests_of(params, SAMPLED))
    seen = weakref.ref(method)
    # On a CPU a graph is the work itself, which has the method.
    lm.idle_graphs.recorded.clear()
    del method
    gc.collect()
    assert seen() is None


def disabled(lm: LatentLM) -> contextlib.AbstractContextManager[Any]:
    manager: contextlib.AbstractContextManager[Any] = lm.lm.disable_adapter()
    return manager


@contextlib.contextmanager
def scaled(lm: LatentLM) -> Iterator[None]:
    layers = [module for module in lm.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.scale_layer(3.0)
    yield
    for layer in layers:
        layer.unscale_layer()


@contextlib.contextmanager
def hooked(lm: LatentLM) -> Iterator[None]:
    layer = lm.causal_lm.get_input_embeddings().register_forward_hook(lambda *args: args[-1] * 2)
    last = next(module for name, module in lm.named_modules() if name.endswith("layers.1"))
    handle = last.register_forward_hook(lambda module, fed, out: out * 1.5)
    yield
    layer.remove()
    handle.remove()


@pytest.mark.parametrize("changed", [disabled, scaled, hooked])
def test_graphs_follow_what_changes_the_operations(changed: Any, taped: list[str]) -> None:
    """And the former ones are right again behind it."""
    torch.manual_seed(0)
    lm = liven(tiny_lm("llama", lora=LORA))
    for name, weight in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight.data, std=0.5)
    method = registry.build("cot")
    asked = requests_of(method.Params(), GREEDY)
    before = Engine(lm, method, 4).generate(asked)
    assert taped
    with changed(lm):
        wanted = Engine(lm, method, 4, cuda_graphs=False).generate(asked)
        same(Engine(lm, method, 4).generate(asked), wanted)
        assert [each.token_ids for each in wanted] != [each.token_ids for each in before]
    same(Engine(lm, method, 4).generate(asked), before)


def test_hooks_of_transformers_leave_graphs_on(taped: list[str]) -> None:
    """They stay on a model that was trained with gradient checkpointing, or whose hidden states were asked for."""
    lm, method, params = thinker("colar")
    lm.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.causal_lm.enable_input_require_grads()
    lm.causal_lm.gradient_checkpointing_disable()
    lm.layers(lm.embed(torch.tensor([[1, 2]])), None, None)
    assert any(module._forward_hooks for module in lm.modules())
    asked = requests_of(params, SAMPLED)
    found = Engine(lm, method, 4).generate(asked)
    assert taped
    same(found, Engine(lm, method, 4, cuda_graphs=False).generate(asked))


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_inference_mode_leaves_nothing_behind(cuda_graphs: bool, taped: list[str]) -> None:
    """Tensors that are made in it may not be written to outside of it."""
    lm, method, params = thinker("colar")
    asked = requests_of(params, SAMPLED)
    engine = Engine(lm, method, 4, cuda_graphs=cuda_graphs)
    with torch.inference_mode():
        inside = engine.generate(asked)
    same(engine.generate(asked), inside)
    assert not engine.busy


def test_two_engines_that_run_at_once_have_a_cache_each(taped: list[str]) -> None:
    lm, method, params = thinker("sequential")
    asked = requests_of(params, NUCLEUS)
    wanted = Engine(lm, method, 4, cuda_graphs=False).generate(asked)
    engines = [Engine(lm, method, 4) for _ in range(2)]
    events: list[list[Event]] = [[], []]
    for engine in engines:
        for request in asked:
            engine.submit(request)
    while any(engine.busy for engine in engines):
        for engine, mine in zip(engines, events, strict=True):
            if engine.busy:
                mine += engine.step()
    for mine in events:
        same(sorted(completions_of(lm, mine), key=lambda completion: completion.number), wanted)
    assert engines[0].runner.graphs is None
    assert lm.idle_graphs is not None
    n = len(taped)
    for engine in engines:
        same(engine.generate(asked), wanted)
    assert len(taped) == n, "idle engines share one set"


def test_an_engine_that_is_interrupted_leaves_clean_graphs(
    taped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, method, params = thinker("colar")
    asked = requests_of(params, NUCLEUS)
    wanted = Engine(lm, method, 4).generate(asked)
    n = len(taped)
    steps = itertools.count()

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(steps) == 3:
            # A row of it is in the cache, and may be anything.
            for tensor in self.graphs.cache.tensors():
                tensor.fill_(torch.nan)
            raise KeyboardInterrupt
        return decode(self, *args, **kwargs)

    decode = runner.Runner.decode
    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Engine(lm, method, 4).generate(asked)
    same(Engine(lm, method, 4).generate(asked), wanted)
    # A caller who leaves early, and an engine that is lost with its requests.
    next(iter(Engine(lm, method, 4).stream(asked)))
    same(Engine(lm, method, 4).generate(asked), wanted)
    assert len(taped) == n
    lost = Engine(lm, method, 4)
    lost.submit(asked[0])
    lost.step()
    del lost
    same(Engine(lm, method, 4).generate(asked), wanted)


def test_a_smaller_budget_gives_memory_back(taped: list[str]) -> None:
    """The cache that an engine takes over counts against its own budget."""
    lm, method, params = thinker("cot")
    asked = requests_of(params, GREEDY)
    wanted = Engine(lm, method, 8).generate(asked)
    assert lm.idle_graphs.cache.positions == 9 * 128
    small = Engine(lm, method, 8, token_budget=3 * 128)
    for request in asked:
        small.submit(request)
    events = []
    while small.busy:
        events += small.step()
        assert small.cache.positions <= 3 * 128
    same(sorted(completions_of(lm, events), key=lambda completion: completion.number), wanted)


@pytest.mark.parametrize(("family", "lora"), [("llama", LORA), ("gemma3", LORA), ("gpt2", None)])
def test_recorded_steps_are_the_steps(family: str, lora: LoraSettings | None, taped: list[str]) -> None:
    """Rows come and go: they are filled up, and what is fed is copied to where a graph reads it."""
    torch.manual_seed(0)
    lm = liven(tiny_lm(family, lora=lora))
    method = registry.build("colar", {"stop": "argmax"})
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    asked = requests_of(method.Params(), GREEDY, SAMPLED, keep=True)
    # The second time an adapter is folded in: what was recorded before it computes something else.
    for merged in (False, True):
        with lm.merged() if merged else contextlib.nullcontext():
            wanted = Engine(lm, method, 4, cuda_graphs=False).generate(asked)
            same(Engine(lm, method, 4).generate(asked), wanted)
    steps = [key for key in lm.idle_graphs.recorded if key[0] == "decode steps"]
    assert len({rows for *_, rows in steps}) > 1
    assert len({state for _, _, state, _ in steps}) == (2 if lora else 1)


def test_a_cpu_has_no_graphs() -> None:
    lm, method = tiny_lm("llama"), registry.build("cot")
    assert Engine(lm, method).runner.graphs is None, "on a CPU they gain nothing"


def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lm, method = liven(tiny_lm("llama")), registry.build("cot")
    asked = [
        Request(f"{i}", example.question, method.Params(), GREEDY) for i, example in enumerate(EXAMPLES[:3])
    ]
    wanted = Engine(lm, method, 2).generate(asked)
    tried = []

    def fails(*fed: Any) -> Any:
        tried.append(fed)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs.Graphs, "_capture", fails)
    # A graph of another device than the CPU would be captured.
    monkeypatch.setattr(graphs, "REPLAYED_ON", "cpu")
    for _ in range(2):
        found = Engine(lm, method, 2, cuda_graphs=True).generate(asked)
        assert [one.text for one in found] == [one.text for one in wanted]
    assert len(tried) == 3, "the backbone's step, the thought and the answer, once each"
    said = capsys.readouterr().err.splitlines()
    reason = "without CUDA graphs, which is slower: operation not permitted when stream is capturing"
    assert said == [f"warning: {name} run {reason}" for name in ("thoughts", "decode steps", "answers")]


def test_two_engines_record_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording begins by waiting for the whole device, which ends another thread's."""
    recording, overlaps = [], []

    def capture(recorder: Any, work: Any, device: torch.device) -> Any:
        overlaps.extend(recording)
        recording.append(threading.get_ident())
        work()
        time.sleep(0.02)
        recording.pop()
        return work

    monkeypatch.setattr(graphs, "REPLAYED_ON", "cpu")
    monkeypatch.setattr(graphs.Graphs, "_capture", capture)

    async def ask(name: str) -> Completion:
        lm, method, params = thinker(name)
        engine = AsyncEngine(Engine(lm, method, 2, cuda_graphs=True))
        completion = await engine.generate(Request(name, EXAMPLES[0].question, params, GREEDY))
        await engine.close()
        return completion

    async def ask_both() -> list[Completion]:
        return await asyncio.gather(ask("cot"), ask("sequential"))

    assert len(asyncio.run(ask_both())) == 2
    assert overlaps == []


def test_memory_that_runs_out_in_a_recording_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine then runs fewer rows; steps without graphs would need as much."""
    lm, method = tiny_lm("llama"), registry.build("cot")

    def fails(*fed: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs.Graphs, "_record", fails)
    with pytest.raises(torch.OutOfMemoryError):
        Engine(lm, method, 2, cuda_graphs=True).generate([Request("a", "2?", method.Params(), GREEDY)])


def test_answers_at_all_speeds_share_their_graphs() -> None:
    lm, method, _ = thinker("sequential")
    engine = Engine(lm, method, 1, cuda_graphs=True)
    for c in (1, 1.5, 2, 3):
        params = registry.make_params(method, {"compression_factor": c})
        engine.generate([Request(f"{c}", "2 and 2?", params, GREEDY)])
    names = [name for name, *_ in lm.idle_graphs.recorded]
    assert names.count("thoughts") > 1
    assert names.count("answers") == 1


def test_a_step_without_memory_frees_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read a cache that is released, and would hold their memory until the next decode step."""
    lm, method = tiny_lm("llama"), registry.build("cot")
    engine = Engine(lm, method, 2, cuda_graphs=True)
    for name in ("a", "b"):
        engine.submit(Request(name, "2 and 2?", method.Params(), GREEDY))
    for _ in range(3):
        engine.step()
    assert engine.runner.graphs.recorded
    choose = engine._choose

    def fails() -> None:
        monkeypatch.setattr(engine, "_choose", choose)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine, "_choose", fails)
    engine.step()
    assert not engine.runner.graphs.recorded


def test_a_pool_of_memory_goes_with_its_graphs() -> None:
    """The next capture into the pool of graphs that are gone would fail."""
    lm, method = tiny_lm("llama"), registry.build("cot")
    Engine(lm, method, 2, cuda_graphs=True).generate([Request("a", "2 and 2?", method.Params(), GREEDY)])
    recorded = lm.idle_graphs
    recorded._pool = "of these graphs"
    recorded.refresh(lm, method)
    recorded.drop("decode steps")
    assert recorded._pool == "of these graphs"
    weight = lm.causal_lm.get_input_embeddings().weight
    weight.data = weight.data.clone()
    recorded.refresh(lm, method)
    assert recorded._pool is None


def test_graphs_of_an_earlier_engine_change_no_bit(taped: list[str]) -> None:
    lm, method, params = thinker("colar")
    asked = requests_of(params, NUCLEUS, keep=True)
    engine = Engine(lm, method, 4)
    engine.generate(asked)
    idle = lm.idle_graphs
    earlier = dict(idle.recorded)
    for some in (asked[:3], asked[2:], asked[:1]):
        found = engine.generate(some)
        # An engine that has never answered.
        lm.idle_graphs = None
        wanted = Engine(lm, method, 4).generate(some)
        lm.idle_graphs = idle
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.text == theirs.text
            if mine.latents is not None and theirs.latents is not None:
                assert torch.equal(mine.latents, theirs.latents)
        assert any(completion.latents is not None for completion in found)
    assert all(idle.recorded[key] is graph for key, graph in earlier.items())


def test_reinforcement_records_in_its_first_generation_alone(taped: list[str]) -> None:
    """A generation is what a sampler makes of it that has made no other."""
    lm, method = liven(tiny_lm("llama")), registry.build("cot")
    config = GrpoConfig(num_generations=2, max_latents=4, max_completion_length=3)
    plan = config.plan(TrainingConfig(per_device_train_batch_size=2))

    def sampler() -> RolloutSampler:
        schedule = QuestionSchedule(EXAMPLES, 0, plan)
        return RolloutSampler(lm, method, config, schedule, rewards.by_name(["accuracy"]))

    used = sampler()
    used.generate(0)
    n = len(taped)
    assert n > 0
    found = used.generate(1)
    assert len(taped) == n
    lm.idle_graphs = None
    wanted = sampler().generate(1)
    for name, column in wanted.tensors.items():
        assert torch.equal(found.tensors[name].nan_to_num(), column.nan_to_num()), name


@pytest.mark.parametrize(("free", "stays"), [(0, False), (2**40, True)])
def test_training_gets_the_memory_back_that_it_needs(
    free: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, method = tiny_lm("llama"), registry.build("cot")
    graphs.leave_room(lm)
    Engine(lm, method, 2, cuda_graphs=True).generate([Request("a", "2 and 2?", method.Params(), GREEDY)])
    monkeypatch.setattr(graphs, "REPLAYED_ON", "cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**20)
    graphs.leave_room(lm)
    assert (lm.idle_graphs is not None) == stays
