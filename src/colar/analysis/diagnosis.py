"""Where latent reasoning loses: in reading latents, in writing them, in stopping, in the plan, in the arithmetic.

Three measurements of one model on the same problems, each with one thing less to get wrong:

    read     the reference chain's own latents are fed; is the answer right?                    (reading alone)
    write    after each right prefix, is the next latent the right one, and the stop in place?  (one step, no drift)
    free     the model thinks for itself; a wrong answer is put down to its first wrong latent

A latent says a group of tokens when all of them are among its c nearest embeddings. A group is wrong by its
`result` when only digits after an "=" are missing, by its `plan` otherwise; a chain that solves the problem in
another way than the reference's counts as another plan.

Shape suffixes: R examples, K thoughts, T positions, D width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from colar import progress
from colar.analysis.controls import Forced, Thoughts
from colar.analysis.retrieval import nearest_tokens
from colar.data.answers import judge
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import GREEDY, Completion, Decoding, Request, fold
from colar.methods import base
from colar.methods.base import Batch, Method, Row, ThinkState
from colar.model.latent_lm import LatentLM
from colar.ops import ragged

CLASSES = ("right", "unparsable", "stopped early", "stopped late", "wrong plan", "wrong result", "misread")
BATCH = 64
"""Requests that run at once."""


# The reference chain


@dataclass(frozen=True)
class Token:
    """A token of a reference chain, and whether it belongs to a step's result (after its last "=")."""

    token_id: int
    is_result: bool


def reference_rows(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> list[Row]:
    """Encode the examples as training would, all with the same per-request values."""
    rows = []
    for example in examples:
        # What `encode` draws are params, and these are given: any generator will do.
        row = method.encode(lm.template, example, Random(0), 0.0)
        question = lm.template.question(example.question, method.prompt(params))
        rows.append(replace(row, question=question, params=params))
    return rows


@torch.no_grad()
def reference_thoughts(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> Thoughts:
    """The thoughts of the reference chains as training feeds them."""
    batch = Batch.collate(reference_rows(lm, method, examples, params))
    embeds_RKD, counts_R = method.thoughts(lm, batch)
    return Thoughts(embeds_RKD, counts_R)


def reference_groups(lm: LatentLM, row: Row, c: int) -> list[list[Token]]:
    """A row's reasoning tokens in groups of c: each stands for one thought."""
    tokens: list[Token] = []
    for step in row.steps:
        texts = [lm.template.token(token_id) for token_id in step]
        # The last "=" of a step: what follows it is the result, brackets left out. Without one there is no result.
        equals = len(step)
        for i, text in enumerate(texts):
            if "=" in text:
                equals = i
        for i, token_id in enumerate(step):
            is_bracket = texts[i].strip().strip(">").strip() == ""
            tokens.append(Token(token_id, is_result=i > equals and not is_bracket))
    return [tokens[i : i + c] for i in range(0, len(tokens), c)]


def require_groups(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> None:
    """ValueError where thoughts do not stand for the reference chain's tokens: nothing to compare them with."""
    if not examples:
        raise ValueError("none of these rows has a reference chain")
    # One example tells: a method either thinks in groups of tokens or it does not.
    row = reference_rows(lm, method, examples[:1], params)[0]
    n_groups = len(reference_groups(lm, row, group_size(params)))
    n_thoughts = int(reference_thoughts(lm, method, examples[:1], params).counts_R[0])
    if n_groups == 0 or n_thoughts != n_groups:
        raise ValueError(
            f"method {method.name} does not think in the reference chain's tokens ({n_thoughts} thoughts for "
            f"{n_groups} groups of {examples[0].id}): there is nothing to diagnose"
        )


def group_size(params: Any) -> int:
    """Tokens that a thought stands for."""
    return int(getattr(params, "compression_factor", 1))


# Thoughts as tokens


def said(lm: LatentLM, embeds_KD: Tensor, c: int) -> list[set[int]]:
    """The tokens that each embedding can be read as: its c nearest."""
    if len(embeds_KD) == 0:
        return []
    read_as = []
    for neighbours in nearest_tokens(lm, embeds_KD, c):
        read_as.append({near.token_id for near in neighbours})
    return read_as


def said_by(lm: LatentLM, completion: Completion, c: int) -> list[set[int]]:
    """The tokens that each thought of a completion can be read as; a token of a chain is read as itself."""
    if completion.latents is None:
        return []
    read_as = said(lm, completion.latents, c)
    for k, token_id in enumerate(completion.thought_ids):
        if token_id >= 0:
            read_as[k] = {token_id}
    return read_as


def missing(group: Sequence[Token], read_as: set[int]) -> list[Token]:
    """The tokens of a group that a thought does not say."""
    return [token for token in group if token.token_id not in read_as]


def classify(groups: Sequence[Sequence[Token]], read: Sequence[set[int]], parsed: bool, correct: bool) -> str:
    """Put an answer down to the first thing that went wrong: one of `CLASSES`."""
    if correct:
        return "right"
    if not parsed:
        return "unparsable"
    # Only the first: whatever comes after a wrong thought may be right about it.
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


# The three measurements


def read(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any, limits: Decoding
) -> list[bool]:
    """Feed the reference's thoughts: whether each answer is right."""
    thoughts = reference_thoughts(lm, method, examples, params)
    # No chain is cut: the limit is meant for thoughts of the model's own.
    decoding = replace(limits, max_latents=int(thoughts.counts_R.max()) + 1)
    requests = [Request(example.id, example.question, params, decoding) for example in examples]
    engine = Engine(lm, Forced(method, requests, thoughts), BATCH)
    right = []
    for example, completion in zip(examples, engine.generate(requests), strict=True):
        verdict = judge(completion.text, example.answer, example.answer_type)
        right.append(verdict.correct)
    return right


@torch.no_grad()
def write(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> Iterator[dict[str, Any]]:
    """For each example: its groups, those said right after a right prefix, and whether the stop was in place."""
    #     fed       q  q ###  l1   l2   l3         the question and the reference's latents
    #                     |    |    |    |
    #     asked          l1   l2   l3  stop        the method, at each position by itself
    c = group_size(params)
    for example, row in zip(examples, reference_rows(lm, method, examples, params), strict=True):
        batch = Batch.collate([row])
        embeds_1KD, counts_1 = method.thoughts(lm, batch)
        question_1QD = lm.embed(batch.question_ids)
        fed_1TD = ragged.pack((question_1QD, batch.question_lengths), (embeds_1KD, counts_1))
        hidden_1TD = lm.hidden(fed_1TD)
        hidden_KD = hidden_1TD[0, len(row.question) - 1 :]
        begun = method.begin(lm, [Request(example.id, example.question, params)])
        thought = method.think(lm, _state(lm, hidden_KD, params, begun))

        # The last position is the stop's: the embedding there is ignored.
        groups = reference_groups(lm, row, c)
        read_as = said(lm, thought.embeds[:-1], c)
        right = 0
        for group, tokens in zip(groups, read_as, strict=True):
            if not missing(group, tokens):
                right += 1
        stops = [False] * len(groups) + [True]
        yield {"groups": len(groups), "right": right, "stop_right": thought.done.tolist() == stops}


def _state(lm: LatentLM, hidden_KD: Tensor, params: Any, begun: Mapping[str, Tensor]) -> ThinkState:
    """Every position of a chain as if it were a request's next step, greedy."""
    n = hidden_KD.shape[0]
    device = hidden_KD.device
    # Temperature 0 draws nothing, so no seed matters.
    zeros_K = torch.zeros(n, dtype=torch.float64, device=device)
    whole_K = torch.zeros(n, dtype=torch.int64, device=device)
    params_K = base.param_columns([params] * n)
    return ThinkState(
        hidden=hidden_KD,
        step=whole_K,
        params={name: column.to(device) for name, column in params_K.items()},
        temperature=zeros_K,
        top_p=zeros_K + 1,
        latent_temperature=zeros_K,
        seed=whole_K,
        sample=whole_K,
        make_logits=lm.logits,
        begun={name: column.expand(n, *column.shape[1:]) for name, column in begun.items()},
    )


def free(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any, limits: Decoding
) -> Iterator[dict[str, Any]]:
    """For each example, in the order in which they finish: the answer, the thoughts and what went wrong."""
    c = group_size(params)
    rows = reference_rows(lm, method, examples, params)
    requests = [Request(e.id, e.question, params, limits, keep_latents=True) for e in examples]
    engine = Engine(lm, method, BATCH)
    for completion in fold(lm, engine.stream(requests)):
        # A new engine numbers its requests from 0, in their order.
        example = examples[completion.number]
        groups = reference_groups(lm, rows[completion.number], c)
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
    }
    return shares, freely


# Tables

HEADINGS = ("system", "c", "read", "write", "whole chain", "stop", "free", "#L", "gold #L", *CLASSES[1:])


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of `diagnose`, with the keys that name its system, as a table shows it: percentages, under `HEADINGS`."""
    factor = row["compression_factor"]
    variant = row["variant"]
    shares = [row[name] for name in ("read", "write_group", "write_chain", "stop", "free")]
    return [
        f"{row['model']} ({variant})" if variant else row["model"],
        "-" if factor is None else f"{factor:g}",
        *(f"{100 * share:.1f}" for share in shares),
        f"{row['length']:.1f}",
        f"{row['reference_length']:.1f}",
        *(f"{100 * row['classes'][name]:.1f}" for name in CLASSES[1:]),
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """For the terminal."""
    made = Table(title=f"{rows[0]['n']} problems: % of them, of latents for `write`")
    for heading in HEADINGS:
        made.add_column(heading, justify="left" if heading == "system" else "right")
    for row in rows:
        made.add_row(*cells(row))
    return made


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """For a page."""
    alignment = ["---"] + ["---:"] * (len(HEADINGS) - 1)
    lines = [HEADINGS, alignment, *(cells(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
