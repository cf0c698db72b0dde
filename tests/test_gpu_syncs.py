"""What a GPU would wait for: a decode step looks at the device once. Counted on the CPU (sync_counter.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import EXAMPLES, OWN_LOSS, tiny_lm
from launch import together
from sync_counter import counted, uncounted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_trees import tensors_of
from transformers import TrainerCallback

from colar import processes
from colar.engine.cache import round_columns
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.look.thought import SHOWN, ThoughtReader, infos_on_cpu, read_together, vocabulary_of
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.methods.sequential import choice as group_choice
from colar.methods.sequential import decoder
from colar.model.latent_lm import LatentLM
from colar.ops import devices
from colar.ops.sampling import DrawModes, sample_tokens
from colar.training import preflight, sft
from colar.training.config import TrainingConfig
from colar.training.grpo import train as grpo_train
from colar.training.grpo.config import GrpoConfig
from colar.training.grpo.generation import Generation
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
        {"compression_factors": [1, 1.5, 2, 5]},
        {"compression_factor": 1.5},
    ),
    "coconut": ("coconut", {}, {}),
    "pause": ("pause", {}, {}),
    "ruplar": ("ruplar", {}, {}),
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
        both = len({entry.thinks for entry in engine.running.entries}) == 2
        n = len(engine.running)
        with counted() as looks:
            events = engine.step()
        if not any(event.kind == "finished" for event in events) and len(engine.running) == n > 0:
            found.append((both, looks))
    return found


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "decodings"),
    [
        *((name, (NUCLEUS,)) for name in CASES),
        *((name, (GREEDY, SAMPLED, NUCLEUS)) for name in ("cot", "sequential")),
        # Answers are tokens too, drawn as those of cot's thoughts are.
        *((name, (decoding,)) for name in ("gaussian", "shortlist") for decoding in (GREEDY, SAMPLED)),
    ],
)
def test_a_decode_step_looks_once(name: str, decodings: tuple[Decoding, ...]) -> None:
    lm, method, params = build(name)
    requests = []
    for i, example in enumerate(EXAMPLES):
        # Some answer while others think.
        decoding = decodings[i % len(decodings)]
        own = replace(decoding, max_latents=2 + 4 * (i % 2), max_completion_length=4 + 4 * (i // 2 % 2))
        requests.append(Request(example.id, example.question, params, own, seed=i))
    found = steps(Engine(lm, method, 8), requests)
    assert len(found) > 3
    for _, looks in found:
        assert len(looks) == 1, looks
    assert name in ("coconut", "pause") or any(both for both, _ in found)


def test_looks_are_counted() -> None:
    """What cannot be missed: else the tests above could not fail."""
    column = torch.arange(4.0)
    with counted() as looks:
        bool((column > 2).any())
        column[column > 1]
        column[[1, 2]] = 0
        column.tolist()
        (column > 3).nonzero()
        known = torch.tensor([1.0, 2.0])
        assert bool((known > 0).all())
        assert known.tolist() == [1.0, 2.0]
    assert len(looks) == 5


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_in_which_rows_join_or_end_does_not_look_at_the_cache() -> None:
    """A row that ends leaves its slot to the last one, and samples of a question copy its keys and values."""
    lm, method, params = build("cot")
    requests = []
    for i in range(8):
        own = replace(SAMPLED, max_latents=2 + i % 3, max_completion_length=2)
        requests.append(Request("the same", EXAMPLES[0].question, params, own, seed=1, sample=i))
    engine = Engine(lm, method, 4)
    for request in requests:
        engine.submit(request)
    moved = []
    copy = engine.cache.copy
    with counted() as looks:
        engine.cache.copy = lambda *args: (moved.append(args), copy(*args))[1]
        while engine.busy:
            engine.step()
    assert len(moved) > 2
    assert not [line for line in looks if "/engine/cache.py" in line]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["sequential", "gaussian"])
def test_thoughts_of_a_step_are_read_by_a_few_looks(name: str) -> None:
    """However many requests there are: one for each column, and three for the nearest tokens."""
    lm, method, params = build(name)
    requests = [
        Request(example.id, example.question, params, GREEDY, keep_latents=True) for example in EXAMPLES
    ]
    engine = Engine(lm, method, 32)
    for request in requests:
        engine.submit(request)
    events: list[Any] = []
    while engine.busy and not events:
        events = [event for event in engine.step() if event.kind == "thought"]
    assert len(events) > 3
    vocabulary = vocabulary_of(lm)
    with counted() as looks:
        infos = infos_on_cpu([event.info for event in events])
        readers = [ThoughtReader(lm.template, event.request.params, 3) for event in events]
        rows = zip(readers, events, infos, strict=True)
        thoughts = [(reader, event.token_id, event.embed, info) for reader, event, info in rows]
        together = read_together(thoughts, vocabulary)
    assert len(looks) == len(events[0].info.keys() & SHOWN) + 3, looks
    # As each by itself.
    for event, found in zip(events, together, strict=True):
        reader = ThoughtReader(lm.template, event.request.params, 3)
        near = vocabulary.nearest(event.embed[None], reader.wanted(event.token_id, event.info))[0]
        alone = reader.read(event.token_id, event.info, near)
        assert [token["id"] for token in found["neighbours"]] == [
            token["id"] for token in alone["neighbours"]
        ]
        assert {**found, "tokens": 0, "neighbours": 0} == {**alone, "tokens": 0, "neighbours": 0}


def test_infos_of_different_widths_are_copied() -> None:
    """Groups of two steps may differ in width."""
    infos = [
        {"group_ids": torch.arange(n), "logp": torch.tensor(float(n)), "mu": torch.ones(9)} for n in (2, 4, 0)
    ]
    for given, found in zip(infos, infos_on_cpu(infos), strict=True):
        assert found.keys() == {"group_ids", "logp"}, "what no thought shows is not copied"
        assert found["group_ids"].tolist() == given["group_ids"].tolist()
        assert found["logp"].shape == ()
        assert float(found["logp"]) == float(given["logp"])
    assert infos_on_cpu([]) == []
    assert infos_on_cpu([{}, {}]) == [{}, {}]


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
        "/training/terms.py",
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
    wanted = sample_tokens(logits, temperature, top_p, uniform)
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    for modes in (None, DrawModes(True, True, True)):
        assert torch.equal(sample_tokens(logits, temperature, top_p, uniform, modes), wanted)


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
        unites_digits=columns > 0,
        temperature=temperature * columns,
        top_p=columns,
        modes=DrawModes.of([(temperature, 1.0)]),
        confidence_threshold=threshold * columns,
        has_threshold=threshold > 0,
        uniform=lambda place: uniform[place],
    )
    for wants_logps in (True, False):
        wanted = group_choice.choose_groups(lm, hidden, first, rules, wants_logps)
        with monkeypatch.context() as patch:
            patch.setattr(devices, "is_asynchronous", lambda device: True)
            found = group_choice.choose_groups(lm, hidden, first, rules, wants_logps)
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.logps, wanted.logps)
        assert torch.equal(found.endings, wanted.endings)
        torch.testing.assert_close(found.ending_logps, wanted.ending_logps)
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
        for tensor in tensors_of(result):
            if tensor.dim() == 4 and tuple(tensor.shape[2:]) == self.shape:
                self.heads = max(self.heads, tensor.shape[1])
        return result


TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in [*OWN_LOSS, "no_cot"]},
    "any c": CASES["any c"][:2],
    "paper": ("colar", {"latent_loss": "nll", "chain_label": "sampled", "merge": "mean"}),
    "point": ("colar", {"head": "deterministic", "supervise_chain": False}),
    "ordered": ("sequential", {"merge": "ordered", "lookahead_weight": 0.2, "shortlist": True}),
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
}
"""Every loss as it is by default, and what else some can do; no_cot has CoT's, without a chain."""


def known(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch, whose columns are on the CPU where a GPU trains."""
    for column in batch.values():
        column._known = True  # type: ignore[attr-defined]
    return batch


def made(case: str) -> tuple[LatentLM, Method]:
    kind, config = TRAINED[case]
    lm = tiny_lm("llama", digits=True)
    method = registry.build(kind, config)
    pretrained.attach(lm, method, seed=1)
    return lm, method


UPDATES = 3


class Later(TrainerCallback):  # type: ignore[misc]
    """What lists are given after the first update: what happens once happens before its end."""

    def __init__(self, *lists: list[Any]) -> None:
        self.lists = lists
        self.lengths: list[list[int]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.lengths.append([len(each) for each in self.lists])

    def parts(self) -> list[list[Any]]:
        assert len(self.lengths) == UPDATES
        return [
            each[start:end]
            for each, start, end in zip(self.lists, self.lengths[0], self.lengths[-1], strict=True)
        ]


def settings(**config: Any) -> TrainingConfig:
    """Updates without a log between them."""
    return TrainingConfig(
        report_to="none", per_device_train_batch_size=2, max_steps=UPDATES, logging_steps=1000, **config
    )


def updates(model: tuple[LatentLM, Method], folder: Path, *also: list[Any], **config: Any) -> list[list[Any]]:
    """The looks of all updates but the first, and what other lists were given in them."""
    lm, method = model
    trainer = sft.make_trainer(lm, method, EXAMPLES, settings(**config), RunFolder(folder))
    trainer.args.save_strategy = "no"
    made_of = trainer.data_collator
    trainer.data_collator = lambda rows: known(made_of(rows))
    with preflight.prepared(lm), counted() as lines:
        later = Later(lines, *also)
        trainer.add_callback(later)
        trainer.train()
    return later.parts()


@pytest.mark.parametrize(
    ("case", "config"),
    [
        *((case, {}) for case in TRAINED),
        *((case, {"tokens_per_batch": 100}) for case in ("cot", "equations")),
    ],
    ids=str,
)
def test_an_update_waits_for_nothing(
    case: str, config: dict[str, Any], as_on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is waited for at a log. Batches are on the CPU, so that lengths are known there.

    Where groups end before tokens of low confidence, the first pass is waited for, once: it says how many there are.
    """
    first_passes = []
    label_logps = decoder.label_logps

    def counting(*args: Any) -> Tensor:
        # The loss scores labels as well, with a gradient.
        if not torch.is_grad_enabled():
            first_passes.append(args)
        return label_logps(*args)

    monkeypatch.setattr(decoder, "label_logps", counting)
    looks, first_passes = updates(made(case), tmp_path, first_passes, **config)
    assert len(looks) == len(first_passes), "\n".join(looks)
    assert bool(first_passes) == any(TRAINED[case][1].get("confidence_thresholds", ()))


def grpo_updates(case: str, folder: Path, grpo: dict[str, Any], **config: Any) -> list[list[Any]]:
    """The looks of updates that learn from one generation, all but the first's."""
    lm, method = made(case)
    list(method.prepare(lm, EXAMPLES))
    sampling = GrpoConfig(
        num_generations=2, steps_per_generation=UPDATES, max_latents=6, max_completion_length=4, **grpo
    )
    trainer = grpo_train.make_trainer(lm, method, EXAMPLES, settings(**config), sampling, RunFolder(folder))
    trainer.args.eval_on_start = False
    trainer.args.save_strategy = "no"
    sample = trainer.sampler.generate
    numbers = []

    def generate(number: int) -> Generation:
        numbers.append(number)
        with uncounted():
            generation = sample(number)
        known(generation.tensors)
        return generation

    trainer.sampler.generate = generate  # type: ignore[method-assign]
    with preflight.prepared(lm), counted() as lines:
        later = Later(lines)
        trainer.add_callback(later)
        trainer.train()
    assert numbers == [0]
    return later.parts()


OTHER_LOSS = {"beta": 0.1, "loss_type": "dapo", "importance_sampling_level": "sequence", "temperature": 0.8}


@pytest.mark.parametrize(
    ("case", "grpo", "config"),
    [
        # iCoT and TokenSkip score as CoT does.
        *(
            (case, OTHER_LOSS, {"tokens_per_batch": 100})
            for case in (
                "cot",
                "no_cot",
                "colar",
                "paper",
                "point",
                "sequential",
                "any c",
                "ordered",
                "equations",
            )
        ),
        *((case, {}, {}) for case in ("colar", "equations")),
    ],
    ids=lambda value: value if isinstance(value, str) else "other" if value else "",
)
def test_an_update_of_grpo_waits_for_nothing(
    case: str, grpo: dict[str, Any], config: dict[str, Any], as_on_a_gpu: None, tmp_path: Path
) -> None:
    """Sampling waits at each step; the updates that learn from what was sampled do not."""
    assert grpo_updates(case, tmp_path, grpo, **config) == [[]]


def looks_of_a_process(folder: Path) -> list[list[Any]]:
    processes.join(120)
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        supervised = updates(made("colar"), folder / "sft", gradient_accumulation_steps=2)
        reinforced = grpo_updates("colar", folder / "grpo", {})
    processes.leave()
    return supervised + reinforced


def test_an_update_of_two_processes_waits_for_nothing(tmp_path: Path) -> None:
    """The last update of an epoch, too, in which some rows are there twice."""
    for looks in together(2, tmp_path, looks_of_a_process, tmp_path):
        assert looks == [[], []]


@pytest.mark.parametrize("own", [False, True], ids=["transformers", "grouped"])
def test_a_step_copies_no_keys_for_query_heads(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads share two key heads: in no step are there keys, or values, for four."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: own)
    lm, method, params = build("cot")
    requests = [Request(f"{i}", e.question, params, GREEDY) for i, e in enumerate(EXAMPLES)]
    engine = Engine(lm, method, 8)
    for request in requests:
        engine.submit(request)
    seen = 0
    while engine.busy:
        rows = engine.running
        n = len(rows)
        span = round_columns(1 + max(map(rows.position, range(n)))) if n else 0
        waits = bool(engine.scheduler.waiting or engine.scheduler.batches)
        with LargestCopies(span, 8) as copies:
            engine.step()
        if n and not waits:
            assert copies.heads == 2
            seen += 1
    assert seen > 3
