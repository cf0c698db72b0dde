"""The report: a pure fold over records. The same records, in any order, give the same report.

    RecordFiles -> fold -> Report -> write

A row is one system (model, method, label, compression factor, decoding, training seed) on one dataset, or its
macro-average: the plain mean over the datasets that THIS system was asked (`datasets` names them). Adding a system to
the report leaves the rows of the others alone. The average's se is the root of the summed variances / number of
datasets. Three intervals, never mixed (`evaluation/stats.py`):
  accuracy_se, accuracy_interval   over questions: clustered by question; the interval is Wilson's for a dataset,
                                   mean ± 1.96 se for an average
  seeds_interval                   over decoding seeds, half width of the t interval; null for one seed
  train_seeds[].interval           over training runs, half width of the t interval
pass_at_k and maj_at_k take k = the number of decoding seeds. Numbers that need every question under every seed are
null where `samples` < n * seeds.

`comparisons` holds paired differences on the questions that both systems answered (`evaluation/compare.py`): each
system against the baseline (CoT unless another is given), each control or ablation against the system that it was made
from, and with `nearest`, a method, each system against that method's at the nearest #L.

Where a system was trained more than once, `pooled` has a row for all of its runs together (train_seed null,
`train_seeds` their list). There a question's answers of all runs are one cluster, and accuracy_se stays over questions;
runs_interval is the t interval over the runs' accuracies. `pooled_comparisons` are the paired differences of these
systems. Tables and pictures then show them. Both lists are empty where every system was trained once.

`pairs` are the differences that were asked for by name, of all runs together and of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import files, progress
from colar.evaluation.compare import compare, compare_pairs
from colar.evaluation.records import Record, RecordFiles, by_cell, load_records
from colar.evaluation.rows import Report, ReportRow, is_control
from colar.evaluation.summary import averages, over_runs, pool, pooled_rows, summarise
from colar.evaluation.tables import render_console, render_markdown

__all__ = ["RecordFiles", "fold", "load_records", "render_console", "render_markdown", "write"]

PICTURE = "accuracy_vs_length"
TITLE = "Evaluation"


def fold(
    records: Iterable[Record],
    provenance: Mapping[str, Any],
    baseline: str = "cot",
    nearest: str | None = None,
    pairs: Sequence[tuple[str, str]] = (),
) -> Report:
    """Make the report of records. `baseline` and `nearest` are the methods that the others are compared with; `pairs`
    are (system, baseline) by their names in the tables.

    Raises ValueError for a record that lacks a key, contradicts itself or comes twice, where there is none, for a
    `nearest` that no record is of, and for a pair of systems that are not there.
    """
    cells = by_cell(records)
    methods = sorted({cell.system.method for cell in cells})
    if nearest is not None and nearest not in methods:
        raise ValueError(f"nearest: no records of method {nearest!r}; there are {', '.join(methods)}")
    # All averages stand after all single datasets; readers of report.json may rely on the order.
    rows = [summarise(cell, members) for cell, members in cells.items()]
    rows += averages(rows, cells)
    # Empty where every system was trained once; then the pooled sections are empty too.
    all_runs = pool(cells)
    pooled = pooled_rows(all_runs, rows)
    return Report(
        provenance=dict(provenance),
        baseline=baseline,
        nearest=nearest,
        rows=rows,
        comparisons=compare(cells, baseline, nearest),
        train_seeds=over_runs(rows),
        pooled=pooled,
        pooled_comparisons=compare(all_runs, baseline, nearest),
        pairs=compare_pairs(cells, all_runs, pooled or rows, pairs),
    )


def write(
    folder: str | Path,
    records: Iterable[Record],
    title: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    baseline: str = "cot",
    nearest: str | None = None,
    draw_labelled: bool | Sequence[str] = False,
    pairs: Sequence[tuple[str, str]] = (),
) -> Report:
    """Write report.json, report.md and one picture per decoding into `folder`, each atomically; return the report.

    A picture that cannot be drawn is a warning: report.md then stands without it.
    The first decoding's picture is accuracy_vs_length.png, another's accuracy_vs_length-<decoding>.png. Pictures show
    the systems without a label. Where a method has none, and none is named, they show its labelled ones, controls
    excepted.
    `draw_labelled` adds the systems with these labels, or with True all systems.
    """
    folder = Path(folder)
    if provenance is None:
        provenance = files.provenance()
    report = fold(records, provenance, baseline, nearest, pairs)
    # First the numbers: they are kept whatever happens to the pictures.
    files.write_json(folder / "report.json", report.to_json())
    pictures: dict[str, list[ReportRow]] = {}
    # Greedy and sampled answers of one system would lie over each other in one picture.
    for decoding in sorted({row.system.decoding for row in report.shown_rows}):
        rows = [row for row in report.shown_rows if row.system.decoding == decoding]
        name = f"{PICTURE}-{decoding}.png" if pictures else f"{PICTURE}.png"
        # Where every system is a control there is nothing else to show.
        pictures[name] = _drawn(rows, draw_labelled) or rows
    _write_markdown(folder, report, title, list(pictures))
    drawn = [name for name, rows in pictures.items() if _draw(rows, folder / name)]
    if drawn != list(pictures):
        _write_markdown(folder, report, title, drawn)
    return report


def _write_markdown(folder: Path, report: Report, title: str | None, pictures: Sequence[str]) -> None:
    files.write_text(
        folder / "report.md", render_markdown(report, TITLE if title is None else title, pictures)
    )


def _draw(rows: Sequence[ReportRow], path: Path) -> bool:
    """Draw a picture; False, after a warning, where that fails."""
    with progress.harmless(f"the picture {path.name}"):
        # Imported here: matplotlib may be what fails.
        from colar.evaluation import picture

        picture.accuracy_vs_length(rows, path)
        return True
    # A picture of an earlier report would be taken for one of this report.
    with contextlib.suppress(OSError):
        path.unlink()
    return False


def settings_of(records: Iterable[Path]) -> dict[str, Any]:
    """The settings that records files were made with, from the `evaluation.json` beside each that has one.

    They are part of a report's provenance. The digests of the questions are left out: they are long, and only a
    resumed evaluation needs them.
    """
    found = []
    for path in records:
        beside = path.parent / "evaluation.json"
        if beside.exists():
            found.append(files.read_json(beside))
    # Older evaluations have fewer settings: each key collects the values that there are.
    by_key: dict[str, list[Any]] = {}
    for settings in found:
        for key, value in settings.items():
            if key != "questions":
                by_key.setdefault(key, []).append(value)
    return {key: _together(values) for key, values in by_key.items()}


def _together(values: Sequence[Any]) -> Any:
    """One setting of several evaluations.

    Mappings that do not contradict each other become one: the models of all. Otherwise the value that all share, or
    a list with each different value once.
    """
    if all(isinstance(value, Mapping) for value in values):
        merged = _merged(values)
        if merged is not None:
            return merged
    # Values may be lists or mappings, which a set cannot hold.
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different


def _merged(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """All keys of all mappings; None where two of them have other values for a key."""
    merged: dict[str, Any] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            if merged.setdefault(key, value) != value:
                return None
    return merged


def _drawn(rows: Sequence[ReportRow], draw_labelled: bool | Sequence[str]) -> list[ReportRow]:
    """The rows that a picture shows."""
    if draw_labelled is True:
        return list(rows)
    labels = draw_labelled or ()
    # Methods of which a picture shows something without asking: their plain rows, or those that were named.
    shown = {
        (row.system.model, row.system.method)
        for row in rows
        if not row.system.label or row.system.label in labels
    }
    drawn = []
    for row in rows:
        system = row.system
        # Snapping, say, labels all rows of a method: those are its own answers, and there are no others to draw.
        stands_for_its_method = (system.model, system.method) not in shown and not is_control(system.label)
        if not system.label or system.label in labels or stands_for_its_method:
            drawn.append(row)
    return drawn
