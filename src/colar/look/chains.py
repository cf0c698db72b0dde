"""A model's own chains beside the reference's: each thought with the group that it should say, and what went wrong.

    reference   << 5 | * 5 | = 25 | >>          groups
    thoughts    << 5 | * 5 | = 35 | >>          read as their c nearest tokens, or as what the head chose
    marks       right  right  wrong  after

    right     says all tokens of its group
    wrong     the chain's first thought that does not: `diagnosis.classify` goes by it
    after     comes after a wrong one, and differs too
    extra     comes behind the reference's end
    null      there is nothing to compare it with

Groups that no thought has come to are `missing`. Shape suffixes: K thoughts, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from colar import progress
from colar.data.example import Example
from colar.data.judge.answers import verdict
from colar.engine.engine import Engine
from colar.engine.request import Completion, Decoding, Request, fold
from colar.look.diagnosis import classify, missing
from colar.look.reference_chain import Token, groups_thought, reference_groups, reference_rows
from colar.look.thought import ReadAs, directions, group_size, read_thoughts, said_by, says
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.ops import noise

BATCH = 32
PLAIN_CAUSES = ("right", "unparsable", "wrong")
"""Cause of an answer that has no reference chain."""


@dataclass(frozen=True)
class Chain:
    """One question, answered once."""

    id: str
    answer: str
    right: bool
    cause: str
    """One of `diagnosis.CAUSES`; of `PLAIN_CAUSES` where there is no chain to compare with."""
    length: int
    forward_passes: int
    seconds: float
    """The question's share of wall-clock time."""
    truncated: bool
    reference_length: int | None
    """Groups of the reference chain."""
    thoughts: list[dict[str, Any]]
    """THOUGHTs, each with its `mark` and its `reference`: the group's tokens, their kinds, and whether it says them."""
    missing: list[list[dict[str, Any]]]
    """Groups without a thought."""

    def summary(self) -> dict[str, Any]:
        """All but the thoughts."""
        return {name: value for name, value in vars(self).items() if name not in ("thoughts", "missing")}


def requests_of(examples: Sequence[Example], params: Any, decoding: Decoding) -> list[Request]:
    """The requests of `colar evaluate`'s first seed, which keep their latents."""
    requests = []
    for example in examples:
        seed = noise.seed_from(0, example.id)
        request = Request(
            example.id,
            example.question,
            params,
            decoding,
            seed,
            keep_latents=True,
            context=example.context,
        )
        requests.append(request)
    return requests


def answer_all(
    lm: LatentLM, method: Method, requests: Sequence[Request], note: str = "think"
) -> list[Completion]:
    """The completions, in the order of the requests."""
    found: dict[int, Completion] = {}
    completions = fold(lm, Engine(lm, method, BATCH).stream(requests))
    for completion in progress.track(completions, note, len(requests)):
        completion.require_finite()
        # A new engine numbers its requests from 0, in their order; they finish in another.
        found[completion.number] = completion
    return [found[number] for number in range(len(requests))]


def chains_of(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Any,
    completions: Sequence[Completion],
    compare: bool = True,
) -> list[Chain]:
    """Each example's completion, read. Without `compare`, or for an example without steps, nothing is marked."""
    directions_VD = directions(lm)
    chains = []
    for example, completion in zip(examples, completions, strict=True):
        groups: Sequence[list[Token]] | None = None
        if compare and example.steps:
            (row,) = reference_rows(lm, method, [example], params)
            groups = groups_thought(lm, reference_groups(lm, method, row), completion)
        chains.append(_chain(lm, example, params, completion, groups, directions_VD))
    return chains


def _chain(
    lm: LatentLM,
    example: Example,
    params: Any,
    completion: Completion,
    groups: Sequence[list[Token]] | None,
    directions_VD: Tensor,
) -> Chain:
    read_as = said_by(completion, group_size(params), directions_VD)
    found = verdict(completion.text, example)
    parsed = found.parsed is not None
    thoughts = read_thoughts(lm, completion, directions_VD=directions_VD)
    if groups is None:
        cause = "right" if found.correct else "wrong" if parsed else "unparsable"
        for thought in thoughts:
            # The page reads both keys of every thought, compared or not.
            thought |= {"mark": None, "reference": []}
    else:
        cause = classify(groups, read_as, parsed, found.correct)
        marks = marks_of(groups, read_as)
        for k, thought in enumerate(thoughts):
            group = groups[k] if k < len(groups) else []
            thought |= {"mark": marks[k], "reference": _reference(lm, group, read_as[k])}
    rest = [] if groups is None else groups[len(thoughts) :]
    return Chain(
        id=example.id,
        answer=completion.text,
        right=found.correct,
        cause=cause,
        length=completion.length,
        forward_passes=completion.forward_passes,
        seconds=round(completion.seconds, 6),
        truncated=completion.truncated,
        reference_length=None if groups is None else len(groups),
        thoughts=thoughts,
        missing=[_reference(lm, group, set()) for group in rest],
    )


def marks_of(groups: Sequence[Sequence[Token]], read_as: Sequence[ReadAs]) -> list[str]:
    """The mark of each thought."""
    marks = []
    wrong = False
    for k, ids in enumerate(read_as):
        if k >= len(groups):
            marks.append("extra")
        elif not missing(groups[k], ids):
            marks.append("right")
        else:
            marks.append("after" if wrong else "wrong")
            wrong = True
    return marks


def _reference(lm: LatentLM, group: Sequence[Token], read_as: ReadAs) -> list[dict[str, Any]]:
    found = []
    for token, said in zip(group, says([token.token_id for token in group], read_as), strict=True):
        found.append({"text": lm.template.token(token.token_id), "kind": token.kind, "said": said})
    return found
