"""The page's opening: does it think, and what does it cost. Accuracy against #L and against time, with controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from colar.look.page import charts
from colar.look.page.charts import Point, Series
from colar.look.page.figures import (
    NONE,
    Figure,
    Key,
    Section,
    System,
    Table,
    names_of,
    percent,
    with_interval,
)

VARIANTS = {
    "own": "its own thoughts",
    "shuffled": "another question's thoughts",
    "zeroed": "zeros as thoughts",
    "none": "thoughts left out",
}
FEW = 30
"""Questions below which the intervals are too narrow."""


def cost_section(whole: Any) -> Section:
    """Empty where no system has a `cost`."""
    systems = [system for system in whole["systems"] if system.get("cost")]
    if not systems:
        return Section("cost", "", "")
    names = names_of(systems)
    figures = [
        _figure(systems, "length", "thoughts a question (#L)", lambda value: value),
        _figure(systems, "seconds", "milliseconds a question", lambda value: 1000 * value),
    ]
    tables = [_table(systems, names)]
    if whole.get("comparisons"):
        tables.append(_comparisons(whole["comparisons"]))
    return Section(
        "cost",
        "Does it think, and what does it cost?",
        "Up is better, left is cheaper. A model that reads its thoughts falls when it is given others.",
        figures,
        tables,
        verdicts(systems, names),
    )


def verdicts(systems: Sequence[System], names: Sequence[str]) -> list[str]:
    """The answer in words, a sentence or two for each system."""
    said = []
    for system, name in zip(systems, names, strict=True):
        own = system["cost"]["variants"]["own"]
        opening = (
            f"{name}: {percent(own['accuracy']['mean'])} of {own['n']} questions right, with "
            f"{own['length']['mean']:.1f} thoughts and {1000 * own['seconds']['mean']:.0f} ms a question."
        )
        said.append(f"{opening} {_verdict(system['cost'])}".rstrip())
    if min(system["cost"]["variants"]["own"]["n"] for system in systems) < FEW:
        said.append(f"Fewer than {FEW} questions: the intervals are too narrow to be relied on.")
    return said


def _verdict(cost: Any) -> str:
    """What the strongest control says."""
    for kind in ("shuffled", "none"):
        found = cost["differences"].get(kind)
        if found is None or found["interval"] is None:
            continue
        low, high = found["interval"]
        left = percent(cost["variants"][kind]["accuracy"]["mean"])
        points = _points(found, " points")
        other = "another question's thoughts" if kind == "shuffled" else "its thoughts left out"
        if low > 0:
            return f"With {other}: {left}. The difference, {points}, says that its answers depend on what it thinks."
        if high < 0:
            return f"With {other} it is better: {left}, a difference of {points}."
        return f"With {other}: {left}. The difference, {points}, does not show that it uses its thoughts."
    return ""


def _points(difference: Any, unit: str = "") -> str:
    """A difference of two accuracies; the ends of its normal interval may lie beyond what there can be."""
    if difference is None or difference["interval"] is None:
        return with_interval(difference, 100, unit=unit)
    low, high = difference["interval"]
    return with_interval({**difference, "interval": [max(-1.0, low), min(1.0, high)]}, 100, unit=unit)


def _figure(systems: Sequence[System], key: str, x_label: str, scale: Callable[[float], float]) -> Figure:
    """Accuracy against one cost; a line joins a model's speeds, for each kind of thoughts."""
    models = list(dict.fromkeys(system["model"] for system in systems))
    series, legend = [], []
    xs: list[float] = []
    for colour, model in enumerate(models):
        legend.append(Key(model, colour))
        mine = [system for system in systems if system["model"] == model]
        for kind, words in VARIANTS.items():
            points = []
            for system in mine:
                variant = system["cost"]["variants"].get(kind)
                if variant is not None:
                    points.append(_point(system, variant, key, scale, f"{model}, {words}", kind == "own"))
                    xs += [points[-1].x, *(points[-1].x_interval or ())]
            if points:
                points.sort(key=lambda point: point.x)
                series.append(Series(f"{model}, {words}", points, colour, f"variant {kind}"))
    found = {kind for system in systems for kind in system["cost"]["variants"]}
    for kind, words in VARIANTS.items():
        if kind in found:
            legend.append(Key(words, COLOURLESS, f"variant {kind}"))
    x = charts.axis_of(x_label, [max(value, 0.0) for value in xs])
    chart = charts.lines(series, x, charts.shares("accuracy"), f"Accuracy against {x_label}")
    rows = [[each.name, f"{point.x:.2f}", percent(point.y)] for each in series for point in each.points]
    what = "length" if key == "length" else "time"
    return Figure(
        f"Accuracy against {what}",
        "Bars are 95% intervals over questions; hollow marks are controls.",
        chart,
        Table(["system", x_label, "accuracy"], rows),
        legend,
    )


COLOURLESS = charts.COLOURS - 1
"""Of a legend's entry that is about a kind of mark."""


def _point(
    system: System, variant: Any, key: str, scale: Callable[[float], float], name: str, labelled: bool
) -> Point:
    factor = system["compression_factor"]
    speed = "" if factor is None else f"c = {factor:g}"
    accuracy, cost = variant["accuracy"], variant[key]
    interval = None
    if cost["interval"] is not None:
        interval = [max(0.0, scale(end)) for end in cost["interval"]]
    return Point(
        scale(cost["mean"]),
        accuracy["mean"],
        accuracy["interval"],
        interval,
        speed if labelled else "",
        f"{name}{', ' if speed else ''}{speed}: {percent(accuracy['mean'])} at {scale(cost['mean']):.1f}",
    )


def _table(systems: Sequence[System], names: Sequence[str]) -> Table:
    rows = []
    for system, name in zip(systems, names, strict=True):
        variants, differences = system["cost"]["variants"], system["cost"]["differences"]
        own = variants["own"]
        row = [
            name,
            str(own["n"]),
            with_interval(own["accuracy"], 100, unit="%"),
            with_interval(own["length"]),
            f"{own['forward_passes']['mean']:.1f}",
            with_interval(own["seconds"], 1000, unit=" ms"),
        ]
        for kind in ("shuffled", "zeroed", "none"):
            row.append(with_interval(variants[kind]["accuracy"], 100, unit="%") if kind in variants else NONE)
        found = differences.get("shuffled", differences.get("none"))
        row.append(_points(found))
        rows.append(row)
    head = ["system", "questions", "accuracy", "#L", "forward passes", "time", "another's thoughts", "zeros"]
    head += ["left out", "own minus control"]
    # A column that is empty in every row is a control that nobody asked for.
    kept = [k for k in range(len(head)) if any(row[k] != NONE for row in rows)]
    return Table(
        [head[k] for k in kept],
        [[row[k] for k in kept] for row in rows],
        "Accuracy, cost and controls",
        "In brackets: 95% intervals over questions. The last column is paired by question: minus another's "
        "thoughts, or minus thoughts left out where those are tokens.",
    )


def _comparisons(found: Sequence[Any]) -> Table:
    rows = []
    for each in found:
        factor = each["compression_factor"]
        speed = NONE if factor is None else f"{factor:g}"
        mean = {"mean": each["difference"], "interval": each["interval"]}
        name = f"{each['model']} minus {each['baseline']}"
        rows.append([name, f"{speed} {each['variant']}".strip(), str(each["n"]), _points(mean)])
    return Table(
        ["models", "c", "questions", "points"],
        rows,
        "Models compared",
        "Accuracy of one minus the other on the same questions; an interval without 0 is a difference.",
    )
