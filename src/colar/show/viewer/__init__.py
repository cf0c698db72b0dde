"""The chain viewer: thoughts as chips of their tokens, for any page. `viewer.js` says what it can do."""

from pathlib import Path

SCRIPT = Path(__file__).parent / "viewer.js"
STYLE = Path(__file__).parent / "viewer.css"
FILES = (SCRIPT, STYLE)
