"""What a section of the page consists of: figures and tables, each with one sentence of how to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from colar.look.page import charts
from colar.look.page.charts import COLOURS, Axis, Series

NONE = "–"
"""What a table shows for null."""


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    name: str
    colour: int
    kind: str = "own"

    @property
    def classes(self) -> str:
        return f"s{self.colour % COLOURS} {self.kind}"


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell of each names the row."""
    caption: str = ""
    read: str = ""
    """How to read it."""


@dataclass(frozen=True)
class Figure:
    title: str
    read: str
    """How to read it."""
    chart: Markup
    numbers: Table
    legend: Sequence[Key] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page; `id` is its fragment."""

    id: str
    title: str
    read: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def is_empty(self) -> bool:
        return not self.figures and not self.tables


System = Mapping[str, Any]
"""One of `systems` in inside.json."""


def names_of(systems: Sequence[System]) -> list[str]:
    """A short name of each: the model where there are several, the speed, what else it was asked with."""
    several = len({system["model"] for system in systems}) > 1
    names = []
    for system in systems:
        factor = system["compression_factor"]
        parts = []
        if several or factor is None:
            parts.append(system["model"])
        if factor is not None:
            parts.append(f"c = {factor:g}")
        name = ", ".join(parts)
        names.append(f"{name} ({system['variant']})" if system["variant"] else name)
    return names


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f}%"


def number(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def between(interval: Sequence[float] | None, scale: float = 1, digits: int = 1) -> str:
    """`[61.0, 72.3]`."""
    if interval is None:
        return ""
    low, high = interval
    return f"[{scale * low:.{digits}f}, {scale * high:.{digits}f}]"


def with_interval(mean: Mapping[str, Any] | None, scale: float = 1, digits: int = 1, unit: str = "") -> str:
    """`66.5% [61.0, 72.3]` of a mean and its interval."""
    if mean is None:
        return NONE
    return f"{scale * mean['mean']:.{digits}f}{unit} {between(mean['interval'], scale, digits)}".rstrip()


def line_figure(
    title: str,
    read: str,
    series: Sequence[Series],
    x: Axis | str,
    y: Axis,
    diagonal: bool = False,
) -> Figure:
    """Series of points with their legend, and their numbers in a table. `x` is an axis, or the name of one."""
    if isinstance(x, str):
        xs = [point.x for each in series for point in each.points]
        x = charts.axis_of(x, xs, zero=False)
    rows = []
    for each in series:
        rows += [[each.name, x.text(point.x), y.text(point.y)] for point in each.points]
    what = y.label or title
    chart = charts.lines(series, x, y, f"{title}: {what} by {x.label}", diagonal)
    legend = [Key(each.name, each.colour) for each in series]
    return Figure(title, read, chart, Table(["series", x.label, what], rows), legend)
