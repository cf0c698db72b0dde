"""Measurements of systems on the same questions, which `colar inspect` writes as JSON and as a page.

A system is a model at one value of its params. Its part of the JSON holds

    model params              its name
    n                         questions with a reference chain
    diagnosis                 of all of them
    cost                      accuracy and cost, with its own thoughts and with others in their place
    answers                   of each question: the answer, and what went wrong

Comparisons with the reference chain (n, diagnosis) are null for a method whose thoughts stand for none of
its tokens. The thoughts themselves are in the page only, because they are longer than all numbers together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from colar import files, progress
from colar.data.example import Example
from colar.data.judge import verdict
from colar.engine.completion import Completion
from colar.engine.request import GREEDY, Decoding, Request
from colar.evaluation import stats
from colar.evaluation.controls import KINDS, given_thoughts, thoughts_of
from colar.evaluation.evaluate import answer_all
from colar.evaluation.provenance import collect_provenance
from colar.evaluation.report_rows import param_values
from colar.look import page
from colar.look.diagnosis import decoded_answers, diagnose, requests_of
from colar.look.reference_chain import can_be_compared, reference_passes
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

WARM_UP = 8
"""Most thoughts of the warm-up, and most tokens of its answer: a whole chain, by itself, may take minutes."""


def inspect_system(
    name: str,
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Any,
    decoding: Decoding = GREEDY,
    *,
    controls: bool = True,
) -> dict[str, Any]:
    """Let the model of that name answer, and measure it. Returns its part of the JSON, with the thoughts in `answers`.

    The model thinks once for all measurements but the controls. Without `controls`, only its own cost is measured.
    """
    requests = requests_of(examples, params, decoding)
    # The first batch of a process is slow, and no question should pay for it.
    answer_all(lm, method, requests_of(examples[:1], params, _shortened(decoding)), note="warm up")
    completions = answer_all(lm, method, requests)
    compared = can_be_compared(lm, method, examples, params)
    answers = decoded_answers(lm, method, examples, params, completions, compared)
    measured: dict[str, Any] = {"n": None, "diagnosis": None}
    if compared:
        with_steps = [example for example in examples if example.steps]
        passes = progress.track(reference_passes(lm, method, with_steps, params), "write", len(with_steps))
        measured |= {"n": len(with_steps), "diagnosis": diagnose(lm, method, list(passes), params, decoding)}
    cost = measured_cost(lm, method, examples, requests, completions, controls)
    key = {"model": name, "params": dict(param_values(params))}
    return {**key, **measured, "cost": cost, "answers": answers}


def _shortened(decoding: Decoding) -> Decoding:
    """The decoding of the warm-up: at most `WARM_UP` thoughts and tokens of the answer."""
    return replace(
        decoding,
        max_latents=min(decoding.max_latents, WARM_UP),
        max_completion_length=min(decoding.max_completion_length, WARM_UP),
    )


@dataclass(frozen=True)
class Inspection:
    """Systems on the same questions."""

    examples: list[Example]
    systems: list[dict[str, Any]]
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of the JSON, which come first."""

    def to_json(self) -> dict[str, Any]:
        """The numbers of all systems."""
        systems = []
        for system in self.systems:
            answers = [
                {name: answer[name] for name in answer if name not in ("thoughts", "missing")}
                for answer in system["answers"]
            ]
            systems.append({**system, "answers": answers})
        return {**self.more, "provenance": collect_provenance(), "systems": systems}

    def save(self, path: str | Path) -> Path:
        """Write the page, a self-contained HTML file."""
        questions = [example.as_row() for example in self.examples]
        text = page.render(self.to_json(), questions, [system["answers"] for system in self.systems])
        return files.write_text(path, text)


# Accuracy and cost of a system, with its own thoughts and with others in their place

REPLACED = ("shuffled", "zeroed")
"""Controls of methods that think in latents (`evaluation/controls.py`)."""

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
    """Summarise the `completions` of the requests, and answer the requests with other thoughts under each control.

    `outcomes` has an item for each kind of thoughts, `differences` the accuracy with the model's own thoughts minus
    that of each control, on the same questions. The kinds are `own`, those of `REPLACED`, and `none`: an answer without
    thoughts. A model that is right as often with another question's thoughts does not read its thoughts.
    """
    outcomes = {"own": outcome_of(examples, completions)}
    # Latents are kept here too, though nothing reads them, because that takes time, and seconds are compared.
    for kind, asked, control in _controls(lm, method, requests, completions) if with_controls else ():
        outcomes[kind] = outcome_of(examples, answer_all(lm, control, asked, note=f"control: {kind}"))
    right = {kind: outcome["right"] for kind, outcome in outcomes.items()}
    differences = {kind: difference(examples, right["own"], right[kind]) for kind in right if kind != "own"}
    return {"outcomes": outcomes, "differences": differences}


def _controls(
    lm: LatentLM, method: Method, requests: Sequence[Request], completions: Sequence[Completion]
) -> Iterator[tuple[str, Sequence[Request], Method]]:
    """Each kind of thoughts, the requests under it, and the method that answers them."""
    # A chain of tokens has no latents to replace, and neither has a model that never thought.
    if method.thinks_in_latents and any(completion.length for completion in completions):
        own = thoughts_of(lm, completions)
        questions = {(request.question, request.context) for request in requests}
        for kind in REPLACED:
            # A single question has no other to take thoughts from.
            if kind != "shuffled" or len(questions) > 1:
                replaced = KINDS[kind](own, requests)
                yield kind, requests, given_thoughts(method, requests, replaced)
    # At this limit the engine feeds the closing separator at once, regardless of the method's choice.
    at_once = [replace(each, decoding=replace(each.decoding, max_latents=0)) for each in requests]
    yield "none", at_once, method


def outcome_of(examples: Sequence[Example], completions: Sequence[Completion]) -> dict[str, Any]:
    """Means over the answers: `length` is #L, `seconds` a question's share of wall-clock time, in batches.

    `right` has a bool for each question, in order.
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
        outcome[name] = fmean(getattr(each, name) for each in completions)
    return outcome


def difference(examples: Sequence[Example], ours: Sequence[bool], theirs: Sequence[bool]) -> Mean:
    """Difference of our accuracy and theirs, paired by question."""
    clusters = [example.first_id for example in examples]
    return _mean(stats.paired_difference(ours, clusters, theirs, clusters))


def _mean(estimate: stats.Estimate) -> Mean:
    return {"mean": estimate.mean, "interval": estimate.interval}
