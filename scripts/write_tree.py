"""Write the files of src/colar into README's tree. The rooms, their order and their descriptions are written by hand.

    python scripts/write_tree.py           `tests/test_docs.py` checks that the tree is up to date

A room is a line of the tree that is indented by two spaces; the lines below it list its files, without `.py`, and its
folders, `name/` each on a line of its own. A room that is missing, or is no folder, is an error.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "colar"
README = ROOT / "README.md"
TREE = re.compile(r"(?<=```\nsrc/colar/\n)(?:  .*\n)+")
INDENT = " " * 6
WIDTH = 100


def listed(folder: Path) -> list[str]:
    """The lines below a room: its modules and its folders of recipes, then the modules of each folder in it."""
    names = [path.stem for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
    names += sorted({f"{path.parent.name}/" for path in folder.glob("*/*.yaml")})
    lines = textwrap.wrap("  ".join(names), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(inner.glob("*.py")):
            lines += [f"{INDENT}{inner.name}/".ljust(18) + line.strip() for line in listed(inner)]
    return lines


def filled(text: str) -> str:
    """README with the tree's lists of files made anew."""
    [old] = TREE.findall(text)
    rooms = [line for line in old.splitlines() if not line.startswith(INDENT)]
    named = {line.split()[0] for line in rooms}
    real = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")}
    real |= {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    if named != real:
        raise ValueError(f"README's tree and src/colar differ in {', '.join(sorted(named ^ real))}")
    lines = []
    for room in rooms:
        lines.append(room)
        if (PACKAGE / room.split()[0]).is_dir():
            lines += listed(PACKAGE / room.split()[0])
    return text.replace(old, "\n".join(lines) + "\n")


def main() -> None:
    README.write_text(filled(README.read_text()))
    print(README)


if __name__ == "__main__":
    main()
