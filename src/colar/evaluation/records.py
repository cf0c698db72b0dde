"""Records: one question answered once by one system, a line of records.jsonl; read, checked, sorted into cells.

A cell is what a row of the report is folded from: the records that share the keys of `CELL`. A record has the key
`cluster` only where its question repeats an earlier one of the data set (`Example.cluster`).
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from colar import files
from colar.show.naming import AVERAGE, order

Record = Mapping[str, Any]
Key = tuple[Any, ...]  # the values of CELL

CELL = ("model", "method", "label", "dataset", "compression_factor", "decoding", "train_seed")
KEYS = (
    *CELL,
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


def load_records(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The records in JSONL files, gzipped where the name ends in .gz.

    Raises ValueError that names file and line for what is not JSON, not a record, or a second record of the
    same system, dataset, seed and question.
    """
    records: list[dict[str, Any]] = []
    seen: dict[Key, str] = {}
    for path in paths:
        for number, record in _lines(Path(path)):
            where = f"{path}:{number}"
            key = _checked(record, where)
            if key in seen:
                raise ValueError(f"{where}: a second record of {_describe(record)}; the first is {seen[key]}")
            seen[key] = where
            records.append(record)
    return records


def by_cell(records: Iterable[Record]) -> dict[Key, list[Record]]:
    """The records of each row, in the order of the report: by system first, then by dataset."""
    cells: defaultdict[Key, list[Record]] = defaultdict(list)
    seen = set()
    for number, record in enumerate(records, start=1):
        key = _checked(record, f"record {number}")
        if key in seen:
            raise ValueError(f"record {number}: a second record of {_describe(record)}")
        seen.add(key)
        cells[key[: len(CELL)]].append(record)
    if not cells:
        raise ValueError("a report needs at least one record")
    return {key: cells[key] for key in sorted(cells, key=order)}


def cluster_of(record: Record) -> Any:
    """The cluster of a record's question: its own id, or where it repeats a question of its data set, that one's."""
    return record.get("cluster", record["id"])


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix != ".gz":
        yield from files.read_jsonl(path)
        return
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                if line.strip():
                    yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not valid JSON: {error.msg}") from error


def _checked(record: Any, where: str) -> Key:
    """The key that makes the record one of a kind. Raises ValueError that says `where` something is wrong."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: a record must be an object, got {type(record).__name__}")
    if missing := [key for key in KEYS if key not in record]:
        raise ValueError(f"{where}: the record lacks {', '.join(missing)}")
    for key in ("correct", "truncated"):
        if not isinstance(record[key], bool):
            raise ValueError(f"{where}: {key} must be true or false, got {record[key]!r}")
    for key in ("length", "forward_passes", "seconds"):
        value = record[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise ValueError(f"{where}: {key} must be a number from 0, got {value!r}")
    if record["correct"] and record["parsed"] is None:
        raise ValueError(f"{where}: correct is true but parsed is null: an answer nobody could read is wrong")
    if record["dataset"] == AVERAGE:
        raise ValueError(
            f"{where}: {AVERAGE!r} is no dataset's name: the report's mean over datasets bears it"
        )
    return (*(record[key] for key in CELL), record["seed"], record["id"])


def _describe(record: Record) -> str:
    return ", ".join(f"{key} {record[key]}" for key in (*CELL, "seed", "id") if record[key] not in (None, ""))
