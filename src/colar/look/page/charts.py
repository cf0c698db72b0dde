"""The page's charts: figures in the house style of `evaluation/picture.py`, as SVG in the page, with their numbers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from colar.evaluation import picture
from colar.evaluation.text_table import TextTable, percent
from colar.look.tables import CAUSES, THOUGHTS, Numbers, cause_shares, cause_table, names_of, with_names

WIDTH, HEIGHT = 4.8, 3.2
"""Of a figure, in inches."""
LINES = dict(zip(THOUGHTS, ("solid", "dashed", "dotted", "dashdot"), strict=True))


@dataclass(frozen=True)
class Chart:
    """A figure with one sentence of how to read it, and its numbers; `image` is its address: the SVG itself."""

    title: str
    read: str
    image: str
    numbers: TextTable


def cost_chart(systems: Sequence[Numbers], key: str, x: str, scale: float) -> Chart:
    """Accuracy against one cost; a line joins a model's speeds, for each kind of thoughts."""
    axes = _new_axes(x, "accuracy")
    models = list(dict.fromkeys(system["model"] for system in systems))
    marks, names, rows = [], [], []
    for i, model in enumerate(models):
        colour, marker = picture.style(i)
        if len(models) > 1:
            marks.append(Line2D([], [], color=colour, marker=marker))
            names.append(model)
        for kind, words in THOUGHTS.items():
            points = []
            for system in systems:
                outcome = system["cost"]["outcomes"].get(kind)
                if system["model"] != model or outcome is None:
                    continue
                speed = names_of([system])[0]
                at, accuracy = scale * outcome[key]["mean"], outcome["accuracy"]["mean"]
                points.append((at, accuracy))
                rows.append([f"{model}, {speed}, {words}", f"{at:.2f}", percent(accuracy)])
                bars = {"xerr": _bar(outcome[key], scale), "yerr": _bar(outcome["accuracy"], 1)}
                face = colour if kind == "own" else "white"
                axes.errorbar(
                    at, accuracy, **bars, color=colour, elinewidth=0.8, marker=marker, markersize=5, mfc=face
                )
                if kind == "own":
                    # Curves of two models often lie close together.
                    beside = (5, -11 if i % 2 else 5)
                    axes.annotate(
                        speed, points[-1], beside, textcoords="offset points", fontsize=8, color=colour
                    )
            points.sort()
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=LINES[kind], linewidth=1.2)
    for kind, words in THOUGHTS.items():
        if any(kind in system["cost"]["outcomes"] for system in systems):
            marks.append(Line2D([], [], color=picture.INK, linestyle=LINES[kind]))
            names.append(words)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(left=0)
    _as_percent(axes.yaxis)
    _legend_below(axes, marks, names)
    title = f"Accuracy against {'length' if key == 'length' else 'time'}"
    read = "Bars are 95% intervals over questions; hollow marks are controls."
    return Chart(title, read, _address(axes), TextTable("", ["system", x, "accuracy %"], rows))


def _bar(mean: Mapping[str, Any], scale: float) -> list[list[float]] | None:
    """An interval as matplotlib takes it: the distances from the mean down and up."""
    if mean["interval"] is None:
        return None
    low, high = mean["interval"]
    # An accuracy of 0 or 1 may lie a rounding beyond its interval.
    return [[max(0.0, scale * (mean["mean"] - low))], [max(0.0, scale * (high - mean["mean"]))]]


def cause_chart(systems: Sequence[Numbers]) -> Chart:
    """Bars of shares that add up to 1."""
    axes = _new_axes("answers", "")
    causes, shares = cause_shares(systems)
    names = [name for name, _ in shares]
    left = [0.0] * len(names)
    bars = []
    for j, cause in enumerate(causes):
        column = [row[j] for _, row in shares]
        # A cause has one colour on all pages.
        colour, _ = picture.style(list(CAUSES).index(cause))
        bars.append(axes.barh(range(len(names)), column, 0.7, left=left, color=colour))
        left = [start + width for start, width in zip(left, column, strict=True)]
    axes.set_yticks(range(len(names)), [name if len(name) <= 24 else f"…{name[-23:]}" for name in names])
    # The first at the top; one bar alone must not fill the chart.
    axes.set_ylim(max(len(names), 3) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    _as_percent(axes.xaxis)
    axes.grid(visible=False, axis="y")
    _legend_below(axes, bars, causes)
    read = (
        "A thought is right when the group's tokens are among its c nearest, or among those that were chosen."
    )
    table = cause_table(systems)
    return Chart(table.title, read, _address(axes), table)


def position_chart(systems: Sequence[Numbers]) -> Chart:
    """Shares of thoughts whose whole group is found, by position in the chain."""
    axes = _new_axes("thought", "thoughts")
    lines, names, rows = [], [], []
    for i, (name, retrieval) in enumerate(with_names(systems, "retrieval")):
        colour, marker = picture.style(i)
        shares = retrieval["written"]["by_position"]
        places = range(1, len(shares) + 1)
        lines += axes.plot(places, shares, color=colour, marker=marker, markersize=4, linewidth=1.4)
        names.append(name)
        rows += [[name, str(place), percent(share)] for place, share in zip(places, shares, strict=True)]
    axes.set_ylim(-0.03, 1.03)
    _as_percent(axes.yaxis)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend_below(axes, lines, names)
    read = "Share of thoughts whose whole group is found (in set)."
    numbers = TextTable("", ["system", "thought", "thoughts %"], rows)
    return Chart("By position in the chain", read, _address(axes), numbers)


def _new_axes(x: str, y: str) -> Any:
    """The axes of a new figure; `_address` makes it part of the page."""
    axes = picture.new_figure(WIDTH, HEIGHT).subplots()
    # The page has the title, as text.
    picture.dress(axes, "", x, y)
    return axes


def _as_percent(axis: Any) -> None:
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _legend_below(axes: Any, marks: Sequence[Any], names: Sequence[str]) -> None:
    """A legend under the figure, where one curve is not all there is."""
    if len(names) > 1:
        columns = 4 if max(map(len, names)) < 14 else 2
        picture.legend(axes.figure, marks, names, loc="outside lower left", ncols=columns, fontsize=8)


def _address(axes: Any) -> str:
    """The figure as a `data:` address."""
    content = base64.b64encode(picture.image(axes.figure, "svg")).decode()
    return f"data:image/svg+xml;base64,{content}"
