"""YAML files of keys and values, and the dataclasses that are made of them.

    yaml_layers("tiny/colar.yaml")     the keys of a file, then those of the file that it is based on, and so on
    built(TrainingConfig, {"seed": 6.0, "eval_steps": None}, "training.")
    TrainingConfig(seed=6, eval_steps=None)

YAML is read by the rules of YAML 1.2. A ValueError names the key, its type in the words of YAML, and the given value.
Ranges of values are checked by the dataclasses themselves.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from colar import files
from colar.checks import INT64, in_library, is_number, is_whole

T = TypeVar("T")
NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "keys and values",
    type(None): "null",
}
"""Python's types in the words of YAML."""
SHOWN = 80
"""Characters of a wrong value that are shown."""


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
                raise yaml.YAMLError(f"line {line}: a key must be a text: put it in quotes")
            if key.value in seen:
                first = seen[key.value]
                where = f"line {line}" if first == line else f"lines {first} and {line}"
                raise yaml.YAMLError(
                    f"{where}: the key {key.value!r} is there twice: leave one of the two out"
                )
            seen[key.value] = line
        return node


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


class _Writer(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as something else."""


for _kind, (_pattern, _first) in _PLAIN.items():
    for _class in (_Yaml, _Writer):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), list(_first)
        )


def yaml_text(values: Mapping[str, Any]) -> str:
    """Keys and values as YAML, which `read_yaml` reads back unchanged."""
    return yaml.dump(dict(values), Dumper=_Writer, sort_keys=False, default_flow_style=None, width=110)


def read_yaml(where: object, text: str) -> Any:
    """The value of a YAML text. ValueError in one line, which begins with `where`, the origin of the text."""
    with in_library(f"{where}: not valid YAML"):
        return yaml.load(text, Loader=_Yaml)  # a SafeLoader


def yaml_layers(path: str | Path) -> dict[Path, dict[str, Any]]:
    """The keys of a YAML file, then of the file that its key `base` names, then of that file's base, and so on.

    `base` is relative to the file. ValueError names a file that is missing, is its own base, or is not YAML.
    """
    layers: dict[Path, dict[str, Any]] = {}
    path = Path(path)
    while True:
        own = read_yaml(path, files.read_text(path))
        if not isinstance(own, dict):
            raise ValueError(f"{path} must hold keys and values, got {own!r}")
        layers[path] = own
        if "base" not in own:
            return layers
        base = own.pop("base")
        if not isinstance(base, str) or not base:
            raise ValueError(f"{path}: base must be the path of a recipe, relative to this one, got {base!r}")
        following = path.parent / base
        if not following.is_file():
            raise ValueError(f"{path}: no file at {following}, its base")
        if following.resolve() in [layer.resolve() for layer in layers]:
            raise ValueError(f"{path.name}: its base {following.name} has it as its own base")
        path = following


def laid_over(base: Any, own: Any) -> Any:
    """`own` laid over `base`: dicts key by key, anything else replaced."""
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    merged = dict(base)
    for key, value in own.items():
        merged[key] = laid_over(base.get(key), value)
    return merged


# --- dataclasses --------------------------------------------------------------------------------------------


def built(section: type[T], values: Mapping[str, Any], above: str = "") -> T:
    """The dataclass made of `values`; `above` is the dotted name of the section in errors ("training.")."""
    arguments = _arguments(section, values, above, build=True)
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in arguments:
            hint = typing.get_type_hints(section)[field.name]
            raise ValueError(f"{above}{field.name} is missing: it must be {in_words(hint)}")
    return section(**arguments)


def check(where: str, section: type[Any], values: Mapping[str, Any]) -> None:
    """Reject unknown keys and values of a wrong type. `values`, from `where`, may lack keys of the section."""
    try:
        _arguments(section, values, "", build=False)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _arguments(section: type[Any], values: Mapping[str, Any], above: str, build: bool) -> dict[str, Any]:
    """The values in the types of the fields. Nested sections are built, or, without `build`, only checked."""
    hints = typing.get_type_hints(section)
    arguments = {}
    for name, value in values.items():
        key = f"{above}{name}"
        if name not in hints:
            near = _nearest(name, section, above)
            raise ValueError(f"unknown key {key!r}{near}; keys: {', '.join(hints) or 'none'}")
        if value is None and type(None) not in kinds_of(hints[name]):
            default = f", {getattr(section, name)}" if hasattr(section, name) else ""
            raise ValueError(
                f"{key} is blank (null): it must be {in_words(hints[name])}; leave it out for its default{default}"
            )
        arguments[name] = _typed(key, value, hints[name], build)
    return arguments


def _nearest(name: str, section: type[Any], above: str) -> str:
    """`, did you mean 'training.seed'?`: a key of the section that is like `name`, or those below that end in it."""
    close = difflib.get_close_matches(name, typing.get_type_hints(section), n=1)
    likely = [above + key for key in close]
    if not likely:
        ending = [key for key, _, _ in keys(section, above) if re.search(rf"[._]{re.escape(name)}$", key)]
        likely = sorted(ending, key=len)[:3]
    return f", did you mean {' or '.join(map(repr, likely))}?" if likely else ""


def _typed(key: str, value: Any, hint: Any, build: bool) -> Any:
    """A value in the type of its field: lists become tuples, and a whole number an int (6.0 is a size of 6)."""
    for kind in kinds_of(hint):
        inner = typing.get_args(kind)
        kind = typing.get_origin(kind) or kind
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            assert isinstance(kind, type)
            return built(kind, value, f"{key}.") if build else _arguments(kind, value, f"{key}.", build)
        if kind is tuple and isinstance(value, list | tuple):
            # A list is never laid over another, so its entries are complete and can be built.
            entries = enumerate(value)
            return tuple(_typed(f"{key}[{i}]", entry, inner[0], build=True) for i, entry in entries)
        if kind is int and is_whole(value):
            return int(value)
        if kind is float:
            # An int may stand for a float and stays an int, as labels and records show it. Tensors take 64 bits.
            fits = is_number(value) and (isinstance(value, float) or value in INT64)
        elif kind is typing.Literal:
            fits = value in inner
        else:
            fits = kind is not int and isinstance(value, kind)
        if fits:
            return value
    raise ValueError(f"{key} must be {in_words(hint)}, got {repr(value)[:SHOWN]}")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of `int | None`; of any other type, itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def section_of(hint: Any) -> Any:
    """The dataclass of a section, also of one that may be null; None for any other type."""
    return next((kind for kind in kinds_of(hint) if dataclasses.is_dataclass(kind)), None)


def in_words(hint: Any) -> str:
    """A type in the words of YAML."""
    names = []
    for kind in kinds_of(hint):
        inner = typing.get_args(kind)
        kind = typing.get_origin(kind) or kind
        if kind is typing.Literal:
            names.append(f"one of {', '.join(map(str, inner))}")
        elif kind is tuple:
            names.append(f"a list ({in_words(inner[0])} each)")
        else:
            names.append(NAMES[dict if dataclasses.is_dataclass(kind) else kind])
    return " or ".join(names)


def keys(section: type, above: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every key: its dotted name, its default (dataclasses.MISSING where it needs a value), its meaning."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    # The docstring below a field is its meaning.
    meanings = {
        field.target.id: str(text.value.value)
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        inner = section_of(hints[field.name])
        if inner is None or field.default is None:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            yield f"{above}{field.name}", default, " ".join(meanings.get(field.name, "").split())
        if inner is not None:
            yield from keys(inner, f"{above}{field.name}.")
