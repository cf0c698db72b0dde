"""What most of the figures are made of: a system's accuracy and #L, with intervals, and those of its training runs."""

from __future__ import annotations

import math
from typing import Any

from colar.evaluation import picture
from colar.evaluation.report_rows import AVERAGE, Report, ReportRow
from colar.evaluation.stats import Z95

INTERVALS = "bars: 95% interval over questions; dots: training runs"


def new_figure(width: float, height: float) -> Any:
    """An empty figure of `width` x `height` inches, with room for letters that a low resolution makes taller."""
    made = picture.new_figure(width, height)
    made.get_layout_engine().set(h_pad=0.08)
    return made


def points(
    report: Report, model: str, method: str, label: str, dataset: str = AVERAGE
) -> list[dict[str, Any]]:
    """One system's greedy points by compression factor, training runs pooled. ValueError where there is none.

    Keys: `c` (None for a system without a factor), `accuracy`, `accuracy_half`, `length`, `length_half`,
    `reference_length` (mean of ceil(L_r / c)), `n` (questions) and `runs` (`train_seed`, `accuracy`, `length`).
    """

    def wanted(row: ReportRow) -> bool:
        system = row.system
        asked = (model, method, label, dataset, "greedy")
        return (system.model, system.method, system.note, row.dataset, system.decoding) == asked

    found = []
    for row in report.shown_rows:
        if wanted(row):
            # From `rows`, where each training run stands by itself; `shown_rows` may be pooled.
            runs = [run for run in report.rows if wanted(run) and _factor(run) == _factor(row)]
            found.append(_point(row, runs))
    if not found:
        raise ValueError(f"the report has no greedy rows of {model} {method} {label!r} on {dataset}")
    return sorted(found, key=lambda point: point["c"] or 0)


def errors(
    axes: Any, x: list[float], found: list[dict[str, Any]], key: str, scale: float, colour: str
) -> None:
    """The intervals of points at `x`, and the training runs of each as dots."""
    half = [None if point[f"{key}_half"] is None else scale * point[f"{key}_half"] for point in found]
    bars(axes, x, [scale * point[key] for point in found], half, colour)
    for place, point in zip(x, found, strict=True):
        draw_runs(axes, place, [scale * run[key] for run in point["runs"]], colour)


def draw_runs(axes: Any, x: float, values: list[float], colour: str) -> None:
    """The training runs of a point as dots: nothing where there is one alone, which is the point itself."""
    if len(values) > 1:
        axes.plot([x] * len(values), values, ".", color=colour, markersize=4.5, markeredgecolor="white",
                  markeredgewidth=0.4, zorder=4)  # fmt: skip


def bars(axes: Any, x: list[float], y: list[float], half: list[float | None], colour: str) -> None:
    """Error bars alone; none where the interval is unknown."""
    # NaN draws nothing: a bar of 0 would still have its caps.
    known = [math.nan if value is None else value for value in half]
    axes.errorbar(
        x, y, yerr=known, fmt="none", ecolor=colour, elinewidth=1.1, capsize=2.5, alpha=0.8, zorder=3
    )


def legend_below(figure: Any, axes: Any, caption: str, columns: int = 4) -> None:
    """The legend of `axes` under all panels, below a caption: in one of them it would lie on its curves."""
    handles, names = axes.get_legend_handles_labels()
    made = figure.legend(
        handles, names, title=caption, title_fontsize=8, loc="outside lower center", ncols=columns, fontsize=8.5,
        frameon=False, labelcolor=picture.INK,
    )  # fmt: skip
    made.get_title().set_color("#555555")


def _factor(row: ReportRow) -> float | None:
    return row.system.speed


def _point(row: ReportRow, runs: list[ReportRow]) -> dict[str, Any]:
    by_run = []
    for run in runs:
        by_run.append({"train_seed": run.system.train_seed, "accuracy": run.accuracy, "length": run.length})
    return {
        "c": _factor(row),
        "accuracy": row.accuracy,
        "accuracy_half": _half(row.accuracy_se),
        "length": row.length,
        "length_half": _half(row.length_se),
        "reference_length": row.reference_length,
        "n": row.n,
        "runs": by_run,
    }


def _half(error: float | None) -> float | None:
    return None if error is None else Z95 * error
