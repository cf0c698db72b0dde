"""Reinforced runs side by side: where each began, where it was best and where it ended, and what its metrics said.

    python lab/scripts/grpo_stability.py runs/grpo-stability/* --output results/toy/grpo-stability

Reads the history of each run folder. Writes report.md, report.json (the logged values that tables and pictures need, to
six digits) and curves.png (a panel for each run).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from colar import files
from colar.evaluation import picture
from colar.evaluation.provenance import collect_provenance

METRICS = (
    "latents/sigma",
    "frac_reward_zero_std",
    "clip_ratio/region_mean",
    "grad_norm",
    "sampling/logp_difference",
)
LOGGED = {"step", "eval_accuracy", "eval_length", "reward", "kl", *METRICS}
"""What report.json keeps of a history."""
LINES = {
    "eval_accuracy": "validation, greedy (grey: of the first run)",
    "reward": "reward, sampled",
    "frac_reward_zero_std": "groups without spread",
}
ACROSS = 6
"""Panels in a row of the picture."""


def series(history: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(update, value) wherever it was logged."""
    return [(row["step"], row[key]) for row in history if key in row]


def summary(name: str, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row: validation at the start, at its best and at the end; length and reward, first and last fifth."""
    accuracy = [value for _, value in series(history, "eval_accuracy")]
    length = [value for _, value in series(history, "eval_length")]
    reward = [value for _, value in series(history, "reward")]
    fifth = max(len(reward) // 5, 1)
    found = {key: [value for _, value in series(history, key)] for key in METRICS}
    return {
        "run": name,
        "updates": history[-1]["step"],
        "accuracy": {"first": accuracy[0], "best": max(accuracy), "last": accuracy[-1]},
        "length": {"first": length[0], "last": length[-1]},
        "reward": {"first": fmean(reward[:fifth]), "last": fmean(reward[-fifth:])},
        "median": {key: median(values) for key, values in found.items() if values},
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "# Reinforcement, one change at a time",
        "",
        "Accuracy (%) and #L on the validation rows, greedy: before the first update, at its best, after the last. "
        "Reward: first and last fifth of a run. The rest are medians over what was logged. One training seed.",
        "",
        "| run | updates | accuracy | best | #L | reward | sigma | groups without spread | clipped | gradient |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        accuracy, length, reward, found = row["accuracy"], row["length"], row["reward"], row["median"]
        lines.append(
            f"| {row['run']} | {row['updates']} | {100 * accuracy['first']:.1f} → {100 * accuracy['last']:.1f} | "
            f"{100 * accuracy['best']:.1f} | {length['first']:.2f} → {length['last']:.2f} | "
            f"{reward['first']:.2f} → {reward['last']:.2f} | {found['latents/sigma']:.3f} | "
            f"{found['frac_reward_zero_std']:.2f} | {found['clip_ratio/region_mean']:.3f} | {found['grad_norm']:.2g} |"
        )
    return "\n".join(lines) + "\n"


def draw(histories: dict[str, list[dict[str, Any]]]) -> Any:
    """A panel for each run, with what lies between 0 and 1; the first run's validation, grey, in each of them."""
    rows = -(-len(histories) // ACROSS)
    figure = picture.new_figure(2.3 * ACROSS, 1.9 * rows + 0.4)
    panels = figure.subplots(rows, ACROSS, sharey=True, squeeze=False).flatten()
    first = series(next(iter(histories.values())), "eval_accuracy")
    for axes, (name, history) in zip(panels, histories.items(), strict=False):
        axes.plot(*zip(*first, strict=True), color="0.75", linewidth=3)
        for index, (key, label) in enumerate(LINES.items()):
            points = series(history, key)
            if points:
                axes.plot(*zip(*points, strict=True), color=picture.COLOURS[index], label=label,
                          linewidth=1.5 if key.startswith("eval") else 0.8)  # fmt: skip
        picture.dress(axes, name, "", size=8)
        axes.set_ylim(-0.04, 1.04)
    for axes in panels[len(histories) :]:
        axes.set_visible(False)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(LINES), fontsize=8, frameon=False)
    return figure


def _six_digits(value: Any) -> Any:
    """Enough to draw it again, in half the bytes."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, in the order of the table")
    parser.add_argument("--output", required=True, help="folder for table and picture")
    args = parser.parse_args()
    output = files.require_writable(args.output)
    histories = {run.name: files.read_json(run / "history.json") for run in args.runs}
    rows = [summary(name, history) for name, history in histories.items()]
    short = {
        name: [{key: _six_digits(value) for key, value in row.items() if key in LOGGED} for row in history]
        for name, history in histories.items()
    }
    found = {"provenance": collect_provenance(), "runs": rows, "histories": short}
    files.write_json(output / "report.json", found)
    files.write_text(output / "report.md", markdown(rows))
    drawn = picture.save(draw(histories), output / "curves.png")
    print(f"table    {output / 'report.md'}\npicture  {drawn}")


if __name__ == "__main__":
    main()
