"""A model's answers, their chains beside the reference's: what each thought says, and the first thing that goes wrong.

    reference   << 5 | * 5 | = 25 | >>          groups
    thoughts    << 5 | * 5 | = 35 | >>          read as their c nearest tokens, or as what the head chose
    marks       right  right  wrong  after

    right     says all tokens of its group
    wrong     the chain's first thought that does not: the cause of a wrong answer goes by it
    after     comes after a wrong one, and differs too
    extra     comes behind the reference's end
    null      there is nothing to compare it with

Groups that no thought has come to are `missing`. A latent says a group of tokens when all of them are among its c
nearest embeddings (c rounded up); one that was chosen as tokens says these, each as often as it was chosen, in any
order. A group is wrong by its `result` when only digits after an "=" are missing, by its `plan` otherwise; a chain that
solves the problem in another way than the reference's counts as another plan.

`diagnose` helps the model, so that it has less to get wrong than where it thinks for itself (`decoded_answers`):

    read     the reference chain's own latents are fed; is the answer right?                    (reading alone)
    write    after each right prefix, is the next latent the right one, and the stop in place?  (one step, no drift)
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from colar.data.example import Example
from colar.data.judge.answers import verdict
from colar.engine.completion import Completion
from colar.engine.request import GREEDY, Decoding, Request
from colar.evaluation.controls import GivenThoughts
from colar.evaluation.evaluate import answer_all, seed_of
from colar.look.reference_chain import (
    ReferencePass,
    Token,
    groups_thought,
    reference_groups,
    reference_rows,
    reference_thoughts,
)
from colar.look.thought import (
    DecodedIds,
    EmbeddingIndex,
    chosen_ids,
    covered,
    decode_thoughts,
    group_size,
    nearest_ids,
    read_thoughts,
    vocabulary_of,
)
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM


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
    """Each example's completion as the page has it. Without `compare`, or for an example without steps, unmarked.

    `cause` is one of `page.CAUSES`: right, wrong or unparsable where there is no chain to compare with.
    `thoughts` are THOUGHTs, each with its `mark` and its `reference`: the group's tokens, and whether it says
    them. `missing` are groups without a thought, `reference_length` counts those of training.
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
            decoded_as = decode_thoughts(completion, group_size(params), vocabulary)
            answer["reference_length"] = len(groups)
            _compare(lm, answer, groups_thought(lm, groups, completion), decoded_as)
        answers.append(answer)
    return answers


def _compare(
    lm: LatentLM, answer: dict[str, Any], groups: Sequence[Sequence[Token]], decoded_as: Sequence[DecodedIds]
) -> None:
    """Mark an answer's thoughts by the groups that they should say, and put a wrong answer down to its cause."""
    if answer["cause"] == "wrong":
        answer["cause"] = classify(groups, decoded_as)
    thoughts = answer["thoughts"]
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
    tokens = []
    for token, said in zip(group, covered([token.token_id for token in group], decoded_as), strict=True):
        tokens.append({"text": lm.template.token(token.token_id), "said": said})
    return tokens


# Causes


def missing(group: Sequence[Token], decoded_as: DecodedIds) -> list[Token]:
    """The tokens of a group that a thought does not say."""
    said = covered([token.token_id for token in group], decoded_as)
    return [token for token, is_said in zip(group, said, strict=True) if not is_said]


def classify(groups: Sequence[Sequence[Token]], decoded_as: Sequence[DecodedIds]) -> str:
    """Put a wrong answer down to the first thing that went wrong, as `page.CAUSES` has it."""
    # Only the first: thoughts behind a wrong one may be right about it.
    # The chains may differ in length, which is judged below.
    for group, ids in zip(groups, decoded_as, strict=False):
        lost = missing(group, ids)
        if lost:
            only_results = all(token.is_result for token in lost)
            return "wrong result" if only_results else "wrong plan"
    # All that was thought is right, as far as the reference goes.
    if len(decoded_as) < len(groups):
        return "stopped early"
    if len(decoded_as) > len(groups):
        return "stopped late"
    return "misread"


# With the reference's help


def diagnose(
    lm: LatentLM, method: Method, passes: Sequence[ReferencePass], params: Any, decoding: Decoding = GREEDY
) -> dict[str, Any]:
    """Shares of `n` questions, by their passes; what a model does for itself is in `decoded_answers`.

    `read`: answers that are right when the reference's own latents are fed. `write`: of all latents, those that are
    right after a right prefix; `whole_chain`: chains of which all are. `stop`: chains that end in the right place.
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
    thoughts = reference_thoughts(lm, method, examples, params)
    requests = []
    for example, count in zip(examples, thoughts.counts_R.tolist(), strict=True):
        # No chain is cut: the limit is meant for thoughts of the model's own. And none asks for more than it needs: a
        # long question with another's long chain might not fit into the context.
        requests += requests_of([example], params, replace(decoding, max_latents=count + 1))
    completions = answer_all(lm, GivenThoughts(method, requests, thoughts), requests, note="read")
    pairs = zip(completions, examples, strict=True)
    return [verdict(completion.text, example).correct for completion, example in pairs]


def groups_written(reference_pass: ReferencePass, params: Any, vocabulary: EmbeddingIndex) -> int:
    """The groups of a chain that the method says after a right prefix."""
    thought = reference_pass.thought
    # The last position is the stop's: the embedding there is ignored.
    nearest = nearest_ids(thought.embeds[:-1], group_size(params), vocabulary)
    tokens = list(itertools.chain.from_iterable(reference_pass.groups))
    start = 0
    right = 0
    for k, group in enumerate(reference_pass.groups):
        ids = chosen_ids({name: column[k] for name, column in thought.info.items()})
        # As many tokens of the chain as were chosen: a group may also end before one of low confidence.
        wanted = group if ids is None else tokens[start : start + len(ids)]
        if not missing(wanted, nearest[k] if ids is None else ids):
            right += 1
        # By the reference's group, not by what was chosen: the pass has fed the right prefix.
        start += len(group)
    return right
