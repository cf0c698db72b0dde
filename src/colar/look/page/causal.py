"""The section about changed thoughts: what one thought does to the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colar.look.page.figures import NONE, Section, System, Table, names_of, percent

CHANGES = {"none": "nothing (a check)", "swap": "another question's thought", "drop": "left out"}
PLACES = ("first", "middle", "last")
THENS = ("kept", "rethought")


def causal_section(systems: Sequence[System]) -> Section:
    """Empty where no thoughts were changed."""
    systems = [system for system in systems if system.get("causal") and system["causal"]["n"]]
    tables = []
    for system, name in zip(systems, names_of(systems), strict=True):
        tables.append(_table(system["causal"], name))
    return Section(
        "causal",
        "What one thought does to the answer",
        "One thought is changed, and the answer decoded anew. Cells: answers that change / accuracy that is left. "
        "“Kept” feeds the later thoughts as they were, “rethought” lets the model think on.",
        tables=tables,
    )


def _table(causal: Any, name: str) -> Table:
    effects: dict[tuple[Any, ...], dict[tuple[str, str], Any]] = {}
    for effect in causal["effects"]:
        # A head without a sigma has no noise in units of it.
        if effect["n"]:
            change = (effect["kind"], effect["unit"], effect["size"])
            effects.setdefault(change, {})[effect["then"], effect["place"]] = effect
    columns = [(then, place) for then in THENS for place in PLACES]
    rows = []
    for (kind, unit, size), found in effects.items():
        words = CHANGES[kind] if size is None else f"noise of {size:g} {unit}"
        rows.append([words, *(_cell(found.get(column), causal["n"]) for column in columns)])
    head = ["change", *(f"{place}, {then}" for then, place in columns)]
    return Table(head, rows, f"{name}: {causal['n']} questions")


def _cell(effect: Any, n_questions: int) -> str:
    """Share of changed answers / accuracy after it; the number of questions where it is not that of the table."""
    if effect is None:
        return NONE
    shares = f"{percent(effect['changed'], 0)} / {percent(effect['accuracy_after'], 0)}"
    # A chain of one thought has nothing left to think on with.
    return shares if effect["n"] == n_questions else f"{shares} (of {effect['n']})"
