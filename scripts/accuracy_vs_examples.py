"""Accuracy on test sets against training examples seen, over the stages of a training, from their committed answers.

    python scripts/accuracy_vs_examples.py results/smollm2-135m/stages.json --output results/smollm2-135m

The file names the points: {"curves": {NAME: [{"examples": 16000, "records": FOLDER, "system": {...}}, ...]}}. FOLDER is
relative to the file, and the system is keys of its records with their values: method, label, compression_factor. Only
questions that every point has answered count. Writes accuracy_vs_examples.png and accuracy_vs_examples.json: for each
point the mean over the data sets, and half of its 95% interval over questions.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import files
from colar.evaluation import records, summary
from colar.evaluation.records import Record
from colar.show import canvas

Z = 1.96
KEYS = {"examples", "records", "system"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", type=Path, help="JSON file of the points")
    parser.add_argument("--output", required=True, help="folder for picture and numbers")
    args = parser.parse_args()
    output = files.require_writable(args.output)
    found = measure(read(args.stages), args.stages)
    files.write_json(output / "accuracy_vs_examples.json", found)
    print(canvas.save(draw(found), output / "accuracy_vs_examples.png"))


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The curves that the file names. SystemExit where a point lacks a key, or has another."""
    curves: dict[str, list[dict[str, Any]]] = files.read_json(path)["curves"]
    for name, points in curves.items():
        for point in points:
            if set(point) != KEYS:
                raise SystemExit(f"{path}: a point of {name!r} has {sorted(point)}, it needs {sorted(KEYS)}")
    return curves


def measure(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> dict[str, Any]:
    """Each curve's points {examples, accuracy, half_interval, length}, and how many questions of each set count."""

    @functools.cache
    def all_of(folder: str) -> list[dict[str, Any]]:
        return records.load_records(records.find_records([path.parent / folder]))

    answers = {
        name: [chosen(all_of(point["records"]), point, path) for point in points]
        for name, points in curves.items()
    }
    each = [{(row["dataset"], row["id"]) for row in rows} for points in answers.values() for rows in points]
    shared = set.intersection(*each)
    if not shared:
        raise SystemExit(f"{path}: no question was answered at all of its points")
    found: dict[str, list[dict[str, float]]] = {}
    for name, points in curves.items():
        found[name] = []
        for point, rows in zip(points, answers[name], strict=True):
            kept = [row for row in rows if (row["dataset"], row["id"]) in shared]
            found[name].append({"examples": point["examples"], **average(kept)})
    datasets = sorted({dataset for dataset, _ in shared})
    counts = {name: sum(dataset == name for dataset, _ in shared) for name in datasets}
    return {"questions": counts, "curves": found}


def chosen(rows: Sequence[Record], point: Mapping[str, Any], path: Path) -> list[Record]:
    """The greedy answers of one system. SystemExit where there are none."""
    wanted = {"decoding": "greedy", **point["system"]}
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not found:
        raise SystemExit(f"{path}: {point['records']} has no answers of {wanted}")
    return found


def average(rows: Sequence[Record]) -> dict[str, float]:
    """The macro-average over data sets of one system."""
    cells = records.by_cell(rows)
    (row,) = summary.averages([summary.summarise(cell, members) for cell, members in cells.items()], cells)
    return {"accuracy": row.accuracy, "half_interval": Z * row.accuracy_se, "length": row.length}


def draw(found: Mapping[str, Any]) -> Any:
    figure = canvas.figure(6.4, 3.8)
    axes = figure.subplots()
    marks = []
    for index, points in enumerate(found["curves"].values()):
        colour, marker = canvas.style(index)
        marks.append(
            axes.errorbar(
                [point["examples"] for point in points],
                [100 * point["accuracy"] for point in points],
                yerr=[100 * point["half_interval"] for point in points],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.3,
                elinewidth=0.8,
                capsize=2,
            )
        )
    many = len(found["questions"])
    title = f"mean of {many} test sets" if many > 1 else next(iter(found["questions"]))
    canvas.dress(axes, title, "training examples seen", "accuracy (%)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    canvas.legend(axes, marks, list(found["curves"]), fontsize=8, loc="upper left")
    return figure


if __name__ == "__main__":
    main()
