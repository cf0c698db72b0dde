"""Write the tables in docs that come from committed results, each between its own pair of marks:

    <!-- results/arena-tiny accuracy -->
    ...
    <!-- end -->

    python scripts/write_tables.py             `tests/test_results.py` checks that they are up to date

`accuracy` is a line a system (controls left out), `factors` a line a factor and a column a label, `controls`
the controls beside what they were made from, `pairs` the paired differences that were asked for. Any other word is the
name of a file there: `<!-- results/grpo-tiny differences -->` has the first table of its differences.md.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from colar import files
from colar.show.grid import BLANK, Grid, markdown, number, percent, points, share
from colar.show.naming import AVERAGE, Row, datasets_of, is_control, system_name, without_control

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- (results/\S+) (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)

Report = Mapping[str, Any]


def rows_of(report: Report) -> Sequence[Row]:
    return report["pooled"] or report["rows"]


def systems(report: Report) -> Iterator[tuple[str, dict[tuple[str, str], Row]]]:
    """(name, rows by decoding and dataset) of each system, in the report's order."""
    rows = rows_of(report)
    found: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        found.setdefault(system_name(row, rows), {})[row["decoding"], row["dataset"]] = row
    yield from found.items()


def half_runs(row: Row | None) -> str:
    half = None if row is None else row.get("runs_interval")
    return BLANK if half is None else f"± {100 * half:.1f}"


def accuracy(report: Report) -> Grid:
    """#L, greedy accuracy on each data set and on average, its two intervals, and the sampled average."""
    datasets = datasets_of(rows_of(report))
    body = []
    for name, cells in systems(report):
        average = cells.get(("greedy", AVERAGE))
        if average is None or is_control(average["label"]):
            continue
        shown = [
            percent(cells["greedy", d]["accuracy"] if ("greedy", d) in cells else None) for d in datasets
        ]
        sampled = share(cells.get(("sampled", AVERAGE)))
        body.append([name, number(average["length"]), *shown, share(average), half_runs(average), sampled])
    head = ["system", "#L", *datasets, "average", "runs", "average, sampled"]
    return Grid("", head, sorted(body, key=lambda line: -float(line[-3].split()[0])))


def factors(report: Report) -> Grid:
    """Greedy averages: a line a compression factor asked for, a column a label."""
    rows = [row for row in rows_of(report) if row["decoding"] == "greedy"]
    cells = {(row["compression_factor"], row["label"]): row for row in rows if row["dataset"] == AVERAGE}
    asked, labels = sorted({c for c, _ in cells}), list(dict.fromkeys(label for _, label in cells))
    body = [
        [str(c)]
        + [
            f"{share(cells.get((c, x)))} ({half_runs(cells.get((c, x)))})" if (c, x) in cells else BLANK
            for x in labels
        ]
        for c in asked
    ]
    return Grid("", ["c asked for", *(label or "random c" for label in labels)], body)


def controls(report: Report) -> Grid:
    """Greedy averages: each method with its own thoughts, and with what a control feeds instead (% truncated)."""
    rows = rows_of(report)
    plain: dict[str, list[str]] = {}
    found: dict[str, dict[str, str]] = {}
    for name, cells in systems(report):
        row = cells.get(("greedy", AVERAGE))
        if row is None:
            continue
        base = system_name({**row, "label": without_control(row["label"])}, rows)
        kind = row["label"].rpartition("control-")[2].partition(",")[0]
        if not is_control(row["label"]):
            plain[name] = [name, number(row["length"]), share(row)]
        elif not kind.startswith("cut"):
            found.setdefault(base, {})[kind] = f"{share(row)} ({percent(row['truncated'])})"
    kinds = list(dict.fromkeys(kind for given in found.values() for kind in given))
    body = [[*plain[base], *(given.get(kind, BLANK) for kind in kinds)] for base, given in found.items()]
    return Grid("", ["system", "#L", "its own", *kinds], body)


def pairs(report: Report) -> Grid:
    """The averages of the paired differences: greedy, over training runs, sampled."""
    lines: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report["pairs"]:
        if row["dataset"] == AVERAGE:
            lines.setdefault((row["pair"][0], row["pair"][1]), {})[row["decoding"]] = row
    body = [
        [*names, points(cells.get("greedy")), half_runs(cells.get("greedy")), points(cells.get("sampled"))]
        for names, cells in lines.items()
    ]
    return Grid("", ["system", "baseline", "greedy", "runs", "sampled"], body, words=2)


TABLES: dict[str, Callable[[Report], Grid]] = {
    "accuracy": accuracy,
    "factors": factors,
    "controls": controls,
    "pairs": pairs,
}


def first_table(text: str) -> str:
    """The first Markdown table of a page, as it stands there."""
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    return "\n".join(itertools.takewhile(lambda line: line.startswith("|"), lines))


def filled(text: str) -> str:
    """The page with every table made anew from its result, without columns that have nothing in them."""

    def table(match: re.Match[str]) -> str:
        folder, kind, _ = match.groups()
        if kind not in TABLES:
            body = first_table((ROOT / folder / f"{kind}.md").read_text())
            return f"<!-- {folder} {kind} -->\n\n{body}\n\n<!-- end -->"
        grid = TABLES[kind](files.read_json(ROOT / folder / "report.json"))
        kept = [i for i in range(len(grid.head)) if any(line[i] != BLANK for line in grid.rows)]
        head, *rows = ([line[i] for i in kept] for line in (grid.head, *grid.rows))
        body = markdown(replace(grid, head=head, rows=rows)).partition("\n\n")[2]
        return f"<!-- {folder} {kind} -->\n\n{body}\n\n<!-- end -->"

    return MARK.sub(table, text)


def main() -> None:
    for path in sorted(ROOT.glob("docs/*.md")):
        text = path.read_text()
        if MARK.search(text):
            files.write_text(path, filled(text))
            print(path)


if __name__ == "__main__":
    main()
