"""Paired differences: what one system gains over another on the very questions that both answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from colar.evaluation.records import CELL, Key, Record, cluster_of
from colar.ops import stats
from colar.show.naming import AVERAGE, is_control, without_control

OTHER = (
    "model",
    "method",
    "label",
    "compression_factor",
)  # names the other system; the rest of CELL is shared


def compare(
    cells: Mapping[Key, Sequence[Record]], baseline: str, nearest: str | None = None
) -> list[dict[str, Any]]:
    """Differences in accuracy, dataset by dataset, then averaged over the datasets of each pair of systems.

    Each system against the first cell of method `baseline` with the same dataset, decoding and training seed (the
    same model's where it has one, else the first by name), each labelled system, a control or an ablation, against
    the one without its label (a control of an ablation against that ablation), and with `nearest`, a method, each
    system of another one, controls excepted, against that method's (unlabelled, where it has such) whose #L is
    nearest to its own, on average over datasets. A positive difference: the system is better than its `baseline`.
    """
    lengths = _lengths(cells)
    compared = []
    pairs: defaultdict[Key, list[dict[str, Any]]] = defaultdict(list)
    for key, members in cells.items():
        for other in _opponents(key, lengths, baseline, nearest):
            row = difference(key, members, other, cells[other])
            if row is not None:
                pair = (*(row[name] for name in CELL if name != "dataset"), *row["baseline"].values())
                pairs[pair].append(row)
                compared.append(row)
    return compared + [average(rows) for rows in pairs.values()]


def _opponents(key: Key, lengths: Mapping[Key, float], baseline: str, nearest: str | None) -> list[Key]:
    """Cells to compare `key`'s with, each once: the baseline's, its own without the label, the nearest."""
    me = dict(zip(CELL, key, strict=True))
    alike = [
        other
        for other in (dict(zip(CELL, key, strict=True)) for key in lengths)
        if all(other[name] == me[name] for name in ("dataset", "decoding", "train_seed"))
    ]

    def of(method: str | None) -> list[dict[str, Any]]:
        """The method's, the same model's before others', those without a label before those that all have one."""
        found = [other for other in alike if other["method"] == method and not is_control(other["label"])]
        found = [other for other in found if other["model"] == me["model"]] or found
        return [other for other in found if not other["label"]] or found

    control = is_control(me["label"])
    plain = {**me, "label": without_control(me["label"]) if control else ""}
    chosen = [*of(baseline)[:1], *(other for other in alike if other == plain)]
    if nearest is not None and me["method"] != nearest and not control:
        by_distance = sorted(
            of(nearest), key=lambda other: abs(lengths[tuple(other.values())] - lengths[key])
        )
        chosen += by_distance[:1]
    return [other for other in dict.fromkeys(tuple(cell.values()) for cell in chosen) if other != key]


def _lengths(cells: Mapping[Key, Sequence[Record]]) -> dict[Key, float]:
    """#L of each cell's system: the mean over its datasets, the same for all of its cells."""
    by_system: defaultdict[Key, list[float]] = defaultdict(list)
    system = {key: tuple(v for name, v in zip(CELL, key, strict=True) if name != "dataset") for key in cells}
    for key, members in cells.items():
        by_system[system[key]].append(fmean(record["length"] for record in members))
    return {key: fmean(by_system[system[key]]) for key in cells}


def difference(
    key: Key, members: Sequence[Record], other: Key, others: Sequence[Record]
) -> dict[str, Any] | None:
    """One row of `comparisons`; None where the two share no question."""
    shared = {record["id"] for record in members} & {record["id"] for record in others}
    if not shared:
        return None
    ours = [record for record in members if record["id"] in shared]
    theirs = [record for record in others if record["id"] in shared]
    # One side's clusters for both: records from before `cluster` was written may stand beside newer ones.
    cluster = {record["id"]: cluster_of(record) for record in ours}
    found = stats.paired_difference(
        [record["correct"] for record in ours],
        [cluster[record["id"]] for record in ours],
        [record["correct"] for record in theirs],
        [cluster[record["id"]] for record in theirs],
    )
    named = dict(zip(CELL, other, strict=True))
    return {
        **dict(zip(CELL, key, strict=True)),
        "baseline": {name: named[name] for name in OTHER},
        "n": len(shared),
        "difference": found.mean,
        "se": found.se,
        "interval": None if found.interval is None else list(found.interval),
    }


def average(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The macro-average of one pair's differences over its datasets."""
    mean = stats.average([row["difference"] for row in rows], [row["se"] for row in rows])
    return {
        **rows[0],
        "dataset": AVERAGE,
        "n": sum(row["n"] for row in rows),
        "difference": mean.mean,
        "se": mean.se,
        "interval": None if mean.interval is None else list(mean.interval),
        "datasets": [row["dataset"] for row in rows],
    }
