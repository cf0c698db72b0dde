"""The paper's appendix B: relative differences of the norms of consecutive layers, at each compression factor.

    (|h_(l+1)| - |h_l|) / |h_l|, the mean over the thoughts of the reference's chain

Its data were measured at commit b0a26a2, whose `colar inspect` had norms. Of several training runs the mean is drawn
with its t interval over runs; of one run the interval is over questions.
"""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import MaxNLocator

from colar.evaluation import picture
from paper_figures.points import bars, legend_below, new_figure


@picture.without_mathematics
def draw(data: dict[str, dict[str, Any]]) -> Any:
    """Two panels for each model: the first layer, behind which short embeddings have grown long, and the others.

    `data` has the curves by c of each model, by its title.
    """
    figure = new_figure(4.9 * len(data), 3.9)
    panels = figure.subplots(1, 2 * len(data), squeeze=False, width_ratios=[1, 3] * len(data))[0]
    for number, (title, found) in enumerate(data.items()):
        first, others = panels[2 * number : 2 * number + 2]
        for curve in found["curves"]:
            n_layers = len(curve["differences"])
            _draw_curve(first, curve, range(1))
            _draw_curve(others, curve, range(1, n_layers))
        picture.dress(first, title, "layer", "" if number else "relative difference of norms")
        picture.dress(others, "", f"layer; bars: 95% interval {found['interval']}")
        first.set_xticks([1])
        first.set_xlim(0.5, 1.5)
        first.set_ylim(bottom=0)
        others.xaxis.set_major_locator(MaxNLocator(integer=True))
        others.axhline(0, color="#999999", linewidth=0.8)
    # The legend is that of one panel: in one with fewer curves some c would be missing.
    most = max(panels[1::2], key=lambda axes: len(axes.lines))
    legend_below(figure, most, "", columns=5)
    return figure


def _draw_curve(axes: Any, curve: dict[str, Any], layers: range) -> None:
    # A factor has one colour in all panels; side by side, or its interval would hide the others'.
    place = round(curve["c"]) - 1
    colour, marker = picture.style(place)
    x = [layer + 1 + 0.06 * (place - 2) for layer in layers]
    y = [curve["differences"][layer] for layer in layers]
    axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.3, label=f"c = {curve['c']:g}")
    bars(axes, x, y, [curve["half"][layer] for layer in layers], colour)
