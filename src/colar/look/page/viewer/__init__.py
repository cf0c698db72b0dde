"""Shared by the pages: the chain viewer (thoughts as chips of their tokens), their looks, the switch for the theme.

`viewer.js` says what the viewer can do. A page needs `frame.css` before styles of its own.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
STYLES = (FOLDER / "frame.css", FOLDER / "viewer.css")
SCRIPTS = (FOLDER / "viewer.js", FOLDER / "theme.js")
FILES = (*STYLES, *SCRIPTS)
