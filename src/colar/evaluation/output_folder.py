"""The output folder of an evaluation, and what its records come from.

    evaluation.json     settings, and digests of questions and checkpoints
    records.jsonl       in the order of the questions, once all are answered

A folder belongs to one evaluation. The same command resumes it, with any number of processes, and may add questions,
data sets and checkpoints; anything else would mix records that cannot be compared, and is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import checks, files, processes
from colar.data.example import Example
from colar.evaluation.records import RecordKey, record_key
from colar.model import checkpoint

REMEDY = "give this evaluation its own --output"


def claim_evaluation(
    output: Path,
    settings: Mapping[str, Any],
    datasets: Mapping[str, Sequence[Example]],
    checkpoints: Mapping[str, Path],
) -> None:
    """Write evaluation.json into the output folder, or reject a folder that holds records of another evaluation.

    `settings` are what every record depends on: limits, split, options. `checkpoints` are folders by the name that
    their rows have. A folder without records is free, even if an evaluation was tried in it.
    """
    questions = {name: [len(examples), question_digest(examples)] for name, examples in datasets.items()}
    models = {name: checkpoint.digest(folder) for name, folder in checkpoints.items()}
    # evaluation.json is written before the first record: without records it belongs to a call that failed.
    path = output / "evaluation.json"
    records = output / "records.jsonl"
    if path.exists() and records.exists() and records.stat().st_size > 0:
        earlier = files.read_json(path)
        earlier_models = earlier.pop("models")
        earlier_questions = earlier.pop("questions")
        # The options of the sources are the same in any order.
        before, after = ({**each, "options": sorted(each.get("options", []))} for each in (earlier, settings))
        checks.check_same_run(output, before, after, REMEDY)
        # A name that only one of the two has is no conflict: checkpoints and questions may be added.
        both = earlier_models.keys() & models.keys()
        before = {f"checkpoint {name}": earlier_models[name] for name in both}
        after = {f"checkpoint {name}": models[name] for name in both}
        checks.check_same_run(output, before, after, "give this checkpoint another name: NAME=CHECKPOINT")
        for name, (n, digest) in earlier_questions.items():
            if name not in datasets:
                continue
            if len(datasets[name]) < n:
                raise ValueError(
                    f"{output} holds {n} questions of {name}, and this command has {len(datasets[name])}: questions "
                    f"may be added, not left out; raise --limit, or {REMEDY}"
                )
            # Questions may be added behind those that have records.
            if question_digest(datasets[name][:n]) != digest:
                raise ValueError(
                    f"{output} holds another run (the first {n} questions of {name} were others); {REMEDY}"
                )
        # Earlier records stay in the report, so their origin stays in the file.
        models = {**earlier_models, **models}
        questions = earlier_questions | questions
    files.write_json(path, {**settings, "questions": questions, "models": models})


def question_digest(examples: Sequence[Example]) -> str:
    """Digest of whole rows: a verdict depends on the type of the answer, and the length of the chain on the steps."""
    return files.digest(json.dumps(example.as_row()) for example in examples)


# Records, of which several processes have read and write one file: the main one


def read_records(records: Path) -> list[dict[str, Any]]:
    """All records so far; a torn last line is cut off. All processes call it together."""
    rows: list[dict[str, Any]] = processes.from_main(lambda: files.resume_jsonl(records))
    return rows


def put_in_order(records: Path, order: Sequence[RecordKey]) -> None:
    """Write the records that `order` does not name, as they stood, then the others in that order.

    All processes call it together.
    """
    places = {key: place for place, key in enumerate(order)}

    def write() -> None:
        rows = files.resume_jsonl(records)
        # A stable sort: those without a place stay as they stood, before all others.
        ordered = sorted(rows, key=lambda record: places.get(record_key(record), -1))
        # A file that is as it should be is left alone.
        if rows != ordered:
            files.write_jsonl(records, ordered)

    processes.from_main(write)
