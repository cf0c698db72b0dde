"""A checkpoint that is served: its engine, its place in the queue, and what /v1/models says of it."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Mapping
from typing import Any

import docstring_parser

from colar.engine.async_engine import AsyncEngine
from colar.engine.engine import Engine
from colar.engine.request import Decoding
from colar.methods import registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.serve.errors import ApiError, refused
from colar.serve.limits import Admission
from colar.serve.nearest import Nearest

DEFAULT_EFFORT = "medium"
"""Whose values are taken where a method's own defaults were not trained."""
NO_THOUGHT: Mapping[str, Any] = {"thinking_token_budget": 0}
"""What the effort "none" means, for every method."""


class Served:
    """One checkpoint under one name. `decoding` has the defaults of a request, and the most of its limits."""

    def __init__(
        self, name: str, lm: LatentLM, method: Method, engine: Engine, decoding: Decoding, max_waiting: int
    ) -> None:
        self.name = name
        self.lm = lm
        self.method = method
        self.decoding = decoding
        self.engine = AsyncEngine(engine)
        self.admission = Admission(engine.scheduler.slots, max_waiting)
        # By the engine's worker: a second thread that computes would slow its steps (`async_engine.py`).
        self.nearest = Nearest(lm, self.engine.run)
        self.created = int(time.time())
        self.defaults = _defaults(method)
        self.efforts: dict[str, dict[str, Any]] = {"none": dict(NO_THOUGHT)}
        self.efforts.update({name: dict(values) for name, values in method.efforts().items()})

    @property
    def running(self) -> int:
        return len(self.engine.engine.running)

    @property
    def waiting(self) -> int:
        # Samples whose client has left give their place back before the engine's worker has heard of it.
        return max(0, self.admission.samples - self.running)

    def effort(self, effort: str) -> dict[str, Any]:
        """The fields that an effort stands for. ApiError 400 where this checkpoint does not know it."""
        if effort not in self.efforts:
            known = ", ".join(self.efforts)
            raise ApiError(
                400,
                f"reasoning_effort {effort!r}: model {self.name} (method {self.method.name}) takes {known}",
                param="reasoning_effort",
            )
        return self.efforts[effort]

    def params(self, values: Mapping[str, Any]) -> Any:
        """The method's per-request values, its defaults where none are given. ApiError 400 for others."""
        try:
            params = registry.make_params(self.method, {**self.defaults, **values})
            self.method.trained(params)
        except ValueError as error:
            # The checks' messages have the field's name in them: it becomes `param` of the error object.
            named = [name for name in values if name in str(error)]
            raise refused(error, named[0] if named else None) from error
        return params

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        choices = self.method.choices()
        own = {
            "method": self.method.name,
            "params": _params_card(self.method, self.defaults),
            "factors": list(choices.get("compression_factor", ())),
            "efforts": self.efforts,
            "max_latents": self.decoding.max_latents,
            "max_completion_length": self.decoding.max_completion_length,
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "colar",
            "colar": own,
        }


def _defaults(method: Method) -> dict[str, Any]:
    """The values of a request that names none: the method's own, or trained ones where these were not."""
    params = method.Params()
    choices = method.choices()
    middle = method.efforts().get(DEFAULT_EFFORT, {})
    values = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        offered = choices.get(field.name, [value])
        if value not in offered:
            value = middle.get(field.name, offered[0])
        values[field.name] = value
    return values


def _params_card(method: Method, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Each value that a request may choose: its default, what was trained, and a sentence about it."""
    choices = method.choices()
    about = _field_docs(method.Params)
    card = {}
    for name, default in defaults.items():
        offered = choices.get(name)
        # One value is no choice: it belongs to another head, or was not trained.
        if offered is not None and list(offered) == [default]:
            continue
        allowed = None if offered is None else list(offered)
        card[name] = {"default": default, "allowed": allowed, "about": about.get(name, "")}
    return card


def _field_docs(cls: type) -> dict[str, str]:
    """The docstrings below a dataclass's fields."""
    if not inspect.getdoc(cls):
        return {}
    parsed = docstring_parser.parse_from_object(cls)
    return {each.arg_name: " ".join((each.description or "").split()) for each in parsed.params}
