"""Paired differences: how much more often one system is right than another, on the questions that both answered.

`compare` chooses the other system itself: the baseline, and the same system unchanged. `compare_pairs` takes pairs that
the user named. Both return a row for each dataset, and one for their average.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from colar.evaluation import stats
from colar.evaluation.records import Cells
from colar.evaluation.report_rows import (
    AVERAGE,
    BASELINE,
    Cell,
    Difference,
    ReportRow,
    System,
    system_name,
    systems_of,
)


def compare(cells: Cells) -> list[Difference]:
    """Differences in accuracy, dataset by dataset, then averaged over the datasets of each pair of systems.

    A system is compared, once each, with these systems of the same decoding and training seed:
      - the first system of method `BASELINE`, of the same model if it has one, otherwise the first by name;
      - if it is an ablation, a control, or has a value other than the default: the same system unchanged. A control of
        an ablation is compared with that ablation.
    Among the systems of the baseline's method, unchanged ones take precedence. A positive difference means that the
    system is better than its `baseline`.
    """
    # Across decodings or training seeds, a difference would not be due to the method alone.
    settings = {cell: (cell.dataset, cell.system.decoding, cell.system.train_seed) for cell in cells}
    alike = defaultdict(list)
    for cell, setting in settings.items():
        alike[setting].append(cell.system)
    differences = []
    by_pair = defaultdict(list)
    for cell, setting in settings.items():
        for system in _opponents(cell.system, alike[setting]):
            row = _difference(cells, cell, system)
            if row is not None:
                differences.append(row)
                by_pair[row.system, row.baseline].append(row)
    # Averages stand after all single datasets, as in the report's rows.
    return differences + [_average_difference(rows) for rows in by_pair.values()]


def compare_pairs(
    cells: Cells, pooled: Cells, rows: Sequence[ReportRow], pairs: Sequence[tuple[str, str]]
) -> list[Difference]:
    """For each (system, baseline) and decoding, return a row for each dataset with common questions, and their average.

    Systems have their names in the tables of `rows`. `cells` hold the single training runs, `pooled` all runs together
    ({} if every system was trained once). The row of the average also has the difference in each run. Raises
    ValueError for a name that no table has, and for two systems that have no question in common.
    """
    systems = systems_of(rows)
    decodings = sorted({system.decoding for system in systems})
    # A name stands for a system at every decoding. Any of them may be stored: the decoding is replaced below.
    named = {system_name(system, systems): system for system in systems}
    differences = []
    for pair in pairs:
        for name in pair:
            if name not in named:
                raise ValueError(f"pair: no system is called {name!r}; there are {', '.join(sorted(named))}")
        of_pair = []
        # Sampled answers are never compared with greedy ones.
        for decoding in decodings:
            one = named[pair[0]]._replace(decoding=decoding)
            other = named[pair[1]]._replace(decoding=decoding)
            of_pair += _pair(cells, pooled or cells, list(pair), one, other)
        if not of_pair:
            raise ValueError(f"pair: {pair[0]!r} and {pair[1]!r} have no question in common")
        differences += of_pair
    return differences


def _difference(cells: Cells, cell: Cell, baseline: System) -> Difference | None:
    """The difference between a cell and its baseline on the same dataset; None if the two share no question."""
    members = cells[cell]
    others = cells[Cell(baseline, cell.dataset)]
    # Systems may have been asked different parts of a dataset.
    members = members[np.isin(members["question"], others["question"])]
    others = others[np.isin(others["question"], members["question"])]
    if not len(members):
        return None
    estimate = stats.paired_difference(
        members["correct"], members["cluster"], others["correct"], others["cluster"]
    )
    return Difference(
        cell.system,
        cell.dataset,
        baseline=baseline,
        n=len(np.unique(members["question"])),
        difference=estimate.mean,
        se=estimate.se,
        interval=estimate.interval,
    )


def _average_difference(rows: Sequence[Difference]) -> Difference:
    """The macro-average of one pair's differences over its datasets."""
    mean = stats.average([row.difference for row in rows], [row.se for row in rows])
    return replace(
        rows[0],
        dataset=AVERAGE,
        n=sum(row.n for row in rows),
        difference=mean.mean,
        se=mean.se,
        interval=mean.interval,
        datasets=[row.dataset for row in rows],
    )


def _opponents(me: System, alike: Sequence[System]) -> list[System]:
    """Systems in `alike` to compare a system with, each once: the baseline, and the system itself unchanged."""
    of_method = [system for system in alike if system.method == BASELINE and not system.is_control]
    # A model that was not trained with the baseline's method is compared with one that was.
    of_method = [system for system in of_method if system.model == me.model] or of_method
    of_method = [system for system in of_method if system == system.plain()] or of_method
    # A control of an ablation differs from the plain system in two things, so it is compared with the ablation, which
    # differs from it by the control alone.
    unchanged = me.without_control() if me.is_control else me.plain()
    chosen = [*of_method[:1], unchanged]
    return [other for other in dict.fromkeys(chosen) if other in alike and other != me]


def _pair(cells: Cells, shown: Cells, names: list[str], one: System, other: System) -> list[Difference]:
    """Rows of one pair at one decoding: each dataset, then the average; [] if the two share no question."""
    rows = _by_dataset(shown, one, other)
    if not rows:
        return []
    # Runs are compared by their averages; a dataset's row leaves these fields empty.
    rows = [replace(row, pair=names, train_seeds=[], by_run=[]) for row in rows]
    runs = _by_run(cells, one, other)
    by_run = list(runs.values())
    mean = _average_difference(rows)
    interval = stats.t_interval(by_run)
    return [*rows, replace(mean, train_seeds=list(runs), by_run=by_run, runs_interval=interval)]


def _by_run(cells: Cells, one: System, other: System) -> dict[int, float]:
    """Training seed -> difference averaged over datasets, for each run that both systems have.

    {} if the runs answered different data sets, because their averages would differ for that reason.
    """
    # A system with a training seed is a single run, without others to compare.
    if one.train_seed is not None:
        return {}
    seeds = {cell.system.train_seed for cell in cells if cell.system.train_seed is not None}
    runs = {}
    dataset_sets = set()
    for seed in sorted(seeds):
        rows = _by_dataset(cells, one._replace(train_seed=seed), other._replace(train_seed=seed))
        if rows:
            runs[seed] = fmean(row.difference for row in rows)
            dataset_sets.add(frozenset(row.dataset for row in rows))
    return runs if len(dataset_sets) == 1 else {}


def _by_dataset(cells: Cells, one: System, other: System) -> list[Difference]:
    """The differences between two systems on each dataset on which they share a question."""
    of_both = [cell for cell in cells if cell.system == one and Cell(other, cell.dataset) in cells]
    rows = [_difference(cells, cell, other) for cell in of_both]
    return [row for row in rows if row is not None]
