"""Requests: a question with its settings, the checks before it is queued, and the token ids of its prompt.

For all methods, `temperature` applies to the answer's tokens. In a step of thinking, each temperature applies to

    method            temperature                               latent_temperature
    colar             the stop                                  the latent: it multiplies the head's sigma
    sequential        the stop                                  a group's tokens: it divides their logits
    cot, tokenskip    the chain's tokens, the stop among them   nothing
    ruplar            the stop                                  nothing
    the others        nothing                                   nothing

A temperature of 0 takes the most probable token, or the head's mean. `top_p` applies wherever tokens are drawn. If both
temperatures are equal, `sequential` draws the stop and a group's first token in one draw, as `cot` does.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from colar import checks, progress
from colar.data.example import ROLES, Example, without_too_long
from colar.methods.base import Method, NoParams
from colar.model.latent_lm import LatentLM

TEMPERATURES = (1e-6, 100)
"""Bounds of a temperature above 0: logits divided by it, and latents with their noise, stay finite in float32."""


@dataclass(frozen=True)
class Decoding:
    """Settings by which thoughts and tokens are drawn, and limits at which they are cut."""

    temperature: float = 0.0
    """Divides the LM head's logits. 0, or in `TEMPERATURES`."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose mass reaches this."""
    latent_temperature: float = 0.0
    """Temperature of latents: multiplies the head's sigma (`colar`), or divides the logits of a group's tokens
    (`sequential`). 0, or in `TEMPERATURES`."""
    max_latents: int = 128
    """Most embeddings between the two separators (a CoT's tokens too); the answer follows then."""
    max_completion_length: int = 64
    """Most tokens of the answer."""

    def __post_init__(self) -> None:
        for name in ("temperature", "latent_temperature"):
            value = getattr(self, name)
            least, most = TEMPERATURES
            sane = checks.is_number(value) and (value == 0 or least <= value <= most)
            checks.check_holds(name, sane, value, f"0, or from {least:g} to {most:g}")
        top_p = self.top_p
        checks.check_holds("top_p", checks.is_number(top_p) and 0 < top_p <= 1, top_p, "in (0, 1]")
        for name, least in (("max_latents", 0), ("max_completion_length", 1)):
            value = getattr(self, name)
            checks.check_holds(name, checks.is_int(value), value, "a whole number")
            checks.check_holds(name, value >= least, value, f"{least} or more")

    @property
    def positions_after_question(self) -> int:
        """The most positions that a row may need after its question: thoughts, separator, answer."""
        return self.max_latents + 1 + self.max_completion_length


GREEDY = Decoding()
SAMPLED = Decoding(temperature=1.0, top_p=0.9, latent_temperature=1.0)
"""The paper's: "a temperature of 1 and top-p of 0.9"."""
DECODINGS = {"greedy": GREEDY, "sampled": SAMPLED}


def decoding_of(method: Method, name: str = "greedy", **values: float | None) -> Decoding:
    """The decoding of that name, overridden by those of `values` that are not None.

    Limits that are not given are the method's own, from its checkpoint.
    """
    checks.check_choice("decoding", name, list(DECODINGS))
    given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    return dataclasses.replace(DECODINGS[name], **{**method.default_limits, **given})


@dataclass(frozen=True)
class Request:
    """One question to be answered once. `seed` and `sample` fix every draw, in any batch."""

    id: str
    question: str
    params: Any = field(default_factory=NoParams)
    decoding: Decoding = GREEDY
    seed: int = 0
    sample: int = 0
    keep_latents: bool = False
    """Return the embeddings that were fed, the method's info on each, and the log-probs of the chosen tokens."""
    context: tuple[tuple[str, str], ...] = ()
    """Turns of a chat before the question: (role, text) of each, as in `Example`."""

    @classmethod
    def of(
        cls, example: Example, params: Any, decoding: Decoding = GREEDY, seed: int = 0, **others: Any
    ) -> "Request":
        """The request for an example's question, the turns before it included."""
        return cls(example.id, example.question, params, decoding, seed, context=example.context, **others)


def check_runnable(method: Method, request: Request) -> None:
    """Reject a request that would fail in a step, or hold up others. ValueError names the request and the value."""
    try:
        if not isinstance(request.question, str):
            raise ValueError(f"question must be a text, got {request.question!r}")
        # Tokenizers raise a TypeError for code points that are no characters.
        checks.check_text("question", request.question)
        for role, text in request.context:
            checks.check_choice("context", role, ROLES)
            checks.check_text("context", text)
        for name in ("seed", "sample"):
            value = getattr(request, name)
            # Draws are computed in int64 columns.
            fits = checks.is_int(value) and value in checks.INT64
            checks.check_holds(name, fits, value, "a whole number from -2^63 to 2^63 - 1")
        if not isinstance(request.decoding, Decoding):
            raise ValueError(f"decoding must be a Decoding, got {request.decoding!r}")
        if not isinstance(request.params, method.Params):
            raise ValueError(
                f"params must be {method.Params.__name__}, those of method {method.name}, got {request.params!r}"
            )
        # The warning that it returns is for the caller that chose the params: a command line, a server.
        method.check_params(request.params)
    except ValueError as error:
        raise ValueError(f"request {request.id}: {error}") from error


def check_context(context: Sequence[tuple[str, str]], is_chat: bool, where: str = "") -> None:
    """ValueError for turns before a question to a model in the plain format, which would see all as one text.

    `where` begins the message. Rows of training and evaluation may have turns: a model is evaluated as it was trained.
    """
    if context and not is_chat:
        turns = "a system message" if "system" in dict(context) else "turns before the question"
        raise ValueError(f"{where}the model has no place for {turns} (template.format: plain)")


class TooLong(ValueError):
    """A request needs more positions than the model's context has."""


def prompt_ids(lm: LatentLM, method: Method, request: Request) -> list[int]:
    """The token ids of the question segment. ValueError if the model has no embedding for one of them; `TooLong` if the
    question and the limits do not fit the model's context."""
    try:
        ids = lm.template.question(
            request.question, method.speed_text(request.params), cached=False, context=request.context
        )
    except ValueError as error:
        raise ValueError(f"request {request.id}: {error}") from error
    decoding = request.decoding
    # Checked with the limits, not with the positions used in the end: a request that starts can always finish.
    needed = len(ids) + decoding.positions_after_question
    if needed > lm.context:
        raise TooLong(
            f"request {request.id}: the question has {len(ids)} tokens, and with max_latents "
            f"{decoding.max_latents} and max_completion_length {decoding.max_completion_length} it needs {needed} "
            f"positions; the model's context is {lm.context}"
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

    Logs the number of those that do not, as `what`. ValueError, which names the `remedy`, if more than half do not.
    """
    too_long = {}
    for index, example in enumerate(progress.track(examples, f"check {what}")):
        # The speed slot of the prompt may be longer for one value than for another, so each is tried.
        for values in params:
            try:
                prompt_ids(lm, method, Request.of(example, values, decoding))
            except TooLong as error:
                too_long[index] = str(error)
    return without_too_long(examples, too_long, what, remedy)
