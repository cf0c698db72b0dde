"""Accuracy against training rows seen, from the histories of one or more runs, or their checkpoints tested.

    python scripts/accuracy_vs_rows.py tiny=runs/curve/colar SmolLM2=runs/smollm2-135m/colar --output results/curves

A run is its folder (`history.json`, `recipe.json`), or the file of `scripts/checkpoint_accuracy.py`: tests instead of
validation. Writes accuracy_vs_rows.png (a panel for each run or test, a curve for each per-request value) and
accuracy_vs_rows.json, the numbers in it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from colar import files
from colar.show import canvas


def read(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Curve name -> points {rows, accuracy}."""
    training = files.read_json(folder / "recipe.json")["training"]
    rows_per_update = training["per_device_train_batch_size"] * training.get("gradient_accumulation_steps", 1)
    curves: dict[str, list[dict[str, float]]] = {}
    for logged in files.read_json(folder / "history.json"):
        accuracies = {key: value for key, value in logged.items() if key.startswith("eval_accuracy")}
        for key, accuracy in accuracies.items():
            name, _, variant = key.partition("/")
            # Beside accuracies of several variants (eval_accuracy/c=2) stands their mean, which is no curve of its own.
            is_mean = not variant and len(accuracies) > 1
            if name != "eval_accuracy" or is_mean:
                continue
            label = variant.replace("compression_factor=", "c = ").replace("/", ", ") or "accuracy"
            point = {"rows": logged["step"] * rows_per_update, "accuracy": accuracy}
            curves.setdefault(label, []).append(point)
    if not curves:
        raise SystemExit(f"{folder}/history.json has no validation in it")
    return curves


def draw(runs: dict[str, dict[str, list[dict[str, float]]]]) -> Any:
    figure = canvas.figure(4.4 * len(runs), 3.4)
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    for axes, (name, curves) in zip(panels, runs.items(), strict=True):
        for index, (label, points) in enumerate(curves.items()):
            colour, marker = canvas.style(index)
            x = [point["rows"] for point in points]
            y = [100 * point["accuracy"] for point in points]
            axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.3, label=label)
        canvas.dress(axes, name, "training rows seen", "accuracy (%)" if axes is panels[0] else "")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.legend(fontsize=7, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--output", required=True, help="folder for picture and numbers")
    args = parser.parse_args()
    runs = {}
    for text in args.runs:
        name, _, folder = text.rpartition("=")
        title = name if name else folder
        # A panel for each test of checkpoint_accuracy.json, or one for the validation of a run.
        if folder.endswith(".json"):
            for dataset, curves in files.read_json(folder).items():
                runs[f"{title}, {dataset}"] = curves
        else:
            runs[title] = read(Path(folder))
    output = files.require_writable(args.output)
    files.write_json(output / "accuracy_vs_rows.json", runs)
    print(canvas.save(draw(runs), output / "accuracy_vs_rows.png"))


if __name__ == "__main__":
    main()
