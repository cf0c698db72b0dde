"""The report: a pure fold over records. The same records, in any order, give the same report.

    load_records -> fold -> {"provenance", "baseline", "nearest", "rows", "comparisons", "train_seeds", "pooled",
                             "pooled_comparisons", "pairs"} -> write

A row is one system (model, method, label, compression factor, decoding, training seed) on one dataset, or its
macro-average: the plain mean over the datasets that THIS system was asked (`datasets` names them; a system added
to the report leaves it alone), with se = root of the summed variances / number of datasets. Three intervals, never
mixed (`ops/stats.py`):
  accuracy_se, accuracy_interval   over questions: clustered by question; the interval is Wilson's for a dataset,
                                   mean ± 1.96 se for an average
  seeds_interval                   over decoding seeds, half width of the t interval; null for one seed
  train_seeds[].interval           over training runs, half width of the t interval
Shares (accuracy, unparsable, truncated) are 0..1. pass_at_k and maj_at_k take k = the number of decoding seeds.
What needs every question under every seed is null where `samples` < n * seeds. reference_length is the mean of
ceil(L_r / c) over the questions with a reference chain: what #L can be held against.

`comparisons` holds paired differences on the questions that both answered: every system against the baseline
(by default CoT; of several, the same model's, else the first by name) on the same dataset, decoding and training
seed, and every control or ablation against the unlabelled system that it was made from; with `nearest`, a method,
every system also against that method's at the nearest #L.

Where a system was trained more than once, `pooled` has a row for all of its runs together (train_seed null,
`train_seeds` their list): a question's answers of all runs are one cluster, and accuracy_se stays over questions;
runs_interval is the t interval over the runs' accuracies. `pooled_comparisons` are the paired differences of these.
Tables and pictures then show them. Both lists are empty where every system was trained once.

`pairs` are the differences that were asked for by name, of all runs together and of each (`evaluation/pairs.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import files
from colar.evaluation.compare import compare
from colar.evaluation.pairs import compare_pairs
from colar.evaluation.records import CELL, Record, by_cell, load_records
from colar.evaluation.summary import averages, pooled_cells, pooled_rows, row, train_seeds
from colar.evaluation.tables import render_console, render_markdown
from colar.show import plots
from colar.show.naming import is_control

__all__ = ["fold", "load_records", "render_console", "render_markdown", "write"]

PICTURE = "accuracy_vs_length"
TITLE = "Evaluation"


def fold(
    records: Iterable[Record],
    provenance: Mapping[str, Any],
    baseline: str = "cot",
    nearest: str | None = None,
    pairs: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """What `report.json` holds. `baseline` and `nearest` are the methods that the others are compared with; `pairs` are
    (system, baseline) by the names in the tables.

    Raises ValueError for a record that lacks a key, contradicts itself or comes twice, where there is none, for a
    `nearest` that no record is of, and for a pair of systems that are not there.
    """
    cells = by_cell(records)
    methods = sorted({key[CELL.index("method")] for key in cells})
    if nearest is not None and nearest not in methods:
        raise ValueError(f"nearest: no records of method {nearest!r}; there are {', '.join(methods)}")
    rows = [row(key, members) for key, members in cells.items()]
    rows += averages(rows, cells)
    runs = pooled_cells(cells)
    pooled = pooled_rows(runs, rows)
    return {
        "provenance": dict(provenance),
        "baseline": baseline,
        "nearest": nearest,
        "rows": rows,
        "comparisons": compare(cells, baseline, nearest),
        "train_seeds": train_seeds(rows),
        "pooled": pooled,
        "pooled_comparisons": compare(runs, baseline, nearest),
        "pairs": compare_pairs(cells, runs, pooled or rows, pairs),
    }


def write(
    folder: str | Path,
    records: Iterable[Record],
    title: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    baseline: str = "cot",
    nearest: str | None = None,
    draw_labelled: bool | Sequence[str] = False,
    pairs: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Write report.json, report.md and one picture per decoding into `folder`, each atomically; return the report.

    The first decoding's picture is accuracy_vs_length.png, another's accuracy_vs_length-<decoding>.png.
    Pictures show the unlabelled systems, and of a method without such those that are no controls; `draw_labelled`: all,
    or also those with these labels.
    """
    folder = Path(folder)
    report = fold(records, files.provenance() if provenance is None else provenance, baseline, nearest, pairs)
    files.write_json(folder / "report.json", report)
    pictures = []
    shown = report["pooled"] or report["rows"]
    for index, decoding in enumerate(sorted({each["decoding"] for each in shown})):
        rows = [each for each in shown if each["decoding"] == decoding]
        name = f"{PICTURE}-{decoding}.png" if index else f"{PICTURE}.png"
        pictures.append(plots.accuracy_vs_length(_drawn(rows, draw_labelled) or rows, folder / name).name)
    files.write_text(
        folder / "report.md", render_markdown(report, TITLE if title is None else title, pictures)
    )
    return report


def _drawn(rows: Sequence[Mapping[str, Any]], draw_labelled: bool | Sequence[str]) -> list[Mapping[str, Any]]:
    """The rows that a picture shows."""
    if draw_labelled is True:
        return list(rows)
    labels = draw_labelled or ()
    unlabelled = {(row["model"], row["method"]) for row in rows if not row["label"]}
    return [
        row
        for row in rows
        if not row["label"]
        or row["label"] in labels
        or ((row["model"], row["method"]) not in unlabelled and not is_control(row["label"]))
    ]
