"""Rows of a report: one cell's records as numbers, a system's average over datasets, all runs of a system together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from colar.evaluation.records import CELL, Key, Record, cluster_of
from colar.ops import stats
from colar.show.naming import AVERAGE, system_of

RUN = CELL.index("train_seed")


def row(key: Key, members: Sequence[Record]) -> dict[str, Any]:
    clusters = [cluster_of(record) for record in members]
    accuracy = stats.mean([record["correct"] for record in members], clusters)
    length = stats.mean([record["length"] for record in members], clusters)
    by_seed = _accuracy_by_seed(members)
    return {
        **dict(zip(CELL, key, strict=True)),
        "seeds": sorted({record["seed"] for record in members}),
        "n": len({record["id"] for record in members}),
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


def pooled_cells(cells: Mapping[Key, Sequence[Record]]) -> dict[Key, list[Record]]:
    """The records of all runs of a system in one cell (train_seed None); {} where every system was trained once."""
    runs: defaultdict[Key, list[Record]] = defaultdict(list)
    for key, members in cells.items():
        runs[(*key[:RUN], None, *key[RUN + 1 :])] += members
    return dict(runs) if len(runs) < len(cells) else {}


def pooled_rows(
    cells: Mapping[Key, Sequence[Record]], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each pooled cell and their averages. `rows` are those of the single runs."""
    single: defaultdict[Key, list[Mapping[str, Any]]] = defaultdict(list)
    for each in rows:
        single[_cell_of({**each, "train_seed": None})].append(each)
    made = [row(key, members) for key, members in cells.items()]
    made += averages(made, cells)
    return [each | _over_runs(single[_cell_of(each)]) for each in made]


def _over_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a pooled row says of its runs: their interval, and means of what one run's samples of a question give."""
    return {
        "train_seeds": [run["train_seed"] for run in runs],
        "runs_interval": stats.t_interval([run["accuracy"] for run in runs]),
        **{key: _mean_if_all(run[key] for run in runs) for key in ("pass_at_k", "maj_at_k")},
    }


def _cell_of(row: Mapping[str, Any]) -> Key:
    return tuple(row[name] for name in CELL)


def _reference_length(members: Sequence[Record]) -> float | None:
    """Mean of ceil(L_r / c): the length of the reference chains at this speed, over the questions that have one."""
    lengths = [
        math.ceil(record["gold_length"] / (record["compression_factor"] or 1))
        for record in members
        if record.get("gold_length") is not None
    ]
    return fmean(lengths) if lengths else None


def _accuracy_by_seed(members: Sequence[Record]) -> list[float]:
    """Accuracy of each decoding seed in the seeds' order; [] unless every run was asked every question with each."""
    seeds: defaultdict[Any, list[bool]] = defaultdict(list)
    for record in members:
        seeds[record["seed"]].append(record["correct"])
    asked = {(record["train_seed"], record["id"]) for record in members}
    runs = len({record["train_seed"] for record in members})
    questions = len({record["id"] for record in members})
    if len(members) != len(seeds) * len(asked) or len(asked) != runs * questions:
        return []
    return [fmean(seeds[seed]) for seed in sorted(seeds)]


def _at_k(members: Sequence[Record], k: int) -> dict[str, float | None]:
    """pass@k and maj@k over the `k` samples that each question has; null for fewer than two."""
    if k < 2:
        return {"pass_at_k": None, "maj_at_k": None}
    questions: defaultdict[Key, list[Record]] = defaultdict(list)
    for record in members:
        questions[record["train_seed"], record["id"]].append(record)
    passed = [stats.pass_at_k(k, sum(r["correct"] for r in group), k) for group in questions.values()]
    majority = [
        stats.maj_at_k([r["parsed"] for r in group], [r["correct"] for r in group])
        for group in questions.values()
    ]
    return {"pass_at_k": fmean(passed), "maj_at_k": fmean(majority)}


def averages(rows: Sequence[dict[str, Any]], cells: Mapping[Key, Sequence[Record]]) -> list[dict[str, Any]]:
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


def train_seeds(rows: Sequence[Record]) -> list[dict[str, Any]]:
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
