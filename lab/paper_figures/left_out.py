"""The paper's Figure "trained with c in {1, 3, 5, 7}, tested with 2, 4, 6 as well", the unseen on a grey ground."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colar.evaluation import picture
from colar.evaluation.report_rows import Report
from paper_figures.points import INTERVALS, errors, legend_below, new_figure, points

ROWS = (("accuracy", 100.0, "accuracy (%)"), ("length", 1.0, "#L (thoughts)"))


def data_of(report: Report, trained: Sequence[int], model: str, label: str) -> dict[str, Any]:
    """One model's points, and the factors that it was trained with. ValueError where one of these was not asked for."""
    found = points(report, model, "colar", label)
    missing = set(trained) - {point["c"] for point in found}
    if missing:
        raise ValueError(f"no answers at c = {', '.join(map(str, sorted(missing)))}")
    return {"trained": list(trained), "points": found}


@picture.without_mathematics
def draw(data: dict[str, dict[str, Any]]) -> Any:
    """A column for each model: accuracy above, #L below. `data` has what `data_of` gives by the column's title."""
    figure = new_figure(4.6 * len(data), 5.6)
    panels = figure.subplots(2, len(data), squeeze=False)
    for column, (title, found) in enumerate(data.items()):
        for row, (key, scale, name) in enumerate(ROWS):
            axes = panels[row][column]
            _panel(axes, found, key, scale)
            heading = title if row == 0 else ""
            below = "compression factor c asked for" if row else ""
            picture.dress(axes, heading, below, "" if column else name)
            axes.set_ylim(bottom=0)
    legend_below(figure, panels[1][0], INTERVALS)
    return figure


def _panel(axes: Any, data: dict[str, Any], key: str, scale: float) -> None:
    blue, orange = picture.COLOURS[:2]
    found = data["points"]
    unseen = [point["c"] for point in found if point["c"] not in data["trained"]]
    for number, c in enumerate(unseen):
        axes.axvspan(
            c - 0.4, c + 0.4, color="#e6e6e6", label=None if number else "c not in training", zorder=0
        )
    x = [point["c"] for point in found]
    if key == "length":
        wanted = [point["reference_length"] for point in found]
        axes.plot(
            x, wanted, color=orange, linewidth=1.3, linestyle="--", label="what c asks for, ceil(tokens / c)"
        )
    y = [scale * point[key] for point in found]
    axes.plot(x, y, color=blue, marker="o", mec="white", linewidth=1.6, label="the model")
    errors(axes, x, found, key, scale, blue)
    axes.set_xticks(x)
