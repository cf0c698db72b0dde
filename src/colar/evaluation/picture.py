"""The style of all pictures, and their files.

Everything goes through `matplotlib.figure.Figure` and never through pyplot, so that a picture drawn from a server or a
training process changes nothing for its host. The same data give the same bytes on one installation.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from colar import files
from colar.checks import check_choice

# Okabe and Ito 2008: eight colours that colour-blind readers can tell apart. Their yellow is too faint on white, so a
# grey stands in its place. The last two are from Paul Tol's muted scheme.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777", "#882255", "#999933",
)  # fmt: skip
MARKERS = ("o", "s", "D", "^", "v", "p", "h", "X")
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


without_mathematics = matplotlib.rc_context({"text.parse_math": False})
"""Decorates what draws a picture: its texts are drawn as they are, also what stands between two `$`.

The names of ticks, which matplotlib makes when it saves the picture, may be mathematics: 10 with an exponent.
"""


def new_figure(width: float, height: float) -> Any:
    """An empty figure of `width` x `height` inches with its own Agg canvas."""
    # Text is measured with the canvas; pyplot would attach one that it keeps itself.
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


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


def legend(figure: Any, marks: Sequence[Any], names: Sequence[str], **how: Any) -> None:
    """Give a figure a legend without a frame; `how` goes to matplotlib."""
    figure.legend(marks, names, frameon=False, labelcolor=INK, **how)


def save(figure: Any, path: str | Path, dpi: int = DPI) -> Path:
    """Write the figure as .png or .svg in one step: the path holds the old picture or the new one. Returns the path."""
    path = Path(path)
    kind = path.suffix.removeprefix(".")
    check_choice("the ending of a picture", kind, list(_WITHOUT_DATE))
    # Drawn into memory first: where drawing fails, no file has been touched.
    return files.write_bytes(path, image(figure, kind, dpi))


def image(figure: Any, kind: str, dpi: int = DPI) -> bytes:
    """The figure as the content of a file of that kind, png or svg."""
    buffer = io.BytesIO()
    # These two settings are global: they are the host's again as soon as the image is made.
    with matplotlib.rc_context(_SVG):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=_WITHOUT_DATE[kind])
    return buffer.getvalue()
