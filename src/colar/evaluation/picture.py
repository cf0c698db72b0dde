"""The style of all pictures, their files, and the picture of a report: accuracy against reasoning length.

Everything goes through `matplotlib.figure.Figure` and never through pyplot, so that drawing from a server or a
training process leaves the host's plots unchanged. The same data give the same bytes on one installation.
"""

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from colar import files
from colar.evaluation.report_rows import (
    AVERAGE,
    SPEED,
    ParamValues,
    ReportRow,
    System,
    base_name,
    c_text,
    datasets_of,
    systems_of,
    without_speed,
)
from colar.evaluation.stats import half_interval

# Okabe and Ito 2008: eight colours that colour-blind readers can tell apart. Their yellow is too faint on white, so a
# grey stands in its place. The last two are from Paul Tol's muted scheme.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777", "#882255", "#999933",
)  # fmt: skip
MARKERS = ("o", "s", "D", "^", "v", "p", "h", "X")
INK = "#222222"
FAINT = "#dddddd"
DPI = 160


without_mathematics = matplotlib.rc_context({"text.parse_math": False})
"""Decorator of functions that draw a picture: texts are drawn literally, also between two `$`.

Tick labels may still be mathematics (10 with an exponent), because matplotlib makes them when it saves the picture.
"""


def new_figure(width: float, height: float) -> Any:
    """An empty figure of `width` x `height` inches with its own Agg canvas."""
    # Text is measured with the canvas; pyplot would attach one and keep a reference to it.
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Any, title: str, x: str = "", y: str = "", size: float = 9) -> None:
    """Give axes the house style: title at the left, no box, a faint grid behind the data."""
    axes.set_title(title, loc="left", fontsize=size + 1, color=INK, fontweight="bold")
    axes.set_xlabel(x, fontsize=size, color=INK)
    axes.set_ylabel(y, fontsize=size, color=INK)
    axes.tick_params(labelsize=size - 1, colors=INK, length=3)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")


def style(index: int) -> tuple[str, str]:
    """(colour, marker) of curve `index`: 80 different pairs."""
    # Both change from one curve to the next. After a round of colours the markers are shifted by one, so that pairs
    # do not repeat.
    rounds = index // len(COLOURS)
    return COLOURS[index % len(COLOURS)], MARKERS[(index + rounds) % len(MARKERS)]


def save(figure: Any, path: str | Path, dpi: int = DPI) -> Path:
    """Write the figure as PNG in one step: the path holds the old picture or the new one. Returns the path."""
    # Drawn into memory first: where drawing fails, no file has been touched.
    buffer = io.BytesIO()
    # Without matplotlib's version, so that bytes repeat.
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return files.write_bytes(path, buffer.getvalue())


# Accuracy against reasoning length


@without_mathematics
def accuracy_vs_length(rows: Iterable[ReportRow]) -> Any:
    """A figure of accuracy (%) against reasoning length, one curve per system over its speeds.

    Bars are 95% intervals, 1.96 standard errors clustered by question, as in the tables.

    `rows` are those of a report under one decoding. Each training run of a curve is drawn as a line. If systems were
    evaluated at several values of another parameter (`confidence_threshold`), a curve runs over these values, with a
    line for each speed. With several datasets, the picture shows the macro-average of systems evaluated on all.
    """
    rows = sorted(rows, key=lambda row: row.system.order())
    datasets = datasets_of(rows)
    dataset = AVERAGE if len(datasets) > 1 else datasets[0]
    # An average over fewer datasets than the report has cannot be compared with one over all.
    shown = [row for row in rows if row.dataset == dataset and len(row.datasets or datasets) == len(datasets)]
    curves: defaultdict[tuple[Any, ...], list[ReportRow]] = defaultdict(list)
    for row in shown:
        curves[_curve(row.system)].append(row)

    figure = new_figure(7, 4.8)
    axes = figure.subplots()
    decoding = f"{rows[0].system.decoding} decoding"
    bars = "bars: 95% interval, ±1.96 standard errors clustered by question"
    label = f"reasoning length, embeddings emitted (#L)\n{decoding}; {bars}"
    dress(axes, _heading(dataset, rows), label, "accuracy (%)")
    if not shown:
        axes.set(xticks=[], yticks=[])
        text = "no system was asked on all of them"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize=9, color=INK)
        return figure
    marks = []
    for index, members in enumerate(curves.values()):
        colour, marker = style(index)
        _draw_curve(axes, members, colour, marker)
        _draw_tags(axes, members, colour)
        marks.append(Line2D([], [], color=colour, marker=marker, markeredgecolor="white", linewidth=1.4))
    axes.margins(x=0.1, y=0.12)
    systems = systems_of(shown)
    names = [_name(members, systems) for members in curves.values()]
    # As many names per row as fit the figure's width.
    columns = max(1, min(len(names), int(figure.get_figwidth() * 13 / (8 + max(map(len, names))))))
    where = "outside lower center"
    figure.legend(marks, names, loc=where, ncols=columns, fontsize=8.5, frameon=False, labelcolor=INK)
    return figure


def _curve(system: System) -> tuple[Any, ...]:
    """Key of a system's curve: model, method, label and the names of its params other than the speed."""
    names = tuple(name for name, _ in without_speed(system.params))
    return system.model, system.method, system.label, names


def _name(members: Sequence[ReportRow], systems: Sequence[System]) -> str:
    """Name of a curve among those of `systems`, with the values that all its points share, and the names of params
    other than the speed that differ: the tags of the points have these values."""
    system = members[0].system
    shared = _shared(row.system.params for row in members)
    parts = [system.label]
    for pair in system.params:
        if pair in shared:
            parts.append(c_text((pair,)) or f"{pair[0]}={pair[1]:g}")
        elif pair[0] != SPEED:
            parts.append(pair[0])
    note = ", ".join(part for part in parts if part)
    return base_name(system, systems) + (f" ({note})" if note else "")


def _shared(points: Iterable[ParamValues]) -> set[tuple[str, float]]:
    """The values that all points have."""
    return set.intersection(*(set(values) for values in points))


def _heading(dataset: str, rows: Sequence[ReportRow]) -> str:
    """Title of the picture, with the number of datasets or of questions."""
    if dataset == AVERAGE:
        return f"average of {len(datasets_of(rows))} datasets"
    sizes = sorted({row.n for row in rows if row.dataset == dataset})
    return f"{dataset}, {' or '.join(str(size) for size in sizes)} questions"


def _draw_curve(axes: Any, members: Sequence[ReportRow], colour: str, marker: str) -> None:
    x = [row.length for row in members]
    y = [100 * row.accuracy for row in members]
    half_bars = [100 * (half_interval(row.accuracy_se) or 0) for row in members]
    # Drawing order, from the bottom: bars and lines, tags, markers.
    axes.errorbar(x, y, yerr=half_bars, fmt="none", ecolor=colour, elinewidth=1, alpha=0.45, zorder=1)
    for line in _lines(members):
        points = [(row.length, 100 * row.accuracy) for row in line]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, zorder=1)
    axes.scatter(x, y, s=40, color=colour, marker=marker, edgecolors="white", linewidths=0.5, zorder=3)


def _lines(members: Sequence[ReportRow]) -> list[list[ReportRow]]:
    """Points of a curve that are joined by a line: those of one training run, along one of the params."""
    values = {
        name: {dict(row.system.params)[name] for row in members} for name, _ in members[0].system.params
    }
    differing = [name for name in values if len(values[name]) > 1]
    # Along a param other than the speed, if one differs.
    varied = min(differing, key=lambda name: name == SPEED, default=None)
    lines: defaultdict[tuple[Any, ...], list[ReportRow]] = defaultdict(list)
    for row in sorted(members, key=lambda row: row.system.params):
        others = tuple(pair for pair in row.system.params if pair[0] != varied)
        lines[row.system.train_seed, others].append(row)
    return list(lines.values())


def _draw_tags(axes: Any, members: Sequence[ReportRow], colour: str) -> None:
    """Write below each point the values that differ along its curve, `c=2`; of several runs, at the first one's."""
    points: dict[ParamValues, ReportRow] = {}
    for row in members:
        points.setdefault(row.system.params, row)
    shared = _shared(points)
    for values, row in points.items():
        told = tuple(pair for pair in values if pair not in shared)
        if not told:
            continue
        texts = [c_text(told), *(f"{value:g}" for _, value in without_speed(told))]
        text = axes.annotate(
            ", ".join(text for text in texts if text),
            (row.length, 100 * row.accuracy),
            xytext=(0, -6),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            color=colour,
            zorder=2,
        )
        # An outline, because the error bar runs through the text.
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
