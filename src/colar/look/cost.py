"""Accuracy and cost of a system, with its own thoughts and with others in their place.

    own        its own thoughts
    shuffled   those of another question (`controls.py`)
    zeroed     zeros in their place
    none       no thoughts: it is asked for the answer at once

A model that is as often right with another question's thoughts does not read them: `differences` are paired by
question. Controls that replace latents are for methods that think in some. Intervals are those of
`evaluation/stats.py` and of reports: mean ± 1.96 standard errors, clustered by question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from colar.data.example import Example
from colar.data.judge.answers import verdict
from colar.engine.completion import Completion
from colar.engine.request import Request
from colar.evaluation import controls, stats
from colar.evaluation.controls import GivenThoughts
from colar.evaluation.evaluate import answer_all
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

REPLACED = ("shuffled", "zeroed")


Mean = dict[str, Any]
"""`mean` over questions and its 95% `interval`; None for a single question."""


def measured_cost(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    with_controls: bool = True,
) -> dict[str, dict[str, Any]]:
    """Fold the `completions` of the requests, and answer these with other thoughts under each control.

    `outcomes` has each kind of thoughts; `differences` the accuracy with its own thoughts minus that of each control,
    on the same questions.
    """
    outcomes = {"own": outcome_of(examples, completions)}
    # Their latents are kept too, though nothing reads them: it takes time, and seconds are compared.
    for control in _controls(lm, method, requests, completions) if with_controls else ():
        answers = answer_all(lm, control.method, control.requests, note=f"control: {control.kind}")
        outcomes[control.kind] = outcome_of(examples, answers)
    right = {kind: outcome["right"] for kind, outcome in outcomes.items()}
    differences = {kind: difference(examples, right["own"], right[kind]) for kind in right if kind != "own"}
    return {"outcomes": outcomes, "differences": differences}


class _Control(NamedTuple):
    """A kind of thoughts, the requests under it, and the method that answers them."""

    kind: str
    requests: Sequence[Request]
    method: Method


def _controls(
    lm: LatentLM, method: Method, requests: Sequence[Request], completions: Sequence[Completion]
) -> list[_Control]:
    with_latents = []
    # A chain of tokens has no latents to replace, and neither has a model that never thought.
    if method.thinks_in_latents and any(completion.length for completion in completions):
        own = controls.thoughts_of(lm, completions)
        questions = {(request.question, request.context) for request in requests}
        for kind in REPLACED:
            # A single question has no other to take thoughts from.
            if kind != "shuffled" or len(questions) > 1:
                replaced = controls.KINDS[kind](own, requests, 0)
                with_latents.append(_Control(kind, requests, GivenThoughts(method, requests, replaced)))
    # At this limit the engine feeds the closing separator at once, for any choice of the method.
    at_once = [replace(each, decoding=replace(each.decoding, max_latents=0)) for each in requests]
    return [*with_latents, _Control("none", at_once, method)]


def outcome_of(examples: Sequence[Example], completions: Sequence[Completion]) -> dict[str, Any]:
    """Fold answers into means: of a question, `length` is #L and `seconds` its share of wall-clock time, in batches.

    `right` has each question, in their order.
    """
    pairs = zip(examples, completions, strict=True)
    right = [verdict(completion.text, example).correct for example, completion in pairs]
    # Repeated questions are one cluster.
    clusters = [example.first_id for example in examples]
    outcome: dict[str, Any] = {
        "n": len(examples),
        "accuracy": _mean(stats.mean(right, clusters)),
        "right": right,
    }
    for name in ("length", "forward_passes", "seconds"):
        outcome[name] = _mean(stats.mean([getattr(each, name) for each in completions], clusters))
    return outcome


def difference(examples: Sequence[Example], ours: Sequence[bool], theirs: Sequence[bool]) -> Mean:
    """Difference of our accuracy and theirs, paired by question."""
    clusters = [example.first_id for example in examples]
    return _mean(stats.paired_difference(ours, clusters, theirs, clusters))


def _mean(estimate: stats.Estimate) -> Mean:
    return {"mean": estimate.mean, "interval": estimate.interval}
