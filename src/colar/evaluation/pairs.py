"""Pairs of systems that somebody asked about by name: their paired differences, and how far training runs disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from colar.evaluation.compare import OTHER, average, difference
from colar.evaluation.records import CELL, Key, Record
from colar.ops import stats
from colar.show.naming import Row, system_name

RUN, DATASET, DECODING = (CELL.index(name) for name in ("train_seed", "dataset", "decoding"))
NAMED = (*OTHER, "train_seed")
"""What a name stands for: the fields of CELL but dataset and decoding."""


def compare_pairs(
    cells: Mapping[Key, Sequence[Record]],
    pooled: Mapping[Key, Sequence[Record]],
    rows: Sequence[Row],
    pairs: Sequence[tuple[str, str]],
) -> list[dict[str, Any]]:
    """For each (system, baseline) and decoding a row a dataset that both were asked, and one for their average.

    Systems go by the names that the tables give them (`rows` are the tables'). A row has compare's keys, `pair` (the
    two names), `train_seeds` (on the average's row the training runs that both have; [] elsewhere), `by_run` (its
    difference in each of them) and `runs_interval`, half of their t interval. Raises ValueError for a name that no
    table has, and for two systems that have no question in common.
    """
    named = {system_name(row, rows): tuple(row[name] for name in NAMED) for row in rows}
    made = []
    for pair in pairs:
        if unknown := [name for name in pair if name not in named]:
            raise ValueError(
                f"pair: no system is called {unknown[0]!r}; there are {', '.join(sorted(named))}"
            )
        one, other = (named[name] for name in pair)
        found = [
            row
            for decoding in sorted({row["decoding"] for row in rows})
            for row in _rows(cells, pooled or cells, one, other, decoding)
        ]
        if not found:
            raise ValueError(f"pair: {pair[0]!r} and {pair[1]!r} have no question in common")
        made += [{"pair": list(pair), **row} for row in found]
    return made


def _rows(
    cells: Mapping[Key, Sequence[Record]],
    shown: Mapping[Key, Sequence[Record]],
    one: Key,
    other: Key,
    decoding: str,
) -> list[dict[str, Any]]:
    """One pair at one decoding: its datasets, then their average."""
    plain: dict[str, Any] = {"train_seeds": [], "by_run": [], "runs_interval": None}
    found = _by_dataset(shown, one, other, decoding)
    if not found:
        return []
    runs = {
        seed: fmean(row["difference"] for row in rows)
        for seed in sorted({key[RUN] for key in cells if key[RUN] is not None})
        if one[-1] is None and (rows := _by_dataset(cells, (*one[:-1], seed), (*other[:-1], seed), decoding))
    }
    by_run = list(runs.values())
    over_runs = {"train_seeds": list(runs), "by_run": by_run, "runs_interval": stats.t_interval(by_run)}
    return [row | plain for row in found] + [average(found) | over_runs]


def _by_dataset(
    cells: Mapping[Key, Sequence[Record]], one: Key, other: Key, decoding: str
) -> list[dict[str, Any]]:
    def of(system: Key) -> dict[str, Key]:
        return {
            key[DATASET]: key
            for key in cells
            if key[DECODING] == decoding and tuple(key[CELL.index(name)] for name in NAMED) == system
        }

    ours, theirs = of(one), of(other)
    both = [dataset for dataset in ours if dataset in theirs]
    found = [difference(ours[d], cells[ours[d]], theirs[d], cells[theirs[d]]) for d in both]
    return [row for row in found if row is not None]
