"""From a YAML file and dotted overrides to a `Recipe`, or to one line that says what is wrong with them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jsonargparse

from colar import files, recipes
from colar.checks import did_you_mean
from colar.methods import registry
from colar.methods.base import Method
from colar.model.latent_lm import LoraSettings
from colar.recipe.schema import Recipe
from colar.training.grpo import rewards
from colar.training.grpo.config import GrpoConfig

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parser(prog: str = "colar train") -> jsonargparse.ArgumentParser:
    """The parser of a recipe: `--config file.yaml` and a dotted option for every key."""
    made = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False)
    made.add_argument("--config", action="config", help="The recipe.")
    made.add_class_arguments(Recipe, fail_untyped=False)
    return made


def load(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """The recipe in a YAML file, or the shipped one of that name, with `--dotted.key value` overrides.

    ValueError in words for a wrong key or value.
    """
    found = recipes.find(path)
    made = parser()
    try:
        namespace = made.parse_args(["--config", files.layered_yaml(found), *(overrides or [])])
        for name in ("model", "template", "data", "training", "validation"):
            if not isinstance(namespace[name], jsonargparse.Namespace):
                raise ValueError(f"{path}: {name} must hold keys and values, got {namespace[name]!r}")
        values = made.instantiate(namespace).as_dict()
    except jsonargparse.ArgumentError as error:
        raise ValueError(f"{path}: {_explain(made, str(error))}") from error
    except ValueError as error:  # of a section that may be null, wrapped by what else it could have been
        if own := re.search(OWN_WORDS, str(error)):
            raise ValueError(f"{path}: {own['words']}") from error
        raise
    recipe = Recipe(**{f.name: values[f.name] for f in dataclasses.fields(Recipe)})
    build_method(recipe)
    if recipe.grpo is not None:
        check_grpo(recipe, recipe.grpo)
    return recipe


def check_grpo(recipe: Recipe, grpo: GrpoConfig) -> None:
    """ValueError for a `grpo` section that the rest of the recipe does not fit."""
    if recipe.model.init_from is None:
        raise ValueError("grpo needs model.init_from: a checkpoint that has learnt to think")
    grpo.plan(recipe.training)
    rewards.named(grpo.reward_funcs)


def build_method(recipe: Recipe) -> Method:
    """The recipe's method; unknown names, keys and per-request values are ValueErrors."""
    config = dict(recipe.method)
    method = registry.build(str(config.pop("name", "")), config)
    for values in recipe.validation.params:
        registry.make_params(method, values)
    return method


UNKNOWN_KEY = (
    r"(?:[Gg]roup '(?P<group>[\w.]+)' )?does not accept (?:option|nested key) '(?P<key>[\w.]+)'",
    r"[Uu]nrecognized arguments?: --(?P<key>[\w.]+)",
    r"(?s)(?:Parser key \"(?P<group>[\w.]+)\".*)?Option '(?P<key>[\w.]+)' is not accepted",
)
"""How jsonargparse says that a key is unknown."""


OWN_WORDS = r"(?s)Union subtypes.*?\n +- (?P<words>[\w.]+ must [^\n]*)"
"""What a section that may be null says of its own values, inside what jsonargparse says of it."""
NO_SECTION = r"Parser key \"([\w.]+)\":\s+Unable to load config ['\"](.*?)['\"]"
EXPECTED = r"Expected an? (?:<class '(\w+)'>|(dot import path string)|typing\.Literal\[([^\]]*)\])"
KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "keys and values",
    "dot import path string": "keys and values",
    "tuple": "a list",
    "NoneType": "null",
}


def _explain(made: jsonargparse.ArgumentParser, message: str) -> str:
    """What is wrong in one line: the nearest right key of an unknown one, or what a value must be; else as it is."""
    known = [name.removeprefix("--") for action in made._actions for name in action.option_strings]
    for section, cls in (("model.lora", LoraSettings), ("grpo", GrpoConfig)):
        known += [f"{section}.{f.name}" for f in dataclasses.fields(cls)]
    for pattern in UNKNOWN_KEY:
        if unknown := re.search(pattern, message):
            key = ".".join(filter(None, (unknown.groupdict().get("group"), unknown["key"])))
            return f"unknown key {key!r}{did_you_mean(key, known)}"
    return _wrong_value(message) or message


def _wrong_value(message: str) -> str | None:
    """`training.max_hours must be a number or null, got x`; None where jsonargparse says something else."""
    if section := re.search(NO_SECTION, message):
        return f"{section[1]} must be keys and values, got {section[2]}"
    key = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    inner = message[message.rfind("Parser key") :]  # the deepest key's
    if "given class_path" in message:  # after it: what the whole section could have been
        inner = inner.split("\n    - Expected")[0]
    value = re.search(r"(?:Got value|Given value|import path string): ([^\n]*)", inner)
    kinds = [
        "one of " + choices.replace("'", "") if choices else KINDS.get(kind or path, kind)
        for kind, path, choices in re.findall(EXPECTED, inner)
    ]
    if not (key and kinds and value):
        return None
    return f"{key} must be {' or '.join(dict.fromkeys(kinds))}, got {value[1]}"
