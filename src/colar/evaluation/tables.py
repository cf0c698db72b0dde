"""Tables of a report, the same in Markdown and on a terminal; each names the interval that it shows.

Systems are rows, with names that distinguish them (`evaluation/report_rows.py`); those of the baseline's method come
first. If systems were trained several times, a row stands for all runs of a system; single runs are in report.json.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from colar.evaluation.report_rows import (
    AVERAGE,
    BASELINE,
    Difference,
    Report,
    ReportRow,
    System,
    datasets_of,
    system_name,
    systems_of,
)
from colar.evaluation.stats import half_interval

BLANK = "–"
FEW = 30
"""Questions below which the normal interval is visibly too narrow."""

CLUSTERED = "± is 1.96 x the standard error clustered by question."
PAIRED = (
    f"System minus baseline, in points of accuracy, on the questions that both answered. {CLUSTERED} * marks a 95% "
    "interval without 0; there is no correction for multiple comparisons."
)


@dataclass(frozen=True)
class TextTable:
    """A table, for Markdown or a terminal: a title, column heads, rows of text, and notes below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    words: int = 1
    """Columns, from the left, that hold words; the others hold numbers and are set flush right."""


def render_markdown(report: Report, title: str, pictures: Iterable[str] = ()) -> str:
    """The report as Markdown: data, pictures (paths relative to the file), tables, provenance."""
    parts = [f"# {title}", _data(report)]
    for picture in pictures:
        parts.append(f"![accuracy against reasoning length]({picture})")
    for table in report_tables(report):
        parts.append(markdown(table))
    provenance = json.dumps(report.provenance, indent=1, ensure_ascii=False)
    parts.append(f"## Provenance\n\n```json\n{provenance}\n```")
    return "\n\n".join(parts) + "\n"


def report_tables(report: Report) -> list[TextTable]:
    """Every table of the report that has a row."""
    decodings = sorted({row.system.decoding for row in report.shown_rows})
    # In the order of a reader's questions: how good, better than what, at which cost.
    tables = [_accuracy(report, decoding) for decoding in decodings]
    tables += [_differences(report, decoding) for decoding in decodings]
    tables += [_pairs(report), _several_samples(report), _cost(report)]
    return [table for table in tables if table.rows]


def _accuracy(report: Report, decoding: str) -> TextTable:
    """Accuracy and length of thinking, systems x datasets."""
    rows = [row for row in report.shown_rows if row.system.decoding == decoding]
    datasets = datasets_of(rows)
    rows = [row for row in rows if _is_comparable(row, datasets)]
    columns = _with_average(datasets)
    # Each dataset has two columns: accuracy means little without the length of the thinking that it took.
    head = ["system"]
    for dataset in columns:
        head += [f"{dataset} Acc.", "#L"]
    if report.pooled:
        head.append("runs")
    body = []
    for name, by_dataset in _lines(report, rows):
        cells = [name]
        for dataset in columns:
            row = by_dataset.get(dataset)
            cells += [accuracy_of(row), BLANK if row is None else number(row.length)]
        if report.pooled:
            last = by_dataset.get(columns[-1])
            cells.append(BLANK if last is None else half_width(last.runs_interval))
        body.append(cells)
    notes = [f"Accuracy in %; {CLUSTERED} #L is the mean number of embeddings emitted while thinking."]
    if report.pooled:
        runs = " or ".join(map(str, sorted({len(row.train_seeds or []) for row in rows})))
        notes.append(
            f"Means over {runs} training runs; for ± the answers of all runs to a question are one cluster. Runs: half "
            "the 95% t interval of the last accuracy over training seeds."
        )
    notes += _warnings(report, rows)
    return TextTable(f"Accuracy, {decoding} decoding", head, body, notes)


def _differences(report: Report, decoding: str) -> TextTable:
    """Paired differences of each system to its baselines, on the same questions: pairs of systems x datasets."""
    rows = [row for row in report.shown_comparisons if row.system.decoding == decoding]
    datasets = datasets_of(rows)
    # Pairs stand in the order in which the other tables have their systems.
    by_pair: defaultdict[tuple[System, System], dict[str, Difference]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: _place(row.system)):
        by_pair[row.system, row.baseline][row.dataset] = row
    systems = systems_of(report.shown_rows)
    body = []
    for (system, baseline), by_dataset in by_pair.items():
        names = [system_name(system, systems), system_name(baseline, systems)]
        body.append([*names, *_points(by_dataset, datasets)])
    head = ["system", "baseline", *_with_average(datasets)]
    return TextTable(f"Paired differences, {decoding} decoding", head, body, [PAIRED], words=2)


def _pairs(report: Report) -> TextTable:
    """Paired differences requested by name: pairs and decodings x datasets."""
    datasets = datasets_of(report.pairs)
    by_pair: defaultdict[tuple[str, ...], dict[str, Difference]] = defaultdict(dict)
    for row in report.pairs:
        by_pair[*(row.pair or ()), row.system.decoding][row.dataset] = row
    # If systems were trained once, a column for runs would be empty.
    several_runs = any(row.runs_interval is not None for row in report.pairs)
    body = []
    for names, by_dataset in by_pair.items():
        cells = [*names, *_points(by_dataset, datasets)]
        if several_runs:
            cells.append(half_width(by_dataset[AVERAGE].runs_interval))
        body.append(cells)
    head = ["system", "baseline", "decoding", *_with_average(datasets)]
    notes = [PAIRED]
    if several_runs:
        head.append("runs")
        notes.append("Runs: half the 95% t interval of the average over training runs.")
    return TextTable("Pairs asked for", head, body, notes, words=3)


def _several_samples(report: Report) -> TextTable:
    """Variation of sampling, and gain of several samples of a question: avg@k, maj@k and pass@k."""
    body = []
    for name, by_dataset in _lines(report, report.shown_rows):
        datasets = _with_average(datasets_of(by_dataset.values()))
        # The table of all runs together is long enough with the averages alone.
        for dataset in datasets[-1:] if report.pooled else datasets:
            row = by_dataset[dataset]
            # Rows of greedy answers, and rows with missing records.
            if row.seeds_interval is None:
                continue
            mean = percent(row.accuracy, row.seeds_interval)
            votes = percent(row.maj_at_k, half_interval(row.maj_at_k_se))
            passed = percent(row.pass_at_k, half_interval(row.pass_at_k_se))
            body.append([name, row.system.decoding, dataset, str(len(row.seeds)), mean, votes, passed])
    notes = [
        "In %. avg@k: ± is the half width of the 95% t interval over decoding seeds: it covers the noise of sampling, "
        "not the choice of questions. maj@k and pass@k: ± is 1.96 standard errors over questions."
    ]
    if report.pooled:
        notes.append("Means over training runs; maj@k and pass@k count the samples of one run.")
    head = ["system", "decoding", "dataset", "k", "avg@k", "maj@k", "pass@k"]
    return TextTable("Several samples a question (decoding seeds)", head, body, notes, words=3)


def _cost(report: Report) -> TextTable:
    """Unparsable and truncated answers, and cost of a question: averages over each system's datasets."""
    body = []
    for name, by_dataset in _lines(report, report.shown_rows):
        # By dataset, this table would be longer than all others together.
        row = by_dataset[AVERAGE]
        body.append(
            [
                name,
                row.system.decoding,
                percent(row.unparsable),
                percent(row.truncated),
                number(row.length),
                number(row.reference_length),
                number(row.forward_passes),
                f"{row.seconds_per_question:.3g}",
            ]
        )
    cost = ["unparsable %", "truncated %", "#L", "reference #L", "forward passes", "seconds"]
    head = ["system", "decoding", *cost]
    notes = [
        "Means over the system's datasets. An answer that cannot be parsed counts as wrong. Reference #L: the "
        "reference chain's tokens divided by c, rounded up. Seconds: a question's share of wall-clock, in the "
        "batches it ran in."
    ]
    if any(row.system.is_control for row in report.shown_rows):
        notes.append("Truncated, of a control: its answers alone; the thoughts that it is fed are never cut.")
    return TextTable("Unparsable, truncated, cost of a question", head, body, notes, words=2)


def accuracy_of(row: ReportRow | None) -> str:
    """Accuracy in % with 1.96 standard errors: `52.0 ± 3.9`."""
    return BLANK if row is None else percent(row.accuracy, half_interval(row.accuracy_se))


def points(row: Difference | None, digits: int = 1) -> str:
    return BLANK if row is None else points_of(row.difference, row.se, row.interval, digits)


def points_of(difference: float, se: float | None, interval: Sequence[float] | None, digits: int = 1) -> str:
    """A difference in points of accuracy: `-3.1 ± 2.0 *`, with a star if its interval excludes 0."""
    text = f"{100 * difference:+.{digits}f}"
    if interval is None or se is None:
        return text
    # From the exact interval: rounded, `2.0 ± 2.0` may include 0 or not.
    low, high = interval
    star = " *" if low > 0 or high < 0 else ""
    return f"{text} {half_width(half_interval(se), digits)}{star}"


def _lines(report: Report, rows: Iterable[ReportRow]) -> list[tuple[str, dict[str, ReportRow]]]:
    """Each system in `rows`: its name among all systems that the report shows, and its rows by dataset."""
    by_system: defaultdict[System, dict[str, ReportRow]] = defaultdict(dict)
    for row in rows:
        by_system[row.system][row.dataset] = row
    systems = systems_of(report.shown_rows)
    ordered = sorted(by_system, key=_place)
    return [(system_name(system, systems), by_system[system]) for system in ordered]


def _place(system: System) -> tuple[Any, ...]:
    """Sort key of systems in tables: the baseline's method first, a control after the system that it was made from."""
    return system.method != BASELINE, system.order()


def _points(by_dataset: Mapping[str, Difference], datasets: Sequence[str]) -> list[str]:
    """The cells of one pair: a difference for each dataset, and their average."""
    cells = []
    for dataset in _with_average(datasets):
        row = by_dataset.get(dataset)
        cells.append(points(row if row and _is_comparable(row, datasets) else None))
    return cells


def _warnings(report: Report, rows: Sequence[ReportRow]) -> list[str]:
    """Notes that a reader needs before comparing two cells of the accuracy table."""
    systems = systems_of(report.shown_rows)
    # Each fault is named once, at its dataset: averages would repeat it.
    cells = [row for row in rows if row.dataset != AVERAGE]
    notes = []
    # A killed evaluation can be folded, but its means are then over part of the questions.
    for row in cells:
        runs = 1 if row.train_seeds is None else len(row.train_seeds)
        expected = row.n * len(row.seeds) * runs
        if row.samples < expected:
            name = system_name(row.system, systems)
            notes.append(f"Incomplete: {name} on {row.dataset} has {row.samples} of {expected} records.")
    # An evaluation killed while some questions had no answer yet, under any decoding.
    for dataset, n in report.provenance.get("questions", {}).items():
        most = max((row.n for row in report.rows if row.dataset == dataset), default=0)
        if most < n:
            notes.append(f"Incomplete: {most} of {n} questions of {dataset} are answered.")
    # Systems may have been given different numbers of questions (--limit); their means then differ by questions too.
    for dataset, sizes in _sizes(cells).items():
        if len(sizes) > 1:
            text = f"The systems answered different numbers of questions of {dataset}: {_listed(sizes)}."
            notes.append(text)
    seeds = {row.system.train_seed for row in cells if row.system.method == BASELINE}
    others = dict.fromkeys(row.system for row in cells if seeds and row.system.train_seed not in seeds)
    names = [system_name(system, systems) for system in others]
    baselines = {system_name(row.system, systems) for row in cells if row.system.method == BASELINE}
    asked = {row.pair[0] for row in report.pairs if row.pair and row.pair[1] in baselines}
    if unpaired := [name for name in names if name not in asked]:
        notes.append(
            f"No difference to {BASELINE} is shown for systems of another training seed ({', '.join(unpaired)}): "
            "colar report --pair SYSTEM BASELINE shows one."
        )
    if any(row.n < FEW for row in cells):
        notes.append(
            f"Fewer than {FEW} questions somewhere: there ± is too narrow, and it is 0 at 0% or 100%."
        )
    return notes


def _sizes(rows: Sequence[ReportRow]) -> dict[str, set[int]]:
    """Dataset -> numbers of questions that systems answered."""
    sizes: dict[str, set[int]] = {dataset: set() for dataset in datasets_of(rows)}
    for row in rows:
        if row.dataset in sizes:
            sizes[row.dataset].add(row.n)
    return sizes


def _data(report: Report) -> str:
    """Data sets with their numbers of questions, decoding and training seeds, as one line."""
    # Rows of single runs: only they have a training seed.
    rows = [row for row in report.rows if row.dataset != AVERAGE]
    facts = []
    for dataset, sizes in _sizes(rows).items():
        facts.append(f"{dataset} ({'/'.join(map(str, sorted(sizes)))} questions)")
    for decoding in sorted({row.system.decoding for row in rows}):
        seeds = set[int]().union(*(row.seeds for row in rows if row.system.decoding == decoding))
        facts.append(f"{decoding} decoding with seeds {_listed(seeds)}")
    runs = {row.system.train_seed for row in rows if row.system.train_seed is not None}
    if runs:
        facts.append(f"training seeds {_listed(runs)}")
    return f"Data: {', '.join(facts)}."


def _is_comparable(row: ReportRow | Difference, datasets: Sequence[str]) -> bool:
    """False for an average that leaves out a dataset of the table: its cell is left blank."""
    return row.datasets is None or len(row.datasets) == len(datasets)


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))


def _with_average(datasets: Sequence[str]) -> list[str]:
    """The columns of a table: with a single dataset, the average would repeat it."""
    return [*datasets, AVERAGE] if len(datasets) > 1 else list(datasets)


# Tables as Markdown and on a terminal, and the formats of their numbers


def markdown(table: TextTable) -> str:
    """A heading, the table and its notes. Column heads and cells are escaped: `|`, `*` and `<` are literal."""
    # `---:` sets a column flush right.
    rule = ["---"] * table.words + ["---:"] * (len(table.head) - table.words)
    head, *rows = [list(map(_escape, cells)) for cells in (table.head, *table.rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
    notes = [_escape(note) for note in table.notes]
    return "\n\n".join([f"## {table.title}", "\n".join(lines), *notes])


def _escape(text: str) -> str:
    # A line break would end the row, and "<" open a tag.
    text = " ".join(text.splitlines())
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def print_tables(tables: Iterable[TextTable], console: Console) -> None:
    """Print tables; one that is too wide keeps its numbers whole, and the terminal wraps its lines.

    Texts are shown literally, without rich's markup.
    """
    for table in tables:
        # As Text objects, labels such as [red] stay as they are.
        caption = Text("\n".join(table.notes))
        printed = Table(title=table.title, caption=caption, title_justify="left", caption_justify="left")
        for index, column in enumerate(zip(table.head, *table.rows, strict=True)):
            # On a narrow terminal words are folded, never a number.
            words = index < table.words
            least = None if words else max(map(len, column))
            printed.add_column(
                Text(column[0]), justify="left" if words else "right", overflow="fold", min_width=least
            )
        for row in table.rows:
            printed.add_row(*(Text(text) for text in row))
        needed = console.measure(printed, options=console.options.update(max_width=10_000)).minimum
        if needed > console.width:
            printed.width = needed
        console.print(printed, crop=False)


def percent(share: float | None, half: float | None = None, digits: int = 1) -> str:
    """A share in %, with half of its interval if that is known: `52.0 ± 3.9`."""
    if share is None:
        return BLANK
    text = f"{100 * share:.{digits}f}"
    return text if half is None else f"{text} {half_width(half, digits)}"


def half_width(half: float | None, digits: int = 1) -> str:
    """Half of an interval, in points: `± 3.9`."""
    return BLANK if half is None else f"± {100 * half:.{digits}f}"


def number(value: float | None) -> str:
    return BLANK if value is None else f"{value:.1f}"
