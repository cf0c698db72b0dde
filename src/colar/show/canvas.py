"""A figure without global state: our colours, our axes, labels that keep out of each other's way, an atomic file.

Everything goes through `matplotlib.figure.Figure` and never through pyplot, so that a picture drawn from a
server or a training process changes nothing for its host. The same data give the same bytes on one
installation: no date, no version in the file.

Texts are drawn as they are. matplotlib reads what stands between two `$` as mathematics, and fails where it is none:
a question has amounts of money, a path or a label anything. `save`, `settle` and `extent` switch that off, so whoever
draws need not think of it.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from colar.checks import check_choice

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


def figure(width: float, height: float) -> Any:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    _take_literally(drawn)
    # Drawn into memory first: where drawing fails, no file has been touched.
    buffer = io.BytesIO()
    # These two settings are global: they are the host's again as soon as the file is written.
    with matplotlib.rc_context(_SVG):
        drawn.savefig(buffer, format=kind, dpi=dpi, metadata=_WITHOUT_DATE[kind])
    # Beside its target, hence on the same file system: only there is a rename atomic.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(buffer.getvalue())
        # mkstemp makes files that nobody but their owner may read.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


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
