"""Where latent reasoning loses: in reading latents, in writing them, in stopping, in the plan, in the arithmetic.

Three measurements of one model on the same problems, each with one thing less to get wrong:

    read     the reference chain's own latents are fed; is the answer right?                    (reading alone)
    write    after each right prefix, is the next latent the right one, and the stop in place?  (one step, no drift)
    free     the model thinks for itself; a wrong answer is put down to its first wrong latent

A latent says a group of tokens when all of them are among its c nearest embeddings. A group is wrong by its
`result` when only digits after an "=" are missing, by its `plan` otherwise; a chain that solves the problem in
another way than the reference's counts as another plan.
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


@dataclass(frozen=True)
class Token:
    """A token of a reference chain, and whether it belongs to a step's result (after its last "=")."""

    token_id: int
    is_result: bool


def reference_rows(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> list[Row]:
    """Encode the examples as training would, all with the same per-request values. No draw matters to them."""
    rows = []
    for example in examples:
        question = lm.template.question(example.question, method.prompt(params))
        row = method.encode(lm.template, example, Random(0), 0.0)
        rows.append(replace(row, question=question, params=params))
    return rows


@torch.no_grad()
def reference_thoughts(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> Thoughts:
    """The thoughts of the reference chains as training feeds them."""
    batch = Batch.collate(reference_rows(lm, method, examples, params))
    embeds_RKD, counts_R = method.thoughts(lm, batch)
    return Thoughts(embeds_RKD, counts_R)


def reference_groups(lm: LatentLM, row: Row, c: int) -> list[list[Token]]:
    """A row's reasoning tokens in groups of c."""
    tokens: list[Token] = []
    for step in row.steps:
        texts = [lm.template.token(token_id) for token_id in step]
        equals = max((i for i, text in enumerate(texts) if "=" in text), default=len(step))
        tokens += [
            Token(token_id, i > equals and text.strip().strip(">").strip() != "")
            for i, (token_id, text) in enumerate(zip(step, texts, strict=True))
        ]
    return [tokens[i : i + c] for i in range(0, len(tokens), c)]


def said(lm: LatentLM, embeds_KD: Tensor, c: int) -> list[set[int]]:
    """The tokens that each embedding can be read as."""
    return (
        [{near.token_id for near in row} for row in nearest_tokens(lm, embeds_KD, c)]
        if len(embeds_KD)
        else []
    )


def missing(group: Sequence[Token], read: set[int]) -> list[Token]:
    return [token for token in group if token.token_id not in read]


def classify(groups: Sequence[Sequence[Token]], read: Sequence[set[int]], parsed: bool, correct: bool) -> str:
    """What a completion's answer is put down to: one of `CLASSES`."""
    if correct:
        return "right"
    if not parsed:
        return "unparsable"
    for group, tokens in zip(groups, read, strict=False):
        if lost := missing(group, tokens):
            return "wrong result" if all(token.is_result for token in lost) else "wrong plan"
    if len(read) == len(groups):
        return "misread"
    return "stopped early" if len(read) < len(groups) else "stopped late"


def read(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any, limits: Decoding
) -> list[bool]:
    """Whether each answer is right when the reference's thoughts are fed."""
    thoughts = reference_thoughts(lm, method, examples, params)
    # A long chain must not be cut where a model's own thoughts would be.
    decoding = replace(limits, max_latents=int(thoughts.counts_R.max()) + 1)
    requests = [Request(example.id, example.question, params, decoding) for example in examples]
    engine = Engine(lm, Forced(method, requests, thoughts), 64)
    right = []
    for example, completion in zip(examples, engine.generate(requests), strict=True):
        verdict = judge(completion.text, example.answer, example.answer_type)
        right.append(verdict.correct)
    return right


@torch.no_grad()
def write(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> Iterator[dict[str, Any]]:
    """For each example: its groups, those said right after a right prefix, and whether the stop was in place."""
    c = int(getattr(params, "compression_factor", 1))
    rows = reference_rows(lm, method, examples, params)
    for row in rows:
        batch = Batch.collate([row])
        thoughts, counts = method.thoughts(lm, batch)
        question = (lm.embed(batch.question_ids), batch.question_lengths)
        hidden_BTD = lm.hidden(ragged.pack(question, (thoughts, counts)))
        hidden_KD = hidden_BTD[0, len(row.question) - 1 :]
        thought = method.think(lm, _state(lm, hidden_KD, params))
        groups = reference_groups(lm, row, c)
        read_as = said(lm, thought.embeds[:-1], c)
        right = [not missing(group, tokens) for group, tokens in zip(groups, read_as, strict=True)]
        stops = thought.done.tolist()
        yield {
            "groups": len(groups),
            "right": sum(right),
            "stop_right": stops == [False] * len(groups) + [True],
        }


def free(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any, limits: Decoding
) -> Iterator[dict[str, Any]]:
    """For each example, in the order in which they finish: the answer, what was thought and what went wrong."""
    c = int(getattr(params, "compression_factor", 1))
    by_id = dict(zip((e.id for e in examples), reference_rows(lm, method, examples, params), strict=True))
    answers = {example.id: example for example in examples}
    requests = [Request(e.id, e.question, params, limits, keep_latents=True) for e in examples]
    for done in fold(lm, Engine(lm, method, 64).stream(requests)):
        example = answers[done.request.id]
        groups, tokens = reference_groups(lm, by_id[example.id], c), _said(lm, done, c)
        verdict = judge(done.text, example.answer, example.answer_type)
        kind = classify(groups, tokens, verdict.parsed is not None, verdict.correct)
        texts = [sorted(lm.template.token(token_id) for token_id in one) for one in tokens]
        yield {"id": example.id, "answer": done.text, "class": kind, "length": done.length, "thoughts": texts}


def require_groups(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> None:
    """ValueError where thoughts do not stand for the reference chain's tokens: nothing to compare them with."""
    if not examples:
        raise ValueError("none of these rows has a reference chain")
    row = reference_rows(lm, method, examples[:1], params)[0]
    groups = len(reference_groups(lm, row, int(getattr(params, "compression_factor", 1))))
    _, counts = method.thoughts(lm, Batch.collate([row]))
    if not groups or int(counts[0]) != groups:
        raise ValueError(
            f"method {method.name} does not think in the reference chain's tokens ({int(counts[0])} thoughts for "
            f"{groups} groups of {examples[0].id}): there is nothing to diagnose"
        )


def diagnose(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any, limits: Decoding = GREEDY
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All three on the same examples (those with a reference chain): shares between 0 and 1, and a line a problem."""
    examples = [example for example in examples if example.steps]
    require_groups(lm, method, examples, params)
    track = progress.track
    written = list(track(write(lm, method, examples, params), "write", len(examples)))
    freely = list(track(free(lm, method, examples, params, limits), "think", len(examples)))
    counts = Counter(line["class"] for line in freely)
    n, groups = len(examples), sum(line["groups"] for line in written)
    return {
        "n": n,
        "read": sum(read(lm, method, examples, params, limits)) / n,
        "write_group": sum(line["right"] for line in written) / groups,
        "write_chain": sum(line["right"] == line["groups"] for line in written) / n,
        "stop": sum(line["stop_right"] for line in written) / n,
        "free": counts["right"] / n,
        "length": sum(line["length"] for line in freely) / n,
        "reference_length": groups / n,
        "classes": {name: counts[name] / n for name in CLASSES},
    }, freely


HEADINGS = ("system", "c", "read", "write", "whole chain", "stop", "free", "#L", "gold #L", *CLASSES[1:])


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of `diagnose`, with whose it is, as a table shows it: shares in percent, under `HEADINGS`."""
    factor, variant = row["compression_factor"], row["variant"]
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
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _said(lm: LatentLM, completion: Completion, c: int) -> list[set[int]]:
    if completion.latents is None:
        return []
    read_as = said(lm, completion.latents, c)
    return [{t} if t >= 0 else near for t, near in zip(completion.thought_ids, read_as, strict=True)]


def _state(lm: LatentLM, hidden_KD: Tensor, params: Any) -> ThinkState:
    """Every position of a chain as if it were a request's next step, greedy."""
    n = hidden_KD.shape[0]
    zeros = torch.zeros(n, dtype=torch.float64, device=hidden_KD.device)
    whole = torch.zeros(n, dtype=torch.int64, device=hidden_KD.device)
    columns = {k: v.to(hidden_KD.device) for k, v in base.param_columns([params] * n).items()}
    return ThinkState(hidden_KD, whole, columns, zeros, zeros + 1, zeros, whole, whole, lm.logits)
