"""Write what `colar plan` says of the paper's recipes into the comments at their heads.

    python scripts/write_plans.py [RECIPE ...]     needs the published data (COLAR_DATA_DIR); about 15 s each

A table names the recipe that it is of, by a digest of all its keys. The test compares that with the present recipe
(tests/test_plans.py): a recipe that was changed has its table written anew.

All of MATH's rows are read. Of GSM8k-Aug's 385,620 a part is enough: a table says how many rows its lengths are from.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from colar import files, planning, progress, recipe, recipes
from colar.planning.plan import Rows
from colar.recipe.schema import DataConfig, Recipe

FOLDERS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "deepseek-qwen-1.5b")
"""The recipes that run on GPUs."""
AS_MANY = {"gsm8k-aug": 385_620}
"""Training rows of a source of which only a part may be at hand."""
GPU = "h100"
CARDS = 8
"""Of SFT. Reinforcement takes one, as the paper did: eight would multiply the outputs of its updates by eight."""
BEGIN, END = "# plan:", "# end of plan"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", help="names; all by default")
    chosen = {name: recipe.load(name, []) for name in parser.parse_args().recipes or names()}
    # Recipes of the same rows follow one another: these are loaded once.
    for _, group in itertools.groupby(
        sorted(chosen, key=lambda name: str(chosen[name].data)), rows_of(chosen)
    ):
        write(list(group), chosen)


def rows_of(chosen: dict[str, Recipe]) -> Callable[[str], DataConfig]:
    return lambda name: chosen[name].data


def write(group: list[str], chosen: dict[str, Recipe]) -> None:
    """Write the tables of recipes that have the same rows."""
    rows = recipe.load_examples(chosen[group[0]].data)
    for name in group:
        path = Path(str(recipes.find(name)))
        text = with_plan(path.read_text(encoding="utf-8"), table(name, chosen[name], rows))
        files.write_text(path, text)
        progress.say(f"wrote {path}")


def names() -> list[str]:
    """The recipes that have a table, by name."""
    return [name for name in recipes.names() if name.split("/")[0] in FOLDERS]


def keys_of(name: str) -> dict[str, Any]:
    """What a recipe and its bases say, without all that is left to the defaults."""
    keys: dict[str, Any] = yaml.safe_load(files.layered_yaml(recipes.find(name)))
    return keys


def table(name: str, made: Recipe, rows: Rows | None = None) -> list[str]:
    """The lines of the table: for as many cards as the largest of the recipe's own commands has."""
    cards = CARDS if made.grpo is None else 1
    found = planning.plan(made, GPU, cards, rows, AS_MANY.get(made.data.source))
    return [f"{BEGIN} recipe {digest(name)}", *(f"#   {line}".rstrip() for line in found.text()), END]


def digest(name: str) -> str:
    """Eight hex digits of what a recipe and its bases say, but for keys that no figure depends on."""
    keys = keys_of(name)
    for unused in ("output", "label"):
        keys.pop(unused, None)
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
