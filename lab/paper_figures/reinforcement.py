"""The paper's Figure "validation accuracy and #L over steps" of reinforcement, with controls beside it.

Records are those that lab/scripts/grpo_report.py and lab/scripts/grpo_stability.py leave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from colar.evaluation import picture
from colar.evaluation.stats import Z95
from paper_figures.points import new_figure

Run = dict[str, Any]
"""`train_seed`, and `points`: [update, value] pairs."""

AXES = {"accuracy": (100.0, "validation accuracy (%)"), "length": (1.0, "#L on validation rows")}


def curve(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """A curve of one or several training runs, and their mean. ValueError where their updates differ."""
    if not runs:
        raise ValueError(f"no runs of {name}")
    updates = [[update for update, _ in run["points"]] for run in runs]
    if any(other != updates[0] for other in updates):
        raise ValueError(f"the runs of {name} were validated after different updates")
    mean = []
    for at_once in zip(*(run["points"] for run in runs), strict=True):
        mean.append([at_once[0][0], fmean(value for _, value in at_once)])
    return {"name": name, "runs": list(runs), "mean": mean}


def validated(reinforced: Sequence[Mapping[str, Any]], system: str) -> list[Run]:
    """Validation accuracy of a system's runs, from the `reinforced` of a differences.json."""
    found = [run for run in reinforced if run["name"] == system]
    return [{"train_seed": run["seed"], "points": run["validations"]} for run in found]


def as_long(fine_tuned: Sequence[Mapping[str, Any]], system: str, updates: Sequence[int]) -> list[Run]:
    """Validation accuracy of runs that took as long as reinforcement, at the same shares of the time."""
    found = [run for run in fine_tuned if run["name"] == system]
    runs = []
    for run in found:
        pairs = zip(updates, run["eval_accuracy"], strict=True)
        runs.append({"train_seed": run["seed"], "points": [list(pair) for pair in pairs]})
    return runs


def logged(history: Sequence[Mapping[str, Any]], key: str, train_seed: int = 0) -> list[Run]:
    """One run's values of `key`, from its history."""
    points = [[row["step"], row[key]] for row in history if key in row]
    return [{"train_seed": train_seed, "points": points}]


@picture.without_mathematics
def draw(data: dict[str, Any]) -> Any:
    """A panel for each of `panels` (`title`, `key`: accuracy or length, `rows` validated on, `curves`)."""
    panels = data["panels"]
    figure = new_figure(4.2 * len(panels), 4.2)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        scale, name = AXES[panel["key"]]
        for number, each in enumerate(panel["curves"]):
            _draw_curve(axes, each, number, scale, panel["rows"] if panel["key"] == "accuracy" else None)
        picture.dress(axes, panel["title"], "update", name)
        axes.set_xlim(left=0)
        # Below its panel: the panels have different curves.
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))
        if panel["key"] == "accuracy":
            axes.set_ylim(0, 102)
    figure.supxlabel(
        "thick: mean of the training runs, thin: each; shaded: 95% interval over the validation rows",
        fontsize=8, color=picture.INK,
    )  # fmt: skip
    return figure


def _draw_curve(axes: Any, each: dict[str, Any], number: int, scale: float, rows: int | None) -> None:
    colour, _ = picture.style(number)
    for run in each["runs"]:
        # A single run is its own mean, which is drawn below.
        if len(each["runs"]) > 1:
            x, y = zip(*run["points"], strict=True)
            axes.plot(x, [scale * value for value in y], color=colour, linewidth=0.8, alpha=0.5)
    x, y = zip(*each["mean"], strict=True)
    axes.plot(
        x, [scale * value for value in y], color=colour, linewidth=2, label=f"{each['name']} ({_count(each)})"
    )
    if rows is not None:
        # Runs are validated on the same rows: three of them do not make three times as many.
        bounds = [wilson(value, rows) for value in y]
        low = [scale * bound[0] for bound in bounds]
        high = [scale * bound[1] for bound in bounds]
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)


def wilson(p: float, n: int) -> tuple[float, float]:
    """95% score interval of a proportion of `n` rows (Wilson 1927): with a width where all are right, or none."""
    z2 = Z95**2 / n
    centre = (p + z2 / 2) / (1 + z2)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n)) / (1 + z2)
    return centre - half, centre + half


def _count(each: dict[str, Any]) -> str:
    n = len(each["runs"])
    return "1 run" if n == 1 else f"{n} runs"
