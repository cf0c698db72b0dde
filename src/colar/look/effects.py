"""Effects of thoughts on the answer: accuracy and cost with other thoughts, and with one thought changed.

All thoughts of a question are replaced (`control_results`):

    own        its own thoughts
    shuffled   those of another question (`controls.py`)
    zeroed     zeros in their place
    none       no thoughts: it is asked for the answer at once

A model that is as often right with another question's thoughts does not read them: `differences` are paired by
question. Controls that replace latents are for methods that think in some. Intervals are those of
`evaluation/stats.py`, clustered by question: Wilson's for accuracies, mean ± 1.96 standard errors for the rest.

One thought is swapped or dropped, and the answer decoded anew (`causal_tests`):

    own         l1  l2  l3  l4  ###  a1 a2
    kept        l1  x   l3  l4  ###  ?? ??        only thought 2 is another; the later ones are fed as they were
    rethought   l1  x   ??  ??  ...  ?? ??        from there on the model thinks for itself, and stops for itself

    none        x is l2: a check, nothing may change
    swap        x is the thought of another question at that position (its last one, where its chain is shorter)
    drop        l2 is left out. Rethought, l3 is fed in its place; where the last thought is dropped nothing follows
                it that could be fed, so such a chain is not counted

Thoughts are the model's own.

Shape suffixes: R requests, K thoughts, D width, B rows of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colar import progress
from colar.data.example import Example
from colar.data.judge.answers import verdict
from colar.engine.engine import Engine
from colar.engine.request import Completion, Request
from colar.evaluation import controls, stats
from colar.evaluation.controls import GivenThoughts, Thoughts
from colar.look.chains import BATCH, answer_all
from colar.methods.base import Method, RequestView, ThinkState, Thought
from colar.model.latent_lm import LatentLM

REPLACED = ("shuffled", "zeroed")
CONTROLS = (*REPLACED, "none")


@dataclass(frozen=True)
class Mean:
    """A mean over questions and its 95% interval; None for a single question."""

    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ControlOutcome:
    """The answers with one kind of thoughts."""

    n: int
    accuracy: Mean
    """0..1."""
    length: Mean
    """#L: embeddings emitted while thinking."""
    forward_passes: Mean
    seconds: Mean
    """A question's share of wall-clock time, in batches."""
    right: list[bool]
    """Of each question, in their order."""


@dataclass(frozen=True)
class ControlResults:
    outcomes: dict[str, ControlOutcome]
    differences: dict[str, Mean]
    """Accuracy with its own thoughts minus that of each control, on the same questions."""


def control_results(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    kinds: Sequence[str] = CONTROLS,
    seed: int = 0,
) -> ControlResults:
    """Answer the requests with other thoughts than those of their `completions`, for each of the `kinds` of control.

    `seed` fixes who gets whose thoughts.
    """
    outcomes = {"own": outcome_of(examples, completions)}
    # Their latents are kept too, though nothing reads them: it takes time, and seconds are compared.
    for kind, asked, made in _controls(lm, method, list(requests), completions, kinds, seed):
        outcomes[kind] = outcome_of(examples, answer_all(lm, made, asked, f"control: {kind}"))
    differences = {}
    for kind, outcome in outcomes.items():
        if kind != "own":
            differences[kind] = difference(examples, outcomes["own"].right, outcome.right)
    return ControlResults(outcomes, differences)


def _controls(
    lm: LatentLM,
    method: Method,
    requests: list[Request],
    completions: Sequence[Completion],
    kinds: Sequence[str],
    seed: int,
) -> list[tuple[str, list[Request], Method]]:
    """Each control: its requests, and the method that answers them."""
    made: list[tuple[str, list[Request], Method]] = []
    # A chain of tokens has no latents to replace, and neither has a model that never thought.
    if method.thinks_in_latents and any(completion.length for completion in completions):
        own = controls.thoughts_of(lm, completions)
        questions = {(request.question, request.context) for request in requests}
        for kind in REPLACED:
            # A single question has no other to take thoughts from.
            if kind in kinds and (kind != "shuffled" or len(questions) > 1):
                replaced = controls.KINDS[kind](own, requests, seed)
                made.append((kind, requests, GivenThoughts(method, requests, replaced)))
    if "none" in kinds:
        at_once = []
        for request in requests:
            # At this limit the engine feeds the closing separator at once, for any choice of the method.
            at_once.append(replace(request, decoding=replace(request.decoding, max_latents=0)))
        made.append(("none", at_once, method))
    return made


def outcome_of(examples: Sequence[Example], completions: Sequence[Completion]) -> ControlOutcome:
    """Fold answers into means."""
    right = []
    for example, completion in zip(examples, completions, strict=True):
        right.append(verdict(completion.text, example).correct)
    clusters = clusters_of(examples)
    estimate = stats.mean(right, clusters)
    return ControlOutcome(
        n=len(examples),
        accuracy=Mean(estimate.mean, stats.wilson(estimate)),
        length=_mean([completion.length for completion in completions], clusters),
        forward_passes=_mean([completion.forward_passes for completion in completions], clusters),
        seconds=_mean([completion.seconds for completion in completions], clusters),
        right=right,
    )


def difference(examples: Sequence[Example], ours: Sequence[bool], theirs: Sequence[bool]) -> Mean:
    """Difference of our accuracy and theirs, paired by question."""
    clusters = clusters_of(examples)
    estimate = stats.paired_difference(ours, clusters, theirs, clusters)
    return Mean(estimate.mean, estimate.interval)


def clusters_of(examples: Sequence[Example]) -> list[str]:
    """Repeated questions are one cluster."""
    return [example.first_id for example in examples]


def _mean(values: Sequence[float], clusters: Sequence[Any]) -> Mean:
    estimate = stats.mean(values, clusters)
    return Mean(estimate.mean, estimate.interval)


# One thought changed

POSITIONS = ("first", "middle", "last")
"""Of the thought in its chain. In a chain of one they are the same."""
THENS = ("rethought", "kept")
CHANGES = ("none", "swap", "drop")


@dataclass(frozen=True)
class Effect:
    """One of `CHANGES` at one of `POSITIONS`: shares between 0 and 1 of `n` questions, None without any."""

    change: str
    position: str
    then: str
    n: int
    changed: float | None
    """Answers of which any token is another one."""
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(frozen=True)
class CausalTests:
    n: int
    """Questions with at least one thought."""
    effects: list[Effect]


class Prefixed(GivenThoughts):
    """Feeds request r its given thoughts, as `GivenThoughts` does; then the inner method thinks on by itself."""

    def begin(self, lm: LatentLM, requests: Sequence[RequestView]) -> dict[str, Tensor]:
        own = self.method.begin(lm, requests)
        # A name of its own: an inner method that is a control has a column `row` too.
        return {**own, "prefix_row": super().begin(lm, requests)["row"]}

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        thought = self.method.think(lm, state)
        row_B = state.begun["prefix_row"]
        given_B = state.step < self.given.counts_R[row_B]
        # A row that thinks for itself reads beyond its thoughts; what it reads is not used.
        step_B = state.step.clamp(max=self.given.embeds_RKD.shape[1] - 1)
        given_BD = self.given.embeds_RKD[row_B, step_B].to(thought.embeds)
        return replace(
            thought,
            embeds=torch.where(given_B[:, None], given_BD, thought.embeds),
            # The inner method may want to stop where a given thought is still to be fed.
            done=thought.done & ~given_B,
            token_ids=thought.token_ids.masked_fill(given_B, -1),
        )


def causal_tests(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    completions: Sequence[Completion],
    seed: int = 0,
) -> CausalTests:
    """All changes, at the first, the middle and the last thought of each chain that has any.

    `completions` are the model's own of the examples, with their latents (`chains.requests_of`). `seed` fixes who gets
    whose thoughts.
    """
    pairs = [(example, own) for example, own in zip(examples, completions, strict=True) if own.length]
    if not pairs:
        return CausalTests(0, [])
    own = [completion for _, completion in pairs]
    thoughts = controls.thoughts_of(lm, own)
    changes = list(CHANGES)
    # A single question has no other to take a thought from.
    if len({(completion.request.question, completion.request.context) for completion in own}) < 2:
        changes.remove("swap")
    effects = []
    places = list(itertools.product(POSITIONS, THENS))
    for position, then in progress.track(places, "change a thought", len(places)):
        position_R = positions(thoughts.counts_R, position)
        answers = _answers(lm, method, own, thoughts, changes, position_R, then, seed)
        for change in changes:
            effects.append(_effect(change, position, then, pairs, answers[change]))
    return CausalTests(len(pairs), effects)


def _answers(
    lm: LatentLM,
    method: Method,
    own: Sequence[Completion],
    thoughts: Thoughts,
    changes: Sequence[str],
    position_R: Tensor,
    then: str,
    seed: int,
) -> dict[str, dict[int, Completion]]:
    """The completions after each change, by row. All run together: a step of many rows takes hardly longer than one."""
    asked = [completion.request for completion in own]
    given = {change: changed_thoughts(thoughts, asked, change, position_R, seed) for change in changes}
    cases = []
    # Question by question: the engine prefills each once for all of its changes.
    for r, change in itertools.product(range(len(own)), changes):
        # Up to the changed thought. Of a drop it is the one behind it: without any, the model would think it anew.
        if then == "rethought" and change == "drop" and position_R[r] + 1 >= thoughts.counts_R[r]:
            continue
        cases.append((r, change))
    # Told apart by their ids. Draws go by seed and sample, and stay the same.
    requests = [replace(asked[r], id=f"{asked[r].id} {change}") for r, change in cases]
    embeds = [given[change].embeds_RKD[r] for r, change in cases]
    counts = [position_R[r] + 1 if then == "rethought" else given[change].counts_R[r] for r, change in cases]
    kind = Prefixed if then == "rethought" else GivenThoughts
    changed = kind(method, requests, Thoughts(torch.stack(embeds), torch.stack(counts)))
    found: dict[str, dict[int, Completion]] = {change: {} for change in changes}
    for (r, change), completion in zip(cases, Engine(lm, changed, BATCH).generate(requests), strict=True):
        found[change][r] = completion
    return found


def _effect(
    change: str,
    position: str,
    then: str,
    pairs: Sequence[tuple[Example, Completion]],
    answers: Mapping[int, Completion],
) -> Effect:
    n = len(answers)
    if not n:
        return Effect(change, position, then, 0, None, None, None)
    changed = before = after = 0
    for r, completion in answers.items():
        example, own = pairs[r]
        changed += completion.token_ids != own.token_ids
        before += verdict(own.text, example).correct
        after += verdict(completion.text, example).correct
    return Effect(change, position, then, n, changed / n, before / n, after / n)


# Changes of one thought a request


def positions(counts_R: Tensor, position: str) -> Tensor:
    """The index of each chain's first, middle or last thought, (R,)."""
    if position == "first":
        return torch.zeros_like(counts_R)
    return counts_R // 2 if position == "middle" else counts_R - 1


def changed_thoughts(
    thoughts: Thoughts, requests: Sequence[Request], change: str, position_R: Tensor, seed: int
) -> Thoughts:
    """The thoughts after one of `CHANGES` at each request's position."""
    if change == "none":
        return thoughts
    if change == "drop":
        return _dropped(thoughts, position_R)
    others = controls.shuffled(thoughts, requests, seed)
    # A shorter chain gives its last thought.
    source_R = torch.minimum(position_R, others.counts_R - 1)
    row_R = torch.arange(len(position_R), device=position_R.device)
    embeds_RKD = thoughts.embeds_RKD.clone()
    embeds_RKD[row_R, position_R] = others.embeds_RKD[row_R, source_R]
    return Thoughts(embeds_RKD, thoughts.counts_R)


def _dropped(thoughts: Thoughts, position_R: Tensor) -> Thoughts:
    """The thoughts without the one at each request's position."""
    K = thoughts.embeds_RKD.shape[1]
    place_K = torch.arange(K, device=position_R.device)
    # What stands behind the dropped thought moves up by one. The last column has nothing behind it:
    # it repeats itself, and lies beyond every count.
    source_RK = place_K + (place_K >= position_R[:, None]).long()
    index_RK1 = source_RK.clamp(max=K - 1)[..., None]
    shifted_RKD = thoughts.embeds_RKD.gather(1, index_RK1.expand_as(thoughts.embeds_RKD))
    return Thoughts(shifted_RKD, thoughts.counts_R - 1)
