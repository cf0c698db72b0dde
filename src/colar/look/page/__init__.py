"""The page of `colar inspect`: one HTML file that needs nothing else, made of the JSON beside it and the answers.

The questions are for page.js and the viewer; the other sections are tables (look/inspect_tables.py) and charts.
Styles, scripts and charts are inlined, and a Content-Security-Policy lets these run and nothing else: the
page can fetch nothing. Templates escape all text; what scripts show they set as text.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from colar.evaluation import picture
from colar.evaluation.text_table import TextTable, percent
from colar.look import inspect_tables
from colar.look.inspect_tables import THOUGHTS, Numbers, names_of

FOLDER = Path(__file__).parent
VIEWER = (FOLDER / "viewer" / "viewer.css", FOLDER / "viewer" / "viewer.js")
"""The chain viewer, thoughts as chips of their tokens, and what the pages share: the server's page has it too."""
STYLES = (VIEWER[0], FOLDER / "page.css")
SCRIPTS = (VIEWER[1], FOLDER / "page.js")


def render(
    inspection: Mapping[str, Any],
    questions: Sequence[Mapping[str, Any]],
    answers: Sequence[Sequence[Mapping[str, Any]]],
) -> str:
    """The page. `inspection` is inspect.json; `answers[i][j]` is the answer of system i to question j."""
    systems = inspection["systems"]
    models = dict.fromkeys(system["model"] for system in systems)
    style = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)
    script = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    data = {"questions": questions, "systems": inspect_tables.names_of(systems), "answers": answers}
    # Undefined names are errors, not empty texts.
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title=f"Inspection of {inspection.get('title') or ', '.join(models)}",
        cost_tables=inspect_tables.cost_tables(inspection),
        cost_charts=cost_charts(systems),
        cause_tables=inspect_tables.cause_tables(systems),
        causes=inspect_tables.CAUSES,
        origin=json.dumps(
            {key: inspection.get(key) for key in ("asked", "provenance")}, indent=1, ensure_ascii=False
        ),
        data=_packed(data),
        style=style,
        script=script,
        policy=_policy(style, script),
    )


def framed(page: str) -> str:
    """The page in a frame of its own, for a notebook: its styles and scripts touch nothing around it."""
    return (
        # Scripts run, and for want of allow-same-origin they reach nothing of the notebook.
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="colar inspect" '
        'style="width: 100%; height: 800px; border: 0"></iframe>'
    )


def cost_charts(systems: Sequence[inspect_tables.Numbers]) -> "list[Chart]":
    """The charts of the systems whose cost was measured."""
    shown = [system for system in systems if system.get("cost")]
    if not shown:
        return []
    return [
        cost_chart(shown, "length", "Accuracy against length", "thoughts a question (#L)", 1),
        cost_chart(shown, "seconds", "Accuracy against time", "milliseconds a question", 1000),
    ]


# The parts of the file


def _packed(data: Mapping[str, Any]) -> str:
    """The data of page.js, compressed: a chain of 60 thoughts has 600 neighbours. No text in them can end a script."""
    # NaN is not JSON: an error here, before the page rejects all of its data.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and no request of any kind."""
    # The page's data stand in a script element too; they are never run, so they need no hash.
    sources = f"style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    return f"default-src 'none'; base-uri 'none'; {sources}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# Charts: figures in the house style of `evaluation/picture.py`, as SVG in the page, with their numbers

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
