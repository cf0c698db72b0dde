"""The output folder of an evaluation: what its records come from, and the files that several processes append to.

    evaluation.json         settings, and digests of questions and checkpoints
    records.jsonl           of process 0, and of earlier calls
    records.part1.jsonl     of process 1, until all have ended: then all records stand in records.jsonl, in the order
    records.part2.jsonl     of the questions, and the parts are gone

A folder belongs to one evaluation. The same command resumes it, with any number of processes, and may add questions,
data sets and checkpoints; anything else would mix records that cannot be compared, and is rejected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import PartialState

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
    questions = {name: question_digests(examples) for name, examples in datasets.items()}
    models = {name: checkpoint.digest(folder) for name, folder in checkpoints.items()}
    # evaluation.json is written before the first record: without records it belongs to a call that failed.
    path = output / "evaluation.json"
    records = output / "records.jsonl"
    answered = [file for file in (records, *parts(records)) if file.exists() and file.stat().st_size > 0]
    if path.exists() and answered:
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
        for name in earlier_questions.keys() & questions.keys():
            common = earlier_questions[name].keys() & questions[name].keys()
            changed = sorted(id for id in common if earlier_questions[name][id] != questions[name][id])
            # Other questions or answers under ids that have records. The first is enough to find out why.
            if changed:
                raise ValueError(
                    f"{output} holds another run (other questions of {name}: {len(changed)} have changed, "
                    f"{changed[0]} first); {REMEDY}"
                )
        # Earlier records stay in the report, so their origin stays in the file.
        models = {**earlier_models, **models}
        for name, digests in earlier_questions.items():
            questions[name] = digests | questions.get(name, {})
    files.write_json(path, {**settings, "questions": questions, "models": models})


def question_digests(examples: Sequence[Example]) -> dict[str, str]:
    """Question id -> its whole row, as 8 hex digits."""
    digests = {}
    for example in examples:
        # A verdict depends on the type of the answer, and the length of the reference chain on the steps.
        text = json.dumps(example.as_row())
        digests[example.id] = files.digest([text])[:8]
    return digests


# Records of several processes


def process_file(records: Path) -> Path:
    """The file that this process appends to."""
    index = PartialState().process_index
    return _part(records, str(index)) if index else records


def collect(records: Path) -> list[dict[str, Any]]:
    """All records of `records` and its parts, each once, those of `records` first. All call it together."""
    records.parent.mkdir(parents=True, exist_ok=True)
    processes.require_shared(records.parent)
    # One process reads, so that none cuts a torn line that another one cuts at the same time.
    found: list[dict[str, Any]] = processes.from_main(lambda: _read(records))
    return found


def _read(records: Path) -> list[dict[str, Any]]:
    known: dict[RecordKey, dict[str, Any]] = {}
    for path in [records, *parts(records)]:
        for record in files.resume_jsonl(path):
            known.setdefault(record_key(record), record)
    return list(known.values())


def merge_parts(records: Path, order: Sequence[RecordKey]) -> None:
    """Write all records into `records` and remove the parts. All call it together.

    First come those that `order` does not name, as they stood, then the others in that order.
    """
    state = PartialState()
    # No part is read before its process is done.
    state.wait_for_everyone()
    if state.is_main_process:
        places = {key: place for place, key in enumerate(order)}
        # A stable sort: those without a place stay as they stood, before all others.
        settled = sorted(_read(records), key=lambda record: places.get(record_key(record), -1))
        # A file that is as it should be is left alone.
        if files.resume_jsonl(records) != settled:
            files.write_jsonl(records, settled)
        for part in parts(records):
            part.unlink()
    state.wait_for_everyone()


def parts(records: Path) -> list[Path]:
    """The parts that lie beside `records`."""
    return sorted(records.parent.glob(_part(records, "*").name))


def _part(records: Path, name: str) -> Path:
    return records.with_name(f"{records.stem}.part{name}{records.suffix}")
