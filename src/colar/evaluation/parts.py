"""The records of an evaluation that several processes make: each appends to a file of its own, one file is the result.

    records.jsonl           process 0, and what earlier calls have found
    records.part1.jsonl     process 1        at the end all stand in records.jsonl, in the order of the questions,
    records.part2.jsonl     process 2        and the parts are gone

After a kill the parts stay. The next call takes what is in them, with any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from colar import files, processes
from colar.evaluation.records import RecordKey, record_key


def own(records: Path) -> Path:
    """The file that this process appends to."""
    state = PartialState()
    return records if state.is_main_process else _part(records, str(state.process_index))


def collect(records: Path) -> list[dict[str, Any]]:
    """All records of `records` and its parts, each once, those of `records` first. All call it together."""
    records.parent.mkdir(parents=True, exist_ok=True)
    processes.require_shared(records.parent)
    # One process reads, so that none cuts a torn line that another one cuts at the same time.
    found: list[dict[str, Any]] = processes.from_main(lambda: _read(records))
    return found


def _read(records: Path) -> list[dict[str, Any]]:
    known: dict[RecordKey, dict[str, Any]] = {}
    for path in [records, *unfinished(records)]:
        for record in files.resume_jsonl(path):
            known.setdefault(record_key(record), record)
    return list(known.values())


def settle(records: Path, order: Sequence[RecordKey]) -> None:
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
        for part in unfinished(records):
            part.unlink()
    state.wait_for_everyone()


def unfinished(records: Path) -> list[Path]:
    """The parts that lie beside `records`."""
    return sorted(records.parent.glob(_part(records, "*").name))


def _part(records: Path, name: str) -> Path:
    return records.with_name(f"{records.stem}.part{name}{records.suffix}")
