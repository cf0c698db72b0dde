"""Training rows with a model's own chains: each question's chain as the model writes it, where its answer is right.

Many chains lead to one answer, and people write now this one, now that one. A model that predicts several tokens at
once cannot know which of them the writer chose. Its own chains follow from the question. Sequence-level knowledge
distillation (Kim and Rush, 1606.07947), kept by the answer as in rejection sampling (Yuan et al., 2308.01825).

    attempts.jsonl         one row a question, appended as it is answered: the same call resumes
    train.jsonl            the rows to train on, in the format of every other source, written at the end
    control/train.jsonl    the same questions with the data's chains: what training on own chains is compared with
    chains.json            settings, counts and provenance
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from colar import files, progress
from colar.checks import check_same_run
from colar.data.answers import judge
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.engine.request import Completion, Decoding, Request, fold
from colar.evaluation.claim import question_digests
from colar.evaluation.evaluate import Limits
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from
from colar.prompts import Template

REMEDY = "give these chains their own --output"


def write(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    output: Path,
    decoding: Decoding,
    limits: Limits,
    seed: int = 0,
    asked: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Answer every question once and write the rows whose answers are right. Returns the counts.

    `asked` is what the chains depend on besides questions and decoding (the checkpoint): another value is another run.
    Raises ValueError where the folder holds another run, where the method thinks in latents, or where no answer is
    right.
    """
    path = output / "attempts.jsonl"
    settings = {
        **(asked or {}),
        "seed": seed,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "max_latents": limits.max_latents,
        "max_completion_length": limits.max_completion_length,
        "questions": _digest(examples),
    }
    _claim(output, settings)
    done = {attempt["id"] for attempt in files.resume_jsonl(path)}
    missing = {example.id: example for example in examples if example.id not in done}
    requests = [_request(method, example, decoding, limits, seed) for example in missing.values()]

    engine = Engine(lm, method, limits.batch_size, compile=limits.compile, cuda_graphs=limits.cuda_graphs)
    with files.append_jsonl(path) as append, progress.bar("chains", len(requests)) as bar:
        for completion in fold(lm, engine.stream(requests)):
            completion.require_finite()
            append(_attempt(lm.template, completion, missing[completion.request.id]))
            bar.advance()

    attempts = {attempt["id"]: attempt for attempt in files.resume_jsonl(path)}
    rows = right_rows(lm.template, examples, attempts)
    if not rows:
        raise ValueError(f"none of {len(examples)} answers is right: there is no chain to train on")
    files.write_jsonl(output / "train.jsonl", [row.as_row() for row in rows])
    # Questions that are answered rightly are easier ones: rows with all questions would be no control.
    kept = {row.id for row in rows}
    files.write_jsonl(
        output / "control" / "train.jsonl", [example.as_row() for example in examples if example.id in kept]
    )
    counts = _counts(lm.template, examples, attempts, rows)
    made = {"settings": settings, "counts": counts, "provenance": files.provenance()}
    files.write_json(output / "chains.json", made)
    return counts


def right_rows(
    template: Template, examples: Iterable[Example], attempts: Mapping[str, Mapping[str, Any]]
) -> list[Example]:
    """The examples whose attempt is right, each with the chain of the attempt, in the order of `examples`."""
    examples = list(examples)
    joiner = template.config.step_joiner
    # A chain is cut into steps at the joiner, where that is no part of a step.
    cut = bool(joiner) and not any(joiner in step for example in examples for step in example.steps)
    rows = []
    for example in examples:
        attempt = attempts[example.id]
        if attempt["correct"]:
            chain = attempt["chain"]
            steps = chain.split(joiner) if cut else [chain]
            rows.append(replace(example, steps=tuple(step for step in steps if step.strip())))
    return rows


def _request(method: Method, example: Example, decoding: Decoding, limits: Limits, seed: int) -> Request:
    cut = replace(
        decoding, max_latents=limits.max_latents, max_completion_length=limits.max_completion_length
    )
    return Request(example.id, example.question, method.Params(), cut, seed_from(seed, example.id))


def _attempt(template: Template, completion: Completion, example: Example) -> dict[str, Any]:
    """One row of attempts.jsonl. ValueError for a completion with latents, which have no text."""
    if -1 in completion.thought_ids:
        raise ValueError(
            f"{example.id}: the checkpoint thinks in latents, which are no text; chains need one that thinks in words "
            "(cot)"
        )
    verdict = judge(completion.text, example.answer, example.answer_type)
    return {
        "id": example.id,
        "chain": template.decode(completion.thought_ids),
        "answer": completion.text,
        # A chain that met its limit lacks its end, whatever the answer.
        "correct": verdict.correct and not completion.truncated,
        "truncated": completion.truncated,
    }


def _claim(output: Path, settings: Mapping[str, Any]) -> None:
    """Keep chains of another checkpoint, decoding or question out of the folder."""
    path = output / "chains.json"
    attempts = output / "attempts.jsonl"
    # Written before the first attempt: without one it belongs to a call that failed.
    if path.exists() and attempts.exists() and attempts.stat().st_size > 0:
        check_same_run(output, files.read_json(path)["settings"], settings, REMEDY)
    files.write_json(path, {"settings": settings})


def _digest(examples: Sequence[Example]) -> str:
    """Questions and answers as 16 hex digits."""
    digests = question_digests(examples)
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _counts(
    template: Template,
    examples: Sequence[Example],
    attempts: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Example],
) -> dict[str, int]:
    """How many questions, right answers, chains equal to the data's, and chains that met a limit."""
    # As text: a chain that could not be cut is one step.
    joiner = template.config.step_joiner
    before = {example.id: joiner.join(example.steps).strip() for example in examples}
    return {
        "questions": len(examples),
        "right": len(rows),
        "as_in_the_data": sum(joiner.join(row.steps).strip() == before[row.id] for row in rows),
        "truncated": sum(attempts[example.id]["truncated"] for example in examples),
    }
