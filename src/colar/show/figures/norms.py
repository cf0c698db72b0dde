"""The paper's appendix B: relative differences of the norms of consecutive layers, at each compression factor.

    (|h_(l+1)| - |h_l|) / |h_l|, the mean over the thoughts of the reference's chain

Records are those of `colar inspect`. Of several training runs the mean is drawn with its t interval over runs; of one
run the interval is over questions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.ticker import MaxNLocator

from colar.ops.stats import Z95, t_interval
from colar.show import canvas
from colar.show.figures.points import legend_below


def data_of(systems: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Curves by c from the `systems` of an inspection. Its checkpoints are training runs of one recipe."""
    by_factor: defaultdict[float, list[dict[str, Any]]] = defaultdict(list)
    for system in systems:
        by_factor[system["compression_factor"]].append(system["norms"])
    curves = []
    for c, runs in sorted(by_factor.items()):
        columns = list(zip(*(run["differences"] for run in runs), strict=True))
        errors = runs[0]["differences_se"]
        half: list[float | None] = [t_interval(column) for column in columns]
        if len(runs) == 1 and errors is not None:
            half = [Z95 * error for error in errors]
        curves.append({
            "c": c, "differences": [fmean(column) for column in columns], "half": half,
            "runs": [run["differences"] for run in runs], "n_thoughts": sum(run["n_thoughts"] for run in runs),
        })  # fmt: skip
    interval = "over training runs" if len(curves[0]["runs"]) > 1 else "over questions"
    return {"interval": interval, "curves": curves}


def draw(data: dict[str, dict[str, Any]]) -> Any:
    """A panel for each model. `data` has what `data_of` gives by the panel's title."""
    figure = canvas.figure(4.8 * len(data), 3.9)
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for axes, (title, found) in zip(panels, data.items(), strict=True):
        for curve in found["curves"]:
            # A factor has one colour in all panels.
            colour, marker = canvas.style(round(curve["c"]) - 1)
            values, half = curve["differences"], curve["half"]
            layers = list(range(1, len(values) + 1))
            axes.plot(
                layers,
                values,
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.4,
                label=f"c = {curve['c']:g}",
            )
            if None not in half:
                low = [value - width for value, width in zip(values, half, strict=True)]
                high = [value + width for value, width in zip(values, half, strict=True)]
                axes.fill_between(layers, low, high, color=colour, alpha=0.13, linewidth=0)
        y = "relative difference of norms" if axes is panels[0] else ""
        canvas.dress(axes, title, f"layer\nshaded: 95% interval {found['interval']}", y)
        axes.axhline(0, color="#999999", linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    most = max(panels, key=lambda axes: len(axes.lines))
    legend_below(figure, most, "", columns=5)
    return figure
