"""Before the first step: what is measured, that nothing of it stays, and what is warned of."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import test_grpo as reinforced
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from colar import recipe
from colar.data.arithmetic import ArithmeticConfig, generate
from colar.methods import pretrained, registry
from colar.methods.coconut import Coconut, CoconutConfig
from colar.methods.icot import Icot, IcotConfig
from colar.model import backbones, lora
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.ops import devices
from colar.progress import duration
from colar.recipe import measure as measuring
from colar.recipe.measure import UPDATES, WARMUP, Updates, measure, peak_memory
from colar.training import preflight
from colar.training.config import TrainingConfig
from colar.training.curriculum import MOST_STAGES, Curriculum
from colar.training.objective import Objective, collate
from colar.training.run_folder import RunFolder
from colar.training.sft import make_trainer, train
from colar.training.trainer import LatentTrainer

EXAMPLES = list(generate(ArithmeticConfig(), "train", 24, seed=0))
COCONUT = Coconut(CoconutConfig(epochs_per_stage=3, n_stages=3))
"""Stages 1 to 4 begin at epochs 0, 3, 6 and 9."""
LORA = LoraSettings(r=4, lora_alpha=8, lora_dropout=0.2)

pytestmark = pytest.mark.usefixtures("one_thread")


def made(
    name: str = "cot", lora: LoraSettings | None = LORA, config: dict[str, Any] | None = None
) -> tuple[LatentLM, Any]:
    torch.manual_seed(0)
    lm = LatentLM.from_backbone(backbones.load("tiny"), lora=lora)
    method = registry.build(name, config or {})
    pretrained.attach(lm, method, 0)
    return lm, method


def trainer_of(
    folder: Path, name: str = "cot", method_config: dict[str, Any] | None = None, **config: Any
) -> LatentTrainer:
    lm, method = made(name, config=method_config)
    settings = TrainingConfig(report_to="none", **config)
    return make_trainer(lm, method, EXAMPLES, settings, RunFolder(folder))


# The longest batch


def test_the_longest_batch_has_the_most_positions(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", per_device_train_batch_size=4)
    batch = trainer.longest_batch()
    mine = 4 * int(trainer.positions(batch).max())
    everyone = trainer.schedule.permutation(0)
    widths = [
        max(len(trainer.train_dataset[0.0, i, 0]) for i in everyone[s : s + 4]) for s in range(0, 24, 4)
    ]
    assert mine == 4 * max(widths)


def test_any_stage_may_be_the_longest(tmp_path: Path) -> None:
    """Coconut with 30 latents a step, which is longer than a step: rows grow until no step is left."""
    trainer = trainer_of(
        tmp_path / "run", "coconut", {"n_latents_per_step": 30}, per_device_train_batch_size=4
    )

    def width(*epochs: float) -> int:
        trainer.curriculum = SimpleNamespace(stage_epochs=lambda: epochs)
        return int(trainer.positions(trainer.longest_batch()).max())

    epochs = Curriculum(trainer.objective.method, 6, 72).stage_epochs()
    widths = [width(epoch) for epoch in epochs]
    # The third of four replaces a step more than the second; the last has no step that it had.
    assert max(widths) == widths[2] == width(*epochs)


def test_parts_hold_fewer_positions_at_once(tmp_path: Path) -> None:
    found = {}
    for tokens in (None, 200):
        trainer = trainer_of(tmp_path / f"{tokens}", per_device_train_batch_size=16, tokens_per_batch=tokens)
        found[tokens] = preflight.before_training(trainer)
    assert found[200].rows == found[None].rows == 16
    assert found[200].positions <= 200 < found[None].positions


def _memory_of(trainer: LatentTrainer, most: int) -> list[int]:
    """Let a device run out of memory above `most` positions; what was tried comes back."""
    tried: list[int] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows = {name: column for name, column in kwargs.items() if name != "num_items_in_batch"}
        positions = trainer.positions(dict(rows.pop("batch", rows)))
        tried.append(int(positions.max()) * len(positions))
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.objective.register_forward_pre_hook(count, with_kwargs=True)
    return tried


def test_parts_are_halved_down_to_the_longest_row(tmp_path: Path) -> None:
    """Of parts that take more, two shorter rows may have been what did not fit."""
    trainer = trainer_of(tmp_path / "run", per_device_train_batch_size=4)
    batch = trainer.longest_batch()
    longest = int(trainer.positions(batch).max())
    trainer.tokens_per_batch = 2 * longest - 1
    preflight.halve(trainer, batch)
    assert trainer.tokens_per_batch == longest
    with pytest.raises(ValueError, match=rf"the longest row \({longest} positions\) does not fit"):
        preflight.halve(trainer, batch)


def test_a_batch_that_does_not_fit_is_taken_in_smaller_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path / "run", per_device_train_batch_size=16)
    tried = _memory_of(trainer, 150)
    found = preflight.before_training(trainer)
    whole = tried[0]
    assert found.rows == 16
    assert whole > 150
    assert found.positions <= 150
    assert trainer.tokens_per_batch is not None
    assert trainer.tokens_per_batch <= 150 < 2 * (trainer.tokens_per_batch + 1)
    said = capsys.readouterr().err
    assert (
        f"{whole} positions at once do not fit into the memory of cpu: training.tokens_per_batch is" in said
    )
    # The updates that follow are taken in these parts.
    before = len(tried)
    trainer.args.max_steps = 1
    trainer.train()
    assert len(tried) > before + 1
    assert max(tried[before:]) <= 150


def test_a_row_that_does_not_fit_is_an_error_with_advice(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run")
    _memory_of(trainer, 0)
    message = r"the longest row \(\d+ positions\) does not fit into the memory of cpu: set training.grad"
    with pytest.raises(ValueError, match=message):
        preflight.before_training(trainer)
    assert all(weight.grad is None for weight in trainer.objective.parameters())


@pytest.mark.parametrize(("optim", "share"), [("adamw_torch_fused", 2), ("adamw_8bit", 0.5)])
def test_moments_are_reserved_as_the_optimiser_has_them(tmp_path: Path, optim: str, share: float) -> None:
    trainer = trainer_of(tmp_path / "run")
    trainer.args.optim = optim  # its package need not be installed
    weights = sum(weight.nbytes for weight in trainer.objective.parameters() if weight.requires_grad)
    assert sum(moment.nbytes for moment in preflight.moments(trainer)) == share * weights


# Nothing of it stays


def test_a_run_is_the_same_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: random numbers are as they were."""
    settings = TrainingConfig(
        report_to="none", max_steps=3, per_device_train_batch_size=4, logging_steps=1, save_steps=100
    )
    results = []
    for turn in ("with", "without"):
        if turn == "without":
            monkeypatch.setattr(preflight, "before_training", lambda *args: None)
        lm, method = made("colar")
        result = train(lm, method, EXAMPLES, settings, tmp_path / turn)
        losses = [row["loss"] for row in result.history if "loss" in row]
        results.append((losses, {key: value.clone() for key, value in lm.state_dict().items()}))
    assert results[0][0] == results[1][0]
    for key, value in results[0][1].items():
        assert torch.equal(value, results[1][1][key]), key


def test_a_run_says_what_it_will_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm, method = made()
    settings = TrainingConfig(report_to="none", max_steps=1, per_device_train_batch_size=8)
    train(lm, method, EXAMPLES, settings, tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("longest batch: 8 rows, ") == 1
    assert " forward and backward\n" in said


class Sampled:
    """A GRPO run of two updates with the first generation, whose rewards count how often each is asked for."""

    def __init__(self, folder: Path) -> None:
        self.generations: list[int] = []

        def reward(completions: Any, **columns: Any) -> Any:
            self.generations.append(len(completions))
            return reinforced.by_tokens(completions, **columns)

        config = reinforced.grpo(num_iterations=2)
        lm, self.result = reinforced.run(folder, config, reward, lora=reinforced.LORA, max_steps=4)
        self.curve = reinforced.curve(self.result)
        self.weights = {name: value.clone() for name, value in lm.state_dict().items()}


def test_reinforcement_is_checked_with_the_outputs_that_it_learns_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are sampled once, and everything is as it would be without the check."""
    checked = Sampled(tmp_path / "with")
    said = capsys.readouterr().err
    assert said.count("longest batch: 8 rows, ") == 1
    monkeypatch.setattr(preflight, "before_training", lambda *args: None)
    plain = Sampled(tmp_path / "without")
    assert checked.generations == plain.generations
    assert checked.curve == plain.curve
    for name, value in checked.weights.items():
        assert torch.equal(value, plain.weights[name]), name


# Stages


def test_stages_by_hand() -> None:
    """Ten updates an epoch: stages 1 to 4 begin at epochs 0, 3, 6 and 9."""
    assert Curriculum(COCONUT, 10, 120).stage_epochs() == [0, 3, 6, 9]
    assert Curriculum(COCONUT, 10, 65).stage_epochs() == [0, 3, 6]
    assert Curriculum(registry.build("cot", {}), 10, 25).stage_epochs() == [0]


def test_of_many_stages_the_first_and_the_last_are_checked() -> None:
    """iCoT removes eight tokens an epoch, 39 in all: the last of them early in the fifth epoch."""
    found = Curriculum(Icot(IcotConfig(removed_per_epoch=8, remove_all_at=39)), 100, 5000).stage_epochs()
    assert len(found) == MOST_STAGES
    assert found[0] == 0
    assert found[-1] == pytest.approx(39 / 8, abs=0.01)
    assert found == sorted(set(found))


# colar train --check

SMALL = [
    "--data.train_size",
    "24",
    "--data.validation_size",
    "8",
    "--training.per_device_train_batch_size",
    "8",
]


BY_STEPS = r"\d+ updates, without validation"
BY_HOURS = r"by training\.max_hours, some \d+ of \d+ updates, validations included"


@pytest.mark.parametrize(
    ("keys", "the_run"),
    [
        (["--training.gradient_checkpointing", "true", "--training.tokens_per_batch", "200"], BY_STEPS),
        (["--method.name", "icot", "--training.max_hours", "50"], BY_STEPS),
        (["--training.max_hours", "1e-5"], BY_HOURS),
    ],
)
def test_a_check_measures_and_writes_nothing(
    keys: list[str], the_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tracker would keep a run of each check.
    monkeypatch.setattr(TrainingConfig, "check_installed", lambda self: None)
    keys = [*keys, "--training.report_to", "wandb"]
    table = measure(recipe.load("tiny/cot", [*SMALL, *keys, "--output", str(tmp_path / "run")]))
    columns = [list(column.cells) for column in table.columns]
    notes = dict(zip(columns[0], columns[2], strict=True))
    assert list(notes) == [
        "parameters", "longest batch", "an update", "an epoch", "the run", "a validation", "peak memory",
    ]  # fmt: skip
    assert notes["longest batch"].startswith("8 rows, ")
    assert notes["an update"] == f"mean of {UPDATES}, after {WARMUP} others"
    assert notes["an epoch"] == "3 updates, without validation"
    assert re.fullmatch(the_run, notes["the run"])
    assert notes["a validation"] == "8 questions; timed on 8"
    assert not list(tmp_path.iterdir())


def test_a_check_does_not_wait_for_long_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of twelve updates thinks up to the limit."""
    monkeypatch.setattr(measuring, "THOUGHTS", 3)
    table = measure(recipe.load("tiny/cot", [*SMALL, "--output", str(tmp_path / "run")]))
    notes = dict(zip(table.columns[0].cells, table.columns[2].cells, strict=True))
    assert re.fullmatch(
        r"8 questions; timed on 8 with 3 thoughts, reckoned for chains of \d+ tokens",
        str(notes["a validation"]),
    )


def test_seconds_of_an_update_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of 2 s, behind slow ones."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = Updates(torch.device("cpu"))
    for n in range(1, WARMUP + UPDATES + 1):
        now[0] += 2.0 if n > WARMUP else 50.0
        found.on_step_end(None, SimpleNamespace(global_step=n), None)
    assert found.seconds == 2.0


@pytest.mark.parametrize(
    ("config", "cuda", "compiler", "wanted"),
    [
        ({}, True, True, True),
        ({}, True, False, False),
        ({}, False, True, False),
        ({"device": "cpu"}, True, True, False),
        ({"device": "mps"}, True, True, False),
        ({"fsdp": True}, True, True, False),
        ({"compile": False}, True, True, False),
        ({"compile": True}, False, True, True),
    ],
    ids=str,
)
def test_layers_are_compiled_on_cuda(
    config: dict[str, Any], cuda: bool, compiler: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(devices, "can_compile", lambda device: compiler)
    assert TrainingConfig(**config).resolved().compile is wanted


def test_functions_of_a_device_that_torch_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    mps = SimpleNamespace(empty_cache=lambda: called.append("empty_cache"), recommended_max_memory=lambda: 9)
    monkeypatch.setattr(torch, "get_device_module", lambda device: mps)
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(max_memory_allocated=lambda device: 7))
    devices.empty_cache(torch.device("mps"))
    assert called == ["empty_cache"]
    assert peak_memory(torch.device("mps")) == (7, 9)


def test_a_check_of_reinforcement_samples_a_generation(tmp_path: Path) -> None:
    started = train(
        *made("colar", lora=None), EXAMPLES, TrainingConfig(report_to="none", max_steps=1), tmp_path / "sft"
    )
    keys = ["--model.init_from", str(started.best), "--training.per_device_train_batch_size", "16"]
    keys += ["--grpo.num_generations", "4", "--grpo.max_latents", "8"]
    words = [*SMALL[:4], *keys, "--output", str(tmp_path / "run")]
    [stage] = recipe.load_stages("tiny/grpo", words, ["grpo"])
    table = measure(stage.recipe)
    assert "with its share of the sampling of a generation" in list(table.columns[2].cells)
    assert not (tmp_path / "run").exists()


CLOCKS: list[tuple[float, str]] = [
    (0.247, "0.25 s"),
    (6.04, "6 s"),
    (59, "59 s"),
    (90, "1.5 min"),
    (89, "89 s"),
    (9000, "2.5 h"),
]


@pytest.mark.parametrize(("seconds", "text"), CLOCKS)
def test_seconds_as_a_person_says_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Operations(TorchDispatchMode):
    """Counts what a GPU would be sent, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_an_update_casts_no_input_of_an_adapter() -> None:
    """Under autocast: the loss and the gradients are those with peft's casts, to the last bit."""
    lm, method = made(lora=LoraSettings(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, weight in lm.named_parameters():
        # The base in half precision, as under `model.dtype`.
        weight.data = torch.randn(weight.shape) * 0.1 if "lora_" in name else weight.data.bfloat16()
    lm.why_no_trees()  # as before a run
    rows = [method.encode(lm.template, row, Random(0), 0.0) for row in EXAMPLES[:4]]
    objective = Objective(lm, method)

    def update() -> tuple[float, list[Tensor], int]:
        objective.zero_grad()
        with Operations() as seen, torch.autocast("cpu", torch.bfloat16):
            loss = objective(**collate(rows))["loss"]
            loss.backward()
        grads = [weight.grad.clone() for weight in lm.parameters() if weight.grad is not None]
        return float(loss), grads, seen.counts["_to_copy"]

    loss, grads, casts = update()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "casts_left_to_autocast", lambda *_: contextlib.nullcontext())
        plain_loss, plain_grads, plain_casts = update()
    assert loss == plain_loss
    assert all(torch.equal(own, plain) for own, plain in zip(grads, plain_grads, strict=True))
    # Two casts of each adapted input forward, two of its gradient backward; the first layer reads embeddings.
    linears = sum(isinstance(module, BaseTunerLayer) for module in lm.modules())
    assert plain_casts - casts >= 3 * linears
