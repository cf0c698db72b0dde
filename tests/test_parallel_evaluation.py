"""Evaluation and validation by several processes: what one process finds, also after a kill."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from launch import Group, together

from colar import processes
from colar.data.arithmetic import ArithmeticConfig, generate
from colar.evaluation import evaluate
from colar.evaluation.controls import evaluate_controls
from colar.evaluation.evaluate import AnswerSettings, EvaluatedModel, GridPoint
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM

LIMITS = AnswerSettings(max_latents=5, max_completion_length=3, batch_size=4)
EXAMPLES = list(generate(ArithmeticConfig(), "test", 11, seed=0))
DATASETS = {"a": EXAMPLES, "b": EXAMPLES[:5]}


def model() -> EvaluatedModel:
    lm = LatentLM.from_backbone(backbones.load("tiny"))
    method = registry.build("colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, EXAMPLES)
    return EvaluatedModel("toy", lm, method, train_seed=3)


def grid(evaluated: EvaluatedModel) -> list[GridPoint]:
    params = [registry.make_params(evaluated.method, {"compression_factor": c}) for c in (1, 2)]
    return evaluate.make_grid(evaluated, DATASETS, params, ["greedy", "sampled"], [4, 5])


def answer_all(folder: Path, dies: tuple[int, int] | None = None) -> int:
    """Evaluate in `folder`; `dies` is (rank, answer at which it is killed)."""
    processes.join(120)
    folder.mkdir(exist_ok=True)
    evaluated = model()
    if dies is not None and PartialState().process_index == dies[0]:
        make_record = evaluate.make_record
        answered = Counter[str]()

        def killed(*arguments: Any) -> dict[str, Any]:
            answered["all"] += 1
            if answered["all"] == dies[1]:
                os.kill(os.getpid(), 9)
            return make_record(*arguments)

        evaluate.make_record = killed  # this process ends here
    found = evaluate.evaluate(grid(evaluated), DATASETS, folder / "records.jsonl", LIMITS)
    processes.leave()
    return found


def measure_all(folder: Path) -> tuple[dict[str, float], int]:
    """Validation, controls in a folder of their own, and the records. The order: `answer_all` leaves the group."""
    processes.join(120)
    folder.mkdir(exist_ok=True)
    (folder / "controls").mkdir(exist_ok=True)
    evaluated = model()
    params = [registry.make_params(evaluated.method, {"compression_factor": c}) for c in (1, 2)]
    metrics = evaluate.validate(evaluated.lm, evaluated.method, EXAMPLES, params, "sampled", LIMITS)
    records = folder / "controls" / "records.jsonl"
    evaluate_controls(grid(evaluated)[:1], ["zeroed", "shuffled"], DATASETS, records, LIMITS)
    return metrics, answer_all(folder)


def lines(folder: Path) -> list[str]:
    """The records, byte for byte but for their seconds, in any order."""
    found = []
    for line in (folder / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        record["seconds"] = 0
        found.append(json.dumps(record))
    return sorted(found)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """The folder and the validation's metrics of one process."""
    folder = tmp_path_factory.mktemp("alone")
    ((metrics, _),) = together(1, folder / "group", measure_all, folder)
    return folder, metrics


@pytest.fixture(scope="module")
def alone(measured: tuple[Path, dict[str, float]]) -> list[str]:
    found = lines(measured[0])
    # Greedy once, sampled with two seeds.
    assert len(found) == 2 * 3 * (11 + 5)
    return found


def test_three_processes_find_what_one_finds(
    tmp_path: Path, measured: tuple[Path, dict[str, float]], alone: list[str]
) -> None:
    folder, metrics = measured
    assert together(3, tmp_path / "group", measure_all, tmp_path) == [(metrics, len(alone))] * 3
    assert metrics["length"] > 0
    assert lines(tmp_path) == alone
    assert lines(tmp_path / "controls") == lines(folder / "controls")
    assert len(lines(folder / "controls")) == 2 * 11


def test_a_killed_evaluation_goes_on_with_any_number_of_processes(tmp_path: Path, alone: list[str]) -> None:
    group = Group(3, tmp_path / "group", answer_all, tmp_path, (1, 14))
    outcomes = group.wait()
    assert outcomes[1].code == -9
    assert outcomes[0].code == outcomes[2].code == 1, "they end, too"
    assert "Connection" in outcomes[0].stderr
    # All but the last round of answers is there, and is not asked again.
    kept = len((tmp_path / "records.jsonl").read_text().splitlines())
    assert kept >= 24
    assert together(2, tmp_path / "again", answer_all, tmp_path) == [len(alone) - kept] * 2
    assert lines(tmp_path) == alone
