"""Weights split between two processes (training.fsdp): the run of one process, its folder, its resume."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_training as supervised
import torch
from launch import together
from torch import Tensor
from torch.distributed.tensor import DTensor

from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.template.template import TemplateConfig
from colar.training.config import TrainingConfig
from colar.training.sft import train

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = LoraSettings(r=4, lora_alpha=8)
QUICK: dict[str, Any] = {
    **supervised.QUICK,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
}
CASES: dict[str, tuple[str, dict[str, Any], LoraSettings | None, str]] = {
    "cot, full": ("cot", {}, None, "float32"),
    "cot, adapter on bfloat16": ("cot", {}, LORA, "bfloat16"),
    "colar, adapter": ("colar", {}, LORA, "float32"),
    # Most rows have groups of one token alone, so that at times all rows of one process do.
    "sequential, full": (
        "sequential",
        {"compression_factors": [1, 1, 1, 2], "merge": "ordered"},
        None,
        "float32",
    ),
}
"""Method and its config, adapter, dtype of the backbone (`tiny`: its embedding is tied to the LM head)."""


def build(case: str) -> tuple[LatentLM, Any]:
    name, config, lora, dtype = CASES[case]
    method = registry.build(name, config)
    torch.manual_seed(0)
    lm = LatentLM.from_backbone(backbones.load("tiny", dtype), TemplateConfig(), lora)
    pretrained.attach(lm, method, 0)
    return lm, method


def run(folder: Path, case: str, **config: Any) -> tuple[list[float], int]:
    """Train; the losses, and how many weights this process has a share of."""
    torch.set_num_threads(1)
    lm, method = build(case)
    # Chunks of logits, some of them computed again in the backward pass.
    lm.chunk_bytes = 40 * lm.vocabulary_size
    result = train(lm, method, supervised.EXAMPLES, TrainingConfig(**{**QUICK, **config}), folder)
    losses = [row["loss"] for row in result.history if "loss" in row]
    return losses, sum(isinstance(weight, DTensor) for weight in lm.parameters())


def published(folder: Path) -> dict[str, Tensor]:
    lm, _ = pretrained.load(folder / "best")
    return {name: value.detach() for name, value in lm.state_dict().items()}


def assert_same(one: Path, other: Path, rounded: bool = False) -> None:
    mine, theirs = published(one), published(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if rounded:
            # AdamW's first updates are signs of gradients, and some of these are smaller than rounding.
            assert (value - theirs[name]).norm() <= 0.2 * theirs[name].norm(), name
            continue
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=2e-5, msg=name)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[float]]]:
    """The run of one process, made once for each case: its folder and its losses."""

    @functools.cache
    def made(case: str) -> tuple[Path, list[float]]:
        folder = tmp_path_factory.mktemp("one")
        losses, shares = run(folder, case, per_device_train_batch_size=8)
        assert shares == 0
        return folder, losses

    return made


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """The run of two processes that nothing stops, made once for each case: its folder, and what each returns."""

    @functools.cache
    def made(case: str) -> tuple[Path, list[Any]]:
        folder = tmp_path_factory.mktemp("two")
        return folder / "run", together(2, folder / "processes", sharded_run, folder / "run", case, {})

    return made


@pytest.mark.parametrize("case", CASES)
def test_two_processes_with_half_of_the_weights_train_as_one(one: Any, two: Any, case: str) -> None:
    """Losses of every update, and the weights that one process loads from the folder."""
    whole, wanted = one(case)
    split, found = two(case)
    for losses, shares in found:
        assert shares > 10
        assert losses == pytest.approx(wanted, rel=1e-4)
    assert_same(split, whole, CASES[case][3] == "bfloat16")


def test_a_process_may_have_no_row_that_a_module_is_for(tmp_path: Path) -> None:
    """One row each: at c = 1 groups have one token, and neither the decoder nor the maps have anything to do."""
    case = "sequential, full"
    short = {"gradient_accumulation_steps": 1, "max_steps": 4}
    wanted, _ = run(tmp_path / "one", case, per_device_train_batch_size=2, **short)
    processes = {"per_device_train_batch_size": 1, **short}
    for losses, _ in together(2, tmp_path / "p", sharded_run, tmp_path / "two", case, processes):
        assert losses == pytest.approx(wanted, rel=1e-4)


def sharded_run(folder: Path, case: str, config: dict[str, Any]) -> tuple[list[float], int]:
    return run(folder, case, fsdp=True, **config)


def test_a_run_resumes_in_the_middle(tmp_path: Path, two: Any) -> None:
    """AdamW's moments come back share by share: the run ends as one that was never stopped, also in one process."""
    case = "colar, adapter"
    whole, _ = two(case)
    part = {"save_steps": 2, "max_steps": 2}
    together(2, tmp_path / "1", sharded_run, tmp_path / "parts", case, part)
    shutil.copytree(tmp_path / "parts", tmp_path / "alone")
    together(2, tmp_path / "2", sharded_run, tmp_path / "parts", case, {"save_steps": 2})
    assert_same(tmp_path / "parts", whole)
    run(tmp_path / "alone", case, save_steps=2, per_device_train_batch_size=8)
    assert_same(tmp_path / "alone", whole)


def test_processes_take_a_batch_in_equally_many_parts(tmp_path: Path, one: Any) -> None:
    """Rows are of different lengths: without that one process would wait for weights that no other gathers."""
    _, wanted = one("cot, full")
    found = together(2, tmp_path / "p", sharded_run, tmp_path / "two", "cot, full", {"tokens_per_batch": 150})
    for losses, _ in found:
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    lm, method = build("cot, full")
    config = TrainingConfig(**QUICK, fsdp=True)
    with pytest.raises(ValueError, match="start them with torchrun"):
        train(lm, method, supervised.EXAMPLES, config, tmp_path)
    with pytest.raises(ValueError, match="set data.validation_size 0"):
        train(lm, method, supervised.EXAMPLES, config, tmp_path, validate=lambda *_: {"accuracy": 0.0})
    unsure = {"confidence_thresholds": [0, 0.5]}
    for name, settings in (("coconut", {}), ("distill", {}), ("sequential", unsure)):
        with pytest.raises(ValueError, match=f"training.fsdp cannot train {name} as configured"):
            config.check_method(registry.build(name, settings))
    with pytest.raises(ValueError, match="training.fsdp and training.compile"):
        TrainingConfig(**QUICK, fsdp=True, compile=True)
