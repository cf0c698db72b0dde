"""The page of `colar inspect`: a self-contained HTML file, made of the JSON beside it and the answers.

page.js and the viewer show the questions; the other sections are tables.
Styles and scripts are inlined, and a Content-Security-Policy lets only these run, so the page can fetch nothing.
Templates escape all text; scripts insert theirs as text, not as HTML.
"""

import base64
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from colar.evaluation.report_rows import speed_of, texts, without_speed
from colar.evaluation.tables import BLANK, FEW, TextTable, number, percent

FOLDER = Path(__file__).parent
VIEWER = (FOLDER / "viewer" / "viewer.css", FOLDER / "viewer" / "viewer.js")
"""The chain viewer (thoughts as chips of their tokens) and the code that this page shares with the server's."""
STYLES = (VIEWER[0], FOLDER / "page.css")
SCRIPTS = (VIEWER[1], FOLDER / "page.js")
Numbers = Mapping[str, Any]
"""Measurements of one system: an item of `systems` in inspect.json."""

CAUSES = {
    "right": "the answer is right",
    "misread": "all thoughts are right, the answer is not",
    "wrong result": "the first wrong thought lacks digits of a result only",
    "wrong plan": "the first wrong thought lacks something else, or goes another way than the reference",
    "stopped early": "all thoughts are right, some are missing",
    "stopped late": "all thoughts are right, there are too many",
    "unparsable": "there is no answer in the completion",
    "wrong": "the answer is wrong, and there is no chain to compare with",
}
THOUGHTS = ("own", "shuffled", "zeroed", "none")
"""Kinds of thoughts that a system was given, in the order of the table's columns."""


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
    cost_tables, cause_tables = tables_of(systems)
    data = {"questions": questions, "systems": names_of(systems), "answers": answers}
    # Undefined names are errors, not empty texts.
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title=f"Inspection of {inspection.get('title') or ', '.join(models)}",
        cost_tables=cost_tables,
        cause_tables=cause_tables,
        causes=CAUSES,
        origin=json.dumps(
            {key: inspection.get(key) for key in ("asked", "provenance")}, indent=1, ensure_ascii=False
        ),
        data=_packed(data),
        style=style,
        script=script,
        policy=_policy(style, script),
    )


# The parts of the file


def _packed(data: Mapping[str, Any]) -> str:
    """The data of page.js, compressed (a chain of 60 thoughts has 600 neighbours), as text that cannot end a script."""
    # NaN is not JSON: an error here, because the page would reject all of its data.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _policy(style: str, script: str) -> str:
    """A policy that allows only this style and this script, and no request of any kind."""
    # The page's data stand in a script element too; they are never run, so they need no hash.
    sources = f"style-src {_hash(style)}; script-src {_hash(script)}"
    return f"default-src 'none'; base-uri 'none'; {sources}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# Tables, which the terminal shows too. A table without rows is left out.


def tables_of(systems: Sequence[Numbers]) -> tuple[list[TextTable], list[TextTable]]:
    """The tables of cost, and those of causes."""
    cost = [cost_table(systems), control_table(systems)]
    causes = [cause_table(systems), diagnosis_table(systems)]
    return [table for table in cost if table.rows], [table for table in causes if table.rows]


def names_of(systems: Sequence[Numbers]) -> list[str]:
    """A short name of each system: the model if there are several, the speed, and its other params."""
    several_models = len({system["model"] for system in systems}) > 1
    names = []
    for system in systems:
        params = tuple(system["params"].items())
        factor = speed_of(params)
        parts = []
        if several_models or factor is None:
            parts.append(system["model"])
        if factor is not None:
            parts.append(f"c = {factor:g}")
        name = ", ".join(parts)
        others = ", ".join(texts(without_speed(params)))
        names.append(f"{name} ({others})" if others else name)
    return names


def with_names(systems: Sequence[Numbers], key: str) -> list[tuple[str, Any]]:
    """(name, measurement) of each system that has it."""
    named = zip(names_of(systems), systems, strict=True)
    return [(name, system[key]) for name, system in named if system.get(key)]


def with_interval(mean: Mapping[str, Any] | None, least: float = -1.0) -> str:
    """A share in %, or a difference of shares, with its interval: `66.5 [61.0, 72.3]`; `least` is its lower bound."""
    if mean is None:
        return BLANK
    if mean["interval"] is None:
        return percent(mean["mean"])
    # A normal interval may reach beyond the possible values.
    low, high = (percent(min(1.0, max(least, end))) for end in mean["interval"])
    return f"{percent(mean['mean'])} [{low}, {high}]"


def cost_table(systems: Sequence[Numbers]) -> TextTable:
    rows = []
    for name, cost in with_names(systems, "cost"):
        own = cost["outcomes"]["own"]
        length, passes = number(own["length"]), number(own["forward_passes"])
        milliseconds = number(1000 * own["seconds"])
        rows.append([name, str(own["n"]), with_interval(own["accuracy"], 0.0), length, passes, milliseconds])
    head = ["system", "questions", "accuracy %", "#L", "passes", "ms"]
    notes = ["In brackets: 95% interval over questions. Means of a question: thoughts, forward passes, time."]
    if any(int(row[1]) < FEW for row in rows):
        notes.append(f"Fewer than {FEW} questions: the intervals are too narrow to be relied on.")
    return TextTable("Accuracy and cost", head, rows, notes)


def control_table(systems: Sequence[Numbers]) -> TextTable:
    rows = []
    for name, cost in with_names(systems, "cost"):
        outcomes, differences = cost["outcomes"], cost["differences"]
        if not differences:
            continue
        shares = [
            percent(outcomes[kind]["accuracy"]["mean"]) if kind in outcomes else BLANK for kind in THOUGHTS
        ]
        rows.append([name, *shares, with_interval(differences.get("shuffled", differences.get("none")))])
    head = ["system", "own", "another's", "zeros", "left out", "own minus control"]
    notes = [
        "The last column is paired by question: minus another's thoughts, or, of tokens, minus none. Above 0 with its "
        "whole interval: the answers depend on what it thinks. An interval with 0 does not show that."
    ]
    return TextTable("Accuracy % with other thoughts", head, rows, notes)


def cause_table(systems: Sequence[Numbers]) -> TextTable:
    """The causes that occur, and the share of each system's answers that each cause has."""
    counted = []
    for name, answers in with_names(systems, "answers"):
        counted.append((name, Counter(answer["cause"] for answer in answers)))
    causes = [cause for cause in CAUSES if any(counts[cause] for _, counts in counted)]
    rows = []
    for name, counts in counted:
        rows.append([name, *(percent(counts[cause] / counts.total()) for cause in causes)])
    notes = [
        "A thought is right when its group's tokens are among its c nearest, or among those that were chosen."
    ]
    return TextTable("Answers in %, by the first thing that went wrong", ["system", *causes], rows, notes)


def diagnosis_table(systems: Sequence[Numbers]) -> TextTable:
    rows = []
    for name, diagnosis in with_names(systems, "diagnosis"):
        shares = [percent(diagnosis[key]) for key in ("read", "write", "whole_chain", "stop")]
        rows.append([name, str(diagnosis["n"]), *shares])
    notes = [
        "Reads: answers that are right when it is fed the reference's own latents. Writes: thoughts that are right "
        "after a right prefix, and chains of which all are. Stops: chains that end in the right place."
    ]
    head = ["system", "questions", "reads", "writes", "writes all", "stops"]
    return TextTable("With the reference's help, %", head, rows, notes)
