"""A recipe of several stages: each starts from the one before, is skipped when finished and resumed when not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from colar import files, recipe
from colar.cli import main
from colar.recipe.run import run as train

SMALL = """
output: {folder}/run
data: {{train_size: 6, validation_size: 0, options: {{steps: [2, 2]}}}}
training: {{per_device_train_batch_size: 3, max_steps: 2, report_to: none}}
stages:
  cot:
    method: {{name: cot}}
    training: {{learning_rate: 1e-3}}
  fast:
    method: {{name: colar, compression_factors: [1, 2]}}
  faster:
    method: {{name: colar, compression_factors: [1, 2, 5]}}
"""


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    path = tmp_path / "staged.yaml"
    path.write_text(SMALL.format(folder=tmp_path))
    return path


def test_each_stage_is_a_recipe_that_starts_from_the_one_before(staged: Path, tmp_path: Path) -> None:
    cot, fast, faster = recipe.load_stages(
        staged, ["--training.seed", "3", "--stages.fast.training.max_steps=5"]
    )
    assert [stage.name for stage in (cot, fast, faster)] == ["cot", "fast", "faster"]
    assert [stage.recipe.output for stage in (cot, fast)] == [f"{tmp_path}/run/cot", f"{tmp_path}/run/fast"]
    assert cot.recipe.model.init_from is None
    assert fast.recipe.model.init_from == f"{tmp_path}/run/cot/best"
    assert faster.recipe.model.init_from == f"{tmp_path}/run/fast/best"
    assert (cot.recipe.training.learning_rate, fast.recipe.training.learning_rate) == (1e-3, 1e-4)
    assert [stage.recipe.training.max_steps for stage in (cot, fast, faster)] == [2, 5, 2]
    assert {stage.recipe.training.seed for stage in (cot, fast, faster)} == {3}
    assert faster.recipe.method["compression_factors"] == [1, 2, 5]


def test_what_the_model_starts_from_is_for_the_first_stage_that_runs(staged: Path) -> None:
    words = ["--model.init_from", "elsewhere/best", "--output", "there"]
    cot, fast, _ = recipe.load_stages(staged, words)
    assert (cot.recipe.model.init_from, fast.recipe.model.init_from) == ("elsewhere/best", "there/cot/best")
    [fast] = recipe.load_stages(staged, words, only=["fast"])
    assert (fast.recipe.model.init_from, fast.recipe.output) == ("elsewhere/best", "there/fast")
    stages = recipe.load_stages(staged, ["--model.backbone=tiny-digits"])
    assert [stage.recipe.model.backbone for stage in stages] == ["tiny-digits", "tiny", "tiny"]


WRONG: list[tuple[str, list[str], list[str] | None, str]] = [
    ("", [], ["sft"], "--stages .*sft.*cot, fast, faster"),
    ("", ["--stages.fats.training.max_steps", "3"], None, "--stages .*fats.*cot, fast, faster"),
    ("", ["--stages.fast.training.max_step", "3"], None, "stage fast: .*training.max_step"),
    ("", ["--stages.fast.output", "there"], None, "--stages.fast.output: a stage has no output of its own"),
    ("", ["--stages.fast", "there"], None, "--stages.fast there: expected --stages.STAGE.KEY value"),
    ("  cot: [1]\n", [], None, "stages.cot must hold keys and values, got \\[1\\]"),
    ("  cot: {output: there}\n", [], None, "stages.cot.output: a stage has no output of its own"),
    ("  a/b: {method: {name: cot}}\n", [], None, "stages.a/b: a stage's name is letters"),
    # The command line would take --stages.a-b for --stages.a_b.
    ("  a-b: {method: {name: cot}}\n", [], None, "stages.a-b: a stage's name is letters"),
    ("  cot: {training: {learning_rate: }}\n", [], None, "stage cot: training.learning_rate is blank"),
    ("  cot: {method: {name: colar, alpah: 1}}\n", [], None, "stage cot: .*alpah.*alpha"),
    (" []\n", [], None, "stages must name each stage with its keys, got \\[\\]"),
]


@pytest.mark.parametrize(("stages", "words", "only", "message"), WRONG)
def test_mistakes_name_the_stage(
    stages: str, words: list[str], only: list[str] | None, message: str, staged: Path
) -> None:
    if stages:
        head = staged.read_text().partition("stages:")[0]
        staged.write_text(f"{head}stages:{'' if stages.startswith(' [') else chr(10)}{stages}")
    with pytest.raises(ValueError, match=message):
        recipe.load_stages(staged, words, only)


def test_stages_need_a_folder(staged: Path, tmp_path: Path) -> None:
    staged.write_text(staged.read_text().replace(f"output: {tmp_path}/run", ""))
    with pytest.raises(ValueError, match=r"staged\.yaml: output is missing: name the run's folder"):
        recipe.load_stages(staged)
    assert recipe.load_stages(staged, ["--output", "there"])[0].recipe.output == "there/cot"
    # A shell's variable that is not set: the folder that the file names is not meant.
    staged.write_text(SMALL.format(folder=tmp_path))
    with pytest.raises(ValueError, match="output is missing"):
        recipe.load_stages(staged, ["--output", ""])


def test_a_recipe_without_stages_is_one(tmp_path: Path, staged: Path) -> None:
    [only] = recipe.load_stages("tiny/cot", ["--output", "x"])
    assert (only.name, only.recipe) == ("", recipe.load("tiny/cot", ["--output", "x"]))
    with pytest.raises(ValueError, match="--stages cot: tiny/cot has no stages"):
        recipe.load_stages("tiny/cot", [], ["cot"])
    with pytest.raises(ValueError, match="has stages, each a run of its own"):
        recipe.load(staged)


def test_finished_stages_are_skipped_and_stopped_ones_resume(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def counted(made: recipe.Recipe, resume: bool = True) -> Any:
        trained.append(Path(made.output).name)
        # The second stage is stopped once, after it was begun.
        if trained == ["cot", "fast"]:
            raise KeyboardInterrupt
        return train(made, resume)

    monkeypatch.setattr(sys.modules["colar.recipe.run"], "run", counted)
    with pytest.raises(KeyboardInterrupt):
        recipe.run_stages(recipe.load_stages(staged))
    assert recipe.run_stages(recipe.load_stages(staged)) == tmp_path / "run/faster/best"
    assert trained == ["cot", "fast", "fast", "faster"]
    start = files.read_json(tmp_path / "run/faster/recipe.json")["model"]["init_from"]
    assert start == f"{tmp_path}/run/fast/best"
    assert "stage cot: finished" in capsys.readouterr().err

    # All are finished: nothing is trained. With a longer budget the last one goes on.
    assert main(["train", str(staged)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run/faster/best\n"
    assert len(trained) == 4
    recipe.run_stages(recipe.load_stages(staged, ["--stages.faster.training.max_steps", "3"]))
    assert trained[4:] == ["faster"]

    # Longer for all stages would change the weights that later ones began from.
    with pytest.raises(ValueError, match="stage cot has finished, and fast began from its weights"):
        recipe.run_stages(recipe.load_stages(staged, ["--training.max_steps", "9"]))
    assert len(trained) == 5

    # A stage that is trained again leaves those behind it with weights of another start.
    recipe.run_stages(recipe.load_stages(staged, ["--stages.cot.training.max_steps", "4"], ["cot"]))
    with pytest.raises(
        ValueError, match=r"run/fast was trained from other weights than .*run/cot/best holds now"
    ):
        recipe.run_stages(recipe.load_stages(staged, ["--stages.cot.training.max_steps", "4"]))


@pytest.mark.parametrize("output", ["{}/run", "{}/run/", "{}/./run"])
def test_a_check_says_which_stage_it_measured_and_which_it_could_not(
    output: str, staged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("colar.recipe.measure.measure", lambda made: Table("x" * 60, title="tiny on 1 x cpu"))
    assert main(["train", str(staged), "--check", "--output", output.format(staged.parent)]) == 0
    shown = capsys.readouterr()
    assert "stage 1 of 3, cot: tiny on 1 x cpu" in " ".join(shown.out.split())
    assert "not in these times: fast, faster; --check measures them once" in shown.err


def test_a_tracker_that_a_later_stage_lacks_is_named_before_the_first_one(
    staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else name)
    stages = recipe.load_stages(staged, ["--stages.faster.training.report_to", "wandb"])
    with pytest.raises(ValueError, match="training.report_to wandb is not installed"):
        recipe.run_stages(stages)
    assert not Path(stages[0].recipe.output).exists()


@pytest.mark.parametrize("start", ["null", "someone/on-the-hub"])
def test_a_stage_with_a_start_of_its_own_is_checked(
    start: str, staged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("colar.recipe.measure.measure", lambda made: Table("x" * 60, title="measured"))
    words = [str(staged), "--check", "--stages", "cot", "fast", "--stages.fast.model.init_from", start]
    assert main(["train", *words]) == 0
    shown = capsys.readouterr()
    assert "stage 2 of 2, fast: measured" in " ".join(shown.out.split())
    assert "not in these times" not in shown.err
