"""From a YAML file and dotted overrides to a `Recipe`, or to a ValueError that says what is wrong with them."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from colar import processes, recipes, yaml_files
from colar.checks import INT64
from colar.methods import registry
from colar.methods.base import Method, NoParams
from colar.model.lora import LoraSettings
from colar.model.masks import MASKED
from colar.recipe import explain
from colar.recipe.schema import Recipe
from colar.training.grpo import rewards
from colar.training.grpo.config import GrpoConfig

# The text below a field of a config is its help in `colar train RECIPE --keys`.
jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


YAML_MODE = "colar"
"""Our reader of YAML among jsonargparse's: its own takes a quoted '1:30' for 90, and a key twice."""
jsonargparse.set_loader(YAML_MODE, yaml_files.read_yaml, exceptions=(yaml.YAMLError,))


def parser(prog: str = "colar train") -> jsonargparse.ArgumentParser:
    """The parser of a recipe: `--config file.yaml` and a dotted option for every key."""
    # Errors are raised, for us to put in one line. Keys are never guessed from their first letters.
    made = jsonargparse.ArgumentParser(
        prog=prog, exit_on_error=False, allow_abbrev=False, parser_mode=YAML_MODE
    )
    made.add_argument("--config", action="config", help="The recipe.")
    made.add_class_arguments(Recipe, fail_untyped=False)
    return made


@functools.cache
def _parser_of_all() -> jsonargparse.ArgumentParser:
    """One for all recipes of a process: to make it takes as long as to read a recipe. Reading leaves it as it is."""
    return parser()


def load(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """The recipe in a YAML file, or the shipped one of that name, with `--dotted.key value` overrides.

    All that can be checked without data or weights is checked here. ValueError names the key and what it must be.
    """
    file = recipes.find(path)
    text = yaml_files.layered_yaml(file)
    tree = yaml_files.read_yaml(text)
    if "stages" in tree:
        raise ValueError(f"{path} has stages, each a run of its own: load_stages reads them")
    for layer in yaml_files.yaml_layers(file):
        _check_blank(str(layer), yaml_files.read_layer(layer), _config_of(tree.get("method")))
    return parse(str(path), text, overrides or [])


def parse(path: str, text: str, overrides: list[str]) -> Recipe:
    """The recipe in a text of YAML, called `path` in errors. Errors as `load`."""
    tree = yaml_files.read_yaml(text)
    config = _config_of(tree.get("method"))
    _check_blank(path, tree, config)
    made = _parser_of_all()
    _check_overrides(made, overrides, config)
    try:
        namespace = made.parse_args(["--config", text, *overrides])
        # An empty or mistyped section passes jsonargparse as the value that it is.
        for name in ("model", "template", "data", "training", "validation"):
            if not isinstance(namespace[name], jsonargparse.Namespace):
                raise ValueError(f"{path}: {name} must hold keys and values, got {namespace[name]!r}")
        # The sections' own checks run here, when they are built.
        if not isinstance(namespace.validation.limits, jsonargparse.Namespace):
            raise ValueError(
                f"{path}: validation.limits must hold keys and values, got {namespace.validation.limits!r}"
            )
        _check_numbers(namespace, path)
        values = made.instantiate(namespace).as_dict()
    except OverflowError as error:
        raise ValueError(f"{path}: a number is too large: {error}") from error
    except jsonargparse.ArgumentError as error:
        raise ValueError(f"{path}: {explain.in_one_line(str(error), _keys(made))}") from error
    except ValueError as error:
        # A check of ours: jsonargparse passes it on, or wraps it where the section may be null.
        wrapped = explain.own_message(str(error))
        if wrapped is None:
            raise
        raise ValueError(f"{path}: {wrapped}") from error

    recipe = Recipe(**{field.name: values[field.name] for field in dataclasses.fields(Recipe)})
    _check_unused(recipe, overrides)
    # Built for its checks alone: a run builds its method in `load_model`.
    build_method(recipe)
    check_attention(recipe)
    if recipe.grpo is not None:
        check_grpo(recipe, recipe.grpo)
    return recipe


def _config_of(method: Any) -> type:
    """The config of the method that a recipe's `method` section names; one without keys where it names none."""
    name = method.get("name") if isinstance(method, dict) else None
    if isinstance(name, str) and name in registry.METHODS:
        return registry.METHODS[name].Config
    return NoParams


def _check_blank(where: str, values: Any, method: type) -> None:
    """Reject a key without a value where its type takes no null: jsonargparse lets it pass. `method` is its config."""
    found = explain.blank(values, Recipe)
    if found is None and isinstance(values, dict):
        section = values.get("method")
        found = explain.blank(section, method, "method.")
        if isinstance(section, dict) and "name" in section and section["name"] is None:
            found = f"method.name is blank (null): it must be one of {', '.join(registry.METHODS)}"
    if found is not None:
        raise ValueError(f"{where}: {found}")


def _check_overrides(made: jsonargparse.ArgumentParser, overrides: list[str], method: type) -> None:
    """Reject a value of the command line that a recipe's file may not have either."""
    texts = {
        option
        for action in made._actions
        if str in explain.alternatives(getattr(action, "_typehint", None))
        for option in action.option_strings
    }
    # --key value | --key=value
    for place, word in enumerate(overrides):
        option, equals, value = word.partition("=")
        if not option.startswith("--"):
            continue
        if not equals:
            if place + 1 == len(overrides) or overrides[place + 1].startswith("--"):
                continue
            value = overrides[place + 1]
        if option in texts:
            continue
        try:
            read = yaml_files.read_yaml(value)
        except yaml_files.YamlRefused as error:
            raise ValueError(f"{option} {value}: {str(error).removeprefix('line 1: ')}") from error
        except yaml.YAMLError:
            # A text with a colon, say, or a mistake: what it may be the parser knows.
            continue
        for name in reversed(option.removeprefix("--").split(".")):
            read = {name: read}
        _check_blank(f"{option} {value}".rstrip(), read, method)


def _check_numbers(value: Any, path: str | Path, key: str = "") -> None:
    """Reject, at any depth, a number that is infinite or none, or that no tensor, file or loop can count with."""
    if isinstance(value, jsonargparse.Namespace):
        value = value.as_dict()
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, path, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(inner, path, key)
    elif isinstance(value, int) and value not in INT64:
        raise ValueError(f"{path}: {key} must be a number of at most 64 bits, got {str(value)[:24]}...")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}: {key} must be a finite number, got {value}")


def _check_unused(recipe: Recipe, overrides: list[str]) -> None:
    """Reject a backbone or layout of the command line that would not be used. A recipe's file may have it from its
    base."""
    start = recipe.model.init_from
    if start is None:
        return
    for word in overrides:
        key = word.partition("=")[0]
        if key == "--model.backbone":
            raise ValueError(
                f"--model.backbone has no effect beside model.init_from ({start}), which has a backbone of its own: "
                "leave it out, or start from the backbone with --model.init_from null"
            )
        if key == "--template" or key.startswith("--template."):
            raise ValueError(
                f"{key} has no effect beside model.init_from ({start}), which has a layout of its own: leave it out"
            )


def check_attention(recipe: Recipe) -> None:
    """Reject an attention that can be trained with, but not generated."""
    name = recipe.model.attn_implementation
    if recipe.generates and name is not None and name not in MASKED:
        raise ValueError(
            f"model.attn_implementation must be one of {', '.join(MASKED)} or null where the run generates (to "
            f"validate, or for grpo), got {name!r}; with data.validation_size 0 it may be used"
        )


def check_grpo(recipe: Recipe, grpo: GrpoConfig) -> None:
    """Reject a `grpo` section that the rest of the recipe does not fit."""
    if recipe.model.init_from is None:
        raise ValueError("grpo needs model.init_from: a checkpoint that has learnt to think")
    grpo.plan(recipe.training, processes.launched())
    rewards.named(grpo.reward_funcs)
    # By what the recipe says of its method; the checkpoint, which knows the rest, is looked at by the run.
    grpo.check_method(build_method(recipe))


def build_method(recipe: Recipe) -> Method:
    """The recipe's method. ValueError for an unknown name, key or per-request value."""
    config = dict(recipe.method)
    name = str(config.pop("name", ""))
    method = registry.build(name, config)
    # A value that the method lacks fails here, and not at the first validation.
    for values in recipe.validation.params:
        registry.make_params(method, values)
    return method


def _keys(made: jsonargparse.ArgumentParser) -> list[str]:
    """Every dotted key of a recipe. The parser lists no keys of sections that may be null."""
    keys = []
    for action in made._actions:
        keys += [option.removeprefix("--") for option in action.option_strings]
    for section, settings in (("model.lora", LoraSettings), ("grpo", GrpoConfig)):
        keys += [f"{section}.{field.name}" for field in dataclasses.fields(settings)]
    return keys
