"""Settings of evaluations, in the evaluation.json beside their records: an output folder belongs to one evaluation.

The same command resumes an evaluation, with any number of processes, and may add questions, data sets and checkpoints;
anything else would mix records that cannot be compared, and is rejected. So are records of several evaluations that
cannot stand in one report.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import checks, files
from colar.data.example import Example
from colar.evaluation.records import AUTO_RECORDS

REMEDY = "give this evaluation its own --output"
RENAME = "rename one: NAME=CHECKPOINT"
ORIGIN = ("split", "data_seed")
"""Settings that choose the questions of a source, beside their number."""
BY_KIND = "by kind"
"""Name of the judge by answer types, if other records were judged by a function of the user's."""


def claim_evaluation(
    output: Path,
    settings: Mapping[str, Any],
    datasets: Mapping[str, Sequence[Example]],
    checkpoints: Mapping[str, Path],
) -> None:
    """Write evaluation.json into the output folder, or reject a folder that holds records of another evaluation.

    `settings` are the values that every record depends on: limits, split, options. `checkpoints` maps the names in rows
    to folders. A folder without records is free, even if an earlier evaluation failed in it. Records without an
    evaluation.json are rejected, because their settings are unknown.
    """
    # Not at the top: it imports transformers and peft, seconds that `colar report` needs none of.
    from colar.model import checkpoint

    questions = {name: asked_of(examples) for name, examples in datasets.items()}
    models = {name: checkpoint.digest(folder) for name, folder in checkpoints.items()}
    # evaluation.json is written before the first record: without records it belongs to a call that failed.
    path = output / "evaluation.json"
    records = output / "records.jsonl"
    if next(output.glob(AUTO_RECORDS), None):
        raise ValueError(f"{output} holds the speeds of colar train auto; {REMEDY}")
    if records.exists() and records.stat().st_size > 0:
        if not path.exists():
            raise ValueError(
                f"{output} holds records.jsonl without the evaluation.json that says how they were made; {REMEDY}"
            )
        earlier = files.read_json(path)
        earlier_models = earlier.pop("models")
        earlier_questions = earlier.pop("questions")
        checks.check_same_run(output, earlier, settings, REMEDY)
        # A name that only one of the two has is no conflict: checkpoints and questions may be added.
        both = earlier_models.keys() & models.keys()
        before = {f"checkpoint {name}": earlier_models[name] for name in both}
        after = {f"checkpoint {name}": models[name] for name in both}
        checks.check_same_run(output, before, after, "give this checkpoint another name: NAME=CHECKPOINT")
        for name, (n, digest, _) in earlier_questions.items():
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


def settings_of(records: Iterable[Path]) -> dict[str, Any]:
    """Settings of the evaluations that wrote some records files, from the `evaluation.json` beside each that has one.

    They are part of a report's provenance. A key has the value that all evaluations share, or a list of the distinct
    values; `models` and the numbers of `questions` are merged. The digests of the questions are left out, because only
    a resumed evaluation needs them.

    Raises ValueError if two evaluations have different checkpoints under one name, or asked one with other limits or in
    another dtype, because these would pass for one system; if they judged one data set differently; or if they have
    different questions of it: equally many that are not the same, or others by their first one, their split or their
    seed. If only the numbers of questions differ, report.md warns.
    """
    evaluations = [(path, _settings_beside(path)) for path in records]
    for (path, one), (other_path, other) in itertools.combinations(evaluations, 2):
        _check_comparable(f"{path} and {other_path}", one, other)
    models: dict[str, str] = {}
    numbers: dict[str, int] = {}
    values: defaultdict[str, list[Any]] = defaultdict(list)
    for _, settings in evaluations:
        models |= settings.pop("models", {})
        for data, (n, *_) in settings.pop("questions", {}).items():
            numbers[data] = max(n, numbers.get(data, 0))
        for key, value in settings.items():
            # Values may be lists or mappings, which a set cannot hold.
            if value not in values[key]:
                values[key].append(value)
    if values["judge"] in ([], [BY_KIND]):
        del values["judge"]
    shared = {key: each[0] if len(each) == 1 else each for key, each in values.items()}
    of_all = {"questions": numbers, "models": models}
    return shared | {key: value for key, value in of_all.items() if value}


def _settings_beside(records: Path) -> dict[str, Any]:
    """The settings of the evaluation that wrote a records file, its judge included; {} if they are unknown."""
    path = records.parent / "evaluation.json"
    settings: dict[str, Any] = files.read_json(path) if path.exists() else {}
    # An evaluation without a judge of the user's own has no such key.
    if settings:
        settings.setdefault("judge", BY_KIND)
    return settings


def _check_comparable(both: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """ValueError, which names `both` records files, unless one report may hold the records of two evaluations."""
    facts = _facts(other)
    for what, (value, remedy) in _facts(one).items():
        if what in facts and facts[what][0] != value:
            raise ValueError(f"{both} have other {what} ({value} and {facts[what][0]}); {remedy}")
    for data, (n, digest, first) in one.get("questions", {}).items():
        other_n, other_digest, other_first = other.get("questions", {}).get(data, (n, digest, first))
        # Equally many questions are compared by digest, otherwise by the first one, and by their split and seed.
        same = digest == other_digest
        if n != other_n:
            same = first == other_first and all(one.get(key) == other.get(key) for key in ORIGIN)
        if not same:
            raise ValueError(
                f"{both} have other questions under one name, {data}: give one of them another, NAME=DATA, or both "
                "the same --split, --data_seed and --options"
            )


def _facts(settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Facts on which evaluations in one report must agree, if both have them: the value, and the remedy if not."""
    conditions = f"limits {settings.get('limits')}, dtype {settings.get('dtype')}"
    judge = f"{settings.get('judge')} {settings.get('judge_source', '')}".strip()
    facts = {}
    for name, digest in settings.get("models", {}).items():
        facts[f"checkpoints under one name, {name}"] = (digest, RENAME)
        for data in settings.get("questions", {}):
            facts[f"conditions for {name} on {data}"] = (conditions, RENAME)
    for data in settings.get("questions", {}):
        facts[f"judges of {data}"] = (judge, "evaluate one of them again")
    return facts


def asked_of(examples: Sequence[Example]) -> list[Any]:
    """A data set's entry in evaluation.json: the number of questions, and digests of all of them and of the first."""
    return [len(examples), question_digest(examples), question_digest(examples[:1])]


def question_digest(examples: Sequence[Example]) -> str:
    """Digest of whole rows, because a verdict depends on the answer's type, and `gold_length` on the steps."""
    return files.digest(json.dumps(example.as_row()) for example in examples)
