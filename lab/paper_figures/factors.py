"""The paper's Figure "random c against a single c": lines for one model of all factors, bars for one model each."""

from __future__ import annotations

from typing import Any

from colar.evaluation import picture
from colar.evaluation.report_rows import Report
from paper_figures.points import INTERVALS, errors, legend_below, new_figure, points

RANDOM = "random c, all rows"
SINGLE = {"one c": "one c, all rows", "one c, a fifth": "one c, a fifth of the rows"}
"""Label of a report's rows -> what their bars are called."""
COLOURS = {"one c": "#a9a9a9", "one c, a fifth": "#d9d9d9"}
WIDTH = 0.38


def data_of(report: Report, model: str = "tiny") -> dict[str, Any]:
    """The model trained on random c, and those of each label in `SINGLE`."""
    single = {label: points(report, model, "colar", label) for label in SINGLE}
    return {"random": points(report, model, "colar", ""), "single": single}


@picture.without_mathematics
def draw(data: dict[str, Any]) -> Any:
    """Two panels over c: accuracy and #L."""
    figure = new_figure(9.4, 4.0)
    accuracy, length = figure.subplots(1, 2)
    _panel(accuracy, data, "accuracy", 100)
    _panel(length, data, "length", 1)
    picture.dress(accuracy, "Accuracy", "compression factor c asked for", "accuracy (%)")
    picture.dress(length, "Reasoning length", "compression factor c asked for", "#L (thoughts)")
    accuracy.set_ylim(0, 105)
    length.set_ylim(bottom=0)
    legend_below(figure, accuracy, INTERVALS)
    return figure


def _panel(axes: Any, data: dict[str, Any], key: str, scale: float) -> None:
    for place, (label, found) in enumerate(data["single"].items()):
        x = [point["c"] + (place - 0.5) * WIDTH for point in found]
        y = [scale * point[key] for point in found]
        axes.bar(x, y, WIDTH, color=COLOURS[label], label=SINGLE[label])
        errors(axes, x, found, key, scale, "#555555")
    blue = picture.COLOURS[0]
    found = data["random"]
    x = [point["c"] for point in found]
    y = [scale * point[key] for point in found]
    axes.plot(x, y, color=blue, marker="o", mec="white", linewidth=1.8, label=RANDOM, zorder=5)
    errors(axes, x, found, key, scale, blue)
    axes.set_xticks(x)
