"""The section about what a model says of its own thoughts: the probability of a stop, and sigma."""

from __future__ import annotations

from collections.abc import Sequence

from colar.look.page import charts
from colar.look.page.charts import Axis, Point, Series
from colar.look.page.figures import (
    Figure,
    Section,
    System,
    Table,
    line_figure,
    names_of,
    number,
    percent,
)

WITHIN = ("1", "2", "3")


def calibration_section(systems: Sequence[System]) -> Section:
    """Empty where no system has a stop probability or a sigma."""
    figures, tables = [], []
    for key, made in (("stop", _stop), ("sigma", _sigma)):
        found = [system for system in systems if system.get(key)]
        if found:
            figure, table = made(found)
            figures.append(figure)
            tables.append(table)
    return Section(
        "calibration",
        "Are stop and sigma what they say?",
        "Predictions after a right prefix, against what the reference chain has there.",
        figures,
        tables,
    )


def _stop(systems: Sequence[System]) -> tuple[Figure, Table]:
    series, rows = [], []
    for i, (system, name) in enumerate(zip(systems, names_of(systems), strict=True)):
        stop = system["stop"]
        points = []
        for each in stop["bins"]:
            if each["n"]:
                said, seen = percent(each["predicted"]), percent(each["observed"])
                text = f"{name}: {each['n']} positions, {said} said, {seen} found"
                points.append(Point(each["predicted"], each["observed"], text=text))
        series.append(Series(name, points, i))
        rows.append([name, str(stop["n"]), number(stop["brier"], 4), number(stop["error"], 4)])
    figure = line_figure(
        "Stop",
        "On the diagonal a stop probability means what it says; below it the model stops too readily.",
        series,
        charts.shares("stop probability"),
        charts.shares("ends found"),
        diagonal=True,
    )
    head = ["system", "positions", "Brier score", "calibration error"]
    return figure, Table(head, rows, "Stop", "0 is perfect for both.")


def _sigma(systems: Sequence[System]) -> tuple[Figure, Table]:
    series, rows = [], []
    values = []
    for i, (system, name) in enumerate(zip(systems, names_of(systems), strict=True)):
        sigma = system["sigma"]
        points = [Point(each["predicted"], each["observed"]) for each in sigma["bins"] if each["n"]]
        for point in points:
            values += [point.x, point.y]
        series.append(Series(name, points, i))
        within = [percent(sigma["within"][k]) for k in WITHIN]
        rows.append(
            [name, str(sigma["n_thoughts"]), number(sigma["z_mean"]), number(sigma["z_std"]), *within]
        )
    expected = systems[0]["sigma"]["expected"]
    rows.append(["a Gaussian", "", number(0), number(1), *(percent(expected[k]) for k in WITHIN)])
    # One range for both: the diagonal is then where they agree.
    both = charts.axis_of("predicted sigma", values)
    figure = line_figure(
        "Sigma",
        "On the diagonal the error is as large as sigma says; above it sigma is too small.",
        series,
        both,
        Axis("error (root mean square)", both.low, both.high),
        diagonal=True,
    )
    table = Table(
        ["system", "thoughts", "z mean", "z std", "|z| < 1", "|z| < 2", "|z| < 3"],
        rows,
        "z-scores of the true latents",
        "z std above 1: sigma is too small; below 1: too large.",
    )
    return figure, table
