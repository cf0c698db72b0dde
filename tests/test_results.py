"""Every committed result can be recomputed: its report is the fold over its records, number by number."""

from pathlib import Path

import pytest

from colar import files
from colar.evaluation import report

ROOT = Path(__file__).resolve().parent.parent
REPORTS = sorted(path.parent / "report.json" for path in ROOT.glob("results/*/records.jsonl.gz"))


def test_there_are_results():
    assert len(REPORTS) >= 2


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_a_report_is_the_fold_over_its_records(path):
    saved = files.read_json(path)
    folded = report.fold(report.load_records([path.parent / "records.jsonl.gz"]), {}, saved["baseline"])
    for part in ("rows", "comparisons", "train_seeds"):
        assert folded[part] == saved[part]
    assert saved["provenance"]["command"].startswith("colar ")


def test_the_table_in_readme_is_the_demos():
    lines = (
        (ROOT / "README.md").read_text().partition("<!-- demo:begin -->")[2].partition("<!-- demo:end -->")[0]
    )
    table = [line for line in lines.splitlines() if line.startswith("| ") and "±" in line]
    source = (ROOT / "results" / "demo" / "report.md").read_text().splitlines()
    assert len(table) >= 7
    assert [line for line in table if line not in source] == []
