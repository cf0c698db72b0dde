"""Accuracy of every checkpoint that a run has kept, on test questions: a learning curve finer than its validation.

    python scripts/checkpoint_accuracy.py runs/smollm2-135m/colar-pairs --data multiarith arithmetic --limit 100

Greedy, with the per-request values and limits of the recipe's own validation. Goes into checkpoint_accuracy.json of the
run folder, point by point (run again, it goes on); `scripts/accuracy_vs_rows.py` draws it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from colar import files, progress, recipe
from colar.data import sources
from colar.data.example import Example
from colar.evaluation.evaluate import score
from colar.methods import registry
from colar.model import checkpoint


def questions(data: recipe.DataConfig, name: str, limit: int, data_dir: Path | None) -> list[Example]:
    """Test questions of a source; a generator's are held out, with the options that the recipe mixed it in with."""
    options = next((more.get("options", {}) for more in data.mixed_in if more["source"] == name), {})
    if name == data.source:
        options = data.options
    return sources.load(name, "test", data_dir=data_dir, limit=limit, skip_malformed=True, options=options)


def measure(run: recipe.Recipe, folder: Path, tests: dict[str, list[Example]]) -> dict[str, dict[str, float]]:
    """Dataset -> curve name -> accuracy, of one checkpoint."""
    lm, method = recipe.load_model(run)
    checkpoint.load_weights(lm, folder)
    method.prepare(lm, [])
    lm.merge()
    lm.eval()
    params = [registry.make_params(method, values) for values in run.validation.params]
    found = {}
    for name, examples in tests.items():
        scores = score(lm, method, examples, params, "greedy", run.validation.limits)
        of_params = {key: value for key, value in scores.items() if key.startswith("accuracy/")}
        found[name] = of_params or {"accuracy": scores["accuracy"]}  # a method may have no per-request values
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder (recipe.json, checkpoints/)")
    parser.add_argument("--data", nargs="+", required=True, help="sources (`colar data list`)")
    parser.add_argument("--limit", type=int, default=100, help="first so many questions of each")
    parser.add_argument("--data-dir", type=Path, help="folder with upstream files; else $COLAR_DATA_DIR")
    args = parser.parse_args()
    if not (args.run / "recipe.json").is_file():
        raise SystemExit(f"no run at {args.run}: there is no recipe.json in it")
    run = recipe.load(args.run / "recipe.json", ["--model.attn_implementation", "sdpa"])
    tests = {name: questions(run.data, name, args.limit, args.data_dir) for name in args.data}
    folders = sorted((args.run / "checkpoints").glob("checkpoint-*"), key=step_of)
    if not folders:
        raise SystemExit(f"{args.run}/checkpoints is empty: raise training.save_total_limit")
    path = args.run / "checkpoint_accuracy.json"
    curves: dict[str, Any] = files.read_json(path) if path.exists() else {}
    rows = run.training.per_device_train_batch_size * run.training.gradient_accumulation_steps
    for folder in progress.track(folders, "checkpoints"):
        todo = {name: tests[name] for name in tests if not known(curves, name, step_of(folder), args.limit)}
        for name, scores in (measure(run, folder, todo) if todo else {}).items():
            for key, accuracy in scores.items():
                curve = curves.setdefault(name, {}).setdefault(label(key), [])
                step = step_of(folder)
                curve.append(
                    {"step": step, "rows": step * rows, "accuracy": accuracy, "questions": args.limit}
                )
                curve.sort(key=lambda point: point["step"])
        files.write_json(path, curves)
    print(path)


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def known(curves: dict[str, Any], name: str, step: int, limit: int) -> bool:
    """Whether a checkpoint has been tested on a source; with another number of questions it is refused."""
    points = [point for curve in curves.get(name, {}).values() for point in curve if point["step"] == step]
    if any(point["questions"] != limit for point in points):
        raise SystemExit(
            f"{name} was measured with {points[0]['questions']} questions: the same --limit, please"
        )
    return bool(points)


def label(key: str) -> str:
    """accuracy/compression_factor=2/snap -> c = 2, snap; accuracy alone stays."""
    return key.removeprefix("accuracy/").replace("compression_factor=", "c = ").replace("/", ", ")


if __name__ == "__main__":
    main()
