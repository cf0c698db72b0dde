"""The output folder of an evaluation: the names of what is evaluated, and what its records come from.

    evaluation.json     settings, and digests of questions and checkpoints
    records.jsonl       in the order of the questions, once all are answered

A folder belongs to one evaluation. The same command resumes it, with any number of processes, and may add questions,
data sets and checkpoints; anything else would mix records that cannot be compared, and is rejected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from colar import checks, files, processes
from colar.data import sources
from colar.data.data_files import is_own_file
from colar.data.example import Example
from colar.evaluation.records import RecordKey, record_key
from colar.evaluation.report_rows import AVERAGE
from colar.methods import registry
from colar.model import checkpoint

REMEDY = "give this evaluation its own --output"

# Names of what is evaluated: each checkpoint and each data set has one, and no two have the same


class CheckpointName(NamedTuple):
    """The fields that name a checkpoint's rows; params and decoding are those of each request."""

    model: str
    method: str
    label: str
    train_seed: int | None

    def __str__(self) -> str:
        parts = [f"{self.model} {self.method}"]
        if self.label:
            parts.append(self.label)
        if self.train_seed is not None:
            parts.append(f"run {self.train_seed}")
        return ", ".join(parts)


def name_checkpoints(given: Iterable[tuple[str, str]], label: str | None) -> dict[CheckpointName, str]:
    """Checkpoints (folder or Hub id) by the name of their rows, from (model name, checkpoint) pairs.

    Method, label and training seed are read from the checkpoint; `label` replaces its own. Raises ValueError for two
    checkpoints of one name, and where there is no checkpoint.
    """
    found: dict[CheckpointName, str] = {}
    for model, path in given:
        info = checkpoint.read_info(checkpoint.resolve(path))
        run = info["run"]
        # A checkpoint that was made in code, not by `colar train`, has neither label nor seed.
        own_label = run.get("label", "")
        name = CheckpointName(
            model=model,
            method=registry.rebuild(info["method"], path).name,
            label=own_label if label is None else label,
            train_seed=run.get("seed"),
        )
        if name in found:
            raise ValueError(
                f"two checkpoints have one name ({name}); give them their own: cot=runs/a/best cot2=runs/b/best"
            )
        found[name] = path
    return found


def name_sources(texts: Iterable[str]) -> dict[str, str]:
    """Sources of data by the name of their data set, from NAME=SOURCE or SOURCE.

    A source names itself, a file by its stem, a folder of files by its name, however its path is written. Raises
    ValueError for two of one name, and for the name of the report's means.
    """
    pairs = []
    for text in texts:
        name, source = split_name(text)
        if name is None:
            # A whole path would be a wide head for a column, and may be written in several ways.
            own_folder = Path(text).is_dir() and sources.user_file(text, "test") is not None
            name = Path(text).resolve().name if own_folder else Path(text).stem if is_own_file(text) else text
        pairs.append((name, source))
    names = [name for name, _ in pairs]
    # Rejected before all questions are answered: the report would reject the records.
    if AVERAGE in names:
        raise ValueError(
            f"no data set of --data may be called {AVERAGE!r}, as the report's mean is; write NAME=..."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"two data sets of --data have one name: {', '.join(names)}; write NAME=... for one")
    return dict(pairs)


def split_name(text: str) -> tuple[str | None, str]:
    """NAME=PATH -> (NAME, PATH); (None, text) where there is no name.

    A path may have a "=" of its own, as runs/lr=1e-4/best has. So a text that is an existing path has no name, nor has
    one with a "/" before its first "=".
    """
    name, equals, path = text.partition("=")
    if not equals or "/" in name or os.path.exists(text):
        return None, text
    return name, path


# evaluation.json


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
            # Questions may be added behind those that have records.
            if name in datasets and question_digest(datasets[name][:n]) != digest:
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
    found: list[dict[str, Any]] = processes.from_main(lambda: files.resume_jsonl(records))
    return found


def put_in_order(records: Path, order: Sequence[RecordKey]) -> None:
    """Write the records that `order` does not name, as they stood, then the others in that order.

    All processes call it together.
    """
    places = {key: place for place, key in enumerate(order)}

    def write() -> None:
        found = files.resume_jsonl(records)
        # A stable sort: those without a place stay as they stood, before all others.
        settled = sorted(found, key=lambda record: places.get(record_key(record), -1))
        # A file that is as it should be is left alone.
        if found != settled:
            files.write_jsonl(records, settled)

    processes.from_main(write)
