"""A figure without global state: our colours, our axes, labels that keep out of each other's way, an atomic PNG.

Everything goes through `matplotlib.figure.Figure` and never through pyplot, so that a picture drawn from a
server or a training process changes nothing for its host. The same data give the same bytes on one
installation: no date, no version in the file.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito 2008: eight colours that colour-blind readers tell apart; their yellow, faint on white, is a grey here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
INK, FAINT = "#222222", "#dddddd"
DPI = 160

_RADII = (7, 13, 21, 32)  # points between a label's anchor and the label
_DIRECTIONS = tuple((math.cos(math.pi * i / 4), math.sin(math.pi * i / 4)) for i in range(8))


@dataclass(frozen=True)
class Label:
    """A text that may sit near any of `anchors` (data coordinates), the first being the best liked."""

    text: str
    anchors: Sequence[tuple[float, float]]
    colour: str
    size: float
    bold: bool = False


def figure(width: float, height: float) -> Any:
    """An empty figure of `width` x `height` inches with its own Agg canvas."""
    made = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(made)
    return made


def dress(axes: Any, title: str, x: str = "", y: str = "", size: float = 9) -> None:
    """House style of one panel: title at the left, no box, a faint grid behind the data."""
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
    """(colour, marker) of curve `index`: 64 pairs before one comes back."""
    return COLOURS[index % len(COLOURS)], MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]


def save(drawn: Any, path: str | Path) -> Path:
    """Write the figure as a PNG in one step (beside its target, then renamed). Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(buffer.getvalue())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def place(axes: Any, labels: Iterable[Label], obstacles: Iterable[tuple[float, float]]) -> None:
    """Write each label where it covers least: near an anchor, inside the panel, off the others and off `obstacles`.

    Greedy and in order: the label that matters most comes first. The layout must be final, see `settle`.
    """
    renderer = axes.figure.canvas.get_renderer()
    inside = axes.get_window_extent(renderer)
    taken = [_around(*axes.transData.transform(point), 4, 4) for point in obstacles]
    for label in labels:
        text = axes.annotate(
            label.text, label.anchors[0], xytext=(0, 0), textcoords="offset points", ha="center", va="center",
            fontsize=label.size, color=label.colour, fontweight="bold" if label.bold else "normal",
        )  # fmt: skip
        box = text.get_window_extent(renderer)
        width, height = box.width / 2 + 1, box.height / 2 + 1
        scale = axes.figure.dpi / 72
        options = [
            (rank, radius, anchor, dx * (radius + width / scale - 4), dy * (radius + height / scale - 4))
            for rank, anchor in enumerate(label.anchors)
            for radius in _RADII
            for dx, dy in _DIRECTIONS
        ]
        best, cost = options[0], math.inf
        for option in options:
            rank, radius, anchor, x, y = option
            centre_x, centre_y = axes.transData.transform(anchor)
            spot = _around(centre_x + x * scale, centre_y + y * scale, width, height)
            area = 4 * width * height
            hidden = sum(_overlap(spot, other) for other in taken) + 3 * (
                area - _overlap(spot, inside.extents)
            )
            here = hidden / height + 0.6 * radius + 2 * rank
            if here < cost:
                best, cost = option, here
        _, _, anchor, x, y = best
        text.xy = anchor
        text.set_position((x, y))
        spot_x, spot_y = axes.transData.transform(anchor)
        taken.append(_around(spot_x + x * scale, spot_y + y * scale, width, height))


def settle(drawn: Any) -> None:
    """Fix the layout, so that what is measured now is true of the file."""
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")


def _around(x: float, y: float, half_width: float, half_height: float) -> tuple[float, float, float, float]:
    return x - half_width, y - half_height, x + half_width, y + half_height


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Shared area of two boxes (left, bottom, right, top), in pixels."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)
