"""What an engine is asked and what it answers: `Request`, `Event`, `Completion`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from colar.methods.base import Method, NoParams
from colar.model.latent_lm import LatentLM


@dataclass(frozen=True)
class Decoding:
    """How thoughts and tokens are drawn, and where they are cut."""

    temperature: float = 0.0
    """Divides the logits, for stop decisions and tokens alike; 0 takes the most probable."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose mass reaches this."""
    latent_temperature: float = 0.0
    """Multiplies the latent head's sigma; 0 takes its mean."""
    max_latents: int = 128
    """Most embeddings between the two separators (a CoT's tokens too); the answer is then asked for."""
    max_completion_length: int = 64
    """Most tokens of the answer."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not self.latent_temperature >= 0:
            raise ValueError(f"latent_temperature must be 0 or more, got {self.latent_temperature}")
        if self.max_latents < 0 or self.max_completion_length < 1:
            raise ValueError("max_latents must be 0 or more and max_completion_length 1 or more")


GREEDY = Decoding()
SAMPLED = Decoding(temperature=1.0, top_p=0.9, latent_temperature=1.0)
"""The paper's: "a temperature of 1 and top-p of 0.9"."""
DECODINGS = {"greedy": GREEDY, "sampled": SAMPLED}


@dataclass(frozen=True)
class Request:
    """One question to be answered once. `seed` and `sample` fix every draw, whoever the batch mates are."""

    id: str
    question: str
    params: Any = field(default_factory=NoParams)
    decoding: Decoding = GREEDY
    seed: int = 0
    sample: int = 0
    keep_latents: bool = False
    """Return the embeddings that were fed, what the method says of each, and the log-probs of what was chosen."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a request.

    "thought": an embedding was emitted while thinking (`token_id` -1 for a latent; `embed` (D,) and `info`
    where kept). "stop": the method ended the thinking (told only where latents are kept). "token": an answer
    token, EOS included (`info["logp"]` where kept: at the request's temperature, before top-p). "finished": with
    its `reason` and its share of wall-clock `seconds`.
    """

    request: Request
    kind: Literal["thought", "stop", "token", "finished"]
    token_id: int = -1
    embed: Tensor | None = None
    info: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str = ""
    truncated: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Completion:
    """A finished request.

    `length` is #L, the number of embeddings emitted between the two separators; `thought_ids` their tokens (-1
    for a latent); `token_ids` the answer's without EOS; `truncated` says that the thinking or the answer met
    its limit, and `reason` whether the answer ended by itself ("stop") or not ("length"), or the model's numbers
    were not finite ("error"). `forward_passes` counts the question's and one for each embedding fed after it.
    With `keep_latents`: `latents` (K, D) as fed, `info` of each, `stop_info` where the method ended the thinking
    itself, `token_logps` (EOS included).
    """

    request: Request
    text: str
    token_ids: list[int]
    thought_ids: list[int]
    truncated: bool
    reason: str
    forward_passes: int
    seconds: float
    latents: Tensor | None = None
    info: list[Mapping[str, Tensor]] = field(default_factory=list)
    stop_info: Mapping[str, Tensor] = field(default_factory=dict)
    token_logps: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.thought_ids)


def fold(lm: LatentLM, events: Iterable[Event]) -> Iterable[Completion]:
    """Completions out of a stream of events, each as soon as its request has finished."""
    open_: dict[int, list[Event]] = {}
    for event in events:
        open_.setdefault(id(event.request), []).append(event)
        if event.kind == "finished":
            yield _complete(lm, open_.pop(id(event.request)))


def _complete(lm: LatentLM, events: list[Event]) -> Completion:
    *body, last = events
    thoughts = [event for event in body if event.kind == "thought"]
    ids = [event.token_id for event in body if event.kind == "token"]
    passes = 1 + len(thoughts) + len(ids)
    ids = ids[:-1] if ids and ids[-1] == lm.template.eos_id else ids
    embeds = [event.embed for event in thoughts if event.embed is not None]
    stops = [event.info for event in body if event.kind == "stop"]
    logps = [event.info["logp"] for event in body if event.kind == "token" and event.info]
    return Completion(
        request=last.request,
        text=lm.template.decode(ids),
        token_ids=ids,
        thought_ids=[event.token_id for event in thoughts],
        truncated=last.truncated,
        reason=last.reason,
        forward_passes=passes,
        seconds=last.seconds,
        latents=torch.stack(embeds) if embeds else None,
        info=[event.info for event in thoughts] if last.request.keep_latents else [],
        stop_info=stops[0] if stops else {},
        token_logps=torch.stack(logps).tolist() if logps else [],
    )


def prompt_ids(lm: LatentLM, method: Method, request: Request) -> list[int]:
    """The question segment. ValueError where it and the limits do not fit the model's context."""
    ids = lm.template.question(request.question, method.prompt(request.params))
    decoding = request.decoding
    needed = len(ids) + decoding.max_latents + 1 + decoding.max_completion_length
    if needed > lm.context_length:
        raise ValueError(
            f"request {request.id}: the question has {len(ids)} tokens, and with max_latents "
            f"{decoding.max_latents} and max_completion_length {decoding.max_completion_length} it needs {needed} "
            f"positions; the model's context is {lm.context_length}"
        )
    return ids
