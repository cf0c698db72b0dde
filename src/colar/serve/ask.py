"""From a request's fields to what the engine is asked: question, params, decoding, seed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from colar.engine.request import Decoding, Request, TooLong, check, prompt_ids
from colar.serve.errors import ApiError, refused
from colar.serve.limits import Limits
from colar.serve.schema import Asked, Message
from colar.serve.served import Served

MAX_STOPS = 16
"""Stop strings of a request."""
STOP_LENGTH = 256
"""Characters of one of them."""


@dataclass(frozen=True)
class Wants:
    """What a client wants to see beside the answer."""

    reasoning: bool
    """The thoughts as text."""
    thoughts: bool
    """The thoughts in detail."""
    logprobs: bool
    """Log-probs of the answer's tokens; a request's `top_logprobs` has how many others beside each."""


@dataclass(frozen=True)
class Ask:
    """Samples of one or several questions: the choices of one answer."""

    id: str
    served: Served
    requests: list[Request]
    prompt_tokens: int
    stop: tuple[str, ...]
    wants: Wants
    warning: str | None
    """Values beyond what was trained."""
    stream: bool = False
    """Whether pieces are shown as they come."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def seed(self) -> int:
        return self.requests[0].seed


def ask(
    served: Served,
    asked: Asked,
    given: Mapping[str, Any],
    questions: Sequence[str],
    limits: Limits,
    id: str,
    *,
    max_answer: int | None,
    effort: str | None,
    n: int = 1,
    stop: str | Sequence[str] = (),
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Ask:
    """Check everything that can be checked before the engine has it. ApiError 400 names the field.

    `given` are the method's values; they go before those of an `effort`.
    """
    stands_for = dict(served.effort(effort)) if effort is not None else {}
    # The effort "none" is a limit on thoughts, which `params` would refuse: it is no value of the method.
    budget = stands_for.pop("thinking_token_budget", None)
    if asked.thinking_token_budget is not None:
        budget = asked.thinking_token_budget
    params = served.params({**stands_for, **given})
    decoding = _decoding(served.decoding, asked, budget, max_answer)
    if n * len(questions) > limits.max_samples:
        raise ApiError(400, f"n times the prompts must be {limits.max_samples} or less", param="n")

    wants = Wants(asked.include_reasoning, asked.return_thoughts, logprobs)
    # A method that thinks in tokens shows these as its reasoning: no embeddings need to be kept.
    latent = wants.reasoning and served.method.latent
    keep = wants.thoughts or wants.logprobs or latent
    # Draws without a seed differ from request to request.
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    requests = []
    prompt_tokens = 0
    field = asked.question_field
    for question in questions:
        if not question.strip():
            raise ApiError(400, "the question is empty", param=field)
        if len(question) > limits.max_prompt:
            raise ApiError(
                400,
                f"the question has {len(question)} characters; the limit is {limits.max_prompt}",
                param=field,
            )
        request = Request(id, question, params, decoding, seed, keep_latents=keep, top_logprobs=top_logprobs)
        try:
            check(served.method, request)
        except ValueError as error:
            raise ApiError(400, _words(error, request)) from error
        try:
            prompt_tokens += len(prompt_ids(served.lm, served.method, request))
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else None
            raise ApiError(400, _words(error, request), param=field, code=code) from error
        # They share the seed: `sample` is what makes their draws differ.
        requests += [replace(request, sample=sample) for sample in range(n)]
    warning = served.method.trained(params)
    return Ask(id, served, requests, prompt_tokens, _stops(stop), wants, warning, asked.stream)


def _words(error: ValueError, request: Request) -> str:
    """What the engine says of a request, without the name that it has here: the client did not give it."""
    return str(error).removeprefix(f"request {request.id}: ")


def question_of(messages: Sequence[Message], field: str) -> str:
    """The question of a conversation: its one user message. ApiError 400 where there is more than that.

    `field` is what the request calls the conversation.
    """
    # The template has one place, for a question. Whatever else is sent would be ignored.
    said = [message for message in messages if message.text.strip()]
    others = [message.role for message in said if message.role in ("system", "developer")]
    if others:
        raise ApiError(
            400,
            f"{field}: these models read a question alone, there is no place for a {others[0]} message",
            param=field,
        )
    if not messages or messages[-1].role != "user":
        raise ApiError(400, f"{field}: the last message must be of role user", param=field)
    if len(said) > 1:
        raise ApiError(
            400,
            f"{field}: these models answer one question without earlier turns, got {len(said)} messages",
            param=field,
        )
    return messages[-1].text


def _decoding(default: Decoding, asked: Asked, budget: int | None, max_answer: int | None) -> Decoding:
    """The server's decoding with a request's values; limits are the lower of both."""
    changes: dict[str, Any] = {}
    if asked.temperature is not None:
        # Latents are drawn as the tokens are, unless it is said otherwise.
        changes["temperature"] = changes["latent_temperature"] = asked.temperature
    if asked.latent_temperature is not None:
        changes["latent_temperature"] = asked.latent_temperature
    if asked.top_p is not None:
        changes["top_p"] = asked.top_p
    if budget is not None:
        changes["max_latents"] = min(budget, default.max_latents)
    if max_answer is not None:
        changes["max_completion_length"] = min(max_answer, default.max_completion_length)
    try:
        return replace(default, **changes)
    except ValueError as error:
        # `Decoding` begins each of its messages with the field's name.
        raise refused(error, str(error).split()[0]) from error


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS or not all(0 < len(each) <= STOP_LENGTH for each in stops):
        raise ApiError(
            400, f"stop must be up to {MAX_STOPS} texts of 1 to {STOP_LENGTH} characters", param="stop"
        )
    return stops
