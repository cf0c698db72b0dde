"""The picture of a training run: its learning curves, from the Trainer's `state.log_history` (dicts), as one PNG."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from colar import checks
from colar.evaluation import picture

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Logged key -> (step, value) pairs in the order logged."""

# Panels come in this order, by how their name, or a word in it, begins; the others follow in alphabetical order.
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
_MANY = 60
"""Logged values from which on a curve is too noisy to be read without a running mean."""
_AIR = 0.1
"""Inches that the layout leaves around the names of the lines, on two sides together, and a little more."""

# Training is blue and validation orange in every panel; variants of validation take the other colours first.
_BLUE, _ORANGE, *_OTHERS = picture.COLOURS
_TRAINING: dict[str, Any] = {"color": _BLUE, "linewidth": 1.4}
_VALIDATION: dict[str, Any] = {"color": _ORANGE, "linewidth": 1.4, "marker": "o", "markersize": 4}


def learning_curves(history: Iterable[Mapping[str, Any]], path: str | Path, title: str) -> Path:
    """Draw every quantity that a run logged, one small panel each: losses, validation, length, norms, rates.

    `history` is the Trainer's `log_history`: dicts with `step`, `epoch` and numbers by name. `eval_x` is
    drawn with points into the panel of `x`, or gets its own. Timing, token counts and values that are not finite are
    left out. Returns the path. Raises ValueError when nothing is left.
    """
    return picture.save(draw_history(history, title), path)


def has_curves(history: Iterable[Mapping[str, Any]]) -> bool:
    """Whether there is anything to draw: a run shorter than its first log has nothing."""
    return bool(_series(history))


def draw_history(history: Iterable[Mapping[str, Any]], title: str) -> Any:
    """The figure of `learning_curves`."""
    series = _series(history)
    if not series:
        raise ValueError("learning_curves needs a history with at least one number per step")
    names = sorted({_panel_of(key) for key in series}, key=_importance)
    # Three panels side by side are readable on a page; a run that logs many quantities gets a fourth column.
    columns = min(len(names), 3 if len(names) <= 9 else 4)
    lines = math.ceil(len(names) / columns)
    figure = picture.new_figure(max(3.1 * columns, 4.2), 2.2 * lines + 0.4)
    styles = _variant_styles(series)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=picture.INK)
    grid = figure.subplots(lines, columns, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(names):
            axes.set_axis_off()
            continue
        # Panels of a column share their x axis, which is named below the last one.
        last_of_column = index + columns >= len(names)
        _draw_series(axes, names[index], series, styles)
        picture.dress(axes, names[index], x="step" if last_of_column else "", size=8)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _name_lines(figure, series, styles)
    return figure


def _series(history: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(step, value) pairs by key, in the order logged; bookkeeping and values that are not finite are left out."""
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in history:
        if "step" not in entry:
            continue
        for key, value in entry.items():
            if key in _AXES or any(word in key for word in _BOOKKEEPING):
                continue
            if checks.is_number(value):
                series[key].append((entry["step"], value))
    return dict(series)


def _panel_of(key: str) -> str:
    """The panel of a logged key: `eval_accuracy/compression_factor=2` is a curve in the panel `accuracy`."""
    if not key.startswith("eval_"):
        return key
    return key.removeprefix("eval_").partition("/")[0]


def _importance(name: str) -> tuple[int, int, str]:
    """Sort key of a panel: its group in `_PANELS`, the plain name of the group before its variants."""
    return _group_of(name), int(name not in _PANELS), name


def _group_of(name: str) -> int:
    lower = name.lower()
    words = (lower, *re.split(r"[/_]", lower))
    for group, beginning in enumerate(_PANELS):
        if any(word.startswith(beginning) for word in words):
            return group
    return len(_PANELS)


def _variant_styles(series: Series) -> dict[str, dict[str, Any]]:
    """The style of each variant of validation, `compression_factor=2`, in the order logged: one for all panels."""
    styles: dict[str, dict[str, Any]] = {}
    colours = [*_OTHERS, _BLUE, _ORANGE]
    for key in series:
        _, slash, name = key.partition("/")
        if key.startswith("eval_") and slash and name not in styles:
            colour = colours[len(styles) % len(colours)]
            styles[name] = {"color": colour, "linewidth": 0.9, "marker": ".", "markersize": 4}
    return styles


def _name_lines(figure: Any, series: Series, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Name the lines once, below all panels: inside a panel the names would lie on its lines.

    The figure grows by the height of the names, so that the panels keep theirs.
    """
    training = [points for key, points in series.items() if not key.startswith("eval_")]
    validation = any(key.startswith("eval_") and "/" not in key for key in series)
    if not validation and not styles:
        return
    named: list[tuple[str, Mapping[str, Any]]] = []
    if training:
        long = any(len(points) >= _MANY for points in training)
        named.append(("training (thick: running mean)" if long else "training", _TRAINING))
    if validation:
        named.append(("validation", _VALIDATION))
    named += styles.items()

    marks = [Line2D([], [], **style) for _, style in named]
    names = [name for name, _ in named]
    # As many columns as fit. One alone may be wider than the figure, which then grows.
    for columns in range(len(names), 0, -1):
        legend = picture.legend(
            figure,
            marks,
            names,
            loc="outside lower left",
            ncols=columns,
            fontsize=7.5,
            labelcolor=picture.INK,
        )
        size = legend.get_window_extent()
        wide, high = size.width / figure.dpi + _AIR, size.height / figure.dpi + _AIR
        if wide <= figure.get_figwidth() or columns == 1:
            break
        legend.remove()
    figure.set_size_inches(max(figure.get_figwidth(), wide), figure.get_figheight() + high)


def _draw_series(axes: Any, panel: str, series: Series, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw training as a line, under its running mean where it is long, and validation as points on a line."""
    training = series.get(panel, ())
    validation = series.get(f"eval_{panel}", ())
    variants = {}
    for key, points in series.items():
        if key.startswith(f"eval_{panel}/"):
            variants[key.partition("/")[2]] = points

    if training:
        _draw_training(axes, training)
    if validation:
        x, y = zip(*validation, strict=True)
        axes.plot(x, y, **_VALIDATION)
    for name, points in variants.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, **styles[name], label=name)

    values = []
    for points in (training, validation, *variants.values()):
        values += [value for _, value in points]
    # A loss that falls by orders of magnitude shows only its first steps on a linear axis.
    if min(values) > 0 and max(values) > 100 * min(values) and panel != "learning_rate":
        axes.set_yscale("log")
    # Small numbers would all be written as 0.00 beside a common factor.
    elif 0 < max(abs(value) for value in values) < 0.01:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _draw_training(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    x, y = zip(*points, strict=True)
    if len(x) >= _MANY:
        axes.plot(x, y, color=_BLUE, linewidth=0.8, alpha=0.3)
        axes.plot(x, _running_mean(y), **_TRAINING)
        return
    # A single point is no line: only a marker shows it.
    marker = "o" if len(x) == 1 else None
    axes.plot(x, y, **_TRAINING, marker=marker, markersize=4)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of a twentieth of the run, shorter at both ends: no lag behind the values."""
    # Shorter on both sides alike: a window cut on one side alone would lag behind the values at the ends.
    reach = max(1, len(values) // 40)
    means = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        window = values[index - near : index + near + 1]
        means.append(math.fsum(window) / len(window))
    return means
