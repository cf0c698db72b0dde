"""Write the tables in README, docs and the pages of results that come from committed records, each between its marks:

    <!-- results/toy/arena averages -->
    ...
    <!-- end -->

    python lab/scripts/write_tables.py             `tests/test_results.py` checks that they are up to date

| word | table |
|---|---|
| `averages` | a line for each system, the best first: #L, the average over the data sets, controls left out |
| `datasets` | a line for each system in the report's order: #L, each data set, the average over all of them |
| `factors` | a line for each factor and a column for each label |
| `gates` | a line for each factor and a column for each confidence threshold |
| `controls` | the controls beside what they were made from |
| `pairs` | the paired differences that the report was asked for |
| `samples` | what several samples of a question gain |
| those of `speed_tables.py` | the benchmarks |
| any other | the first table of that file: `<!-- results/toy/grpo differences -->` has that of its differences.md |

`<!-- results/* headline -->` is README's table: a few rows of several reports.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from colar import files
from colar.evaluation.report_rows import (
    AVERAGE,
    Difference,
    Report,
    ReportRow,
    datasets_of,
    system_name,
    systems_of,
)
from colar.evaluation.stats import half_interval
from colar.evaluation.tables import (
    BLANK,
    TextTable,
    accuracy_of,
    half_width,
    markdown,
    number,
    percent,
    points,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "lab"), str(ROOT / "lab" / "scripts")]
# Beside this script, which is no package.
import saved_report  # noqa: E402
import speed_tables  # noqa: E402

MARK = re.compile(r"<!-- (results/\S+) (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
PAGES = ("README.md", "docs/*.md", "results/*/README.md")

ACCURACIES = {
    "toy/arena": (
        "Toy model, one budget for all methods",
        "all-methods-at-one-budget",
        {
            "cot": "CoT",
            "colar c=2": "CoLaR, the paper's Gaussian head, c = 2",
        },
    ),
    "toy/sequential": (
        "The same budget, our head",
        "the-sequential-head",
        {"colar c=2 (sequential)": "sequential (ours), c = 2"},
    ),
    "toy/grpo": (
        "Toy model, training chains with errors, c = 2",
        "reinforcement",
        {"colar c=2": "Gaussian head (the paper's): SFT", "colar c=2 (RL)": "Gaussian head: GRPO"},
    ),
    "qwen/mathematics": (
        "School mathematics, Qwen Coder",
        "school-mathematics",
        {
            "qwen2.5-coder-0.5b c=1": "sequential (ours), c = 1: a chain of thought",
            "qwen2.5-coder-0.5b c=2 (confidence_threshold=0.8)": "c = 2, threshold 0.8",
            "qwen2.5-coder-0.5b c=2": "c = 2",
        },
    ),
}
"""Of README's table: folder -> title of the experiment, its heading in the page, its systems with README's names."""
SPEED_CELL = "b32/mixed"
SPEEDS = {
    "hf-cot": "transformers `generate`, CoT",
    "colar5-eager": "ours, Gaussian head (the paper's), c = 5",
}
"""Of README's table: systems of the benchmark of thinking, 32 rows at a time, chains of the data's own lengths."""


def by_name(report: Report) -> dict[str, dict[tuple[str, str], ReportRow]]:
    """The rows of each system by (decoding, dataset), in the report's order of systems."""
    systems = systems_of(report.shown_rows)
    found: defaultdict[str, dict[tuple[str, str], ReportRow]] = defaultdict(dict)
    for row in report.shown_rows:
        found[system_name(row.system, systems)][row.system.decoding, row.dataset] = row
    return found


def half_runs(row: ReportRow | Difference | None) -> str:
    return half_width(None if row is None else row.runs_interval)


def averages(report: Report) -> TextTable:
    """How right is each system on average? Greedy, the best first."""
    body = []
    for name, rows in by_name(report).items():
        average = rows.get(("greedy", AVERAGE))
        if average is not None and not average.system.is_control:
            body.append([name, number(average.length), accuracy_of(average), half_runs(average)])
    # The best average first: `52.0 ± 3.9`.
    return TextTable(
        "", ["system", "#L", "average", "runs"], sorted(body, key=lambda line: -float(line[2].split()[0]))
    )


def datasets(report: Report) -> TextTable:
    """How right is each system on each data set? Greedy; the average where the system was asked on all of them."""
    names = datasets_of(report.shown_rows)
    body = []
    for name, rows in by_name(report).items():
        average = rows.get(("greedy", AVERAGE))
        if average is None or average.system.is_control:
            continue
        line = [name, number(average.length)]
        for dataset in names:
            row = rows.get(("greedy", dataset))
            line.append(BLANK if row is None else percent(row.accuracy))
        whole = _averaged(average, rows) == tuple(sorted(names))
        body.append([*line, accuracy_of(average if whole else None)])
    return TextTable("", ["system", "#L", *names, "average"], body)


def factors(report: Report) -> TextTable:
    """How right is a model at a speed that it was not trained with? Greedy averages: speeds x labels."""
    found: dict[tuple[float | None, str], ReportRow] = {}
    for row in report.shown_rows:
        if row.system.decoding == "greedy" and row.dataset == AVERAGE:
            found[row.system.speed, row.system.note] = row
    asked = sorted({factor for factor, _ in found if factor is not None})
    labels = list(dict.fromkeys(label for _, label in found))
    body = []
    for factor in asked:
        line = [str(factor)]
        for label in labels:
            row = found.get((factor, label))
            line.append(accuracy_of(row))
        body.append(line)
    return TextTable("", ["c", *(label or "random c" for label in labels)], body)


def gates(report: Report) -> TextTable:
    """What does a confidence threshold buy? Greedy averages and #L: a line a label and c, a column a threshold."""
    found: defaultdict[tuple[str, float], dict[float, str]] = defaultdict(dict)
    for row in report.shown_rows:
        speed = row.system.speed
        if row.system.decoding != "greedy" or row.dataset != AVERAGE or speed is None:
            continue
        threshold = dict(row.system.params).get("confidence_threshold", 0)
        found[row.system.label, speed][threshold] = f"{percent(row.accuracy)} ({number(row.length)})"
    thresholds = sorted({threshold for line in found.values() for threshold in line})
    body = []
    for (label, factor), cells in sorted(found.items()):
        body.append([label, f"{factor:g}", *(cells.get(threshold, BLANK) for threshold in thresholds)])
    head = ["label", "c at most", *(f"{threshold:g}" if threshold else "none" for threshold in thresholds)]
    return TextTable("", head, body, words=1)


def controls(report: Report) -> TextTable:
    """Does a method read its thoughts? Greedy averages with its own, and with what a control feeds (% truncated).

    A line is a system on the data sets of its controls; BLANK where it was not asked on all of them itself.
    """
    systems = systems_of(report.shown_rows)
    named = by_name(report)
    lines: defaultdict[tuple[str, tuple[str, ...]], dict[str, str]] = defaultdict(dict)
    kinds: list[str] = []
    for rows in named.values():
        row = rows.get(("greedy", AVERAGE))
        if row is None or not row.system.is_control:
            continue
        kind = row.system.label.rpartition("control-")[2].partition(",")[0]
        if kind.startswith("cut"):
            continue
        if kind not in kinds:
            kinds.append(kind)
        base = system_name(row.system.without_control(), systems)
        lines[base, _averaged(row, rows)][kind] = f"{accuracy_of(row)} ({percent(row.truncated)})"
    body = []
    for (base, datasets), given in lines.items():
        own = _own(named.get(base, {}), datasets)
        length = BLANK if own is None else number(own.length)
        body.append([base, length, accuracy_of(own), *(given.get(kind, BLANK) for kind in kinds)])
    return TextTable("", ["system", "#L", "its own", *kinds], body)


def _averaged(average: ReportRow, rows: Mapping[tuple[str, str], ReportRow]) -> tuple[str, ...]:
    """The data sets of a greedy average."""
    if average.datasets is not None:
        return tuple(sorted(average.datasets))
    return tuple(sorted(dataset for decoding, dataset in rows if decoding == "greedy" and dataset != AVERAGE))


def _own(rows: Mapping[tuple[str, str], ReportRow], datasets: tuple[str, ...]) -> ReportRow | None:
    """The greedy row of a system over exactly these data sets."""
    average = rows.get(("greedy", AVERAGE))
    if average is not None and _averaged(average, rows) == datasets:
        return average
    # Its average is over others, but one data set has a row of its own.
    return rows.get(("greedy", datasets[0])) if len(datasets) == 1 else None


def pairs(report: Report) -> TextTable:
    """Is a system better than one named for it? Averaged paired differences: greedy, over training runs, sampled.

    Where pairs were not all drawn from on the same data sets, each set has a column: averages could not be compared.
    """
    found: defaultdict[tuple[str, ...], dict[tuple[str, str], Difference]] = defaultdict(dict)
    for row in report.pairs:
        found[tuple(row.pair or ())][row.system.decoding, row.dataset] = row
    drawn_on = set()
    for rows in found.values():
        drawn_on.add(frozenset(dataset for decoding, dataset in rows if decoding == "sampled") - {AVERAGE})
    columns = {"sampled": AVERAGE}
    if len(drawn_on - {frozenset()}) > 1:
        columns = {f"sampled, {dataset}": dataset for dataset in sorted(frozenset().union(*drawn_on))}
    body = []
    for names, rows in found.items():
        greedy = rows.get(("greedy", AVERAGE))
        sampled = [points(rows.get(("sampled", dataset))) for dataset in columns.values()]
        body.append([*names, points(greedy), half_runs(greedy), *sampled])
    return TextTable("", ["system", "baseline", "greedy", "runs", *columns], body, words=2)


def samples(report: Report) -> TextTable:
    """What do several samples of a question gain? A line a system and data set, beside its greedy answers there."""
    body = []
    for name, rows in by_name(report).items():
        for (decoding, dataset), row in rows.items():
            if decoding != "sampled" or dataset == AVERAGE or row.seeds_interval is None:
                continue
            greedy = rows.get(("greedy", dataset))
            mean = f"{percent(row.accuracy)} ± {percent(row.seeds_interval)}"
            line = [name, dataset, number(row.length), accuracy_of(greedy), f"{len(row.seeds)}", mean]
            votes = percent(row.maj_at_k, half_interval(row.maj_at_k_se))
            passed = percent(row.pass_at_k, half_interval(row.pass_at_k_se))
            body.append([*line, votes, passed])
    head = ["system", "dataset", "#L", "greedy", "k", "avg@k", "maj@k", "pass@k"]
    return TextTable("", head, body, words=2)


def headline() -> TextTable:
    """What has been found, in short? Greedy averages of the main systems of some experiments, and the speed."""
    body = []
    for folder, (title, heading, names) in ACCURACIES.items():
        found = by_name(saved_report.read(ROOT / "results" / folder / "report.json"))
        experiment = f"[{title}](results/{folder.partition('/')[0]}/README.md#{heading})"
        for system, name in names.items():
            row = found[system]["greedy", AVERAGE]
            body.append([experiment, name, accuracy_of(row), number(row.length), BLANK])
            experiment = ""  # named once, in its first row
    cells = speed_tables.report(ROOT / "results" / "speed" / "generate")["cells"]
    experiment = "[Speed on two CPU cores, SmolLM2-135M](results/speed/README.md#thinking)"
    for system, name in SPEEDS.items():
        rate = cells[system][SPEED_CELL]["questions_per_second"]
        body.append([experiment, name, BLANK, BLANK, number(rate)])
        experiment = ""
    return TextTable("", ["experiment", "system", "accuracy %", "#L", "questions/s"], body, words=2)


TABLES: dict[str, Callable[[Report], TextTable]] = {
    "averages": averages,
    "datasets": datasets,
    "factors": factors,
    "gates": gates,
    "controls": controls,
    "pairs": pairs,
    "samples": samples,
}


def first_table(text: str) -> str:
    """The first Markdown table of a page, as it stands there."""
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), text.splitlines())
    return "\n".join(itertools.takewhile(lambda line: line.startswith("|"), lines))


def filled(text: str) -> str:
    """The page with every table made anew from its result."""

    def table(match: re.Match[str]) -> str:
        folder, kind, _ = match.groups()
        if kind in TABLES:
            report = saved_report.read(ROOT / folder / "report.json")
            grid = without_blank_columns(TABLES[kind](report))
            # The page has a heading of its own: the table alone is put in.
            body = markdown(grid).partition("\n\n")[2]
        elif kind in speed_tables.TABLES:
            body = markdown(speed_tables.TABLES[kind](ROOT / folder)).partition("\n\n")[2]
        elif kind == "headline":
            body = markdown(headline()).partition("\n\n")[2]
        else:
            body = first_table((ROOT / folder / f"{kind}.md").read_text())
        return f"<!-- {folder} {kind} -->\n\n{body}\n\n<!-- end -->"

    return MARK.sub(table, text)


def without_blank_columns(grid: TextTable) -> TextTable:
    kept = []
    for column in range(len(grid.head)):
        if any(row[column] != BLANK for row in grid.rows):
            kept.append(column)
    rows = []
    for row in grid.rows:
        rows.append([row[column] for column in kept])
    return replace(grid, head=[grid.head[column] for column in kept], rows=rows)


def pages() -> list[Path]:
    """Every page that may have such tables."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def main() -> None:
    for path in pages():
        text = path.read_text()
        if MARK.search(text):
            files.write_text(path, filled(text))
            print(path)


if __name__ == "__main__":
    main()
