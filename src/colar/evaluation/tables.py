"""A report as people read it: the same grids as Markdown and on a terminal, each saying which interval it shows.

Systems are rows, named from their fields alone (`show/naming.py`); the baseline's come first. Where systems were
trained several times, a row stands for all runs of one; each run by itself is in report.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group

from colar.show.grid import (
    BLANK,
    Grid,
    markdown,
    narrowed,
    number,
    percent,
    plus_minus,
    points,
    rich_table,
    share,
)
from colar.show.naming import AVERAGE, Row, datasets_of, order, system_name, system_of

Report = Mapping[str, Any]

FEW = 30  # questions below which the normal interval is visibly too narrow
PARTLY = "† mean over fewer datasets than the table has: not comparable with the others."
CLUSTERED = "± is 1.96 x the standard error clustered by question."
PAIRED = (
    f"System minus baseline, in points of accuracy, on the questions that both answered; {CLUSTERED} * the 95% "
    "interval leaves out 0 (each by itself, no correction for their number)."
)


def render_markdown(report: Report, title: str, pictures: Iterable[str] = ()) -> str:
    """The report as Markdown: what was measured and how, the tables, the pictures (paths relative to the file)."""
    parts = [f"# {title}", "\n".join(f"- **{name}**: {text}" for name, text in _facts(report))]
    parts += [f"![accuracy against reasoning length]({picture})" for picture in pictures]
    parts += [markdown(grid) for grid in grids(report)]
    return "\n\n".join(parts) + "\n"


def render_console(report: Report, width: int) -> Group:
    """The same tables for a terminal of `width` characters; where they do not fit, no more than the averages."""
    return Group(*(rich_table(narrowed(grid, width)) for grid in grids(report)))


def grids(report: Report) -> list[Grid]:
    """Every table of the report that has a row."""
    if report.get("pooled"):
        report = {**report, "rows": report["pooled"], "comparisons": report["pooled_comparisons"]}
    decodings = sorted({row["decoding"] for row in report["rows"]})
    made = [_accuracy(report, decoding) for decoding in decodings]
    made += [_training_runs(report, decoding) for decoding in decodings]
    made += [_differences(report, decoding) for decoding in decodings]
    made += [_pairs(report), _several_samples(report), _cost(report)]
    return [grid for grid in made if grid.rows]


def _accuracy(report: Report, decoding: str) -> Grid:
    """Accuracy and length: systems x datasets."""
    rows = [row for row in report["rows"] if row["decoding"] == decoding]
    datasets = _with_average(datasets_of(rows))
    head = ["system", *(text for dataset in datasets for text in (f"{dataset} Acc.", "#L"))]
    body = []
    for name, cells in _by_system(report, rows):
        line = [name]
        for dataset in datasets:
            cell = cells.get(dataset)
            line += [share(cell) + _mark(cell, datasets), BLANK if cell is None else number(cell["length"])]
        body.append(line)
    notes = [f"Accuracy in %; {CLUSTERED} #L: embeddings emitted while thinking, mean."]
    notes += [_runs_note(rows)] if report.get("pooled") else []
    return Grid(
        f"Accuracy, {decoding} decoding",
        head,
        body,
        [*notes, *_partly(body), *_warnings(report, rows)],
        last=2,
    )


def _differences(report: Report, decoding: str) -> Grid:
    """Paired differences: pairs of systems x datasets."""
    rows = [row for row in report["comparisons"] if row["decoding"] == decoding]
    datasets = _with_average(datasets_of(rows))
    pairs: dict[tuple[str, str], dict[str, Row]] = {}
    names = {
        system_of(row): name for name, cells in _by_system(report, report["rows"]) for row in cells.values()
    }
    for row in sorted(rows, key=lambda row: list(names).index(system_of(row))):
        pair = names[system_of(row)], names[system_of({**row, **row["baseline"]})]
        pairs.setdefault(pair, {})[row["dataset"]] = row
    body = [
        [*pair, *(points(cells.get(dataset)) + _mark(cells.get(dataset), datasets) for dataset in datasets)]
        for pair, cells in pairs.items()
    ]
    notes = [
        PAIRED,
        *_partly(body),
    ]
    head = ["system", "baseline", *datasets]
    return Grid(f"Paired differences, {decoding} decoding", head, body, notes, words=2, last=1)


def _pairs(report: Report) -> Grid:
    """The pairs that were asked for: a line for each and decoding."""
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in report.get("pairs", ()):
        lines.setdefault((*row["pair"], row["decoding"]), {})[row["dataset"]] = row
    datasets = _with_average(datasets_of(report.get("pairs", ())))
    several = any(cells[AVERAGE]["runs_interval"] is not None for cells in lines.values())
    body = []
    for names, cells in lines.items():
        half = cells[AVERAGE]["runs_interval"]
        shown = [points(cells.get(dataset)) + _mark(cells.get(dataset), datasets) for dataset in datasets]
        body.append(
            [*names, *shown, *([BLANK if half is None else f"± {100 * half:.1f}"] if several else [])]
        )
    notes = [
        PAIRED,
        *(["Runs: half the 95% t interval of the average over training runs."] if several else []),
        *_partly(body),
    ]
    head = ["system", "baseline", "decoding", *datasets, *(["runs"] if several else [])]
    return Grid("Pairs asked for", head, body, notes, words=3, last=2 if several else 1)


def _several_samples(report: Report) -> Grid:
    """avg@k, maj@k and pass@k of the systems that were asked with several decoding seeds."""
    body = []
    for name, cells in _by_system(report, report["rows"]):
        found = _with_average(sorted(set(cells) - {AVERAGE}))
        for dataset in found[-1:] if report.get("pooled") else found:
            row = cells[dataset]
            if row["seeds_interval"] is None:
                continue
            mean = plus_minus(row["accuracy"], row["seeds_interval"])
            line = [name, row["decoding"], dataset, f"{len(row['seeds'])}", mean]
            body.append([*line, percent(row["maj_at_k"]), percent(row["pass_at_k"])])
    notes = ["In %; ± is the half width of the 95% t interval over decoding seeds: it covers the noise of sampling, "
             "not the choice of questions."]  # fmt: skip
    if report.get("pooled"):
        notes.append("Means over training runs; maj@k and pass@k are of one run's samples.")
    head = ["system", "decoding", "dataset", "k", "avg@k", "maj@k", "pass@k"]
    return Grid("Several samples a question (decoding seeds)", head, body, notes, words=3)


def _training_runs(report: Report, decoding: str) -> Grid:
    """Means over the training runs of each system, with their own interval: systems x datasets."""
    rows = [row for row in report.get("pooled", ()) if row["decoding"] == decoding]
    datasets = _with_average(datasets_of(rows))
    body = []
    for name, cells in _by_system(report, rows):
        runs = next(iter(cells.values()))["train_seeds"]
        if len(runs) > 1:
            shown = (cells.get(dataset) for dataset in datasets)
            body.append([name, f"{len(runs)}", *(BLANK if c is None else _over_runs(c) for c in shown)])
    notes = ["Accuracy in %; ± is the half width of the 95% t interval over training seeds."]
    head = ["system", "runs", *datasets]
    return Grid(f"Several training runs, {decoding} decoding", head, body, notes, last=1)


def _over_runs(row: Row) -> str:
    return plus_minus(row["accuracy"], row["runs_interval"])


def _cost(report: Report) -> Grid:
    """What went wrong in form, and what a question costs; averages over each system's datasets."""
    body = []
    for name, cells in _by_system(report, report["rows"]):
        row = cells[AVERAGE]
        shares = [percent(row["unparsable"]), percent(row["truncated"])]
        lengths = [number(row["length"]), number(row["reference_length"]), number(row["forward_passes"])]
        body.append([name, row["decoding"], *shares, *lengths, f"{row['seconds_per_question']:.3g}"])
    head = [
        "system",
        "decoding",
        "unparsable %",
        "truncated %",
        "#L",
        "reference #L",
        "forward passes",
        "seconds",
    ]
    notes = [
        "Means over the system's datasets. An answer that cannot be parsed counts as wrong. Reference #L: the "
        "reference chain's tokens divided by c, rounded up. Seconds: a question's share of wall-clock, in the "
        "batches it ran in."
    ]
    return Grid("Unparsable, truncated, cost of a question", head, body, notes, words=2, last=3)


def _by_system(report: Report, rows: Iterable[Row]) -> list[tuple[str, dict[str, Row]]]:
    """(name, rows by dataset) of each system in `rows`: the baseline's first, controls after what they control."""
    systems: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: _place(row, report["baseline"])):
        systems.setdefault(system_of(row), {})[row["dataset"]] = row
    return [(system_name(next(iter(cells.values())), report["rows"]), cells) for cells in systems.values()]


def _place(row: Row, baseline: str) -> tuple[Any, ...]:
    names = order((row["model"], row["method"], row["label"], row["compression_factor"], row["train_seed"]))
    return row["method"] != baseline, *names, row["decoding"], row["dataset"] == AVERAGE, row["dataset"]


def _warnings(report: Report, rows: Sequence[Row]) -> list[str]:
    """What a reader must know before comparing two cells of the accuracy table."""
    cells = [row for row in rows if row["dataset"] != AVERAGE]
    counts = {
        dataset: {row["n"] for row in cells if row["dataset"] == dataset} for dataset in datasets_of(cells)
    }
    notes = [
        f"Incomplete: {system_name(row, report['rows'])} on {row['dataset']} has {row['samples']} of "
        f"{_expected(row)} records."
        for row in cells
        if row["samples"] < _expected(row)
    ]
    notes += [
        f"The systems answered different numbers of questions of {dataset}: {', '.join(map(str, sorted(found)))}."
        for dataset, found in counts.items()
        if len(found) > 1
    ]
    if any(row["n"] < FEW for row in cells):
        notes.append(f"Fewer than {FEW} questions somewhere: there ± is too narrow, and 0 at 0% or 100%; "
                     "`accuracy_interval` in report.json is Wilson's.")  # fmt: skip
    return notes


def _expected(row: Row) -> int:
    """Records of a cell that has all its questions, seeds and runs."""
    return int(row["n"] * len(row["seeds"]) * len(row.get("train_seeds", [None])))


def _runs_note(rows: Sequence[Row]) -> str:
    """How many training runs the pooled rows stand for."""
    counts = sorted({len(row["train_seeds"]) for row in rows})
    return f"Means over {' or '.join(map(str, counts))} training runs; ± takes a question's answers of all runs as one."


def _facts(report: Report) -> list[tuple[str, str]]:
    """The header: data, seeds, then whatever the provenance says, one line a key."""
    rows = [row for row in report["rows"] if row["dataset"] != AVERAGE]
    sizes = {
        dataset: sorted({row["n"] for row in rows if row["dataset"] == dataset})
        for dataset in datasets_of(rows)
    }
    data = ", ".join(f"{dataset} ({'/'.join(map(str, n))} questions)" for dataset, n in sizes.items())
    decodings = sorted({row["decoding"] for row in rows})
    seeds = {name: _union(row["seeds"] for row in rows if row["decoding"] == name) for name in decodings}
    facts = [("data", data), ("decoding seeds", "; ".join(f"{name}: {text}" for name, text in seeds.items()))]
    if runs := _union([row["train_seed"]] for row in rows if row["train_seed"] is not None):
        facts.append(("training seeds", runs))
    facts += [(key, _flat(value)) for key, value in report["provenance"].items()]
    return [*facts, ("intervals", f"{CLUSTERED} Tables of seeds and runs say what theirs is.")]


def _mark(row: Row | None, datasets: Sequence[str]) -> str:
    """A dagger on an average that leaves out a dataset of the table."""
    partly = row is not None and row["dataset"] == AVERAGE and len(row["datasets"]) < len(datasets) - 1
    return " †" if partly else ""


def _partly(body: Iterable[Sequence[str]]) -> list[str]:
    return [PARTLY] if any("†" in text for line in body for text in line) else []


def _union(groups: Iterable[Sequence[Any]]) -> str:
    return ", ".join(map(str, sorted({value for group in groups for value in group})))


def _flat(value: Any) -> str:
    """A provenance value on one line: `torch 2.8.0, peft 0.18`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_flat, value))
    return BLANK if value is None else str(value)


def _with_average(datasets: Sequence[str]) -> list[str]:
    return [*datasets, AVERAGE] if len(datasets) > 1 else list(datasets)
