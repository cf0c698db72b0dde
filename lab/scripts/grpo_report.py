"""What reinforcement gained over its controls, and how reward and length went, over training seeds.

    python lab/scripts/grpo_report.py runs/table2 --seeds 0 1 2 --output results/toy/grpo

Reads what lab/reproduce/table2.sh leaves in its folder: the records of each system's test (`test/<name>-<seed>`) and
the history of each run that was reinforced. Writes differences.md (paired differences on the same questions, and what
latents alone explore), differences.json (the same, and each run's start, end and validations) and curves.png (reward,
accuracy on validation rows, length, groups without spread; a line a training seed). The committed differences.md also
has tables of the runs, of commit ee806d3b.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from colar import files
from colar.evaluation import picture, stats
from colar.evaluation.provenance import collect_provenance
from colar.evaluation.records import RecordFiles, checked, cluster_of
from colar.training import run_folder
from colar.training.run_folder import RunFolder

NAMES = {
    "cot": "CoT",
    "nll": "CoLaR-NLL",
    "dl": "CoLaR-DL",
    "seq": "sequential",
    "rl": "CoLaR-NLL-RL",
    "dr": "RL w/o average",
    "dlrl": "CoLaR-DL-RL",
    "seqrl": "sequential-RL",
    "continued": "SFT continued",
    "frozen-nll": "CoLaR-NLL, latents alone",
    "frozen-dl": "CoLaR-DL, latents alone",
    "frozen-seq": "sequential, thoughts alone",
    "frozen-warm": "sequential, thoughts alone at latent temperature 1.5",
}
"""What table2.sh calls its runs, and what a table does."""
PAIRS = (
    ("rl", "nll"),
    ("rl", "continued"),
    ("continued", "nll"),
    ("dr", "nll"),
    ("rl", "dr"),
    ("dlrl", "dl"),
    ("rl", "dlrl"),
    ("rl", "cot"),
    ("seq", "nll"),
    ("seqrl", "seq"),
    ("seqrl", "rl"),
)
IMITATED = ("nll", "seq", "continued")
PANELS = ("reward", "eval_accuracy", "latents/mean_length", "frac_reward_zero_std")
ALONE = "frozen"
"""What the runs are called in which nothing but thoughts is drawn, to see how much that explores."""
REINFORCED = ("rl", "dr", "dlrl", "seqrl")
REINFORCED += ("frozen-nll", "frozen-dl", "frozen-seq", "frozen-warm")


def difference(one: dict[int, list[Any]], other: dict[int, list[Any]], key: str) -> dict[str, Any]:
    """Mean difference of `key` over all training seeds, clustered by question, and that of each seed."""

    def side(system: dict[int, list[Any]]) -> tuple[list[float], list[str]]:
        records = [record for seed in system for record in system[seed]]
        return [float(record[key]) for record in records], [cluster_of(record) for record in records]

    pooled = stats.paired_difference(*side(one), *side(other))
    by_seed = [
        fmean(float(r[key]) for r in one[seed]) - fmean(float(r[key]) for r in other[seed]) for seed in one
    ]
    return {
        "difference": pooled.mean,
        "interval": pooled.interval,
        "n": pooled.n,
        "by_train_seed": by_seed,
        "train_seeds_interval": stats.t_interval(by_seed),
    }


def compare(tests: dict[str, dict[int, list[Any]]]) -> list[dict[str, Any]]:
    """One row for each pair and decoding that there are records of."""
    rows = []
    for one, other in PAIRS:
        if one not in tests or other not in tests:
            continue
        for decoding in ("greedy", "sampled"):
            sides = [
                {
                    seed: [r for r in records if r["decoding"] == decoding]
                    for seed, records in tests[name].items()
                }
                for name in (one, other)
            ]
            if not all(records for side in sides for records in side.values()):
                continue
            rows.append(
                {
                    "system": NAMES[one],
                    "baseline": NAMES[other],
                    "decoding": decoding,
                    "accuracy": difference(*sides, "correct"),
                    "length": difference(*sides, "length"),
                }
            )
    return rows


def markdown(rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], seeds: Sequence[int]) -> str:
    lines = [
        "# Paired differences",
        "",
        f"Training seeds {', '.join(map(str, seeds))}. Points of accuracy and embeddings of length, on the same "
        "questions; in brackets the 95% interval clustered by question, over all training seeds. The last column is "
        "half the t interval over training seeds.",
        "",
        "| system | against | decoding | accuracy | #L | training seeds |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        accuracy, length = row["accuracy"], row["length"]
        spread = accuracy["train_seeds_interval"]
        lines.append(
            f"| {row['system']} | {row['baseline']} | {row['decoding']} | {_shown(accuracy, 100, 1)} | "
            f"{_shown(length, 1, 2)} | {'' if spread is None else f'± {100 * spread:.1f}'} |"
        )
    lines += [
        "",
        "# Latents alone",
        "",
        "Stops and tokens fixed: what is explored by drawing latents. All updates.",
        "",
        "| run | seed | groups | with spread | largest gradient |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        if "spread" in run:
            counts = f"{run['groups']} | {run['spread']} | {run['gradient']:.2g}"
            lines.append(f"| {run['name']} | {run['seed']} | {counts} |")
    return "\n".join(lines) + "\n"


def _shown(found: dict[str, Any], scale: float, digits: int) -> str:
    interval = found["interval"]
    shown = (
        "" if interval is None else " [{:+.{d}f}, {:+.{d}f}]".format(*(scale * v for v in interval), d=digits)
    )
    return f"{scale * found['difference']:+.{digits}f}{shown}"


def series(history: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(row["step"], row[key]) for row in history if key in row]


def ends(history: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Means over the first and the last fifth of what was logged."""
    values = [value for _, value in series(history, key)]
    fifth = max(len(values) // 5, 1)
    return [fmean(values[:fifth]), fmean(values[-fifth:])]


def explored(history: Sequence[dict[str, Any]], questions: int) -> dict[str, Any]:
    """Groups sampled, those with spread in their rewards, and the largest gradient of a run that logs each update."""
    flat = [share for _, share in series(history, "frac_reward_zero_std")]
    return {
        "groups": questions * len(flat),
        "spread": round(questions * sum(1 - share for share in flat)),
        "gradient": max(norm for _, norm in series(history, "grad_norm")),
    }


def seconds(folder: Path) -> float:
    """Wall-clock of a run, validations included."""
    last = RunFolder(folder).last_resume_state()
    return 0.0 if last is None else float(run_folder.clock_of(run_folder.read_state(last))["seconds"])


def questions(folder: Path) -> int:
    """Questions of a generation of a run."""
    recipe = files.read_json(folder / "recipe.json")
    training, grpo = recipe["training"], recipe["grpo"]
    batches = grpo["steps_per_generation"] or training["gradient_accumulation_steps"]
    return int(training["per_device_train_batch_size"] * batches // grpo["num_generations"])


def there(folder: Path, name: str, seeds: Sequence[int]) -> bool:
    """Whether all seeds of a run have a history."""
    return all((folder / f"{name}-{seed}" / "history.json").exists() for seed in seeds)


def read(folder: Path, name: str, seeds: Sequence[int]) -> dict[int, list[Any]]:
    """The histories of a run by training seed."""
    return {seed: files.read_json(folder / f"{name}-{seed}" / "history.json") for seed in seeds}


def loaded(path: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    return [record for _, record in checked(RecordFiles([path]))]


def draw(histories: dict[str, dict[int, list[Any]]]) -> Any:
    """A panel for each quantity, a colour for each system, a line for each training seed."""
    figure = picture.new_figure(12.4, 3.4)
    for axes, key in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for index, (name, runs) in enumerate(histories.items()):
            for number, history in enumerate(runs.values()):
                points = series(history, key)
                if points:
                    axes.plot(*zip(*points, strict=True), color=picture.COLOURS[index], linewidth=1.1, alpha=0.75,
                              marker="o" if key.startswith("eval") else None, markersize=3,
                              label=None if number else NAMES[name])  # fmt: skip
        picture.dress(axes, key, "update", size=8)
    # Below the panels: in one of them it would lie on its lines.
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=7, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what lab/reproduce/table2.sh left")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="training seeds")
    parser.add_argument("--output", required=True, help="folder for differences and picture")
    args = parser.parse_args()
    output, folder = files.require_writable(args.output), args.folder
    tests = {
        name: {seed: loaded(folder / "test" / f"{name}-{seed}" / "records.jsonl") for seed in args.seeds}
        for name in NAMES
        if all((folder / "test" / f"{name}-{seed}").is_dir() for seed in args.seeds)
    }
    histories = {
        name: read(folder, name, args.seeds) for name in REINFORCED if there(folder, name, args.seeds)
    }
    runs = [
        {"name": NAMES[name], "seed": seed, "seconds": seconds(folder / f"{name}-{seed}")}
        | {key: ends(history, key) for key in PANELS}
        | {"validations": series(history, "eval_accuracy")}
        | (explored(history, questions(folder / f"{name}-{seed}")) if name.startswith(ALONE) else {})
        for name, found in histories.items()
        for seed, history in found.items()
    ]
    imitated = [
        {"name": NAMES[name], "seed": seed, "seconds": seconds(folder / f"{name}-{seed}")}
        | {"eval_accuracy": [value for _, value in series(history, "eval_accuracy")]}
        for name in IMITATED
        if there(folder, name, args.seeds)
        for seed, history in read(folder, name, args.seeds).items()
    ]
    drawn = {name: found for name, found in histories.items() if not name.startswith(ALONE)}
    rows = compare(tests)
    found = {"differences": rows, "reinforced": runs, "fine_tuned": imitated}
    files.write_json(output / "differences.json", {"provenance": collect_provenance(), **found})
    files.write_text(output / "differences.md", markdown(rows, runs, args.seeds))
    print(picture.save(draw(drawn), output / "curves.png"))


if __name__ == "__main__":
    main()
