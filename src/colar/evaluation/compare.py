"""Paired differences: what one system gains over another on the very questions that both answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from colar.analysis.naming import AVERAGE
from colar.evaluation.records import CELL, Key, Record
from colar.ops import stats

OTHER = (
    "model",
    "method",
    "label",
    "compression_factor",
)  # names the other system; the rest of CELL is shared


def compare(cells: Mapping[Key, Sequence[Record]], baseline: str) -> list[dict[str, Any]]:
    """Differences in accuracy, dataset by dataset, then averaged over the datasets of each pair of systems.

    Each system against the first cell of method `baseline` with the same dataset, decoding and training seed (the
    same model's where it has one, else the first by name), and each labelled system, a control or an ablation,
    against the one without its label. A positive difference: the system is better than its `baseline`.
    """
    compared = []
    pairs: defaultdict[Key, list[dict[str, Any]]] = defaultdict(list)
    for key, members in cells.items():
        for other in _opponents(key, list(cells), baseline):
            row = _difference(key, members, other, cells[other])
            if row is not None:
                pair = (*(row[name] for name in CELL if name != "dataset"), *row["baseline"].values())
                pairs[pair].append(row)
                compared.append(row)
    return compared + [_average(rows) for rows in pairs.values()]


def _opponents(key: Key, keys: Sequence[Key], baseline: str) -> list[Key]:
    """Cells to compare `key`'s with, each once: the baseline's, and that of the same system without its label."""
    me = dict(zip(CELL, key, strict=True))
    alike = [
        other
        for other in (dict(zip(CELL, key, strict=True)) for key in keys)
        if all(other[name] == me[name] for name in ("dataset", "decoding", "train_seed"))
    ]
    baselines = [other for other in alike if (other["method"], other["label"]) == (baseline, "")]
    own = [other for other in baselines if other["model"] == me["model"]]
    chosen = [*(own or baselines)[:1], *(other for other in alike if other == {**me, "label": ""})]
    return [other for other in dict.fromkeys(tuple(cell.values()) for cell in chosen) if other != key]


def _difference(
    key: Key, members: Sequence[Record], other: Key, others: Sequence[Record]
) -> dict[str, Any] | None:
    """One row of `comparisons`; None where the two share no question."""
    ids, other_ids = [r["id"] for r in members], [r["id"] for r in others]
    if not set(ids) & set(other_ids):
        return None
    found = stats.paired_difference(
        [r["correct"] for r in members], ids, [r["correct"] for r in others], other_ids
    )
    named = dict(zip(CELL, other, strict=True))
    return {
        **dict(zip(CELL, key, strict=True)),
        "baseline": {name: named[name] for name in OTHER},
        "n": found.n,
        "difference": found.mean,
        "se": found.se,
        "interval": None if found.interval is None else list(found.interval),
    }


def _average(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
