"""The texts of a request: a question, several, or a conversation whose last message is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict

from colar.serve.errors import ApiError

PartType = Literal["text", "input_text", "output_text"]


class Strict(BaseModel):
    """Rejects unknown fields, numbers in place of texts, and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


# A value of two forms is brought into the long one before it is checked. The errors of a union would name pydantic's
# branches: `messages.0.content.list[TextPart].0`.


class TextPart(Strict):
    """A part of a message. Only text is supported."""

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
            raise ValueError("only text parts are supported")
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


def texts(given: Any) -> Any:
    """One text or several, as a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return given
    raise ValueError("must be a text, or a list of texts")


def turns(given: Any) -> Any:
    """A text as the one message of a user."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, list):
        return given
    raise ValueError("must be a text, or a list of messages")


def question_of(messages: Sequence[Message], field: str) -> str:
    """The question of a conversation: its last message, a user's. ApiError 400 for anything else."""
    if not messages or messages[-1].role != "user":
        raise ApiError(400, f"{field}: the last message must be of role user", field)
    return messages[-1].text


def context_of(messages: Sequence[Message], field: str) -> tuple[tuple[str, str], ...]:
    """The turns before the question, without empty ones. ApiError 400 for a tool's."""
    found = []
    for message in messages[:-1]:
        if message.role == "tool":
            raise ApiError(400, f"{field}: these models have no place for a tool message", field)
        # OpenAI's newer name of the same.
        role = "system" if message.role == "developer" else message.role
        if message.text.strip():
            found.append((role, message.text))
    return tuple(found)
