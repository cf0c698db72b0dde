"""A run that replaces another one (`--no_resume`): what fails or is killed on the way mixes with nothing."""

import os
import shutil
import sys
from dataclasses import replace

import pytest

from colar import files, recipe
from colar.recipe.schema import defaults, to_json
from colar.training.run_folder import RunFolder

SMALL = """
output: {folder}/run
data: {{train_size: 6, validation_size: 2, options: {{steps: [2, 2]}}}}
method: {{name: colar, compression_factors: [2], alpha: 0.02}}
training: {{max_steps: 2, save_steps: 1, per_device_train_batch_size: 4, report_to: none}}
validation: {{page_size: 0, limits: {{max_latents: 4, max_completion_length: 3}}}}
"""
STAGES = """
stages:
  fast: {}
  rl: {grpo: {num_generations: 4, max_latents: 4, max_completion_length: 3}}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(SMALL.format(folder=tmp_path))
    return path


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def resume_points(folder):
    return [path.name for path in RunFolder(folder).resume_states() if (path / "whole").exists()]


def test_a_run_that_is_not_replaced_after_all_is_left_as_it_was(path, tmp_path, monkeypatch):
    """`--no_resume` with other values, of SFT and of reinforcement, that ends before its first step."""
    path.write_text(path.read_text() + STAGES)
    recipe.run_stages(recipe.load_stages(path))
    made = contents(tmp_path / "run")
    for stage, change in (("fast", ["method.alpha", "0.05"]), ("rl", ["training.seed", "5"])):
        key, value = change
        other = [f"--stages.{stage}.{key}", value]
        # A mistake in another key.
        typo = recipe.load_stages(path, [*other, "--data.source", "typo.jsonl"], [stage])
        with pytest.raises(ValueError, match="typo"):
            recipe.run_stages(typo, resume=False)
        assert contents(tmp_path / "run") == made

        # Stopped while the model is loaded: without --no_resume the same command must not go on from old weights.
        replaced = recipe.load_stages(path, other, [stage])
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules["colar.recipe.run"], "load_model", stop)
            with pytest.raises(KeyboardInterrupt):
                recipe.run_stages(replaced, resume=False)
        assert contents(tmp_path / "run") == made
        with pytest.raises(ValueError, match=f"holds another run .*{key}"):
            recipe.run_stages(replaced)
    assert contents(tmp_path / "run") == made
    # The original command finds its run finished.
    recipe.run_stages(recipe.load_stages(path))
    assert contents(tmp_path / "run") == made


def stop(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_run_that_is_killed_while_it_replaces_another_mixes_with_none(path, tmp_path, monkeypatch):
    """At each removal and at the write of the recipe: what is left belongs to the recipe that is left."""
    old = recipe.load(path)
    new = replace(old, method={**old.method, "alpha": 0.05})
    recipe.run(old)
    whole = shutil.copytree(tmp_path / "run", tmp_path / "whole")
    folder = RunFolder(tmp_path / "run")
    left = moment = 0

    def killed_at(real):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return real(*args, **kwargs)

        return call

    for module, name in ((os, "unlink"), (os, "rmdir"), (files, "write_json")):
        monkeypatch.setattr(module, name, killed_at(getattr(module, name)))
    while True:
        left = 10_000
        shutil.rmtree(folder.path)
        shutil.copytree(whole, folder.path)
        left = moment
        try:
            folder.begin(to_json(new), resume=False)
            break
        except KeyboardInterrupt:
            moment += 1
        left = 10_000
        assert not folder.has_finished(to_json(new), defaults())
        assert folder.has_finished(to_json(old), defaults()) == (moment == 1)
        if resume_points(folder.path) or folder.best.exists():
            with pytest.raises(ValueError, match=r"holds another run \(method.alpha was 0.02, now 0.05\)"):
                folder.check_recipe(to_json(new), defaults())
        folder.check_recipe(to_json(old), defaults())
        # Half of it is gone: the old run goes on from what is left.
        if resume_points(folder.path) == ["checkpoint-1"]:
            assert recipe.run(old).steps == 2
    assert moment > 20
    assert contents(folder.path).keys() == {"recipe.json"}
    assert files.read_json(folder.recipe)["method"]["alpha"] == 0.05
