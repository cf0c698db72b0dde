"""Contents of a section of the page: tables, and figures drawn by matplotlib in the house style, as SVG in the page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import PercentFormatter

from colar.evaluation import picture
from colar.evaluation.report_rows import options, speed, texts

NONE = "–"
"""In a table, null."""
WIDTH, HEIGHT = 4.8, 3.2
"""Of a figure, in inches."""


@dataclass(frozen=True)
class PageTable:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell of each names the row."""
    caption: str = ""
    read: str = ""
    """A sentence that says how to read it."""


@dataclass(frozen=True)
class Chart:
    """A figure with one sentence of how to read it, and its numbers; `image` is its address: the SVG itself."""

    title: str
    read: str
    image: str
    numbers: PageTable


@dataclass(frozen=True)
class Section:
    """A part of the page; `id` is its fragment."""

    id: str
    title: str
    read: str
    charts: Sequence[Chart] = ()
    tables: Sequence[PageTable] = ()
    notes: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        return not self.charts and not self.tables


@dataclass(frozen=True)
class Curve:
    """Points (x, y), joined by a line."""

    name: str
    points: Sequence[tuple[float, float]]


Numbers = Mapping[str, Any]
"""Of one system: an item of `systems` in inside.json."""


def names_of(systems: Sequence[Numbers]) -> list[str]:
    """A short name of each: the model where there are several, the speed, what else it was asked with."""
    several = len({system["model"] for system in systems}) > 1
    names = []
    for system in systems:
        params = tuple(system["params"].items())
        factor = speed(params)
        parts = []
        if several or factor is None:
            parts.append(system["model"])
        if factor is not None:
            parts.append(f"c = {factor:g}")
        name = ", ".join(parts)
        others = ", ".join(texts(options(params)))
        names.append(f"{name} ({others})" if others else name)
    return names


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f}%"


def with_interval(mean: Mapping[str, Any] | None, scale: float = 1, unit: str = "") -> str:
    """`66.5% [61.0, 72.3]` of a mean and its interval."""
    if mean is None:
        return NONE
    text = f"{scale * mean['mean']:.1f}{unit}"
    if mean["interval"] is None:
        return text
    low, high = mean["interval"]
    return f"{text} [{scale * low:.1f}, {scale * high:.1f}]"


# Charts


def new_axes(x: str, y: str) -> Any:
    """The axes of a new figure; `address` makes it part of the page."""
    axes = picture.new_figure(WIDTH, HEIGHT).subplots()
    # The page has the title, as text.
    picture.dress(axes, "", x, y)
    return axes


def as_percent(axis: Any) -> None:
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def address(axes: Any) -> str:
    """The figure as a `data:` address."""
    content = base64.b64encode(picture.image(axes.figure, "svg")).decode()
    return f"data:image/svg+xml;base64,{content}"


def legend_below(axes: Any, marks: Sequence[Any], names: Sequence[str]) -> None:
    """A legend under the figure, where one curve is not all there is."""
    if len(names) > 1:
        columns = 4 if max(map(len, names)) < 14 else 2
        picture.legend(axes.figure, marks, names, loc="outside lower left", ncols=columns, fontsize=8)


def shares_chart(title: str, read: str, curves: Sequence[Curve], x: str, y: str) -> Chart:
    """Curves of shares with their numbers in a table."""
    axes = new_axes(x, y)
    lines, rows = [], []
    for i, curve in enumerate(curves):
        colour, marker = picture.style(i)
        xs, ys = [point[0] for point in curve.points], [point[1] for point in curve.points]
        lines += axes.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=1.4)
        rows += [[curve.name, f"{at:g}", percent(value)] for at, value in curve.points]
    axes.set_ylim(-0.03, 1.03)
    as_percent(axes.yaxis)
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend_below(axes, lines, [curve.name for curve in curves])
    return Chart(title, read, address(axes), PageTable(["system", x, y], rows))
