"""/v1/responses: an answer as a reasoning item and a message, whole or as the events of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from colar.serve.answering import Pieces, Sample, usage
from colar.serve.ask import Ask
from colar.serve.schema import FORMAT, VERBOSITY, ResponseRequest


def whole(asked: ResponseRequest, ask: Ask, sample: Sample) -> dict[str, Any]:
    """The response object of a finished sample."""
    reasoning, message = _Reasoning(ask), _Message(ask)
    items = [reasoning.done(sample.reasoning)] if ask.wants.reasoning and sample.n_thoughts else []
    status = "completed" if sample.finish == "stop" else "incomplete"
    response = _object(asked, ask, status, [*items, message.done(sample.text)])
    counts = usage(ask, [sample])
    response["usage"] = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
    if status == "incomplete":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    if ask.wants.thoughts:
        response["colar"] = sample.details(ask)
    return response


async def events(asked: ResponseRequest, ask: Ask, pieces: Pieces) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, numbered."""
    number = 0
    async for event in _events(asked, ask, pieces):
        yield {**event, "sequence_number": number}
        number += 1


async def _events(asked: ResponseRequest, ask: Ask, pieces: Pieces) -> AsyncGenerator[dict[str, Any], None]:
    opened = _object(asked, ask, "in_progress", [])
    yield {"type": "response.created", "response": opened}
    yield {"type": "response.in_progress", "response": opened}
    reasoning, message = _Reasoning(ask), _Message(ask)
    place = -1
    """Of the item that is being said, in the output."""
    current: _Item | None = None
    said = ""
    sample: Sample | None = None
    async for piece in pieces:
        sample = piece.sample
        thinks = bool(piece.reasoning) or piece.thought is not None
        # The first thought opens the item, with text or without: where there are thoughts, the output has one.
        opens = current is None and sample.n_thoughts > 0 and not (piece.text or piece.last)
        item: _Item | None = None
        if (thinks or opens) and ask.wants.reasoning:
            item = reasoning
        # The sample's end opens the message too: an answer without text is still an item of the output.
        elif piece.text or piece.last:
            item = message
        if item is None:
            continue
        if item is not current:
            if current is not None:
                for event in current.closing(place, said):
                    yield event
            place, current, said = place + 1, item, ""
            for event in item.opening(place):
                yield event
        text = piece.reasoning if item is reasoning else piece.text
        said += text
        if text or piece.thought is not None:
            yield item.delta(place, text, piece.thought)
    assert sample is not None, "there is a piece"
    assert current is not None, "a sample's last piece says that it ended"
    for event in current.closing(place, said):
        yield event
    response = whole(asked, ask, sample)
    yield {"type": f"response.{response['status']}", "response": response}


class _Item(ABC):
    """One item of the output, and the events that say it."""

    prefix: str
    part_type: str

    def __init__(self, ask: Ask) -> None:
        self.id = f"{self.prefix}_{ask.id.partition('_')[2]}"

    @abstractmethod
    def started(self) -> dict[str, Any]:
        """The item before it has said anything."""

    @abstractmethod
    def done(self, text: str) -> dict[str, Any]:
        """The item with all its text."""

    def part(self, text: str) -> dict[str, Any]:
        return {"type": self.part_type, "text": text}

    def opening(self, place: int) -> list[dict[str, Any]]:
        at = {"item_id": self.id, "output_index": place, "content_index": 0}
        return [
            {"type": "response.output_item.added", "output_index": place, "item": self.started()},
            {"type": "response.content_part.added", **at, "part": self.part("")},
        ]

    def delta(self, place: int, text: str, thought: dict[str, Any] | None) -> dict[str, Any]:
        at = {"item_id": self.id, "output_index": place, "content_index": 0}
        more = {} if thought is None else {"colar": {"thought": thought}}
        return {"type": f"response.{self.part_type}.delta", **at, "delta": text, **self.extra(), **more}

    def closing(self, place: int, text: str) -> list[dict[str, Any]]:
        at = {"item_id": self.id, "output_index": place, "content_index": 0}
        return [
            {"type": f"response.{self.part_type}.done", **at, "text": text, **self.extra()},
            {"type": "response.content_part.done", **at, "part": self.part(text)},
            {"type": "response.output_item.done", "output_index": place, "item": self.done(text)},
        ]

    def extra(self) -> dict[str, Any]:
        """Fields that the events of this item have beside the text."""
        return {}


class _Reasoning(_Item):
    prefix = "rs"
    part_type = "reasoning_text"

    def started(self) -> dict[str, Any]:
        return {"type": "reasoning", "id": self.id, "summary": [], "content": [], "status": "in_progress"}

    def done(self, text: str) -> dict[str, Any]:
        return {**self.started(), "content": [self.part(text)], "status": "completed"}


class _Message(_Item):
    prefix = "msg"
    part_type = "output_text"

    def started(self) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "content": [],
            "status": "in_progress",
        }

    def done(self, text: str) -> dict[str, Any]:
        return {**self.started(), "content": [self.part(text)], "status": "completed"}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": self.part_type, "text": text, "annotations": [], "logprobs": []}

    def extra(self) -> dict[str, Any]:
        return {"logprobs": []}


def _object(asked: ResponseRequest, ask: Ask, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    decoding = ask.requests[0].decoding
    return {
        "id": ask.id,
        "object": "response",
        "created_at": ask.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": decoding.max_completion_length,
        "metadata": asked.metadata,
        "model": ask.served.name,
        "output": output,
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "reasoning": {"effort": asked.effort, "summary": asked.reasoning.summary},
        "store": False,
        "temperature": decoding.temperature,
        "text": {**FORMAT, **VERBOSITY},
        "tool_choice": "none",
        "tools": [],
        "top_p": decoding.top_p,
        "truncation": "disabled",
        "usage": None,
    }
