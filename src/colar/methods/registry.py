"""Methods by name, and their configs and params made of values. A new method is one line here."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from colar import yaml_settings
from colar.checks import check_known
from colar.methods.base import Method
from colar.methods.coconut import Coconut
from colar.methods.colar import Colar
from colar.methods.cot import Cot, NoCot
from colar.methods.distill import Distill
from colar.methods.icot import Icot
from colar.methods.pause import Pause
from colar.methods.ruplar import Ruplar
from colar.methods.sequential import Sequential
from colar.methods.sim_cot import SimCot
from colar.methods.tokenskip import TokenSkip

EFFORTS = ("xhigh", "high", "medium", "low", "minimal")
"""Reasoning efforts that a server's clients may request, the most thinking first. "none" is a limit, and no value of a
method."""
DEFAULT_EFFORT = "medium"
"""Effort whose values are the defaults if a method's own defaults were not trained."""
METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (Cot, NoCot, Colar, Sequential, Icot, Coconut, Distill, TokenSkip, Pause, Ruplar, SimCot)
}


def build(name: str, config: Mapping[str, Any] | None = None) -> Method:
    """The method of that name. ValueError names the nearest right name or key, and the allowed values."""
    check_known("method.name", [name], METHODS)
    cls = METHODS[name]
    return cls(yaml_settings.built(cls.Config, config or {}, "method."))


def rebuild(saved: Mapping[str, Any], where: object) -> Method:
    """The method of a checkpoint's `method` entry ({"name", "config"}, perhaps "params" and "limits"); errors name
    its place, `where`."""
    try:
        method = build(saved["name"], saved["config"])
        method.default_params = dict(saved.get("params", {}))
        method.default_limits = dict(saved.get("limits", {}))
        make_params(method, method.default_params)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return method


def make_params(method: Method, values: Mapping[str, Any]) -> Any:
    """The method's per-request values. ValueError for a key that it does not have (a factor for CoT).

    Without `values` they are its `default_params`, which together are one speed, so that any given value replaces all
    of them. A value named by neither is the method's own default, or that of `DEFAULT_EFFORT` if the default was not
    trained.
    """
    values = values or method.default_params
    allowed = param_names(method)
    for key in values:
        if key not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes none"
            raise ValueError(f"method {method.name} has no {key}; it {takes}")
    return yaml_settings.built(method.Params, {**_trained_defaults(method), **values})


def _trained_defaults(method: Method) -> Mapping[str, Any]:
    """The values that replace the method's own defaults if these were not trained; {} if they were."""
    try:
        untrained = method.check_params(method.Params()) is not None
    except ValueError:
        untrained = True
    return efforts_of(method).get(DEFAULT_EFFORT, {}) if untrained else {}


def efforts_of(method: Method) -> dict[str, dict[str, Any]]:
    """The reasoning efforts, each as a trained value of the first of the method's `choices`; {} if it has none.

        trained    1, 2, 3, 5        xhigh 1    high 2    medium 2    low 3    minimal 5

    The five efforts are spread evenly over the values; halfway between two, the one that thinks more is taken.
    """
    efforts = {}
    for name, values in itertools.islice(method.choices().items(), 1):
        for i, effort in enumerate(EFFORTS):
            place = i * (len(values) - 1) / (len(EFFORTS) - 1)
            # Halfway between two: the earlier one.
            efforts[effort] = {name: values[math.ceil(place - 0.5)]}
    return efforts


def possible_params(method: Method, candidates: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The candidates that the method can work with, as its params: `sequential`, for example, rejects a factor above
    those that it was trained for."""
    possible = []
    for values in candidates:
        params = make_params(method, values)
        try:
            method.check_params(params)
        except ValueError:
            continue
        possible.append(params)
    return possible


def param_names(method: Method | type[Method]) -> list[str]:
    """The per-request values that a method has."""
    return [field.name for field in dataclasses.fields(method.Params)]


def all_param_names() -> list[str]:
    """The per-request values of all methods, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(map(param_names, METHODS.values()))))
