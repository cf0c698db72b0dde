"""What a GPU would wait for: a decode step looks at the device once. Counted on the CPU (looks.py)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXAMPLES, tiny_lm
from launch import together
from sync_counter import counted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colar import processes
from colar.engine.cache import round_up
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.engine.runner import grouped_heads
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.methods.rollouts import Scorable
from colar.methods.sequential import Sequential
from colar.methods.sequential import choice as group_choice
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.ops import devices
from colar.ops.sampling import Ways, is_drawn, sample_tokens
from colar.training import preflight, sft
from colar.training.config import TrainingConfig
from colar.training.grpo import run as grpo_run
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.generation import Generation
from colar.training.grpo.trainer import dropout_rates_zeroed
from colar.training.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = Decoding(max_latents=12, max_completion_length=12)
SAMPLED = Decoding(1.0, 1.0, 1.0, max_latents=12, max_completion_length=12)
NUCLEUS = Decoding(1.0, 0.9, 0.7, max_latents=12, max_completion_length=12)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cot": ("cot", {}, {}),
    "gaussian": ("colar", {}, {}),
    "argmax": ("colar", {"stop": "argmax"}, {}),
    "sequential": ("sequential", {}, {"compression_factor": 3}),
    "shortlist": ("sequential", {"shortlist": True}, {"compression_factor": 2}),
    "any c": (
        "sequential",
        {"compression_factors": "1.0..5.0"},
        {"compression_factor": 1.5},
    ),
    "coconut": ("coconut", {}, {}),
    "pause": ("pause", {}, {}),
    "ruplar": ("ruplar", {}, {}),
    "soft": ("cot", {}, {"soft_temperature": 0.6}),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is another tensor, all rows and places are computed."""
    patch(monkeypatch)


def patch(monkeypatch: pytest.MonkeyPatch) -> None:

    def send(tensor: Tensor, device: torch.device) -> Tensor:
        sent: Any = tensor.clone()
        sent._known = False
        return sent

    def beside(tensor: Tensor, other: Any) -> Tensor:
        # What goes beside a tensor that is on the CPU stays there.
        return tensor if getattr(other, "_known", False) in (True, None) else send(tensor, other.device)

    def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
        # It is on either side: that of what it meets.
        made: Any = torch.tensor(values)
        made._known = None
        return made

    monkeypatch.setattr(devices, "constant", constant)
    monkeypatch.setattr(devices, "send", send)
    monkeypatch.setattr(devices, "beside", beside)
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)


def build(name: str) -> tuple[LatentLM, Method, Any]:
    kind, config, params = CASES[name]
    lm = tiny_lm("llama")
    method = registry.build(kind, config)
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    return lm, method, registry.make_params(method, params)


def steps(engine: Engine, requests: list[Request]) -> list[tuple[bool, list[str]]]:
    """For each step in which nobody joins or ends: whether rows of both kinds run, and its looks."""
    for request in requests:
        engine.submit(request)
    found = []
    while engine.busy:
        both = len(set(engine.running.thinks)) == 2
        n = len(engine.running)
        with counted() as looks:
            events = engine.step()
        if not any(event.kind == "finished" for event in events) and len(engine.running) == n > 0:
            found.append((both, looks))
    return found


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED, NUCLEUS], ids=["greedy", "sampled", "nucleus"])
@pytest.mark.parametrize("name", CASES)
def test_a_decode_step_looks_once(name: str, decoding: Decoding) -> None:
    lm, method, params = build(name)
    requests = []
    for i, example in enumerate(EXAMPLES):
        # Some answer while others think.
        own = replace(decoding, max_latents=2 + 4 * (i % 2), max_completion_length=8 + 4 * (i // 2 % 2))
        requests.append(Request(example.id, example.question, params, own, seed=i))
    found = steps(Engine(lm, method, 8), requests)
    assert len(found) > 3
    for _, looks in found:
        assert len(looks) == 1, looks
    assert name in ("coconut", "pause") or any(both for both, _ in found)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_greedy_and_drawn_rows_share_a_step_that_looks_once() -> None:
    lm, method, params = build("cot")
    requests = []
    for i, example in enumerate(EXAMPLES):
        decoding = (GREEDY, SAMPLED, NUCLEUS)[i % 3]
        requests.append(Request(example.id, example.question, params, decoding, seed=i))
    for _, looks in steps(Engine(lm, method, 8), requests):
        assert len(looks) == 1, looks


def test_looks_are_counted() -> None:
    """What cannot be missed: else the tests above could not fail."""
    column = torch.arange(4.0)
    with counted() as looks:
        bool((column > 2).any())
        column[column > 1]
        column.tolist()
        (column > 3).nonzero()
        known = torch.tensor([1.0, 2.0])
        assert bool((known > 0).all())
        assert known.tolist() == [1.0, 2.0]
    assert len(looks) == 4


def test_a_run_looks_at_a_log_alone(tmp_path: Path) -> None:
    """Rows, gradient norm, terms of the loss, hours: a look at the last log says whether all updates were finite."""
    lm, method, _ = build("gaussian")
    config = TrainingConfig(
        report_to="none",
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=100,
        save_steps=100,
        max_hours=1,
    )
    with counted() as looks:
        sft.train(lm, method, EXAMPLES, config, tmp_path)
    places = (
        "/training/trainer.py",
        "/training/callbacks.py",
        "/training/rows.py",
        "/training/objective.py",
    )
    own = [line for line in looks if any(place in line for place in places)]
    # A data loader's seed, on the CPU: for the lengths of the rows, and at the beginning of an epoch.
    own = [line for line in own if "get_batch_samples" not in line and "from_iterable(loader)" not in line]
    # The save at the end logs a row, and Trainer the times of the run.
    assert ["tolist" in line for line in own] == 3 * [True]


# What is computed instead is the same.


@pytest.mark.parametrize("top_ps", [(1.0, 1.0, 1.0), (0.8, 0.8, 0.8), (1.0, 0.8, 0.999)])
def test_no_token_changes_where_all_rows_are_computed(
    top_ps: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every way in which a row of the batch may draw. Some nuclei are larger than a window."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.3, 3, 6])[torch.arange(36) // 12, None] * torch.randn(
        36, 700, generator=generator
    )
    temperature = torch.tensor([0.0, 1.0, 0.5]).repeat(12).double()
    top_p = torch.tensor(top_ps).repeat(12).roll(1).double()
    uniform = torch.rand(36, generator=generator, dtype=torch.float64)
    drawn = temperature + 1
    wanted = sample_tokens(logits, temperature, top_p, uniform)
    tokens = wanted.unique().tolist()
    wanted_tokens = [is_drawn(token, logits, drawn, top_p, uniform) for token in tokens]
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    for ways in (None, Ways(True, True, True)):
        assert torch.equal(sample_tokens(logits, temperature, top_p, uniform, ways), wanted)
        found = [is_drawn(token, logits, drawn, top_p, uniform, ways) for token in tokens]
        assert torch.equal(torch.stack(found), torch.stack(wanted_tokens))


@pytest.mark.parametrize("threshold", [0.0, 0.01])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_groups_are_the_same_where_all_places_are_computed(
    temperature: float, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, _, _ = build("sequential")
    n = 12
    hidden = lm.hidden(lm.embed(torch.arange(n)[None]))[0].detach()
    first = torch.randint(0, lm.vocabulary_size, (n,), generator=torch.Generator().manual_seed(0))
    first[3] = lm.template.separator_id
    columns = torch.ones(n, dtype=torch.float64)
    uniform = torch.rand(5, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rules = group_choice.Rules(
        units=torch.tensor([1, 2, 3, 4] * 3),
        most_units=4,
        temperature=temperature * columns,
        top_p=columns,
        ways=Ways.of([(temperature, 1.0)]),
        confidence_threshold=threshold * columns,
        has_threshold=threshold > 0,
        uniform=lambda place: uniform[place],
    )
    for wants_logps in (True, False):
        wanted = group_choice.choose(lm, hidden, first, rules, wants_logps)
        with monkeypatch.context() as patch:
            patch.setattr(devices, "is_asynchronous", lambda device: True)
            found = group_choice.choose(lm, hidden, first, rules, wants_logps)
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.logps, wanted.logps)
        assert torch.equal(found.declined_ids, wanted.declined_ids)
        torch.testing.assert_close(found.declined_logps, wanted.declined_logps)
    assert (wanted.ids >= 0).sum(-1).unique().numel() > 2


# Query heads that share a key head


class LargestCopies(TorchDispatchMode):
    """The most numbers of a key or value that an operation inside the block has made."""

    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        self.shape = (columns, width)
        self.heads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dim() == 4 and tuple(tensor.shape[2:]) == self.shape:
                self.heads = max(self.heads, tensor.shape[1])
        return result


TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in registry.METHODS},
    **{case: (CASES[case][0], CASES[case][1]) for case in ("shortlist", "any c")},
    "paper": ("colar", {"latent_loss": "nll", "chain_label": "sampled", "merge": "mean"}),
    "point": ("colar", {"head": "deterministic", "supervise_chain": False}),
    "ordered": ("sequential", {"merge": "ordered", "lookahead_weight": 0.2}),
    "thresholds": ("sequential", {"confidence_thresholds": [0, 0.8]}),
    "equations": (
        "sequential",
        {
            "grouping": "equations",
            "merge": "ordered",
            "shortlist": True,
            "confidence_thresholds": [0, 0.8],
            "lookahead_weight": 0.2,
        },
    ),
    "coconut's last stage": ("coconut", {"n_stages": 1, "epochs_per_stage": 0.01}),
    "icot's middle": ("icot", {"removed_per_epoch": 1.0, "unit": "steps"}),
}
"""Every method as it is by default, and what else some can do."""


def known(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, whose columns are on the CPU where a GPU trains."""
    for column in batch.values():
        column._known = True  # type: ignore[attr-defined]
    return batch


def made(case: str, family: str = "llama", lora: LoraSettings | None = None) -> tuple[LatentLM, Method]:
    kind, config = TRAINED[case]
    lm = tiny_lm(family, lora=lora, digits=family == "llama")
    method = registry.build(kind, config)
    pretrained.attach(lm, method, seed=1)
    return lm, method


def updates(model: tuple[LatentLM, Method], steps: int, folder: Path, **config: Any) -> list[str]:
    """The looks of some updates without a log between them, that after the last one included."""
    settings = TrainingConfig(
        report_to="none", per_device_train_batch_size=2, max_steps=steps, logging_steps=1000, **config
    )
    lm, method = model
    trainer = sft.make_trainer(lm, method, EXAMPLES, settings, RunFolder(folder))
    trainer.args.save_strategy = "no"
    made_of = trainer.data_collator
    trainer.data_collator = lambda rows: known(made_of(rows))
    with preflight.prepared(lm, packed=settings.packing), counted() as lines:
        trainer.train()
    return lines


HOW: list[tuple[str, dict[str, Any]]] = [
    (case, config)
    for case, built in TRAINED.items()
    for config in ({}, {"packing": True}, {"tokens_per_batch": 100})
    # A loss that feeds the model several times cannot be packed.
    if not (config.get("packing") and registry.build(*built).multiple_forwards)
]


@pytest.mark.parametrize(("case", "config"), HOW, ids=str)
def test_an_update_waits_for_nothing(
    case: str, config: dict[str, Any], as_on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is waited for at a log. Batches are on the CPU, so that lengths are known there.

    Where groups end before tokens of low confidence, the first pass is waited for, once: it says how many there are.
    """
    first_passes = []
    first_pass = Sequential._logps_after_single_tokens

    def counting(*args: Any) -> Tensor:
        first_passes.append(args)
        return first_pass(*args)

    monkeypatch.setattr(Sequential, "_logps_after_single_tokens", counting)
    once = len(updates(made(case), 1, tmp_path / "1", **config)) - len(first_passes)
    first_passes.clear()
    looks = updates(made(case), 3, tmp_path / "3", **config)
    assert len(looks) - len(first_passes) == once, "\n".join(looks)
    assert bool(first_passes) == any(TRAINED[case][1].get("confidence_thresholds", ()))


LORA = LoraSettings(r=4, lora_alpha=8, target_modules="all-linear")


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("case", ["cot", "colar", "sequential", "pause"])
def test_an_added_separator_makes_no_update_wait(
    case: str, lora: LoraSettings | None, as_on_a_gpu: None, tmp_path: Path
) -> None:
    """It is a row of the embedding that is trained by itself, or beside the others, which are not."""
    once = updates(made(case, "gemma3", lora), 1, tmp_path / "1")
    looks = updates(made(case, "gemma3", lora), 3, tmp_path / "3")
    assert len(looks) == len(once), "\n".join(looks)


def grpo_updates(case: str, steps: int, folder: Path, grpo: dict[str, Any], **config: Any) -> list[str]:
    """The looks of updates that learn from one generation, those of its sampling left out."""
    lm, method = made(case)
    list(method.prepare(lm, EXAMPLES))
    settings = TrainingConfig(
        report_to="none", per_device_train_batch_size=2, max_steps=steps, logging_steps=1000, **config
    )
    sampling = GrpoConfig(
        num_generations=2, steps_per_generation=3, max_latents=6, max_completion_length=4, **grpo
    )
    trainer = grpo_run.make_trainer(lm, method, EXAMPLES, settings, sampling, RunFolder(folder))
    trainer.args.eval_on_start = False
    trainer.args.save_strategy = "no"
    sample = trainer.sampler.generate
    with dropout_rates_zeroed(lm), preflight.prepared(lm), counted() as lines:

        def generate(number: int) -> Generation:
            before = len(lines)
            generation = sample(number)
            del lines[before:]
            known(generation.tensors)
            return generation

        trainer.sampler.generate = generate  # type: ignore[method-assign]
        trainer.train()
    return lines


SCORABLE = [case for case in TRAINED if isinstance(registry.build(*TRAINED[case]), Scorable)]


@pytest.mark.parametrize(
    ("grpo", "config"),
    [
        ({}, {}),
        (
            {"beta": 0.1, "loss_type": "bnpo", "importance_sampling_level": "sequence", "temperature": 0.8},
            {"tokens_per_batch": 100},
        ),
    ],
    ids=["", "other loss, in parts"],
)
@pytest.mark.parametrize("case", SCORABLE)
def test_an_update_of_grpo_waits_for_nothing(
    case: str, grpo: dict[str, Any], config: dict[str, Any], as_on_a_gpu: None, tmp_path: Path
) -> None:
    """Sampling waits at each step; the updates that learn from what was sampled do not."""
    once = grpo_updates(case, 1, tmp_path / "1", grpo, **config)
    looks = grpo_updates(case, 3, tmp_path / "3", grpo, **config)
    assert len(looks) == len(once), "\n".join(looks)


def looks_of_a_process(kind: str, steps: int, folder: Path) -> list[str]:
    processes.join(120)
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        if kind == "sft":
            looks = updates(made("colar"), steps, folder, gradient_accumulation_steps=2)
        else:
            looks = grpo_updates("colar", steps, folder, {})
    processes.leave()
    return looks


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_an_update_of_two_processes_waits_for_nothing(kind: str, tmp_path: Path) -> None:
    """The last update of an epoch, too, in which some rows are there twice."""
    once = together(2, tmp_path / "once", looks_of_a_process, kind, 1, tmp_path / "1")
    thrice = together(2, tmp_path / "thrice", looks_of_a_process, kind, 3, tmp_path / "3")
    for mine, looks in zip(once, thrice, strict=True):
        assert len(looks) == len(mine), "\n".join(looks)


@pytest.mark.parametrize("own", [False, True], ids=["transformers", "grouped"])
def test_a_step_copies_no_keys_for_query_heads(own: bool) -> None:
    """Four query heads share two key heads: in no step are there keys, or values, for four."""
    lm, method, params = build("cot")
    requests = [Request(f"{i}", e.question, params, GREEDY) for i, e in enumerate(EXAMPLES)]
    engine = Engine(lm, method, 8)
    for request in requests:
        engine.submit(request)
    seen = 0
    while engine.busy:
        rows = engine.running
        n = len(rows)
        span = round_up(1 + max(map(rows.position, range(n)))) if n else 0
        waits = len(engine.scheduler.waiting) > 0 or len(engine.prefill) > 0
        with grouped_heads(lm) if own else contextlib.nullcontext(), LargestCopies(span, 8) as copies:
            engine.step()
        if n and not waits:
            assert copies.heads == 2
            seen += 1
    assert seen > 3
