"""The requests that the server takes: their fields, checked by name and type. docs/serve.md has the table.

Values that a checkpoint's method takes (`compression_factor`, `ratio`, ...) are fields too. They differ from method to
method, so `parse` returns them apart. OpenAI fields that ask for what this server does not do are accepted where
their value asks for nothing (`NEUTRAL`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from colar.checks import check_text, did_you_mean
from colar.engine.request import INT64_MAX, INT64_MIN, MOST_TOP
from colar.serve.errors import ApiError

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Strict(BaseModel):
    """Unknown fields are refused, and a number is no text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# Where a value may have two forms, the short one is made the long one first. As a union of both, errors would name
# pydantic's branches: `messages.0.content.list[TextPart].0`.

PartType = Literal["text", "input_text", "output_text"]


class TextPart(Strict):
    """A part of a message: text, and nothing else."""

    type: PartType
    text: str


def _parts(content: Any) -> Any:
    """A message's content as a list of parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("must be a text, or a list of text parts")
    for part in content:
        if isinstance(part, dict) and part.get("type", "text") not in get_args(PartType):
            raise ValueError("only text parts are read")
    return content


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system", "developer", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(_parts)] = []
    name: str | None = None
    type: Literal["message"] | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


def _texts(given: Any) -> Any:
    """One text or several, as a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return given
    raise ValueError("only a text, or a list of texts, is read")


def _turns(given: Any) -> Any:
    """A text as the one message of a user."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, list):
        return given
    raise ValueError("must be a text, or a list of messages")


Texts = Annotated[list[str], BeforeValidator(_texts)]


class Asked(Strict):
    """The fields of all three endpoints."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields whose only accepted values ask for nothing."""
    ignored: ClassVar[tuple[str, ...]] = ("user", "metadata", "safety_identifier", "prompt_cache_key")
    """Fields that are for the client's own books."""
    question_field: ClassVar[str]
    """The field that has the question."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    latent_temperature: float | None = None
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    thinking_token_budget: int | None = Field(default=None, ge=0)
    reasoning_effort: Effort | None = None
    include_reasoning: bool = True
    return_thoughts: bool = False


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(Asked):
    """The fields of the two endpoints that give several choices."""

    n: int = Field(default=1, ge=1)
    stop: Texts = []
    max_tokens: int | None = Field(default=None, ge=1)
    stream_options: StreamOptions = StreamOptions()


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
    }
    question_field: ClassVar[str] = "messages"
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_TOP)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        # Pydantic collects ValueErrors and AssertionErrors; an ApiError passes through it as it is.
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "echo": (False,),
        "suffix": ("",),
        "best_of": (1,),
    }
    question_field: ClassVar[str] = "prompt"
    prompt: Texts
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    """How many of the likeliest tokens each token has beside it."""

    @model_validator(mode="after")
    def _asks_something(self) -> CompletionRequest:
        if not self.prompt:
            raise ApiError(400, "prompt must have a text, or a list of at least one", param="prompt")
        return self


class Reasoning(Strict):
    """The Responses API's own place for the effort."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


FORMAT = {"format": {"type": "text"}}
VERBOSITY = {"verbosity": "medium"}
"""OpenAI's own default: it asks for nothing."""


class ResponseRequest(Asked):
    """POST /v1/responses."""

    ignored: ClassVar[tuple[str, ...]] = ("user", "safety_identifier", "prompt_cache_key")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "text": ({}, FORMAT, VERBOSITY, {**FORMAT, **VERBOSITY}),
        "include": ([],),
        "store": (False,),
        "background": (False,),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "stream_options": ({},),
    }
    question_field: ClassVar[str] = "input"
    input: Annotated[list[Message], BeforeValidator(_turns)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    reasoning: Reasoning = Reasoning()
    metadata: dict[str, str] = {}
    """For the client's own books: the answer has it again."""

    @property
    def effort(self) -> Effort | None:
        return self.reasoning.effort if self.reasoning_effort is None else self.reasoning_effort


T = TypeVar("T", bound=Asked)

TEMPLATE_KWARGS = "chat_template_kwargs"
OURS = (
    "return_thoughts",
    "latent_temperature",
    "thinking_token_budget",
    "reasoning_effort",
    "include_reasoning",
)
"""Fields that may lie in `chat_template_kwargs` as well, as a method's values may."""


def parse(kind: type[T], body: bytes, param_names: Collection[str]) -> tuple[T, dict[str, Any]]:
    """A request, and the values in it that belong to some method. ApiError 400 names the field that is wrong."""
    given = _flattened(_object(body), param_names)
    params = {name: given.pop(name) for name in param_names if name in given}
    for name in kind.ignored:
        given.pop(name, None)
    for name, allowed in kind.neutral.items():
        _check_neutral(name, given.pop(name, allowed[0]), allowed)
    try:
        return kind.model_validate(given), params
    except ValidationError as error:
        known = [*kind.model_fields, *kind.neutral, *kind.ignored, *param_names, TEMPLATE_KWARGS]
        raise _first(error, known) from error


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        # By itself Python's parser takes NaN and Infinity, which are no JSON.
        given = json.loads(body.decode(), parse_constant=_no_constant)
        if not isinstance(given, dict):
            raise ApiError(400, "the body must be a JSON object")
        # Text that could not be read, sent back or logged.
        for name, value in given.items():
            check_text(ascii(name), json.dumps({name: value}, ensure_ascii=False))
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        # UnicodeDecodeError and JSONDecodeError among others.
        raise ApiError(400, f"the body must be JSON in UTF-8: {error}") from error
    return given


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _flattened(given: dict[str, Any], param_names: Collection[str]) -> dict[str, Any]:
    """The fields with those of `chat_template_kwargs` among them. A field that is null is one that is not there."""
    inner = given.pop(TEMPLATE_KWARGS, None)
    if inner is None:
        inner = {}
    if not isinstance(inner, dict):
        raise ApiError(400, f"{TEMPLATE_KWARGS} must be an object", param=TEMPLATE_KWARGS)
    allowed = [*param_names, *OURS]
    flat = {name: value for name, value in given.items() if value is not None}
    for name, value in inner.items():
        place = f"{TEMPLATE_KWARGS}.{name}"
        if name not in allowed:
            raise ApiError(400, f"unknown field {place!r}{did_you_mean(name, allowed)}", param=place)
        if value is None:
            continue
        if name in flat and flat[name] != value:
            raise ApiError(400, f"{name} is given twice: {flat[name]!r} and {value!r}", param=place)
        flat[name] = value
    return flat


def _check_neutral(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Reject a field that asks for what this server does not do."""
    # 0 == False, and a penalty is no truth value.
    fits = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
    if not fits:
        words = " or ".join(json.dumps(each) for each in allowed)
        raise ApiError(400, f"{name} must be {words}: this server does nothing else", param=name)


def _first(error: ValidationError, known: Collection[str]) -> ApiError:
    """The first mistake, as one line with the field's name."""
    # A field that is unknown explains others that are missing.
    mistakes = sorted(error.errors(), key=lambda mistake: mistake["type"] != "extra_forbidden")
    mistake = mistakes[0]
    place = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        last = str(mistake["loc"][-1])
        # Inside a message or an option other names are allowed than `known` has.
        near = did_you_mean(last, known) if len(mistake["loc"]) == 1 else ""
        return ApiError(400, f"unknown field {place!r}{near}", param=place, code="unknown_parameter")
    if mistake["type"] == "missing":
        return ApiError(400, f"{place} is missing", param=place, code="missing_required_parameter")
    # Our own checks' words without "Value error, ".
    words = mistake["ctx"]["error"] if mistake["type"] == "value_error" else mistake["msg"]
    return ApiError(400, f"{place}: {words}", param=place)
