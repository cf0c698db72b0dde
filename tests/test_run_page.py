"""The page that a run leaves in its folder."""

import pytest
from inspect_data import data_of

from colar import files, recipe
from colar.recipe.schema import defaults, to_json
from colar.training.run_folder import RunFolder

SETTINGS = [
    "--training.num_train_epochs", "2", "--validation.page_size", "3",
]  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"output: {tmp_path}/run\nmethod: {{name: colar}}\n"
        "data: {train_size: 6, validation_size: 4, options: {steps: [2, 2]}}\n"
        "training: {per_device_train_batch_size: 3, learning_rate: 3e-4, report_to: none}\n"
        "validation: {params: [{compression_factor: 2}], limits: {max_latents: 4, max_completion_length: 3}}\n"
    )
    return path


def test_a_run_leaves_a_page(tiny, tmp_path):
    recipe.run(recipe.load(tiny, SETTINGS))
    folder = RunFolder(tmp_path / "run")
    data = data_of(folder.page.read_text(encoding="utf-8"))
    assert len(data["questions"]) == 3
    assert data["systems"] == ["c = 2"]
    numbers = files.read_json(folder.numbers)
    (system,) = numbers["systems"]
    assert system["model"] == "run"
    assert system["diagnosis"]["n"] > 0
    assert list(system["cost"]["outcomes"]) == ["own"]


def test_without_a_size_there_is_none_and_the_run_is_the_same(tiny, tmp_path):
    with_page = recipe.run(recipe.load(tiny, SETTINGS))
    # Its page is no part of what a run is: it may be resumed with another.
    other_page = recipe.load(tiny, [*SETTINGS, "--validation.page_size", "0"])
    RunFolder(tmp_path / "run").check_recipe(to_json(other_page), defaults())
    output = ["--output", f"{tmp_path}/other", "--validation.page_size", "0"]
    without = recipe.run(recipe.load(tiny, [*SETTINGS, *output]))
    assert not RunFolder(tmp_path / "other").page.exists()
    timed = ("seconds", "per_second", "runtime")

    def course(result):
        rows = []
        for row in result.history:
            rows.append({key: value for key, value in row.items() if not any(word in key for word in timed)})
        return rows

    assert course(without) == course(with_page)


def test_a_page_that_fails_loses_no_run(tiny, tmp_path, monkeypatch, capsys):
    # A disk that is full, a backbone that is laid out in a way nobody knows: any error will do.
    def fail(*args, **kwargs):
        raise RuntimeError("no layers found")

    monkeypatch.setattr("colar.look.inspect.inspect_system", fail)
    result = recipe.run(recipe.load(tiny, SETTINGS))
    assert (result.best / "colar.json").exists()
    said = capsys.readouterr().err
    assert "warning: the page could not be made: RuntimeError: no layers found" in said
    assert not RunFolder(tmp_path / "run").page.exists()
