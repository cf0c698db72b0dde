"""Controls, which show whether latents matter: the same model and questions, with thoughts replaced or halved.

    zeroed      zeros, as many as it had
    shuffled    the thoughts that it had of another question, as many as those were
    halved      the first half of its own thoughts, rounded up; then it has to answer

A model that answers as well with `zeroed` or `shuffled` does not read its thoughts. The accuracy that is left with
`zeroed` is worth the forward passes alone; with `shuffled` the thoughts are of the right kind, and wrong. With `halved`
they are right, and what the second half works out is missing. `Decoding.max_latents` cuts all questions at the same
length instead. `GivenThoughts` feeds any thoughts: `look/diagnosis.py` feeds those of the reference chain.

A control is made from all questions of a point of the grid, also from those that are answered already: a resumed
evaluation feeds the thoughts that an uninterrupted one of the same questions would. Of several processes each makes all
controls, and they divide the answers.

Shape suffixes: R requests, K thoughts, D width, B rows.
"""

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
    EvaluatedModel,
    GridPoint,
    answer_all,
    evaluate,
    make_request,
)
from colar.evaluation.records import keys_in
from colar.evaluation.report_rows import CONTROL
from colar.methods.base import Batch, Method, Row
from colar.methods.thinking import RequestView, ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.template.template import Template


@dataclass(frozen=True)
class ThoughtTable:
    """Request r's thoughts: the first `counts_R[r]` of `embeds_RKD[r]`."""

    embeds_RKD: Tensor
    counts_R: Tensor


class GivenThoughts(Method):
    """A method around a method: asks as that one does, feeds request r its given thoughts, then stops.

    Name, params, their checks and text, rows and losses are the inner method's. `begin` raises ValueError for a request
    that is none of these.
    """

    def __init__(self, method: Method, requests: Sequence[RequestView], thoughts: ThoughtTable) -> None:
        super().__init__(method.config)
        self.method = method
        self.row_of = {request: r for r, request in enumerate(requests)}
        self.fed = thoughts

    # Thinking

    def begin(self, lm: LatentLM, requests: Sequence[RequestView]) -> dict[str, Tensor]:
        """Find each request's row in the table of thoughts, (B,)."""
        others = [request.id for request in requests if request not in self.row_of]
        if others:
            raise ValueError(
                f"request {others[0]} was given no thoughts: a control answers the requests that it was built from, "
                "and no others"
            )
        rows = [self.row_of[request] for request in requests]
        return {"row": torch.tensor(rows, device=lm.device)}

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        """Feed the next thought of each row's request; done after the last."""
        row_B = state.begun["row"]
        n_columns = self.fed.embeds_RKD.shape[1]
        embeds_BD = torch.zeros_like(state.hidden)
        # Without any thought the table has no columns, and cannot be indexed.
        if n_columns:
            # A row that is done reads beyond its thoughts; its embedding is ignored.
            step_B = state.step.clamp(max=n_columns - 1)
            embeds_BD = self.fed.embeds_RKD[row_B, step_B].to(state.hidden)
        done_B = state.step >= self.fed.counts_R[row_B]
        return Thought(embeds_BD, done_B, token_ids=torch.full_like(state.step, -1))

    # The inner method's: what an engine and a report ask of it

    @property
    def name(self) -> str:  # type: ignore[override]
        """A report's rows bear the inner method's name, with a label of their own."""
        return self.method.name

    @property
    def Params(self) -> type:  # type: ignore[override]
        return self.method.Params

    def speed_text(self, params: Any) -> str:
        return self.method.speed_text(params)

    def check_params(self, params: Any) -> str | None:
        return self.method.check_params(params)

    def encode(self, template: Template, example: Example, rng: Random, epoch: float) -> Row:
        return self.method.encode(template, example, rng, epoch)

    def loss(self, lm: LatentLM, batch: Batch) -> dict[str, Tensor]:
        return self.method.loss(lm, batch)


def thoughts_of(lm: LatentLM, completions: Sequence[Completion]) -> ThoughtTable:
    """The thoughts of completions that kept them, in one table."""
    counts = [completion.length for completion in completions]
    # Padded with zeros to the most thoughts of any request.
    # In float32, which holds bfloat16 exactly too: fed again, they give the same answers token for token.
    embeds_RKD = torch.zeros(len(completions), max(counts), lm.width, device=lm.device)
    for r, completion in enumerate(completions):
        if completion.latents is not None:
            embeds_RKD[r, : counts[r]] = completion.latents.float()
    return ThoughtTable(embeds_RKD, torch.tensor(counts, device=lm.device))


# The kinds of control: each makes other thoughts of a model's own


def zeroed(own: ThoughtTable, requests: Sequence[Request]) -> ThoughtTable:
    return ThoughtTable(torch.zeros_like(own.embeds_RKD), own.counts_R)


def shuffled(own: ThoughtTable, requests: Sequence[Request]) -> ThoughtTable:
    """Give each question the thoughts of the next one in a random round, always the same: none keeps its own."""
    # By question, not by request: samples of one question think alike.
    by_question: dict[tuple[Any, ...], list[int]] = {}
    for r, request in enumerate(requests):
        by_question.setdefault((request.question, request.context), []).append(r)
    # Sorted before it is shuffled: the order of the requests must not decide who gets whose thoughts.
    questions = sorted(by_question)
    if len(questions) < 2:
        raise ValueError("thoughts can be shuffled between two questions or more, there is only one")
    Random(0).shuffle(questions)

    # Samples of one question take turns at the samples of the next: there may be fewer of them.
    source = [0] * len(requests)
    for question, following in itertools.pairwise([*questions, questions[0]]):
        for r, other in zip(by_question[question], itertools.cycle(by_question[following]), strict=False):
            source[r] = other
    index_R = torch.tensor(source, device=own.counts_R.device)
    return ThoughtTable(own.embeds_RKD[index_R], own.counts_R[index_R])


def halved(own: ThoughtTable, requests: Sequence[Request]) -> ThoughtTable:
    # Rounded up: who had one thought keeps it.
    return ThoughtTable(own.embeds_RKD, (own.counts_R + 1) // 2)


KINDS: dict[str, Callable[[ThoughtTable, Sequence[Request]], ThoughtTable]] = {
    "zeroed": zeroed,
    "shuffled": shuffled,
    "halved": halved,
}


# A whole evaluation under controls


def require_latent(models: Sequence[EvaluatedModel]) -> list[EvaluatedModel]:
    """The models that think in latents; logs which do not. ValueError where there is none."""
    latent = [model for model in models if model.method.thinks_in_latents]
    if not latent:
        names = ", ".join(dict.fromkeys(model.method.name for model in models))
        raise ValueError(
            f"--control replaces latents, but none of the methods ({names}) thinks in any; a chain of tokens can be "
            "cut short instead: --max_latents 6 --label control-cut"
        )
    if others := [model.name for model in models if model not in latent]:
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

    Only what `records` has no answer to yet. Returns the number of new answers.
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
        # All of them before the first answer: one question's thoughts cannot be shuffled.
        thoughts = {kind: KINDS[kind](own, requests) for kind in missing}
        for kind in missing:
            control = GivenThoughts(model.method, requests, thoughts[kind])
            controlled = labelled(point, kind)
            # The control answers as a method of the same name: its rows differ from the method's by their label.
            controlled = replace(controlled, model=replace(controlled.model, method=control))
            n_new += evaluate([controlled], datasets, records, settings)
    return n_new


def labelled(point: GridPoint, kind: str) -> GridPoint:
    """The point under the label that the rows of its control have."""
    labels = [point.model.label, f"{CONTROL}{kind}"]
    label = ", ".join(part for part in labels if part)
    return replace(point, model=replace(point.model, label=label))
