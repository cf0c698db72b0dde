"""The picture of a report: accuracy against reasoning length, from its rows (evaluation/report_rows.py).

Bars are 95% intervals, 1.96 standard errors clustered by question, as in the tables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from colar.evaluation import picture
from colar.evaluation.report_rows import (
    AVERAGE,
    ParamValues,
    ReportRow,
    System,
    base_name,
    c_text,
    datasets_of,
    note_of,
    systems_of,
    without_speed,
)
from colar.evaluation.stats import half_interval

Styles = Mapping[tuple[Any, ...], tuple[str, str]]
"""Curve (see `_curve`) -> colour, marker."""

MAX_DATASETS = 4
"""Small panels beside the average."""


@picture.without_mathematics
def draw(rows: Iterable[ReportRow]) -> Any:
    """A figure of accuracy (%) against reasoning length, one curve per system over its speeds.

    `rows` are rows of one report. Each training run of a curve is drawn as a line. Where systems were asked at several
    values of another parameter (`confidence_threshold`), a curve is over these, with a line for each speed. A single
    dataset fills the picture. Of several, the first four by name stand beside a large panel with the macro-average over
    all of them; systems that were not asked on all are in the small panels alone. Raises ValueError without rows, and
    for several datasets without rows of their average.
    """
    rows = sorted(rows, key=lambda row: row.system.order())
    if not rows:
        raise ValueError("a picture needs at least one row")
    datasets = datasets_of(rows)
    if len(datasets) > 1 and not any(row.dataset == AVERAGE for row in rows):
        raise ValueError(f"rows of several datasets ({', '.join(datasets)}) need rows of their {AVERAGE}")
    # A curve has one style in all panels, chosen by its place among all rows.
    curves = dict.fromkeys(_curve(row.system) for row in rows)
    styles = {curve: picture.style(index) for index, curve in enumerate(curves)}

    # An average over fewer datasets than the report has cannot be compared with one over all.
    comparable = [row for row in rows if row.datasets is None or len(row.datasets) == len(datasets)]
    figure, panels = _panels(datasets)
    for axes, dataset, main in panels:
        shown = [row for row in comparable if row.dataset == dataset]
        if shown:
            _draw_curves(axes, shown, styles)
            # Small panels have no room for them.
            if main:
                _draw_tags(axes, shown, styles)
        else:
            axes.set(xticks=[], yticks=[])
            text = "no system was asked on all of them"
            axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize=9, color=picture.INK)
        if main:
            label = f"reasoning length, embeddings emitted (#L)\n{_caption(rows)}"
            picture.dress(axes, _heading(dataset, rows), label, "accuracy (%)")
        else:
            picture.dress(axes, dataset, size=8)
    marks = []
    for colour, marker in styles.values():
        marks.append(Line2D([], [], color=colour, marker=marker, markeredgecolor="white", linewidth=1.4))
    names = _names(rows)
    columns = max(1, min(len(names), int(figure.get_figwidth() * 13 / (8 + max(map(len, names))))))
    picture.legend(figure, marks, names, loc="outside lower center", ncols=columns, fontsize=8.5)
    return figure


def _curve(system: System) -> tuple[Any, ...]:
    """The fields that the points of a curve share: all but its values, and the training run."""
    names = tuple(name for name, _ in system.other_values)
    return system.model, system.method, system.label, names, system.decoding


def _names(rows: Sequence[ReportRow]) -> list[str]:
    """The names of all curves, in the order of `rows`; each with its decoding where the picture has several."""
    systems = systems_of(rows)
    several_decodings = len({system.decoding for system in systems}) > 1
    names = {}
    for system in systems:
        changed = note_of(system.label, (name for name, _ in system.other_values))
        name = base_name(system, systems) + (f" ({changed})" if changed else "")
        names[_curve(system)] = name + (f", {system.decoding}" if several_decodings else "")
    return list(names.values())


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
        figure = picture.new_figure(7, 4.8)
        only = datasets[0] if datasets else AVERAGE
        return figure, [(figure.subplots(), only, True)]
    # The average fills the first column; the small panels stand two to a column, 2.6 inches wide each.
    small = datasets[:MAX_DATASETS]
    columns = math.ceil(len(small) / 2)
    figure = picture.new_figure(6 + 2.6 * columns, 5.2)
    grid = figure.add_gridspec(2, 1 + columns, width_ratios=[6 / 2.6, *[1] * columns])
    panels = [(figure.add_subplot(grid[:, 0]), AVERAGE, True)]
    for index, dataset in enumerate(small):
        panels.append((figure.add_subplot(grid[index % 2, 1 + index // 2]), dataset, False))
    return figure, panels


def _draw_curves(axes: Any, rows: Sequence[ReportRow], styles: Styles) -> None:
    for curve, members in _by_curve(rows).items():
        colour, marker = styles[curve]
        x = [row.length for row in members]
        y = [100 * row.accuracy for row in members]
        half_bars = [100 * (half_interval(row.accuracy_se) or 0) for row in members]
        # From below: bars and lines, the names of points, their markers.
        axes.errorbar(x, y, yerr=half_bars, fmt="none", ecolor=colour, elinewidth=1, alpha=0.45, zorder=1)
        for line in _lines(members):
            points = [(row.length, 100 * row.accuracy) for row in line]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, zorder=1)
        axes.scatter(x, y, s=40, color=colour, marker=marker, edgecolors="white", linewidths=0.5, zorder=3)
    axes.margins(x=0.1, y=0.12)


def _by_curve(rows: Iterable[ReportRow]) -> dict[tuple[Any, ...], list[ReportRow]]:
    by_curve: defaultdict[tuple[Any, ...], list[ReportRow]] = defaultdict(list)
    for row in rows:
        by_curve[_curve(row.system)].append(row)
    return by_curve


def _lines(members: Sequence[ReportRow]) -> list[list[ReportRow]]:
    """The points of a curve that are joined: of one training run, and along one of its values."""
    # The last of the values that differ, where several do; the speed is the first.
    names = [*dict(members[0].system.other_values), *dict(members[0].system.params)]
    values = {name: {dict(row.system.params)[name] for row in members} for name in names}
    varied = next((name for name in names if len(values[name]) > 1), None)
    lines: defaultdict[tuple[Any, ...], list[ReportRow]] = defaultdict(list)
    for row in sorted(members, key=lambda row: row.system.params):
        others = tuple(pair for pair in row.system.params if pair[0] != varied)
        lines[row.system.train_seed, others].append(row)
    return list(lines.values())


def _draw_tags(axes: Any, rows: Sequence[ReportRow], styles: Styles) -> None:
    """Write below each point the values that differ along its curve, `c=2`: of training runs, at the first one's."""
    for curve, members in _by_curve(rows).items():
        points: dict[ParamValues, ReportRow] = {}
        for row in members:
            points.setdefault(row.system.params, row)
        shared = set.intersection(*(set(values) for values in points))
        for values, row in points.items():
            told = tuple(pair for pair in values if pair not in shared) or values
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
                color=styles[curve][0],
                zorder=2,
            )
            # The error bar runs through it.
            text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
