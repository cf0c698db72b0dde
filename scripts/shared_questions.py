"""How many training questions of a recipe are also training questions of others, by other numbers or as published?

    python scripts/shared_questions.py smollm2-135m/grpo-sequential-renumbered smollm2-135m/cot-renumbered \\
        --data.max_reasoning_steps 2

Keys of the recipes can be overridden as in colar train, in all of them alike. Rows by other numbers are drawn anew for
each seed, and small numbers meet again. One JSON object goes to stdout.
"""

from __future__ import annotations

import argparse
import json

from colar import recipe
from colar.data.example import Example


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a shipped recipe, or a file")
    parser.add_argument("others", nargs="+", help="recipes whose questions are looked for in it")
    args, overrides = parser.parse_known_args()
    others = {row.question for name in args.others for row in rows_of(name, overrides)}
    print(json.dumps(counts(rows_of(args.recipe, overrides), others), indent=1))


def rows_of(name: str, overrides: list[str]) -> list[Example]:
    return recipe.load_examples(recipe.load(name, overrides).data)[0]


def counts(rows: list[Example], others: set[str]) -> dict[str, int]:
    """Rows, and those whose question is among `others`; `renumbered` are those by other numbers."""
    renumbered = [row for row in rows if "~" in row.id]
    return {
        "questions": len(rows),
        "shared": sum(row.question in others for row in rows),
        "renumbered": len(renumbered),
        "renumbered and shared": sum(row.question in others for row in renumbered),
    }


if __name__ == "__main__":
    main()
