"""Rows of a report: one cell's records as numbers, a system's average over datasets, all runs of a system together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from colar.evaluation import stats
from colar.evaluation.records import Answers, Cells
from colar.evaluation.rows import AVERAGE, Cell, ReportRow, RunsRow, System


def summarise(cell: Cell, members: Answers) -> ReportRow:
    """The row of one cell: means over its records, with standard errors clustered by question."""
    # The answers to one question, under several seeds or from several runs, are one cluster: they are right or wrong
    # together more often than by chance. So are those to a question that the data set repeats.
    accuracy = stats.mean(members["correct"], members["cluster"])
    length = stats.mean(members["length"], members["cluster"])
    by_seed = accuracy_by_seed(members)
    passed, majority = _at_k(members, len(by_seed))
    return ReportRow(
        system=cell.system,
        dataset=cell.dataset,
        seeds=sorted(set(members["seed"].tolist())),
        n=_distinct(members["question"]),
        accuracy=accuracy.mean,
        accuracy_se=accuracy.se,
        unparsable=_mean(members["parsed"] < 0),
        length=length.mean,
        forward_passes=_mean(members["forward_passes"]),
        seconds_per_question=_mean(members["seconds"]),
        accuracy_interval=list(stats.wilson(accuracy)),
        length_se=length.se,
        reference_length=_reference_length(cell, members),
        truncated=_mean(members["truncated"]),
        samples=len(members),
        seeds_interval=stats.t_interval(by_seed),
        pass_at_k=passed.mean if passed else None,
        maj_at_k=majority.mean if majority else None,
        pass_at_k_se=passed.se if passed else None,
        maj_at_k_se=majority.se if majority else None,
    )


def averages(rows: Sequence[ReportRow], cells: Cells) -> list[ReportRow]:
    """The macro-average row of each system in `rows`, which are those of `cells`."""
    by_system: defaultdict[System, list[ReportRow]] = defaultdict(list)
    for row in rows:
        by_system[row.system].append(row)
    made = []
    for system, members in by_system.items():
        by_seed = [accuracy_by_seed(cells[row.cell]) for row in members]
        made.append(_average(system, members, _mean_by_seed(members, by_seed)))
    return made


def pool(cells: Cells) -> dict[Cell, Answers]:
    """The answers of all training runs of a system in one cell; {} where every system was trained once."""
    runs_of: defaultdict[Cell, list[Answers]] = defaultdict(list)
    for cell, members in cells.items():
        runs_of[_all_runs(cell)].append(members)
    # Equal numbers mean that no two cells were runs of one system.
    if len(runs_of) == len(cells):
        return {}
    return {cell: np.concatenate(runs) for cell, runs in runs_of.items()}


def pooled_rows(pooled: Cells, rows: Sequence[ReportRow]) -> list[ReportRow]:
    """A row for each pooled cell, and their averages. `rows` are those of the single runs, averages included."""
    runs_of: defaultdict[Cell, list[ReportRow]] = defaultdict(list)
    for row in rows:
        runs_of[_all_runs(row.cell)].append(row)
    made = [summarise(cell, members) for cell, members in pooled.items()]
    made += averages(made, pooled)
    # `rows` include averages, so a pooled average finds the averages of its runs.
    return [_with_runs(row, runs_of[row.cell]) for row in made]


def over_runs(rows: Sequence[ReportRow]) -> list[RunsRow]:
    """Mean and t interval over the training runs of one system on one dataset, where it has two or more.

    Averages over different data sets are no runs of one thing: they have no row.
    """
    runs_of: defaultdict[Cell, dict[int, ReportRow]] = defaultdict(dict)
    for row in rows:
        train_seed = row.system.train_seed
        if train_seed is not None:
            runs_of[_all_runs(row.cell)][train_seed] = row
    made = []
    for cell, runs in runs_of.items():
        # One run has no spread, and its row is in the report already.
        if len(runs) < 2 or not _same_datasets(runs.values()):
            continue
        accuracies = [run.accuracy for run in runs.values()]
        lengths = [run.length for run in runs.values()]
        made.append(
            RunsRow(
                cell.system,
                cell.dataset,
                train_seeds=list(runs),
                accuracy=fmean(accuracies),
                interval=stats.t_interval(accuracies),
                length=fmean(lengths),
                length_interval=stats.t_interval(lengths),
            )
        )
    return made


def accuracy_by_seed(members: Answers) -> list[float]:
    """Accuracy of each decoding seed, in the order of seeds; [] unless each of them has every question of every run.

    Means of seeds that were asked different questions would differ by their questions, not only by sampling.
    """
    seeds, place = np.unique(members["seed"], return_inverse=True)
    # Counts suffice: no record comes twice, so equal numbers mean that none is missing.
    if len(members) != len(seeds) * _distinct(members["run"]) * _distinct(members["question"]):
        return []
    right = np.bincount(place, weights=members["correct"])
    found: list[float] = (right / np.bincount(place)).tolist()
    return found


def _all_runs(cell: Cell) -> Cell:
    return Cell(cell.system.all_runs(), cell.dataset)


def _average(system: System, members: Sequence[ReportRow], mean_by_seed: Sequence[float]) -> ReportRow:
    """The mean of one system's rows over its datasets. A number that one of them lacks is null."""
    accuracy = stats.average([row.accuracy for row in members], [row.accuracy_se for row in members])
    length = stats.average([row.length for row in members], [row.length_se for row in members])
    interval = None
    if accuracy.interval is not None:
        low, high = accuracy.interval
        # The normal interval of a share may reach beyond 0 and 1.
        interval = [max(0.0, low), min(1.0, high)]
    seeds: set[int] = set()
    for row in members:
        seeds.update(row.seeds)
    # pass@3 and pass@5 have no common meaning: datasets asked with other numbers of seeds have no average.
    same_k = len({len(row.seeds) for row in members}) == 1
    return ReportRow(
        system=system,
        dataset=AVERAGE,
        seeds=sorted(seeds),
        n=sum(row.n for row in members),
        accuracy=accuracy.mean,
        accuracy_se=accuracy.se,
        unparsable=fmean(row.unparsable for row in members),
        length=length.mean,
        forward_passes=fmean(row.forward_passes for row in members),
        seconds_per_question=fmean(row.seconds_per_question for row in members),
        accuracy_interval=interval,
        length_se=length.se,
        reference_length=_mean_if_all(row.reference_length for row in members),
        truncated=fmean(row.truncated for row in members),
        samples=sum(row.samples for row in members),
        seeds_interval=stats.t_interval(mean_by_seed),
        pass_at_k=_mean_if_all(row.pass_at_k for row in members) if same_k else None,
        maj_at_k=_mean_if_all(row.maj_at_k for row in members) if same_k else None,
        pass_at_k_se=stats.average_error([row.pass_at_k_se for row in members]) if same_k else None,
        maj_at_k_se=stats.average_error([row.maj_at_k_se for row in members]) if same_k else None,
        datasets=[row.dataset for row in members],
    )


def _mean_by_seed(members: Sequence[ReportRow], by_seed: Sequence[Sequence[float]]) -> list[float]:
    """The average over datasets under each decoding seed; [] unless all datasets have the same seeds in full."""
    # Seed 0 of one dataset and seed 1 of another have no common noise to average.
    same_seeds = len({tuple(row.seeds) for row in members}) == 1
    if not same_seeds or not all(by_seed):
        return []
    return [fmean(accuracies) for accuracies in zip(*by_seed, strict=True)]


def _with_runs(row: ReportRow, runs: Sequence[ReportRow]) -> ReportRow:
    """A pooled row with its runs' interval: null where the runs of an average were asked different data sets.

    pass@k and maj@k are means over the runs: k samples of one question come from one run.
    """
    train_seeds = [run.system.train_seed for run in runs]
    if not _same_datasets(runs):
        # Such averages differ by their data sets, not only by their training.
        return replace(row, train_seeds=train_seeds, pass_at_k=None, maj_at_k=None)
    return replace(
        row,
        train_seeds=train_seeds,
        runs_interval=stats.t_interval([run.accuracy for run in runs]),
        pass_at_k=_mean_if_all(run.pass_at_k for run in runs),
        maj_at_k=_mean_if_all(run.maj_at_k for run in runs),
    )


def _same_datasets(rows: Iterable[ReportRow]) -> bool:
    """Whether averages are over the same data sets; rows of one data set always are."""
    return len({frozenset(row.datasets or ()) for row in rows}) == 1


def _reference_length(cell: Cell, members: Answers) -> float | None:
    """Mean of ceil(L_r / c) over the questions that have a reference chain; None where no question has one."""
    factor = cell.system.compression_factor
    gold_length = members["gold_length"]
    known = gold_length[~np.isnan(gold_length)]
    # A method without a speed is compared with the whole chain.
    return _mean(np.ceil(known / (1 if factor is None else factor))) if len(known) else None


def _at_k(members: Answers, k: int) -> tuple[stats.Estimate | None, stats.Estimate | None]:
    """pass@k and maj@k over the `k` samples that each question has; None for fewer than two samples.

    Their standard errors are over questions, as that of accuracy.
    """
    if k < 2:
        return None, None
    # None is missing, so sorted by question the samples are a table: Q rows of K = `k` samples. A question has a row
    # for each run: the majority of several models' answers would be an ensemble's accuracy.
    order = np.lexsort((members["question"], members["run"]))
    correct_QK = members["correct"][order].reshape(-1, k)
    answers_QK = members["parsed"][order].reshape(-1, k)
    clusters_Q = members["cluster"][order].reshape(-1, k)[:, 0]
    # By the number of right samples, 0 to k.
    chances = np.array([stats.pass_at_k(k, right, k) for right in range(k + 1)])
    passed = stats.mean(chances[correct_QK.sum(axis=1)], clusters_Q)
    majority = stats.mean(stats.majorities(answers_QK, correct_QK), clusters_Q)
    return passed, majority


def _distinct(column: npt.NDArray[Any]) -> int:
    """The number of different values."""
    return len(set(column.tolist()))


def _mean(column: npt.NDArray[Any]) -> float:
    """The mean, exact before its last rounding: reports do not depend on the order of the records."""
    return fmean(column.tolist())


def _mean_if_all(values: Iterable[float | None]) -> float | None:
    """The mean, or None where a value is missing: a mean over some datasets would pass for one over all."""
    known = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return fmean(known)
