"""Causes of wrong chains: in reading thoughts, in writing them, in stopping, in the plan, in the arithmetic.

Each measurement of a model has one thing less to get wrong than the one below it:

    read     the reference chain's own latents are fed; is the answer right?                    (reading alone)
    write    after each right prefix, is the next latent the right one, and the stop in place?  (one step, no drift)
    free     the model thinks for itself; a wrong answer is put down to its first wrong latent

A latent says a group of tokens when all of them are among its c nearest embeddings (c rounded up); one that was chosen
as tokens says these, each as often as it was chosen, in any order. A group is wrong by its `result` when only digits
after an "=" are missing, by its `plan` otherwise; a chain that solves the problem in another way than the reference's
counts as another plan.

Shape suffixes: N positions, K thoughts, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colar.data.judge.answers import judge
from colar.engine.engine import Engine
from colar.engine.request import GREEDY, Decoding, Request
from colar.evaluation.controls import Forced
from colar.look.reference_chain import ReferencePass, Token, chosen_ids, group_size, reference_thoughts
from colar.look.retrieval import ReadAs, nearest_ids, says
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

CAUSES = ("right", "unparsable", "stopped early", "stopped late", "wrong plan", "wrong result", "misread")
BATCH = 64
"""Requests that run at once."""
BINS = 10


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
    right = groups = whole = stopped = 0
    for each in passes:
        right_here = groups_written(lm, each, params)
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
        requests.append(Request(each.example.id, each.example.question, params, decoding, each.row.seed))
    engine = Engine(lm, Forced(method, requests, thoughts), BATCH)
    right = []
    for example, completion in zip(examples, engine.generate(requests), strict=True):
        right.append(judge(completion.text, example.answer, example.answer_type).correct)
    return right


def groups_written(lm: LatentLM, each: ReferencePass, params: Any) -> int:
    """The groups of a chain that the method says after a right prefix."""
    # The last position is the stop's: the embedding there is ignored.
    nearest = nearest_ids(lm, each.thought.embeds[:-1], group_size(params))
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


# Calibration of the stop: of the positions at which the model stops with a probability of about p, a share of p should
# be ends of the chain.


@dataclass(frozen=True)
class Bin:
    """Of `n` probabilities from `low` to `high`: the mean, and the share of ends; None without any."""

    low: float
    high: float
    n: int
    predicted: float | None
    observed: float | None


@dataclass(frozen=True)
class StopCalibration:
    n: int
    """Positions: one before each thought, one behind the last."""
    brier: float
    """Mean squared difference of probability and truth."""
    error: float
    """Expected calibration error: the mean over positions of their bin's |predicted - observed|."""
    bins: list[Bin]
    """Of equal width."""


def stop_of(passes: Sequence[ReferencePass]) -> StopCalibration | None:
    """The calibration of a model's stops; None where its method gives them no probability."""
    if "stop_probability" not in passes[0].thought.info:
        return None
    probability = [each.thought.info["stop_probability"] for each in passes]
    is_end = []
    for each in passes:
        # The method is asked at K + 1 positions; only behind the last thought does the chain end.
        end_N = torch.zeros(each.n_thoughts + 1, dtype=torch.bool)
        end_N[-1] = True
        is_end.append(end_N)
    return stop_calibration(torch.cat(probability).cpu(), torch.cat(is_end))


def stop_calibration(probability_N: Tensor, is_end_N: Tensor) -> StopCalibration:
    """Compare stop probabilities in 0..1 with where chains end."""
    probability_N = probability_N.double()
    truth_N = is_end_N.double()
    # The last bin has 1 in it.
    bin_N = (probability_N * BINS).long().clamp(max=BINS - 1)
    bins = []
    error = 0.0
    for b in range(BINS):
        here_N = bin_N == b
        n = int(here_N.sum())
        predicted = observed = None
        if n:
            predicted, observed = probability_N[here_N].mean().item(), truth_N[here_N].mean().item()
            error += n / len(probability_N) * abs(predicted - observed)
        bins.append(Bin(b / BINS, (b + 1) / BINS, n, predicted, observed))
    brier = (probability_N - truth_N).square().mean().item()
    return StopCalibration(len(probability_N), brier, error, bins)
