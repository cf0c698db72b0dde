"""OpenAI's chat completions: the response, whole or as the events of a stream."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from colar.engine.request import Request
from colar.serve.protocol import ChatRequest


@dataclass
class Sample:
    """One sample of an answer so far; complete with its last piece."""

    request: Request
    """The engine's request. Its `sample` is the index of the choice."""
    prompt_ids: tuple[int, ...]
    """The token ids of its prompt."""
    begun: bool = False
    """True once a stream has sent an event of this sample."""
    text: str = ""
    reasoning: str = ""
    thoughts: list[dict[str, Any]] = field(default_factory=list)
    n_thoughts: int = 0
    n_tokens: int = 0
    forward_passes: int = 1
    """One for the question, one for each embedding fed after it."""
    finish: str = ""
    """"stop", or "length" where the answer met its limit."""
    cut: bool = False
    """True where a limit ended the answer or the thinking."""
    started: float = field(default_factory=time.perf_counter)
    answer_began: float | None = None
    last_event: float = 0.0
    """Time of the engine's last event, on the clock of `started`."""

    def restart(self) -> None:
        """Forget what was added; nothing of it was sent."""
        vars(self).update(vars(Sample(self.request, self.prompt_ids, started=self.started)))

    def add(
        self, text: str = "", reasoning: str = "", thought: dict[str, Any] | None = None, last: bool = False
    ) -> "SamplePiece":
        """Add this news to the sample, and return it as a piece."""
        self.text += text
        self.reasoning += reasoning
        if thought is not None:
            self.thoughts.append(thought)
        return SamplePiece(self, text, reasoning, thought, last)


@dataclass(frozen=True)
class SamplePiece:
    """News of a sample: a thought, some text, or its end."""

    sample: Sample
    text: str
    reasoning: str
    thought: dict[str, Any] | None
    last: bool
    """True for the last piece. `sample` itself may be ahead of a piece that waits to be sent."""


@dataclass(frozen=True)
class ChatResponse:
    """The response to one request, with a choice for each sample."""

    id: str
    model: str
    body: ChatRequest
    samples: Sequence[Sample]
    prompt_tokens: int
    warning: str | None
    """The warning about values beyond those that were trained."""
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self) -> dict[str, Any]:
        """The response in one piece."""
        choices = []
        for sample in self.samples:
            message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
            if self.body.include_reasoning:
                message |= _reasoning(sample.reasoning)
            if self.body.return_thoughts:
                message["colar"] = {"thoughts": sample.thoughts, **self.details(sample)}
            choices.append(_choice("message", sample, message, sample.finish))
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def events(self, piece: SamplePiece) -> list[bytes]:
        """The events of a piece; none if it has nothing to show."""
        sample = piece.sample
        delta: dict[str, Any] = {} if sample.begun else {"role": "assistant", "content": ""}
        sample.begun = True
        if piece.reasoning and self.body.include_reasoning:
            delta |= _reasoning(piece.reasoning)
        if piece.thought is not None:
            # A list, because clients that accumulate deltas append an entry with a new "index".
            delta["colar"] = {"thoughts": [piece.thought]}
        if piece.text:
            delta["content"] = piece.text
        if piece.last and self.body.return_thoughts:
            delta["colar"] = self.details(sample)
        if not delta and not piece.last:
            return []
        choice = _choice("delta", sample, delta, sample.finish if piece.last else None)
        options, more = self.body.stream_options, {}
        if options.include_usage:
            # Where the usage is requested, chunks without it have the key too.
            more = {"usage": self._usage() if options.continuous_usage_stats else None}
        return [self._chunk([choice], more)]

    def end(self) -> list[bytes]:
        """The last events of a stream."""
        events = [as_event("[DONE]")]
        if self.body.stream_options.include_usage:
            events.insert(0, self._chunk([], {"usage": self._usage()}))
        return events

    def details(self, sample: Sample) -> dict[str, Any]:
        """The key `colar` of docs/serve.md, without the thoughts."""
        began = sample.last_event if sample.answer_began is None else sample.answer_began
        fields = {
            "forward_passes": sample.forward_passes,
            "thinking_ms": round(1000 * (began - sample.started), 3),
            "answer_ms": round(1000 * (sample.last_event - began), 3),
            "finish": "length" if sample.cut else "stop",
            "seed": sample.request.seed,
            "params": asdict(sample.request.params),
        }
        return fields | ({"warning": self.warning} if self.warning else {})

    def _usage(self) -> dict[str, Any]:
        """OpenAI's token counts: thoughts are reasoning tokens; completion tokens are these and the answer's."""
        reasoning = sum(sample.n_thoughts for sample in self.samples)
        completion = reasoning + sum(sample.n_tokens for sample in self.samples)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices, **more}
        return as_event(json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def as_event(data: str) -> bytes:
    """A server-sent event."""
    return f"data: {data}\n\n".encode()


def _choice(key: str, sample: Sample, fields: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": sample.request.sample, key: fields, "logprobs": None, "finish_reason": finish}


def _reasoning(text: str) -> dict[str, str]:
    """The text of the thoughts, under the two names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}
