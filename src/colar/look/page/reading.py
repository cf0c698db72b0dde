"""Sections about what thoughts say: what goes wrong first, and retrieval of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from colar.look.page import charts
from colar.look.page.charts import Point, Series
from colar.look.page.figures import (
    Figure,
    Key,
    Section,
    System,
    Table,
    line_figure,
    names_of,
    percent,
)

CAUSES = {
    "right": "the answer is right",
    "misread": "all thoughts are right, the answer is not",
    "wrong result": "the first wrong thought lacks digits of a result only",
    "wrong plan": "the first wrong thought lacks something else, or goes another way than the reference",
    "stopped early": "all thoughts are right, some are missing",
    "stopped late": "all thoughts are right, there are too many",
    "unparsable": "there is no answer in what it says",
    "wrong": "the answer is wrong, and there is no chain to compare with",
}
KINDS = {"bracket": "bracket", "sign": "operator", "operand": "operand digit", "result": "result digit"}
MEASURES = {"top1": "nearest", "top5": "5 nearest", "in_set": "in set", "chosen": "chosen"}


def causes_section(systems: Sequence[System]) -> Section:
    """Empty where there are no answers."""
    systems = [system for system in systems if system.get("answers")]
    names = names_of(systems)
    shares = [_cause_shares(system) for system in systems]
    found = [cause for cause in CAUSES if any(share[cause] for share in shares)]
    if not found:
        return Section("causes", "", "")
    values = [[share[cause] for cause in found] for share in shares]
    rows = [[name, *map(percent, row)] for name, row in zip(names, values, strict=True)]
    figure = Figure(
        "Answers, by the first thing that went wrong",
        "A thought is right when the group's tokens are among its c nearest, or among those that were chosen.",
        charts.stacked(_short(names), found, values, "", "Shares of answers by what went wrong first"),
        Table(["system", *found], rows),
        [Key(f"{cause}: {CAUSES[cause]}", i) for i, cause in enumerate(found)],
    )
    return Section(
        "causes",
        "What goes wrong",
        "Each wrong answer is put down to the first thought that differs from the reference chain.",
        [figure],
    )


def _cause_shares(system: System) -> dict[str, float]:
    # A question that nobody gave an answer to has no cause.
    counts = Counter(answer["cause"] for answer in system["answers"] if answer["cause"])
    total = max(sum(counts.values()), 1)
    return {cause: counts[cause] / total for cause in CAUSES}


def _short(names: Sequence[str]) -> list[str]:
    """Names that fit below a column."""
    return [name if len(name) <= 18 else f"{name[:17]}…" for name in names]


def retrieval_section(systems: Sequence[System]) -> Section:
    """Empty where nothing was compared."""
    systems = [system for system in systems if system.get("retrieval")]
    if not systems:
        return Section("retrieval", "", "")
    names = names_of(systems)
    series = []
    tables = []
    for i, (system, name) in enumerate(zip(systems, names, strict=True)):
        tables.append(_retrieval_table(system["retrieval"], name))
        points = []
        for k, shares in enumerate(system["retrieval"]["written"]["by_position"]):
            if shares["in_set"] is not None:
                text = f"{name}, thought {k + 1}: {percent(shares['in_set'])} of {shares['n']}"
                points.append(Point(k + 1, shares["in_set"], text=text))
        series.append(Series(name, points, i))
    figure = line_figure(
        "By position in the chain",
        "Share of thoughts whose whole group is found (in set).",
        series,
        "thought",
        charts.shares("thoughts"),
    )
    return Section(
        "retrieval",
        "Can thoughts be read as tokens?",
        "Share of the group's tokens among the tokens nearest to a thought, after a right prefix; “in set” looks at as "
        "many tokens as the group has. The ceiling is the reference's own latents.",
        [figure],
        tables,
    )


def _retrieval_table(retrieval: Mapping[str, Any], name: str) -> Table:
    rows = []
    for kind, words in KINDS.items():
        written = retrieval["written"]["by_kind"][kind]
        row = [words, str(written["n"])]
        row += [percent(written[measure]) for measure in MEASURES]
        row += [percent(retrieval[chain]["by_kind"][kind]["in_set"]) for chain in ("own", "reference")]
        rows.append(row)
    head = ["token", "tokens", *MEASURES.values(), "own chain: in set", "ceiling: in set"]
    return Table(head, rows, name)
