"""The page of `colar inspect`: one HTML file that needs nothing else, made of the JSON beside it and the chains.

The questions are for page.js and the viewer; the other sections are tables (look/tables.py) and charts (charts.py).
Styles, scripts and charts are inlined, and a Content-Security-Policy lets these run and nothing else: the page can
fetch nothing. Templates escape all text; what scripts show they set as text.
"""

from __future__ import annotations

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

from colar.evaluation.tables import FEW
from colar.evaluation.text_table import TextTable, percent
from colar.look import tables
from colar.look.page.charts import Chart, cause_chart, cost_chart, position_chart
from colar.look.tables import CAUSES, Numbers, names_of, with_interval, with_names

FOLDER = Path(__file__).parent
VIEWER_STYLES = (FOLDER / "viewer" / "frame.css", FOLDER / "viewer" / "viewer.css")
VIEWER_SCRIPTS = (FOLDER / "viewer" / "viewer.js", FOLDER / "viewer" / "theme.js")
"""The chain viewer, thoughts as chips of their tokens, and the switch for the theme: the server's page has them too."""
STYLES = (*VIEWER_STYLES, FOLDER / "page.css")
SCRIPTS = (*VIEWER_SCRIPTS, FOLDER / "page.js")


@dataclass(frozen=True)
class Section:
    """A part of the page; `id` is its fragment."""

    id: str
    title: str
    read: str
    charts: Sequence[Chart]
    tables: Sequence[TextTable]
    notes: Sequence[str] = ()


def render(
    whole: Mapping[str, Any],
    questions: Sequence[Mapping[str, Any]],
    chains: Sequence[Sequence[Mapping[str, Any]]],
) -> str:
    """The page. `whole` is inside.json; `chains[i][j]` is the chain of system i for question j."""
    systems = whole["systems"]
    models = dict.fromkeys(system["model"] for system in systems)
    style = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)
    script = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    # Undefined names are errors, not empty texts.
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title=f"Look inside {whole.get('title') or ', '.join(models)}",
        cost=cost_section(whole),
        sections=[each for each in (cause_section(systems), retrieval_section(systems)) if each],
        causes=CAUSES,
        n_questions=len(questions),
        made=json.dumps(
            {key: whole.get(key) for key in ("asked", "provenance")}, indent=1, ensure_ascii=False
        ),
        data=_packed(systems, questions, chains),
        style=style,
        script=script,
        policy=_policy(style, script),
    )


def framed(page: str, height: int = 800) -> str:
    """The page in a frame of its own, for a notebook: its styles and scripts touch nothing around it."""
    return (
        # Scripts run, and for want of allow-same-origin they reach nothing of the notebook.
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" title="colar: look inside" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


# Sections, None where no system has the measurement


def cost_section(whole: Mapping[str, Any]) -> Section | None:
    systems = [system for system in whole["systems"] if system.get("cost")]
    if not systems:
        return None
    shown = [tables.cost_table(systems), tables.control_table(systems)]
    return Section(
        "cost",
        "Does it think, and what does it cost?",
        "Up is better, left is cheaper. A model that reads its thoughts falls when it is given others.",
        [
            cost_chart(systems, "length", "thoughts a question (#L)", 1),
            cost_chart(systems, "seconds", "milliseconds a question", 1000),
        ],
        [table for table in (*shown, tables.comparison_table(whole.get("comparisons", []))) if table.rows],
        verdicts(systems),
    )


def cause_section(systems: Sequence[Numbers]) -> Section | None:
    if not tables.cause_table(systems).rows:
        return None
    diagnosis = tables.diagnosis_table(systems)
    return Section(
        "causes",
        "What goes wrong",
        "Each wrong answer is put down to the first thought that differs from the reference chain.",
        [cause_chart(systems)],
        [diagnosis] if diagnosis.rows else [],
    )


def retrieval_section(systems: Sequence[Numbers]) -> Section | None:
    shown = tables.retrieval_tables(systems)
    if not shown:
        return None
    return Section(
        "retrieval",
        "Can thoughts be read as tokens?",
        "Share of the group's tokens among the tokens nearest to a thought, after a right prefix; “in set” looks at as "
        "many tokens as the group has. The last two columns are in set: thoughts of the model's own chain, and the "
        "reference's own latents, the ceiling.",
        [position_chart(systems)],
        shown,
    )


def verdicts(systems: Sequence[Numbers]) -> list[str]:
    """The answer in words, a sentence or two for each system that has a `cost`."""
    found = []
    fewest = FEW
    for name, cost in with_names(systems, "cost"):
        own = cost["outcomes"]["own"]
        fewest = min(fewest, own["n"])
        opening = (
            f"{name}: {percent(own['accuracy']['mean'])}% of {own['n']} questions right, with "
            f"{own['length']['mean']:.1f} thoughts and {1000 * own['seconds']['mean']:.0f} ms a question."
        )
        found.append(f"{opening} {_verdict(cost)}".rstrip())
    if fewest < FEW:
        found.append(f"Fewer than {FEW} questions: the intervals are too narrow to be relied on.")
    return found


def _verdict(cost: Mapping[str, Any]) -> str:
    """The result of the strongest control."""
    for kind in ("shuffled", "none"):
        found = cost["differences"].get(kind)
        if found is None or found["interval"] is None:
            continue
        low, high = found["interval"]
        other = "another question's thoughts" if kind == "shuffled" else "its thoughts left out"
        opening = f"With {other}: {percent(cost['outcomes'][kind]['accuracy']['mean'])}%."
        points = f"{with_interval(found)} points"
        if low > 0:
            return f"{opening} The difference, {points}, says that its answers depend on what it thinks."
        if high < 0:
            return f"{opening} That is better, a difference of {points}."
        return f"{opening} The difference, {points}, does not show that it uses its thoughts."
    return ""


# The parts of the file


def _packed(
    systems: Sequence[Mapping[str, Any]],
    questions: Sequence[Mapping[str, Any]],
    chains: Sequence[Sequence[Mapping[str, Any]]],
) -> str:
    """Questions and chains, compressed: a chain of 60 thoughts has 600 neighbours. No text in them can end a script."""
    data = {"questions": questions, "systems": names_of(systems), "chains": chains}
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
