"""The picture of a report: accuracy against reasoning length.

It takes rows of a report (evaluation/rows.py) and writes one PNG. Bars are 95% intervals, 1.96 standard errors
clustered by question, as in the tables.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from colar.checks import check_choice
from colar.evaluation.rows import (
    AVERAGE,
    ReportRow,
    System,
    curve_name,
    datasets_of,
    none_first,
    point_name,
    split_option,
    systems_of,
)
from colar.evaluation.stats import Z95

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
    return save(draw_accuracy(rows), path)


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
        styles.setdefault(_curve(row.system), style(len(styles)))

    figure, panels = _panels(datasets)
    for axes, dataset, main in panels:
        _draw_curves(axes, _shown(rows, dataset), styles)
        dress(axes, _heading(dataset, rows) if main else dataset, size=9 if main else 8)
        if main:
            label = f"reasoning length, embeddings emitted (#L)\n{_caption(rows)}"
            axes.set_xlabel(label, fontsize=9, color=INK)
            axes.set_ylabel("accuracy (%)", fontsize=9, color=INK)
    _name_the_rest(figure, rows, styles)

    # Labels look for free space between the curves, so all curves and axes must be where they will stay.
    settle(figure)
    for axes, dataset, main in panels:
        shown = _shown(rows, dataset)
        if not shown:
            _say_why_empty(axes)
            continue
        labels = _names(shown, rows, styles) if main else []
        labels += _tags(shown, styles, 8 if main else 6.5)
        place(axes, labels, _obstacles(shown))
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
        figure = new_figure(7, 4.6)
        only = datasets[0] if datasets else AVERAGE
        return figure, [(figure.subplots(), only, True)]
    # The average fills the first column; the small panels stand two to a column, 2.6 inches wide each.
    small = datasets[:MAX_DATASETS]
    columns = math.ceil(len(small) / 2)
    figure = new_figure(6 + 2.6 * columns, 4.8)
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


def _point(row: ReportRow) -> Point:
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


def _obstacles(rows: Sequence[ReportRow]) -> list[list[Point]]:
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
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize=9, color=INK)


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
    made = legend(
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
    made.get_title().set_color(INK)
    for text, curve in zip(made.get_texts(), rest, strict=True):
        text.set_color(styles[curve][0])


def _name(curve: System, systems: Sequence[System]) -> str:
    """The name of a curve, with its decoding where the picture has several."""
    several_decodings = len({system.decoding for system in systems}) > 1
    return curve_name(curve, systems) + (f", {curve.decoding}" if several_decodings else "")


def _names(shown: Sequence[ReportRow], rows: Sequence[ReportRow], styles: Styles) -> list[Label]:
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
        labels.append(Label(name, anchors, styles[curve][0], 9.5, bold=True))
    return labels


def _tags(shown: Sequence[ReportRow], styles: Styles, size: float) -> list[Label]:
    """What a point was asked at, once for each curve: beside one of the points that its training runs have there."""
    # The runs of one speed lie close together: a tag beside each would hide the points.
    anchors: defaultdict[System, list[Point]] = defaultdict(list)
    for row in shown:
        if _tag(row.system):
            anchors[row.system.all_runs()].append(_point(row))
    labels = []
    for system, points in anchors.items():
        colour, _ = styles[_curve(system)]
        labels.append(Label(_tag(system), points, colour, size))
    return labels


def _tag(system: System) -> str:
    """What tells a point from the others of its curve: `c=2`, and the value of an option (`c=2, 0.8`)."""
    _, value = split_option(system.label)
    parts = [point_name(system), "" if value is None else f"{value:g}"]
    return ", ".join(part for part in parts if part)


# A figure without global state: our colours, our axes, labels that keep out of each other's way, an atomic file.
#
# Everything goes through `matplotlib.figure.Figure` and never through pyplot, so that a picture drawn from a server
# or a training process changes nothing for its host. The same data give the same bytes on one installation: no date,
# no version in the file.
#
# Texts are drawn as they are. matplotlib reads what stands between two `$` as mathematics, and fails where it is
# none: a question has amounts of money, a path or a label anything. `save`, `settle` and `extent` switch that off, so
# whoever draws need not think of it.

# Okabe and Ito 2008: eight colours that colour-blind readers can tell apart. Their yellow is too faint on white, so a
# grey stands in its place. The last two are from Paul Tol's muted scheme.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777", "#882255", "#999933",
)  # fmt: skip
MARKERS = ("o", "s", "D", "^", "v", "p", "h", "*")
INK = "#222222"
FAINT = "#dddddd"
DPI = 160

# matplotlib writes its version and the date into a file unless it is told not to.
_WITHOUT_DATE: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Creator": None, "Date": None},
}
# Parts of an SVG file are named by the salt, or else at random. Letters are paths: a reader's fonts have other widths.
_SVG = {"svg.hashsalt": "colar", "svg.fonttype": "path"}

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top

# Where a label may stand: at these distances (in points of 1/72 inch) from its anchor, in eight directions.
_RADII = (7, 13, 21, 32)
_ANGLES = tuple(math.pi * eighth / 4 for eighth in range(8))


@dataclass(frozen=True)
class Label:
    """A text that may stand near any of `anchors` (data coordinates), best near the first one."""

    text: str
    anchors: Sequence[Point]
    colour: str
    size: float
    bold: bool = False


def new_figure(width: float, height: float) -> Any:
    """An empty figure of `width` x `height` inches with its own Agg canvas."""
    # `place` measures text, for which the figure needs a canvas; pyplot would attach one that it keeps itself.
    made = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(made)
    return made


def dress(axes: Any, title: str, x: str = "", y: str = "", size: float = 9) -> None:
    """Give a panel the house style: title at the left, no box, a faint grid behind the data."""
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
    # Both change from one curve to the next. After a round of colours the markers are shifted by one, else the same
    # pairs would come back.
    rounds = index // len(COLOURS)
    return COLOURS[index % len(COLOURS)], MARKERS[(index + rounds) % len(MARKERS)]


def legend(drawn: Any, marks: Sequence[Any], names: Sequence[str], **how: Any) -> Any:
    """A legend of a figure, without a frame, that has each name as it is; `how` goes to matplotlib."""
    # matplotlib before 3.10 leaves out names that begin with "_". So numbers stand in for them until it is made.
    numbers = [str(number) for number in range(len(names))]
    made = drawn.legend(marks, numbers, frameon=False, **how)
    for text, name in zip(made.get_texts(), names, strict=True):
        text.set_text(name)
        # Whoever measures it finds the size that it will have, see `save`.
        text.set_parse_math(False)
    return made


def save(drawn: Any, path: str | Path, dpi: int = DPI) -> Path:
    """Write the figure as .png or .svg in one step: the path holds the old picture or the new one. Returns the path."""
    path = Path(path)
    kind = path.suffix.removeprefix(".")
    check_choice("the ending of a picture", kind, list(_WITHOUT_DATE))
    # Drawn into memory first: where drawing fails, no file has been touched.
    content = image(drawn, kind, dpi)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its target, hence on the same file system: only there is a rename atomic.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        # mkstemp makes files that nobody but their owner may read.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def image(drawn: Any, kind: str, dpi: int = DPI) -> bytes:
    """The figure as the content of a file of that kind, png or svg."""
    _take_literally(drawn)
    buffer = io.BytesIO()
    # These two settings are global: they are the host's again as soon as the image is made.
    with matplotlib.rc_context(_SVG):
        drawn.savefig(buffer, format=kind, dpi=dpi, metadata=_WITHOUT_DATE[kind])
    return buffer.getvalue()


def place(axes: Any, labels: Iterable[Label], obstacles: Iterable[Sequence[Point]]) -> None:
    """Write each label where it covers least: near an anchor, inside the panel, off the others and off `obstacles`.

    An obstacle is a line through points in data coordinates, or one point. Labels are placed one after another and
    never moved again, so the most important one comes first. The layout must be final, see `settle`.
    """
    taken: list[Box] = []
    for obstacle in obstacles:
        taken += _along(axes.transData.transform(obstacle))
    for label in labels:
        text = axes.annotate(
            label.text,
            label.anchors[0],
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=label.size,
            color=label.colour,
            fontweight="bold" if label.bold else "normal",
        )
        # The text must exist before its size can be measured.
        anchor, x, y = _best_spot(axes, text, label, taken)
        text.xy = anchor
        text.set_position((x, y))
        taken.append(extent(text).extents)


def _best_spot(axes: Any, text: Any, label: Label, taken: Sequence[Box]) -> tuple[Point, float, float]:
    """(anchor, x, y): the anchor and the offset from it, in points, that hide the least."""
    pixels_per_point = axes.figure.dpi / 72
    panel = axes.get_window_extent(axes.figure.canvas.get_renderer()).extents
    size = extent(text)
    # With a pixel of air on every side.
    half_width = size.width / 2 + 1
    half_height = size.height / 2 + 1
    best = (label.anchors[0], 0.0, 0.0)
    least = math.inf
    for rank, anchor in enumerate(label.anchors):
        anchor_x, anchor_y = axes.transData.transform(anchor)
        for radius in _RADII:
            for angle in _ANGLES:
                # From the anchor to the middle of the text, in points: the radius, and half the text.
                x = math.cos(angle) * (radius + half_width / pixels_per_point - 3)
                y = math.sin(angle) * (radius + half_height / pixels_per_point - 3)
                middle_x = anchor_x + x * pixels_per_point
                middle_y = anchor_y + y * pixels_per_point
                spot = _around(middle_x, middle_y, half_width, half_height)
                # A label that leaves the panel is worse than one that covers something in it. Among spots that hide
                # the same, the one close to the anchor wins, and the first anchor before the others.
                outside = 4 * half_width * half_height - _overlap(spot, panel)
                hidden = sum(_overlap(spot, other) for other in taken) + 3 * outside
                # Hidden area by the text's height: the length that is hidden, to weigh with a distance.
                cost = hidden / (2 * half_height) + 0.8 * radius + 2 * rank
                if cost < least:
                    best = (anchor, x, y)
                    least = cost
    return best


def settle(drawn: Any) -> None:
    """Fix the layout: positions that are measured from now on are those of the file."""
    _take_literally(drawn)
    # The layout engine moves axes whenever the figure is drawn, also when it is saved.
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")


def extent(text: Any) -> Any:
    """The box of a text in pixels, as it will be drawn. The layout must be final, see `settle`."""
    # The text may be younger than `settle`, and `save` is still to come.
    text.set_parse_math(False)
    return text.get_window_extent(text.figure.canvas.get_renderer())


def _take_literally(artist: Any) -> None:
    """Have all texts below `artist` drawn as they are, but for the names of ticks.

    Those are matplotlib's own: on a logarithmic axis they are mathematics, 10 with an exponent.
    """
    for part in artist.get_children():
        if isinstance(part, Axis):
            part.label.set_parse_math(False)
        elif isinstance(part, Text):
            part.set_parse_math(False)
        else:
            _take_literally(part)


def _along(corners: Any) -> Iterator[Box]:
    """Small boxes along a line through `corners` (pixels); a larger one at each corner, where the marker is."""
    for x, y in corners:
        yield _around(x, y, 6, 6)
    for (x, y), (next_x, next_y) in pairwise(corners):
        # A box every 5 pixels, without the two ends, which have theirs.
        steps = int(math.hypot(next_x - x, next_y - y) / 5)
        for step in range(1, steps):
            share = step / steps
            yield _around(x + share * (next_x - x), y + share * (next_y - y), 2.5, 2.5)


def _around(x: float, y: float, half_width: float, half_height: float) -> Box:
    return x - half_width, y - half_height, x + half_width, y + half_height


def _overlap(a: Box, b: Box) -> float:
    """Shared area of two boxes, in square pixels."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)
