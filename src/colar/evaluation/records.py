"""Reading, checking and grouping of records.

A line of records.jsonl is one question answered once by one system; lines stand in the order in which they were
answered.

    records.jsonl -> RecordFiles -> by_cell -> Cells: an array for each cell, an entry for each record

{"model": "tiny", "method": "colar", "label": "", "dataset": "arithmetic", "params": {"compression_factor": 2},
 "decoding": "greedy", "train_seed": 0,                          the cell: the row of the report that it falls into
 "seed": 0, "id": "arithmetic/test/0",                           which sample of the cell it is
 "completion": "17", "parsed": "17", "correct": true, "truncated": false, "length": 9, "forward_passes": 13,
 "seconds": 0.021, "gold_length": 18}                            what was answered, and at which cost
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colar import checks, files, processes
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
    """Unchecked records of JSONL files (see `checked`), read anew and one at a time in each iteration.

    A torn last line, of an evaluation that runs or was killed, is no record yet.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.paths = [Path(path) for path in paths]

    def __iter__(self) -> Iterator[Any]:
        for path in self.paths:
            for _, record in files.read_jsonl(path, torn_end=True):
                yield record

    def place(self, number: int) -> str:
        """File and line of record `number`, from 1. Reads the files again, so it is meant for errors."""
        places = (
            f"{path}:{line}" for path in self.paths for line, _ in files.read_jsonl(path, torn_end=True)
        )
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
