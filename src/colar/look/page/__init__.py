"""The page of `colar inspect`: one HTML file that needs nothing else, made of the JSON beside it and the answers.

The questions are for page.js and the viewer; the other sections are tables (look/inspect_tables.py).
Styles and scripts are inlined, and a Content-Security-Policy lets these run and nothing else: the page can fetch
nothing. Templates escape all text; what scripts show they set as text.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from colar.look import inspect_tables

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
    cost_tables, cause_tables = inspect_tables.tables_of(systems)
    data = {"questions": questions, "systems": inspect_tables.names_of(systems), "answers": answers}
    # Undefined names are errors, not empty texts.
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title=f"Inspection of {inspection.get('title') or ', '.join(models)}",
        cost_tables=cost_tables,
        cause_tables=cause_tables,
        causes=inspect_tables.CAUSES,
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
    """The data of page.js, compressed: a chain of 60 thoughts has 600 neighbours. No text in them can end a script."""
    # NaN is not JSON: an error here, before the page rejects all of its data.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and no request of any kind."""
    # The page's data stand in a script element too; they are never run, so they need no hash.
    sources = f"style-src {_hash(style)}; script-src {_hash(script)}"
    return f"default-src 'none'; base-uri 'none'; {sources}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
