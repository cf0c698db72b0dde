"""Pictures of a report and of a training run: accuracy against reasoning length, and learning curves.

Both take plain rows (dicts), as in `report.json` and in the Trainer's `state.log_history`, and write one PNG.
Bars are 95% intervals, 1.96 standard errors clustered by question, as in the tables.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from colar.ops.stats import Z95
from colar.show import canvas
from colar.show.naming import AVERAGE, Row, curve_name, datasets_of, order, point_name

Styles = Mapping[tuple[Any, ...], tuple[str, str]]  # curve -> colour, marker

MAX_DATASETS = 4

# Which panel comes first, by what its name, or a word in it, begins with; keys that match nothing follow in
# alphabetical order.
_PANELS = (
    "loss",
    "reward",
    "ce",
    "latent",
    "accuracy",
    "length",
    "sigma",
    "entropy",
    "kl",
    "clip",
    "grad_norm",
    "learning_rate",
)
_BOOKKEEPING = ("runtime", "per_second", "total_flos", "num_tokens", "num_input_tokens", "memory", "seconds")
_AXES = {"step", "epoch", "train_loss"}  # train_loss is the mean over the run, logged once at its end


def accuracy_vs_length(rows: Iterable[Row], path: str | Path) -> Path:
    """Draw accuracy (%) against reasoning length, one curve per system over its compression factors.

    `rows` are rows of one report; those of one curve share model, method, label and decoding, and each training
    run of it is a line of its own. One dataset fills one panel; of several, the first four by name stand
    beside a large panel with the macro-average. Returns the path. Raises ValueError without rows, and for several
    datasets without rows of their average.
    """
    return canvas.save(draw_accuracy(rows), path)


def learning_curves(history: Iterable[Mapping[str, Any]], path: str | Path, title: str) -> Path:
    """Draw every quantity that a run logged, one small panel each: losses, validation, length, norms, rates.

    `history` is the Trainer's `log_history`: dicts with `step`, `epoch` and numbers by name. `eval_x` is
    drawn with points into the panel of `x`, or gets its own. Timing, token counts and values that are not finite are
    left out. Returns the path. Raises ValueError when nothing is left.
    """
    return canvas.save(draw_history(history, title), path)


def draw_accuracy(rows: Iterable[Row]) -> Any:
    """The figure of `accuracy_vs_length`."""
    rows = sorted(rows, key=lambda row: order((*_curve(row), row["train_seed"], row["compression_factor"])))
    if not rows:
        raise ValueError("accuracy_vs_length needs at least one row")
    styles = {curve: canvas.style(index) for index, curve in enumerate(dict.fromkeys(map(_curve, rows)))}
    datasets = datasets_of(rows)
    if len(datasets) > 1 and not any(row["dataset"] == AVERAGE for row in rows):
        raise ValueError(f"rows of several datasets ({', '.join(datasets)}) need rows of their {AVERAGE}")
    figure, panels = _panels(datasets)
    for axes, dataset, main in panels:
        shown = [row for row in rows if row["dataset"] == dataset]
        _draw_curves(axes, shown, styles)
        canvas.dress(axes, _heading(dataset, rows) if main else dataset, size=9 if main else 8)
        if main:
            axes.set_xlabel(
                f"reasoning length, embeddings emitted (#L)\n{_caption(rows)}", fontsize=9, color=canvas.INK
            )
            axes.set_ylabel("accuracy (%)", fontsize=9, color=canvas.INK)
    canvas.settle(figure)
    for axes, dataset, main in panels:
        shown = [row for row in rows if row["dataset"] == dataset]
        labels = _names(shown, rows, styles) if main else []
        canvas.place(axes, labels + _tags(shown, styles, 8 if main else 6.5), _drawn(shown))
    return figure


def has_curves(history: Iterable[Mapping[str, Any]]) -> bool:
    """Whether there is anything to draw: a run shorter than its first log has nothing."""
    return bool(_series(history))


def draw_history(history: Iterable[Mapping[str, Any]], title: str) -> Any:
    """The figure of `learning_curves`."""
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
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def _curve(row: Row) -> tuple[Any, ...]:
    return row["model"], row["method"], row["label"], row["decoding"]


def _heading(dataset: str, rows: Iterable[Row]) -> str:
    """Title of the main panel: what its numbers rest on."""
    if dataset == AVERAGE:
        return f"average of {len(datasets_of(rows))} datasets"
    questions = sorted({row["n"] for row in rows if row["dataset"] == dataset})
    return f"{dataset}, {' or '.join(map(str, questions))} questions"


def _caption(rows: Iterable[Row]) -> str:
    decodings = {row["decoding"] for row in rows}
    how = f"{decodings.pop()} decoding; " if len(decodings) == 1 else ""
    return f"{how}bars: 95% interval, ±1.96 standard errors clustered by question"


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


def _lines(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of each line: one curve of one training run."""
    lines: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        lines[(*_curve(row), row["train_seed"])].append(row)
    return lines


def _bar(row: Row) -> float:
    """Half the length of a point's error bar, in points of accuracy; none where the error is unknown."""
    return 0.0 if row["accuracy_se"] is None else 100 * Z95 * row["accuracy_se"]


def _drawn(rows: Sequence[Row]) -> list[list[canvas.Point]]:
    """What labels must keep off: the curves and the error bars."""
    bars = []
    for row in rows:
        (x, y), half = _point(row), _bar(row)
        bars.append([(x, y - half), (x, y), (x, y + half)])
    return bars + [list(map(_point, line)) for line in _lines(rows).values()]


def _draw_curves(axes: Any, rows: Sequence[Row], styles: Styles) -> None:
    for key, points in _lines(rows).items():
        colour, marker = styles[key[:-1]]
        x, y = zip(*map(_point, points), strict=True)
        axes.errorbar(x, y, yerr=list(map(_bar, points)), fmt="none", ecolor=colour, elinewidth=1, alpha=0.45)
        axes.plot(x, y, color=colour, marker=marker, markersize=6, linewidth=1.4,
                  markeredgecolor="white", markeredgewidth=0.5)  # fmt: skip
    axes.margins(x=0.14, y=0.12)


def _names(shown: Sequence[Row], rows: Sequence[Row], styles: Styles) -> list[canvas.Label]:
    """One bold label per curve, near its ends rather than its middle."""
    points: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in shown:
        points[_curve(row)].append(row)
    labels, datasets = [], datasets_of(rows)
    decodings = {row["decoding"] for row in rows}
    for curve, members in points.items():
        name = curve_name(members[0], rows) + (f", {curve[-1]}" if len(decodings) > 1 else "")
        averaged = members[0].get("datasets", datasets)
        name += f" ({len(averaged)} of {len(datasets)} datasets)" if len(averaged) < len(datasets) else ""
        anchors = [_point(member) for member in (members[0], members[-1], *members[1:-1])]
        labels.append(canvas.Label(name, anchors, styles[curve][0], 9.5, bold=True))
    return labels


def _tags(shown: Sequence[Row], styles: Styles, size: float) -> list[canvas.Label]:
    """The speed, once a curve and speed: beside one of the points that its training runs have there."""
    points: defaultdict[tuple[Any, ...], list[canvas.Point]] = defaultdict(list)
    for row in shown:
        if point_name(row):
            points[_curve(row), point_name(row)].append(_point(row))
    return [canvas.Label(name, at, styles[curve][0], size) for (curve, name), at in points.items()]


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
    """`eval_accuracy/compression_factor=2` is a line in the panel "accuracy"."""
    return key.removeprefix("eval_").partition("/")[0] if key.startswith("eval_") else key


def _importance(name: str) -> tuple[int, int, str]:
    """Sort key of a panel: its group in `_PANELS`, the plain name of the group before its variants."""
    words = (name.lower(), *re.split(r"[/_]", name.lower()))
    found = (index for index, begin in enumerate(_PANELS) if any(word.startswith(begin) for word in words))
    rank = next(found, len(_PANELS))
    return rank, int(name not in _PANELS), name


def _draw_series(axes: Any, panel: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Training as a line (many points: faint, with a running mean over it), validation as points on a line."""
    blue, orange = canvas.COLOURS[:2]
    training, validation = series.get(panel, ()), series.get(f"eval_{panel}", ())
    variants = {
        key.partition("/")[2]: line for key, line in series.items() if key.startswith(f"eval_{panel}/")
    }
    values = [value for line in (training, validation, *variants.values()) for _, value in line]
    if training:
        x, y = zip(*training, strict=True)
        many = len(x) >= 60
        axes.plot(x, y, color=blue, linewidth=0.8 if many else 1.4, alpha=0.3 if many else 1,
                  marker="o" if len(x) == 1 else None, markersize=4, label=None if many else "training")  # fmt: skip
        if many:
            axes.plot(x, _running_mean(y), color=blue, linewidth=1.5, label="training (running mean)")
    if validation:
        x, y = zip(*validation, strict=True)
        axes.plot(x, y, color=orange, marker="o", markersize=4, linewidth=1.4, label="validation")
    for index, (name, line) in enumerate(variants.items()):
        x, y = zip(*line, strict=True)
        colour = canvas.COLOURS[(index + 2) % len(canvas.COLOURS)]
        axes.plot(x, y, color=colour, marker=".", markersize=4, linewidth=0.9, label=name)
    if validation or variants:
        axes.legend(fontsize=6 if variants else 7, frameon=False, loc="best")
    if min(values) > 0 and max(values) > 100 * min(values) and panel != "learning_rate":
        axes.set_yscale("log")
    elif 0 < max(map(abs, values)) < 0.01:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of a twentieth of the run, shorter at both ends: no lag behind the values."""
    reach = max(1, len(values) // 40)
    means = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        window = values[index - near : index + near + 1]
        means.append(math.fsum(window) / len(window))
    return means
