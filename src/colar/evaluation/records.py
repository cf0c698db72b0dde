"""Reading, checking and grouping of records, and their provenance: settings, versions, machine.

    records.jsonl       one question answered once by one system per line, in the order in which they were answered
    evaluation.json     settings, and digests of questions and checkpoints

An output folder belongs to one evaluation. The same command resumes it, with any number of processes, and may add
questions, data sets and checkpoints; anything else would mix records that cannot be compared, and is rejected.

    records.jsonl -> RecordFiles -> by_cell -> Cells: an array for each cell, an entry for each record

{"model": "tiny", "method": "colar", "label": "", "dataset": "arithmetic", "params": {"compression_factor": 2},
 "decoding": "greedy", "train_seed": 0,                          the cell: the row of the report that it falls into
 "seed": 0, "id": "arithmetic/test/0",                           which sample of the cell it is
 "completion": "17", "parsed": "17", "correct": true, "truncated": false, "length": 9, "forward_passes": 13,
 "seconds": 0.021, "gold_length": 18}                            what was answered, and at which cost
"""

import functools
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from colar import __version__, checks, files, processes
from colar.data.example import Example
from colar.evaluation.report_rows import AVERAGE, Cell, cell_from_json

Record = Mapping[str, Any]
"""The keys of `_REQUIRED`, and two optional ones: `gold_length` (L_r, if the source has a reference chain), and
`cluster`, if the question repeats an earlier one of the data set (`Example.cluster`)."""

FIELDS = np.dtype(
    [
        # Training runs, questions and answers are numbered: equal numbers stand for equal values.
        ("run", np.int64),
        ("seed", np.int64),
        ("question", np.int64),
        ("cluster", np.int64),  # number of the question, or of the one that it repeats
        ("parsed", np.int64),  # -1 where the answer could not be parsed
        ("correct", np.bool_),
        ("truncated", np.bool_),
        ("length", np.float64),
        ("forward_passes", np.float64),
        ("seconds", np.float64),
        ("gold_length", np.float64),  # NaN where the question has no reference chain
    ]
)
"""Fields of a record that a report needs, without its cell, and with numbers for texts, which are only compared."""

Columns = npt.NDArray[np.void]
"""Records as an array of `FIELDS`: each field is a column, `columns["correct"]`."""

Cells = Mapping[Cell, Columns]
"""The records of each cell."""

AUTO_RECORDS = "records-*.jsonl"
"""The files of `colar train auto`, which writes several."""
_REQUIRED = (
    "model", "method", "label", "dataset", "params", "decoding", "train_seed", "seed", "id", "completion", "parsed",
    "correct", "truncated", "length", "forward_passes", "seconds",
)  # fmt: skip


class RecordKey(NamedTuple):
    """The identity of a record: no two records of a report share it."""

    cell: Cell
    seed: int
    """Decoding seed."""
    id: str
    """Question id."""


def keys_in(records: Path) -> set[RecordKey]:
    """The keys of the records that a file holds so far; a torn last line is cut off. All processes call it together."""

    def read() -> set[RecordKey]:
        rows = files.resume_jsonl(records)
        return {RecordKey(cell_from_json(row), row["seed"], row["id"]) for row in rows}

    return processes.from_main(read)


class RecordFiles:
    """Unchecked records of JSONL files (see `checked`), read anew and one at a time in each iteration."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.paths = [Path(path) for path in paths]

    def __iter__(self) -> Iterator[Any]:
        for path in self.paths:
            for _, record in files.read_jsonl(path):
                yield record

    def place(self, number: int) -> str:
        """File and line of record `number`, from 1. Reads the files again, so it is meant for errors."""
        places = (f"{path}:{line}" for path in self.paths for line, _ in files.read_jsonl(path))
        return next(itertools.islice(places, number - 1, None))


def find_records(texts: Iterable[str | Path]) -> list[Path]:
    """The records files that a user named, each by itself or by its folder. ValueError if there is none."""
    paths = []
    for path in map(Path, texts):
        if not path.exists():
            raise ValueError(f"no records at {path}: there is no such file or folder")
        paths += _records_in(path) if path.is_dir() else [path]
    return paths


def by_cell(records: Iterable[Record]) -> dict[Cell, Columns]:
    """The records of each cell, in the order of the report (`System.order`).

    Raises ValueError if there is no record, and for records that `checked` rejects.
    """
    questions = _numbering()
    answers = _numbering()
    runs = _numbering()
    members = defaultdict(list)
    for cell, record in checked(records):
        parsed = record["parsed"]
        fields = (
            runs[record["train_seed"]],
            record["seed"],
            questions[record["id"]],
            questions[cluster_of(record)],
            -1 if parsed is None else answers[parsed],
            record["correct"],
            record["truncated"],
            record["length"],
            record["forward_passes"],
            record["seconds"],
            record.get("gold_length", math.nan),
        )
        members[cell].append(fields)
    if not members:
        raise ValueError("a report needs at least one record")
    return {
        cell: np.array(members[cell], dtype=FIELDS)
        for cell in sorted(members, key=lambda cell: cell.system.order(cell.dataset))
    }


def cluster_of(record: Record) -> Any:
    """The cluster of a record's question: its own id, or that of the earlier question that it repeats."""
    return record.get("cluster", record["id"])


def checked(records: Iterable[Any]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield (cell, record) for each record.

    Raises ValueError for a value that is not a record, and for a second record of the same system, dataset, seed and
    question. The message names file and line if `records` are `RecordFiles`, otherwise the record's number.
    """
    # The place of a record is computed only for an error, because that reads the files again.
    place = records.place if isinstance(records, RecordFiles) else "record {}".format
    numbers: defaultdict[Cell, dict[tuple[int, str], int]] = defaultdict(dict)
    for number, record in enumerate(records, start=1):
        if missing := [key for key in _REQUIRED if not isinstance(record, dict) or key not in record]:
            raise ValueError(f"{place(number)}: the record lacks {', '.join(missing)}")
        # The text "false" would count as true, and null as NaN.
        for key in ("correct", "truncated"):
            if not isinstance(record[key], bool):
                raise ValueError(f"{place(number)}: {key} must be true or false, got {record[key]!r}")
        if not checks.is_int(record["seed"]):
            raise ValueError(f"{place(number)}: seed must be a whole number, got {record['seed']!r}")
        if not isinstance(record["params"], Mapping):
            raise ValueError(f"{place(number)}: params must be an object, got {record['params']!r}")
        for key in ("length", "forward_passes", "seconds"):
            if not checks.is_number(record[key]):
                raise ValueError(f"{place(number)}: {key} must be a number, got {record[key]!r}")
        if record["dataset"] == AVERAGE:
            raise ValueError(
                f"{place(number)}: {AVERAGE!r} is no dataset's name: the mean over datasets has it"
            )
        # Files may overlap. Records counted twice would give intervals that are too narrow.
        cell = cell_from_json(record)
        sample = (record["seed"], record["id"])
        first = numbers[cell].setdefault(sample, number)
        if first != number:
            raise ValueError(
                f"{place(number)}: a second record of {cell.system.model}, {cell.dataset}, seed {record['seed']}, "
                f"question {record['id']}; the first is {place(first)}"
            )
        yield cell, record


def _numbering() -> defaultdict[Any, int]:
    """A dict that gives each new key the next whole number, from 0."""
    return defaultdict(itertools.count().__next__)


def _records_in(folder: Path) -> list[Path]:
    # The plain file takes precedence: an evaluation may still be appending to it, so it is never older than the .gz.
    for pattern in ("records.jsonl", "records.jsonl.gz", AUTO_RECORDS):
        if found := sorted(folder.glob(pattern)):
            return found
    raise ValueError(f"{folder} holds no records.jsonl")


# Origin of records: the settings of their evaluation, beside them in its output folder

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


# Origin of a result: the process that makes it

LIBRARIES = ("torch", "transformers", "peft", "accelerate")
BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions for bfloat16, by their names in /proc/cpuinfo: they make a difference of a factor of ten in speed."""


def collect_provenance() -> dict[str, Any]:
    """Provenance of the results of this process, as JSON values; the time is UTC."""
    versions = {"colar": __version__}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "command": _command(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": versions,
        "machine": _machine(),
    }


def _machine() -> dict[str, Any]:
    # On Linux only this file has the processor's model and instructions; elsewhere `platform` has the model.
    known: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            known.setdefault(key.strip(), value.strip())
    # "Features" on ARM.
    flags = f"{known.get('flags', '')} {known.get('Features', '')}".split()
    return {
        "system": platform.system(),
        "processor": known.get("model name") or platform.processor() or platform.machine(),
        "instructions": [torch.backends.cpu.get_cpu_capability(), *(x for x in BFLOAT16 if x in flags)],
        "cores": os.cpu_count(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def _command() -> str:
    """The command line of `colar`, or of a script below the working directory.

    For any other program only its name, because its arguments are paths of the machine (a notebook's kernel).
    """
    program = Path(sys.argv[0])
    script = program.resolve()
    # Under torchrun and `python -m colar.cli`, the program's name is the path of that module.
    if program.stem == "colar" or script == Path(__file__).parents[1] / "cli" / "__main__.py":
        return shlex.join(["colar", *sys.argv[1:]])
    if program.suffix == ".py" and script.is_relative_to(Path.cwd()):
        return shlex.join(["python", str(script.relative_to(Path.cwd())), *sys.argv[1:]])
    return program.name


@functools.cache  # the running code was imported once: later edits and commits do not count
def _commit() -> str | None:
    """Commit of the checkout this package lies in, with `+` when the tree is dirty; None outside a checkout."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    # Installed into an environment inside another repository, the package lies in a checkout that is not its own.
    tracked = [*git, "ls-files", "--error-unmatch", here.name]
    describe = [*git, "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
