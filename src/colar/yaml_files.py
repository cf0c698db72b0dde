"""YAML files of keys and values, read as people mean them, and laid over the files that they are based on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from colar import files


class _Yaml(yaml.SafeLoader):
    """YAML 1.1 as people mean it: a key once in its mapping, and no text that is read as another number or as a bool.

    1e-3 is a number, as in YAML 1.2. Errors are `yaml.YAMLError`s that say the line.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise YamlRefused(f"line {line}: {_shown(key)} is no name of a key: put it in quotes")
            if key.value in seen:
                first = seen[key.value]
                where = f"line {line}" if first == line else f"lines {first} and {line}"
                raise YamlRefused(
                    f"{where}: the key {key.value!r} is there twice: leave one of the two out, or write what both "
                    "hold under one"
                )
            seen[key.value] = line
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        # In quotes it is the text that is written there.
        if node.style is None:
            kind = node.tag.rpartition(":")[2]
            plain, instead = _PLAIN.get(kind, (None, ""))
            if plain is not None and not plain.fullmatch(node.value):
                raise YamlRefused(
                    f"line {node.start_mark.line + 1}: {node.value} is not one thing to all readers of YAML: "
                    f"write {instead}in quotes where text is meant"
                )
        return node


class YamlRefused(yaml.YAMLError):
    """YAML that can be read, and would be read as something else than it looks like."""


_NUMBER = "a decimal number (without leading zeros, _ or :), or put it "
_PLAIN = {
    "int": (re.compile(r"[-+]?(0|[1-9][0-9]*)"), _NUMBER),
    "float": (
        re.compile(r"[-+]?((\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"),
        _NUMBER,
    ),
    "bool": (re.compile("true|True|TRUE|false|False|FALSE"), "true or false, or put it "),
    "timestamp": (re.compile("(?!)"), "it "),
    "value": (re.compile("(?!)"), "it "),
}
"""How a value of a kind is written, and what to write instead of other ways: 010 (8), 1_000, 1:30 (90), yes, a date."""


class _Dumper(yaml.SafeDumper):
    """Puts a text in quotes that `_Yaml` would read as something else without."""


for _class in (_Yaml, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    # 0o10, YAML 1.2's octal, and 08, which is none in 1.1: texts that look like numbers.
    _class.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?0(o[0-7]+|\d+)$"), list("-+0"))


def _shown(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or mapping"


def read_yaml(text: str) -> Any:
    """The value of a text of YAML. Raises yaml.YAMLError, with the line, for all that `_Yaml` refuses."""
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


def layered_yaml(path: str | Path) -> str:
    """The text of a YAML file of keys and values, laid over the file that its key `base` names, if any.

    Dicts are merged key by key, anything else is replaced. `base` is relative to the file. ValueError names a file
    that is missing, is its own base, or is not YAML.
    """
    merged: Any = {}
    for layer in reversed(yaml_layers(path)):
        merged = laid_over(merged, read_layer(layer))
    return to_yaml(merged)


def to_yaml(tree: Any) -> str:
    """A text of YAML that `read_yaml` reads as the same value."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def yaml_layers(path: str | Path) -> list[Path]:
    """A YAML file, then the file that its key `base` names, the base of that, and so on. Errors as `layered_yaml`."""
    layers = [Path(path)]
    while True:
        path = layers[-1]
        if not path.is_file():
            below = len(layers) > 1
            raise ValueError(f"{layers[-2]}: no file at {path}, its base" if below else f"no file at {path}")
        own = _read_whole(path)
        if "base" not in own:
            return layers
        base = own["base"]
        if not isinstance(base, str) or not base:
            raise ValueError(f"{path}: base must be the path of a recipe, relative to this one, got {base!r}")
        following = path.parent / base
        if following.resolve() in [layer.resolve() for layer in layers]:
            raise ValueError(f"{path.name}: its base {following.name} has it as its own base")
        layers.append(following)


def read_layer(path: Path) -> dict[str, Any]:
    """The keys and values of one YAML file, without its `base`. Errors as `layered_yaml`."""
    own = _read_whole(path)
    own.pop("base", None)
    return own


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
