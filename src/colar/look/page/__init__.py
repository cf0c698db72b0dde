"""The page of `colar inspect`: one HTML file that needs nothing else, made of the JSON beside it and the chains.

    opening     does it think, and what does it cost       opening.py
    questions   the chains, beside one another              page.js, viewer
    sections    one for each measurement                   sections.py, of tables and charts (figures.py)

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
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from colar.look.page.figures import names_of
from colar.look.page.opening import cost_section
from colar.look.page.sections import CAUSES, SECTIONS

FOLDER = Path(__file__).parent
VIEWER_STYLES = (FOLDER / "viewer" / "frame.css", FOLDER / "viewer" / "viewer.css")
VIEWER_SCRIPTS = (FOLDER / "viewer" / "viewer.js", FOLDER / "viewer" / "theme.js")
"""The chain viewer, thoughts as chips of their tokens, and the switch for the theme: the server's page has them too."""
STYLES = (*VIEWER_STYLES, FOLDER / "page.css")
SCRIPTS = (*VIEWER_SCRIPTS, FOLDER / "page.js")


def render(
    whole: Mapping[str, Any],
    questions: Sequence[Mapping[str, Any]],
    chains: Sequence[Sequence[Mapping[str, Any]]],
) -> str:
    """The page. `whole` is inside.json; `chains[i][j]` is the chain of system i for question j."""
    systems = whole["systems"]
    shown = [made(systems) for made in SECTIONS]
    style = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)
    script = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    # Undefined names are errors, not empty texts.
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title=_title(whole),
        cost=cost_section(whole),
        sections=[section for section in shown if not section.is_empty],
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


def _title(whole: Mapping[str, Any]) -> str:
    """By the key `title`, else by the models."""
    models = dict.fromkeys(system["model"] for system in whole["systems"])
    return f"Look inside {whole.get('title') or ', '.join(models)}"


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and no request of any kind."""
    # The page's data stand in a script element too; they are never run, so they need no hash.
    sources = f"style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    return f"default-src 'none'; base-uri 'none'; {sources}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
