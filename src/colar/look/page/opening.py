"""The page's opening: does it think, and what does it cost. Accuracy against #L and against time, with controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from colar.evaluation import picture
from colar.look.page.figures import (
    NONE,
    Chart,
    Numbers,
    PageTable,
    Section,
    address,
    as_percent,
    legend_below,
    names_of,
    new_axes,
    percent,
    with_interval,
)

THOUGHTS = {
    "own": ("its own thoughts", "solid"),
    "shuffled": ("another question's thoughts", "dashed"),
    "zeroed": ("zeros as thoughts", "dotted"),
    "none": ("thoughts left out", "dashdot"),
}
"""Name and line of what a system thought."""
FEW = 30
"""Questions below which the intervals are too narrow."""

CONTROL_NOTE = " The last column is paired by question: minus another's thoughts, or, of tokens, minus none."


def cost_section(whole: Mapping[str, Any]) -> Section:
    """Empty where no system has a `cost`."""
    systems = [system for system in whole["systems"] if system.get("cost")]
    if not systems:
        return Section("cost", "", "")
    names = names_of(systems)
    tables = [_table(systems, names)]
    if whole.get("comparisons"):
        tables.append(_comparisons(whole["comparisons"]))
    return Section(
        "cost",
        "Does it think, and what does it cost?",
        "Up is better, left is cheaper. A model that reads its thoughts falls when it is given others.",
        [
            _chart(systems, "length", "thoughts a question (#L)", 1),
            _chart(systems, "seconds", "milliseconds a question", 1000),
        ],
        tables,
        verdicts(systems, names),
    )


def verdicts(systems: Sequence[Numbers], names: Sequence[str]) -> list[str]:
    """The answer in words, a sentence or two for each system."""
    found = []
    for system, name in zip(systems, names, strict=True):
        own = system["cost"]["outcomes"]["own"]
        opening = (
            f"{name}: {percent(own['accuracy']['mean'])} of {own['n']} questions right, with "
            f"{own['length']['mean']:.1f} thoughts and {1000 * own['seconds']['mean']:.0f} ms a question."
        )
        found.append(f"{opening} {_verdict(system['cost'])}".rstrip())
    if min(system["cost"]["outcomes"]["own"]["n"] for system in systems) < FEW:
        found.append(f"Fewer than {FEW} questions: the intervals are too narrow to be relied on.")
    return found


def _verdict(cost: Mapping[str, Any]) -> str:
    """The result of the strongest control."""
    for kind in ("shuffled", "none"):
        found = cost["differences"].get(kind)
        if found is None or found["interval"] is None:
            continue
        low, high = found["interval"]
        left = percent(cost["outcomes"][kind]["accuracy"]["mean"])
        points = _points(found, " points")
        other = "another question's thoughts" if kind == "shuffled" else "its thoughts left out"
        if low > 0:
            return f"With {other}: {left}. The difference, {points}, says that its answers depend on what it thinks."
        if high < 0:
            return f"With {other} it is better: {left}, a difference of {points}."
        return f"With {other}: {left}. The difference, {points}, does not show that it uses its thoughts."
    return ""


def _points(difference: Mapping[str, Any] | None, unit: str = "") -> str:
    """A difference of two accuracies; the ends of its normal interval may lie beyond what there can be."""
    if difference is None or difference["interval"] is None:
        return with_interval(difference, 100, unit)
    low, high = difference["interval"]
    return with_interval({**difference, "interval": [max(-1.0, low), min(1.0, high)]}, 100, unit)


def _chart(systems: Sequence[Numbers], key: str, x: str, scale: float) -> Chart:
    """Accuracy against one cost; a line joins a model's speeds, for each kind of thoughts."""
    axes = new_axes(x, "accuracy")
    models = list(dict.fromkeys(system["model"] for system in systems))
    marks, names, rows = [], [], []
    for i, model in enumerate(models):
        colour, marker = picture.style(i)
        if len(models) > 1:
            marks.append(Line2D([], [], color=colour, marker=marker))
            names.append(model)
        for kind, (words, line) in THOUGHTS.items():
            points = []
            for system in systems:
                outcome = system["cost"]["outcomes"].get(kind)
                if system["model"] != model or outcome is None:
                    continue
                speed = names_of([system])[0]
                at, accuracy = scale * outcome[key]["mean"], outcome["accuracy"]["mean"]
                points.append((at, accuracy))
                rows.append([f"{model}, {speed}, {words}", f"{at:.2f}", percent(accuracy)])
                bars = {"xerr": _bar(outcome[key], scale), "yerr": _bar(outcome["accuracy"], 1)}
                face = colour if kind == "own" else "white"
                axes.errorbar(
                    at, accuracy, **bars, color=colour, elinewidth=0.8, marker=marker, markersize=5, mfc=face
                )
                if kind == "own":
                    # Curves of two models often lie close together.
                    beside = (5, -11 if i % 2 else 5)
                    axes.annotate(
                        speed, points[-1], beside, textcoords="offset points", fontsize=8, color=colour
                    )
            points.sort()
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=line, linewidth=1.2)
    for kind, (words, line) in THOUGHTS.items():
        if any(kind in system["cost"]["outcomes"] for system in systems):
            marks.append(Line2D([], [], color=picture.INK, linestyle=line))
            names.append(words)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(left=0)
    as_percent(axes.yaxis)
    legend_below(axes, marks, names)
    title = f"Accuracy against {'length' if key == 'length' else 'time'}"
    read = "Bars are 95% intervals over questions; hollow marks are controls."
    return Chart(title, read, address(axes), PageTable(["system", x, "accuracy"], rows))


def _bar(mean: Mapping[str, Any], scale: float) -> list[list[float]] | None:
    """An interval as matplotlib takes it: the distances from the mean down and up."""
    if mean["interval"] is None:
        return None
    low, high = mean["interval"]
    # An accuracy of 0 or 1 may lie a rounding beyond its interval.
    return [[max(0.0, scale * (mean["mean"] - low))], [max(0.0, scale * (high - mean["mean"]))]]


def _table(systems: Sequence[Numbers], names: Sequence[str]) -> PageTable:
    rows = []
    for system, name in zip(systems, names, strict=True):
        outcomes, differences = system["cost"]["outcomes"], system["cost"]["differences"]
        own = outcomes["own"]
        row = [
            name,
            str(own["n"]),
            with_interval(own["accuracy"], 100, "%"),
            with_interval(own["length"]),
            f"{own['forward_passes']['mean']:.1f}",
            with_interval(own["seconds"], 1000, " ms"),
        ]
        for kind in ("shuffled", "zeroed", "none"):
            row.append(with_interval(outcomes[kind]["accuracy"], 100, "%") if kind in outcomes else NONE)
        row.append(_points(differences.get("shuffled", differences.get("none"))))
        rows.append(row)
    head = ["system", "questions", "accuracy", "#L", "forward passes", "time", "another's thoughts", "zeros"]
    head += ["left out", "own minus control"]
    # A column that is empty in every row is a control that was not requested.
    kept = [k for k in range(len(head)) if any(row[k] != NONE for row in rows)]
    return PageTable(
        [head[k] for k in kept],
        [[row[k] for k in kept] for row in rows],
        "Accuracy, cost and controls",
        "In brackets: 95% intervals over questions." + (CONTROL_NOTE if len(head) - 1 in kept else ""),
    )


def _comparisons(found: Sequence[Mapping[str, Any]]) -> PageTable:
    rows = []
    for each in found:
        mean = {"mean": each["difference"], "interval": each["interval"]}
        name = f"{each['model']} minus {each['baseline']}"
        rows.append([name, *names_of([each]), str(each["n"]), _points(mean)])
    return PageTable(
        ["models", "at", "questions", "points"],
        rows,
        "Models compared",
        "Accuracy of one minus the other on the same questions; an interval without 0 is a difference.",
    )
