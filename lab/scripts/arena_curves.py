"""Validation accuracy against problems seen, for every method of an arena: where each was when its budget ended.

    python lab/scripts/arena_curves.py runs/arena --output results/toy/arena

Reads what lab/reproduce/table1.sh leaves (`seed*/NAME`). Problems that the CoT weights saw count. Writes
learning_curves.png (a curve a method and speed, its mean over training seeds with the least and the most of them
shaded; CoLaR's ablations apart) and learning_curves.json, the numbers in it and each run's seconds of training.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from colar import files
from colar.evaluation import picture
from colar.training import run_folder
from colar.training.run_folder import RunFolder

Curves = dict[str, dict[int, list[float]]]
"""Name -> problems seen -> accuracy of each training seed."""

COMPARED = "compression_factor=2"
"""The speed at which ablations are drawn."""


def read(folder: Path) -> tuple[Curves, Curves]:
    """Curves of the methods, and of CoLaR's ablations with CoLaR itself."""
    methods: Curves = defaultdict(lambda: defaultdict(list))
    ablations: Curves = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("seed*/*/history.json")):
        recipe = files.read_json(path.parent / "recipe.json")
        data, training, label = recipe["data"], recipe["training"], recipe["label"]
        rows = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
        ablation = label and recipe["method"]["name"] == "colar"
        for logged in files.read_json(path):
            for key, value in logged.items():
                kind, _, speed = key.partition("/")
                if kind != "eval_accuracy" or (
                    not speed and any(k.startswith("eval_accuracy/") for k in logged)
                ):
                    continue
                seen = data["train_skip"] + logged["step"] * rows
                if not ablation:
                    name = path.parent.name + speed.replace("compression_factor=", " c=").replace(
                        "ratio=", " "
                    )
                    methods[name][seen].append(value)
                if speed == COMPARED and recipe["method"]["name"] == "colar":
                    ablations[label or "CoLaR"][seen].append(value)
    if not methods:
        raise SystemExit(f"{folder} holds no seed*/NAME/history.json")
    return methods, ablations


def seconds(folder: Path) -> dict[str, float]:
    """Wall-clock of each run, validation included, by its place in the folder."""
    taken = {}
    for path in sorted(folder.glob("seed*/*/recipe.json")):
        last = RunFolder(path.parent).last_checkpoint()
        if last is not None:
            clock = run_folder.clock_of(run_folder.read_state(last))
            taken[path.parent.relative_to(folder).as_posix()] = round(clock["seconds"], 1)
    return taken


def draw(panels: dict[str, Curves]) -> Any:
    figure = picture.new_figure(6.6 * len(panels), 4.2)
    for axes, (title, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        last = {name: fmean(points[max(points)]) for name, points in curves.items()}
        for index, name in enumerate(sorted(curves, key=lambda name: -last[name])):
            colour, marker = picture.style(index)
            seen = sorted(curves[name])
            shares = [[100 * value for value in curves[name][x]] for x in seen]
            thousands = [x / 1000 for x in seen]
            axes.plot(thousands, [fmean(y) for y in shares], color=colour, marker=marker, markersize=4, linewidth=1.3,
                      label=name)  # fmt: skip
            axes.fill_between(thousands, [min(y) for y in shares], [max(y) for y in shares], color=colour, alpha=0.12,
                              linewidth=0)  # fmt: skip
        picture.dress(axes, title, "problems seen (thousands)", "validation accuracy (%)")
        axes.set_ylim(0, 100)
        axes.set_xlim(left=0)
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what lab/reproduce/table1.sh left")
    parser.add_argument("--output", required=True, help="folder for picture and numbers")
    args = parser.parse_args()
    output = files.require_writable(args.output)
    methods, ablations = read(args.folder)
    found = {"methods": methods, "ablations": ablations, "seconds": seconds(args.folder)}
    files.write_json(output / "learning_curves.json", found)
    panels = {"methods": methods, "CoLaR and its ablations, c = 2": ablations}
    print(
        picture.save(
            draw({title: curves for title, curves in panels.items() if curves}),
            output / "learning_curves.png",
        )
    )


if __name__ == "__main__":
    main()
