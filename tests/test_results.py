"""Every committed result can be recomputed: its report is the fold over its records, number by number."""

import importlib.util
import json
from pathlib import Path

import pytest

from colar import files
from colar.evaluation import report
from colar.show.report_rows import Report

ROOT = Path(__file__).resolve().parent.parent
REPORTS = sorted(path.parent / "report.json" for path in ROOT.glob("results/*/records.jsonl.gz"))


def test_there_are_results():
    assert len(REPORTS) >= 2


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_a_report_is_the_fold_over_its_records(path):
    saved = files.read_json(path)
    records = report.RecordFiles([path.parent / "records.jsonl.gz"])
    pairs = list(dict.fromkeys((row["pair"][0], row["pair"][1]) for row in saved.get("pairs", ())))
    folded = report.fold(records, {}, saved["baseline"], saved.get("nearest"), pairs).to_json()
    read_back = Report.from_json(saved).to_json()
    for part in saved.keys() - {"provenance"}:
        assert folded[part] == saved[part]
        assert json.dumps(folded[part]) == json.dumps(saved[part])  # the order of keys too
        assert read_back[part] == saved[part]
    assert saved["provenance"]["command"].startswith("colar ")


def write_tables():
    """scripts/write_tables.py as a module."""
    spec = importlib.util.spec_from_file_location("write_tables", ROOT / "scripts" / "write_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = write_tables().pages()


def test_pages_with_tables_are_found():
    with_tables = [path.relative_to(ROOT).as_posix() for path in PAGES if "<!-- results/" in path.read_text()]
    assert {"README.md", "results/arena-tiny/README.md", "results/grpo-tiny/README.md"} <= set(with_tables)
    assert {path.parent for path in ROOT.glob("docs/*.md")} <= {path.parent for path in PAGES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_tables_in_pages_are_those_of_the_results(path):
    assert write_tables().filled(path.read_text()) == path.read_text(), "run scripts/write_tables.py"


def test_the_table_in_readme_is_the_demos():
    lines = (
        (ROOT / "README.md").read_text().partition("<!-- demo:begin -->")[2].partition("<!-- demo:end -->")[0]
    )
    table = [line for line in lines.splitlines() if line.startswith("| ") and "±" in line]
    source = (ROOT / "results" / "demo" / "report.md").read_text().splitlines()
    assert len(table) >= 7
    assert [line for line in table if line not in source] == []
