"""Controls, which show whether latents matter: the same model and questions, with thoughts replaced or halved.

    zeroed      zeros, as many as the model's own thoughts
    shuffled    all of the model's thoughts on another question
    halved      the first half of its own thoughts, rounded up; then the model has to answer

A model that answers equally well under `zeroed` or `shuffled` does not use its thoughts. Accuracy under `zeroed` comes
from the forward passes alone. Under `shuffled` the thoughts are of the right kind, but belong to another question.
Under `halved` they are right, but the results of the second half are missing; `Decoding.max_latents`, in contrast, cuts
all questions at the same length. `given_thoughts` feeds any thoughts: `look/diagnosis.py` feeds those of the reference
chain.

A control is built from all questions of a grid point, answered or not, so that a resumed evaluation feeds the same
thoughts as an uninterrupted one of the same questions. With several processes, each builds all controls, and the
answers are divided between them.

Shape suffixes: R requests, K thoughts, D width, B rows.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from colar import progress
from colar.data.example import Example
from colar.engine.completion import Completion
from colar.engine.request import Request
from colar.evaluation.evaluate import (
    AnswerSettings,
    GridPoint,
    answer_all,
    evaluate,
    make_request,
)
from colar.evaluation.records import keys_in
from colar.evaluation.report_rows import CONTROL
from colar.methods.base import Method
from colar.methods.thinking import RequestView, ThinkState, Thought
from colar.model.latent_lm import LatentLM


@dataclass(frozen=True)
class ThoughtTable:
    """Request r's thoughts: the first `counts_R[r]` of `embeds_RKD[r]`."""

    embeds_RKD: Tensor
    counts_R: Tensor


def given_thoughts(method: Method, requests: Sequence[RequestView], fed: ThoughtTable) -> Method:
    """The method, but request r is fed its given thoughts, after which it stops. It answers no other requests."""
    row_of = {request: r for r, request in enumerate(requests)}
    n_columns = fed.embeds_RKD.shape[1]

    def begin(lm: LatentLM, asked: Sequence[RequestView]) -> dict[str, Tensor]:
        return {"row": torch.tensor([row_of[request] for request in asked], device=lm.device)}

    def think(lm: LatentLM, state: ThinkState) -> Thought:
        row_B = state.begun["row"]
        embeds_BD = torch.zeros_like(state.hidden)
        # Without any thought the table has no columns, and cannot be indexed.
        if n_columns:
            # A row that is done reads beyond its thoughts; its embedding is ignored.
            step_B = state.step.clamp(max=n_columns - 1)
            embeds_BD = fed.embeds_RKD[row_B, step_B].to(state.hidden)
        return Thought(
            embeds_BD, state.step >= fed.counts_R[row_B], token_ids=torch.full_like(state.step, -1)
        )

    # All else is the method's own: its name, its params and the text that tells the model its speed.
    control = copy.copy(method)
    vars(control).update(begin=begin, think=think)
    return control


def thoughts_of(lm: LatentLM, completions: Sequence[Completion]) -> ThoughtTable:
    """Thoughts of completions whose requests keep latents, in one table."""
    counts = [completion.length for completion in completions]
    # Padded with zeros to the most thoughts of any request.
    # In float32, which represents bfloat16 exactly: fed again, they give the same answers token for token.
    embeds_RKD = torch.zeros(len(completions), max(counts), lm.width, device=lm.device)
    for r, completion in enumerate(completions):
        if completion.latents is not None:
            embeds_RKD[r, : counts[r]] = completion.latents.float()
    return ThoughtTable(embeds_RKD, torch.tensor(counts, device=lm.device))


# Kinds of control: each derives other thoughts from the model's own


def zeroed(own: ThoughtTable, requests: Sequence[Request]) -> ThoughtTable:
    return ThoughtTable(torch.zeros_like(own.embeds_RKD), own.counts_R)


def shuffled(own: ThoughtTable, requests: Sequence[Request]) -> ThoughtTable:
    """Give each question the thoughts of the next one in a fixed random cycle, so that none keeps its own."""
    # Shuffled by question, not by request, because samples of one question have similar thoughts.
    by_question: dict[tuple[Any, ...], list[int]] = {}
    for r, request in enumerate(requests):
        by_question.setdefault((request.question, request.context), []).append(r)
    # Sorted before the shuffle, so that the order of the requests does not matter.
    questions = sorted(by_question)
    if len(questions) < 2:
        raise ValueError("thoughts can be shuffled between two questions or more, there is only one")
    Random(0).shuffle(questions)

    # Samples of one question get those of the next in turn, which repeat if they are fewer.
    source = [0] * len(requests)
    for question, following in itertools.pairwise([*questions, questions[0]]):
        for r, other in zip(by_question[question], itertools.cycle(by_question[following]), strict=False):
            source[r] = other
    index_R = torch.tensor(source, device=own.counts_R.device)
    return ThoughtTable(own.embeds_RKD[index_R], own.counts_R[index_R])


def halved(own: ThoughtTable, requests: Sequence[Request]) -> ThoughtTable:
    # Rounded up, so that a single thought is kept.
    return ThoughtTable(own.embeds_RKD, (own.counts_R + 1) // 2)


KINDS: dict[str, Callable[[ThoughtTable, Sequence[Request]], ThoughtTable]] = {
    "zeroed": zeroed,
    "shuffled": shuffled,
    "halved": halved,
}


# A whole evaluation under controls


def require_latent(methods: Mapping[str, Method]) -> list[str]:
    """The names of the methods that think in latents; logs which do not. ValueError if there is none."""
    latent = [name for name, method in methods.items() if method.thinks_in_latents]
    if not latent:
        names = ", ".join(dict.fromkeys(method.name for method in methods.values()))
        raise ValueError(
            f"--control replaces latents, but none of the methods ({names}) thinks in any; a chain of tokens can be "
            "cut short instead: --max_latents 6 --label control-cut"
        )
    if others := [name for name in methods if name not in latent]:
        progress.say(f"without controls, as they think in no latents: {', '.join(others)}")
    return latent


def evaluate_controls(
    grid: Sequence[GridPoint],
    kinds: Sequence[str],
    datasets: Mapping[str, Sequence[Example]],
    records: Path,
    settings: AnswerSettings,
) -> int:
    """Answer the grid under each kind of control, in rows labelled control-zeroed, control-shuffled, ...

    Skips questions that have an answer in `records`. Returns the number of new answers.
    """
    done = keys_in(records)
    n_new = 0
    for point in grid:
        examples = datasets[point.dataset]
        keys = {kind: [labelled(point, kind).record_key(example) for example in examples] for kind in kinds}
        missing = [kind for kind in keys if not done.issuperset(keys[kind])]
        if not missing:
            continue
        # The model thinks once, for all the controls that are missing.
        model = point.model
        requests = [make_request(point, example, settings) for example in examples]
        with_latents = [replace(request, keep_latents=True) for request in requests]
        own = thoughts_of(
            model.lm,
            answer_all(model.lm, model.method, with_latents, settings.batch_size, eager=settings.eager),
        )
        for kind in missing:
            # One at a time, because each kind's thoughts take as much memory as the model's own.
            control = given_thoughts(model.method, requests, KINDS[kind](own, requests))
            controlled = labelled(point, kind)
            # The control has the method's name, so only the label distinguishes their rows.
            controlled = replace(controlled, model=replace(controlled.model, method=control))
            n_new += evaluate([controlled], datasets, records, settings)
            del control, controlled
    return n_new


def labelled(point: GridPoint, kind: str) -> GridPoint:
    """The grid point with the label of its control's rows."""
    labels = [point.model.label, f"{CONTROL}{kind}"]
    label = ", ".join(part for part in labels if part)
    return replace(point, model=replace(point.model, label=label))
