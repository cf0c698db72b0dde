"""Steps recorded as CUDA graphs: in fixed shapes, they are the steps. On a CPU all but the replay is the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import pytest
import torch
from families import EXAMPLES, liven, tiny_lm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colar.engine import graphs
from colar.engine.cache import EMPTY, CacheSize
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request, fold
from colar.engine.scheduler import Scheduler
from colar.methods import pretrained, registry
from colar.methods.sequential import choice
from colar.model.lora import LoraSettings
from colar.training.config import TrainingConfig
from colar.training.grpo import rewards
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.generation import QuestionSchedule, RolloutSampler

GREEDY = Decoding(max_latents=12, max_completion_length=12)
SAMPLED = Decoding(1.0, 1.0, 1.0, max_latents=12, max_completion_length=12)


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
    assert Scheduler(32, budget=1100, for_graphs=True).next_size(size, 1, 300) == CacheSize(2, 512)


class Tape(TorchDispatchMode):
    """What a CUDA graph is: the operations of a run, which are done again with the tensors of that run.

    What Python decided in between is decided for good.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {each.untyped_storage().data_ptr() for each in leaves((args, kwargs))}
        # A view has what it is a view of.
        made = [each for each in leaves(result) if each.untyped_storage().data_ptr() not in read]
        self.done.append((func, args, kwargs or {}, made))
        return result

    def replay(self) -> None:
        for func, args, kwargs, made in self.done:
            again = leaves(func(*args, **kwargs))
            for own, new in zip(made, again, strict=False):
                own.copy_(new)


def leaves(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


THINKERS = {
    "cot": ("cot", {}, {}),
    "colar": ("colar", {}, {"compression_factor": 2}),
    "majority": ("colar", {"stop": "majority"}, {"compression_factor": 3}),
    "sequential": ("sequential", {}, {"compression_factor": 3}),
    "real": ("sequential", {"compression_factors": "1.0..5.0"}, {"compression_factor": 1.5}),
    "threshold": ("sequential", {"confidence_thresholds": [0, 0.6]}, {"compression_factor": 3, "confidence_threshold": 0.02}),
    "ordered": ("sequential", {"merge": "ordered"}, {"compression_factor": 2}),
    "coconut": ("coconut", {}, {}),
    "pause": ("pause", {}, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("decoding", "wants_info"), [(GREEDY, False), (SAMPLED, True)], ids=["greedy", "sampled, with info"]
)
@pytest.mark.parametrize("name", THINKERS)
def test_recorded_thoughts_are_the_thoughts(
    name: str, decoding: Decoding, wants_info: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several numbers of rows, replayed for many steps: nothing that Python decides may depend on the step."""
    kind, config, params = THINKERS[name]
    torch.manual_seed(0)
    lm = liven(tiny_lm("llama"))
    method = registry.build(kind, config)
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    monkeypatch.setattr(choice, "choose", functools.partial(choice.choose, compact=False))
    replayed = []

    def capture(recorder: Any, work: Any) -> Any:
        with Tape() as tape:
            result = work()

        def replay() -> Any:
            replayed.append(recorder)
            tape.replay()
            return result

        return replay

    monkeypatch.setattr(graphs.GraphedThink, "_capture", capture)
    monkeypatch.setattr(graphs.GraphedHidden, "_capture", lambda recorder, work: work)
    made = registry.make_params(method, params)
    asked = [
        Request(f"{i}", example.question, made, decoding, seed=i, keep_latents=wants_info)
        for i, example in enumerate(EXAMPLES * 2)
    ]
    wanted = Engine(lm, method, 5).generate(asked)
    monkeypatch.setattr(graphs, "REPLAYED_ON", "cpu")
    engine = Engine(lm, method, 5, cuda_graphs=True)
    found = engine.generate(asked)
    assert len(replayed) > 10
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.text, mine.thought_ids, mine.length) == (theirs.text, theirs.thought_ids, theirs.length)
        if mine.latents is not None and theirs.latents is not None:
            torch.testing.assert_close(mine.latents, theirs.latents, rtol=1e-3, atol=1e-4)
    assert engine.thinks is not None
    assert len({rows for rows, _ in engine.thinks.recorded}) > 1


def test_rows_of_several_settings_think_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, method = liven(tiny_lm("llama")), registry.build("sequential")
    pretrained.attach(lm, method, seed=1)
    engine = Engine(lm, method, 4, cuda_graphs=True)
    asked = [
        Request(
            f"{i}",
            EXAMPLES[0].question,
            registry.make_params(method, {"compression_factor": c}),
            GREEDY,
            seed=i,
        )
        for i, c in enumerate((1, 2, 2, 2))
    ]
    found = engine.generate(asked)
    assert [each.text for each in found] == [each.text for each in Engine(lm, method, 4).generate(asked)]
    assert engine.thinks is not None
    nucleus = dataclasses.replace(SAMPLED, top_p=0.9)
    engine.thinks.recorded.clear()
    engine.generate([dataclasses.replace(each, decoding=nucleus) for each in asked[1:]])
    assert not engine.thinks.recorded


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize(
    "lora", [None, LoraSettings(r=4, target_modules="all-linear")], ids=["full", "adapter"]
)
def test_recorded_steps_are_the_steps(family: str, lora: LoraSettings | None) -> None:
    """Rows come and go in an engine of 5: they are filled up, and what is fed is copied to where a graph reads it."""
    torch.manual_seed(0)
    lm = liven(tiny_lm(family, lora=lora))
    method = registry.build("colar", {"stop": "argmax"})
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    requests = []
    for i, example in enumerate(EXAMPLES * 2):
        decoding = (GREEDY, SAMPLED)[i % 2]
        requests.append(
            Request(f"{i}", example.question, method.Params(), decoding, seed=i, keep_latents=True)
        )
    engine = Engine(lm, method, 5, cuda_graphs=True)
    recorded = engine.runner.graphs
    assert recorded is not None
    # The second time an adapter is folded in: what was recorded before it computes something else.
    earlier: list[Any] = []
    for merged in (False, True):
        shapes_met = set()
        with lm.merged() if merged else contextlib.nullcontext():
            wanted = Engine(lm, method, 5).generate(requests)
            for request in requests:
                engine.submit(request)
            events = []
            while engine.busy:
                events += engine.step()
                shapes_met |= set(recorded.recorded)
        found = sorted(fold(lm, events), key=lambda completion: int(completion.request.id))
        assert len({rows for rows, _ in shapes_met}) > 1
        now = list(recorded.recorded.values())
        kept = [graph for graph in now if any(graph is other for other in earlier)]
        assert not (kept and lora), "an adapter that is folded in has graphs of its own"
        earlier = now
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine.text, mine.thought_ids) == (theirs.text, theirs.thought_ids)
            if theirs.latents is not None and mine.latents is not None:
                torch.testing.assert_close(mine.latents, theirs.latents, rtol=1e-3, atol=1e-4)


def test_an_engine_is_compiled_or_recorded() -> None:
    lm, method = tiny_lm("llama"), registry.build("cot")
    with pytest.raises(ValueError, match="compile or cuda_graphs, not both"):
        Engine(lm, method, compile=True, cuda_graphs=True)
    assert Engine(lm, method).runner.graphs is None, "on a CPU they gain nothing"


def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lm, method = liven(tiny_lm("llama")), registry.build("cot")
    asked = [Request(f"{i}", example.question, decoding=GREEDY) for i, example in enumerate(EXAMPLES[:3])]
    wanted = Engine(lm, method, 2).generate(asked)
    tried = []

    def fails(*fed: Any) -> Any:
        tried.append(fed)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs.GraphedHidden, "_capture", fails)
    # A graph of another device than the CPU would be captured.
    monkeypatch.setattr(graphs, "REPLAYED_ON", "cpu")
    found = Engine(lm, method, 2, cuda_graphs=True).generate(asked)
    assert [one.text for one in found] == [one.text for one in wanted]
    assert len(tried) == 1
    said = capsys.readouterr().err
    assert "without CUDA graphs, which is slower: operation not permitted when stream is capturing\n" in said


def test_memory_that_runs_out_in_a_recording_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine then runs fewer rows; steps without graphs would need as much."""
    lm, method = tiny_lm("llama"), registry.build("cot")

    def fails(*fed: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs.GraphedHidden, "_record", fails)
    with pytest.raises(torch.OutOfMemoryError):
        Engine(lm, method, 2, cuda_graphs=True).generate([Request("a", "2?", decoding=GREEDY)])


def test_a_pool_of_memory_goes_with_its_graphs() -> None:
    """The next capture into the pool of graphs that are gone would fail."""
    lm, method = tiny_lm("llama"), registry.build("cot")
    engine = Engine(lm, method, 2, cuda_graphs=True)
    recorded = engine.runner.graphs
    assert recorded is not None
    asked = [Request("a", "2 and 2?", decoding=GREEDY)]
    engine.generate(asked)
    recorded._pool = "of these graphs"
    recorded.refresh()
    assert recorded._pool == "of these graphs"
    weight = lm.causal_lm.get_input_embeddings().weight
    weight.data = weight.data.clone()
    recorded.refresh()
    assert recorded._pool is None


def test_graphs_serve_as_long_as_the_engine_and_change_no_bit() -> None:
    """An engine that has answered before records no shape twice, and answers as one that has not."""
    lm, method = liven(tiny_lm("llama")), registry.build("colar", {"stop": "argmax"})
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    requests = [
        Request(f"{i}", example.question, method.Params(), SAMPLED, seed=i, keep_latents=True)
        for i, example in enumerate(EXAMPLES * 2)
    ]
    engine = Engine(lm, method, 4, cuda_graphs=True)
    graphed = engine.runner.graphs
    assert graphed is not None
    engine.generate(requests)
    earlier = dict(graphed.recorded)
    assert len(earlier) > 1
    for asked in (requests[:3], requests[2:], requests[:1]):
        found = engine.generate(asked)
        wanted = Engine(lm, method, 4, cuda_graphs=True).generate(asked)
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.text == theirs.text
            if mine.latents is not None and theirs.latents is not None:
                assert torch.equal(mine.latents, theirs.latents)
        assert any(completion.latents is not None for completion in found)
    assert all(graphed.recorded[shape] is graph for shape, graph in earlier.items())


def test_reinforcement_samples_all_generations_with_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are recorded; a generation is what a sampler makes of it that has made no other."""
    monkeypatch.setattr(graphs, "can_record", lambda lm: True)
    lm, method = liven(tiny_lm("llama")), registry.build("cot")
    config = GrpoConfig(num_generations=2, max_latents=4, max_completion_length=3)
    plan = config.plan(TrainingConfig(per_device_train_batch_size=2))

    def sampler() -> RolloutSampler:
        schedule = QuestionSchedule(EXAMPLES, 0, plan)
        return RolloutSampler(lm, method, config, schedule, 0, rewards.by_name(["accuracy"]))

    used = sampler()
    used.generate(0)
    engine = used._engine
    assert engine is not None
    assert engine.runner.graphs is not None
    first = dict(engine.runner.graphs.recorded)
    found = used.generate(1)
    assert used._engine is engine
    assert all(engine.runner.graphs.recorded[shape] is graph for shape, graph in first.items())
    wanted = sampler().generate(1)
    for name, column in wanted.tensors.items():
        assert torch.equal(found.tensors[name].nan_to_num(), column.nan_to_num()), name

    monkeypatch.undo()
    fresh = sampler()
    fresh.generate(0)
    assert fresh._engine is None, "any other engine is a fresh one"
