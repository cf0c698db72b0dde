"""Pictures of a report and of a training run: accuracy against reasoning length, and learning curves.

Both take plain rows (dicts), as in `report.json` and in the Trainer's `state.log_history`, and write one PNG.
Bars are 95% intervals, 1.96 standard errors clustered by question, as in the tables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colar.analysis import canvas
from colar.analysis.naming import AVERAGE, Row, curve_name, datasets_of, order, point_name
from colar.ops.stats import Z95

MAX_DATASETS = 4
_CAPTION = "bars: 95% interval, ±1.96 standard errors clustered by question"

# Which panel comes first, by what its name contains; keys that match nothing follow in alphabetical order.
_PANELS = (
    "loss",
    "reward",
    "accuracy",
    "length",
    "sigma",
    "entropy",
    "kl",
    "clip",
    "grad_norm",
    "learning_rate",
)
_BOOKKEEPING = ("runtime", "per_second", "total_flos", "num_tokens", "num_input_tokens", "memory")
_AXES = {"step", "epoch", "train_loss"}  # train_loss is the mean over the run, logged once at its end


def accuracy_vs_length(rows: Iterable[Row], path: str | Path) -> Path:
    """Draw accuracy (%) against reasoning length, one curve per system over its compression factors.

    `rows` are rows of one report; those of one curve share model, method, label and decoding, and each training
    run of it is a line of its own. One dataset fills one panel; of several, the first four by name stand
    beside a large panel with the macro-average. Returns the path. Raises ValueError without rows.
    """
    rows = sorted(rows, key=lambda row: order((*_curve(row), row["train_seed"], row["compression_factor"])))
    if not rows:
        raise ValueError("accuracy_vs_length needs at least one row")
    styles = {curve: canvas.style(index) for index, curve in enumerate(dict.fromkeys(map(_curve, rows)))}
    datasets = datasets_of(rows)
    figure, panels = _panels(datasets)
    for axes, dataset, main in panels:
        shown = [row for row in rows if row["dataset"] == dataset]
        _draw_curves(axes, shown, styles)
        questions = sorted({row["n"] for row in shown})
        count = "" if not main or dataset == AVERAGE else f", {' or '.join(map(str, questions))} questions"
        canvas.dress(axes, f"{dataset}{count}", size=9 if main else 8)
        if main:
            axes.set_xlabel(
                f"reasoning length, embeddings emitted (#L)\n{_CAPTION}", fontsize=9, color=canvas.INK
            )
            axes.set_ylabel("accuracy (%)", fontsize=9, color=canvas.INK)
    canvas.settle(figure)
    for axes, dataset, main in panels:
        shown = [row for row in rows if row["dataset"] == dataset]
        labels = _names(shown, rows, styles) if main else []
        canvas.place(axes, labels + _tags(shown, styles, 8 if main else 6.5), map(_point, shown))
    return canvas.save(figure, path)


def learning_curves(history: Iterable[Mapping[str, Any]], path: str | Path, title: str) -> Path:
    """Draw every quantity that a run logged, one small panel each: losses, validation, length, norms, rates.

    `history` is the Trainer's `log_history`: dicts with `step`, `epoch` and numbers by name. `eval_x` is
    drawn with points into the panel of `x`, or gets its own. Timing, token counts and values that are not finite are
    left out. Returns the path. Raises ValueError when nothing is left.
    """
    series = _series(history)
    if not series:
        raise ValueError("learning_curves needs a history with at least one number per step")
    names = sorted({_panel_of(key) for key in series}, key=_importance)
    columns = min(len(names), 3 if len(names) <= 9 else 4)
    lines = math.ceil(len(names) / columns)
    figure = canvas.figure(max(3.1 * columns, 4.2), 2.2 * lines + 0.4)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=canvas.INK)
    grid = figure.subplots(lines, columns, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(names):
            axes.set_axis_off()
            continue
        last_of_column = index + columns >= len(names)
        _draw_series(axes, names[index], series)
        canvas.dress(axes, names[index], x="step" if last_of_column else "", size=8)
        if names[index] != "learning_rate":
            continue
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        axes.yaxis.get_offset_text().set_fontsize(7)
    return canvas.save(figure, path)


def _curve(row: Row) -> tuple[Any, ...]:
    return row["model"], row["method"], row["label"], row["decoding"]


def _point(row: Row) -> tuple[float, float]:
    return row["length"], 100 * row["accuracy"]


def _panels(datasets: Sequence[str]) -> tuple[Any, list[tuple[Any, str, bool]]]:
    """The figure, and (axes, dataset, whether it is the main panel) of each panel."""
    if len(datasets) <= 1:
        figure = canvas.figure(7, 4.6)
        return figure, [(figure.subplots(), (*datasets, AVERAGE)[0], True)]
    small = datasets[:MAX_DATASETS]
    columns = math.ceil(len(small) / 2)
    figure = canvas.figure(6 + 2.6 * columns, 4.8)
    grid = figure.add_gridspec(2, 1 + columns, width_ratios=[6 / 2.6, *[1] * columns])
    panels = [(figure.add_subplot(grid[:, 0]), AVERAGE, True)]
    for index, dataset in enumerate(small):
        panels.append((figure.add_subplot(grid[index % 2, 1 + index // 2]), dataset, False))
    return figure, panels


def _draw_curves(axes: Any, rows: Sequence[Row], styles: Mapping[tuple[Any, ...], tuple[str, str]]) -> None:
    lines: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        lines[(*_curve(row), row["train_seed"])].append(row)
    for key, points in lines.items():
        colour, marker = styles[key[:-1]]
        bars = [0 if row["accuracy_se"] is None else 100 * Z95 * row["accuracy_se"] for row in points]
        x, y = zip(*map(_point, points), strict=True)
        axes.errorbar(x, y, yerr=bars, fmt="none", ecolor=colour, elinewidth=1, alpha=0.45)
        axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.4, markeredgecolor="white")
    axes.margins(x=0.14, y=0.12)


def _names(
    shown: Sequence[Row], rows: Sequence[Row], styles: Mapping[tuple[Any, ...], tuple[str, str]]
) -> list[canvas.Label]:
    """One bold label per curve, near its ends rather than its middle."""
    points: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in shown:
        points[_curve(row)].append(row)
    labels = []
    decodings = {row["decoding"] for row in rows}
    for curve, members in points.items():
        name = curve_name(members[0], rows) + (f", {curve[-1]}" if len(decodings) > 1 else "")
        anchors = [_point(member) for member in (members[0], members[-1], *members[1:-1])]
        labels.append(canvas.Label(name, anchors, styles[curve][0], 9.5, bold=True))
    return labels


def _tags(
    shown: Sequence[Row], styles: Mapping[tuple[Any, ...], tuple[str, str]], size: float
) -> list[canvas.Label]:
    """The speed beside each point that has one."""
    return [
        canvas.Label(point_name(row), [_point(row)], styles[_curve(row)][0], size)
        for row in shown
        if point_name(row)
    ]


def _series(history: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(step, value) pairs by key, in the order logged; bookkeeping and non-finite values left out."""
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in history:
        for key, value in entry.items():
            if key in _AXES or any(word in key for word in _BOOKKEEPING) or "step" not in entry:
                continue
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                series[key].append((entry["step"], value))
    return dict(series)


def _panel_of(key: str) -> str:
    return key.removeprefix("eval_")


def _importance(name: str) -> tuple[int, int, str]:
    """Sort key of a panel: its group in `_PANELS`, the plain name of the group before its variants."""
    rank = next((index for index, word in enumerate(_PANELS) if word in name.lower()), len(_PANELS))
    return rank, int(name not in _PANELS), name


def _draw_series(axes: Any, panel: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Training as a line (many points: faint, with a running mean over it), validation as points on a line."""
    colour, _ = canvas.style(0)
    both = panel in series and f"eval_{panel}" in series
    values = [value for key in (panel, f"eval_{panel}") for _, value in series.get(key, ())]
    if panel in series:
        x, y = zip(*series[panel], strict=True)
        many = len(x) > 60
        axes.plot(x, y, color=colour, linewidth=0.8 if many else 1.4, alpha=0.35 if many else 1,
                  marker="o" if len(x) == 1 else None, markersize=4, label=None if many else "training")  # fmt: skip
        if many:
            axes.plot(x, _running_mean(y), color=colour, linewidth=1.5, label="training, running mean")
    if f"eval_{panel}" in series:
        x, y = zip(*series[f"eval_{panel}"], strict=True)
        axes.plot(x, y, color=canvas.style(1)[0], marker="o", markersize=4, linewidth=1.4, label="validation")
    if both or panel not in series:
        axes.legend(fontsize=7, frameon=False, loc="best")
    if min(values) > 0 and max(values) > 100 * min(values) and panel != "learning_rate":
        axes.set_yscale("log")


def _running_mean(values: Sequence[float]) -> list[float]:
    """Exponential mean with the window of a twentieth of the run, corrected for its start as Adam's is."""
    decay, mean, weight, smooth = 1 - 20 / len(values), 0.0, 0.0, []
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smooth.append(mean / weight)
    return smooth
