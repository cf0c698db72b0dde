"""The records of an evaluation that several processes make: each appends to a file of its own, one file is the result.

    records.jsonl           process 0, and what earlier calls have found
    records.part1.jsonl     process 1        at the end all stand in records.jsonl, in the order of the questions,
    records.part2.jsonl     process 2        and the parts are gone

After a kill the parts stay. The next call takes what is in them, with any number of processes. Processes on another
disk keep their parts there; what they hold is sent, not read from a common folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colar import files, processes
from colar.evaluation.records import RecordKey, record_key


def own(records: Path) -> Path:
    """The file that this process appends to."""
    return records if processes.is_main() else _part(records, str(processes.rank()))


def found_here(records: Path) -> list[Path]:
    """The parts that lie beside `records` on this process's disk."""
    return sorted(records.parent.glob(_part(records, "*").name))


def collect(records: Path) -> list[dict[str, Any]]:
    """All records that any process has on its disk, each once, those of `records` first. All call it together."""
    # One process for each disk reads, so that none cuts a torn line that another one cuts at the same time.
    read: list[dict[str, Any]] = []
    if processes.owns(_folder(records)):
        # Only the main process's result counts: another disk may have an older one.
        if processes.is_main():
            read += files.resume_jsonl(records)
        for part in found_here(records):
            read += files.resume_jsonl(part)
    known: dict[RecordKey, dict[str, Any]] = {}
    for share in processes.everyones(read):
        for record in share:
            known.setdefault(record_key(record), record)
    return list(known.values())


def settle(records: Path, order: Sequence[RecordKey]) -> None:
    """Write all records into `records` and remove the parts. All call it together.

    First come those that `order` does not name, as they stood, then the others in that order.
    """
    found = collect(records)
    if processes.is_main():
        places = {key: place for place, key in enumerate(order)}
        # A stable sort: those without a place stay as they stood, before all others.
        settled = sorted(found, key=lambda record: places.get(record_key(record), -1))
        # A file that is as it should be is left alone.
        if files.resume_jsonl(records) != settled:
            files.write_jsonl(records, settled)
    # No part is removed before its records are in the file.
    processes.wait()
    if processes.owns(_folder(records)):
        for part in found_here(records):
            part.unlink()


def _part(records: Path, name: str) -> Path:
    return records.with_name(f"{records.stem}.part{name}{records.suffix}")


def _folder(records: Path) -> Path:
    records.parent.mkdir(parents=True, exist_ok=True)
    return records.parent
