"""Training by several processes: the run of one process, its validation, and what is left when one of them is killed."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_grpo as reinforced
import test_training as supervised
import torch
from accelerate import PartialState
from launch import Group, Outcome, together
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from colar import processes
from colar.checks import NonFiniteError
from colar.data.arithmetic import ArithmeticConfig, generate
from colar.evaluation import evaluate
from colar.evaluation.evaluate import AnswerSettings
from colar.methods import registry
from colar.methods.colar import Colar, ColarConfig
from colar.training.objective import count_rows, mark_copies
from colar.training.trainer import LatentTrainer

QUESTIONS = list(generate(ArithmeticConfig(), "test", 3, seed=0))
LIMITS = AnswerSettings(max_latents=3, max_completion_length=2, batch_size=4)
SIZES = (
    "loss",
    "ce",
    "latent",
    "grad_norm",
    "reward",
    "completions/mean_length",
    "latents/mean_length",
    "entropy",
)
"""What training logs that another division of the work must not change."""


def validate(lm: Any, method: Any) -> dict[str, float]:
    """By generation; the weights are what they were before it, bit for bit. `rank` differs: the main process's counts."""
    found = evaluate.validate(lm, method, QUESTIONS, [registry.make_params(method, {})], "sampled", LIMITS)
    return {**found, "rank": float(os.environ["RANK"])}


def begin(dies: tuple[int, int] | None) -> None:
    """Join the others; `dies` is the process that is killed, and its update."""
    processes.join(120)
    if dies is None or dies[0] != PartialState().process_index:
        return
    step, updates = LatentTrainer.training_step, itertools.count(1)

    def killed(*arguments: Any, **named: Any) -> Any:
        if next(updates) == dies[1]:
            os.kill(os.getpid(), 9)
        return step(*arguments, **named)

    LatentTrainer.training_step = killed  # type: ignore[method-assign]  # this process ends here


def sft(folder: Path, lora: bool, dies: tuple[int, int] | None, config: dict[str, Any]) -> Any:
    """A run in `folder`. Returns its curve, its validations and its weights at the end."""
    begin(dies)
    settings = supervised.LoraSettings(r=4, lora_alpha=8) if lora else None
    lm, result = supervised.run(
        folder,
        Colar(ColarConfig()),
        settings,
        validate=validate,
        held_out=QUESTIONS,
        **{**supervised.LONG, **config},
    )
    return ended(lm, result)


def grpo(folder: Path, lora: bool, dies: tuple[int, int] | None, config: dict[str, Any]) -> Any:
    """The same by reinforcement."""
    begin(dies)
    config = dict(config)
    settings = reinforced.grpo(**config.pop("grpo", {}))
    lm, result = reinforced.run(
        folder, settings, lora=reinforced.LORA if lora else None, validate=validate, **config
    )
    return ended(lm, result)


def ended(lm: Any, result: Any) -> dict[str, Any]:
    rows = [row for row in result.history if "loss" in row]
    found = {
        "curve": [{name: row[name] for name in ("step", *SIZES) if name in row} for row in rows],
        "validations": [
            {name: value for name, value in row.items() if name.startswith("eval_") and "seconds" not in name}
            for row in result.history
            if "eval_accuracy" in row
        ],
        "metrics": result.metrics,
        "weights": {name: value.detach().clone() for name, value in lm.state_dict().items()},
    }
    processes.leave()
    return found


def assert_like(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same run but for the order of sums."""
    assert len(found["curve"]) == len(wanted["curve"]) > 3
    for mine, theirs in zip(found["curve"], wanted["curve"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    for mine, theirs in zip(found["validations"], wanted["validations"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-3)
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-3, atol=2e-4, msg=name)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same run, bit for bit."""
    assert found["curve"] == wanted["curve"]
    assert found["validations"] == wanted["validations"]
    for name, value in wanted["weights"].items():
        assert torch.equal(found["weights"][name], value), name


class Case:
    """A kind of run: how one process makes it, and how two do."""

    def __init__(
        self, call: Callable[..., Any], lora: bool, saved: int, one: dict[str, Any], two: dict[str, Any]
    ) -> None:
        self.call = call
        self.lora = lora
        self.saved = saved
        """The last checkpoint before the fourth update."""
        self.one = one
        self.two = two

    def run(self, folder: Path, n: int) -> list[Any]:
        """What each of N processes returns."""
        config = self.one if n == 1 else self.two
        return together(n, folder / "group", self.call, folder, self.lora, None, config)

    def killed(self, folder: Path, dies: tuple[int, int]) -> list[Outcome]:
        """What becomes of two processes one of which is killed."""
        return Group(2, folder / "group", self.call, folder, self.lora, dies, self.two).wait()


REINFORCED = {"max_steps": 4, "save_steps": 3, "eval_steps": 2, "grpo": {"num_iterations": 2}}
CASES = {
    # With a limit of tokens each process takes its rows in parts, as many as its own lengths require.
    "sft": Case(
        sft,
        True,
        2,
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 4, "tokens_per_batch": 100},
    ),
    "grpo": Case(
        grpo,
        False,
        3,
        {**REINFORCED, "gradient_accumulation_steps": 2},
        {**REINFORCED, "gradient_accumulation_steps": 1},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def whole(case: Case, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes return that nothing stops."""
    return case.run(tmp_path_factory.mktemp("whole"), 2)


def test_two_processes_are_one(tmp_path: Path, case: Case, whole: list[Any]) -> None:
    """The curve with the ragged last updates, validation and the published weights, in both processes."""
    (alone,) = case.run(tmp_path, 1)
    assert_equal(whole[1], whole[0])
    assert_like(whole[0], alone)
    assert len(alone["validations"]) >= 2
    assert whole[1]["metrics"]["rank"] == 0


def test_a_killed_process_ends_all_and_the_run_goes_on(tmp_path: Path, case: Case, whole: list[Any]) -> None:
    """Killed in its fourth update: after the first epoch of two, and in the middle of the second generation."""
    killed, other = reversed(case.killed(tmp_path, (1, 4)))
    assert killed.code == -9
    assert other.code == 1, "it does not go on alone"
    assert "Connection" in other.stderr
    steps = [folder.name for folder in (tmp_path / "checkpoints").iterdir()]
    assert f"checkpoint-{case.saved}" in steps, steps
    for mine, theirs in zip(case.run(tmp_path, 2), whole, strict=True):
        assert_equal(mine, theirs)


def test_validation_folds_the_adapter_in_and_leaves_the_weights(tmp_path: Path) -> None:
    """Bit for bit: subtracting what was added would leave a rounding error, and a larger one each time."""
    method = Colar(ColarConfig())
    lm = supervised.build(method, supervised.LORA)
    for parameter in lm.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    config = supervised.TrainingConfig(**supervised.QUICK)
    trainer = supervised.make_trainer(lm, method, config, tmp_path)
    before = supervised.weights(lm)
    seen = []

    def watched(inside: Any, _: Any) -> dict[str, float]:
        layers = [module for module in inside.modules() if isinstance(module, BaseTunerLayer)]
        seen.append(all(layer.merged for layer in layers))
        base = layers[0].get_base_layer().weight
        seen.append(not torch.equal(base, before[name_of(base, inside)]))
        return {"accuracy": 0.5}

    trainer.validate = watched
    trainer.evaluate()
    assert seen == [True, True]
    for name, value in supervised.weights(lm).items():
        assert torch.equal(value, before[name]), name


def breaks_alone(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """The error and the weights of a process; in the second one a term is infinite once, and no gradient is."""
    processes.join(120)
    infinite = PartialState().process_index == 1
    # The third batch, the one that is measured before the first update included.
    method = supervised.BreaksOnce(ColarConfig(), math.inf if infinite else 0.0)
    lm = supervised.build(method)
    with pytest.raises(NonFiniteError) as error:
        supervised.run(folder, method, lm=lm, max_steps=4, logging_steps=4, per_device_train_batch_size=5)
    return str(error.value), supervised.weights(lm)


def test_a_term_that_is_infinite_in_one_process_stops_both(tmp_path: Path) -> None:
    (error, weights), (other_error, other_weights) = together(
        2, tmp_path / "group", breaks_alone, tmp_path / "run"
    )
    assert error == other_error
    assert "step 2: " in error
    for name, value in weights.items():
        assert torch.equal(value, other_weights[name]), name


def name_of(weight: Tensor, lm: Any) -> str:
    return next(name for name, value in lm.named_parameters() if value is weight)


def test_copies_are_marked() -> None:
    """Ten rows in batches of two for three processes: the third has copies alone in the second turn."""
    for process, wanted in enumerate(([None, None], [None, None], [None, [False, False]])):
        held = [{"rows": torch.zeros(2)}, {"rows": torch.zeros(2)}]
        mark_copies(held, 0, 2, process, 3, 10)
        found = [batch["counted"].tolist() if "counted" in batch else None for batch in held]
        assert found == wanted
    ragged = [{"rows": torch.zeros(2)}]
    mark_copies(ragged, 1, 2, 1, 3, 9)
    assert ragged[0]["counted"].tolist() == [True, False]
    assert count_rows(ragged[0]) == 1
