"""Causes of wrong chains: in reading thoughts, in writing them, in stopping, in the plan, in the arithmetic.

Each measurement of a model has one thing less to get wrong than the one below it:

    read     the reference chain's own latents are fed; is the answer right?                    (reading alone)
    write    after each right prefix, is the next latent the right one, and the stop in place?  (one step, no drift)
    free     the model thinks for itself; a wrong answer is put down to its first wrong latent

A latent says a group of tokens when all of them are among its c nearest embeddings (c rounded up); one that was chosen
as tokens says these, each as often as it was chosen, in any order. A group is wrong by its `result` when only digits
after an "=" are missing, by its `plan` otherwise; a chain that solves the problem in another way than the reference's
counts as another plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from colar.data.judge.answers import verdict
from colar.engine.engine import Engine
from colar.engine.request import GREEDY, Decoding, Request
from colar.evaluation.controls import GivenThoughts
from colar.look.reference_chain import ReferencePass, Token, reference_thoughts
from colar.look.thought import ReadAs, chosen_ids, directions, group_size, nearest_ids, says
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

CAUSES = ("right", "unparsable", "stopped early", "stopped late", "wrong plan", "wrong result", "misread")
BATCH = 64
"""Requests that run at once."""


def missing(group: Sequence[Token], read_as: ReadAs) -> list[Token]:
    """The tokens of a group that a thought does not say."""
    found = says([token.token_id for token in group], read_as)
    return [token for token, is_said in zip(group, found, strict=True) if not is_said]


def classify(groups: Sequence[Sequence[Token]], read: Sequence[ReadAs], parsed: bool, correct: bool) -> str:
    """Put an answer down to the first thing that went wrong: one of `CAUSES`."""
    if correct:
        return "right"
    if not parsed:
        return "unparsable"
    # Only the first: thoughts behind a wrong one may be right about it.
    # The chains may differ in length, which is judged below.
    for group, read_as in zip(groups, read, strict=False):
        lost = missing(group, read_as)
        if lost:
            only_results = all(token.is_result for token in lost)
            return "wrong result" if only_results else "wrong plan"
    # All that was thought is right, as far as the reference goes.
    if len(read) < len(groups):
        return "stopped early"
    if len(read) > len(groups):
        return "stopped late"
    return "misread"


@dataclass(frozen=True)
class Diagnosis:
    """Shares between 0 and 1: of `n` questions, or of their thoughts for `write`."""

    n: int
    read: float
    """Answers that are right when the reference chain's own latents are fed."""
    write: float
    """Latents that are right after a right prefix."""
    whole_chain: float
    """Chains of which all latents are right."""
    stop: float
    """Chains that end in the right place."""


def diagnose(
    lm: LatentLM, method: Method, passes: Sequence[ReferencePass], params: Any, limits: Decoding = GREEDY
) -> Diagnosis:
    """Measure `read` and `write` of examples by their passes; `free` is what `chains.py` has."""
    n = len(passes)
    right_answers = read(lm, method, passes, params, limits)
    directions_VD = directions(lm)
    right = groups = whole = stopped = 0
    for each in passes:
        right_here = groups_written(each, params, directions_VD)
        right += right_here
        groups += len(each.groups)
        whole += right_here == len(each.groups)
        stops = [False] * len(each.groups) + [True]
        stopped += each.thought.done.tolist() == stops
    return Diagnosis(n, sum(right_answers) / n, right / groups, whole / n, stopped / n)


def read(
    lm: LatentLM, method: Method, passes: Sequence[ReferencePass], params: Any, limits: Decoding
) -> list[bool]:
    """Feed the reference's thoughts: whether each answer is right."""
    examples = [each.example for each in passes]
    thoughts = reference_thoughts(lm, method, examples, params)
    requests = []
    for each, count in zip(passes, thoughts.counts_R.tolist(), strict=True):
        # No chain is cut: the limit is meant for thoughts of the model's own. And none asks for more than it needs: a
        # long question with another's long chain might not fit into the context.
        decoding = replace(limits, max_latents=count + 1)
        example = each.example
        request = Request(
            example.id, example.question, params, decoding, each.row.seed, context=example.context
        )
        requests.append(request)
    engine = Engine(lm, GivenThoughts(method, requests, thoughts), BATCH)
    right = []
    for example, completion in zip(examples, engine.generate(requests), strict=True):
        right.append(verdict(completion.text, example).correct)
    return right


def groups_written(each: ReferencePass, params: Any, directions_VD: Tensor) -> int:
    """The groups of a chain that the method says after a right prefix."""
    # The last position is the stop's: the embedding there is ignored.
    nearest = nearest_ids(each.thought.embeds[:-1], group_size(params), directions_VD)
    tokens = list(itertools.chain.from_iterable(each.groups))
    start = 0
    right = 0
    for k, group in enumerate(each.groups):
        ids = chosen_ids({name: column[k] for name, column in each.thought.info.items()})
        # As many tokens of the chain as were chosen: a group may also end before one of low confidence.
        wanted = group if ids is None else tokens[start : start + len(ids)]
        if not missing(wanted, nearest[k] if ids is None else ids):
            right += 1
        # By the reference's group, not by what was chosen: the pass has fed the right prefix.
        start += len(group)
    return right
