"""jsonargparse's errors in one line: which key is unknown and which one is near, or what a value must be.

A section that may be null (`model.lora`, `grpo`) could be two things, and its error lists both:

    Parser key "model.lora":
      Does not validate against any of the Union subtypes
      Errors:
        - Problem with given class_path 'colar.model.latent_lm.LoraSettings':
            Parser key "r":
              Expected a <class 'int'>. Got value: x
        - Expected a <class 'NoneType'>
      Given value: NestedArg(key='r', val='x')

becomes `model.lora.r must be a whole number, got x`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterable
from typing import Any

from colar.checks import did_you_mean

UNKNOWN_KEY = (
    # Group 'data' does not accept option 'sauce'
    r"(?:[Gg]roup '(?P<group>[\w.]+)' )?does not accept (?:option|nested key) '(?P<key>[\w.]+)'",
    # unrecognized arguments: --training.learnin_rate 1
    r"[Uu]nrecognized arguments?: --(?P<key>[\w.]+)",
    # Parser key "model.lora": ... Option 'rank' is not accepted
    r"(?s)(?:Parser key \"(?P<group>[\w.]+)\".*)?Option '(?P<key>[\w.]+)' is not accepted",
)
"""How a message says that a key is unknown."""

# Parser key "training": Unable to load config 'x'
NOT_A_SECTION = r"Parser key \"([\w.]+)\":\s+Unable to load config ['\"](.*?)['\"]"

# Union subtypes ... - grpo.num_generations must be 2 or more, got 1
OF_OUR_OWN = r"(?s)Union subtypes.*?\n +- ([\w.]+ must [^\n]*)"

# Expected a <class 'float'> | Expected a dot import path string | Expected a typing.Literal['grpo', 'dapo']
EXPECTED = r"Expected an? (?:<class '(\w+)'>|(dot import path string)|typing\.Literal\[([^\]]*)\])"

# Got value: fast | Given value: x | import path string: 3
GIVEN = r"(?:Got value|Given value|import path string): ([^\n]*)"

KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "keys and values",
    "dot import path string": "keys and values",
    "tuple": "a list",
    "list": "a list",
    "NoneType": "null",
}
"""Python's types as a writer of YAML knows them."""


def in_one_line(message: str, known: Iterable[str]) -> str:
    """A message of jsonargparse in one line. `known` are all keys."""
    key = unknown_key(message)
    if key is None:
        return wrong_value(message) or " ".join(message.split())
    # All keys of a section look alike, for they share its name: the last part must be near by itself.
    last = _last_part(key)
    near = [name for name in known if did_you_mean(last, [_last_part(name)])]
    return f"unknown key {key!r}{did_you_mean(key, near) or ': leave it out'}"


def unknown_key(message: str) -> str | None:
    """The dotted key that a message calls unknown; None where it speaks of something else."""
    for pattern in UNKNOWN_KEY:
        found = re.search(pattern, message)
        if found:
            group = found.groupdict().get("group")
            return f"{group}.{found['key']}" if group else found["key"]
    return None


def wrong_value(message: str) -> str | None:
    """`training.max_hours must be a number or null, got x`; None where the message speaks of something else."""
    section = re.search(NOT_A_SECTION, message)
    if section:
        return f"{section[1]} must be keys and values, got {section[2]}"

    # Each level names its part of the key, from the outermost to the innermost.
    key = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    innermost = message[message.rfind("Parser key") :]
    # After the innermost value come the other things that a whole section could have been: null, mostly.
    if "given class_path" in message:
        innermost = innermost.split("\n    - Expected")[0]

    kinds = []
    for type_name, section_class, choices in re.findall(EXPECTED, innermost):
        kind = _kind(type_name, section_class, choices)
        if kind not in kinds:
            kinds.append(kind)
    given = re.search(GIVEN, innermost)
    if not key or not kinds or given is None:
        return None
    return f"{key} must be {' or '.join(kinds)}, got {given[1]}"


def own_message(message: str) -> str | None:
    """The message of a check of ours that jsonargparse wrapped; None where there is none in it."""
    found = re.search(OF_OUR_OWN, message)
    return found[1] if found else None


def _kind(type_name: str, section_class: str, choices: str) -> str:
    """The kind that a value must have, from the one group of EXPECTED that matched; the others are empty."""
    if choices:
        return "one of " + choices.replace("'", "")
    return KINDS.get(type_name or section_class, type_name)


def _last_part(key: str) -> str:
    """training.seed -> seed"""
    return key.rpartition(".")[2]


def blank(values: Any, section: type, above: str = "") -> str | None:
    """`training.seed is blank (null): it must be a whole number; ...` for the first key without a value that needs one.

    None where there is none. `section` is the dataclass of `values`; a key that it lacks is looked at elsewhere.
    """
    if not isinstance(values, dict):
        return None
    hints = typing.get_type_hints(section)
    fields = {field.name: field for field in dataclasses.fields(section)}
    for name in values.keys() & fields.keys():
        kinds = alternatives(hints[name])
        found = None
        if values[name] is None and type(None) not in kinds:
            found = f"{above}{name} is blank (null): it must be {' or '.join(map(_name_of, kinds))}"
            found += _default_of(fields[name])
        for kind in kinds:
            if dataclasses.is_dataclass(kind):
                found = found or blank(values[name], typing.cast(type, kind), f"{above}{name}.")
        if found:
            return found
    return None


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of `int | None`; of any other type, itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _name_of(kind: Any) -> str:
    """A type as a writer of YAML knows it."""
    if dataclasses.is_dataclass(kind):
        return KINDS["dict"]
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    name: str = (typing.get_origin(kind) or kind).__name__
    return KINDS.get(name, name)


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING and not dataclasses.is_dataclass(field.default):
        return f"; leave it out for its default, {_in_yaml(field.default)}"
    return "" if field.default_factory is dataclasses.MISSING else "; leave it out for its defaults"


def _in_yaml(value: Any) -> str:
    return json.dumps(value).strip('"') if value != "" else '""'
