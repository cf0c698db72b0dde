"""From a YAML file and dotted overrides to recipes, or to a ValueError that says what is wrong with them.

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

A stage has the keys beside `stages`, and its own laid over them. On the command line `--key value` is for all stages,
`--stages.colar.key value` for one; what the model starts from (`--model.backbone`, `--model.init_from`, `--template`)
is for the first stage that runs.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from colar import processes, recipes, yaml_files
from colar.checks import INT64, check_known, did_you_mean, is_number, is_whole
from colar.methods import registry
from colar.methods.base import Method
from colar.model.masks import MASKED
from colar.recipe.schema import Recipe
from colar.training.grpo import rewards
from colar.training.grpo.config import GrpoConfig

Override = tuple[str, str]
"""A dotted key and its value, as the command line has them."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A stage's name is also that of its folder."""
START = ("model.backbone", "model.init_from", "template")
"""Keys of the command line for the first stage alone: the others start from the stage before them."""
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "keys and values",
    type(None): "null",
}
"""Python's types as a writer of YAML knows them."""


@dataclass(frozen=True)
class Stage:
    """One run of a recipe."""

    name: str
    """"" in a recipe without stages."""
    recipe: Recipe


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, or the shipped one of that name, with `--dotted.key value` overrides.

    All that can be checked without data or weights is checked here. ValueError names the key and what it must be.
    """
    tree = _read(path)
    if "stages" in tree:
        raise ValueError(f"{path} has stages, each a run of its own: load_stages reads them")
    return _parsed(str(path), tree, _overrides(overrides))


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), only: Sequence[str] | None = None
) -> list[Stage]:
    """The stages of a recipe, in their order; a recipe without stages is one. `only` names those that are wanted.

    All that can be checked without data or weights is checked here, in every stage that is wanted. ValueError names
    the stage, the key, and what it must be.
    """
    tree = _read(path)
    if "stages" not in tree:
        if only:
            raise ValueError(f"--stages {' '.join(only)}: {path} has no stages")
        return [Stage("", load(path, overrides))]
    stages = _checked_stages(path, tree.pop("stages"))
    check_known("--stages", only or [], list(stages))
    given = _overrides(overrides)
    check_known(
        "--stages", [key.split(".")[1] for key, _ in given if key.startswith("stages.")], list(stages)
    )
    shared = [pair for pair in given if not pair[0].startswith("stages.")]
    output = dict(shared).get("output") or tree.get("output")
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
        left_out = ("output", *START) if found else ("output",)
        pairs = [pair for pair in shared if not _below(pair[0], left_out)]
        prefix = f"stages.{name}."
        pairs += [(key.removeprefix(prefix), text) for key, text in given if key.startswith(prefix)]
        where = f"{path}, stage {name}"
        try:
            found.append(Stage(name, _parsed(where, keys, pairs)))
        except ValueError as error:
            # An override's error does not know which stage it is.
            raise ValueError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
    return found


def build_method(recipe: Recipe) -> Method:
    """The recipe's method. ValueError for an unknown name, key or per-request value."""
    config = dict(recipe.method)
    name = str(config.pop("name", ""))
    method = registry.build(name, config)
    # A value that the method lacks fails here, and not at the first validation.
    for values in recipe.validation.params:
        registry.make_params(method, values)
    return method


def check_grpo(recipe: Recipe, grpo: GrpoConfig) -> None:
    """Reject a `grpo` section that the rest of the recipe does not fit."""
    if recipe.model.init_from is None:
        raise ValueError("grpo needs model.init_from: a checkpoint that has learnt to think")
    grpo.plan(recipe.training, processes.launched())
    rewards.named(grpo.reward_funcs)
    # By what the recipe says of its method; the checkpoint, which knows the rest, is looked at by the run.
    grpo.check_method(build_method(recipe))


def all_keys(section: type = Recipe, above: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every key of a recipe: its dotted name, its default (dataclasses.MISSING where it needs a value), its meaning."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    # The text below a field is its meaning.
    meanings = {
        field.target.id: str(text.value.value)
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        inner = _section(hints[field.name])
        if inner is None or field.default is None:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            yield f"{above}{field.name}", default, " ".join(meanings.get(field.name, "").split())
        if inner is not None:
            yield from all_keys(inner, f"{above}{field.name}.")


# --- reading ----------------------------------------------------------------------------------------------


def _read(path: str | Path) -> dict[str, Any]:
    """The keys of a file laid over those of its bases. An error names the file in which the wrong key stands."""
    tree: dict[str, Any] = {}
    layers = yaml_files.yaml_layers(recipes.find(path))
    for own in reversed(layers.values()):
        tree = yaml_files.laid_over(tree, own)
    for layer, own in layers.items():
        _check(str(layer), {key: value for key, value in own.items() if key != "stages"}, tree.get("method"))
    return tree


def _checked_stages(path: str | Path, stages: Any) -> dict[str, dict[str, Any]]:
    """The stages of a file. ValueError for names that are no names of folders, and for what is no keys and values."""
    if not isinstance(stages, dict) or not stages:
        raise ValueError(f"{path}: stages must name each stage with its keys, got {stages!r}")
    for name, own in stages.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{path}: stages.{name}: a stage's name is letters, digits, - and _")
        if not isinstance(own, dict):
            raise ValueError(f"{path}: stages.{name} must hold keys and values, got {own!r}")
        for key in ("output", "stages", "base"):
            if key in own:
                raise ValueError(f"{path}: stages.{name}.{key}: a stage has no {key} of its own")
    return stages


def _overrides(words: Sequence[str]) -> list[Override]:
    """The pairs of a command line, `--key value` or `--key=value`."""
    pairs = []
    rest = list(words)
    while rest:
        option, equals, text = rest.pop(0).partition("=")
        if not option.startswith("--"):
            raise ValueError(
                f"{option!r} is no key of a recipe: overrides are --key value, each value one word"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{option} needs a value")
            text = rest.pop(0)
        pairs.append((option.removeprefix("--"), text))
    return pairs


def _parsed(where: str, tree: dict[str, Any], overrides: Sequence[Override]) -> Recipe:
    """The recipe of a tree of keys, called `where` in errors."""
    tree = copy.deepcopy(tree)
    _check(where, tree, tree.get("method"))
    for key, text in overrides:
        _override(tree, key, text)
    if "output" not in tree:
        raise ValueError(f"{where}: output is missing: name the run's folder")
    try:
        recipe = typing.cast(Recipe, _built(tree, Recipe))
        # Built for its checks alone: a run builds its method in `load_model`.
        build_method(recipe)
        name = recipe.model.attn_implementation
        if recipe.generates and name is not None and name not in MASKED:
            raise ValueError(
                f"model.attn_implementation must be one of {', '.join(MASKED)} or null where the run generates (to "
                f"validate, or for grpo), got {name!r}; with data.validation_size 0 it may be used"
            )
        if recipe.grpo is not None:
            check_grpo(recipe, recipe.grpo)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    _check_unused(recipe, overrides)
    return recipe


def _override(tree: dict[str, Any], key: str, text: str) -> None:
    """Set one key of the command line."""
    names = key.split(".")
    hint: Any = Recipe
    for name in names:
        section = _section(hint)
        hint = typing.get_type_hints(section).get(name) if section else None
    value: Any
    if _kinds(hint) in ((str,), (str, type(None))):
        # A text has lost its quotes to the shell, and stays one.
        value = None if text == "null" and hint is not str else text
    else:
        try:
            value = yaml_files.read_yaml(text)
        except yaml_files.YamlRefused as error:
            raise ValueError(f"--{key} {text}: {str(error).removeprefix('line 1: ')}") from error
        except yaml.YAMLError:
            value = text
    alone: Any = value
    for name in reversed(names):
        alone = {name: alone}
    _check(f"--{key} {text}".rstrip(), alone, tree.get("method"))
    below = tree
    for name in names[:-1]:
        # A section that is null has its defaults below the key that is set.
        below[name] = dict(below.get(name) or {})
        below = below[name]
    # Sections are merged; a mapping of the user's own (data.options) is replaced.
    below[names[-1]] = yaml_files.laid_over(below.get(names[-1]), value) if _section(hint) else value


def _check_unused(recipe: Recipe, overrides: Sequence[Override]) -> None:
    """Reject a backbone or layout of the command line that would not be used. A recipe's file may have it from its
    base."""
    start = recipe.model.init_from
    for key, _ in overrides if start is not None else ():
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
    """True if a key is one of some sections, or stands in one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


# --- the schema -------------------------------------------------------------------------------------------


def _check(where: str, tree: Mapping[str, Any], method: Any) -> None:
    """Reject what the schema does not allow in some keys of a recipe. `method` is the section of the whole recipe."""
    try:
        _check_section(tree, Recipe)
        own = tree.get("method")
        if own:
            if own.get("name", "") is None:
                raise ValueError(
                    f"method.name is blank (null): it must be one of {', '.join(registry.METHODS)}"
                )
            name = own.get("name") or (method.get("name") if isinstance(method, dict) else None)
            if isinstance(name, str) and name in registry.METHODS:
                # Their types are checked by the registry, which names the method's keys.
                _check_blank(own, registry.METHODS[name].Config, "method.")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_section(values: Mapping[str, Any], section: type, above: str = "") -> None:
    """Reject unknown keys, keys without a value, and values of another type than the key's."""
    hints = typing.get_type_hints(section)
    _check_blank(values, section, above)
    for name, value in values.items():
        key = f"{above}{name}"
        if name not in hints:
            raise ValueError(
                f"unknown key {key!r}{did_you_mean(key, [above + known for known in hints])} "
                "(colar train RECIPE --keys lists all)"
            )
        inner = _section(hints[name])
        if inner is not None and isinstance(value, dict):
            _check_section(value, inner, f"{key}.")
        elif not any(_fits(value, kind) for kind in _kinds(hints[name])):
            raise ValueError(f"{key} must be {_named(hints[name])}, got {_short(value)}")
        else:
            _check_finite(key, value)


def _check_blank(values: Mapping[str, Any], section: type, above: str) -> None:
    """Reject a key without a value where its type takes no null."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name = field.name
        if values.get(name, "") is None and type(None) not in _kinds(hints[name]):
            default = "" if field.default is dataclasses.MISSING else f", {field.default}"
            raise ValueError(
                f"{above}{name} is blank (null): it must be {_named(hints[name])}; "
                f"leave it out for its default{default}"
            )


def _check_finite(key: str, value: Any) -> None:
    """Reject, at any depth, a number that is infinite or none, or that no tensor, file or loop can count with."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_finite(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            _check_finite(key, inner)
    elif isinstance(value, int) and value not in INT64:
        raise ValueError(f"{key} must be a number of at most 64 bits, got {_short(value)}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {value}")


def _fits(value: Any, kind: Any) -> bool:
    """True if a value of YAML may stand for one of this type. Infinite numbers are looked at by `_check_finite`."""
    inner = typing.get_args(kind)
    kind = typing.get_origin(kind) or kind
    if kind is typing.Literal:
        return value in inner
    if kind is tuple:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return is_whole(value)
    return isinstance(kind, type) and isinstance(value, kind)


def _built(value: Any, hint: Any) -> Any:
    """A checked value as its field has it: sections are dataclasses, lists tuples, and a whole number is an int."""
    section = _section(hint)
    if section is not None and isinstance(value, dict):
        hints = typing.get_type_hints(section)
        return section(**{name: _built(inner, hints[name]) for name, inner in value.items()})
    kinds = _kinds(hint)
    if isinstance(value, list):
        each = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple), None)
        return tuple(_built(inner, each) for inner in value)
    if is_number(value) and (int in kinds or float in kinds):
        return int(value) if int in kinds else float(value)
    return value


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types of `int | None`; of any other type, itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _section(hint: Any) -> Any:
    """The dataclass of a section, also of one that may be null; None for any other type."""
    return next((kind for kind in _kinds(hint) if dataclasses.is_dataclass(kind)), None)


def _named(hint: Any) -> str:
    """A type as a writer of YAML knows it."""
    names = []
    for kind in _kinds(hint):
        inner = typing.get_args(kind)
        kind = typing.get_origin(kind) or kind
        if kind is typing.Literal:
            names.append(f"one of {', '.join(map(str, inner))}")
        elif kind is tuple:
            names.append(f"a list ({_named(inner[0])} each)")
        else:
            names.append(
                KINDS.get(kind, KINDS[dict] if dataclasses.is_dataclass(kind) else str(kind.__name__))
            )
    return " or ".join(names)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
