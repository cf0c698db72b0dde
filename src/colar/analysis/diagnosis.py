"""Where latent reasoning loses: in reading latents, in writing them, in stopping, in the plan, in the arithmetic.

Three measurements of one model on the same problems, each with one thing less to get wrong:

    read     the reference chain's own latents are fed; is the answer right?                    (reading alone)
    write    after each right prefix, is the next latent the right one, and the stop in place?  (one step, no drift)
    free     the model thinks for itself; a wrong answer is put down to its first wrong latent

A latent says a group of tokens when all of them are among its c nearest embeddings (c rounded up); one that was chosen
as tokens says these. A group is wrong by its `result` when only digits after an "=" are missing, by its `plan`
otherwise; a chain that solves the problem in another way than the reference's counts as another plan.

Where tokens are chosen one after another, `write` also says which place of a group goes wrong. Place j counts the
groups whose tokens before it are right:

    t1    t2 | t1    t3 | t1 t2   ...          shares of the groups that come so far
    joint                                      the groups without any wrong token, order included

What a place should hold is the reference chain's token, or the separator behind the chain's last one. A group that
ends before an unsure token (`confidence_threshold`) is judged by the tokens that it has.

Shape suffixes: R examples, K thoughts, T positions, D width.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

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
from colar.ops import noise, ragged

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
    """Encode the examples as training would, all with the same per-request values.

    A row's seed is that of its request, and of `colar evaluate`: the groups of a c that is not whole depend on it.
    """
    rows = []
    for example in examples:
        # What `encode` draws are params, and these are given: any generator will do.
        row = method.encode(lm.template, example, Random(0), 0.0)
        question = lm.template.question(example.question, method.prompt(params))
        seed = noise.seed_from(0, example.id)
        rows.append(replace(row, question=question, params=params, seed=seed))
    return rows


@torch.no_grad()
def reference_thoughts(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> Thoughts:
    """The thoughts of the reference chains as training feeds them."""
    batch = Batch.collate(reference_rows(lm, method, examples, params))
    embeds_RKD, counts_R = method.thoughts(lm, batch)
    return Thoughts(embeds_RKD, counts_R)


def reference_tokens(lm: LatentLM, row: Row) -> list[Token]:
    """A row's reasoning tokens."""
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
    return tokens


@torch.no_grad()
def reference_groups(lm: LatentLM, method: Method, row: Row) -> list[list[Token]]:
    """A row's reasoning tokens in the groups that training makes of them: each stands for one thought."""
    tokens = reference_tokens(lm, row)
    groups = []
    start = 0
    for size in method.group_sizes(lm, Batch.collate([row]))[0].tolist():
        # Behind a row's last group sizes are 0.
        if size:
            groups.append(tokens[start : start + size])
            start += size
    return groups


def require_groups(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> None:
    """ValueError where thoughts do not stand for the reference chain's tokens: nothing to compare them with."""
    if not examples:
        raise ValueError("none of these rows has a reference chain")
    # One example tells: a method either thinks in groups of tokens or it does not.
    row = reference_rows(lm, method, examples[:1], params)[0]
    n_groups = len(reference_groups(lm, method, row))
    n_thoughts = int(reference_thoughts(lm, method, examples[:1], params).counts_R[0])
    if n_groups == 0 or n_thoughts != n_groups:
        raise ValueError(
            f"method {method.name} does not think in the reference chain's tokens ({n_thoughts} thoughts for "
            f"{n_groups} groups of {examples[0].id}): there is nothing to diagnose"
        )


def group_size(params: Any) -> int:
    """The most tokens that a thought stands for."""
    return math.ceil(getattr(params, "compression_factor", 1))


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
    """The tokens that each thought of a completion can be read as; tokens that were chosen are read as themselves."""
    if completion.latents is None:
        return []
    read_as = said(lm, completion.latents, c)
    for k, token_id in enumerate(completion.thought_ids):
        ids = chosen_ids(completion.info[k])
        if token_id >= 0:
            read_as[k] = {token_id}
        elif ids is not None:
            read_as[k] = set(ids)
    return read_as


def chosen_ids(info: Mapping[str, Tensor]) -> list[int] | None:
    """The tokens that one thought was chosen as, in order, the separator included; None for a latent of a head."""
    if "group_ids" not in info:
        return None
    return [token_id for token_id in info["group_ids"].tolist() if token_id >= 0]


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


# The places of a group

Kind = Literal["result", "other", "end"]
KINDS: tuple[Kind, ...] = ("result", "other", "end")
"""What a place should hold: a token of a step's result, another token, the separator behind the chain's last."""


@dataclass(frozen=True)
class Place:
    """A token that was chosen after a right prefix: its place in its group, from 0."""

    place: int
    kind: Kind
    right: bool


def places(lm: LatentLM, rest: Sequence[Token], ids: Sequence[int]) -> list[Place]:
    """The tokens of a group up to its first wrong one, compared with the `rest` of the chain from its start on."""
    judged: list[Place] = []
    for place, token_id in enumerate(ids):
        kind: Kind = "end"
        label = lm.template.separator_id
        if place < len(rest):
            kind = "result" if rest[place].is_result else "other"
            label = rest[place].token_id
        judged.append(Place(place, kind, token_id == label))
        # What comes after a wrong token is conditional on it.
        if token_id != label:
            break
    return judged


def write_shares(groups: Sequence[Sequence[Place]]) -> dict[str, Any]:
    """Shares of right tokens by place and by kind, None for a kind that no place has; and of groups all right.

    Without any group, as of a latent head, all are None.
    """
    if not groups:
        return {"write_by_place": None, "write_by_kind": None, "write_joint": None}
    by_place: defaultdict[int, list[bool]] = defaultdict(list)
    by_kind: defaultdict[str, list[bool]] = defaultdict(list)
    joint: list[bool] = []
    for group in groups:
        for each in group:
            by_place[each.place].append(each.right)
            by_kind[each.kind].append(each.right)
        joint.append(all(each.right for each in group))
    return {
        "write_by_place": [_share(by_place[place]) for place in sorted(by_place)],
        "write_by_kind": {kind: _share(by_kind[kind]) for kind in KINDS},
        "write_joint": _share(joint),
    }


def _share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None


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
    """For each example: its groups, those said right after a right prefix, and whether the stop was in place.

    `places` are those of each group, where tokens were chosen; [] elsewhere.
    """
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
        begun = method.begin(lm, [Request(example.id, example.question, params, seed=row.seed)])
        thought = method.think(lm, _state(lm, hidden_KD, row, begun))

        # The last position is the stop's: the embedding there is ignored.
        groups = reference_groups(lm, method, row)
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
                read_as[k] = set(ids)
                judged.append(places(lm, tokens[start:], ids))
            if not missing(asked, read_as[k]):
                right += 1
            start += len(group)
        stops = [False] * len(groups) + [True]
        yield {
            "groups": len(groups),
            "right": right,
            "stop_right": thought.done.tolist() == stops,
            "places": judged,
        }


def _state(lm: LatentLM, hidden_KD: Tensor, row: Row, begun: Mapping[str, Tensor]) -> ThinkState:
    """Every position of a chain as the step of one request that it is, greedy."""
    n = hidden_KD.shape[0]
    device = hidden_KD.device
    # Temperature 0 draws nothing. Step and seed say how many tokens a group has where c is not whole.
    zeros_K = torch.zeros(n, dtype=torch.float64, device=device)
    params_K = base.param_columns([row.params] * n)
    return ThinkState(
        hidden=hidden_KD,
        step=torch.arange(n, device=device),
        params={name: column.to(device) for name, column in params_K.items()},
        temperature=zeros_K,
        top_p=zeros_K + 1,
        latent_temperature=zeros_K,
        seed=torch.full((n,), row.seed, dtype=torch.int64, device=device),
        sample=torch.zeros(n, dtype=torch.int64, device=device),
        make_logits=lm.logits,
        begun={name: column.expand(n, *column.shape[1:]) for name, column in begun.items()},
    )


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


# Tables

SYSTEM = ("system", "c")
MEASURED = ("read", "write", "whole chain", "stop", "free", "#L", "gold #L")
WRONG = CLASSES[1:]


def cells(row: Mapping[str, Any], widest: int = 0) -> dict[str, str]:
    """A row of `diagnose`, with the keys that name its system, as tables show it: percentages, by column.

    `widest` is the most places that a group has in any row of the table: there are no columns for them where it is 0.
    """
    factor = row["compression_factor"]
    variant = row["variant"]
    shown = {
        "system": f"{row['model']} ({variant})" if variant else row["model"],
        "c": "-" if factor is None else f"{factor:g}",
        "read": percent(row["read"]),
        "write": percent(row["write_group"]),
        "whole chain": percent(row["write_chain"]),
        "stop": percent(row["stop"]),
        "free": percent(row["free"]),
        "#L": f"{row['length']:.1f}",
        "gold #L": f"{row['reference_length']:.1f}",
    }
    for name in WRONG:
        shown[name] = percent(row["classes"][name])
    # Rows of an older version have no places, and neither has a latent head.
    by_place = row.get("write_by_place") or []
    for place in range(widest):
        shown[f"t{place + 1}"] = percent(by_place[place] if place < len(by_place) else None)
    if widest:
        shown["joint"] = percent(row.get("write_joint"))
    return shown


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def shown_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The cells of all rows, with the same columns each."""
    widest = max(len(row.get("write_by_place") or []) for row in rows)
    return [cells(row, widest) for row in rows]


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """For the terminal: what was measured, what went wrong, and the places of a group where there are any.

    Three tables, because one would be wider than most terminals.
    """
    shown = shown_rows(rows)
    places = [name for name in shown[0] if name not in (*SYSTEM, *MEASURED, *WRONG)]
    titles = {
        f"{rows[0]['n']} problems: % of them, of latents for `write`": MEASURED,
        "% of problems, by the first thing that went wrong": WRONG,
    }
    if places:
        titles["write by place in the group: % right, after a right prefix"] = tuple(places)
    made = []
    for title, columns in titles.items():
        table = Table(title=title, title_justify="left")
        for name in (*SYSTEM, *columns):
            justify: Literal["left", "right"] = "left" if name == "system" else "right"
            # Where a terminal is narrow, heads of two words are the ones that wrap, and nothing is cut.
            table.add_column(
                name, justify=justify, no_wrap=name in WRONG and " " not in name, overflow="fold"
            )
        for row in shown:
            table.add_row(*(row[name] for name in (*SYSTEM, *columns)))
        made.append(table)
    return made


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """For a page: all columns in one table."""
    shown = shown_rows(rows)
    alignment = ["---"] + ["---:"] * (len(shown[0]) - 1)
    lines = [list(shown[0]), alignment, *(list(row.values()) for row in shown)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
