"""Where latent reasoning loses: in reading latents, in writing them, in stopping, in the plan, in the arithmetic.

Three measurements of one model on the same problems, each with one thing less to get wrong:

    read     the reference chain's own latents are fed; is the answer right?                    (reading alone)
    write    after each right prefix, is the next latent the right one, and the stop in place?  (one step, no drift)
    free     the model thinks for itself; a wrong answer is put down to its first wrong latent

A latent says a group of tokens when all of them are among its c nearest embeddings (c rounded up); one that was chosen
as tokens says these, each as often as it was chosen, in whatever order. A group is wrong by its `result` when only
digits after an "=" are missing, by its `plan` otherwise; a chain that solves the problem in another way than the
reference's counts as another plan.

Where tokens are chosen one after another, `write` also says which place of a group goes wrong (`places.py`).

Shape suffixes: R examples, K thoughts, T positions, D width.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from colar import progress
from colar.data.example import Example
from colar.data.judge.answers import judge
from colar.engine.engine import Engine
from colar.engine.request import GREEDY, Completion, Decoding, Request, fold
from colar.evaluation.controls import Forced
from colar.look.places import Place, places, write_shares
from colar.look.reference_chain import (
    Token,
    group_size,
    reference_groups,
    reference_passes,
    reference_rows,
    reference_thoughts,
    reference_tokens,
    require_groups,
)
from colar.look.retrieval import nearest_tokens
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.ops import noise

ReadAs = set[int] | list[int]
"""What a thought is read as: the set of its nearest tokens, or the list of those that it was chosen as."""
CLASSES = ("right", "unparsable", "stopped early", "stopped late", "wrong plan", "wrong result", "misread")
BATCH = 64
"""Requests that run at once."""


# Thoughts as tokens


def said(lm: LatentLM, embeds_KD: Tensor, c: int, directions_VD: Tensor | None = None) -> list[ReadAs]:
    """The tokens that each embedding can be read as: its c nearest."""
    if len(embeds_KD) == 0:
        return []
    read_as: list[ReadAs] = []
    for neighbours in nearest_tokens(lm, embeds_KD, c, directions_VD):
        read_as.append({near.token_id for near in neighbours})
    return read_as


def said_by(
    lm: LatentLM, completion: Completion, c: int, directions_VD: Tensor | None = None
) -> list[ReadAs]:
    """The tokens that each thought of a completion can be read as; tokens that were chosen are read as themselves."""
    if completion.latents is None:
        return []
    read_as = said(lm, completion.latents, c, directions_VD)
    for k, token_id in enumerate(completion.thought_ids):
        ids = chosen_ids(completion.info[k])
        if token_id >= 0:
            read_as[k] = {token_id}
        elif ids is not None:
            read_as[k] = ids
    return read_as


def chosen_ids(info: Mapping[str, Tensor]) -> list[int] | None:
    """The tokens that one thought was chosen as, in order, the separator included; None for a latent of a head."""
    if "group_ids" not in info:
        return None
    return [token_id for token_id in info["group_ids"].tolist() if token_id >= 0]


def says(token_ids: Sequence[int], read_as: ReadAs) -> list[bool]:
    """Of each token of a group whether a thought says it. One that was chosen once is said once: 12 does not say 11."""
    if isinstance(read_as, set):
        # The sum of two equal embeddings is near a single token.
        return [token_id in read_as for token_id in token_ids]
    left = Counter(read_as)
    found = []
    for token_id in token_ids:
        found.append(left[token_id] > 0)
        left[token_id] -= 1
    return found


def missing(group: Sequence[Token], read_as: ReadAs) -> list[Token]:
    """The tokens of a group that a thought does not say."""
    found = says([token.token_id for token in group], read_as)
    return [token for token, is_said in zip(group, found, strict=True) if not is_said]


def classify(groups: Sequence[Sequence[Token]], read: Sequence[ReadAs], parsed: bool, correct: bool) -> str:
    """Put an answer down to the first thing that went wrong: one of `CLASSES`."""
    if correct:
        return "right"
    if not parsed:
        return "unparsable"
    # Only the first: whatever comes after a wrong thought may be right about it.
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


def groups_thought(
    lm: LatentLM, groups: Sequence[list[Token]], completion: Completion
) -> Sequence[list[Token]]:
    """The reference chain in the groups that a completion's thoughts stand for.

    They are those of training, unless the thoughts were chosen as tokens: then a thought stands for as many tokens
    of the chain as it has. What no thought has come to is one more group.
    """
    chosen = [chosen_ids(info) for info in completion.info]
    if not chosen or None in chosen:
        return groups
    tokens = list(itertools.chain.from_iterable(groups))
    thought_of = []
    start = 0
    for ids in chosen:
        assert ids is not None
        if start >= len(tokens):
            break
        # The separator in a group stands where the reference has a token, or behind its last one.
        thought_of.append(tokens[start : start + len(ids)])
        start += sum(token_id != lm.template.separator_id for token_id in ids)
    if start < len(tokens):
        thought_of.append(tokens[start:])
    return thought_of


# The three measurements


def read(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any, limits: Decoding
) -> list[bool]:
    """Feed the reference's thoughts: whether each answer is right."""
    thoughts = reference_thoughts(lm, method, examples, params)
    requests = []
    for example, count in zip(examples, thoughts.counts_R.tolist(), strict=True):
        # No chain is cut: the limit is meant for thoughts of the model's own. And none asks for more than it needs: a
        # long question with another's long chain might not fit into the context.
        decoding = replace(limits, max_latents=count + 1)
        seed = noise.seed_from(0, example.id)
        requests.append(Request(example.id, example.question, params, decoding, seed))
    engine = Engine(lm, Forced(method, requests, thoughts), BATCH)
    right = []
    for example, completion in zip(examples, engine.generate(requests), strict=True):
        verdict = judge(completion.text, example.answer, example.answer_type)
        right.append(verdict.correct)
    return right


@torch.no_grad()
def write(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> Iterator[dict[str, Any]]:
    """For each example: its groups, those said right after a right prefix, and whether the stop was in place.

    `places` are those of each group, where tokens were chosen; [] elsewhere.
    """
    c = group_size(params)
    for each in reference_passes(lm, method, examples, params):
        row, thought, groups = each.row, each.thought, each.groups

        # The last position is the stop's: the embedding there is ignored.
        read_as = said(lm, thought.embeds[:-1], c)
        tokens = reference_tokens(lm, row)
        start = 0
        right = 0
        judged = []
        for k, group in enumerate(groups):
            ids = chosen_ids({name: column[k] for name, column in thought.info.items()})
            asked = group
            if ids is not None:
                # As many tokens of the chain as were chosen: a group may also end before an unsure one.
                asked = tokens[start : start + len(ids)]
                read_as[k] = ids
                before = groups[k - 1] if k > 0 else []
                judged.append(places(lm, tokens[start:], ids, before))
            if not missing(asked, read_as[k]):
                right += 1
            # By the reference's group, not by what was chosen: the pass has fed the right prefix.
            start += len(group)
        stops = [False] * len(groups) + [True]
        yield {
            "groups": len(groups),
            "right": right,
            "stop_right": thought.done.tolist() == stops,
            "places": judged,
        }


def free(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any, limits: Decoding
) -> Iterator[dict[str, Any]]:
    """For each example, in the order in which they finish: the answer, the thoughts and what went wrong."""
    c = group_size(params)
    rows = reference_rows(lm, method, examples, params)
    requests = []
    for example, row in zip(examples, rows, strict=True):
        request = Request(example.id, example.question, params, limits, row.seed, keep_latents=True)
        requests.append(request)
    engine = Engine(lm, method, BATCH)
    for completion in fold(lm, engine.stream(requests)):
        completion.require_finite()
        # A new engine numbers its requests from 0, in their order.
        example = examples[completion.number]
        groups = groups_thought(lm, reference_groups(lm, method, rows[completion.number]), completion)
        read_as = said_by(lm, completion, c)
        verdict = judge(completion.text, example.answer, example.answer_type)
        thoughts = []
        for token_ids in read_as:
            thoughts.append(sorted(lm.template.token(token_id) for token_id in token_ids))
        yield {
            "id": example.id,
            "answer": completion.text,
            "class": classify(groups, read_as, verdict.parsed is not None, verdict.correct),
            "length": completion.length,
            "thoughts": thoughts,
        }


def diagnose(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any, limits: Decoding = GREEDY
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All three on the same examples (those with a reference chain): shares between 0 and 1, and a record of each."""
    examples = [example for example in examples if example.steps]
    require_groups(lm, method, examples, params)
    n = len(examples)
    written = list(progress.track(write(lm, method, examples, params), "write", n))
    freely = list(progress.track(free(lm, method, examples, params, limits), "think", n))
    right = read(lm, method, examples, params, limits)

    groups = sum(record["groups"] for record in written)
    whole_chains = [record for record in written if record["right"] == record["groups"]]
    classes = Counter(record["class"] for record in freely)
    places_of: list[list[Place]] = []
    for record in written:
        places_of += record["places"]
    shares = {
        "n": n,
        "read": sum(right) / n,
        "write_group": sum(record["right"] for record in written) / groups,
        "write_chain": len(whole_chains) / n,
        "stop": sum(record["stop_right"] for record in written) / n,
        "free": classes["right"] / n,
        "length": sum(record["length"] for record in freely) / n,
        "reference_length": groups / n,
        "classes": {name: classes[name] / n for name in CLASSES},
        **write_shares(places_of),
    }
    return shares, freely
