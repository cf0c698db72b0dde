"""Training, on real runs of the tiny backbone: what fixes a run, what survives a kill, what is published."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from families import FAMILIES, tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import alone
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.utils import _to_kwargs
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from colar import checks, files
from colar.checks import NonFiniteError
from colar.data.arithmetic import ArithmeticConfig, generate
from colar.data.example import Example
from colar.methods import pretrained, registry
from colar.methods.base import Batch, Method, Row
from colar.methods.colar import Colar, ColarConfig
from colar.methods.cot import Cot, CotConfig
from colar.model import backbones, card
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.ops import devices
from colar.ops.noise import seed_from
from colar.template.template import Template, TemplateConfig
from colar.training import preflight, sft
from colar.training.config import TrainingConfig
from colar.training.curriculum import UnfinishedCurriculumError
from colar.training.objective import Objective, collate
from colar.training.resumable_run import TrainResult, arguments
from colar.training.rows import RowSchedule, TrainingRows
from colar.training.run_folder import RunFolder
from colar.training.sft import train
from colar.training.trainer import LatentTrainer

EXAMPLES = list(generate(ArithmeticConfig(), "train", 20, seed=0))
LORA = LoraSettings(r=4, lora_alpha=8, lora_dropout=0.1)
QUICK = {"report_to": "none", "logging_steps": 1, "save_steps": 1000, "learning_rate": 1e-3}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["full", "adapter"])
def lora(request: pytest.FixtureRequest) -> LoraSettings | None:
    return LORA if request.param == "adapter" else None


def build(method: Method | None = None, lora: LoraSettings | None = None) -> LatentLM:
    torch.manual_seed(0)  # peft draws the adapter
    lm = LatentLM.from_backbone(backbones.load("tiny"), lora=lora)
    pretrained.attach(lm, method or Colar(ColarConfig()), 0)
    return lm


def lengths_of(rows: TrainingRows) -> list[int]:
    return [found[0] for found in rows.lengths()]


def run(
    folder: Path,
    method: Method | None = None,
    lora: LoraSettings | None = None,
    lm: LatentLM | None = None,
    validate: Any = None,
    resume: bool = True,
    held_out: Sequence[Example] = (),
    **config: Any,
) -> tuple[LatentLM, TrainResult]:
    method = method or Colar(ColarConfig())
    lm = lm or build(method, lora)
    if "max_steps" in config:
        # Half of a batch by default: these tests are about steps.
        config.setdefault("per_device_train_batch_size", 4)
    settings = TrainingConfig(**{**QUICK, **config})
    result = train(
        lm, method, EXAMPLES, settings, folder, validate=validate, held_out=held_out, resume=resume
    )
    return lm, result


def weights(lm: LatentLM) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in lm.state_dict().items()}


def losses(result: TrainResult) -> list[tuple[Any, ...]]:
    """What training itself did at each step, bit for bit; timing left out."""
    names = ("step", "loss", "ce", "latent", "grad_norm", "learning_rate")
    return [tuple(row[name] for name in names) for row in result.history if "loss" in row]


def assert_same(one: LatentLM, other: LatentLM) -> None:
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


# --- rows and their order ------------------------------------------------------------------------------


def test_a_row_depends_on_seed_epoch_and_id_alone() -> None:
    lm, method = build(), Colar(ColarConfig())
    rows = TrainingRows(lm, method, EXAMPLES, seed=1)
    turned = TrainingRows(lm, method, EXAMPLES[::-1], seed=1)
    assert [rows[0.3, i, 0] for i in range(20)] == [turned[0.9, 19 - i, 0] for i in range(20)]
    draws = {
        (seed, epoch): [TrainingRows(lm, method, EXAMPLES, seed)[epoch, i, 0].seed for i in range(20)]
        for seed in (1, 2)
        for epoch in (0.0, 1.0, 2.0)
    }
    assert len({tuple(draw) for draw in draws.values()}) == 6
    assert len({rows[epoch, 0, 0].params.compression_factor for epoch in range(40)}) == 5


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_is_a_permutation_that_follows_the_ids(n: int, seed: int, epoch: int) -> None:
    rng = Random(n)
    lengths = [rng.randint(5, 300) for _ in range(n)]
    examples = [Example(f"x/{i}", "q", (), "1") for i in range(n)]
    order = RowSchedule(examples, lengths, seed, 8).permutation(epoch)
    assert sorted(order) == list(range(n))
    turned = RowSchedule(examples[::-1], lengths[::-1], seed, 8).permutation(epoch)
    if len(set(lengths)) == n:  # ties in length are broken by the shuffle, which follows the ids as well
        assert [n - 1 - i for i in turned] == order


def test_batches_hold_rows_of_like_length_and_do_not_start_with_the_longest() -> None:
    rng = Random(0)
    lengths = [rng.randint(20, 400) for _ in range(6400)]
    schedule = RowSchedule([Example(f"x/{i}", "q", (), "1") for i in range(6400)], lengths, 0, 32)
    firsts = []
    for epoch in range(20):
        indices = schedule.permutation(epoch)
        groups = [indices[start : start + 32] for start in range(0, 6400, 32)]
        padding = sum(
            max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch) for batch in groups
        )
        assert padding < 0.03 * sum(lengths)
        firsts.append(max(lengths[i] for i in groups[0]))
    assert sum(first > 390 for first in firsts) < 5
    assert len(set(firsts)) > 10
    assert schedule.permutation(0) != schedule.permutation(1)


def test_the_rows_of_an_example_come_together() -> None:
    """A batch of 8 has 4 examples, each twice, side by side."""
    lengths = list(range(20))
    schedule = RowSchedule(EXAMPLES, lengths, 0, 8, n_draws=2)
    keys = list(schedule)
    assert len(keys) == len(schedule) == 40
    assert [draw for _, _, draw in keys] == [0, 1] * 20
    assert [key[:2] for key in keys[::2]] == [key[:2] for key in keys[1::2]]
    assert [index for _, index, _ in keys[::2]] == RowSchedule(EXAMPLES, lengths, 0, 4).permutation(0)
    for start in range(0, 40, 8):
        assert len({index for _, index, _ in keys[start : start + 8]}) == 4


def test_each_draw_of_an_example_has_another_speed() -> None:
    method = registry.build("colar", {"compression_factors": [1, 2, 2, 3]})
    lm = build(method)
    rows = TrainingRows(lm, method, EXAMPLES, 0, n_draws=4)
    one = TrainingRows(lm, method, EXAMPLES, 0)
    for index in range(20):
        drawn = [rows[1.5, index, draw] for draw in range(4)]
        assert sorted(row.params.compression_factor for row in drawn) == [1, 2, 2, 3]
        assert len({row.seed for row in drawn}) == 4
    # More draws than entries: each entry once before one comes again.
    many = method.encode_draws(lm.template, EXAMPLES[0], Random(0), 0.0, 6)
    factors = [row.params.compression_factor for row in many]
    assert sorted(factors[:4]) == [1, 2, 2, 3]
    # A run with one draw is what it was.
    method_row = method.encode(lm.template, EXAMPLES[3], Random(seed_from(0, 1, EXAMPLES[3].id)), 1.5)
    assert one[1.5, 3, 0] == method_row


def test_draws_of_an_example_are_refused_where_they_would_be_one_row(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="draws_per_example must be 1 for cot, which draws no per-request values, got 2"
    ):
        run(tmp_path, Cot(CotConfig()), draws_per_example=2, per_device_train_batch_size=8)
    with pytest.raises(
        ValueError, match="per_device_train_batch_size must be a multiple of .*draws_per_example, 3"
    ):
        TrainingConfig(draws_per_example=3, per_device_train_batch_size=8)


def test_a_run_with_two_draws_learns_the_same_in_parts(tmp_path: Path) -> None:
    """A part of a batch has trees of its own."""
    options: dict[str, Any] = {"draws_per_example": 2, "per_device_train_batch_size": 10, "max_steps": 2}
    whole = losses(run(tmp_path / "whole", **options)[1])
    parts = losses(run(tmp_path / "parts", tokens_per_batch=150, **options)[1])
    for one, other in zip(parts, whole, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_run_encodes_each_epoch_in_its_own_order(tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []

    class Watched(Cot):
        def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
            seen.append((epoch, example.id))
            return super().encode(template, example, rng, epoch)

    method = Watched(CotConfig())
    lm = build(method)
    run(tmp_path, method, lm=lm, per_device_train_batch_size=8, num_train_epochs=2)
    made = len(seen)
    assert seen[:20] == [(0.0, example.id) for example in EXAMPLES]  # all are checked first
    lengths = [len(method.encode(lm.template, e, Random(0), 0)) for e in EXAMPLES]
    schedule = RowSchedule(EXAMPLES, lengths, 0, 8)
    wanted = [
        (epoch + i / 20, EXAMPLES[k].id)
        for epoch in (0, 1)
        for i, k in enumerate(schedule.permutation(epoch))
    ]
    # Between the two the longest batch is measured.
    assert seen[made - 40 : made] == wanted


# --- the objective -------------------------------------------------------------------------------------


class Terms(Cot):
    """Known numbers: term i of row b is its question's length times a factor; `_seen` is no part of the loss."""

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        length = batch.question_lengths.float()
        return {"one": length, "two": 10 * length, "_seen": 1000 * length}


@pytest.mark.parametrize("launched_with", ["fp16", "bf16", "no"])
def test_the_recipe_decides_about_precision_not_the_launcher(
    launched_with: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch` sets this variable from its own configuration."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched_with)
    for bf16, wanted in ((False, "no"), (True, "bf16")):
        config = TrainingConfig(device="cpu", bf16=bf16)
        assert arguments(config, RunFolder(tmp_path)).mixed_precision == wanted


def test_objective_sums_terms_and_averages_rows() -> None:
    lm, method = build(), Terms(CotConfig())
    rows = [method.encode(lm.template, e, Random(0), 0) for e in EXAMPLES[:3]]
    mean = sum(len(row.question) for row in rows) / 3
    objective, tensors = Objective(lm, method), collate(rows)
    outputs = objective(**tensors)
    assert {name: float(value) for name, value in outputs.items()} == pytest.approx(
        {"loss": 11 * mean, "one": mean, "two": 10 * mean, "seen": 1000 * mean}
    )
    # A batch that is a part of an update of 12 rows brings a quarter of its mean.
    assert float(objective(num_items_in_batch=torch.tensor(12), **tensors)["loss"]) == pytest.approx(
        11 * mean / 4
    )


IN_EIGHTS: dict[str, Any] = {"per_device_train_batch_size": 8, "num_train_epochs": 2}
"""Two epochs of 20 rows in updates of 8: the last of an epoch has 4."""


@pytest.fixture(scope="module")
def in_eights(tmp_path_factory: pytest.TempPathFactory) -> tuple[LatentLM, TrainResult]:
    """The run of IN_EIGHTS that other ways to compute must repeat."""
    torch.set_num_threads(1)
    return validated_run(tmp_path_factory.mktemp("eights"))


def validated_run(folder: Path, **config: Any) -> tuple[LatentLM, TrainResult]:
    """A run of IN_EIGHTS, its losses on held-out rows included."""
    always = {"held_out": EXAMPLES[:6], "validate": lambda lm, method: {"accuracy": 0.0}}
    return run(folder, **{**always, **IN_EIGHTS, **config})


def assert_close(found: tuple[LatentLM, TrainResult], wanted: tuple[LatentLM, TrainResult]) -> None:
    """Losses, gradients, the validation's losses and weights of two runs but for the order of sums."""
    assert len(losses(wanted[1])) == 6
    assert losses(found[1]) == [pytest.approx(row, rel=2e-5) for row in losses(wanted[1])]
    validated = [[row["eval_ce"] for row in made[1].history if "eval_ce" in row] for made in (found, wanted)]
    assert validated[0] == pytest.approx(validated[1], rel=1e-5)
    theirs = weights(wanted[0])
    for name, value in weights(found[0]).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=2e-5, msg=name)


def test_accumulation_and_batches_give_the_same_run(tmp_path: Path, in_eights: Any) -> None:
    """PITFALLS 23: 8x1 and 2x4 see one trajectory; row by row: the next test."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert_close(validated_run(tmp_path, **sizes), in_eights)


@pytest.mark.parametrize("most", [1, 300])
def test_batches_in_parts_give_the_same_run(tmp_path: Path, in_eights: Any, most: int) -> None:
    """Row by row, or some rows at a time: every loss, every gradient and the validation's losses stay."""
    calls = []

    class Watched(Colar):
        def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
            calls.append(len(batch.seeds))
            return super().loss(lm, batch)

    assert_close(validated_run(tmp_path, method=Watched(ColarConfig()), tokens_per_batch=most), in_eights)
    assert max(calls) == 1 if most == 1 else 1 < max(calls) < 8


# --- killed and resumed --------------------------------------------------------------------------------

LONG = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 2,
    "save_steps": 2,
    "lr_scheduler_type": "cosine",
}
"""Three updates an epoch, six in all, checkpoints at 2, 4 and 6."""


def killed_run(
    folder: Path,
    lora: LoraSettings | None,
    save_steps: int,
    at_loss: int = 0,
    at_save: int = 0,
    number: int = signal.SIGKILL,
) -> None:
    """A run of LONG whose process gets a signal in the N-th loss, or while weights are saved for the N-th time."""
    torch.set_num_threads(1)
    # Losses are counted: those before the first step are no updates.
    preflight.before_training = lambda *_: None
    counts = {"losses": 0, "saves": 0}

    def kill_at(n: int, what: str) -> None:
        counts[what] += 1
        if counts[what] == n:
            os.kill(os.getpid(), number)

    class Killed(Colar):
        def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
            kill_at(at_loss, "losses")
            return super().loss(lm, batch)

    method = Killed(ColarConfig())
    lm = build(method, lora)
    lm.extra.register_state_dict_post_hook(lambda *_: kill_at(at_save, "saves"))
    run(folder, method, lm=lm, **{**LONG, "save_steps": save_steps})


SAVE_STEPS = {"full": 2, "adapter": 3}
"""2 is in mid-epoch, 3 is the end of an epoch."""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LatentLM, TrainResult]]:
    """Runs of LONG that nothing stops."""

    @functools.cache
    def made(kind: str) -> tuple[LatentLM, TrainResult]:
        lora = LORA if kind == "adapter" else None
        config = {**LONG, "save_steps": SAVE_STEPS[kind]}
        return run(tmp_path_factory.mktemp("whole"), lora=lora, **config)

    return made


@pytest.mark.parametrize(
    ("kind", "kill", "last"),
    [
        ("full", {"at_loss": 4}, 2),  # in the fourth update
        ("adapter", {"at_save": 2}, 3),  # while checkpoint-6 is written
        ("adapter", {"at_loss": 4, "number": signal.SIGTERM}, 4),  # it ends with the update, and is saved
    ],
)
def test_killed_and_resumed_is_uninterrupted(
    tmp_path: Path, kind: str, kill: dict[str, int], last: int, whole_run: Any
) -> None:
    lora, save_steps = LORA if kind == "adapter" else None, SAVE_STEPS[kind]
    call = functools.partial(killed_run, tmp_path / "killed", lora, save_steps, **kill)
    child = alone(tmp_path / "child", call)
    assert child.code == -kill.get("number", signal.SIGKILL), child.stderr
    folder = RunFolder(tmp_path / "killed")
    assert folder.last_resume_state() == folder.checkpoints / f"checkpoint-{last}"
    if "at_save" in kill:
        assert (folder.checkpoints / "checkpoint-6").is_dir()
    lm, resumed = run(folder.path, lora=lora, **{**LONG, "save_steps": save_steps})
    whole_lm, whole = whole_run(kind)
    assert losses(resumed) == losses(whole)
    assert [row[0] for row in losses(resumed)] == list(range(1, 7))
    assert_same(lm, whole_lm)


def cut(path: Path) -> None:
    """Keep the first half of a file, as a disk does that was full, or whose power failed."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def run_of_three_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Any, ...]]]:
    """A run folder with the checkpoints of steps 2 and 3 (the first was deleted), and the log of a run of 4 steps."""
    folder = tmp_path_factory.mktemp("torn")
    torch.set_num_threads(1)
    run(folder / "run", lora=LORA, max_steps=3, save_steps=1)
    _, whole = run(folder / "whole", lora=LORA, max_steps=4)
    assert [path.name for path in RunFolder(folder / "run").resume_states()] == [
        "checkpoint-3",
        "checkpoint-2",
    ]
    return folder / "run", losses(whole)


def test_a_run_goes_on_from_the_checkpoint_before_a_torn_one(
    tmp_path: Path, run_of_three_steps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made, whole = run_of_three_steps
    folder = RunFolder(shutil.copytree(made, tmp_path / "run"))
    torn = folder.checkpoints / "checkpoint-3"
    # The save was killed while this file was written.
    cut(torn / "optimizer.pt")
    (torn / "whole").unlink()
    _, resumed = run(folder.path, lora=LORA, max_steps=4)
    assert losses(resumed) == whole
    assert f"dropped {torn}, which is not whole" in capsys.readouterr().err


def test_a_state_that_is_being_deleted_is_not_whole(
    tmp_path: Path, run_of_three_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(shutil.copytree(run_of_three_steps[0], tmp_path / "run"))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)  # killed before the first file goes
    folder.drop_states(folder.resume_states()[:1])
    assert folder.last_resume_state() == folder.checkpoints / "checkpoint-2"


def test_a_folder_has_one_process_at_a_time(tmp_path: Path, taken: Callable[[Path], Any]) -> None:
    folder = RunFolder(tmp_path)
    (folder.checkpoints / "checkpoint-2").mkdir(parents=True)  # being written
    with taken(tmp_path), pytest.raises(ValueError, match="another process is writing to"):
        run(tmp_path)
    assert (folder.checkpoints / "checkpoint-2").exists()
    _, result = run(tmp_path)  # the other one has ended, in whatever way
    assert result.steps > 0
    with taken(tmp_path):  # and nothing is left held
        pass


def test_a_run_goes_on_with_the_rows_that_it_began_with(tmp_path: Path) -> None:
    """Among others its steps would point to other rows: some would be seen twice, and some never."""
    lm, first = run(tmp_path, max_steps=1)
    settings = TrainingConfig(**{**QUICK, "max_steps": 2, "per_device_train_batch_size": 4})
    for others in (EXAMPLES[:-1], [*EXAMPLES[:-1], dataclasses.replace(EXAMPLES[-1], answer="1000")]):
        with pytest.raises(
            ValueError, match=r"digest of the training rows was '\w{16}', now .* twice and others never"
        ):
            train(lm, Colar(ColarConfig()), others, settings, tmp_path)
    # The order of the file is not that of training.
    turned = train(lm, Colar(ColarConfig()), EXAMPLES[::-1], settings, tmp_path)
    assert (first.steps, turned.steps) == (1, 2)


def of_an_earlier_version(state: Path, *lacking: str) -> None:
    """Take what an earlier version did not save out of a resume state."""
    saved = files.read_json(state / "trainer_state.json")
    for name in lacking:
        del saved["stateful_callbacks"]["Clock"]["attributes"][name]
    files.write_json(state / "trainer_state.json", saved)


def test_an_adapter_goes_on_over_the_backbone_that_it_began_with(
    tmp_path: Path, lora: LoraSettings | None
) -> None:
    """Its checkpoints hold no frozen weight; those without an adapter hold all that there is."""

    def over(seed: int) -> LatentLM:
        lm = LatentLM.from_backbone(backbones.load("tiny", seed=seed), TemplateConfig(), lora)
        pretrained.attach(lm, Colar(ColarConfig()), 0)
        return lm

    run(tmp_path, lm=over(0), max_steps=1)
    assert run(tmp_path, lm=over(0), max_steps=2)[1].steps == 2
    if lora is not None:
        with pytest.raises(
            ValueError, match=r"fingerprint of the frozen backbone was '\w{16}', now '\w{16}'\);"
        ):
            run(tmp_path, lm=over(1), max_steps=3)
        of_an_earlier_version(tmp_path / "checkpoints" / "checkpoint-2", "fingerprint of the frozen backbone")
    assert run(tmp_path, lm=over(1), max_steps=3)[1].steps == 3


def test_a_run_goes_on_with_the_validation_rows_that_it_began_with(tmp_path: Path) -> None:
    """Accuracies on other questions, or by another judge, do not compare with the best one before."""

    def go_on(max_steps: int, held_out: Sequence[Example]) -> int:
        validate = scripted([0.5, 0.5], [])
        return run(tmp_path, validate=validate, held_out=held_out, max_steps=max_steps, lm=lm)[1].steps

    lm, rows = build(), EXAMPLES[:3]
    changes = ({"answer": "1000"}, {"answer_type": "text"}, {"judge": "mine:judge"}, {"question": "Why?"})
    go_on(1, rows)
    for others in (
        rows[:2],
        [],
        *([*rows[:2], dataclasses.replace(rows[2], **change)] for change in changes),
    ):
        with pytest.raises(ValueError, match=r"digest of the validation rows was '\w{16}', now '\w{16}'\);"):
            go_on(2, others)
    assert go_on(2, rows[::-1]) == 2
    of_an_earlier_version(tmp_path / "checkpoints" / "checkpoint-2", "digest of the validation rows")
    assert go_on(3, rows[:2]) == 3


@pytest.mark.parametrize("save_steps", [3, 0.5])
def test_a_resumed_run_saves_and_logs_as_often_as_it_is_told_now(tmp_path: Path, save_steps: float) -> None:
    """`save_steps` below 1 is a share of the run's present length."""
    run(tmp_path, max_steps=1)
    _, result = run(tmp_path, max_steps=6, save_steps=save_steps, logging_steps=2)
    assert [row["step"] for row in result.history if "loss" in row] == [1, 2, 3, 4, 6]
    assert [path.name for path in RunFolder(tmp_path).resume_states()] == ["checkpoint-6", "checkpoint-3"]


def test_a_finished_run_is_not_trained_further_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    short = {**LONG, "lr_scheduler_type": "constant", "num_train_epochs": 0.5}
    lm, first = run(tmp_path / "run", **short)
    assert first.steps == 2  # half of three updates is rounded up
    shutil.rmtree(first.best)  # as if killed before it was published
    again, second = run(tmp_path / "run", **short)
    assert (second.steps, losses(second)) == (2, losses(first))
    assert_same(again, lm)
    on, third = run(tmp_path / "run", **{**short, "num_train_epochs": 1})
    whole, fourth = run(tmp_path / "whole", **{**short, "num_train_epochs": 1})
    assert losses(third) == losses(fourth)
    assert_same(on, whole)
    with pytest.raises(
        ValueError, match=r"rows per update was 8, now 4\); some of the rows would be seen twice"
    ):
        run(tmp_path / "run", **{**short, "num_train_epochs": 4, "per_device_train_batch_size": 4})
    with pytest.raises(ValueError, match="no rows"):  # a call that cannot start drops nothing
        train(on, Colar(ColarConfig()), [], TrainingConfig(**QUICK), tmp_path / "run", resume=False)
    assert (
        RunFolder(tmp_path / "run").last_resume_state() == tmp_path / "run" / "checkpoints" / "checkpoint-3"
    )
    _, fresh = run(tmp_path / "run", resume=False, **short)
    assert losses(fresh) == losses(first)


@pytest.mark.parametrize(("save_steps", "n"), [(0.25, 2), (1000, 1)])
def test_a_run_by_hours_saves_at_shares_of_them(tmp_path: Path, save_steps: float, n: int) -> None:
    """Of so many updates a share would be due after weeks."""
    limit = {**LONG, "num_train_epochs": 100000, "max_hours": 0.5 / 3600, "save_steps": save_steps}
    _, result = run(tmp_path, **limit)
    newest, *before = RunFolder(tmp_path).resume_states()
    assert newest.name == f"checkpoint-{result.steps}"
    assert len(before) == n - 1
    assert all(path.name in {f"checkpoint-{row['step']}" for row in result.history} for path in before)


def test_hours_are_counted_over_resumes(tmp_path: Path) -> None:
    seconds = 0.4
    limit = {**LONG, "num_train_epochs": 100000, "max_hours": seconds / 3600}
    _, first = run(tmp_path, validate=lambda *_: {"accuracy": 0.5}, **limit)
    assert seconds <= first.seconds < seconds + 5
    assert first.history[-2]["eval_accuracy"] == 0.5  # it validates, saves and ends
    assert RunFolder(tmp_path).last_resume_state() == tmp_path / "checkpoints" / f"checkpoint-{first.steps}"
    _, second = run(tmp_path, validate=lambda *_: {"accuracy": 0.5}, **limit)
    assert second.steps == first.steps
    longer = {**limit, "max_hours": (first.seconds + 0.3) / 3600}
    _, third = run(tmp_path, validate=lambda *_: {"accuracy": 0.5}, **longer)
    assert third.steps > first.steps
    assert third.seconds >= first.seconds + 0.3


# --- what is published ---------------------------------------------------------------------------------


def scripted(
    scores: list[float], seen: list[dict[str, Tensor]]
) -> Callable[[LatentLM, Method], dict[str, float]]:
    """A validation that gives out `scores` one by one and keeps the weights it was shown."""

    def validate(lm: LatentLM, method: Method) -> dict[str, float]:
        assert not lm.training
        assert not torch.is_grad_enabled()
        torch.rand(7)  # must leave no trace in the training's random numbers
        # Without the weights that an adapter is folded into while it validates.
        seen.append({name: value for name, value in weights(lm).items() if "base_layer" not in name})
        return {"accuracy": scores[len(seen) - 1], "length": 3.0}

    return validate


def test_the_best_weights_are_published_and_really_in_the_model(
    tmp_path: Path, lora: LoraSettings | None
) -> None:
    seen: list[dict[str, Tensor]] = []
    budget = {"per_device_train_batch_size": 10, "num_train_epochs": 4, "save_steps": 5}
    lm, result = run(tmp_path / "a", lora=lora, validate=scripted([0.2, 0.6, 0.6, 0.1], seen), **budget)
    assert len(seen) == 4
    assert not all(torch.equal(seen[1][name], seen[3][name]) for name in seen[3])
    before = weights(build(lora=lora))
    for name, value in weights(lm).items():
        # The first of equals; and what the adapter was folded into is as it was, bit for bit.
        assert torch.equal(value, before[name] if "base_layer" in name else seen[1][name]), name
    assert result.metrics == {"accuracy": 0.6, "length": 3.0}
    info = json.loads((result.best / "colar.json").read_text())
    assert (info["run"]["step"], info["run"]["metrics"]["accuracy"]) == (4, 0.6)
    loaded, method = pretrained.load(result.best)
    rows = collate([method.encode(lm.template, e, Random(0), 0) for e in EXAMPLES[:4]])
    assert Objective(loaded, method)(**rows)["loss"] == Objective(lm, method)(**rows)["loss"]
    plain, without = run(tmp_path / "b", lora=lora, **budget)
    assert losses(without) == losses(result)  # validation changed nothing
    assert without.metrics == {}
    last = weights(plain)
    for name, value in seen[3].items():
        assert torch.equal(last[name], value), name  # the last weights where nothing chooses


@pytest.mark.parametrize("harmed", [False, True])
def test_of_equal_accuracies_the_lower_loss_is_published(tmp_path: Path, harmed: bool) -> None:
    accuracies = iter([0.5, 0.5, 0.5, 0.4])

    def validate(lm: LatentLM, method: Method) -> dict[str, float]:
        accuracy = next(accuracies)
        if harmed:
            with torch.no_grad():  # each loss is higher than the one before
                lm.extra["latent_head"].mean.bias.add_(10.0)
        return {"accuracy": accuracy}

    budget = {"per_device_train_batch_size": 20, "num_train_epochs": 4}
    _, result = run(tmp_path, validate=validate, held_out=EXAMPLES[:7], **budget)
    losses = [row["eval_loss"] for row in result.history if "eval_loss" in row][:3]
    assert losses == sorted(losses, reverse=not harmed)
    assert json.loads((result.best / "colar.json").read_text())["run"]["step"] == (1 if harmed else 3)


def test_the_last_weights_are_published_where_they_are_asked_for(tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []
    budget = {"per_device_train_batch_size": 20, "num_train_epochs": 3, "load_best_model_at_end": False}
    lm, result = run(tmp_path, validate=scripted([0.2, 0.6, 0.1], seen), **budget)
    for name, value in weights(lm).items():
        assert torch.equal(value, seen[2][name]), name
    info = json.loads((result.best / "colar.json").read_text())["run"]
    assert (info["step"], info["metrics"], result.metrics["accuracy"]) == (3, result.metrics, 0.1)
    shutil.rmtree(result.best)  # as if killed before it was published
    again, _ = run(tmp_path, validate=scripted([], []), **budget)
    assert_same(again, lm)
    _, judged = run(tmp_path, validate=scripted([0.3], []), **{**budget, "num_train_epochs": 4})
    best = json.loads((judged.best / "colar.json").read_text())["run"]
    assert (best["step"], best["metrics"]["accuracy"]) == (4, 0.3)  # worse than 0.6, and later


def test_a_history_that_cannot_be_written_loses_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "history.json").mkdir()
    _, result = run(tmp_path, max_steps=1, load_best_model_at_end=False)
    assert "warning: the history could not be made: IsADirectory" in capsys.readouterr().err
    assert (result.best / "model.safetensors").exists()


def test_losses_on_held_out_rows_are_logged_and_change_nothing(tmp_path: Path, in_eights: Any) -> None:
    lm, result = in_eights
    logged = [row for row in result.history if "eval_loss" in row]
    assert len(logged) == 2
    assert logged[1]["eval_loss"] < logged[0]["eval_loss"]
    method = Colar(ColarConfig())
    method.prepare(lm, EXAMPLES)
    rows = TrainingRows(lm, method, EXAMPLES[:6], QUICK.get("seed", 0))
    with torch.no_grad():  # the last weights are the best: by hand, row by row
        each = [Objective(lm, method)(**collate([rows[0, i, 0]])) for i in range(6)]
    for name in ("loss", "ce", "latent"):
        mean = sum(float(terms[name]) for terms in each) / 6
        assert logged[-1][f"eval_{name}"] == pytest.approx(mean, rel=1e-4)
    _, without = validated_run(tmp_path, held_out=())
    assert losses(without) == losses(result)


def test_what_is_written(
    tmp_path: Path, lora: LoraSettings | None, capfd: pytest.CaptureFixture[str]
) -> None:
    budget = {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "save_steps": 2,
        "report_to": "tensorboard",
    }
    lm, result = run(tmp_path, lora=lora, validate=scripted([0.2, 0.3], []), **budget)
    assert capfd.readouterr().out == ""
    pickles = (".pt", ".pth", ".bin", ".pkl")
    assert not [path for path in result.best.rglob("*") if path.suffix in pickles]
    assert list((tmp_path / "logs").glob("events.out.tfevents*"))
    assert json.loads((tmp_path / "history.json").read_text()) == result.history
    terms = {"loss", "ce", "latent", "sigma", "latent_mse", "grad_norm", "learning_rate"}
    assert terms <= set(result.history[0])
    checkpoints = list((tmp_path / "checkpoints").iterdir())
    assert sorted(path.name for path in checkpoints) == ["checkpoint-4", "checkpoint-6"]
    saved = {name for file in checkpoints[0].glob("*.safetensors") for name in load_file(file)}
    modules = {name for name in saved if name.startswith("latent_head")}
    assert len(modules) == len(lm.extra.state_dict())
    others = saved - modules
    once = {value.data_ptr() for value in lm.causal_lm.state_dict().values()}  # tied weights are saved once
    assert all("lora_" in name for name in others) if lora else len(others) == len(once)


def test_logged_terms_are_means_over_the_rows_of_the_window(tmp_path: Path) -> None:
    method = Terms(CotConfig())

    class Moving(Terms):
        def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
            zero = 0 * lm.causal_lm.get_output_embeddings().weight.sum()
            return {name: value + zero for name, value in super().loss(lm, batch).items()}

    lm = build(method)
    _, result = run(
        tmp_path,
        Moving(CotConfig()),
        lm=lm,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        logging_steps=2,
    )
    order = RowSchedule(EXAMPLES, lengths_of(TrainingRows(lm, method, EXAMPLES, 0)), 0, 6).permutation(0)
    questions = [len(method.encode(lm.template, EXAMPLES[i], Random(0), 0).question) for i in order]
    rows = [row for row in result.history if "one" in row]
    assert [row["step"] for row in rows] == [2, 4]
    assert [row["one"] for row in rows] == pytest.approx([sum(questions[:12]) / 12, sum(questions[12:]) / 8])
    updates = [sum(questions[i : i + 6]) / len(questions[i : i + 6]) for i in (0, 6, 12, 18)]
    assert [row["loss"] for row in rows] == pytest.approx(
        [11 * (updates[0] + updates[1]) / 2, 11 * (updates[2] + updates[3]) / 2]
    )


@pytest.mark.parametrize(
    ("every", "max_steps", "steps"),
    [
        (4, 6, [4, 6]),  # at the end in any case
        (0.4, 7, [3, 6, 7]),
        (1, 2, [1, 2]),
    ],
)
def test_when_it_validates(every: float, max_steps: int, steps: list[int], tmp_path: Path) -> None:
    _, result = run(tmp_path, validate=scripted([0.5] * 3, []), eval_steps=every, max_steps=max_steps)
    assert [row["step"] for row in result.history if "eval_accuracy" in row] == steps


def test_processes_leave_batches_on_the_cpu(tmp_path: Path) -> None:
    """DistributedDataParallel and FSDP2 move the arguments of the module's forward to its GPU."""
    method = Colar(ColarConfig())
    lm = build(method)
    method.prepare(lm, EXAMPLES)
    trainer = make_trainer(lm, method, TrainingConfig(**QUICK), tmp_path)
    moved: list[dict[str, Any]] = []

    def watch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        _, (to_device,) = _to_kwargs(args, kwargs, torch.device("meta"), False)
        moved.append(to_device)

    trainer.objective.register_forward_pre_hook(watch, with_kwargs=True)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.create_optimizer()
    trainer.training_step(trainer.objective, batch, torch.tensor(len(batch["seeds"])))
    [to_device] = moved
    assert to_device["num_items_in_batch"].device.type == "meta"
    assert {column.device.type for column in to_device["batch"].values()} == {"cpu"}


# --- stages --------------------------------------------------------------------------------------------


class Staged(Colar):
    """Two stages of one epoch each."""

    def stage(self, epoch: float) -> int:
        return int(epoch)


def test_a_curriculum_is_judged_in_its_last_stage_only(tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []
    validate = scripted([0.9, 0.8, 0.3, 0.1, 0.2], seen)
    budget = {"per_device_train_batch_size": 8, "num_train_epochs": 3, "eval_steps": 2}
    lm, result = run(tmp_path, Staged(ColarConfig()), validate=validate, **budget)
    # Updates 1..9, stages of three; validated after 2, 4, 6, 8, 9: only the last two count.
    assert result.metrics["accuracy"] == 0.2
    for name, value in weights(lm).items():
        assert torch.equal(value, seen[4][name]), name


@pytest.mark.parametrize(
    ("batch", "accumulate", "stages"), [(10, 1, [0, 0, 1, 1]), (4, 2, [0, 0, 0, 1, 1, 1])]
)
def test_a_held_out_loss_is_of_the_stage_that_was_trained(
    tmp_path: Path, batch: int, accumulate: int, stages: list[int]
) -> None:
    """Also after an epoch's last update, where the next stage is about to begin."""
    seen: list[int] = []

    class Watched(Staged):
        def encode_draws(
            self, template: Template, example: Example, rng: Random, epoch: float, n: int
        ) -> list[Row]:
            seen.extend([self.stage(epoch)] if example.id == "held/1" else [])
            return super().encode_draws(template, example, rng, epoch, n)

    held_out = [dataclasses.replace(EXAMPLES[0], id="held/1")]
    budget = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    validate = scripted([0.5] * len(stages), [])
    run(tmp_path, Watched(ColarConfig()), validate=validate, held_out=held_out,
        num_train_epochs=2, eval_steps=1, **budget)  # fmt: skip
    # Before it the rows are checked, in each stage once.
    assert seen == [0, 1, *stages]


@pytest.mark.parametrize(("validates", "best"), [(True, True), (False, False)])
def test_a_curriculum_that_is_cut_publishes_nothing(tmp_path: Path, validates: bool, best: bool) -> None:
    """Its checkpoint would think as in a stage that was never trained; with more time the run resumes to its end."""

    def cut(hours: float) -> tuple[LatentLM, TrainResult]:
        validate = (lambda *_: {"accuracy": 0.5}) if validates else None
        budget = {"per_device_train_batch_size": 10, "num_train_epochs": 3, "load_best_model_at_end": best}
        return run(tmp_path, Staged(ColarConfig()), validate=validate, max_hours=hours, **budget)

    for _ in range(2):  # the same call again says the same, and trains no further
        with pytest.raises(UnfinishedCurriculumError) as error:
            cut(1e-9)
        said = str(error.value)
        assert said.startswith(
            "training was stopped by training.max_hours 1e-09 at epoch 0.50, in stage 0 of colar's"
        )
        assert "It ends with stage 2" in said
        assert not RunFolder(tmp_path).best.exists()
        assert RunFolder(tmp_path).last_resume_state() == tmp_path / "checkpoints" / "checkpoint-1"
        assert RunFolder(tmp_path).history.exists()
    _, result = cut(1)
    assert result.steps == 6
    info = json.loads((result.best / "colar.json").read_text())
    assert info["run"]["step"] == 6


def test_the_optimiser_forgets_at_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's very first step is the learning rate wherever there is a gradient, whatever its size."""
    # Losses are counted: those before the first step are no updates.
    monkeypatch.setattr(preflight, "before_training", lambda *_: None)
    seen: list[Tensor] = []

    class Watched(Staged):
        def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
            seen.append(lm.extra["latent_head"].mean.bias.detach().clone())
            return super().loss(lm, batch)

    budget = {"per_device_train_batch_size": 8, "num_train_epochs": 2}
    run(tmp_path, Watched(ColarConfig()), **budget)
    steps = [(after - before).abs().median().item() for before, after in itertools.pairwise(seen)]
    first = [step == pytest.approx(1e-3, rel=1e-2) for step in steps]
    assert first == [True, False, False, True, False]


# --- what must not move, and how fast the rest does ----------------------------------------------------


def test_embeddings_stay_bit_exact(tmp_path: Path, lora: LoraSettings | None) -> None:
    lm = build(lora=lora)
    ids = torch.arange(lm.vocabulary_size)
    before = lm.embed(ids).detach().clone()
    run(
        tmp_path,
        lm=lm,
        max_steps=4,
        per_device_train_batch_size=8,
        weight_decay=0.5,
        learning_rate=1e-2,
    )
    assert torch.equal(lm.embed(ids).detach(), before)


def test_parameter_groups(tmp_path: Path) -> None:
    lm, method = build(), Colar(ColarConfig())
    settings = TrainingConfig(**QUICK, modules_learning_rate=0.5, weight_decay=0.25)
    trainer = make_trainer(lm, method, settings, tmp_path)
    groups = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in lm.named_parameters()}
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert set(found) == set(names.values())
    assert found["extra.latent_head.mean.weight"] == (0.5, 0.25)
    assert found["extra.latent_head.mean.bias"] == (0.5, 0.0)
    assert found["lm.model.layers.0.mlp.up_proj.weight"] == (1e-3, 0.25)
    assert found["lm.model.layers.0.input_layernorm.weight"] == (1e-3, 0.0)
    assert found["lm.model.embed_tokens.weight"] == (1e-3, 0.25)
    assert all(group["fused"] for group in groups)


def test_an_optimiser_of_8_bits_gets_the_groups_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optim = "adamw_8bit"
    settings = TrainingConfig(**QUICK, optim=optim, modules_learning_rate=0.5)
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(
            ValueError, match=f"training.optim {optim} needs bitsandbytes: pip install bitsandbytes"
        ):
            settings.check_installed()
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    optimizer = make_trainer(build(), Colar(ColarConfig()), settings, tmp_path / "groups").create_optimizer()
    assert type(optimizer).__module__.startswith("bitsandbytes")
    assert {round(float(group["lr"]), 6) for group in optimizer.param_groups} == {1e-3, 0.5}
    whole_lm, whole = run(tmp_path / "whole", optim=optim, max_steps=2)
    run(tmp_path / "cut", optim=optim, max_steps=1)
    lm, resumed = run(tmp_path / "cut", optim=optim, max_steps=2)
    moments = torch.load(
        tmp_path / "cut" / "checkpoints" / "checkpoint-2" / "optimizer.pt", weights_only=True
    )
    assert any("8" in str(value) for value in moments["state"].values())
    assert losses(resumed) == losses(whole)
    assert_same(lm, whole_lm)


def test_rows_are_encoded_by_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths, the first error and the random numbers are those of one process."""
    lm, method = build(), Cot(CotConfig())
    many = [dataclasses.replace(row, id=f"{row.id}/{turn}") for turn in range(40) for row in EXAMPLES]
    rows = TrainingRows(lm, method, many, 0)
    alone = rows.lengths()
    monkeypatch.setattr("colar.training.rows.WORKERS_FROM", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(2))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert rows.lengths() == alone
    assert torch.equal(torch.rand(2), expected)

    def encode(template: Template, example: Example, rng: Random, epoch: float) -> Row:
        raise ValueError(f"{example.id}: it cannot be encoded")

    monkeypatch.setattr(method, "encode", encode)
    rows = TrainingRows(lm, method, many, 0)
    with pytest.raises(ValueError, match=f"^{many[0].id}: it cannot be encoded$"):
        rows.lengths()


def make_trainer(lm: LatentLM, method: Method, config: TrainingConfig, folder: Path) -> LatentTrainer:
    rows = TrainingRows(lm, method, EXAMPLES, 0)
    schedule = RowSchedule(EXAMPLES, lengths_of(rows), 0, 8)
    args = arguments(config, RunFolder(folder))
    return LatentTrainer(Objective(lm, method), args, config, rows, schedule)


def test_stages_of_two_runs_have_two_names_for_a_tracker(tmp_path: Path) -> None:
    """Trackio goes on with a run of the same name."""
    names = {arguments(TrainingConfig(), RunFolder(tmp_path / name / "cot")).run_name for name in "ab"}
    assert len(names) == 2


def test_the_modules_rate_is_logged_and_follows_the_schedule(tmp_path: Path) -> None:
    rates = {"learning_rate": 1e-3, "modules_learning_rate": 5e-3, "lr_scheduler_type": "linear"}
    _, result = run(tmp_path, per_device_train_batch_size=5, **rates)
    logged = [(row["learning_rate"], row["learning_rate_modules"]) for row in result.history if "loss" in row]
    assert logged == [pytest.approx((1e-3 * x, 5e-3 * x)) for x in (1, 0.75, 0.5, 0.25)]


# --- ways to compute -----------------------------------------------------------------------------------


def test_bfloat16_autocast_on_this_machine(tmp_path: Path, in_eights: Any) -> None:
    lm, half = run(tmp_path, bf16=True, **{**IN_EIGHTS, "max_steps": 4})
    assert all(value.dtype == torch.float32 for value in lm.state_dict().values())
    pairs = [(a[1], b[1]) for a, b in zip(losses(half), losses(in_eights[1])[:4], strict=True)]
    assert any(a != b for a, b in pairs)
    assert all(a == pytest.approx(b, rel=2e-2) for a, b in pairs)
    assert pairs[-1][0] < pairs[0][0]


def test_a_cpu_that_is_slow_in_bfloat16_says_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where the CPU gains by it there is nothing to say.
    warns = not devices.computes_bfloat16(torch.device("cpu"))
    budget = {"max_steps": 1, "per_device_train_batch_size": 2}
    run(tmp_path / "half", bf16=True, **budget)
    assert ("set --training.bf16 false\n" in capsys.readouterr().err) == warns
    run(tmp_path / "single", **budget)
    assert "bfloat16" not in capsys.readouterr().err


@pytest.mark.parametrize("bf16", [False, True])
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, bf16: bool) -> None:
    """An adapter's dropout included: what is computed again draws the same."""
    batches = {"bf16": bf16, "per_device_train_batch_size": 10}
    lora = dataclasses.replace(LORA, target_modules="all-linear")
    lm, one = run(tmp_path / "a", lora=lora, gradient_checkpointing=True, **batches)
    _, other = run(tmp_path / "b", lora=lora, **batches)
    # In bfloat16 dropout gets inputs of another dtype.
    rel = 1e-2 if bf16 else 1e-5
    for mine, theirs in zip(losses(one), losses(other), strict=True):
        assert mine == pytest.approx(theirs, rel=rel)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in lm.causal_lm.modules())


def test_workers_encode_the_same_rows(tmp_path: Path, in_eights: Any) -> None:
    _, result = run(tmp_path, dataloader_num_workers=1, **IN_EIGHTS)
    assert losses(result) == losses(in_eights[1])


# --- what goes wrong -----------------------------------------------------------------------------------


class Breaks(Colar):
    """A loss that is not finite from the third update on."""

    def __init__(self, config: Any, value: float) -> None:
        super().__init__(config)
        self.value, self.calls = value, 0

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        self.calls += 1
        terms = super().loss(lm, batch)
        return {**terms, "latent": terms["latent"] * (self.value if self.calls >= 3 else 1)}


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite here; the next tests have losses that are not a number."""
    # Losses are counted: those before the first step are no updates.
    monkeypatch.setattr(preflight, "before_training", lambda *_: None)
    lm = build()
    message = r"step 3: ce [\d.]+, latent inf, .*checkpoint-2 \(to resume from\).*best"
    with pytest.raises(NonFiniteError, match=message):
        run(tmp_path, Breaks(ColarConfig(), math.inf), lm=lm, per_device_train_batch_size=10, num_train_epochs=3,
            save_steps=2, validate=lambda *_: {"accuracy": 0.1})  # fmt: skip
    assert all(bool(torch.isfinite(value).all()) for value in lm.state_dict().values())


def test_weights_stay_as_they_were_before_a_loss_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates go on until the next log, and change nothing."""
    monkeypatch.setattr(preflight, "before_training", lambda *_: None)
    lm = build()
    with pytest.raises(NonFiniteError, match=r"step 3: ce [\d.]+, latent nan"):
        run(tmp_path / "breaks", Breaks(ColarConfig(), math.nan), lm=lm, max_steps=6, logging_steps=5)
    two, _ = run(tmp_path / "two", max_steps=2)
    assert_same(lm, two)


class BreaksOnce(Breaks):
    """A loss that is infinite in one batch alone, and whose gradient is finite there."""

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        self.calls += 1
        terms = Colar.loss(self, lm, batch)
        return {**terms, "latent": terms["latent"] + (self.value if self.calls == 3 else 0)}


def test_every_batch_of_an_update_must_have_a_finite_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "before_training", lambda *_: None)
    options = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2}
    message = r"step 2: ce [\d.]+, latent inf.* nothing was saved yet"
    with pytest.raises(NonFiniteError, match=message):
        run(tmp_path, BreaksOnce(ColarConfig(), math.inf), **options)


def test_rows_are_checked_before_training(tmp_path: Path) -> None:
    lm, method = build(), Colar(ColarConfig())
    settings = TrainingConfig(**QUICK)
    with pytest.raises(ValueError, match="no rows to train on"):
        train(lm, method, [], settings, tmp_path)
    long = [Example(f"far/{i}", "why " * 1100, ("1",), "1") for i in range(7, 7 + len(EXAMPLES) + 1)]
    words = (
        rf"far/7: the row has \d+ tokens, the model's context is 1024; {len(long)} of {len(long) + len(EXAMPLES)} "
        r"training rows are too long: .*model\.backbone"
    )
    with pytest.raises(ValueError, match=words):
        train(lm, method, [*EXAMPLES, *long], settings, tmp_path)


def test_rows_beyond_the_context_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with them is the run without them."""
    lm, method = build(), Colar(ColarConfig())
    far = [Example("far/1", "Why?", ("1 " * 1100,), "1"), Example("far/2", "why " * 1100, ("1",), "1")]
    config = TrainingConfig(**QUICK)
    folder = RunFolder(tmp_path)

    def made(rows: Sequence[Example], held_out: Sequence[Example]) -> LatentTrainer:
        return sft.make_trainer(lm, method, rows, config, folder, held_out=held_out)

    short = made(EXAMPLES, EXAMPLES[:3])
    assert capsys.readouterr().err.count("left out") == 0
    trainer = made([far[0], *EXAMPLES, far[1]], [*EXAMPLES[:3], far[0]])
    said = capsys.readouterr().err
    assert f"left out 2 of {len(EXAMPLES) + 2} training rows that are too long (far/1: the row has" in said
    assert "the model's context is 1024): choose a model.backbone (--model) with a longer context" in said
    assert "left out 1 of 4 validation rows" in said
    assert trainer.schedule.examples == short.schedule.examples
    assert trainer.schedule.permutation(0) == short.schedule.permutation(0)
    assert trainer.curriculum.max_steps == short.curriculum.max_steps


def test_held_out_rows_have_a_loss_also_where_none_has_a_chain(tmp_path: Path) -> None:
    lm, method = build(), Colar(ColarConfig())
    bare = [dataclasses.replace(example, steps=()) for example in EXAMPLES]
    found = {}
    for name, held_out in {"mixed": [*EXAMPLES[:2], *bare[:3]], "bare": bare[:3]}.items():
        folder = RunFolder(tmp_path / name)
        made = sft.make_trainer(lm, method, bare, TrainingConfig(**QUICK), folder, held_out=held_out)
        assert made.held_out is not None
        found[name] = list(made.held_out.examples)
    assert found == {"mixed": list(EXAMPLES[:2]), "bare": bare[:3]}


def test_held_out_rows_are_checked_before_training(tmp_path: Path) -> None:
    """They are first encoded at the first validation, which may be hours away."""
    wrong = Example("far/7", "Why?", ("1 " * 1100,), "1")
    with pytest.raises(ValueError, match="far/7: the row has"):
        run(tmp_path, validate=scripted([0.5], []), held_out=[wrong], max_steps=1)
    assert not RunFolder(tmp_path).checkpoints.exists()


def test_rows_that_outgrow_the_context_in_a_later_stage_are_found_before_training(tmp_path: Path) -> None:
    """Coconut's latents grow by 4 from stage to stage, up to 20 at epoch 4; this row's only step is gone at once."""
    lm = tiny_lm("llama")
    method = registry.build("coconut", {"n_latents_per_step": 4, "n_stages": 5, "epochs_per_stage": 1})
    pretrained.attach(lm, method, 0)
    chain = ("<<1=1>>",)

    def example(question: str) -> Example:
        return Example("far/9", question, chain, "1")

    def length(question: str, epoch: float) -> int:
        return len(method.encode(lm.template, example(question), Random(0), epoch))

    question = "x"
    while length(question + " 3", 0.0) <= lm.context - 12:
        question += " 3"
    # At epochs 0 to 3 it has 4 to 16 latents: it fits up to there.
    assert [length(question, epoch) - lm.context for epoch in (3.0, 4.0, 9.0)] == [0, 4, 4]

    def made(epochs: float, rows: Sequence[Example], held_out: Sequence[Example] = ()) -> LatentTrainer:
        config = TrainingConfig(**{**QUICK, "num_train_epochs": epochs})
        return sft.make_trainer(lm, method, rows, config, RunFolder(tmp_path), held_out=held_out)

    short = [Example("near/1", "x", chain, "1")]
    words = r"far/9: the row has 132 tokens, the model's context is 128"
    with pytest.raises(ValueError, match=words):
        made(5, [example(question)])
    with pytest.raises(ValueError, match=words):
        made(5, short, [example(question)])
    # A run of 4 epochs trains on the row, and validates with it, while it fits.
    assert made(4, [example(question)]).schedule.lengths == [length(question, 0.0)]
    made(4, short, [example(question)])


@pytest.mark.parametrize("missing", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name, *more)
    )
    with pytest.raises(ValueError, match=f"pip install {missing}"):
        run(tmp_path / "run", report_to=missing)
    assert not (tmp_path / "run").exists()


def test_validate_without_accuracy_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="validate must return an accuracy, it returned loss"):
        run(tmp_path, validate=lambda *_: {"loss": 1.0})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr_scheduler_type": "cosin"}, "training.lr_scheduler_type must be one of constant"),
        ({"report_to": "mlflow"}, "training.report_to must be one of tensorboard, wandb"),
        ({"num_train_epochs": 0}, "training.num_train_epochs must be above 0"),
        ({"learning_rate": math.nan}, "training.learning_rate must be above 0"),
        (
            {"per_device_train_batch_size": 0},
            "training.per_device_train_batch_size must be a whole number, 1 or more, got 0",
        ),
        ({"max_hours": 0}, "training.max_hours must be above 0 or null"),
        ({"max_steps": 0}, "training.max_steps must be above 0 or -1"),
        ({"eval_steps": 2.5}, "training.eval_steps must be a whole number, or below 1"),
        ({"adam_beta2": 1.0}, r"training.adam_beta2 must be in \[0, 1\)"),
        ({"warmup_steps": 5}, "no effect with lr_scheduler_type constant"),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**config)


# --- the model card ------------------------------------------------------------------------------------


def test_model_card(tmp_path: Path, lora: LoraSettings | None) -> None:
    backbone = dataclasses.replace(backbones.load("tiny"), name="some-org/some-model")
    lm = LatentLM.from_backbone(backbone, None, lora)
    run_info = {
        "label": "control",
        "recipe": {
            "model": {"backbone": "some-org/some-model"},
            "data": {"source": "gsm8k-aug", "data_dir": "/secret/place", "train_size": 7},
            "method": {"name": "colar", "alpha": 0.02},
        },
        "training": {"learning_rate": 1e-4},
        "metrics": {"accuracy": 0.25, "length": 3.5},
        "step": 6,
        "epoch": 2.0,
    }
    described = {"name": "colar", "alpha": 0.05, "starts": ("+",)}
    shown = {"compression_factor": 5, "confidence_threshold": 0.8}
    written = card.text(lm, described, run_info, shown)
    front = yaml.safe_load(written.split("---")[1])
    assert front["base_model"] == "some-org/some-model"
    assert front["base_model_relation"] == ("adapter" if lora else "finetune")
    for part in (
        "| accuracy | 0.25 |",
        "step 6, epoch 2.00",
        "gsm8k-aug",
        '"alpha": 0.05',  # the model's, not the recipe's
        "colar generate",
        '?" --compression_factor 5 --confidence_threshold 0.8\n',
        "control",
    ):
        assert part in written
    assert "secret" not in written
    local = dataclasses.replace(backbones.load("tiny"), name=str(tmp_path))
    assert "base_model" not in yaml.safe_load(
        card.text(LatentLM.from_backbone(local), {"name": "cot"}, {}).split("---")[1]
    )


# Compilation


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_every_family_are_found(family):
    lm = tiny_lm(family)
    layers = lm.decoder_layers()
    assert len(layers) == lm.config.num_hidden_layers
    assert all("attn" in " ".join(name for name, _ in layer.named_modules()) for layer in layers)


def test_compilation_without_a_compiler_is_refused_in_words(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with (
        pytest.raises(ValueError, match="training.compile needs a compiler"),
        preflight.prepared(tiny_lm("llama"), compiled=True),
    ):
        pass


# --- private names of other libraries ------------------------------------------------------------------

SOURCE = Path(checks.__file__).parent
PRIVATE_NAMES = {
    "_get_grad_norm": "Trainer: the only place between the gradients and the optimiser that knows their norm",
    "_load_from_checkpoint": "Trainer: it would look for the weights of the module that it wraps",
    "_save_optimizer_and_scheduler": "Trainer: with training.fsdp each process would save its own share",
    "_load_optimizer_and_scheduler": "Trainer: with training.fsdp each card would read the moments of all weights",
    "_internal_call": "Trainer: a parameter of save_model, which is public",
    "_attn_implementation": "transformers' configs: the attention that was loaded has no public name",
    "_is_stateful": "transformers' models: a recurrent state has no public name",
}
"""Names of transformers, accelerate and peft that begin with an underscore, as far as colar overrides, calls or reads
them, and why no public one does. A release may change them: a test compares this list with the code."""

OTHERS = (Trainer, TrainingArguments, PreTrainedModel, PreTrainedConfig, PeftModel, Accelerator)
TORCH = {"_compiled_call_impl", "_backward_hooks", "_weight_int8pack_mm"}
"""Private names of torch: no part of the list, which is about libraries that change more often."""


def underscored(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names with a leading underscore that a file defines, and those that it reads from objects."""
    defined, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
            if (
                isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                defined.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            used |= {
                arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            }

    def private(names: set[str]) -> set[str]:
        return {name for name in names if name.startswith("_") and not name.startswith("__")}

    return private(defined), private(used)


def test_every_private_name_of_another_library_is_listed() -> None:
    """Those that colar reads and does not define itself, and those that it overrides, by accident or not."""
    defined: set[str] = set()
    used: set[str] = set()
    for room in ("training", "model"):
        for path in (SOURCE / room).rglob("*.py"):
            own, read = underscored(ast.parse(path.read_text(encoding="utf-8")))
            defined |= own
            used |= read
    attributes = {name for kind in OTHERS for name in dir(kind)}
    parameters = {name for kind in OTHERS for name in inspect.signature(kind).parameters}
    parameters |= set(inspect.signature(Trainer.save_model).parameters)
    theirs = (used - defined) | (defined & (attributes | parameters))
    assert theirs - TORCH == set(PRIVATE_NAMES)
