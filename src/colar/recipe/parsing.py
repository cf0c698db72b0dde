"""Parsing of a YAML file and dotted overrides into recipes; a ValueError says what is wrong with them.

A recipe may have stages, each a run of its own that starts from the weights of the one before:

    output: runs/mine
    model: {backbone: smollm2-135m}
    data: {source: gsm8k-aug}
    stages:
      cot:                          # runs/mine/cot, from the backbone
        method: {name: cot}
      colar:                        # runs/mine/colar, from runs/mine/cot/best
        method: {name: colar}
        training: {learning_rate: 1.0e-3}

A stage has the keys beside `stages`, and its own laid over them. On the command line `--key value` applies to all
stages, `--stages.colar.key value` to one; the keys of the initial model (`--model.backbone`, `--model.init_from`,
`--template`) apply to the first stage that runs.
"""

import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colar import processes, recipes, yaml_settings
from colar.checks import check_known
from colar.methods.rollouts import require_scorable
from colar.recipe.schema import Recipe, Stage, build_method
from colar.training.grpo import rewards

NO_OUTPUT = "output is missing: name the run's folder"
Override = tuple[str, str]
"""A dotted key and its value, as on the command line."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*")
"""A stage's name, and that of its folder. No hyphen, because the command line takes `-` for `_` in options."""
OF_THE_RECIPE = ("output", "stages", "base")
"""Keys of the whole recipe, which a stage must not have."""
START = ("model.backbone", "model.init_from", "template")
"""Keys of the command line for the first stage alone, because the others start from the stage before them."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, or the shipped one of that name, with `--dotted.key value` overrides.

    All that can be checked without data or weights is checked here. ValueError names the key and what it must be.
    """
    stages = load_stages(path, overrides)
    if stages[0].name:
        raise ValueError(f"{path} has stages, each a run of its own: load_stages reads them")
    return stages[0].recipe


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), only: Sequence[str] | None = None
) -> list[Stage]:
    """The stages of a recipe in order, or those that `only` names; a recipe without stages is one.

    All that can be checked without data or weights is checked here, in every stage returned. ValueError names the
    stage, the key, and what it must be.
    """
    tree = _read(path)
    pairs = parse_overrides(overrides)
    if "stages" not in tree:
        if only:
            raise ValueError(f"--stages {' '.join(only)}: {path} has no stages")
        return [Stage("", _parsed(str(path), tree, pairs))]
    keys_of = _checked_stages(path, tree.pop("stages"))
    by_stage = _overrides_by_stage(pairs, list(keys_of), only)
    output = dict(pairs).get("output", tree.get("output"))
    if not output:
        raise ValueError(f"{path}: {NO_OUTPUT}")
    stages: list[Stage] = []
    before: str | None = None
    for name, own in keys_of.items():
        keys = yaml_settings.laid_over(tree, own)
        keys["output"] = str(Path(output) / name)
        if before is not None and "init_from" not in (own.get("model") or {}):
            keys = yaml_settings.laid_over(keys, {"model": {"init_from": f"{before}/best"}})
        before = keys["output"]
        if name not in by_stage:
            continue
        where = f"{path}, stage {name}"
        try:
            stages.append(Stage(name, _parsed(where, keys, by_stage[name])))
        except ValueError as error:
            # The error of an override does not name the stage.
            raise ValueError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
    return stages


def override_stages(
    stages: dict[str, dict[str, Any]], overrides: Sequence[str], only: Sequence[str] | None = None
) -> None:
    """Set the overrides of a command line in the keys of the stages that they apply to: all, or those in `only`."""
    for name, pairs in _overrides_by_stage(parse_overrides(overrides), list(stages), only).items():
        for pair in pairs:
            stages[name] = _overridden(stages[name], *pair)


def keys_of_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The tree of keys that overrides set, in any stage. ValueError for unknown ones, or values of another type."""
    tree: dict[str, Any] = {}
    for key, text in parse_overrides(overrides):
        tree = _overridden(tree, re.sub(r"^stages\.[^.]*\.", "", key), text)
    return tree


def _overrides_by_stage(
    pairs: Sequence[Override], names: Sequence[str], only: Sequence[str] | None
) -> dict[str, list[Override]]:
    """The overrides of each stage, or of each in `only`, by its name."""
    check_known("--stages", only or [], names)
    check_known("--stages", [key.split(".")[1] for key, _ in pairs if key.startswith("stages.")], names)
    by_stage: dict[str, list[Override]] = {}
    for name in names:
        if only and name not in only:
            continue
        left_out = ("output", "stages", *START) if by_stage else ("output", "stages")
        prefix = f"stages.{name}."
        for_all = [pair for pair in pairs if not _below(pair[0], left_out)]
        own = [(key.removeprefix(prefix), text) for key, text in pairs if key.startswith(prefix)]
        by_stage[name] = for_all + own
    return by_stage


def _read(path: str | Path) -> dict[str, Any]:
    """The keys of a file laid over those of its bases. An error names the file that has the wrong key."""
    tree: dict[str, Any] = {}
    for layer, own in reversed(yaml_settings.yaml_layers(recipes.find(path)).items()):
        beside_stages = {key: value for key, value in own.items() if key != "stages"}
        yaml_settings.check(str(layer), Recipe, beside_stages)
        tree = yaml_settings.laid_over(tree, own)
    return tree


def _checked_stages(path: str | Path, stages: Any) -> dict[str, dict[str, Any]]:
    """The checked stages of a file. ValueError for a wrong name, a wrong key, and a stage without keys and values."""
    if not isinstance(stages, dict) or not stages:
        raise ValueError(f"{path}: stages must name each stage with its keys, got {stages!r}")
    for name, own in stages.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{path}: stages.{name}: a stage's name is letters, digits and _")
        if not isinstance(own, dict):
            raise ValueError(f"{path}: stages.{name} must hold keys and values, got {own!r}")
        for key in OF_THE_RECIPE:
            if key in own:
                raise ValueError(f"{path}: stages.{name}.{key}: a stage has no {key} of its own")
        yaml_settings.check(f"{path}, stage {name}", Recipe, own)
    return stages


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """The overrides of a command line, `--key value` or `--key=value`."""
    pairs = []
    rest = list(words)
    while rest:
        option, equals, text = rest.pop(0).partition("=")
        if not option.startswith("--"):
            raise ValueError(
                f"expected an override --key value, got {option!r} (quote a value that has spaces)"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{option} needs a value")
            text = rest.pop(0)
        first, *inner = option.removeprefix("--").split(".")
        if first == "stages" and len(inner) < 2:
            raise ValueError(f"{option} {text}: expected --stages.STAGE.KEY value")
        if first == "stages" and inner[1] in OF_THE_RECIPE:
            raise ValueError(f"{option}: a stage has no {inner[1]} of its own")
        pairs.append((option.removeprefix("--"), text))
    return pairs


def _parsed(where: str, tree: dict[str, Any], overrides: Sequence[Override]) -> Recipe:
    """The recipe of a tree of keys, called `where` in errors."""
    for key, text in overrides:
        tree = _overridden(tree, key, text)
    try:
        if "output" not in tree:
            raise ValueError(NO_OUTPUT)
        recipe = yaml_settings.built(Recipe, tree)
        method = build_method(recipe)
        if recipe.grpo is None:
            recipe.training.check_method(method)
            recipe.training.check_validation(recipe.data.validation_size != 0)
        else:
            if recipe.model.init_from is None:
                raise ValueError("grpo needs model.init_from: a checkpoint that has learnt to think")
            recipe.grpo.plan(recipe.training, processes.launched())
            rewards.by_name(recipe.grpo.reward_funcs)
            require_scorable(method)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    _check_unused(recipe, overrides)
    return recipe


def _overridden(tree: dict[str, Any], key: str, text: str) -> dict[str, Any]:
    """The tree with one key of the command line set."""
    path = key.split(".")
    hint: Any = Recipe
    for name in path:
        # Below a plain mapping (method, data.options) there are no sections.
        section = yaml_settings.section_of(hint)
        hint = typing.get_type_hints(section).get(name) if section else None
    where = f"--{key} {text}".rstrip()
    value: Any = text
    if hint == str | None and text == "null":
        value = None
    # The shell has removed a text's quotes, so 12 for a field of text is the text "12".
    elif hint not in (str, str | None):
        value = yaml_settings.read_yaml(where, text)
    yaml_settings.check(where, Recipe, _with_key({}, path, value))
    return _with_key(tree, path, value, merge=yaml_settings.section_of(hint) is not None)


def _with_key(tree: dict[str, Any], path: Sequence[str], value: Any, merge: bool = False) -> dict[str, Any]:
    """The tree with a value at a path. With `merge` the value is a section, laid over the existing one."""
    first, *rest = path
    before = tree.get(first)
    if rest:
        value = _with_key(before if isinstance(before, dict) else {}, rest, value, merge)
    elif merge:
        value = yaml_settings.laid_over(before, value)
    return {**tree, first: value}


def _check_unused(recipe: Recipe, overrides: Sequence[Override]) -> None:
    """Reject a backbone or layout of the command line that has no effect. A file may inherit one from its base."""
    start = recipe.model.init_from
    if start is None:
        return
    for key, _ in overrides:
        if key == "model.backbone":
            raise ValueError(
                f"--model.backbone has no effect beside model.init_from ({start}), which has a backbone of its own: "
                "leave it out, or start from the backbone with --model.init_from null"
            )
        if _below(key, ("template",)):
            raise ValueError(
                f"--{key} has no effect beside model.init_from ({start}), which has a layout of its own: leave it out"
            )


def _below(key: str, sections: Sequence[str]) -> bool:
    """True if a key is one of `sections`, or lies in one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)
