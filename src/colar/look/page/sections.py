"""The page's sections, one for each measurement of inside.json; empty ones are left out of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from colar.evaluation import picture
from colar.look.page.figures import (
    NONE,
    Chart,
    Curve,
    Numbers,
    PageTable,
    Section,
    address,
    as_percent,
    legend_below,
    names_of,
    new_axes,
    percent,
    shares_chart,
)

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
KINDS = {"bracket": "bracket", "sign": "operator", "operand": "operand digit", "result": "result digit"}
MEASURES = {"top1": "nearest", "top5": "5 nearest", "in_set": "in set", "chosen": "chosen"}
CHANGES = {"none": "nothing (a check)", "swap": "another question's thought", "drop": "left out"}
POSITIONS = ("first", "middle", "last")
THENS = ("kept", "rethought")


def _that_have(systems: Sequence[Numbers], key: str) -> tuple[list[Numbers], list[str]]:
    """The systems with a measurement, and their names."""
    found = [system for system in systems if system.get(key)]
    return found, names_of(found)


def causes_section(systems: Sequence[Numbers]) -> Section:
    """First causes of wrong answers, and accuracy with the reference's help."""
    systems, names = _that_have(systems, "answers")
    shares = [_cause_shares(system) for system in systems]
    found = [cause for cause in CAUSES if any(share[cause] for share in shares)]
    if not found:
        return Section("causes", "", "")
    values = [[share[cause] for cause in found] for share in shares]
    rows = [[name, *map(percent, row)] for name, row in zip(names, values, strict=True)]
    chart = Chart(
        "Answers, by the first thing that went wrong",
        "A thought is right when the group's tokens are among its c nearest, or among those that were chosen.",
        _stacked(names, values, found),
        PageTable(["system", *found], rows),
    )
    return Section(
        "causes",
        "What goes wrong",
        "Each wrong answer is put down to the first thought that differs from the reference chain.",
        [chart],
        _diagnosis_tables(systems),
    )


def _cause_shares(system: Numbers) -> dict[str, float]:
    # A question without a known answer has no cause.
    counts = Counter(answer["cause"] for answer in system["answers"] if answer["cause"])
    total = max(sum(counts.values()), 1)
    return {cause: counts[cause] / total for cause in CAUSES}


def _stacked(names: Sequence[str], values: Sequence[Sequence[float]], causes: Sequence[str]) -> str:
    """Bars of shares that add up to 1: `values[i][j]` of name i and cause j."""
    axes = new_axes("answers", "")
    places = range(len(names))
    left = [0.0] * len(names)
    bars = []
    for cause, column in zip(causes, zip(*values, strict=True), strict=True):
        # A cause has one colour on all pages.
        colour, _ = picture.style(list(CAUSES).index(cause))
        bars.append(axes.barh(places, column, 0.7, left=left, color=colour))
        left = [start + width for start, width in zip(left, column, strict=True)]
    axes.set_yticks(places, [name if len(name) <= 24 else f"…{name[-23:]}" for name in names])
    # The first at the top; one bar alone must not fill the chart.
    axes.set_ylim(max(len(names), 3) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    as_percent(axes.xaxis)
    axes.grid(visible=False, axis="y")
    legend_below(axes, bars, causes)
    return address(axes)


def _diagnosis_tables(systems: Sequence[Numbers]) -> list[PageTable]:
    systems, names = _that_have(systems, "diagnosis")
    rows = []
    for system, name in zip(systems, names, strict=True):
        found = system["diagnosis"]
        shares = [found[key] for key in ("read", "write", "whole_chain", "stop")]
        rows.append([name, str(found["n"]), *map(percent, shares)])
    if not rows:
        return []
    table = PageTable(
        ["system", "questions", "reads", "writes", "writes all", "stops"],
        rows,
        "With the reference's help",
        "Reads: answers that are right when it is fed the reference's own latents. Writes: thoughts that are right "
        "after a right prefix, and chains of which all are. Stops: chains that end in the right place.",
    )
    return [table]


def retrieval_section(systems: Sequence[Numbers]) -> Section:
    systems, names = _that_have(systems, "retrieval")
    curves = []
    tables = []
    for system, name in zip(systems, names, strict=True):
        tables.append(_retrieval_table(system["retrieval"], name))
        by_position = system["retrieval"]["written"]["by_position"]
        curves.append(Curve(name, [(k + 1, shares["in_set"]) for k, shares in enumerate(by_position)]))
    charts = []
    if systems:
        read = "Share of thoughts whose whole group is found (in set)."
        charts.append(shares_chart("By position in the chain", read, curves, "thought", "thoughts"))
    return Section(
        "retrieval",
        "Can thoughts be read as tokens?",
        "Share of the group's tokens among the tokens nearest to a thought, after a right prefix; “in set” looks at as "
        "many tokens as the group has. The last two columns are in set: thoughts of the model's own chain, and the "
        "reference's own latents, the ceiling.",
        charts,
        tables,
    )


def _retrieval_table(retrieval: Mapping[str, Any], name: str) -> PageTable:
    rows = []
    for kind, words in KINDS.items():
        written = retrieval["written"]["by_kind"][kind]
        row = [words, str(written["n"])]
        row += [percent(written[measure]) for measure in MEASURES]
        row += [percent(retrieval[chain]["by_kind"][kind]["in_set"]) for chain in ("own", "reference")]
        rows.append(row)
    head = ["token", "n", *MEASURES.values(), "own chain", "ceiling"]
    return PageTable(head, rows, name)


def causal_section(systems: Sequence[Numbers]) -> Section:
    systems = [system for system in systems if system.get("causal") and system["causal"]["n"]]
    tables = []
    for system, name in zip(systems, names_of(systems), strict=True):
        tables.append(_causal_table(system["causal"], name))
    return Section(
        "causal",
        "What one thought does to the answer",
        "One thought is changed, and the answer decoded anew. Cells: answers that change / accuracy that is left. "
        "“Kept” feeds the later thoughts as they were, “rethought” lets the model think on.",
        tables=tables,
    )


def _causal_table(causal: Mapping[str, Any], name: str) -> PageTable:
    effects = {(each["change"], each["then"], each["position"]): each for each in causal["effects"]}
    columns = [(then, position) for then in THENS for position in POSITIONS]
    rows = []
    for change, words in CHANGES.items():
        rows.append([words, *(_cell(effects.get((change, *column)), causal["n"]) for column in columns)])
    head = ["change", *(f"{position}, {then}" for then, position in columns)]
    return PageTable(head, rows, f"{name}: {causal['n']} questions")


def _cell(effect: Mapping[str, Any] | None, n_questions: int) -> str:
    """Share of changed answers / accuracy after it; the number of questions where it is not that of the table."""
    if effect is None or not effect["n"]:
        return NONE
    shares = f"{percent(effect['changed'], 0)} / {percent(effect['accuracy_after'], 0)}"
    # A chain of one thought has nothing left to think on with.
    return shares if effect["n"] == n_questions else f"{shares} (of {effect['n']})"


SECTIONS = (causes_section, retrieval_section, causal_section)
