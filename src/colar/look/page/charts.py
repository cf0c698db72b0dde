"""Charts as inline SVG: lines with intervals, stacked columns, grouped columns. No library, no script.

Colours and fonts are the page's: marks have classes (`s0` to `s7`, and the kind of a series), page.css does the rest,
in light and dark. Every mark has a `<title>`, which browsers show under the pointer; the numbers stand in a table
beside each chart (`figures.py`), so a chart is one image to a screen reader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 480
HEIGHT = 290
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 44
COLOURS = 8
MANY = 12
"""Points of a series from which on they are drawn smaller."""
LARGE, SMALL = 4, 2.5


@dataclass(frozen=True)
class Point:
    """A value with its 95% intervals, where it has any; `label` is drawn beside it, `text` is its tooltip."""

    x: float
    y: float
    y_interval: Sequence[float] | None = None
    x_interval: Sequence[float] | None = None
    label: str = ""
    text: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one colour; `kind` is a class that page.css draws in its own way, and scripts may hide."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    kind: str = "own"


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    percent: bool = False

    def ticks(self) -> list[float]:
        """About five round numbers from `low` to `high`."""
        step = _round_step((self.high - self.low) / 5)
        # A bound that is a multiple of the step must not be lost to rounding.
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]

    def text(self, value: float) -> str:
        return f"{100 * value:.4g}%" if self.percent else f"{value:.4g}"


def axis_of(
    label: str, values: Sequence[float], zero: bool = True, percent: bool = False, room: float = 0.06
) -> Axis:
    """An axis that holds all values, and 0 where `zero` says so."""
    held = [*values, 0.0] if zero or not values else list(values)
    low, high = min(held), max(held)
    # An axis of length 0 would make `_at` divide by 0.
    if high == low:
        high = low + 1
    margin = room * (high - low)
    return Axis(label, low - margin if low < 0 or not zero else low, high + margin, percent)


def shares(label: str) -> Axis:
    """0% to 100%."""
    return Axis(label, 0.0, 1.0, percent=True)


# Lines


def lines(series: Sequence[Series], x: Axis, y: Axis, alt: str, diagonal: bool = False) -> Markup:
    """Series of points, joined where a series has several. `diagonal`: where x and y agree."""
    parts = [_frame(x, y)]
    if diagonal:
        low, high = max(x.low, y.low), min(x.high, y.high)
        ends = _at(x, y, low, low), _at(x, y, high, high)
        parts.append(_line(ends[0], ends[1], "diagonal"))
    for each in series:
        parts.append(_series(each, x, y))
    return _svg(parts, alt)


def _series(series: Series, x: Axis, y: Axis) -> Markup:
    parts = []
    radius = SMALL if len(series.points) > MANY else LARGE
    places = [_at(x, y, point.x, point.y) for point in series.points]
    if len(places) > 1:
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        parts.append(Markup('<polyline points="{}"/>').format(path))
    for point, (left, top) in zip(series.points, places, strict=True):
        for interval, upright in ((point.y_interval, True), (point.x_interval, False)):
            if interval is not None:
                low, high = interval
                ends = [
                    _at(x, y, point.x, end) if upright else _at(x, y, end, point.y) for end in (low, high)
                ]
                parts.append(_line(ends[0], ends[1], "interval"))
        parts.append(
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>').format(
                left, top, radius, point.text or f"{series.name}: {x.text(point.x)}, {y.text(point.y)}"
            )
        )
        if point.label:
            beyond = left > WIDTH - RIGHT - 60
            anchor, shift = ("end", -7) if beyond else ("start", 7)
            parts.append(_text(left + shift, top - 7, point.label, anchor, "point"))
    return Markup('<g class="s{} {}">{}</g>').format(
        series.colour % COLOURS, series.kind, Markup("").join(parts)
    )


# Columns


def columns(
    labels: Sequence[str],
    names: Sequence[str],
    values: Sequence[Sequence[float | None]],
    y: Axis,
    alt: str,
) -> Markup:
    """Grouped columns: `values[i][j]` of label i and name j; None leaves a gap."""
    x = Axis("", 0, max(len(labels), 1))
    parts = [_frame(x, y, labels)]
    width = 0.8 / max(len(names), 1)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value is not None:
                start = i + 0.1 + j * width
                tip = f"{labels[i]}, {names[j]}: {y.text(value)}"
                parts.append(_column(x, y, start, start + width * 0.92, 0.0, value, j, tip))
    return _svg(parts, alt)


def stacked(
    labels: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]], x_label: str, alt: str
) -> Markup:
    """Columns of shares that add up to 1: `values[i][j]` of label i and name j."""
    x = Axis(x_label, 0, max(len(labels), 1))
    y = shares("")
    parts = [_frame(x, y, labels)]
    for i, row in enumerate(values):
        low = 0.0
        for j, value in enumerate(row):
            tip = f"{labels[i]}, {names[j]}: {y.text(round(value, 4))}"
            if value > 0:
                parts.append(_column(x, y, i + 0.08, i + 0.92, low, low + value, j, tip))
            low += value
    return _svg(parts, alt)


def _column(
    x: Axis, y: Axis, left: float, right: float, low: float, high: float, colour: int, tip: str
) -> Markup:
    # A value beyond the axis ends at its edge; one of 0 is still a thin line, unlike a missing one.
    clamped = min(max(high, y.low), y.high)
    start, top = _at(x, y, left, max(low, clamped))
    end, bottom = _at(x, y, right, min(low, clamped))
    return Markup(
        '<rect class="s{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
    ).format(colour % COLOURS, start, top, end - start, max(bottom - top, 0.5), tip)


# Parts of a chart


def _frame(x: Axis, y: Axis, labels: Sequence[str] | None = None) -> Markup:
    """Axes, ticks and their names. With `labels` the x axis has these, one a column."""
    parts = []
    for value in y.ticks():
        left, top = _at(x, y, x.low, value)
        parts.append(_line((left, top), (WIDTH - RIGHT, top), "grid"))
        parts.append(_text(left - 7, top + 4, y.text(value), "end", "tick"))
    bottom = HEIGHT - BOTTOM
    if labels is None:
        for value in x.ticks():
            left, _ = _at(x, y, value, y.low)
            parts.append(_text(left, bottom + 17, x.text(value), "middle", "tick"))
    else:
        # Not more names than there is room for.
        longest = max((len(label) for label in labels), default=1)
        room = (WIDTH - LEFT - RIGHT) / max(len(labels), 1)
        # The font has 12 px: about 7 a character, and 6 between two names.
        every = max(1, math.ceil((7.0 * longest + 6) / room))
        for i in range(0, len(labels), every):
            left, _ = _at(x, y, i + 0.5, y.low)
            parts.append(_text(left, bottom + 17, labels[i], "middle", "tick"))
    zero = min(max(0.0, y.low), y.high)
    parts.append(_line(_at(x, y, x.low, zero), _at(x, y, x.high, zero), "axis"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x.label, "middle", "name"))
    if y.label:
        turned = Markup(
            '<text class="name" text-anchor="middle" transform="translate(12 {}) rotate(-90)">{}</text>'
        )
        parts.append(turned.format((TOP + bottom) / 2, y.label))
    return Markup("").join(parts)


def _at(x: Axis, y: Axis, x_value: float, y_value: float) -> tuple[float, float]:
    across = (x_value - x.low) / (x.high - x.low)
    up = (y_value - y.low) / (y.high - y.low)
    left = LEFT + across * (WIDTH - LEFT - RIGHT)
    top = HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
    return left, top


def _line(start: tuple[float, float], end: tuple[float, float], kind: str) -> Markup:
    numbers = [f"{number:.1f}" for number in (*start, *end)]
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, *numbers)


def _text(left: float, top: float, text: str, anchor: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        kind, left, top, anchor, text
    )


def _svg(parts: Sequence[Markup], alt: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, escape(alt), Markup("").join(parts)
    )


def _round_step(step: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    for factor in (1, 2, 5, 10):
        if factor * power >= step * (1 - 1e-9):
            return factor * power
    return 10 * power
