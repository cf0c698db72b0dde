"""The report: a pure fold over records. The same records, in any order, give the same report.

    load_records -> fold -> {"provenance", "baseline", "rows", "comparisons", "train_seeds"} -> write

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
seed, and every control or ablation against the unlabelled system that it was made from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from colar import files
from colar.analysis import plots
from colar.analysis.naming import AVERAGE, system_of
from colar.evaluation.compare import compare
from colar.evaluation.records import CELL, Key, Record, by_cell, load_records
from colar.evaluation.tables import render_console, render_markdown
from colar.ops import stats

__all__ = ["fold", "load_records", "render_console", "render_markdown", "write"]

PICTURE = "accuracy_vs_length"
TITLE = "Evaluation"


def fold(records: Iterable[Record], provenance: Mapping[str, Any], baseline: str = "cot") -> dict[str, Any]:
    """What `report.json` holds. `baseline` is the method that the others are compared with.

    Raises ValueError for a record that lacks a key, contradicts itself or comes twice, and where there is none.
    """
    cells = by_cell(records)
    rows = [_row(key, members) for key, members in cells.items()]
    rows += _averages(rows, cells)
    return {
        "provenance": dict(provenance),
        "baseline": baseline,
        "rows": rows,
        "comparisons": compare(cells, baseline),
        "train_seeds": _train_seeds(rows),
    }


def write(
    folder: str | Path,
    records: Iterable[Record],
    title: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    baseline: str = "cot",
) -> dict[str, Any]:
    """Write report.json, report.md and one picture per decoding into `folder`, each atomically; return the report.

    The first decoding's picture is accuracy_vs_length.png, another's accuracy_vs_length-<decoding>.png.
    Pictures show the unlabelled systems, or all where every one is a control or an ablation.
    """
    folder = Path(folder)
    report = fold(records, files.provenance() if provenance is None else provenance, baseline)
    files.write_json(folder / "report.json", report)
    pictures = []
    for index, decoding in enumerate(sorted({row["decoding"] for row in report["rows"]})):
        rows = [row for row in report["rows"] if row["decoding"] == decoding]
        unlabelled = [row for row in rows if not row["label"]]
        name = f"{PICTURE}-{decoding}.png" if index else f"{PICTURE}.png"
        pictures.append(plots.accuracy_vs_length(unlabelled or rows, folder / name).name)
    files.write_text(
        folder / "report.md", render_markdown(report, TITLE if title is None else title, pictures)
    )
    return report


def _row(key: Key, members: Sequence[Record]) -> dict[str, Any]:
    ids = [record["id"] for record in members]
    accuracy = stats.mean([record["correct"] for record in members], ids)
    length = stats.mean([record["length"] for record in members], ids)
    by_seed = _accuracy_by_seed(members)
    return {
        **dict(zip(CELL, key, strict=True)),
        "seeds": sorted({record["seed"] for record in members}),
        "n": accuracy.n,
        "accuracy": accuracy.mean,
        "accuracy_se": accuracy.se,
        "unparsable": fmean(record["parsed"] is None for record in members),
        "length": length.mean,
        "forward_passes": fmean(record["forward_passes"] for record in members),
        "seconds_per_question": fmean(record["seconds"] for record in members),
        "accuracy_interval": list(stats.wilson(accuracy)),
        "length_se": length.se,
        "reference_length": _reference_length(members),
        "truncated": fmean(record["truncated"] for record in members),
        "samples": len(members),
        "seeds_interval": stats.t_interval(by_seed) if by_seed else None,
        **_at_k(members, len(by_seed)),
    }


def _reference_length(members: Sequence[Record]) -> float | None:
    """Mean of ceil(L_r / c): the length of the reference chains at this speed, over the questions that have one."""
    lengths = [
        math.ceil(record["gold_length"] / (record["compression_factor"] or 1))
        for record in members
        if record.get("gold_length") is not None
    ]
    return fmean(lengths) if lengths else None


def _accuracy_by_seed(members: Sequence[Record]) -> list[float]:
    """Accuracy of each decoding seed in the seeds' order; [] unless every question was asked with every seed."""
    seeds: defaultdict[Any, list[bool]] = defaultdict(list)
    for record in members:
        seeds[record["seed"]].append(record["correct"])
    if len(members) != len(seeds) * len({record["id"] for record in members}):
        return []
    return [fmean(seeds[seed]) for seed in sorted(seeds)]


def _at_k(members: Sequence[Record], k: int) -> dict[str, float | None]:
    """pass@k and maj@k over the `k` samples that each question has; null for fewer than two."""
    if k < 2:
        return {"pass_at_k": None, "maj_at_k": None}
    questions: defaultdict[str, list[Record]] = defaultdict(list)
    for record in members:
        questions[record["id"]].append(record)
    passed = [stats.pass_at_k(k, sum(r["correct"] for r in group), k) for group in questions.values()]
    majority = [
        stats.maj_at_k([r["parsed"] for r in group], [r["correct"] for r in group])
        for group in questions.values()
    ]
    return {"pass_at_k": fmean(passed), "maj_at_k": fmean(majority)}


def _averages(rows: Sequence[dict[str, Any]], cells: Mapping[Key, Sequence[Record]]) -> list[dict[str, Any]]:
    """The macro-average row of each system."""
    systems: defaultdict[Key, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        systems[system_of(row)].append(row)
    averages = []
    for members in systems.values():
        by_seed = [_accuracy_by_seed(cells[tuple(row[key] for key in CELL)]) for row in members]
        same_seeds = all(by_seed) and len({tuple(row["seeds"]) for row in members}) == 1
        means = [fmean(accuracies) for accuracies in zip(*by_seed, strict=True)] if same_seeds else []
        averages.append({**_average(members), "seeds_interval": stats.t_interval(means)})
    return averages


def _average(members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of one system's rows over its datasets; what one of them does not have is null."""
    accuracy = _averaged(members, "accuracy", "accuracy_se")
    interval = accuracy.interval
    means = ("unparsable", "forward_passes", "seconds_per_question", "truncated")
    same_k = len({len(row["seeds"]) for row in members}) == 1
    return {
        **members[0],
        "dataset": AVERAGE,
        "datasets": [row["dataset"] for row in members],
        "seeds": sorted({seed for row in members for seed in row["seeds"]}),
        "n": sum(row["n"] for row in members),
        "samples": sum(row["samples"] for row in members),
        "accuracy": accuracy.mean,
        "accuracy_se": accuracy.se,
        "accuracy_interval": None if interval is None else [max(0.0, interval[0]), min(1.0, interval[1])],
        "length": _averaged(members, "length", "length_se").mean,
        "length_se": _averaged(members, "length", "length_se").se,
        **{key: fmean(row[key] for row in members) for key in means},
        "reference_length": _mean_if_all(row["reference_length"] for row in members),
        **{
            key: _mean_if_all(row[key] if same_k else None for row in members)
            for key in ("pass_at_k", "maj_at_k")
        },
    }


def _averaged(members: Sequence[dict[str, Any]], mean: str, error: str) -> stats.Estimate:
    return stats.average([row[mean] for row in members], [row[error] for row in members])


def _train_seeds(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Mean and t interval over the training runs of one system on one dataset, where there are two or more."""
    names = [name for name in CELL if name != "train_seed"]
    groups: defaultdict[Key, list[Record]] = defaultdict(list)
    for row in rows:
        if row["train_seed"] is not None:
            groups[tuple(row[name] for name in names)].append(row)
    return [
        {
            **dict(zip(names, key, strict=True)),
            "train_seeds": [row["train_seed"] for row in runs],
            "accuracy": fmean(row["accuracy"] for row in runs),
            "interval": stats.t_interval([row["accuracy"] for row in runs]),
            "length": fmean(row["length"] for row in runs),
            "length_interval": stats.t_interval([row["length"] for row in runs]),
        }
        for key, runs in groups.items()
        if len(runs) > 1
    ]


def _mean_if_all(values: Iterable[float | None]) -> float | None:
    """The mean, or None where a value is missing: a mean over some datasets would pass for one over all."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return fmean(known) if len(known) == len(listed) else None
