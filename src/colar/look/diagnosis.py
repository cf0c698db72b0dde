"""A model's answers, with their chains compared to the reference: the tokens of each thought, and the first error.

The reference is the example's own chain, in the groups that training makes of it (`look/reference_chain.py`).

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

Shape suffixes: R examples, K thoughts, D width.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from colar.data.example import Example
from colar.data.judge import verdict
from colar.engine.completion import Completion
from colar.engine.request import GREEDY, Decoding, Request
from colar.evaluation.controls import ThoughtTable, given_thoughts
from colar.evaluation.evaluate import answer_all, seed_of
from colar.look.reference_chain import ReferencePass, Token, groups_thought, reference_groups, reference_rows
from colar.look.thought import EmbeddingIndex, chosen_ids, group_size, read_thoughts, vocabulary_of
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

# Thoughts as token ids, to compare with a group of the chain

DecodedIds = set[int] | list[int]
"""The ids that a thought is read as: the set of its nearest tokens, or the list of those that it was chosen as."""


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
    nearest = vocabulary.nearest(thought.embeds[:-1], group_size(params))
    tokens = list(itertools.chain.from_iterable(reference_pass.groups))
    start = 0
    right = 0
    for k, group in enumerate(reference_pass.groups):
        ids = chosen_ids({name: column[k] for name, column in thought.info.items()})
        # As many tokens of the chain as were chosen: a group may also end before a token of low confidence.
        if ids is None:
            right += not missing(group, {near.token_id for near in nearest[k]})
        else:
            right += not missing(tokens[start : start + len(ids)], ids)
        # By the reference's group, not by the chosen tokens, because the pass has fed the right prefix.
        start += len(group)
    return right
