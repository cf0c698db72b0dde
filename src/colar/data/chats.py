"""Rows that hold a chat: messages of OpenAI's or ShareGPT's form, or TRL's prompt and completion."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from colar.data.example import ROLES, Context, Fields, Row
from colar.data.reasoning import EMPTY, THINK, fields_of, parted

ROLE = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "developer": "system"}
TURNS = ("messages", "conversations")


class Message(NamedTuple):
    """A checked message of a chat."""

    role: str
    text: str
    raw: Mapping[str, Any]


def turns_of(row: Row) -> Any:
    """The raw messages of a row: its chat, or TRL's prompt and optional completion; None for any other row."""
    for name in TURNS:
        if row.get(name) is not None:
            return row[name]
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None or not (isinstance(prompt, list) or isinstance(completion, list)):
        return None
    turns = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if isinstance(completion, list):
        return turns + completion
    return turns if completion is None else [*turns, {"role": "assistant", "content": completion}]


def parse_chat(row: Row) -> Fields:
    """Parse a row with a chat: the last assistant turn is the answer to learn, the turn before it the question."""
    messages = messages_in(row)
    while messages and messages[-1].role != "assistant":
        messages.pop()
    if len(messages) < 2:
        raise ValueError("a chat without an answer: no message of 'assistant' behind one of 'user'")
    question, context = asked(messages[:-1])
    last = messages[-1]
    chain, answer = parted(last.text)
    for name in ("thinking", "reasoning", "reasoning_content"):
        thought = last.raw.get(name) or row.get(name)
        chain = thought if isinstance(thought, str) and thought.strip() not in EMPTY else chain
    return fields_of(row, question, context, chain, answer)


def messages_in(row: Row) -> list[Message]:
    """The messages of a row with a chat."""
    messages = messages_of(turns_of(row))
    # ShareGPT has the system message in a column beside the conversation.
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages and messages[0].role != "system":
        messages.insert(0, Message("system", system.strip(), {}))
    return messages


def messages_of(turns: Any) -> list[Message]:
    """The messages of raw `turns`, with roles renamed to `ROLES`. ValueError if they are no chat."""
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError("a chat must be a list of messages, each with a role and a content")
    messages = []
    for turn in turns:
        role = str(turn.get("role", turn.get("from", "")))
        role = ROLE.get(role, role)
        if role not in ROLES:
            raise ValueError(f"the role {role!r} of a message is none of {', '.join(ROLES)}")
        content = turn.get("content", turn.get("value"))
        # OpenAI's list of parts, as the server takes it: text alone.
        if isinstance(content, list) and content and all(_is_text(part) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(
                f"the content of a message of {role!r} must be text, is a {type(content).__name__}"
            )
        messages.append(Message(role, content.strip(), turn))
    return messages


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def asked(messages: Sequence[Message]) -> tuple[str, Context]:
    """Split a chat into the question, its last turn, and the turns before. ValueError if the last is not the user's."""
    *before, last = messages
    if last.role != "user":
        raise ValueError(f"the turn before the answer is of {last.role!r}, must be of 'user'")
    # The thoughts of earlier answers are not shown to a model again.
    context = []
    for role, text, _ in before:
        thought = THINK.match(text) if role == "assistant" else None
        context.append((role, thought[3].strip() if thought else text))
    return last.text, tuple(context)
