"""Stages: one recipe that trains one model several times, each stage from the weights of the one before.

    output: runs/mine
    model: {backbone: smollm2-135m}
    data: {source: gsm8k-aug}
    stages:
      cot:                          # runs/mine/cot, from the backbone
        method: {name: cot}
      colar:                        # runs/mine/colar, from runs/mine/cot/best
        method: {name: colar}
        training: {learning_rate: 1.0e-3}

A stage is a recipe of its own: the keys beside `stages`, and its own laid over them. On the command line `--key value`
is for all stages, `--stages.colar.key value` for one; what the model starts from (`--model.backbone`,
`--model.init_from`, `--template`) is for the first stage that runs.

A stage that is finished is skipped, and one that was stopped resumes. A finished stage that began from other weights
than its start has now is an error.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from colar import files, processes, progress, recipes, yaml_files
from colar.checks import check_known
from colar.recipe.inputs import fingerprint
from colar.recipe.parsing import load, parse
from colar.recipe.run import run
from colar.recipe.schema import Recipe, to_json
from colar.training.run_folder import RunFolder

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A stage's name is also that of its folder."""
START = ("--model.backbone", "--model.init_from", "--template")
"""Options for the first stage alone: the others start from the stage before them."""


@dataclass(frozen=True)
class Stage:
    """One run of a recipe."""

    name: str
    """"" in a recipe without stages."""
    recipe: Recipe


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), only: Sequence[str] | None = None
) -> list[Stage]:
    """The stages of a recipe, in their order; a recipe without stages is one. `only` names those that are wanted.

    All that can be checked without data or weights is checked here, in every stage that is wanted. ValueError names
    the stage, the key, and what it must be.
    """
    tree = yaml_files.read_yaml(yaml_files.layered_yaml(recipes.find(path)))
    if "stages" not in tree:
        if only:
            raise ValueError(f"--stages {' '.join(only)}: {path} has no stages")
        return [Stage("", load(path, list(overrides)))]
    stages = _checked(path, tree.pop("stages"))
    check_known("--stages", only or [], list(stages))
    shared = list(_shared(overrides, list(stages)))
    output = _last_value(shared, "--output") or tree.get("output")
    found: list[Stage] = []
    before: str | None = None
    for name, own in stages.items():
        keys = yaml_files.laid_over(tree, own)
        keys["output"] = f"{output}/{name}"
        if before is not None and "init_from" not in (own.get("model") or {}):
            keys = yaml_files.laid_over(keys, {"model": {"init_from": f"{before}/best"}})
        before = keys["output"]
        if only and name not in only:
            continue
        words = [*_without(shared, ("--output", *(START if found else ()))), *_of_stage(overrides, name)]
        where = f"{path}, stage {name}"
        try:
            recipe = parse(where, yaml_files.to_yaml(keys), words)
        except ValueError as error:
            # Checks across sections do not know which stage it is.
            raise ValueError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
        found.append(Stage(name, recipe))
    return found


def run_stages(stages: Sequence[Stage], resume: bool = True) -> Path:
    """Run stages one after another, those that are finished excepted. Returns the last one's published checkpoint."""
    for stage in stages:
        processes.join(stage.recipe.training.ddp_timeout)
        best = RunFolder(stage.recipe.output).best
        if stage.name and resume and processes.from_main(partial(_is_finished, stage.recipe)):
            progress.say(f"stage {stage.name}: finished, {best}")
            continue
        if stage.name:
            progress.say(f"stage {stage.name}: {stage.recipe.output}")
        best = run(stage.recipe, resume).best
        # The model of one stage is gone before the next one is loaded.
        gc.collect()
    return best


def _is_finished(recipe: Recipe) -> bool:
    """Whether a stage's run has ended as the recipe says. ValueError where it began from weights that have changed."""
    folder = RunFolder(recipe.output)
    if not (folder.finished.exists() and folder.best.exists()):
        return False
    asked, trained = to_json(recipe), files.read_json(folder.path / "recipe.json")
    # The folder may have been named in other words.
    if asked | {"output": ""} != trained | {"output": ""}:
        return False
    start = recipe.model.init_from
    known = files.read_json(folder.path / "inputs.json").get("model.init_from")
    if start is not None and known is not None and fingerprint(start) not in (None, known):
        raise ValueError(
            f"{folder.path} was trained from other weights than {start} holds now: give another --output, or train "
            "this stage again with --no_resume"
        )
    return True


def _checked(path: str | Path, stages: Any) -> dict[str, dict[str, Any]]:
    """The stages of a file. ValueError for names that are no names of folders, and for what is no keys and values."""
    if not isinstance(stages, dict) or not stages:
        raise ValueError(f"{path}: stages must name each stage with its keys, got {stages!r}")
    for name, keys in stages.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{path}: stages.{name}: a stage's name is letters, digits, - and _")
        if not isinstance(keys, dict):
            raise ValueError(f"{path}: stages.{name} must hold keys and values, got {keys!r}")
        for key in ("output", "stages", "base"):
            if key in keys:
                raise ValueError(f"{path}: stages.{name}.{key}: a stage has no {key} of its own")
    return stages


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option of a command line, and its words: `--key value` or `--key=value`."""
    pair: list[str] = []
    for word in words:
        if word.startswith("--") and pair:
            yield pair[0].partition("=")[0], pair
            pair = []
        pair.append(word)
    if pair:
        yield pair[0].partition("=")[0], pair


def _shared(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """The words for all stages. ValueError for a stage that there is not."""
    for option, pair in _pairs(words):
        if not option.startswith("--stages."):
            yield from pair
            continue
        check_known("--stages", [option.removeprefix("--stages.").partition(".")[0]], names)


def _of_stage(words: Sequence[str], name: str) -> list[str]:
    """The words for one stage, as that stage's own options."""
    prefix = f"--stages.{name}."
    found = []
    for option, pair in _pairs(words):
        if option.startswith(prefix):
            found += [f"--{pair[0].removeprefix(prefix)}", *pair[1:]]
    return found


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words but those of some options, and of the keys in them."""
    found: list[str] = []
    for option, pair in _pairs(words):
        if not any(option == left_out or option.startswith(f"{left_out}.") for left_out in options):
            found += pair
    return found


def _last_value(words: Sequence[str], option: str) -> str | None:
    """The value of an option; the last one where it stands twice."""
    value = None
    for name, pair in _pairs(words):
        if name == option:
            value = pair[1] if len(pair) > 1 else pair[0].partition("=")[2]
    return value
