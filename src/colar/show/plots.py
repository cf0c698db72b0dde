"""The picture of a report: accuracy against reasoning length.

It takes rows of a report (show/report_rows.py) and writes one PNG. Bars are 95% intervals, 1.96 standard errors
clustered by question, as in the tables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from colar.ops.stats import Z95
from colar.show import canvas
from colar.show.naming import AVERAGE, System, curve_name, none_first, point_name, split_option
from colar.show.report_rows import ReportRow, datasets_of, systems_of

Styles = Mapping[System, tuple[str, str]]
"""Curve (see `_curve`) -> colour, marker."""

MAX_DATASETS = 4
"""Small panels beside the average."""


def accuracy_vs_length(rows: Iterable[ReportRow], path: str | Path) -> Path:
    """Draw accuracy (%) against reasoning length, one curve per system over its compression factors.

    `rows` are rows of one report. Those of one curve share model, method, label and decoding; each of its training
    runs is drawn as a line. Where the label has an option with a number (`confidence_threshold=0.8`), the curve is over
    that, and has a line for each compression factor. A single dataset fills the picture. Of several, the first four by
    name stand beside a large panel with the macro-average over all of them. Who was not asked on all of them is in the
    small panels alone, and named below. Returns the path. Raises ValueError without rows, and for
    several datasets without rows of their average.
    """
    return canvas.save(draw_accuracy(rows), path)


def draw_accuracy(rows: Iterable[ReportRow]) -> Any:
    """The figure of `accuracy_vs_length`."""
    rows = sorted(rows, key=_curve_order)
    if not rows:
        raise ValueError("accuracy_vs_length needs at least one row")
    datasets = datasets_of(rows)
    if len(datasets) > 1 and not any(row.dataset == AVERAGE for row in rows):
        raise ValueError(f"rows of several datasets ({', '.join(datasets)}) need rows of their {AVERAGE}")
    # A curve has one style in all panels, chosen by its place among all rows.
    styles: dict[System, tuple[str, str]] = {}
    for row in rows:
        styles.setdefault(_curve(row.system), canvas.style(len(styles)))

    figure, panels = _panels(datasets)
    for axes, dataset, main in panels:
        _draw_curves(axes, _shown(rows, dataset), styles)
        canvas.dress(axes, _heading(dataset, rows) if main else dataset, size=9 if main else 8)
        if main:
            label = f"reasoning length, embeddings emitted (#L)\n{_caption(rows)}"
            axes.set_xlabel(label, fontsize=9, color=canvas.INK)
            axes.set_ylabel("accuracy (%)", fontsize=9, color=canvas.INK)
    _name_the_rest(figure, rows, styles)

    # Labels look for free space between the curves, so all curves and axes must be where they will stay.
    canvas.settle(figure)
    for axes, dataset, main in panels:
        shown = _shown(rows, dataset)
        if not shown:
            _say_why_empty(axes)
            continue
        labels = _names(shown, rows, styles) if main else []
        labels += _tags(shown, styles, 8 if main else 6.5)
        canvas.place(axes, labels, _obstacles(shown))
    return figure


def _curve(system: System) -> System:
    """The system at any speed, any value of an option and of any training run: its points have one colour and name."""
    label, _ = split_option(system.label)
    return system._replace(label=label, compression_factor=None, train_seed=None)


def _line(system: System) -> System:
    """What is joined: the speeds of one training run, or the values of an option at one speed."""
    label, value = split_option(system.label)
    if value is None:
        return system._replace(compression_factor=None)
    return system._replace(label=label)


def _curve_order(row: ReportRow) -> tuple[Any, ...]:
    system = row.system
    label, value = split_option(system.label)
    # The run before the speed: rows that follow one another are then the points of one line.
    curve = (system.model, system.method, label, system.decoding)
    return none_first((*curve, system.train_seed, system.compression_factor, value))


def _heading(dataset: str, rows: Sequence[ReportRow]) -> str:
    """Title of the main panel, with the number of questions or of datasets."""
    if dataset == AVERAGE:
        datasets = len(datasets_of(rows))
        beside = f", {MAX_DATASETS} of them beside it" if datasets > MAX_DATASETS else ""
        return f"average of {datasets} datasets{beside}"
    sizes = sorted({row.n for row in rows if row.dataset == dataset})
    return f"{dataset}, {' or '.join(str(size) for size in sizes)} questions"


def _caption(rows: Sequence[ReportRow]) -> str:
    decodings = {row.system.decoding for row in rows}
    how = f"{decodings.pop()} decoding; " if len(decodings) == 1 else ""
    return f"{how}bars: 95% interval, ±1.96 standard errors clustered by question"


def _panels(datasets: Sequence[str]) -> tuple[Any, list[tuple[Any, str, bool]]]:
    """The figure, and (axes, dataset, whether it is the main panel) of each panel."""
    if len(datasets) <= 1:
        figure = canvas.figure(7, 4.6)
        only = datasets[0] if datasets else AVERAGE
        return figure, [(figure.subplots(), only, True)]
    # The average fills the first column; the small panels stand two to a column, 2.6 inches wide each.
    small = datasets[:MAX_DATASETS]
    columns = math.ceil(len(small) / 2)
    figure = canvas.figure(6 + 2.6 * columns, 4.8)
    grid = figure.add_gridspec(2, 1 + columns, width_ratios=[6 / 2.6, *[1] * columns])
    panels = [(figure.add_subplot(grid[:, 0]), AVERAGE, True)]
    for index, dataset in enumerate(small):
        panels.append((figure.add_subplot(grid[index % 2, 1 + index // 2]), dataset, False))
    return figure, panels


def _by_line(rows: Iterable[ReportRow]) -> dict[System, list[ReportRow]]:
    """The rows of each line."""
    lines: defaultdict[System, list[ReportRow]] = defaultdict(list)
    for row in rows:
        lines[_line(row.system)].append(row)
    return lines


def _point(row: ReportRow) -> canvas.Point:
    return row.length, 100 * row.accuracy


def _half_bar(row: ReportRow) -> float:
    """Half the length of a point's error bar, in points of accuracy; 0 where the error is unknown."""
    return 0.0 if row.accuracy_se is None else 100 * Z95 * row.accuracy_se


def _draw_curves(axes: Any, rows: Sequence[ReportRow], styles: Styles) -> None:
    for line, members in _by_line(rows).items():
        colour, marker = styles[_curve(line)]
        points = [_point(row) for row in members]
        half_bars = [_half_bar(row) for row in members]
        x, y = zip(*points, strict=True)
        axes.errorbar(x, y, yerr=half_bars, fmt="none", ecolor=colour, elinewidth=1, alpha=0.45)
        axes.plot(
            x,
            y,
            color=colour,
            marker=marker,
            markersize=6,
            linewidth=1.4,
            markeredgecolor="white",
            markeredgewidth=0.5,
        )
    axes.margins(x=0.14, y=0.12)


def _obstacles(rows: Sequence[ReportRow]) -> list[list[canvas.Point]]:
    """Lines that labels must keep off: the error bars and the curves."""
    lines = []
    for row in rows:
        x, y = _point(row)
        half = _half_bar(row)
        lines.append([(x, y - half), (x, y), (x, y + half)])
    for members in _by_line(rows).values():
        lines.append([_point(row) for row in members])
    return lines


def _shown(rows: Sequence[ReportRow], dataset: str) -> list[ReportRow]:
    """The rows of a panel, without averages over some of the datasets: they cannot be compared with one over all."""
    return [row for row in rows if row.dataset == dataset and not _partial(row, rows)]


def _partial(row: ReportRow, rows: Sequence[ReportRow]) -> bool:
    """Whether the row is an average over fewer datasets than the report has."""
    return row.dataset == AVERAGE and row.datasets is not None and len(row.datasets) < len(datasets_of(rows))


def _say_why_empty(axes: Any) -> None:
    """Say in the middle of the main panel that it has no curve."""
    axes.set(xticks=[], yticks=[])
    text = "no system was asked on all of them"
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize=9, color=canvas.INK)


def _name_the_rest(figure: Any, rows: Sequence[ReportRow], styles: Styles) -> None:
    """Name below the panels the curves that the main one leaves out: they are in the panels of their datasets."""
    systems = systems_of(rows)
    named = {_curve(row.system) for row in _shown(rows, AVERAGE)}
    rest = [curve for curve in dict.fromkeys(_curve(row.system) for row in rows) if curve not in named]
    if len(datasets_of(rows)) < 2 or not rest:
        return
    names = [_name(curve, systems) for curve in rest]
    marks = [
        Line2D([], [], color=styles[curve][0], marker=styles[curve][1], linestyle="none") for curve in rest
    ]
    legend = canvas.legend(
        figure,
        marks,
        names,
        title=f"not asked on all {len(datasets_of(rows))} datasets:",
        loc="outside lower left",
        ncols=2,
        fontsize=8,
        title_fontsize=8,
        alignment="left",
    )
    legend.get_title().set_color(canvas.INK)
    for text, curve in zip(legend.get_texts(), rest, strict=True):
        text.set_color(styles[curve][0])


def _name(curve: System, systems: Sequence[System]) -> str:
    """The name of a curve, with its decoding where the picture has several."""
    several_decodings = len({system.decoding for system in systems}) > 1
    return curve_name(curve, systems) + (f", {curve.decoding}" if several_decodings else "")


def _names(shown: Sequence[ReportRow], rows: Sequence[ReportRow], styles: Styles) -> list[canvas.Label]:
    """One bold label per curve."""
    systems = systems_of(rows)
    by_curve: defaultdict[System, list[ReportRow]] = defaultdict(list)
    for row in shown:
        by_curve[_curve(row.system)].append(row)
    labels = []
    for curve, members in by_curve.items():
        name = _name(curve, systems)
        # Near the ends of a curve a name is read as the whole curve's; in its middle, as that point's.
        ends_first = [members[0], members[-1], *members[1:-1]]
        anchors = [_point(row) for row in ends_first]
        labels.append(canvas.Label(name, anchors, styles[curve][0], 9.5, bold=True))
    return labels


def _tags(shown: Sequence[ReportRow], styles: Styles, size: float) -> list[canvas.Label]:
    """What a point was asked at, once for each curve: beside one of the points that its training runs have there."""
    # The runs of one speed lie close together: a tag beside each would hide the points.
    anchors: defaultdict[System, list[canvas.Point]] = defaultdict(list)
    for row in shown:
        if _tag(row.system):
            anchors[row.system.all_runs()].append(_point(row))
    labels = []
    for system, points in anchors.items():
        colour, _ = styles[_curve(system)]
        labels.append(canvas.Label(_tag(system), points, colour, size))
    return labels


def _tag(system: System) -> str:
    """What tells a point from the others of its curve: `c=2`, and the value of an option (`c=2, 0.8`)."""
    _, value = split_option(system.label)
    parts = [point_name(system), "" if value is None else f"{value:g}"]
    return ", ".join(part for part in parts if part)
