"""Records: one question answered once by one system, a line of records.jsonl; read, checked, sorted into cells.

{"model": "tiny", "method": "colar", "label": "", "dataset": "arithmetic", "compression_factor": 2,
 "decoding": "greedy", "train_seed": 0,                          the cell: the row of the report that it falls into
 "seed": 0, "id": "arithmetic/test/0",                           which sample of the cell it is
 "completion": "17", "parsed": "17", "correct": true, "truncated": false, "length": 9, "forward_passes": 13,
 "seconds": 0.021, "gold_length": 18}                            what was answered, and at which cost
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from colar import checks, files
from colar.show.naming import AVERAGE, Cell, cell_order
from colar.show.report_rows import CELL_KEYS, cell_from_json

Record = Mapping[str, Any]
"""The keys below, and two that not all records have: `gold_length` (L_r, where the source has a reference chain), and
`cluster`, where the question repeats an earlier one of the data set (`Example.cluster`)."""

Cells = Mapping[Cell, Sequence[Record]]
"""The records of each cell."""

RECORD_KEYS = (
    *CELL_KEYS,
    "seed",
    "id",
    "completion",
    "parsed",
    "correct",
    "truncated",
    "length",
    "forward_passes",
    "seconds",
)


class RecordKey(NamedTuple):
    """The identity of a record: no two records of a report share it."""

    cell: Cell
    seed: int
    """Decoding seed."""
    id: str
    """Question id."""


def record_key(record: Record) -> RecordKey:
    return RecordKey(cell_from_json(record), record["seed"], record["id"])


def load_records(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Read the records in JSONL files, gzipped where the name ends in .gz.

    Raises ValueError that names file and line for text that is not JSON, for a value that is not a record, and for
    a second record of the same system, dataset, seed and question.
    """
    records: list[dict[str, Any]] = []
    places: defaultdict[Cell, dict[tuple[int, str], str]] = defaultdict(dict)
    for path in paths:
        for number, record in _lines(Path(path)):
            where = f"{path}:{number}"
            check_record(record, where)
            # Files may overlap. Records counted twice would give intervals that are too narrow.
            known = places[cell_from_json(record)]
            sample = (record["seed"], record["id"])
            if sample in known:
                raise ValueError(
                    f"{where}: a second record of {_describe(record)}; the first is {known[sample]}"
                )
            known[sample] = where
            records.append(record)
    return records


def find_records(texts: Iterable[str | Path]) -> list[Path]:
    """The records files that a user named, each by itself or by its folder. ValueError where there is none."""
    found = []
    for text in texts:
        path = Path(text)
        if path.is_dir():
            path = _records_in(path)
        elif not path.exists():
            raise ValueError(f"no records at {path}: there is no such file or folder")
        found.append(path)
    return found


def by_cell(records: Iterable[Record]) -> dict[Cell, list[Record]]:
    """The records of each cell, in the order of the report: by system first, then by dataset.

    Raises ValueError that numbers the record where one is wrong or comes twice, and where there is none.
    """
    cells: defaultdict[Cell, dict[tuple[int, str], Record]] = defaultdict(dict)
    # Checked again: records need not come from `load_records`.
    for number, record in enumerate(records, start=1):
        check_record(record, f"record {number}")
        members = cells[cell_from_json(record)]
        sample = (record["seed"], record["id"])
        if sample in members:
            raise ValueError(f"record {number}: a second record of {_describe(record)}")
        members[sample] = record
    if not cells:
        raise ValueError("a report needs at least one record")
    return {cell: list(cells[cell].values()) for cell in sorted(cells, key=cell_order)}


def cluster_of(record: Record) -> Any:
    """The cluster of a record's question: its own id, or where it repeats a question of its data set, that one's."""
    return record.get("cluster", record["id"])


def check_record(record: Any, where: str) -> None:
    """Raise ValueError that says `where`, if a record lacks a key, has a wrong value or contradicts itself."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: a record must be an object, got {type(record).__name__}")
    missing = [key for key in RECORD_KEYS if key not in record]
    if missing:
        raise ValueError(f"{where}: the record lacks {', '.join(missing)}")
    # A mean of wrong types raises no error: the text "false" counts as true, and one NaN makes the mean NaN.
    for key in ("correct", "truncated"):
        if not isinstance(record[key], bool):
            raise ValueError(f"{where}: {key} must be true or false, got {record[key]!r}")
    for key in ("length", "forward_passes", "seconds"):
        if not checks.is_number(record[key]) or record[key] < 0:
            raise ValueError(f"{where}: {key} must be a number from 0, got {record[key]!r}")
    if record["correct"] and record["parsed"] is None:
        raise ValueError(
            f"{where}: correct is true but parsed is null: an answer that cannot be parsed is wrong"
        )
    if record["dataset"] == AVERAGE:
        raise ValueError(
            f"{where}: {AVERAGE!r} is no dataset's name: the report's mean over datasets is called that"
        )


def _records_in(folder: Path) -> Path:
    # Where a folder has both, an evaluation may still be appending to the plain one: it is never older.
    for name in ("records.jsonl", "records.jsonl.gz"):
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"{folder} holds no records.jsonl")


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of each line that is not empty."""
    if path.suffix != ".gz":
        yield from files.read_jsonl(path)
        return
    # files.read_jsonl reads plain text alone.
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                if line.strip():
                    yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not valid JSON: {error.msg}") from error


def _describe(record: Record) -> str:
    """The fields of a record's key that say something: `model m, method cot, dataset sums, ...`."""
    parts = []
    for key in (*CELL_KEYS, "seed", "id"):
        if record[key] not in (None, ""):
            parts.append(f"{key} {record[key]}")
    return ", ".join(parts)
