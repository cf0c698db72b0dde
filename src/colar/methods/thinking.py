"""One step of thinking: the settings and hidden states of all rows, and the method's reply.

`ThinkState` has a row for each request that still thinks. `StepConditions` are the facts about these rows by which
Python may branch; all else is columns, so that a step can be recorded as a CUDA graph.

Shape suffixes: B rows, D width, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from colar.model.head import PartialHead
from colar.model.latent_lm import LatentLM
from colar.ops import devices, noise
from colar.ops.sampling import DrawModes, sample_tokens, token_logps

CPU = torch.device("cpu")


class RequestView(Protocol):
    """The fields of a request that a method may read; `engine.request.Request` has them."""

    @property
    def id(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def context(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def params(self) -> Any: ...
    @property
    def decoding(self) -> Any: ...
    @property
    def seed(self) -> int: ...
    @property
    def sample(self) -> int: ...


@dataclass(frozen=True)
class StepConditions:
    """Facts about the settings of all rows by which Python branches in a step, known without reading a tensor.

    Steps of equal conditions run the same operations, so that one CUDA graph serves them. The conditions of more rows
    than a step has are valid for it too: they may cost a little more, and give the same result.
    """

    modes: DrawModes
    """Modes of drawing tokens at `temperature`."""
    latent_modes: DrawModes
    """The same at `latent_temperature`."""
    one_temperature: bool
    """True if every row has the same temperature for both."""
    most: tuple[tuple[str, int], ...]
    """Each of the params and its largest value, rounded up."""
    whole_numbers: frozenset[str]
    """The params whose values are all whole numbers."""

    def of_tokens(self) -> "StepConditions":
        """The conditions of a step that draws one token at `temperature`, for any params."""
        return StepConditions(self.modes, self.modes, True, (), frozenset())

    @classmethod
    def of_requests(cls, requests: Sequence[RequestView]) -> "StepConditions":
        """The conditions of rows that answer these requests."""
        # Many requests have the same settings, which are read once.
        decodings = {request.decoding for request in requests}
        distinct = {request.params for request in requests}
        settings = [vars(params) for params in distinct]
        names = settings[0] if settings else ()
        values = {name: [float(each[name]) for each in settings] for name in names}
        return cls(
            DrawModes.of([(decoding.temperature, decoding.top_p) for decoding in decodings]),
            DrawModes.of([(decoding.latent_temperature, decoding.top_p) for decoding in decodings]),
            all(decoding.temperature == decoding.latent_temperature for decoding in decodings),
            tuple((name, math.ceil(max(column))) for name, column in values.items()),
            frozenset(name for name, column in values.items() if all(map(float.is_integer, column))),
        )

    def largest(self, name: str) -> int:
        """The largest value of one of the params, rounded up."""
        return dict(self.most)[name]


@dataclass
class ThinkState:
    """One step of rows that think, or of rows that answer, whose tokens are chosen as thoughts are.

    `hidden` (B, D) is the last hidden state after the question or after the last thought; `step` (B,) counts
    forward passes since the question. `uniform` and `normal` are functions of (request seed, sample, step):
    a request gets the same draws in any batch.
    """

    hidden: Tensor
    step: Tensor
    params: dict[str, Tensor]
    temperature: Tensor
    top_p: Tensor
    latent_temperature: Tensor
    seed: Tensor
    sample: Tensor
    make_logits: Callable[[Tensor], Tensor]
    conditions: StepConditions
    """The conditions of these rows, or of these and others."""
    begun: dict[str, Tensor] = field(default_factory=dict)
    """The columns of the method's `begin` for these rows."""
    wants_info: bool = True
    """True if `Thought.info` is read: a method may leave out what is costly to compute."""
    make_partial_head: Callable[[tuple[int, ...]], PartialHead] | None = None
    """The model's `partial_head`, as an engine caches it from step to step; None if it is not cached."""

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestView],
        hidden: Tensor,
        step: Tensor,
        make_logits: Callable[[Tensor], Tensor],
        begun: dict[str, Tensor],
    ) -> "ThinkState":
        """The state of these requests, a row each, at these steps."""
        return cls(
            hidden,
            step,
            params=param_columns([request.params for request in requests], hidden.device),
            **sampling_columns(requests, hidden.device),
            make_logits=make_logits,
            conditions=StepConditions.of_requests(requests),
            begun=begun,
        )

    @cached_property
    def _logits(self) -> Tensor:
        return self.make_logits(self.hidden)

    def logits(self) -> Tensor:
        """Logits of the LM head at `hidden`, (B, V) float32; computed on first use."""
        return self._logits

    def uniform(self, stream: int = noise.TOKEN, place: int = 0) -> Tensor:
        """Uniform numbers in [0, 1), (B,) float64: for each row the one at a place of this step's stream."""
        return noise.uniform(noise.keys(self.seed, self.sample, self.step, stream), place + 1)[:, place]

    def normal(self, n: int) -> Tensor:
        """(B, n) float32 standard normals."""
        return noise.normal(noise.keys(self.seed, self.sample, self.step, noise.LATENT), n)


@dataclass(frozen=True)
class Thought:
    """The result of a step: the next thought of each row, or its stop. The embedding of a row that is done is ignored.

    embeds (B, D) · done (B,) bool · token_ids (B,) int64, -1 for a latent · info: columns (B, ...) for inspection and
    for reinforcement. A method that thinks a fixed number of times leaves `info` empty, because a stop with an info
    counts as chosen.
    """

    embeds: Tensor
    done: Tensor
    token_ids: Tensor
    info: dict[str, Tensor] = field(default_factory=dict)


def next_tokens(state: ThinkState) -> Tensor:
    """(B,) int64: the token that each row chooses at this step, by its temperature and top-p."""
    return sample_tokens(
        state.logits(), state.temperature, state.top_p, state.uniform(), state.conditions.modes
    )


def token_thought(lm: LatentLM, state: ThinkState, end_id: int) -> Thought:
    """Choose a token as a thought; a row that chooses `end_id` is done."""
    ids_B = next_tokens(state)
    # A softmax over the whole vocabulary, so it is computed only if it is read.
    info = {"logp": token_logps(state.logits(), state.temperature, ids_B)} if state.wants_info else {}
    return Thought(lm.embed(ids_B), ids_B == end_id, ids_B, info)


def fixed_thought(state: ThinkState, embeds_BD: Tensor, n: int) -> Thought:
    """Feed `embeds_BD` as latents until every row has had `n` of them; for n = 0 no row thinks, and none is fed."""
    return Thought(embeds_BD.to(state.hidden.dtype), state.step >= n, torch.full_like(state.step, -1))


def sampling_columns(requests: Sequence[RequestView], device: torch.device) -> dict[str, Any]:
    """The columns (B,) of a `ThinkState` with its requests' sampling settings, by name, on the device."""
    decodings = [request.decoding for request in requests]
    columns = _float_columns(decodings, ("temperature", "top_p", "latent_temperature"), device)
    for name in ("seed", "sample"):
        columns[name] = devices.numbers([getattr(request, name) for request in requests], device)
    return columns


def param_columns(params: Sequence[Any], device: torch.device = CPU) -> dict[str, Tensor]:
    """A (B,) float64 column for each field of the rows' params, on the device."""
    names = [f.name for f in dataclasses.fields(params[0])] if params else []
    return _float_columns(params, names, device)


def _float_columns(values: Sequence[Any], names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """A (B,) column for each of these attributes of B values."""
    columns = {}
    for name in names:
        # float64: in float32 a factor of 1.1 would move the groups of long chains.
        column = torch.tensor([float(getattr(value, name)) for value in values], dtype=torch.float64)
        columns[name] = devices.send(column, device)
    return columns
