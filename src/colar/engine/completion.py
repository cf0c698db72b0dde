"""Events of an engine, the completions made of them (`completions_of`), and the text of an answer (`AnswerText`)."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from colar.checks import NonFiniteError
from colar.engine.request import Request
from colar.model.latent_lm import LatentLM
from colar.template.template import Template

EventKind = Literal["thought", "stop", "token", "restarted", "finished"]


@dataclass(frozen=True)
class Event:
    """An event in the life of a request.

    thought     an embedding was emitted while thinking: `token_id` (-1 for a latent), `embed` (D,) and `info`
    stop        the method ended the thinking, its limit did not: `info`
    token       an answer token, EOS included: `token_id`, `info["logp"]` at the request's temperature, before top-p
    restarted   memory ran out, and the request starts anew: its events so far are void
    finished    no event follows: `reason`, `truncated`, the request's share of wall-clock `seconds`

    `embed` and `info` are set only if the request keeps latents.
    """

    request: Request
    kind: EventKind
    token_id: int = -1
    embed: Tensor | None = None
    info: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str = ""
    truncated: bool = False
    seconds: float = 0.0
    error: Exception | None = None
    """The error that a step of this request raised; the `reason` is then "error"."""
    number: int = 0
    """The engine's number of the request, from 0, which distinguishes equal requests."""
    at: float = field(default_factory=time.perf_counter, compare=False)
    """The time of the event (`time.perf_counter`), which may be received later."""


@dataclass(frozen=True)
class Completion:
    """A finished request. `latents`, `info` and `token_logps` are filled only if the request keeps latents."""

    request: Request
    number: int
    """The engine's number of the request, as in its events."""
    text: str
    token_ids: list[int]
    """Tokens of the answer, without EOS."""
    thought_ids: list[int]
    """The tokens of the thoughts, -1 for a latent."""
    truncated: bool
    """True if a limit ended the thinking or the answer, or an error ended the request."""
    reason: str
    """"stop": the answer ended by itself; "length": its limit ended it; "error": the model's numbers were not finite,
    or a step raised."""
    forward_passes: int
    """One for the question, one for each embedding fed after it."""
    seconds: float
    """The request's share of wall-clock time."""
    error: Exception | None = None
    """The error that a step of this request raised."""
    latents: Tensor | None = None
    """The thoughts, (K, D); drawn latents in float32, for any dtype of the model."""
    info: dict[str, Tensor] = field(default_factory=dict)
    """The method's own quantities of each thought, and of the stop where it chose one: (K, ...) or (K + 1, ...)."""
    stopped: bool = False
    """True if the method ended the thinking itself."""
    token_logps: list[float] = field(default_factory=list)
    """Log-probs of the answer's tokens, EOS included."""

    @property
    def length(self) -> int:
        """#L: the number of embeddings emitted between the two separators."""
        return len(self.thought_ids)

    def thought_info(self, names: Collection[str] | None = None) -> list[Mapping[str, Tensor]]:
        """`info` thought by thought, on the CPU, or its columns of these names; [] if latents were not kept."""
        n = 0 if self.latents is None else len(self.latents)
        # One copy for each name: readers look at single values.
        wanted = self.info.keys() if names is None else self.info.keys() & names
        info = {name: self.info[name].cpu() for name in wanted}
        return [{name: column[k] for name, column in info.items()} for k in range(n)]

    def require_answer(self, where: str = "") -> None:
        """Raise the error that ended the request, if any: that of its step, or NonFiniteError."""
        if self.error is not None:
            raise self.error
        if self.reason == "error":
            raise not_finite(self.request, where)


def not_finite(request: Request, where: str = "") -> NonFiniteError:
    """The error of a request that ended because the model's numbers were not finite."""
    where = where and f"{where}: "
    return NonFiniteError(f"{where}the model's numbers for {request.id} are not finite")


def completions_of(lm: LatentLM, events: Iterable[Event]) -> Iterator[Completion]:
    """Make completions from a stream of events, each as soon as its request has finished."""
    unfinished: dict[int, list[Event]] = {}
    for event in events:
        mine = unfinished.setdefault(event.number, [])
        mine.append(event)
        if event.kind == "restarted":
            mine.clear()
        elif event.kind == "finished":
            del unfinished[event.number]
            yield _complete(lm, mine)


def _complete(lm: LatentLM, events: Sequence[Event]) -> Completion:
    """The completion of one request from its events, of which the last is "finished"."""
    *before, finished = events
    thoughts = [event for event in before if event.kind == "thought"]
    tokens = [event for event in before if event.kind == "token"]
    steps = [event for event in before if event.kind in ("thought", "stop")]

    # EOS was chosen like any token, so it has a log-prob; it is no part of the answer.
    token_ids = [event.token_id for event in tokens]
    if token_ids and token_ids[-1] == lm.template.eos_id:
        token_ids.pop()

    # One forward pass for the question, one for each thought, and one for each answer token: the first follows the
    # separator, each other one the token before it. The last token is not fed.
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
        info={
            name: torch.stack([step.info[name] for step in steps])
            for name in (steps[0].info if steps else ())
        },
        stopped=len(steps) > len(thoughts),
        token_logps=torch.stack(logps).tolist() if logps else [],
    )


# Tokens as text: a character may be several tokens

BROKEN = "\ufffd"
"""A tokenizer's text for bytes that are no character (yet)."""


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TokenText:
    """Token ids in, text out, as soon as the characters are complete."""

    def __init__(self, template: Template) -> None:
        self.tokenizer = template.tokenizer
        self.ids: list[int] = []
        self._start = 0
        """Tokens from here to `_sent` are sent already. They are decoded again, because a token's text may depend on
        its neighbour's."""
        self._sent = 0

    def add(self, ids: Sequence[int]) -> str:
        """The new text."""
        self.ids += ids
        new = self._new()
        if new.endswith(BROKEN):
            return ""
        self._start, self._sent = self._sent, len(self.ids)
        return new

    def end(self) -> str:
        """The remaining text: bytes that never completed a character."""
        new = self._new()
        self._start = self._sent = len(self.ids)
        return new

    def _new(self) -> str:
        before = _decode(self.tokenizer, self.ids[self._start : self._sent])
        return _decode(self.tokenizer, self.ids[self._start :])[len(before) :]


class AnswerText:
    """The text of an answer: `add` its tokens one by one until `stopped`, then `end` it.

    tokens    ' 3'   '6'   '\\xe2\\x82'   '\\xac'   ' '   '.'
    pieces    '3'    '6'   ''           '€'      ''    ' .'      what is held back comes with a later piece, or never

    Without a stop string, the concatenated pieces equal `Template.decode` of all tokens.
    """

    def __init__(self, template: Template, stop: Sequence[str] = ()) -> None:
        self.stop = stop
        self.stopped = False
        self._tokens = TokenText(template)
        self._held_back = ""
        """Text that is not sent yet: white space, or a possible beginning of a stop string."""
        self._begun = False

    def add(self, token_id: int) -> str:
        """The text that can be sent now."""
        new = self._tokens.add([token_id])
        return self._send(new, max(map(len, self.stop), default=1) - 1)

    def end(self) -> str:
        """The remaining text; empty if a stop string has ended the answer."""
        return "" if self.stopped else self._send(self._tokens.end(), 0)

    def _send(self, new: str, keep: int) -> str:
        """The text up to a stop string, else without its last `keep` characters; white space at the end waits."""
        text = self._held_back + new
        # `Template.decode` strips the whole answer, so white space in front is dropped until something is sent.
        if not self._begun:
            text = text.lstrip()
        places = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        self.stopped = bool(places)
        end = min(places) if places else max(0, len(text) - keep)
        sent = text[:end].rstrip()
        self._held_back = text[len(sent) :]
        self._begun = self._begun or bool(sent)
        return sent
