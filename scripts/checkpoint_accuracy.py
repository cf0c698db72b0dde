"""Accuracy of every checkpoint that a run has kept, on test questions: a learning curve finer than its validation.

    python scripts/checkpoint_accuracy.py runs/smollm2-135m/colar-pairs --data multiarith arithmetic --limit 100

Greedy, with the per-request values and limits of the recipe's own validation. Writes checkpoint_accuracy.json in the
run folder, point by point (run again, it resumes); `scripts/accuracy_vs_rows.py` draws it.
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
    """Test questions of a source, with the options that the recipe trained on it with."""
    options = {}
    if name == data.source:
        options = data.options
    else:
        for more in data.mixed_in:
            if more["source"] == name:
                options = more.get("options", {})
                break
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
        curves = {key: value for key, value in scores.items() if key.startswith("accuracy/")}
        # A method may have no per-request values, and so one curve.
        found[name] = curves if curves else {"accuracy": scores["accuracy"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder (recipe.json, checkpoints/)")
    parser.add_argument("--data", nargs="+", required=True, help="sources (`colar data list`)")
    parser.add_argument("--limit", type=int, default=100, help="use the first N questions of each")
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
    rows_per_update = run.training.per_device_train_batch_size * run.training.gradient_accumulation_steps
    for folder in progress.track(folders, "checkpoints"):
        step = step_of(folder)
        todo = {name: tests[name] for name in tests if not known(curves, name, step, args.limit)}
        if not todo:
            continue
        for name, scores in measure(run, folder, todo).items():
            for key, accuracy in scores.items():
                point = {
                    "step": step,
                    "rows": step * rows_per_update,
                    "accuracy": accuracy,
                    "questions": args.limit,
                }
                curve = curves.setdefault(name, {}).setdefault(label(key), [])
                curve.append(point)
                # A checkpoint may be measured after a later one.
                curve.sort(key=lambda point: point["step"])
        # After every checkpoint: measuring one takes minutes.
        files.write_json(path, curves)
    print(path)


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def known(curves: dict[str, Any], name: str, step: int, limit: int) -> bool:
    """Whether a checkpoint has been tested on a source; SystemExit where it was with another number of questions."""
    points = []
    for curve in curves.get(name, {}).values():
        points += [point for point in curve if point["step"] == step]
    if any(point["questions"] != limit for point in points):
        raise SystemExit(
            f"{name} was measured with {points[0]['questions']} questions: give the same --limit"
        )
    return bool(points)


def label(key: str) -> str:
    """accuracy/compression_factor=2/snap -> c = 2, snap; accuracy alone stays."""
    return key.removeprefix("accuracy/").replace("compression_factor=", "c = ").replace("/", ", ")


if __name__ == "__main__":
    main()
