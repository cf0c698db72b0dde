"""Requests go into an engine; events come out, and `fold` makes completions of them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from colar import checks, files, progress
from colar.data.example import ROLES, Example, leave_out
from colar.methods.base import Method, NoParams
from colar.model.latent_lm import LatentLM

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
TEMPERATURES = (1e-6, 100)
"""Bounds of a temperature above 0: logits divided by it, and latents with their noise, stay finite in float32."""


@dataclass(frozen=True)
class Decoding:
    """Settings of how thoughts and tokens are drawn, and where they are cut."""

    temperature: float = 0.0
    """Divides the logits, for stop decisions and tokens alike; 0 takes the most probable. 0, or in `TEMPERATURES`."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose mass reaches this."""
    latent_temperature: float = 0.0
    """Multiplies the latent head's sigma, or divides the logits of a sequential thought's tokens; 0: no draw."""
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
            whole = isinstance(value, int) and not isinstance(value, bool)
            checks.check_holds(name, whole, value, "a whole number")
            checks.check_holds(name, value >= least, value, f"{least} or more")

    @property
    def positions(self) -> int:
        """The most positions that a row may need after its question: thoughts, separator, answer."""
        return self.max_latents + 1 + self.max_completion_length


GREEDY = Decoding()
SAMPLED = Decoding(temperature=1.0, top_p=0.9, latent_temperature=1.0)
"""The paper's: "a temperature of 1 and top-p of 0.9"."""
DECODINGS = {"greedy": GREEDY, "sampled": SAMPLED}


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
    """Return the embeddings that were fed, the method's info on each, and the log-probs of what was chosen."""
    context: tuple[tuple[str, str], ...] = ()
    """Turns of a chat before the question: (role, text) of each, as in `Example`."""


def answer_key(request: Request, model: Mapping[str, Any]) -> str:
    """16 hex digits of everything that an answer depends on: an output that holds the key holds the answer.

    `model` names what the request does not: the checkpoint's digest, and how it is loaded (JSON values).
    """
    fields = {
        "id": request.id,
        "question": request.question,
        "params": dataclasses.asdict(request.params),
        "decoding": dataclasses.asdict(request.decoding),
        "seed": request.seed,
        "sample": request.sample,
        "model": dict(model),
    }
    # A question without earlier turns has the key of earlier versions.
    if request.context:
        fields["context"] = request.context
    return files.digest([json.dumps(fields, sort_keys=True)])


@dataclass(frozen=True)
class Event:
    """A thing that happened to a request.

    thought     an embedding was emitted while thinking: `token_id` (-1 for a latent), `embed` (D,) and `info`
    stop        the method ended the thinking: `info`
    token       an answer token, EOS included: `token_id`, `info["logp"]` at the request's temperature, before top-p
    finished    no event follows: `reason`, `truncated`, the request's share of wall-clock `seconds`

    `embed`, `info` and the stop come only where the request keeps latents.
    """

    request: Request
    kind: Literal["thought", "stop", "token", "finished"]
    token_id: int = -1
    embed: Tensor | None = None
    info: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str = ""
    truncated: bool = False
    seconds: float = 0.0
    error: Exception | None = None
    """The error that a step of this request raised: it finished with reason "error"."""
    number: int = 0
    """The engine's number of the request, from 0: equal requests differ in it."""
    at: float = field(default_factory=time.perf_counter, compare=False)
    """The time of the event (`time.perf_counter`), which may be received later."""


class TooLong(ValueError):
    """A request needs more positions than the model's context has."""


class NonFiniteError(FloatingPointError):
    """A loss, a gradient or the hidden state of a request is NaN or infinite."""


@dataclass(frozen=True)
class Completion:
    """A finished request. The fields from `latents` on are filled where it keeps them."""

    request: Request
    number: int
    """The request's, as in its events."""
    text: str
    token_ids: list[int]
    """The answer's, without EOS."""
    thought_ids: list[int]
    """The tokens of the thoughts, -1 for a latent."""
    truncated: bool
    """True if the thinking or the answer met its limit."""
    reason: str
    """"stop": the answer ended by itself; "length": its limit did; "error": the model's numbers were not finite, or a
    step raised."""
    forward_passes: int
    """One for the question, one for each embedding fed after it."""
    seconds: float
    """The request's share of wall-clock time."""
    error: Exception | None = None
    """The error that a step of this request raised."""
    latents: Tensor | None = None
    """The thoughts, (K, D); drawn latents in float32, for any dtype of the model."""
    info: list[Mapping[str, Tensor]] = field(default_factory=list)
    """The method's own quantities of each thought."""
    stop_info: Mapping[str, Tensor] = field(default_factory=dict)
    """The same of the stop, if the method ended the thinking itself."""
    token_logps: list[float] = field(default_factory=list)
    """Log-probs of the answer's tokens, EOS included."""

    @property
    def length(self) -> int:
        """#L: the number of embeddings emitted between the two separators."""
        return len(self.thought_ids)

    def require_finite(self, where: str = "") -> None:
        """Raise NonFiniteError if the engine ended the request with an error: there is no answer to judge."""
        if self.reason == "error":
            where = where and f"{where}: "
            raise NonFiniteError(f"{where}the model's numbers for {self.request.id} are not finite")


def fold(lm: LatentLM, events: Iterable[Event]) -> Iterator[Completion]:
    """Completions out of a stream of events, each as soon as its request has finished."""
    unfinished: dict[int, list[Event]] = {}
    for event in events:
        mine = unfinished.setdefault(event.number, [])
        mine.append(event)
        if event.kind == "finished":
            del unfinished[event.number]
            yield _complete(lm, mine)


def _complete(lm: LatentLM, events: Sequence[Event]) -> Completion:
    """The completion of one request from its events, of which the last is "finished"."""
    *before, finished = events
    thoughts = [event for event in before if event.kind == "thought"]
    tokens = [event for event in before if event.kind == "token"]
    stop_info: Mapping[str, Tensor] = {}
    for event in before:
        if event.kind == "stop":
            stop_info = event.info

    # EOS was chosen like any token, so it has a log-prob; it is no part of the answer.
    token_ids = [event.token_id for event in tokens]
    if token_ids and token_ids[-1] == lm.template.eos_id:
        token_ids.pop()

    # The question is one forward pass, each thought fed is another. So is each answer token: the separator is fed for
    # the first of them, and the last is not fed.
    forward_passes = 1 + len(thoughts) + len(tokens)
    embeds = [event.embed for event in thoughts if event.embed is not None]
    logps = [event.info["logp"] for event in tokens if event.info]
    return Completion(
        request=finished.request,
        number=finished.number,
        text=lm.template.decode(token_ids),
        token_ids=token_ids,
        thought_ids=[event.token_id for event in thoughts],
        truncated=finished.truncated,
        reason=finished.reason,
        forward_passes=forward_passes,
        seconds=finished.seconds,
        error=finished.error,
        latents=torch.stack(embeds) if embeds else None,
        info=[event.info for event in thoughts] if finished.request.keep_latents else [],
        stop_info=stop_info,
        token_logps=torch.stack(logps).tolist() if logps else [],
    )


def check(method: Method, request: Request) -> None:
    """Reject what would fail in a step, or hold up those of others. ValueError names the request and the value."""
    try:
        if not isinstance(request.question, str):
            raise ValueError(f"question must be a text, got {request.question!r}")
        # Tokenizers raise a TypeError for what is no character.
        checks.check_text("question", request.question)
        for role, text in request.context:
            checks.check_choice("context", role, ROLES)
            checks.check_text("context", text)
        for name in ("seed", "sample"):
            _check_int64(name, getattr(request, name))
        if not isinstance(request.decoding, Decoding):
            raise ValueError(f"decoding must be a Decoding, got {request.decoding!r}")
        if not isinstance(request.params, method.Params):
            raise ValueError(
                f"params must be {method.Params.__name__}, those of method {method.name}, got {request.params!r}"
            )
        # Its warnings are for those who choose the params: a command line, a server.
        method.check_params(request.params)
    except ValueError as error:
        raise ValueError(f"request {request.id}: {error}") from error


def _check_int64(name: str, value: object) -> None:
    """Draws are computed in int64 columns."""
    if not isinstance(value, int) or isinstance(value, bool) or not INT64_MIN <= value <= INT64_MAX:
        raise ValueError(f"{name} must be a whole number from -2^63 to 2^63 - 1, got {value!r}")


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
    needed = len(ids) + decoding.positions
    if needed > lm.context_length:
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
