"""The numbers of `colar inspect` as tables: those of the terminal and of the page.

They are made of the `systems` of inspect.json; a table without rows is left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from colar.evaluation.report_rows import speed_of, texts, without_speed
from colar.evaluation.tables import FEW
from colar.evaluation.text_table import BLANK, TextTable, number, percent

Numbers = Mapping[str, Any]
"""Of one system: an item of `systems` in inspect.json."""

CAUSES = {
    "right": "the answer is right",
    "misread": "all thoughts are right, the answer is not",
    "wrong result": "the first wrong thought lacks digits of a result only",
    "wrong plan": "the first wrong thought lacks something else, or goes another way than the reference",
    "stopped early": "all thoughts are right, some are missing",
    "stopped late": "all thoughts are right, there are too many",
    "unparsable": "there is no answer in the completion",
    "wrong": "the answer is wrong, and there is no chain to compare with",
}
THOUGHTS = {
    "own": "its own thoughts",
    "shuffled": "another question's thoughts",
    "zeroed": "zeros as thoughts",
    "none": "thoughts left out",
}
"""Name of what a system thought."""


def tables_of(systems: Sequence[Numbers]) -> tuple[list[TextTable], list[TextTable]]:
    """Those of cost, and those of causes."""
    cost = [cost_table(systems), control_table(systems)]
    causes = [cause_table(systems), diagnosis_table(systems)]
    return [table for table in cost if table.rows], [table for table in causes if table.rows]


def names_of(systems: Sequence[Numbers]) -> list[str]:
    """A short name of each: the model where there are several, the speed, what else it was asked with."""
    several_models = len({system["model"] for system in systems}) > 1
    names = []
    for system in systems:
        params = tuple(system["params"].items())
        factor = speed_of(params)
        parts = []
        if several_models or factor is None:
            parts.append(system["model"])
        if factor is not None:
            parts.append(f"c = {factor:g}")
        name = ", ".join(parts)
        others = ", ".join(texts(without_speed(params)))
        names.append(f"{name} ({others})" if others else name)
    return names


def with_names(systems: Sequence[Numbers], key: str) -> list[tuple[str, Any]]:
    """(name, measurement) of each system that has it."""
    measured = [system for system in systems if system.get(key)]
    return [(name, system[key]) for name, system in zip(names_of(measured), measured, strict=True)]


def with_interval(mean: Mapping[str, Any] | None, least: float = -1.0) -> str:
    """A share in %, or a difference of shares, with its interval: `66.5 [61.0, 72.3]`; `least` is its lower bound."""
    if mean is None:
        return BLANK
    if mean["interval"] is None:
        return percent(mean["mean"])
    # A normal interval may reach beyond what there can be.
    low, high = (percent(min(1.0, max(least, end))) for end in mean["interval"])
    return f"{percent(mean['mean'])} [{low}, {high}]"


def cost_table(systems: Sequence[Numbers]) -> TextTable:
    rows = []
    for name, cost in with_names(systems, "cost"):
        own = cost["outcomes"]["own"]
        length, passes = number(own["length"]), number(own["forward_passes"])
        milliseconds = number(1000 * own["seconds"])
        rows.append([name, str(own["n"]), with_interval(own["accuracy"], 0.0), length, passes, milliseconds])
    head = ["system", "questions", "accuracy %", "#L", "passes", "ms"]
    notes = ["In brackets: 95% interval over questions. Means of a question: thoughts, forward passes, time."]
    if any(int(row[1]) < FEW for row in rows):
        notes.append(f"Fewer than {FEW} questions: the intervals are too narrow to be relied on.")
    return TextTable("Accuracy and cost", head, rows, notes)


def control_table(systems: Sequence[Numbers]) -> TextTable:
    rows = []
    for name, cost in with_names(systems, "cost"):
        outcomes, differences = cost["outcomes"], cost["differences"]
        if not differences:
            continue
        shares = [
            percent(outcomes[kind]["accuracy"]["mean"]) if kind in outcomes else BLANK for kind in THOUGHTS
        ]
        rows.append([name, *shares, with_interval(differences.get("shuffled", differences.get("none")))])
    head = ["system", "own", "another's", "zeros", "left out", "own minus control"]
    notes = [
        "The last column is paired by question: minus another's thoughts, or, of tokens, minus none. Above 0 with its "
        "whole interval: the answers depend on what it thinks. An interval with 0 does not show that."
    ]
    return TextTable("Accuracy % with other thoughts", head, rows, notes)


def cause_table(systems: Sequence[Numbers]) -> TextTable:
    """The causes that occur, and the share of each system's answers that each of them has."""
    counted = []
    for name, answers in with_names(systems, "answers"):
        counted.append((name, Counter(answer["cause"] for answer in answers)))
    causes = [cause for cause in CAUSES if any(counts[cause] for _, counts in counted)]
    rows = []
    for name, counts in counted:
        rows.append([name, *(percent(counts[cause] / counts.total()) for cause in causes)])
    notes = [
        "A thought is right when its group's tokens are among its c nearest, or among those that were chosen."
    ]
    return TextTable("Answers in %, by the first thing that went wrong", ["system", *causes], rows, notes)


def diagnosis_table(systems: Sequence[Numbers]) -> TextTable:
    rows = []
    for name, diagnosis in with_names(systems, "diagnosis"):
        shares = [percent(diagnosis[key]) for key in ("read", "write", "whole_chain", "stop")]
        rows.append([name, str(diagnosis["n"]), *shares])
    notes = [
        "Reads: answers that are right when it is fed the reference's own latents. Writes: thoughts that are right "
        "after a right prefix, and chains of which all are. Stops: chains that end in the right place."
    ]
    head = ["system", "questions", "reads", "writes", "writes all", "stops"]
    return TextTable("With the reference's help, %", head, rows, notes)
