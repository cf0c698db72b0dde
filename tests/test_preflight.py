"""Before the first step: what is measured, that nothing of it stays, and what is warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_grpo as reinforced
import torch
from families import tiny_lm
from torch import Tensor

from colar.data.synthetic import ArithmeticConfig, generate
from colar.methods import pretrained, registry
from colar.methods.coconut import Coconut, CoconutConfig
from colar.model import backbones
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training import peak, preflight, room, run
from colar.training.curriculum import Curriculum
from colar.training.run_folder import RunFolder
from colar.training.sft import TrainingConfig, make_trainer, train
from colar.training.stages import Pace, Stage, stages_of
from colar.training.trainer import LatentTrainer

EXAMPLES = list(generate(ArithmeticConfig(), "train", 24, seed=0))
COCONUT = Coconut(CoconutConfig(epochs_per_stage=3, n_stages=3))
"""Stages 1 to 4 begin at epochs 0, 3, 6 and 9."""
LORA = LoraSettings(r=4, lora_alpha=8, lora_dropout=0.2)
ONE_STAGE = [Stage(0, 1)]

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


# Peaks


def test_a_peak_by_hand() -> None:
    """400 bytes, then 800 more, of which a view takes none; both are gone when 1,000 come."""
    old = torch.zeros(1000)
    with peak.TensorPeak() as counted:
        one = torch.ones(100)
        two = torch.cat([one, one])
        two.view(10, 20).t().add_(1)
        old.add_(1)
        assert (counted.live, counted.peak) == (1200, 1200)
        del one, two
        assert counted.live == 0
        three = old[:250] * 2
    assert (counted.live, counted.peak) == (1000, 1200)
    del three


def test_what_the_backward_pass_holds_is_counted() -> None:
    """y = (x x) x keeps x and x x. Backward adds three tensors of that size at most, and frees what it kept."""
    x = torch.zeros(1000, requires_grad=True)
    with peak.TensorPeak() as counted:
        square = x * x
        cube = square * x
        del square
        assert counted.live == 8000
        cube.sum().backward()
        del cube
        assert x.grad is not None
        assert counted.live == 4000
    assert 12000 <= counted.peak <= 24000


def test_tied_weights_are_held_once() -> None:
    lm = tiny_lm("llama")
    V, D = lm.vocabulary_size, lm.width
    first = peak.held(lm)
    lm.causal_lm.lm_head.weight = torch.nn.Parameter(torch.zeros(V, D))
    untied = peak.held(lm)
    lm.causal_lm.lm_head.weight = lm.causal_lm.get_input_embeddings().weight
    assert untied - peak.held(lm) == 4 * V * D
    assert first in (untied, untied - 4 * V * D)


# The longest batch


def test_the_longest_batch_has_the_most_positions(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", per_device_train_batch_size=4)
    batch = preflight.longest_batch(trainer, ONE_STAGE)
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
    stages = stages_of(Curriculum(trainer.objective.method, 6, 72))
    widths = [int(trainer.positions(batch).max()) for batch in preflight.longest_batches(trainer, stages)]
    # The third of four replaces a step more than the second; the last has no step that it had.
    assert max(widths) == widths[2]
    assert int(trainer.positions(preflight.longest_batch(trainer, stages)).max()) == widths[2]


def test_parts_need_less_memory_at_once(tmp_path: Path) -> None:
    """Weights, moments and gradients are the same; activations are those of a part."""
    found = {}
    for tokens in (None, 200):
        trainer = trainer_of(tmp_path / f"{tokens}", per_device_train_batch_size=16, tokens_per_batch=tokens)
        batch = preflight.longest_batch(trainer, ONE_STAGE)
        found[tokens] = preflight.measure(trainer, batch)
    assert found[200].rows == found[None].rows == 16
    assert found[200].positions <= 200 < found[None].positions
    assert found[200].peak_bytes < found[None].peak_bytes


def test_out_of_memory_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path / "run")

    def fail(*args: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.objective.register_forward_pre_hook(fail)
    batch = preflight.longest_batch(trainer, ONE_STAGE)
    with pytest.raises(
        ValueError, match=r"\(24 rows, \d+ positions at once\) does not fit .* lower training.tokens"
    ):
        preflight.measure(trainer, batch)
    assert all(weight.grad is None for weight in trainer.objective.parameters())
    # Not even the weights of an adapter's backbone.
    monkeypatch.setattr(room, "memory_of", lambda device: 2**20)
    with pytest.raises(
        ValueError, match=r"device's memory: weights, moments and gradients alone take .*training.fsdp"
    ):
        preflight.measure(trainer, batch)


def test_a_run_warns_where_the_optimiser_will_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch fits without AdamW's moments, which come with the first update."""
    monkeypatch.setattr(room, "memory_of", lambda device: 12 * 2**20)
    lm, method = made(lora=None)
    settings = TrainingConfig(report_to="none", max_steps=1, per_device_train_batch_size=1)
    train(lm, method, EXAMPLES, settings, tmp_path / "run")
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert (
        "of 12.0 MiB: weights, moments and gradients alone take 12.9 MiB: train an adapter (model.lora)"
        in said
    )


# Nothing of it stays


@pytest.mark.parametrize("name", ["cot", "colar"])
def test_a_run_is_the_same_without_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: random numbers are as they were."""
    settings = TrainingConfig(
        report_to="none", max_steps=3, per_device_train_batch_size=4, logging_steps=1, save_steps=100
    )
    results = []
    for turn in ("with", "without"):
        if turn == "without":
            monkeypatch.setattr(run.preflight, "before_training", lambda *args: None)
        lm, method = made(name)
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
    assert " GiB; an epoch takes about " in said


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
    assert said.count(" outputs took ") == 1
    monkeypatch.setattr(run.preflight, "before_training", lambda *args: None)
    plain = Sampled(tmp_path / "without")
    assert checked.generations == plain.generations
    assert checked.curve == plain.curve
    for name, value in checked.weights.items():
        assert torch.equal(value, plain.weights[name]), name


# Hours and stages


def test_the_last_stage_begins_where_its_first_update_is() -> None:
    for per_epoch, epochs in ((10, 12), (7, 10), (1, 4), (10, 2)):
        plan = Curriculum(COCONUT, per_epoch, per_epoch * epochs)
        by_hand = next(step for step in range(per_epoch * epochs) if plan.ends_with(step + 1))
        assert plan.last_stage_begins() == by_hand
    assert Curriculum(COCONUT, 10, 120).last_stage_begins() == 90
    assert Curriculum(registry.build("cot", {}), 10, 120).last_stage_begins() == 0


@pytest.mark.parametrize(
    ("seconds", "hours", "warns"),
    [(4799, 12, False), (4801, 12, True), (4801, None, False)],
)
def test_hours_that_end_before_the_last_stage(seconds: float, hours: float | None, warns: bool) -> None:
    """The last stage begins at epoch 9: 12 hours are 4,800 seconds an epoch."""
    curriculum = Curriculum(COCONUT, 10, 120)
    stages = stages_of(curriculum)
    problem = preflight.too_few_hours(curriculum, Pace(stages, [seconds] * len(stages)), hours)
    assert (problem is not None) == warns
    if warns:
        assert problem is not None
        assert "begins at epoch 9: nothing would be published" in problem


CLOCKS: list[tuple[float, str]] = [
    (0.247, "0.25 s"),
    (6.04, "6 s"),
    (59, "59 s"),
    (90, "1.5 min"),
    (9000, "2.5 h"),
]


@pytest.mark.parametrize(("seconds", "text"), CLOCKS)
def test_seconds_as_a_person_says_them(seconds: float, text: str) -> None:
    assert preflight.clock(seconds) == text
