"""OpenAI's chat completions: the body of a request, checked by pydantic, and the errors that it is answered with.

Values of a checkpoint's method (`compression_factor`, `ratio`, ...) are fields of a body too. They differ from method
to method, and are in `ChatRequest.params`. docs/serve.md has the tables of all fields.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from colar.checks import INT64, did_you_mean
from colar.methods import registry

MAX_BODY = 2**20
"""Most bytes of a request's body."""
MAX_CHOICES = 16
"""Most samples of a question, and most stop strings."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
}
"""Fields of OpenAI and vLLM for features that this server does not have, with the neutral values that are accepted."""
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
ANSWER_FIELDS = ("reasoning", "reasoning_content", "colar", "annotations")
"""Ignored fields of an answer that a client sends back: thoughts of earlier turns are not shown to a model."""


@dataclass(eq=False)
class ApiError(Exception):
    """A response other than 2xx: the HTTP status, and the fields of OpenAI's error object."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    type: str = "invalid_request_error"
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> str:
        """JSON in ASCII, because a name that a client sent may hold half of a surrogate pair."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": fields})


# The body of a request. A value that has two forms is converted to the long one before it is checked, because errors of
# a union would name pydantic's branches, `messages.0.content.list[TextPart].0`.


class Strict(BaseModel):
    """Rejects unknown fields, numbers in place of texts, and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(Strict):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


def _parts(content: Any) -> Any:
    """A message's content as a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("must be a text, or a list of text parts")
    if any(isinstance(part, dict) and part.get("type", "text") != "text" for part in content):
        raise ValueError("only text parts are supported")
    return content


def _texts(stop: Any) -> Any:
    """One text or several, as a list."""
    if isinstance(stop, str):
        return [stop]
    if isinstance(stop, list) and all(isinstance(text, str) for text in stop):
        return stop
    raise ValueError("must be a text, or a list of texts")


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system", "developer", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(_parts)] = []
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_answer_fields(cls, message: Any) -> Any:
        """The fields without those that clients copy from an answer, without nulls and without empty lists."""
        if not isinstance(message, dict):
            return message
        copied = ANSWER_FIELDS if message.get("role") == "assistant" else ()
        # Clients send back what an answer had, nulls and empty lists as well.
        return {
            name: value for name, value in message.items() if value not in (None, []) and name not in copied
        }

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, each chunk has the usage so far."""
    include_obfuscation: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=256)]


class ChatRequest(Strict):
    """The body of POST /v1/chat/completions."""

    # Extra fields are the values of a method: `_check_names` has rejected all others.
    model_config = ConfigDict(extra="allow")

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=INT64[0], le=INT64[-1])
    temperature: float | None = None
    top_p: float | None = None
    latent_temperature: float | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: Annotated[list[Stop], BeforeValidator(_texts), Field(max_length=MAX_CHOICES)] = []
    thinking_token_budget: int | None = Field(default=None, ge=0)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool = True
    return_thoughts: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: Any) -> Any:
        """Reject unknown fields, and leave out those that change nothing. A null counts as missing."""
        # ApiErrors, because the error of a validator of the whole model has no field.
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object, sent as Content-Type: application/json")
        known = [*cls.model_fields, *registry.all_param_names()]
        fields = {}
        for name, value in body.items():
            if value is None or name in IGNORED:
                continue
            if name not in (*known, *NEUTRAL):
                near = did_you_mean(name, known)
                raise ApiError(400, f"unknown field {name!r}{near}", name, "unknown_parameter")
            if name in known:
                fields[name] = value
            elif value not in NEUTRAL[name]:
                allowed = " or ".join(map(json.dumps, NEUTRAL[name]))
                raise ApiError(400, f"{name}: this server has no such feature; it takes {allowed}", name)
        return fields

    @property
    def params(self) -> dict[str, Any]:
        """The values of the method."""
        return dict(self.model_extra or {})

    @property
    def question(self) -> str:
        """The text of the last message. ApiError 400 unless it is a user's."""
        if self.messages[-1].role != "user":
            raise ApiError(400, "messages: the last message must be of role user", "messages")
        return self.messages[-1].text

    @property
    def context(self) -> tuple[tuple[str, str], ...]:
        """The turns before the question, (role, text) of each, without empty ones. ApiError 400 for a tool's."""
        turns = []
        for message in self.messages[:-1]:
            if message.role == "tool":
                raise ApiError(400, "messages: these models have no place for a tool message", "messages")
            # OpenAI's newer name for a system message.
            role = "system" if message.role == "developer" else message.role
            if message.text.strip():
                turns.append((role, message.text))
        return tuple(turns)


def first_mistake(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One line for the first of pydantic's errors, with the name of the field."""
    mistake = errors[0]
    kind = mistake["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body must be JSON: {mistake['ctx']['error']}")
    # FastAPI's locations begin with "body".
    place = ".".join(str(part) for part in mistake["loc"][1:])
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {place!r}", place, "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{place or 'the body'} is missing", place or None, "missing_required_parameter")
    # Our own checks' words without pydantic's "Value error, ".
    words = mistake["ctx"]["error"] if kind == "value_error" else mistake["msg"]
    return ApiError(400, f"{place}: {words}", place)
