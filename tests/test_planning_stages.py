"""A run's stages in a plan and in a check: the costliest for memory, and the time of all of them."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from colar import planning, recipe
from colar.data.synthetic import ArithmeticConfig, generate
from colar.methods import pretrained, registry
from colar.methods.coconut import Coconut, CoconutConfig
from colar.methods.icot import Icot, IcotConfig
from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.planning import trace
from colar.training import preflight, recompute
from colar.training.curriculum import Curriculum
from colar.training.run_folder import RunFolder
from colar.training.sft import TrainingConfig, make_trainer
from colar.training.stages import MOST, Pace, Stage, stages_of
from colar.training.trainer import LatentTrainer

EXAMPLES = list(generate(ArithmeticConfig(), "train", 24, seed=0))
COCONUT = Coconut(CoconutConfig(epochs_per_stage=3, n_stages=3))
SMALL = ["--data.train_size", "64", "--data.validation_size", "8", "--output", "unused"]
ICOT = ["--method.name", "icot", "--method.remove_all_at", "40", "--method.removed_per_epoch", "40"]
"""The chain is gone after an epoch."""
CHECKPOINTS = ["--training.gradient_checkpointing", "true"]

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(*keys: str, epochs: float = 1) -> dict[str, float]:
    """The numbers of a plan of `tiny/cot` with some keys."""
    written = [*SMALL, "--training.num_train_epochs", f"{epochs:g}", *keys]
    return planning.plan(recipe.load("tiny/cot", written), "h100").numbers


# Stages in time


def test_stages_by_hand() -> None:
    """Ten updates an epoch: stages 1 to 4 begin at epochs 0, 3, 6 and 9."""
    whole = [Stage(0, 3), Stage(3, 3), Stage(6, 3), Stage(9, 3)]
    assert stages_of(Curriculum(COCONUT, 10, 120)) == whole
    assert stages_of(Curriculum(COCONUT, 10, 65)) == [Stage(0, 3), Stage(3, 3), Stage(6, 0.5)]
    assert stages_of(Curriculum(registry.build("cot", {}), 10, 25)) == [Stage(0, 2.5)]


def test_of_many_stages_the_first_and_the_last_are_looked_at() -> None:
    """iCoT: eight tokens an epoch, 39 in all. What is looked at covers the run without a gap."""
    icot = Icot(IcotConfig(removed_per_epoch=8, remove_all_at=39))
    found = stages_of(Curriculum(icot, 100, 5000))
    assert len(found) == MOST
    assert found[0].begins == 0
    assert found[-1].begins == pytest.approx(39 / 8, abs=0.01)
    for stage, following in itertools.pairwise(found):
        assert stage.begins + stage.epochs == pytest.approx(following.begins)
    assert found[-1].begins + found[-1].epochs == 50


def test_a_pace_by_hand() -> None:
    pace = Pace([Stage(0, 2), Stage(2, 1), Stage(3, 5)], [10, 20, 4])
    assert (pace.run, pace.epoch, pace.before_last) == (60, 7.5, 40)
    assert [pace.epoch_after(seconds) for seconds in (5, 20, 30, 60)] == [0.5, 2, 2.5, 8]


# A plan


def test_epochs_without_a_chain_take_the_time_of_no_cot() -> None:
    """Of 100 epochs 99 are behind the curriculum. Questions are asked as the model thinks in the end."""
    icot, no_cot = planned(*ICOT, epochs=100), planned("--method.name", "no_cot", epochs=100)
    assert icot["the run"] == pytest.approx(no_cot["the run"], rel=0.1)
    assert icot["a validation"] == pytest.approx(no_cot["a validation"], rel=0.01)
    # The first epoch has the chain, and needs the memory of CoT.
    assert icot["peak memory"] == pytest.approx(planned()["peak memory"], rel=0.02)


def test_the_stage_that_feeds_most_is_the_one_that_must_fit() -> None:
    """Coconut feeds a cache. Where layers recompute there is none, and all is fed again for each latent: the last
    stages, whose rows are shorter, take most."""
    coconut = ["--method.name", "coconut", "--method.n_latents_per_step", "4"]
    coconut += ["--training.per_device_train_batch_size", "16"]
    first = planned(*coconut, *CHECKPOINTS, epochs=3)
    whole = planned(*coconut, *CHECKPOINTS, epochs=12)
    assert whole["peak memory"] > 1.2 * first["peak memory"]
    assert whole["an epoch"] > 1.5 * first["an epoch"]
    cached = planned(*coconut, epochs=12)
    assert cached["peak memory"] == planned(*coconut, epochs=3)["peak memory"]


@pytest.mark.parametrize("keys", [[], CHECKPOINTS], ids=["cache", "checkpoints"])
def test_memory_of_a_curriculum_is_what_a_check_measures(keys: list[str]) -> None:
    written = ["--method.name", "coconut", "--training.num_train_epochs", "12", *keys]
    made = recipe.load("tiny/cot", [*SMALL, *written])
    assert planning.plan(made, "h100").peak_bytes == pytest.approx(planning.check(made).peak_bytes, rel=0.15)


def test_a_run_is_as_long_as_max_steps_says() -> None:
    found = planned("--training.max_steps", "3")
    assert found["the run"] == pytest.approx(3 * found["an update"])


def test_without_a_cache_the_twin_feeds_all_again() -> None:
    """Two latents: the question, twice one position more, then everything."""
    method = registry.build("coconut", {"n_latents_per_step": 2})
    twin = trace.twin_of(method, EXAMPLES)
    recompute.enable(twin)
    twin.train()
    row = method.encode(twin.template, EXAMPLES[0], Random(0), 0.0)
    *growing, last = [length for _, length in trace.trace(twin, method, [row], twin.template).passes]
    # Questions are padded on the left, to a multiple of 8.
    question = growing[0]
    assert len(row.question) <= question < len(row.question) + 8
    assert growing == [question, question + 1, question + 2]
    assert len(row) <= last < len(row) + 16


# A check, and what a run begins with


def trainer_of(folder: Path, method: Any, **config: Any) -> LatentTrainer:
    torch.manual_seed(0)
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    pretrained.attach(lm, method, 0)
    settings = TrainingConfig(report_to="none", per_device_train_batch_size=4, **config)
    return make_trainer(lm, method, EXAMPLES, settings, RunFolder(folder))


def test_each_stage_takes_as_long_as_it_has_positions(tmp_path: Path) -> None:
    """At a second a position. Few batches: all of them are counted, as they are in each stage."""
    icot = Icot(IcotConfig(removed_per_epoch=10, remove_all_at=30, smoothing_lambda=None))
    trainer = trainer_of(tmp_path / "run", icot)
    stages = stages_of(Curriculum(icot, 6, 30))
    one = preflight.Measured(rows=4, positions=100, padded=100, at_once=4, seconds=100.0, peak_bytes=0)
    found = preflight.pace_of(trainer, stages, [one] * len(stages))
    for stage, seconds in zip(stages, found.seconds, strict=True):
        by_hand = 0
        order = trainer.schedule.permutation(0)
        for start in range(0, 24, 4):
            rows = [trainer.train_dataset[stage.begins, index, 0] for index in order[start : start + 4]]
            by_hand += 4 * max(map(len, rows))
        assert seconds == pytest.approx(by_hand)
    assert found.seconds[-1] < 0.8 * found.seconds[0]


def test_a_check_measures_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most memory of all stages; the run takes the sum of their times."""
    found = []

    def measured(trainer: Any, batch: Any, checkpoints: bool) -> preflight.Measured:
        positions = int(trainer.positions(batch).max())
        padded = positions * len(batch["seeds"])
        # The third stage is the one that takes most.
        size = (10, 20, 40, 30)[len(found)]
        found.append(preflight.Measured(8, positions, padded, 8, float(padded), size))
        return found[-1]

    # The package has a function of that name.
    monkeypatch.setattr(importlib.import_module("colar.planning.check"), "_measured", measured)
    keys = ["--method.name", "coconut", "--training.num_train_epochs", "12"]
    estimate = planning.check(recipe.load("tiny/cot", [*SMALL, *keys]))
    assert len(found) == 4
    assert estimate.peak_bytes == 40
    assert estimate.numbers["the run"] == pytest.approx(12 * estimate.numbers["an epoch"])
