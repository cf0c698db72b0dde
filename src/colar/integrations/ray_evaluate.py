"""`colar evaluate --ray ADDRESS`: the engines of a Ray cluster answer, and this process judges and writes the records.

It is `evaluate.make_records` with the pool of `ray_generate` in place of an engine: the requests of a model go out in
chunks, and completions come back. This process has the models too, on its CPU: it checks that questions fit, and reads
reference chains by the tokenizer.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colar.engine.completion import Completion
from colar.evaluation.evaluate import AnswerSettings, EvaluatedModel, Question, make_record
from colar.integrations import ray_cluster, ray_generate
from colar.integrations.ray_cluster import ray
from colar.integrations.ray_generate import EngineSettings, Job, Task
from colar.model.latent_lm import LatentLM


def make_row(lm: LatentLM, completion: Completion, number: int) -> dict[str, Any]:
    """The answer of an actor to a question: it is judged here, where the judge may be the user's."""
    return {"number": number, "completion": completion}


def make_records(
    engines: Mapping[EvaluatedModel, EngineSettings],
    actors: ray_cluster.Actors,
    model: EvaluatedModel,
    questions: Sequence[Question],
    settings: AnswerSettings,
) -> Iterator[dict[str, Any]]:
    """Yield the record of each question that has an answer, in the order in which they come.

    ValueError at the end, where some have none: it names the first one and why. The same command asks them again.
    """
    tasks = [
        Task(f"{question.point.dataset} {question.example.id}", question.request, number)
        for number, question in enumerate(questions)
    ]
    # Each actor has a part, however few questions there are.
    size = min(settings.batch_size, math.ceil(len(questions) / actors.n))
    chunks = [{"tasks": pickle.dumps(tasks[i : i + size])} for i in range(0, len(tasks), size)]
    data = ray.data.from_items(chunks, override_num_blocks=len(chunks))
    failed = []
    for done in ray_generate.answers(Job(engines[model], make_row), data, actors):
        if done.failed:
            failed.append(done.row)
        else:
            yield make_record(questions[done.row["number"]], done.row["completion"])
    if failed:
        first = failed[0]
        raise ValueError(
            f"{model.name}: {len(failed)} of {len(questions)} questions have no answer, and the same command asks them "
            f"again; {first['place']}: {first['reason']}"
        )
