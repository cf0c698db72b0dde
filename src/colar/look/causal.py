"""What one thought does to the answer: it is swapped, made noisy or dropped, and the answer is decoded anew.

    own         l1  l2  l3  l4  ###  a1 a2
    kept        l1  x   l3  l4  ###  ?? ??        only thought 2 is another; the later ones are fed as they were
    rethought   l1  x   ??  ??  ...  ?? ??        from there on the model thinks for itself, and stops for itself

    none        x is l2: a check, nothing may change
    swap        x is the thought of another question at that position (its last one, where its chain is shorter)
    noise       x is l2 plus Gaussian noise of `size` in one of two units: `sigma`, the head's own in each dimension,
                or `rms`, the root mean square of the thought's numbers. A head without a sigma has no such rows.
    drop        l2 is left out. Rethought, l3 is fed in its place; where the last thought is dropped nothing follows
                it that could be fed, so there is no such row

Thoughts are the model's own, greedy unless `decoding` says otherwise. A chain that is robust to noise is not unread:
`swap` tells.

Shape suffixes: R requests, K thoughts, D width, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colar import progress
from colar.data.example import Example
from colar.data.judge.answers import judge
from colar.engine.engine import Engine
from colar.engine.request import GREEDY, Completion, Decoding, Request
from colar.evaluation import controls
from colar.evaluation.controls import Forced, Thoughts
from colar.look.chains import requests_of
from colar.look.reference_chain import Measured
from colar.methods.base import Asked, Method, ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import noise

PLACES = ("first", "middle", "last")
"""Of the thought in its chain. In a chain of one they are the same."""
THENS = ("rethought", "kept")
SIZES = (0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Answer:
    """One question's answer with one of its thoughts changed."""

    id: str
    position: int
    changed: bool
    """Whether any of its tokens is another one."""
    was_right: bool
    is_right: bool


@dataclass(frozen=True)
class Effect:
    """One change at one place: shares between 0 and 1 of `n` questions, None without any."""

    kind: str
    size: float | None
    unit: str | None
    place: str
    then: str
    n: int
    changed: float | None
    accuracy_before: float | None
    accuracy_after: float | None
    answers: list[Answer]


@dataclass(frozen=True)
class CausalTests(Measured):
    n: int
    """Questions with at least one thought."""
    effects: list[Effect]


@dataclass(frozen=True)
class Change:
    """What is done to a thought."""

    kind: str
    size: float | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Own:
    """The model's own answers and thoughts: what is changed, and what the changed ones are compared with."""

    examples: list[Example]
    requests: list[Request]
    completions: list[Completion]
    right: list[bool]
    thoughts: Thoughts
    sigma_RKD: Tensor | None
    """In units of the embeddings, as the thoughts are; None where the head has none."""


class Prefixed(Forced):
    """Feeds request r its given thoughts, as `Forced` does; then the inner method thinks on, and stops by itself."""

    def begin(self, lm: LatentLM, requests: Sequence[Asked]) -> dict[str, Tensor]:
        own = self.method.begin(lm, requests)
        # A name of its own: an inner method that is a control has a column `row` too.
        return {**own, "prefix_row": super().begin(lm, requests)["row"]}

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        thought = self.method.think(lm, state)
        row_B = state.begun["prefix_row"]
        given_B = state.step < self.given.counts_R[row_B]
        if self.given.embeds_RKD.shape[1] == 0:
            return thought
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
    params: Any,
    decoding: Decoding = GREEDY,
    *,
    sizes: Sequence[float] = SIZES,
    seed: int = 0,
    max_batch: int = 32,
    completions: Sequence[Completion] | None = None,
) -> CausalTests:
    """All changes, at the first, the middle and the last thought of each chain. `seed` fixes their draws.

    `completions` are the model's own of the examples, if it has answered them already (`chains.requests_of`).
    """
    if completions is None:
        requests = requests_of(examples, params, decoding)
        completions = Engine(lm, method, max_batch).generate(requests)
    own = own_of(lm, method, examples, completions)
    changes = [Change("none"), Change("swap"), Change("drop")]
    for unit in ("sigma", "rms"):
        changes += [Change("noise", size, unit) for size in sizes]
    effects = []
    with progress.bar("change a thought", len(PLACES) * len(THENS)) as bar:
        for place in PLACES:
            # Of each change, the answers with its thoughts kept, and rethought.
            columns = []
            for then in THENS:
                cases = [_case(own, change, place, then, seed) for change in changes]
                bar.note(f"the {place} one, the others {then}")
                columns.append(_answers(lm, method, own, cases, then, max_batch))
                bar.advance()
            for i, change in enumerate(changes):
                for then, answers in zip(THENS, columns, strict=True):
                    effects.append(_effect(change, place, then, answers[i]))
    return CausalTests(len(own.requests), effects)


def own_of(
    lm: LatentLM, method: Method, examples: Sequence[Example], completions: Sequence[Completion]
) -> Own:
    """The model's own answers, which kept their latents. Questions that it did not think about are left out."""
    examples_kept, requests_kept, kept, right = [], [], [], []
    for example, completion in zip(examples, completions, strict=True):
        if completion.length:
            examples_kept.append(example)
            requests_kept.append(completion.request)
            kept.append(completion)
            right.append(judge(completion.text, example.answer, example.answer_type).correct)
    if not kept:
        nothing = Thoughts(torch.zeros(0, 0, lm.width), torch.zeros(0, dtype=torch.int64))
        return Own([], [], [], [], nothing, None)
    thoughts = controls.thoughts_of(lm, kept)
    sigma_RKD = None
    if "sigma" in kept[0].info[0]:
        sigma_RKD = torch.zeros_like(thoughts.embeds_RKD)
        for r, completion in enumerate(kept):
            sigma_KD = torch.stack([info["sigma"] for info in completion.info])
            # The head says sigma in units of sigma_e; the noise is added to embeddings.
            sigma_RKD[r, : len(sigma_KD)] = sigma_KD * method.config.sigma_e
    return Own(examples_kept, requests_kept, kept, right, thoughts, sigma_RKD)


# Changes of one thought a request


def positions(counts_R: Tensor, place: str) -> Tensor:
    """The position of each chain's first, middle or last thought, (R,)."""
    if place == "first":
        return torch.zeros_like(counts_R)
    return counts_R // 2 if place == "middle" else counts_R - 1


def swapped(own: Own, position_R: Tensor, seed: int) -> Thoughts:
    """Another question's thought at each request's position; each question's goes to one other."""
    others = controls.shuffled(own.thoughts, own.requests, seed)
    # A shorter chain gives its last thought.
    source_R = torch.minimum(position_R, others.counts_R - 1)
    row_R = torch.arange(len(position_R), device=position_R.device)
    embeds_RKD = own.thoughts.embeds_RKD.clone()
    embeds_RKD[row_R, position_R] = others.embeds_RKD[row_R, source_R]
    return Thoughts(embeds_RKD, own.thoughts.counts_R)


def noised(own: Own, position_R: Tensor, scale_RD: Tensor, seed: int) -> Thoughts:
    """Gaussian noise on one thought, `scale_RD` its standard deviation in each dimension (or (R, 1), of all).

    Drawn by (request seed, sample, `seed`, position): the same directions for every size.
    """
    device = position_R.device
    seed_R = torch.tensor([request.seed for request in own.requests], dtype=torch.int64, device=device)
    sample_R = torch.tensor([request.sample for request in own.requests], dtype=torch.int64, device=device)
    # A counter more than the head's own draws have: the noise is independent of those.
    keys_R = noise.keys(seed_R, sample_R, seed, position_R, noise.LATENT)
    drawn_RD = noise.normal(keys_R, own.thoughts.embeds_RKD.shape[-1])
    row_R = torch.arange(len(position_R), device=device)
    embeds_RKD = own.thoughts.embeds_RKD.clone()
    embeds_RKD[row_R, position_R] += scale_RD * drawn_RD
    return Thoughts(embeds_RKD, own.thoughts.counts_R)


def dropped(own: Own, position_R: Tensor) -> Thoughts:
    """The thoughts without the one at each request's position."""
    embeds_RKD = own.thoughts.embeds_RKD
    K = embeds_RKD.shape[1]
    place_K = torch.arange(K, device=position_R.device)
    # What stands behind the dropped thought moves up by one. The last column has nothing behind it:
    # it repeats itself, and lies beyond every count.
    source_RK = place_K + (place_K >= position_R[:, None]).long()
    index_RK1 = source_RK.clamp(max=K - 1)[..., None]
    shifted_RKD = embeds_RKD.gather(1, index_RK1.expand_as(embeds_RKD))
    return Thoughts(shifted_RKD, own.thoughts.counts_R - 1)


def changed_thoughts(own: Own, change: Change, position_R: Tensor, seed: int) -> Thoughts | None:
    """The thoughts after one change; None where there is no such change for this head, or for one question."""
    if change.kind == "none":
        return own.thoughts
    if change.kind == "drop":
        return dropped(own, position_R)
    if change.kind == "swap":
        # `shuffled` rejects a single question; here it only means that there is no such row.
        alone = len({request.question for request in own.requests}) < 2
        return None if alone else swapped(own, position_R, seed)
    row_R = torch.arange(len(position_R), device=position_R.device)
    assert change.size is not None
    if change.unit == "rms":
        rms_R1 = own.thoughts.embeds_RKD[row_R, position_R].square().mean(-1, keepdim=True).sqrt()
        return noised(own, position_R, change.size * rms_R1, seed)
    if own.sigma_RKD is None:
        return None
    return noised(own, position_R, change.size * own.sigma_RKD[row_R, position_R], seed)


# Answers after it


@dataclass(frozen=True)
class Case:
    """One change at one place: the requests that it is made in, what is fed to each, and where the change is."""

    rows: list[int]
    thoughts: Thoughts
    """Of all requests, also of those that are not asked."""
    position_R: Tensor


def _case(own: Own, change: Change, place: str, then: str, seed: int) -> Case:
    counts_R = own.thoughts.counts_R
    position_R = positions(counts_R, place)
    thoughts = changed_thoughts(own, change, position_R, seed) if own.requests else None
    if thoughts is None:
        return Case([], own.thoughts, position_R)
    rows = list(range(len(own.requests)))
    if then == "rethought":
        # Up to the changed thought. Of a drop it is the one behind it: without any, the model would think it anew.
        thoughts = Thoughts(thoughts.embeds_RKD, position_R + 1)
        if change.kind == "drop":
            rows = [r for r in rows if int(position_R[r]) + 1 < int(counts_R[r])]
    return Case(rows, thoughts, position_R)


def _answers(
    lm: LatentLM,
    method: Method,
    own: Own,
    cases: Sequence[Case],
    then: str,
    max_batch: int,
) -> list[list[Answer]]:
    """The answers of each case. All cases run together: a step of many rows takes hardly longer than one of few."""
    # Question by question: the engine reads each once for all of its cases.
    asked = [(r, i) for i, case in enumerate(cases) for r in case.rows]
    asked.sort()
    if not asked:
        return [[] for _ in cases]
    # Told apart by their ids. Draws go by seed and sample, and stay the same.
    requests = [replace(own.requests[r], id=f"{own.requests[r].id} case {i}") for r, i in asked]
    given = Thoughts(
        torch.stack([cases[i].thoughts.embeds_RKD[r] for r, i in asked]),
        torch.stack([cases[i].thoughts.counts_R[r] for r, i in asked]),
    )
    kind = Prefixed if then == "rethought" else Forced
    completions = Engine(lm, kind(method, requests, given), max_batch).generate(requests)
    answers: list[list[Answer]] = [[] for _ in cases]
    for (r, i), completion in zip(asked, completions, strict=True):
        answers[i].append(_answer(own, r, cases[i], completion))
    return answers


def _answer(own: Own, r: int, case: Case, completion: Completion) -> Answer:
    example = own.examples[r]
    verdict = judge(completion.text, example.answer, example.answer_type)
    differs = completion.token_ids != own.completions[r].token_ids
    return Answer(example.id, int(case.position_R[r]), differs, own.right[r], verdict.correct)


def _effect(change: Change, place: str, then: str, answers: list[Answer]) -> Effect:
    n = len(answers)
    changed = before = after = None
    if n:
        changed = sum(each.changed for each in answers) / n
        before = sum(each.was_right for each in answers) / n
        after = sum(each.is_right for each in answers) / n
    return Effect(change.kind, change.size, change.unit, place, then, n, changed, before, after, answers)
