"""The reference chain of an example: its tokens in the groups that training makes of them, and its thoughts.

The reference is the example's own chain: the chain that a model should think. `reference_passes` feeds it, and has the
method's next thought after each right prefix.

Shape suffixes: Q question positions, K thoughts, X of these in one part, T = Q + K positions, D width.
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
from colar.evaluation.evaluate import seed_of
from colar.look.thought import POSITIONS_AT_ONCE, chosen_ids
from colar.methods.base import Batch, Method, Row
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged


@dataclass(frozen=True)
class Token:
    """A token of a reference chain; in an equation `<<20-4=16>>` the result follows the last "="."""

    token_id: int
    is_result: bool


def reference_rows(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> list[Row]:
    """Encode the examples as training would at its end, all with the same per-request values.

    A row's seed is that of its request, and of `colar evaluate`, because the groups of a fractional c depend on it.
    """
    rows = []
    for example in examples:
        # `encode` draws only params, which are replaced by the given ones, so any generator will do.
        # The infinite epoch selects the last stage of a curriculum, in which the model's training has ended.
        row = method.encode(lm.template, example, Random(0), epoch=math.inf)
        # The question names the speed that `encode` drew, so it is made anew for the requested one.
        question = lm.template.question(example.question, method.speed_text(params), context=example.context)
        rows.append(replace(row, question=question, params=params, seed=seed_of(example)))
    return rows


def _batch(lm: LatentLM, row: Row) -> Batch:
    """The row on the model's device."""
    tensors = Batch.collate([row]).tensors()
    return Batch.from_tensors({name: devices.send(column, lm.device) for name, column in tensors.items()})


def reference_tokens(lm: LatentLM, row: Row) -> list[Token]:
    """A row's reasoning tokens."""
    tokens: list[Token] = []
    for step in row.steps:
        texts = [lm.template.token(token_id) for token_id in step]
        # Without a "=" there is no result.
        equals = max((i for i, text in enumerate(texts) if "=" in text), default=len(step))
        # Words may follow the result.
        words = (i for i in range(equals, len(step)) if any(letter.isalpha() for letter in texts[i]))
        end = next(words, len(step))
        for i, token_id in enumerate(step):
            # The brackets that close an equation also follow its "=".
            is_bracket = texts[i].strip() and not texts[i].strip().strip("<>")
            tokens.append(Token(token_id, is_result=equals < i < end and not is_bracket))
    return tokens


@torch.no_grad()
def reference_groups(lm: LatentLM, method: Method, row: Row) -> list[list[Token]]:
    """A row's reasoning tokens in the groups that training makes of them, one for each thought."""
    _, sizes_1K = method.training_thoughts(lm, _batch(lm, row))
    return _grouped(reference_tokens(lm, row), sizes_1K)


def _grouped(tokens: Sequence[Token], sizes_1K: Tensor) -> list[list[Token]]:
    """The tokens in groups of these sizes; after the last group, sizes are 0."""
    left = iter(tokens)
    return [list(itertools.islice(left, size)) for size in sizes_1K[0].tolist() if size]


def can_be_compared(lm: LatentLM, method: Method, examples: Sequence[Example], params: Any) -> bool:
    """True if thoughts stand for the reference chain's tokens, and there is a chain to compare them with."""
    # One example suffices, because a method either thinks in groups of tokens or does not.
    example = next((example for example in examples if example.steps), None)
    if example is None or not method.thinks_whole_chain(params):
        return False
    (row,) = reference_rows(lm, method, [example], params)
    # These `n_latents` are the model's own, and stand for no tokens.
    return len(row.chain) > 0 and row.n_latents == 0


def groups_thought(
    lm: LatentLM, groups: Sequence[list[Token]], completion: Completion
) -> Sequence[list[Token]]:
    """The reference chain in the groups that a completion's thoughts stand for.

    They are those of training, unless the thoughts were chosen as tokens: then a thought stands for as many tokens
    of the chain as it has itself. Tokens beyond the last thought form one more group.
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
        # The separator in a group stands in the place of a reference token, or after the last one.
        thought_of.append(tokens[start : start + len(ids)])
        start += sum(token_id != lm.template.separator_id for token_id in ids)
    if start < len(tokens):
        thought_of.append(tokens[start:])
    return thought_of


# The question and the reference chain's latents in one forward: the method's next thought after each right prefix.
#
#     fed        q  q ###  l1   l2   l3        positions 0 .. Q - 1 are the question, the others its K thoughts
#     hidden           |    |    |    |
#     thought         l1   l2   l3  stop       the method, at each of these K + 1 positions by itself
#
# No error is carried from one thought to the next, because each is judged after a chain that is right so far. Thought k
# should say group k of the chain.


@dataclass(frozen=True)
class ReferencePass:
    """One example's pass: the latents that were fed, and the method's reply at its K + 1 positions."""

    example: Example
    groups: list[list[Token]]
    latents_KD: Tensor
    """The reference's thoughts, which were fed."""
    thought: Thought
    """K + 1 rows: the last one is after the last thought, where the method should stop."""


@torch.no_grad()
def reference_passes(
    lm: LatentLM, method: Method, examples: Sequence[Example], params: Any
) -> Iterator[ReferencePass]:
    """The passes of examples whose thoughts stand for the chain's tokens (see `can_be_compared`).

    NonFiniteError if the model's numbers are NaN or infinite, because such thoughts cannot be judged.
    """
    for example, row in zip(examples, reference_rows(lm, method, examples, params), strict=True):
        # One row at a time, without padding, so that positions are those of its own question and thoughts.
        batch = _batch(lm, row)
        embeds_1KD, sizes_1K = method.training_thoughts(lm, batch)
        question_1QD = lm.embed(batch.question_ids)
        fed_1TD = ragged.pack((question_1QD, batch.question_lengths), (embeds_1KD, (sizes_1K > 0).sum(-1)))
        hidden_TD = lm.hidden(fed_1TD)[0]
        request = Request.of(example, params, seed=row.seed)
        # K + 1 rows: the question's last position, and that of each thought. Each is a step of the request, greedy.
        thought = _thought_at(lm, method, request, hidden_TD[len(row.question) - 1 :])
        if not bool(hidden_TD.isfinite().all() & thought.embeds.isfinite().all()):
            raise NonFiniteError(f"the model's numbers for {example.id} are not finite")
        yield ReferencePass(example, _grouped(reference_tokens(lm, row), sizes_1K), embeds_1KD[0], thought)


def _thought_at(lm: LatentLM, method: Method, request: Request, hidden_KD: Tensor) -> Thought:
    """The method's thought at each step of a request, from the hidden states of all steps."""
    step_K = torch.arange(len(hidden_KD), device=hidden_KD.device)
    # In parts, because each position has logits of the whole vocabulary.
    hidden_parts, step_parts = (torch.split(each, POSITIONS_AT_ONCE) for each in (hidden_KD, step_K))
    parts = []
    for hidden_XD, step_X in zip(hidden_parts, step_parts, strict=True):
        # All positions belong to one request.
        requests = [request] * len(step_X)
        begun = method.begin(lm, requests)
        parts.append(method.think(lm, ThinkState.of(requests, hidden_XD, step_X, lm.logits, begun)))
    return Thought(
        torch.cat([part.embeds for part in parts]),
        torch.cat([part.done for part in parts]),
        torch.cat([part.token_ids for part in parts]),
        {name: torch.cat([part.info[name] for part in parts]) for name in parts[0].info},
    )
