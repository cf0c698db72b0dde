"""The report: a pure fold over records. The same records, in any order, give the same report.

    RecordFiles -> by_cell -> fold -> Report -> write

A row is one system on one dataset, or the system's macro-average: the plain mean over the datasets on which this system
was evaluated (listed in `datasets`). The average's se is the root of the summed variances / number of datasets. Three
intervals, never mixed (`evaluation/stats.py`):
  accuracy_se                      over questions: clustered by question
  seeds_interval                   over decoding seeds, half width of the t interval; null for one seed
  runs_interval                    over training runs, half width of the t interval, in pooled rows
In pass_at_k and maj_at_k, k is the number of decoding seeds. Numbers that need every question under every seed are
null if `samples` < n * seeds.

`comparisons` holds paired differences on the questions that both systems answered (`evaluation/compare.py`). If a
system was trained more than once, `pooled` has a row for all runs of each system together (train_seed is null,
`train_seeds` lists them): the answers of all runs to a question are one cluster, so accuracy_se is still over
questions. `pooled_comparisons` are the paired differences between these systems. Tables and pictures then show the
pooled sections. `pairs` are the differences requested by name, over all runs together and in each.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from colar import files, progress
from colar.evaluation import stats
from colar.evaluation.compare import compare, compare_pairs
from colar.evaluation.provenance import collect_provenance
from colar.evaluation.records import Cells, Columns, Record, by_cell
from colar.evaluation.report_rows import AVERAGE, Cell, Report, ReportRow, System
from colar.evaluation.tables import render_markdown

PICTURE = "accuracy_vs_length"
TITLE = "Evaluation"


def fold(
    records: Iterable[Record],
    provenance: Mapping[str, Any],
    pairs: Sequence[tuple[str, str]] = (),
) -> Report:
    """Make the report of records. `pairs` are (system, baseline) by their names in the tables.

    Raises ValueError if there is no record, for a record that lacks a key, has a wrong value or occurs twice, and for a
    pair that `compare_pairs` rejects.
    """
    cells = by_cell(records)
    # All averages stand after all single datasets; readers of report.json may rely on the order.
    rows = [summarise(cell, members) for cell, members in cells.items()]
    rows += averages(rows, cells)
    # Empty where every system was trained once; then the pooled sections are empty too.
    all_runs = pool(cells)
    pooled = pooled_rows(all_runs, rows)
    return Report(
        provenance=dict(provenance),
        rows=rows,
        comparisons=compare(cells),
        pooled=pooled,
        pooled_comparisons=compare(all_runs),
        pairs=compare_pairs(cells, all_runs, pooled or rows, pairs),
    )


def write(
    folder: str | Path,
    records: Iterable[Record],
    title: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    pairs: Sequence[tuple[str, str]] = (),
) -> Report:
    """Write report.json, report.md and one picture per decoding into `folder`, each atomically; return the report.

    The first decoding's picture is accuracy_vs_length.png, another's accuracy_vs_length-<decoding>.png; they leave out
    controls.
    """
    folder = Path(folder)
    report = fold(records, collect_provenance() if provenance is None else provenance, pairs)
    paths = picture_paths(folder, report)
    text = render_markdown(report, TITLE if title is None else title, [path.name for path in paths.values()])
    files.write_json(folder / "report.json", report.to_json())
    files.write_text(folder / "report.md", text)
    # Greedy and sampled answers of one system would lie over each other in one picture.
    for decoding, path in paths.items():
        rows = [row for row in report.shown_rows if row.system.decoding == decoding]
        # Where every system is a control there is nothing else to show.
        rows = [row for row in rows if not row.system.is_control] or rows
        # An earlier picture must not remain if drawing fails.
        path.unlink(missing_ok=True)
        with progress.warn_on_error(f"the picture {path.name}"):
            # Imported inside the block, because importing matplotlib may fail.
            from colar.evaluation import picture

            picture.save(picture.accuracy_vs_length(rows), path)
    return report


def picture_paths(folder: Path, report: Report) -> dict[str, Path]:
    """Path of each decoding's picture; the first one has the plain name."""
    decodings = sorted({row.system.decoding for row in report.shown_rows})
    names = [PICTURE, *(f"{PICTURE}-{decoding}" for decoding in decodings[1:])]
    return {decoding: folder / f"{name}.png" for decoding, name in zip(decodings, names, strict=True)}


# Rows: one cell's records as numbers, a system's average over datasets, all runs of a system together


def summarise(cell: Cell, members: Columns) -> ReportRow:
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
        seeds=np.unique(members["seed"]).tolist(),
        n=len(np.unique(members["question"])),
        accuracy=accuracy.mean,
        accuracy_se=accuracy.se,
        unparsable=_mean(members["parsed"] < 0),
        length=length.mean,
        forward_passes=_mean(members["forward_passes"]),
        seconds_per_question=_mean(members["seconds"]),
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
    mean_rows = []
    for system, members in by_system.items():
        by_seed = [accuracy_by_seed(cells[row.cell]) for row in members]
        # Seed 0 of one dataset and seed 1 of another have no common noise to average.
        complete = all(by_seed) and len({tuple(row.seeds) for row in members}) == 1
        means = [fmean(accuracies) for accuracies in zip(*by_seed, strict=True)] if complete else []
        mean_rows.append(_average(system, members, means))
    return mean_rows


def pool(cells: Cells) -> dict[Cell, Columns]:
    """The records of all training runs of a system in one cell; {} where every system was trained once."""
    runs_of: defaultdict[Cell, list[Columns]] = defaultdict(list)
    for cell, members in cells.items():
        runs_of[Cell(cell.system._replace(train_seed=None), cell.dataset)].append(members)
    # Equal numbers mean that no two cells were runs of one system.
    if len(runs_of) == len(cells):
        return {}
    return {cell: np.concatenate(runs) for cell, runs in runs_of.items()}


def pooled_rows(pooled: Cells, rows: Sequence[ReportRow]) -> list[ReportRow]:
    """A row for each pooled cell, and their averages. `rows` are those of the single runs, averages included."""
    runs_of: defaultdict[Cell, list[ReportRow]] = defaultdict(list)
    for row in rows:
        runs_of[Cell(row.system._replace(train_seed=None), row.dataset)].append(row)
    of_all_runs = [summarise(cell, members) for cell, members in pooled.items()]
    of_all_runs += averages(of_all_runs, pooled)
    # `rows` include averages, so a pooled average finds the averages of its runs.
    return [_with_runs(row, runs_of[row.cell]) for row in of_all_runs]


def accuracy_by_seed(members: Columns) -> list[float]:
    """Accuracy of each decoding seed, in the order of seeds; [] unless each of them has every question of every run.

    Means of seeds with different questions would differ by their questions, not only by sampling.
    """
    seeds, place = np.unique(members["seed"], return_inverse=True)
    # Counts suffice: no record comes twice, so equal numbers mean that none is missing.
    if len(members) != len(seeds) * len(np.unique(members["run"])) * len(np.unique(members["question"])):
        return []
    right = np.bincount(place, weights=members["correct"])
    accuracies: list[float] = (right / np.bincount(place)).tolist()
    return accuracies


def _average(system: System, members: Sequence[ReportRow], mean_by_seed: Sequence[float]) -> ReportRow:
    """The mean of one system's rows over its datasets. A number that one of them lacks is null."""
    accuracy = stats.average([row.accuracy for row in members], [row.accuracy_se for row in members])
    length = stats.average([row.length for row in members], [row.length_se for row in members])
    passed, majority = _mean_at_k(members)
    return ReportRow(
        system=system,
        dataset=AVERAGE,
        seeds=sorted(set().union(*(row.seeds for row in members))),
        n=sum(row.n for row in members),
        accuracy=accuracy.mean,
        accuracy_se=accuracy.se,
        unparsable=fmean(row.unparsable for row in members),
        length=length.mean,
        forward_passes=fmean(row.forward_passes for row in members),
        seconds_per_question=fmean(row.seconds_per_question for row in members),
        length_se=length.se,
        reference_length=_mean_if_all(row.reference_length for row in members),
        truncated=fmean(row.truncated for row in members),
        samples=sum(row.samples for row in members),
        seeds_interval=stats.t_interval(mean_by_seed),
        pass_at_k=passed,
        maj_at_k=majority,
        pass_at_k_se=None if passed is None else stats.average_error([row.pass_at_k_se for row in members]),
        maj_at_k_se=None if majority is None else stats.average_error([row.maj_at_k_se for row in members]),
        datasets=[row.dataset for row in members],
    )


def _with_runs(row: ReportRow, runs: Sequence[ReportRow]) -> ReportRow:
    """A pooled row with the interval over its runs, which is None if an average's runs have different data sets.

    pass@k and maj@k are means over the runs, because the k samples of a question must come from one run.
    """
    train_seeds = [run.system.train_seed for run in runs]
    if len({frozenset(run.datasets or ()) for run in runs}) > 1:
        # Such averages differ by their data sets, not only by their training.
        return replace(row, train_seeds=train_seeds, pass_at_k=None, maj_at_k=None)
    passed, majority = _mean_at_k(runs)
    return replace(
        row,
        train_seeds=train_seeds,
        runs_interval=stats.t_interval([run.accuracy for run in runs]),
        pass_at_k=passed,
        maj_at_k=majority,
    )


def _mean_at_k(rows: Sequence[ReportRow]) -> tuple[float | None, float | None]:
    """The means of pass@k and maj@k; None for rows with different k: pass@3 and pass@5 cannot be averaged."""
    if len({len(row.seeds) for row in rows}) > 1:
        return None, None
    return _mean_if_all(row.pass_at_k for row in rows), _mean_if_all(row.maj_at_k for row in rows)


def _reference_length(cell: Cell, members: Columns) -> float | None:
    """Mean of ceil(L_r / c) over the questions that have a reference chain; None where no question has one."""
    gold_length = members["gold_length"]
    known = gold_length[~np.isnan(gold_length)]
    # A method without a speed is compared with the whole chain.
    # The tolerance is for quotients such as 21 / 1.4, which in floats is a little more than 15.
    return _mean(np.ceil(known / (cell.system.speed or 1) - 1e-9)) if len(known) else None


def _at_k(members: Columns, k: int) -> tuple[stats.Estimate | None, stats.Estimate | None]:
    """pass@k and maj@k over the `k` samples that each question has; None for fewer than two samples.

    Their standard errors are over questions, like that of accuracy.
    """
    if k < 2:
        return None, None
    # No sample is missing, so sorted by run and question they are a table: Q rows of K = `k` samples. A question has a
    # row for each run, because a majority over several models' answers would be an ensemble's accuracy.
    order = np.lexsort((members["question"], members["run"]))
    correct_QK = members["correct"][order].reshape(-1, k)
    answers_QK = members["parsed"][order].reshape(-1, k)
    clusters_Q = members["cluster"][order].reshape(-1, k)[:, 0]
    passed = stats.mean(correct_QK.sum(axis=1) > 0, clusters_Q)
    majority = stats.mean(stats.majorities(answers_QK, correct_QK), clusters_Q)
    return passed, majority


def _mean(column: npt.NDArray[Any]) -> float:
    """The mean, exact before its last rounding, so that reports do not depend on the order of the records."""
    return fmean(column.tolist())


def _mean_if_all(values: Iterable[float | None]) -> float | None:
    """The mean, or None if a value is missing, because a mean over some datasets would pass for one over all."""
    values = list(values)
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
