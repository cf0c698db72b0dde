"""Sections about hidden states: layer by layer, where thoughts look, and what a linear probe reads off them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colar.look.page import charts
from colar.look.page.charts import Axis, Point, Series
from colar.look.page.figures import (
    Figure,
    Key,
    Section,
    System,
    Table,
    line_figure,
    names_of,
    number,
    percent,
)

LOOKS = ("first token", "rest of the question", "earlier thoughts", "itself")
FEATURES = {
    "before": "before it is written",
    "after": "after it is written",
    "question": "from the question alone (control)",
    "shuffled": "shuffled labels (control)",
}
LEAST_R2 = -0.25
"""A probe that is worse than the mean says no more the worse it is."""


def layers_section(systems: Sequence[System]) -> Section:
    """Empty where no states were looked at."""
    systems = [system for system in systems if system.get("norms")]
    if not systems:
        return Section("layers", "", "")

    def norms(key: str) -> list[list[float]]:
        return [system["norms"][key] for system in systems]

    top1 = [[layer["top1"] for layer in system["lens"]["layers"]] for system in systems]
    figures = [
        _by_layer(systems, "Norm", "Length of the hidden state at thoughts.", norms("norms"), 0),
        _by_layer(
            systems,
            "Relative norm difference (the paper's appendix B)",
            "How much longer a layer makes the state, as a share of its length.",
            norms("differences"),
            1,
        ),
        _by_layer(
            systems,
            "Update",
            "How far a layer moves the state, as a share of its length.",
            norms("updates"),
            1,
        ),
        _by_layer(
            systems,
            "Logit lens",
            "Share of positions at which the LM head, reading that layer, puts a token of the next group first.",
            top1,
            0,
            charts.shares("positions"),
        ),
    ]
    return Section(
        "layers",
        "Layer by layer",
        "What a thought becomes on its way through the backbone; layer 0 is the embeddings.",
        figures,
    )


def _by_layer(
    systems: Sequence[System],
    title: str,
    read: str,
    found: Sequence[Sequence[float]],
    first: int,
    y: Axis | None = None,
) -> Figure:
    """A line for each system; `first` is the layer of the first value."""
    series = []
    values: list[float] = []
    for i, (name, of_system) in enumerate(zip(names_of(systems), found, strict=True)):
        values += of_system
        series.append(Series(name, [Point(first + k, value) for k, value in enumerate(of_system)], i))
    return line_figure(title, read, series, "layer", y or charts.axis_of("", values))


def attention_section(systems: Sequence[System]) -> Section:
    """Empty where no attention was looked at."""
    systems = [system for system in systems if system.get("attention")]
    figures = []
    for system, name in zip(systems, names_of(systems), strict=True):
        labels = []
        values = []
        for i, layer in enumerate(system["attention"]["layers"]):
            labels.append(str(i + 1))
            # Of a question of one token rounding could leave a little less than 0.
            rest = max(0.0, layer["question"] - layer["first"])
            values.append([layer["first"], rest, layer["earlier"], layer["itself"]])
        rows = [[label, *map(percent, row)] for label, row in zip(labels, values, strict=True)]
        figures.append(
            Figure(
                name,
                "Mean over heads and thoughts, layer by layer.",
                charts.stacked(labels, LOOKS, values, "layer", f"Attention of thoughts, {name}"),
                Table(["layer", *LOOKS], rows),
                [Key(part, i) for i, part in enumerate(LOOKS)],
            )
        )
    return Section(
        "attention",
        "Where thoughts look",
        "Attention mass of thoughts; what rests on the very first token (a sink) says nothing.",
        figures,
    )


def probes_section(systems: Sequence[System]) -> Section:
    """Empty where nothing was probed, or there were too few questions to."""
    figures = []
    for system, name in zip(systems, names_of(systems), strict=True):
        for probe in system.get("probes") or ():
            layer = "last hidden state" if probe["layer"] is None else f"layer {probe['layer']}"
            steps = _scores_by_step(probe)
            if steps:
                figures.append(_probe_figure(f"{name}, {layer}", steps))
    return Section(
        "probes",
        "Can a step's result be read off the hidden state?",
        "1 is exact, 0 is worth nothing. What can be read off the question alone has not been thought; compare with a "
        "model that has learnt nothing, too.",
        figures,
    )


def _scores_by_step(probe: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """R2 by step and kind of feature; the shuffled labels are those of `before`."""
    steps: dict[int, dict[str, Any]] = {}
    for score in probe["scores"]:
        if score["r2"] is not None:
            row = steps.setdefault(score["step"], {"n": score["n_questions"]})
            row[score["features"]] = score["r2"]
            if score["features"] == "before":
                row["shuffled"] = score["shuffled"]
    return steps


def _probe_figure(title: str, steps: Mapping[int, Mapping[str, Any]]) -> Figure:
    labels, rows, drawn = [], [], []
    for step, row in steps.items():
        labels.append(f"step {step + 1}")
        values = [row.get(key) for key in FEATURES]
        rows.append([labels[-1], str(row["n"]), *map(number, values)])
        # The chart cuts a column at its edge, and says its value.
        drawn.append(values)
    names = list(FEATURES.values())
    return Figure(
        title,
        f"R2 of a linear probe on held-out questions; columns are cut at {LEAST_R2}.",
        charts.columns(labels, names, drawn, Axis("R2", LEAST_R2, 1.0), f"Probes, {title}"),
        Table(["step", "questions", *names], rows),
        [Key(text, i) for i, text in enumerate(names)],
    )
