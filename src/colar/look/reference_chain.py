"""The reference chain of an example in the groups that training makes of it: what a model should think.

Shape suffixes: R examples, K thoughts, D width.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from colar.checks import NonFiniteError
from colar.data.example import Example
from colar.engine.completion import Completion
from colar.engine.request import Request
from colar.evaluation.controls import ThoughtTable
from colar.evaluation.evaluate import seed_of
from colar.look.thought import chosen_ids
from colar.methods.base import Batch, Method, Row
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged


@dataclass(frozen=True)
class Token:
    """A token of a reference chain; in an equation `<<20-4=16>>` the result stands behind the last "="."""

    token_id: int
    is_result: bool


def reference_rows(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> list[Row]:
    """Encode the examples as training would at its end, all with the same per-request values.

    A row's seed is that of its request, and of `colar evaluate`: the groups of a c that is not whole depend on it.
    """
    rows = []
    for example in examples:
        # What `encode` draws are params, and these are given: any generator will do.
        # A curriculum ends in its last stage, and so does the model that is looked at.
        row = method.encode(lm.template, example, Random(0), epoch=math.inf)
        # The question names the speed that `encode` drew: it is made anew for the one that is asked for.
        question = lm.template.question(example.question, method.speed_text(params), context=example.context)
        rows.append(replace(row, question=question, params=params, seed=seed_of(example)))
    return rows


def _batch(lm: LatentLM, rows: Sequence[Row]) -> Batch:
    """The rows on the model's device."""
    tensors = Batch.collate(rows).tensors()
    return Batch.from_tensors({name: devices.send(column, lm.device) for name, column in tensors.items()})


@torch.no_grad()
def reference_thoughts(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any
) -> ThoughtTable:
    """The thoughts of the reference chains as training feeds them."""
    batch = _batch(lm, reference_rows(lm, method, examples, params))
    embeds_RKD, counts_R = method.training_thoughts(lm, batch)
    return ThoughtTable(embeds_RKD, counts_R)


def reference_tokens(lm: LatentLM, row: Row) -> list[Token]:
    """A row's reasoning tokens."""
    tokens: list[Token] = []
    for step in row.steps:
        texts = [lm.template.token(token_id) for token_id in step]
        # Without a "=" there is no result.
        equals = max((i for i, text in enumerate(texts) if "=" in text), default=len(step))
        for i, token_id in enumerate(step):
            # The brackets that close an equation stand behind its "=" too.
            is_bracket = texts[i].strip() and not texts[i].strip().strip("<>")
            tokens.append(Token(token_id, is_result=i > equals and not is_bracket))
    return tokens


@torch.no_grad()
def reference_groups(lm: LatentLM, method: Method, row: Row) -> list[list[Token]]:
    """A row's reasoning tokens in the groups that training makes of them: each stands for one thought."""
    tokens = reference_tokens(lm, row)
    groups = []
    start = 0
    for size in method.group_sizes(lm, _batch(lm, [row]))[0].tolist():
        # Behind a row's last group sizes are 0.
        if size:
            groups.append(tokens[start : start + size])
            start += size
    return groups


def can_be_compared(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> bool:
    """True if thoughts stand for the reference chain's tokens, and there is a chain to compare them with."""
    # One example tells: a method either thinks in groups of tokens or it does not.
    example = next((example for example in examples if example.steps), None)
    if example is None or not method.thinks_whole_chain(params):
        return False
    (row,) = reference_rows(lm, method, [example], params)
    # Latents of the model's own stand for no tokens.
    if row.n_latents:
        return False
    n_groups = len(reference_groups(lm, method, row))
    return 0 < n_groups == int(reference_thoughts(lm, method, [example], params).counts_R[0])


def groups_thought(
    lm: LatentLM, groups: Sequence[list[Token]], completion: Completion
) -> Sequence[list[Token]]:
    """The reference chain in the groups that a completion's thoughts stand for.

    They are those of training, unless the thoughts were chosen as tokens: then a thought stands for as many tokens
    of the chain as it has. What no thought has come to is one more group.
    """
    chosen = [chosen_ids(info) for info in completion.thought_info()]
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


# The question and the reference chain's latents in one forward: what a method says after each right prefix.
#
#     fed        q  q ###  l1   l2   l3        positions 0 .. Q - 1 are the question, the others its K thoughts
#     hidden           |    |    |    |
#     thought         l1   l2   l3  stop       the method, at each of these K + 1 positions by itself
#
# No error is carried from one thought to the next: each is judged after a chain that is right so far. Group k of the
# chain is what thought k should say.
#
# Shape suffixes: Q question positions, K thoughts, T = Q + K positions, D width.


@dataclass(frozen=True)
class ReferencePass:
    """One example's pass: what was fed, and the method's reply at its K + 1 positions."""

    example: Example
    groups: list[list[Token]]
    latents_KD: Tensor
    """The reference's thoughts, which were fed."""
    thought: Thought
    """K + 1 rows: the last one is behind the last thought, where the method should stop."""


@torch.no_grad()
def reference_passes(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any
) -> Iterator[ReferencePass]:
    """The passes of examples whose thoughts stand for the chain's tokens (`can_be_compared` tells).

    NonFiniteError where the model's numbers are NaN or infinite: nothing could be said of such thoughts.
    """
    for example, row in zip(examples, reference_rows(lm, method, examples, params), strict=True):
        # A row at a time: without padding, positions are those of its own question and thoughts.
        batch = _batch(lm, [row])
        embeds_1KD, counts_1 = method.training_thoughts(lm, batch)
        question_1QD = lm.embed(batch.question_ids)
        fed_1TD = ragged.pack((question_1QD, batch.question_lengths), (embeds_1KD, counts_1))
        hidden_TD = lm.hidden(fed_1TD)[0]
        request = Request.of(example, params, seed=row.seed)
        # K + 1 rows: the question's last position, and that of each thought. Each is a step of the request, greedy.
        hidden_KD = hidden_TD[len(row.question) - 1 :]
        n = len(hidden_KD)
        step_K = torch.arange(n, device=hidden_KD.device)
        # There is one request behind all positions: its columns are repeated.
        begun = {
            name: column.expand(n, *column.shape[1:]) for name, column in method.begin(lm, [request]).items()
        }
        thought = method.think(lm, ThinkState.of([request] * n, hidden_KD, step_K, lm.logits, begun))
        if not bool(hidden_TD.isfinite().all() & thought.embeds.isfinite().all()):
            raise NonFiniteError(f"the model's numbers for {example.id} are not finite")
        groups = reference_groups(lm, method, row)
        yield ReferencePass(example, groups, embeds_1KD[0], thought)
