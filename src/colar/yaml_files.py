"""YAML files of keys and values, read as YAML 1.2 has them, and laid over the files that they are based on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from colar import files


class _Yaml(yaml.SafeLoader):
    """YAML 1.2's numbers and bools (1e-3 is a number; yes, 010, 1:30 and 2026-01-31 are texts), each key once."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise YamlRefused(f"line {line}: a key must be a text: put it in quotes")
            if key.value in seen:
                first = seen[key.value]
                where = f"line {line}" if first == line else f"lines {first} and {line}"
                raise YamlRefused(f"{where}: the key {key.value!r} is there twice: leave one of the two out")
            seen[key.value] = line
        return node


class YamlRefused(yaml.YAMLError):
    """YAML that can be read, and means less than it looks like."""


_PLAIN = {
    "bool": ("true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": ("[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    "float": (
        r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
"""Pattern of a plain value that is no text, and its first characters."""

_Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, (_pattern, _first) in _PLAIN.items():
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), list(_first))


def read_yaml(text: str) -> Any:
    """The value of a text of YAML. Raises yaml.YAMLError, with the line."""
    try:
        return yaml.load(text, Loader=_Yaml)  # a SafeLoader
    except RecursionError as error:
        raise YamlRefused("it is nested too deeply to be read") from error


def yaml_value(name: str, text: str) -> Any:
    """The value of a text of YAML. ValueError in one line, which begins with `name`, where the text was given."""
    try:
        return read_yaml(text)
    except YamlRefused as error:
        raise ValueError(f"{name}: {str(error).removeprefix('line 1: ')}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: the value is not valid YAML") from error


def yaml_layers(path: str | Path) -> dict[Path, dict[str, Any]]:
    """The keys of a YAML file, then of the file that its key `base` names, of the base of that, and so on.

    `base` is relative to the file. ValueError names a file that is missing, is its own base, or is not YAML.
    """
    layers: dict[Path, dict[str, Any]] = {}
    following = Path(path)
    while True:
        if not following.is_file():
            above = f"{[*layers][-1]}: " if layers else ""
            raise ValueError(f"{above}no file at {following}{', its base' if layers else ''}")
        path = following
        own = layers[path] = _read_whole(path)
        if "base" not in own:
            return layers
        base = own.pop("base")
        if not isinstance(base, str) or not base:
            raise ValueError(f"{path}: base must be the path of a recipe, relative to this one, got {base!r}")
        following = path.parent / base
        if following.resolve() in [layer.resolve() for layer in layers]:
            raise ValueError(f"{path.name}: its base {following.name} has it as its own base")


def _read_whole(path: Path) -> dict[str, Any]:
    """The keys and values of one YAML file, its `base` among them."""
    text = files.read_text(path)
    try:
        read = read_yaml(text)
    except YamlRefused as error:
        raise ValueError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} must hold keys and values, got {read!r}")
    return read


def laid_over(base: Any, own: Any) -> Any:
    """`own` laid over `base`: dicts key by key, anything else replaced."""
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    merged = dict(base)
    for key, value in own.items():
        merged[key] = laid_over(base.get(key), value)
    return merged
