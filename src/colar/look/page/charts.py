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
from colar.look.inspect_tables import THOUGHTS, Numbers, names_of

WIDTH, HEIGHT = 4.8, 3.2
"""Of a figure, in inches."""
LINES = dict(zip(THOUGHTS, ("solid", "dashed", "dotted", "dashdot"), strict=True))


@dataclass(frozen=True)
class Chart:
    """A figure and its numbers; `image` is its address: the SVG itself."""

    title: str
    image: str
    numbers: TextTable


@picture.without_mathematics
def cost_chart(systems: Sequence[Numbers], key: str, title: str, x: str, scale: float) -> Chart:
    """Accuracy against one cost; a line joins a model's speeds, for each kind of thoughts."""
    figure = picture.new_figure(WIDTH, HEIGHT)
    axes = figure.subplots()
    # The page has the title, as text.
    picture.dress(axes, "", x, "accuracy")
    models = list(dict.fromkeys(system["model"] for system in systems))
    marks, names, rows = [], [], []
    for i, model in enumerate(models):
        colour, marker = picture.style(i)
        if len(models) > 1:
            marks.append(Line2D([], [], color=colour, marker=marker))
            names.append(model)
        for kind, words in THOUGHTS.items():
            points = []
            for name, system in zip(names_of(systems), systems, strict=True):
                outcome = system["cost"]["outcomes"].get(kind)
                if system["model"] != model or outcome is None:
                    continue
                at, accuracy = scale * outcome[key]["mean"], outcome["accuracy"]["mean"]
                points.append((at, accuracy))
                rows.append([f"{name}, {words}", f"{at:.2f}", percent(accuracy)])
                bars = {"xerr": _bar(outcome[key], scale), "yerr": _bar(outcome["accuracy"], 1)}
                face = colour if kind == "own" else "white"
                axes.errorbar(
                    at, accuracy, **bars, color=colour, elinewidth=0.8, marker=marker, markersize=5, mfc=face
                )
                if kind == "own":
                    # Curves of two models often lie close together.
                    beside = (5, -11 if i % 2 else 5)
                    # The colour is the model's: its name is left out of what it was asked with.
                    tag = names_of([system])[0]
                    axes.annotate(
                        tag, points[-1], beside, textcoords="offset points", fontsize=8, color=colour
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
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(names) > 1:
        picture.legend(figure, marks, names, loc="outside lower left", ncols=2, fontsize=8)
    image = base64.b64encode(picture.image(figure, "svg")).decode()
    numbers = TextTable("", ["system", x, "accuracy %"], rows)
    return Chart(title, f"data:image/svg+xml;base64,{image}", numbers)


def _bar(mean: Mapping[str, Any], scale: float) -> list[list[float]] | None:
    """An interval as matplotlib takes it: the distances from the mean down and up."""
    if mean["interval"] is None:
        return None
    low, high = mean["interval"]
    return [[scale * (mean["mean"] - low)], [scale * (high - mean["mean"])]]
