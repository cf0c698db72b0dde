"""Settings of evaluations, in the evaluation.json beside their records: an output folder belongs to one evaluation.

The same command resumes an evaluation, with any number of processes, and may add questions, data sets and checkpoints;
anything else would mix records that cannot be compared, and is rejected. So are records of several evaluations that
cannot stand in one report.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import checks, files
from colar.data.example import Example
from colar.evaluation.records import AUTO_RECORDS

REMEDY = "give this evaluation its own --output"
RENAME = "rename one: NAME=CHECKPOINT"
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
        # The order of the sources' options does not matter.
        before, after = ({**each, "options": sorted(each.get("options", []))} for each in (earlier, settings))
        checks.check_same_run(output, before, after, REMEDY)
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
    values: dict[tuple[str, ...], tuple[str, Path]] = {}
    models: dict[str, str] = {}
    by_key: dict[str, list[Any]] = {}
    asked: dict[tuple[str, int], tuple[str, Path]] = {}
    drawn: dict[str, tuple[int, list[Any], str, Path]] = {}
    numbers: Counter[str] = Counter()
    for path in records:
        beside = path.parent / "evaluation.json"
        settings = files.read_json(beside) if beside.exists() else {}
        # An evaluation without a judge of the user's own has no such key.
        if settings:
            settings.setdefault("judge", BY_KIND)
        conditions = f"limits {settings.get('limits')}, dtype {settings.get('dtype')}"
        judge = f"{settings.get('judge')} {settings.get('judge_source', '')}".strip()
        of_models, of_questions = settings.pop("models", {}), settings.pop("questions", {})
        for name, digest in of_models.items():
            _require_same(
                values, ("model", name), digest, path, f"checkpoints under one name, {name}", RENAME
            )
        for name, data in itertools.product(of_models, of_questions):
            _require_same(values, (name, data), conditions, path, f"conditions for {name} on {data}", RENAME)
        models |= of_models
        origin = [settings.get("split"), settings.get("data_seed")]
        for name, (n, digest, first) in of_questions.items():
            _require_same(
                values, ("judge", name), judge, path, f"judges of {name}", "evaluate one of them again"
            )
            # Equally many questions are compared by digest, otherwise by the first one, and by their split and seed.
            known, where = asked.setdefault((name, n), (digest, path))
            other_n, other_origin, other_first, other = drawn.setdefault(name, (n, origin, first, path))
            if known != digest or (other_n != n and (other_origin, other_first) != (origin, first)):
                raise ValueError(
                    f"{other if known == digest else where} and {path} have other questions under one name, {name}: "
                    "give one of them another, NAME=DATA, or both the same --split, --data_seed and --options"
                )
            numbers[name] = max(numbers[name], n)
        for key, value in settings.items():
            # Values may be lists or mappings, which a set cannot hold.
            if value not in by_key.setdefault(key, []):
                by_key[key].append(value)
    if by_key.get("judge") == [BY_KIND]:
        del by_key["judge"]
    shared = {key: values[0] if len(values) == 1 else values for key, values in by_key.items()}
    of_all = {"questions": dict(numbers), "models": models}
    return shared | {key: value for key, value in of_all.items() if value}


def _require_same(
    values: dict[tuple[str, ...], tuple[str, Path]],
    key: tuple[str, ...],
    value: str,
    path: Path,
    what: str,
    remedy: str,
) -> None:
    """Store the value of a key, or raise ValueError if an earlier file had another one."""
    known, where = values.setdefault(key, (value, path))
    if known != value:
        raise ValueError(f"{where} and {path} have other {what} ({known} and {value}); {remedy}")


def asked_of(examples: Sequence[Example]) -> list[Any]:
    """A data set's entry in evaluation.json: the number of questions, and digests of all of them and of the first."""
    return [len(examples), question_digest(examples), question_digest(examples[:1])]


def question_digest(examples: Sequence[Example]) -> str:
    """Digest of whole rows, because a verdict depends on the answer's type, and `gold_length` on the steps."""
    return files.digest(json.dumps(example.as_row()) for example in examples)
