"""A report.json read back, as scripts of the laboratory and tests need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from colar import files
from colar.evaluation.report_rows import DIFFERENCES, ROWS, Difference, Report, ReportRow, cell_from_json


def read(path: Path) -> Report:
    return of_json(files.read_json(path))


def of_json(plain: Mapping[str, Any]) -> Report:
    sections: dict[str, Any] = {}
    for name in ROWS:
        sections[name] = [ReportRow(**_values(ReportRow, row)) for row in plain[name]]
    for name in DIFFERENCES:
        # What the baseline does not name it shares with the row.
        sections[name] = [
            Difference(**_values(Difference, row), baseline=cell_from_json({**row, **row["baseline"]}).system)
            for row in plain[name]
        ]
    return Report(plain["provenance"], **sections)


def _values(cls: type[ReportRow] | type[Difference], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row, but for its baseline."""
    names = {each.name for each in fields(cls)} - {"baseline"}
    return {name: plain[name] for name in names & plain.keys()} | {"system": cell_from_json(plain).system}
