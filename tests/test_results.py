"""Every committed result can be recomputed: its report is the fold over its records, number by number."""

import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest

from colar import files
from colar.evaluation import report
from colar.evaluation.records import RecordFiles
from colar.evaluation.report_rows import AVERAGE, Report

ROOT = Path(__file__).resolve().parent.parent
REPORTS = sorted(path.parent / "report.json" for path in ROOT.glob("results/*/*/records.jsonl.gz"))


def test_there_are_results():
    assert len(REPORTS) >= 2


LARGE = 700_000
"""Bytes of records from which on one data set of a result is folded: the averages over them are those of other results."""


def datasets_of(saved):
    return sorted({row.dataset for row in saved.rows} - {AVERAGE})


def of_dataset(lines, dataset):
    """The records of one data set. A line is parsed only if it may be one."""
    named = f'"dataset": "{dataset}"'
    for line in lines:
        if named in line:
            yield json.loads(line)


def rows_of(rows, dataset):
    return [row for row in rows if row.dataset == dataset]


def pairs_of(rows):
    return list(dict.fromkeys((row.pair[0], row.pair[1]) for row in rows))


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: f"{path.parts[-3]}/{path.parts[-2]}")
def test_a_report_is_the_fold_over_its_records(path):
    plain = files.read_json(path)
    saved = Report.from_json(plain)
    source = path.parent / "records.jsonl.gz"
    datasets = datasets_of(saved)
    assert saved.provenance["command"].startswith("colar ")
    if source.stat().st_size < LARGE or len(datasets) == 1:
        folded = report.fold(RecordFiles([source]), saved.provenance, saved.baseline, pairs_of(saved.pairs))
        # Through JSON on both sides: the training seed of a baseline is not in the file.
        assert Report.from_json(json.loads(json.dumps(folded.to_json()))) == saved
        return
    # Another one in each result.
    dataset = datasets[REPORTS.index(path) % len(datasets)]
    pairs = pairs_of(rows_of(saved.pairs, dataset))
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        folded = report.fold(of_dataset(lines, dataset), saved.provenance, saved.baseline, pairs)
    folded = Report.from_json(json.loads(json.dumps(folded.to_json())))
    for section in ("rows", "comparisons", "pooled", "pooled_comparisons", "pairs"):
        expected = rows_of(getattr(saved, section), dataset)
        assert rows_of(getattr(folded, section), dataset) == expected, section
    assert rows_of(saved.rows, dataset)


def module(name):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "lab" / "scripts" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


PAGES = module("write_tables").pages()


def test_pages_with_tables_are_found():
    with_tables = [path.relative_to(ROOT).as_posix() for path in PAGES if "<!-- results/" in path.read_text()]
    assert {
        "README.md",
        "results/toy/README.md",
        "results/smollm2/README.md",
        "results/speed/README.md",
    } <= set(with_tables)
    assert {path.parent for path in ROOT.glob("docs/*.md")} <= {path.parent for path in PAGES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_tables_in_pages_are_those_of_the_results(path):
    assert module("write_tables").filled(path.read_text()) == path.read_text(), (
        "run lab/scripts/write_tables.py"
    )


def test_the_pages_of_results_are_four_and_can_be_read_in_ten_minutes():
    pages = {path.parent.name: path for path in ROOT.glob("results/*/README.md")}
    assert set(pages) == {"toy", "smollm2", "speed", "figures"}
    for page in pages.values():
        words = re.sub(r"<!--.*?-->", "", page.read_text()).split()
        assert len(words) <= 2500, page
    assert sum(path.stat().st_size for path in ROOT.glob("results/**/*") if path.is_file()) < 20e6


def test_the_table_of_reinforced_runs_is_that_of_their_histories():
    folder = ROOT / "results" / "toy" / "grpo-stability"
    script = module("grpo_stability")
    histories = files.read_json(folder / "report.json")["histories"]
    rows = [script.summary(name, history) for name, history in histories.items()]
    assert script.markdown(rows) == (folder / "report.md").read_text()


def test_the_table_in_readme_is_the_demos():
    lines = (
        (ROOT / "README.md").read_text().partition("<!-- demo:begin -->")[2].partition("<!-- demo:end -->")[0]
    )
    table = [line for line in lines.splitlines() if line.startswith("| ") and "±" in line]
    source = (ROOT / "results" / "toy" / "demo" / "report.md").read_text().splitlines()
    assert len(table) >= 7
    assert [line for line in table if line not in source] == []
