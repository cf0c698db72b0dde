"""The requests of the API, checked by pydantic.

Values of a checkpoint's method (`compression_factor`, `ratio`, ...) are fields too: they differ from method to method
and are found in `params`. OpenAI fields for features that this server does not have are accepted at their neutral
value only. docs/serve.md has the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from colar.checks import did_you_mean
from colar.engine.request import INT64_MAX, INT64_MIN, MOST_TOP
from colar.methods import registry
from colar.serve.conversation import Message, Strict, context_of, question_of, texts, turns
from colar.serve.errors import ApiError

MAX_BODY = 2**20
"""Bytes of a request's body."""
MAX_CHOICES = 16
"""Samples of one question, questions of one request, and stop strings."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Empty = Annotated[list[Any], Field(max_length=0)]
Zero = Annotated[float, Field(ge=0, le=0)]


Prompts = Annotated[list[str], BeforeValidator(texts), Field(min_length=1, max_length=MAX_CHOICES)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    BeforeValidator(texts),
    Field(max_length=MAX_CHOICES),
]

KWARGS = "chat_template_kwargs"
OURS = (
    "return_thoughts",
    "latent_temperature",
    "thinking_token_budget",
    "reasoning_effort",
    "include_reasoning",
)
"""Fields that may also lie in `chat_template_kwargs`, as a method's values may."""


class GenerationRequest(Strict, BaseModel, ABC):
    """The fields of all three endpoints."""

    # Extra fields are the values of a method: `_flatten` has rejected all others.
    model_config = ConfigDict(extra="allow")

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

    # Accepted and ignored.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, given: Any) -> Any:
        """Move the fields of `chat_template_kwargs` beside the others. A field that is null counts as missing."""
        if not isinstance(given, dict):
            raise ApiError(400, "the body must be a JSON object, sent as Content-Type: application/json")
        inner = given.get(KWARGS)
        inner = {} if inner is None else inner
        if not isinstance(inner, dict):
            raise ApiError(400, f"{KWARGS} must be an object", KWARGS)
        params = registry.param_names()
        found: dict[str, Any] = {}
        for prefix, fields, known in (
            ("", given, [*cls.model_fields, *params, KWARGS]),
            (f"{KWARGS}.", inner, [*OURS, *params]),
        ):
            for name, value in fields.items():
                place = prefix + name
                if name not in known:
                    near = did_you_mean(name, known)
                    raise ApiError(400, f"unknown field {place!r}{near}", place, "unknown_parameter")
                if value is None or name == KWARGS:
                    continue
                if name in found and found[name] != value:
                    raise ApiError(400, f"{name} is given twice: {found[name]!r} and {value!r}", place)
                found[name] = value
        return found

    @property
    def params(self) -> dict[str, Any]:
        """The values of the method."""
        return dict(self.model_extra or {})

    @property
    @abstractmethod
    def questions(self) -> Sequence[str]:
        """Texts to answer."""

    @property
    def context(self) -> tuple[tuple[str, str], ...]:
        """Turns before the question: (role, text) of each."""
        return ()

    @property
    @abstractmethod
    def max_answer(self) -> int | None:
        """Most tokens of the answer."""

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort

    @property
    def samples(self) -> int:
        """Answers for each question."""
        return 1

    @property
    def stops(self) -> Sequence[str]:
        return ()

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens that are shown beside each; None without log-probs."""
        return None


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(GenerationRequest):
    """The fields of the two endpoints that give several choices."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: Stops = []
    max_tokens: int | None = Field(default=None, ge=1)
    stream_options: StreamOptions = StreamOptions()
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}

    @property
    def samples(self) -> int:
        return self.n

    @property
    def stops(self) -> Sequence[str]:
        return self.stop


class TextFormat(Strict):
    type: Literal["text"] = "text"


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    question_field: ClassVar[str] = "messages"
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_TOP)
    tools: Empty = []
    functions: Empty = []
    tool_choice: Literal["none", "auto"] = "none"
    parallel_tool_calls: bool = False
    response_format: TextFormat = TextFormat()
    modalities: list[Literal["text"]] = ["text"]
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    verbosity: Literal["medium"] = "medium"

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        # An ApiError, because the error of a validator of the whole model has no field.
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        return self

    @property
    def questions(self) -> Sequence[str]:
        return [question_of(self.messages, "messages")]

    @property
    def context(self) -> tuple[tuple[str, str], ...]:
        return context_of(self.messages, "messages")

    @property
    def max_answer(self) -> int | None:
        # max_tokens is OpenAI's old name of the same limit.
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    question_field: ClassVar[str] = "prompt"
    prompt: Prompts
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    """Number of likeliest tokens that are shown beside each."""
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    best_of: Annotated[int, Field(ge=1, le=1)] = 1

    @property
    def questions(self) -> Sequence[str]:
        return self.prompt

    @property
    def max_answer(self) -> int | None:
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class Reasoning(Strict):
    """The Responses API's own place for the effort."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Strict):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class ResponseRequest(GenerationRequest):
    """POST /v1/responses."""

    question_field: ClassVar[str] = "input"
    input: Annotated[list[Message], BeforeValidator(turns)]
    instructions: str = ""
    max_output_tokens: int | None = Field(default=None, ge=1)
    reasoning: Reasoning = Reasoning()
    tools: Empty = []
    tool_choice: Literal["none", "auto"] = "none"
    parallel_tool_calls: bool = False
    text: TextOptions = TextOptions()
    include: Empty = []
    store: Literal[False] = False
    background: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    truncation: Literal["disabled"] = "disabled"
    top_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    stream_options: dict[str, Any] = Field(default={}, max_length=0)

    @property
    def questions(self) -> Sequence[str]:
        return [question_of(self.input, "input")]

    @property
    def context(self) -> tuple[tuple[str, str], ...]:
        instructions = (("system", self.instructions),) if self.instructions.strip() else ()
        return (*instructions, *context_of(self.input, "input"))

    @property
    def max_answer(self) -> int | None:
        return self.max_output_tokens

    @property
    def effort(self) -> Effort | None:
        return self.reasoning.effort if self.reasoning_effort is None else self.reasoning_effort
