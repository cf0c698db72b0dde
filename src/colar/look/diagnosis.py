"""A model's answers, with their chains compared to the reference: the tokens of each thought, and the first error.

The reference is the example's own chain, in the groups that training makes of it: the chain that a model should think.

    reference   << 5 | * 5 | = 25 | >>          groups
    thoughts    << 5 | * 5 | = 35 | >>          read as their c nearest tokens, or as what the head chose
    marks       right  right  wrong  after

    right     says all tokens of its group
    wrong     the chain's first thought that does not; it determines the cause of a wrong answer
    after     comes after a wrong one, and differs too
    extra     comes after the reference's end
    null      there is nothing to compare it with

Groups beyond the last thought are `missing`. A latent says a group of tokens if all of them are among its c nearest
embeddings (c rounded up); a latent that was chosen as tokens says these, each as often as it was chosen, in any order.
A group's result is wrong if only digits after an "=" are missing, else its plan is wrong. A chain that solves the
problem in another way than the reference counts as a wrong plan.

`diagnose` helps the model, so that less can go wrong than if it thinks by itself (`decoded_answers`):

    read     the reference chain's own latents are fed; is the answer right?                    (reading alone)
    write    after each right prefix, is the next latent the right one, and the stop in place?  (one step, no drift)

Shape suffixes: R examples, Q question positions, K thoughts, X of these in one part, T = Q + K positions, D width.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from colar.checks import NonFiniteError
from colar.data.example import Example
from colar.data.judge import verdict
from colar.engine.completion import Completion
from colar.engine.request import GREEDY, Decoding, Request
from colar.evaluation.controls import ThoughtTable, given_thoughts
from colar.evaluation.evaluate import answer_all, seed_of
from colar.look.thought import (
    POSITIONS_AT_ONCE,
    EmbeddingIndex,
    chosen_ids,
    group_size,
    read_thoughts,
    vocabulary_of,
)
from colar.methods.base import Batch, Method, Row
from colar.methods.thinking import ThinkState, Thought
from colar.model.latent_lm import LatentLM
from colar.ops import devices, ragged

# The reference chain


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
    embeds_RKD, sizes_RK = method.training_thoughts(lm, batch)
    return ThoughtTable(embeds_RKD, (sizes_RK > 0).sum(-1))


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
    tokens = reference_tokens(lm, row)
    _, sizes_1K = method.training_thoughts(lm, _batch(lm, [row]))
    groups = []
    start = 0
    for size in sizes_1K[0].tolist():
        # After a row's last group, sizes are 0.
        if size:
            groups.append(tokens[start : start + size])
            start += size
    return groups


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
        batch = _batch(lm, [row])
        embeds_1KD, sizes_1K = method.training_thoughts(lm, batch)
        question_1QD = lm.embed(batch.question_ids)
        fed_1TD = ragged.pack((question_1QD, batch.question_lengths), (embeds_1KD, (sizes_1K > 0).sum(-1)))
        hidden_TD = lm.hidden(fed_1TD)[0]
        request = Request.of(example, params, seed=row.seed)
        # K + 1 rows: the question's last position, and that of each thought. Each is a step of the request, greedy.
        thought = _thought_at(lm, method, request, hidden_TD[len(row.question) - 1 :])
        if not bool(hidden_TD.isfinite().all() & thought.embeds.isfinite().all()):
            raise NonFiniteError(f"the model's numbers for {example.id} are not finite")
        groups = reference_groups(lm, method, row)
        yield ReferencePass(example, groups, embeds_1KD[0], thought)


def _thought_at(lm: LatentLM, method: Method, request: Request, hidden_KD: Tensor) -> Thought:
    """The method's thought at each step of a request, from the hidden states of all steps."""
    begun = method.begin(lm, [request])
    step_K = torch.arange(len(hidden_KD), device=hidden_KD.device)
    # In parts, because each position has logits of the whole vocabulary.
    hidden_parts, step_parts = (torch.split(each, POSITIONS_AT_ONCE) for each in (hidden_KD, step_K))
    parts = []
    for hidden_XD, step_X in zip(hidden_parts, step_parts, strict=True):
        n = len(step_X)
        # All positions belong to one request, so its columns are repeated.
        columns = {name: column.expand(n, *column.shape[1:]) for name, column in begun.items()}
        parts.append(method.think(lm, ThinkState.of([request] * n, hidden_XD, step_X, lm.logits, columns)))
    return Thought(
        torch.cat([part.embeds for part in parts]),
        torch.cat([part.done for part in parts]),
        torch.cat([part.token_ids for part in parts]),
        {name: torch.cat([part.info[name] for part in parts]) for name in parts[0].info},
    )


# Thoughts as token ids, to compare with a group of the chain

DecodedIds = set[int] | list[int]
"""The ids that a thought is read as: the set of its nearest tokens, or the list of those that it was chosen as."""


def nearest_ids(embeds_KD: Tensor, c: int, vocabulary: EmbeddingIndex) -> list[DecodedIds]:
    """The tokens that each embedding can be read as: its c nearest."""
    return [{near.token_id for near in nearest} for nearest in vocabulary.nearest(embeds_KD, c)]


def decoded_ids(thought: Mapping[str, Any]) -> DecodedIds:
    """The tokens that a THOUGHT is read as."""
    ids = [token["id"] for token in thought["tokens"]]
    return ids if thought["ordered"] else set(ids)


def covered(token_ids: Sequence[int], decoded_as: DecodedIds) -> list[bool]:
    """True for each token of a group that a thought says. A thought chosen as 1 and 2 does not cover 1 and 1."""
    if isinstance(decoded_as, set):
        # The sum of two equal embeddings is near a single token, which covers both.
        return [token_id in decoded_as for token_id in token_ids]
    left = Counter(decoded_as)
    said = []
    for token_id in token_ids:
        said.append(left[token_id] > 0)
        left[token_id] -= 1
    return said


# Answers of the model


def requests_of(examples: Sequence[Example], params: Any, decoding: Decoding) -> list[Request]:
    """The requests of `colar evaluate`'s first seed, which keep their latents."""
    return [Request.of(row, params, decoding, seed_of(row), keep_latents=True) for row in examples]


def decoded_answers(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Any,
    completions: Sequence[Completion],
    compare: bool = True,
) -> list[dict[str, Any]]:
    """Each example's completion in the page's form. Thoughts are unmarked without `compare`, or without steps.

    `cause` is one of `page.CAUSES`; without a chain to compare with, it is right, wrong or unparsable.
    `thoughts` are THOUGHTs, each with its `mark` and its `reference`: the group's tokens, each with True if the thought
    says it. `missing` are the groups without a thought; `reference_length` is the number of groups of training.
    """
    vocabulary = vocabulary_of(lm)
    answers = []
    for example, completion in zip(examples, completions, strict=True):
        judged = verdict(completion.text, example)
        thoughts = read_thoughts(lm, completion, vocabulary=vocabulary)
        for thought in thoughts:
            thought |= {"mark": None, "reference": []}
        answer = {
            "id": example.id,
            "answer": completion.text,
            "right": judged.correct,
            "cause": "right" if judged.correct else "unparsable" if judged.parsed is None else "wrong",
            "length": completion.length,
            "forward_passes": completion.forward_passes,
            "seconds": round(completion.seconds, 6),
            "truncated": completion.truncated,
            "thoughts": thoughts,
            "missing": [],
            "reference_length": None,
        }
        if compare and example.steps:
            (row,) = reference_rows(lm, method, [example], params)
            groups = reference_groups(lm, method, row)
            answer["reference_length"] = len(groups)
            _compare(lm, answer, groups_thought(lm, groups, completion))
        answers.append(answer)
    return answers


def _compare(lm: LatentLM, answer: dict[str, Any], groups: Sequence[Sequence[Token]]) -> None:
    """Mark an answer's thoughts by the groups that they should say, and find the cause of a wrong answer."""
    thoughts = answer["thoughts"]
    decoded_as = list(map(decoded_ids, thoughts))
    if answer["cause"] == "wrong":
        answer["cause"] = classify(groups, decoded_as)
    marks = marks_of(groups, decoded_as)
    for k, thought in enumerate(thoughts):
        group = groups[k] if k < len(groups) else []
        thought |= {"mark": marks[k], "reference": _reference(lm, group, decoded_as[k])}
    answer["missing"] = [_reference(lm, group, set()) for group in groups[len(thoughts) :]]


def marks_of(groups: Sequence[Sequence[Token]], decoded_as: Sequence[DecodedIds]) -> list[str]:
    """The mark of each thought."""
    marks = []
    wrong = False
    for k, ids in enumerate(decoded_as):
        if k >= len(groups):
            marks.append("extra")
        elif not missing(groups[k], ids):
            marks.append("right")
        else:
            marks.append("after" if wrong else "wrong")
            wrong = True
    return marks


def _reference(lm: LatentLM, group: Sequence[Token], decoded_as: DecodedIds) -> list[dict[str, Any]]:
    """The tokens of a group, each `said` or not by the thought."""
    said = covered([token.token_id for token in group], decoded_as)
    texts = [lm.template.token(token.token_id) for token in group]
    return [{"text": text, "said": is_said} for text, is_said in zip(texts, said, strict=True)]


def missing(group: Sequence[Token], decoded_as: DecodedIds) -> list[Token]:
    """The tokens of a group that a thought does not say."""
    said = covered([token.token_id for token in group], decoded_as)
    return [token for token, is_said in zip(group, said, strict=True) if not is_said]


def classify(groups: Sequence[Sequence[Token]], decoded_as: Sequence[DecodedIds]) -> str:
    """Find the first thing that went wrong in a wrong answer, one of `page.CAUSES`."""
    # Only the first error counts, because thoughts after a wrong one may follow from it correctly.
    # The chains may differ in length, which is judged below.
    for group, ids in zip(groups, decoded_as, strict=False):
        lost = missing(group, ids)
        if lost:
            only_results = all(token.is_result for token in lost)
            return "wrong result" if only_results else "wrong plan"
    # Every thought is right, as far as the reference goes.
    if len(decoded_as) < len(groups):
        return "stopped early"
    if len(decoded_as) > len(groups):
        return "stopped late"
    return "misread"


# With the reference's help


def diagnose(
    lm: LatentLM, method: Method, passes: Sequence[ReferencePass], params: Any, decoding: Decoding = GREEDY
) -> dict[str, Any]:
    """Shares of `n` questions, by their passes; `decoded_answers` has the chains that the model thinks by itself.

    `read`: answers that are right when the reference's own latents are fed. `write`: of all latents, those that are
    right after a right prefix. `whole_chain`: chains of which all are. `stop`: chains that end in the right place.
    """
    n = len(passes)
    vocabulary = vocabulary_of(lm)
    lengths = [len(each.groups) for each in passes]
    written = [groups_written(each, params, vocabulary) for each in passes]
    whole = [right == length for right, length in zip(written, lengths, strict=True)]
    stopped = [each.thought.done.tolist() == [False] * len(each.groups) + [True] for each in passes]
    return {
        "n": n,
        "read": sum(read(lm, method, passes, params, decoding)) / n,
        "write": sum(written) / sum(lengths),
        "whole_chain": sum(whole) / n,
        "stop": sum(stopped) / n,
    }


def read(
    lm: LatentLM, method: Method, passes: Sequence[ReferencePass], params: Any, decoding: Decoding
) -> list[bool]:
    """Feed the reference's thoughts. True for each answer that is right."""
    examples = [each.example for each in passes]
    counts = [len(each.latents_KD) for each in passes]
    latents_RKD = pad_sequence([each.latents_KD for each in passes], batch_first=True)
    thoughts = ThoughtTable(latents_RKD, torch.tensor(counts, device=lm.device))
    requests = []
    for example, count in zip(examples, counts, strict=True):
        # No chain is cut, because `decoding.max_latents` is meant for the model's own thoughts. And no request asks for
        # more than it needs, because a long question with another's long chain might not fit into the context.
        requests += requests_of([example], params, replace(decoding, max_latents=count + 1))
    completions = answer_all(lm, given_thoughts(method, requests, thoughts), requests, note="read")
    pairs = zip(completions, examples, strict=True)
    return [verdict(completion.text, example).correct for completion, example in pairs]


def groups_written(reference_pass: ReferencePass, params: Any, vocabulary: EmbeddingIndex) -> int:
    """The number of groups of a chain that the method says after a right prefix."""
    thought = reference_pass.thought
    # The last position is the stop's: the embedding there is ignored.
    nearest = nearest_ids(thought.embeds[:-1], group_size(params), vocabulary)
    tokens = list(itertools.chain.from_iterable(reference_pass.groups))
    start = 0
    right = 0
    for k, group in enumerate(reference_pass.groups):
        ids = chosen_ids({name: column[k] for name, column in thought.info.items()})
        # As many tokens of the chain as were chosen: a group may also end before a token of low confidence.
        wanted = group if ids is None else tokens[start : start + len(ids)]
        if not missing(wanted, nearest[k] if ids is None else ids):
            right += 1
        # By the reference's group, not by the chosen tokens, because the pass has fed the right prefix.
        start += len(group)
    return right
