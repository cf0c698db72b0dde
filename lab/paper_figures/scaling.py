"""The paper's Figure "performance with base models from 1B to 8B": accuracy over the size of the model.

Records are a report whose models are sizes of one toy, with equal training rows, and the parameters of each.
A pretrained model stands beside them, with another data set and other rows: its points are no part of the curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colar.evaluation import picture
from colar.evaluation.report_rows import Report
from paper_figures.points import INTERVALS, errors, legend_below, new_figure, points

SYSTEMS = (
    ("CoT", "cot", None),
    ("CoLaR, c = 1", "colar", 1),
    ("CoLaR, c = 2", "colar", 2),
    ("CoLaR, c = 5", "colar", 5),
)
"""Name of a curve, its method and compression factor."""


def data_of(report: Report, parameters: Mapping[str, int]) -> list[dict[str, Any]]:
    """Curves of `SYSTEMS` over `parameters` (of each model), smallest first.

    ValueError where a curve lacks one of the models.
    """
    curves = []
    for name, method, c in SYSTEMS:
        at = []
        for model, size in sorted(parameters.items(), key=lambda pair: pair[1]):
            found = points(report, model, method, "")
            at += [{"parameters": size, **point} for point in found if point["c"] == c]
        if len(at) < len(parameters):
            raise ValueError(f"{name} has rows of {len(at)} of {len(parameters)} models")
        curves.append({"name": name, "points": at})
    return curves


def beside(
    report: Report, of: Mapping[str, tuple[str, str]], trained: Sequence[int | None], parameters: int
) -> list[dict[str, Any]]:
    """One model of another report: a point for each of `SYSTEMS` that it was trained for (None for CoT).

    `of` has the name and the label of the model of each method.
    """
    curves = []
    for name, method, c in [system for system in SYSTEMS if system[2] in trained]:
        model, label = of[method]
        found = points(report, model, method, label)
        at = [{"parameters": parameters, **point} for point in found if point["c"] == c]
        curves.append({"name": name, "points": at})
    return curves


@picture.without_mathematics
def draw(data: dict[str, Any]) -> Any:
    """Panels of `data["panels"]` (`title`, `curves`): accuracy over parameters, on a logarithmic axis."""
    panels = data["panels"]
    figure = new_figure(0.4 + 4.4 * len(panels), 4.3)
    widths = [2 if len(panel["curves"][0]["points"]) > 1 else 1 for panel in panels]
    drawn = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axes, panel in zip(drawn, panels, strict=True):
        _panel(axes, panel["curves"])
        picture.dress(axes, panel["title"], "parameters", "accuracy (%)" if axes is drawn[0] else "")
        axes.set_ylim(bottom=0)
    legend_below(figure, drawn[0], INTERVALS)
    return figure


def _panel(axes: Any, curves: Sequence[dict[str, Any]]) -> None:
    axes.set_xscale("log")
    names = [name for name, _, _ in SYSTEMS]
    for each in curves:
        place = names.index(each["name"])
        colour, marker = picture.style(place)
        # Side by side: intervals of one size would hide each other.
        x = [point["parameters"] * 1.04 ** (place - 1.5) for point in each["points"]]
        y = [100 * point["accuracy"] for point in each["points"]]
        axes.plot(
            x, y, color=colour, marker=marker, markersize=5, mec="white", linewidth=1.4, label=each["name"]
        )
        errors(axes, x, each["points"], "accuracy", 100, colour)
    sizes = [point["parameters"] for point in curves[0]["points"]]
    axes.set_xticks(sizes, [_millions(size) for size in sizes])
    # A logarithmic axis of few decades names its minor ticks too, which would lie over the sizes.
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.6, sizes[-1] * 1.6)


def _millions(size: int) -> str:
    """0.1M, 1.8M, 135M."""
    return f"{size / 1e6:.2g}M" if size < 1e7 else f"{size / 1e6:.0f}M"
