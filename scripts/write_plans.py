"""Write what `colar plan` says of the paper's recipes into the comments at their heads.

    python scripts/write_plans.py [RECIPE ...]      needs the published data (COLAR_DATA_DIR); about half a minute each

A table names the recipe that it is of, by a digest of all its keys. The test compares that with the present recipe
(tests/test_plans.py): a recipe that was changed has its table written anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from colar import files, planning, progress, recipe, recipes
from colar.recipe.schema import Recipe, to_json

FOLDERS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "deepseek-qwen-1.5b")
"""The recipes that run on GPUs."""
GPU = "h100"
CARDS = 8
BEGIN, END = "# plan:", "# end of plan"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", help="names; all by default")
    for name in parser.parse_args().recipes or names():
        path = Path(str(recipes.find(name)))
        text = with_plan(path.read_text(encoding="utf-8"), table(recipe.load(name, [])))
        files.write_text(path, text)
        progress.say(f"wrote {path}")


def names() -> list[str]:
    """The recipes that have a table, by name."""
    return [name for name in recipes.names() if name.split("/")[0] in FOLDERS]


def table(made: Recipe) -> list[str]:
    """The lines of the table: for eight cards, as the recipes' own commands for eight have it."""
    found = planning.plan(made, GPU, CARDS)
    return [f"{BEGIN} recipe {digest(made)}", *(f"#   {line}".rstrip() for line in found.text()), END]


def digest(made: Recipe) -> str:
    """Eight hex digits of all keys of a recipe but those that no figure depends on."""
    keys = to_json(made)
    for name in ("output", "label"):
        del keys[name]
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]


def with_plan(text: str, plan: list[str]) -> str:
    """A recipe's file with this table at the end of its first comment, in place of the one that is there."""
    lines = text.splitlines()
    if any(line.startswith(BEGIN) for line in lines):
        first = next(i for i, line in enumerate(lines) if line.startswith(BEGIN))
        last = lines.index(END)
        lines[first - 1 : last + 1] = []
    head = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    lines[head:head] = ["#", *plan]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
