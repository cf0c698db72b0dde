"""Prompts: the token ids of a request, and the questions that fit a model's context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colar import progress
from colar.data.example import Example
from colar.data.left_out import leave_out
from colar.engine.request import Decoding, Request
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM


class TooLong(ValueError):
    """A request needs more positions than the model's context has."""


def prompt_ids(lm: LatentLM, method: Method, request: Request) -> list[int]:
    """The question segment. ValueError where the model has no row for one of its tokens; `TooLong` where it and the
    limits do not fit the model's context."""
    try:
        ids = lm.template.question(
            request.question, method.speed_text(request.params), cached=False, context=request.context
        )
    except ValueError as error:
        raise ValueError(f"request {request.id}: {error}") from error
    decoding = request.decoding
    # Checked with the limits, not with what is used in the end: a request that starts can always finish.
    needed = len(ids) + decoding.most_positions
    if needed > lm.context.length:
        raise TooLong(
            f"request {request.id}: the question has {len(ids)} tokens, and with max_latents "
            f"{decoding.max_latents} and max_completion_length {decoding.max_completion_length} it needs {needed} "
            f"positions; {lm.context}"
        )
    return ids


def fitting_questions(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Sequence[Any],
    decoding: Decoding,
    what: str,
    remedy: str,
) -> list[Example]:
    """The examples whose questions fit the model's context within the limits of `decoding`, under each of `params`.

    Logs how many do not, under `what` they are. ValueError, which names the `remedy`, where more than half do not.
    """
    too_long = {}
    for index, example in enumerate(progress.track(examples, f"check {what}")):
        # The speed slot of the prompt may be longer for one value than for another: each is tried.
        for values in params:
            request = Request(example.id, example.question, values, decoding, context=example.context)
            try:
                prompt_ids(lm, method, request)
            except TooLong as error:
                too_long[index] = str(error)
    return leave_out(examples, too_long, what, remedy)
