"""Settings: dataclasses made of the values of YAML, JSON or a command line.

    built(TrainingConfig, {"seed": 6.0, "eval_steps": None}, "training.")
    TrainingConfig(seed=6, eval_steps=None)

A ValueError names the key, what it must be in the words of YAML, and what was given. The values' ranges are checked by
the dataclasses themselves.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from colar.checks import INT64, did_you_mean, is_number, is_whole

T = TypeVar("T")
NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "keys and values",
    type(None): "null",
}
"""Python's types as a writer of YAML knows them."""
SHOWN = 80
"""Characters of a wrong value that are shown."""


def built(section: type[T], values: Mapping[str, Any], above: str = "") -> T:
    """The dataclass of some values; `above` is the dotted name of the section in errors ("training.")."""
    arguments = _arguments(section, values, above, whole=True)
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in arguments:
            hint = typing.get_type_hints(section)[field.name]
            raise ValueError(f"{above}{field.name} is missing: it must be {in_words(hint)}")
    return section(**arguments)


def check(section: type[Any], values: Mapping[str, Any], above: str = "") -> None:
    """Reject unknown keys and values of another type, in values that may be a part of the section's."""
    _arguments(section, values, above, whole=False)


def _arguments(section: type[Any], values: Mapping[str, Any], above: str, whole: bool) -> dict[str, Any]:
    """The values as the fields have them. The sections inside are built where the values are the whole ones."""
    hints = typing.get_type_hints(section)
    arguments = {}
    for name, value in values.items():
        key = f"{above}{name}"
        if name not in hints:
            near = did_you_mean(key, [above + known for known in hints])
            raise ValueError(f"unknown key {key!r}{near}; keys: {', '.join(hints) or 'none'}")
        if value is None and type(None) not in kinds_of(hints[name]):
            default = f", {getattr(section, name)}" if hasattr(section, name) else ""
            raise ValueError(
                f"{key} is blank (null): it must be {in_words(hints[name])}; leave it out for its default{default}"
            )
        arguments[name] = _typed(key, value, hints[name], whole)
    return arguments


def _typed(key: str, value: Any, hint: Any, whole: bool) -> Any:
    """A value as its field has it: lists are tuples, and a whole number is an int (6.0 is a size of 6)."""
    for kind in kinds_of(hint):
        inner = typing.get_args(kind)
        kind = typing.get_origin(kind) or kind
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            assert isinstance(kind, type)
            above = f"{key}."
            return built(kind, value, above) if whole else _arguments(kind, value, above, whole)
        if kind is tuple and isinstance(value, list | tuple):
            # A list is never laid over another: its entries are whole.
            return tuple(
                _typed(f"{key}[{place}]", each, inner[0], whole=True) for place, each in enumerate(value)
            )
        if kind is int and is_whole(value):
            return int(value)
        if kind is float:
            # An int may stand for a float and stays one, as labels and records show it. Tensors take 64 bits.
            fits = is_number(value) and (isinstance(value, float) or value in INT64)
        elif kind is typing.Literal:
            fits = value in inner
        else:
            fits = kind is not int and isinstance(value, kind)
        if fits:
            return value
    text = repr(value)
    raise ValueError(
        f"{key} must be {in_words(hint)}, got {text if len(text) <= SHOWN else f'{text[:77]}...'}"
    )


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of `int | None`; of any other type, itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def section_of(hint: Any) -> Any:
    """The dataclass of a section, also of one that may be null; None for any other type."""
    return next((kind for kind in kinds_of(hint) if dataclasses.is_dataclass(kind)), None)


def in_words(hint: Any) -> str:
    """A type as a writer of YAML knows it."""
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
    # The text below a field is its meaning.
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
