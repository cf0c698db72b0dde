"""Every committed result can be recomputed: its report is the fold over its records, number by number."""

import json
import re
from pathlib import Path

import pytest
import saved_report
from script_files import module

from colar import files
from colar.evaluation import report
from colar.evaluation.records import RecordFiles

ROOT = Path(__file__).resolve().parent.parent
REPORTS = sorted(path.parent / "report.json" for path in ROOT.glob("results/*/*/records.jsonl.gz"))


def test_there_are_results():
    assert len(REPORTS) >= 2


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: f"{path.parts[-3]}/{path.parts[-2]}")
def test_a_report_is_the_fold_over_its_records(path):
    saved = files.read_json(path)
    records = RecordFiles([path.parent / "records.jsonl.gz"])
    pairs = list(dict.fromkeys((row["pair"][0], row["pair"][1]) for row in saved.get("pairs", ())))
    folded = report.fold(records, saved["provenance"], pairs)
    # Through JSON on both sides: the training seed of a baseline is not in the file.
    assert saved_report.of_json(json.loads(json.dumps(folded.to_json()))) == saved_report.of_json(saved)
    assert saved["provenance"]["command"].startswith("colar ")


PAGES = module("lab/scripts/write_tables.py").pages()


def test_pages_with_tables_are_found():
    with_tables = [path.relative_to(ROOT).as_posix() for path in PAGES if "<!-- results/" in path.read_text()]
    assert {
        "README.md",
        "results/toy/README.md",
        "results/smollm2/README.md",
        "results/qwen/README.md",
        "results/speed/README.md",
    } <= set(with_tables)
    assert {path.parent for path in ROOT.glob("docs/*.md")} <= {path.parent for path in PAGES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_tables_in_pages_are_those_of_the_results(path):
    assert module("lab/scripts/write_tables.py").filled(path.read_text()) == path.read_text(), (
        "run lab/scripts/write_tables.py"
    )


def test_the_pages_of_results_are_five_and_can_be_read_in_ten_minutes():
    pages = {path.parent.name: path for path in ROOT.glob("results/*/README.md")}
    assert set(pages) == {"toy", "smollm2", "qwen", "speed", "figures"}
    for page in pages.values():
        words = re.sub(r"<!--.*?-->", "", page.read_text()).split()
        assert len(words) <= 2500, page
    assert sum(path.stat().st_size for path in ROOT.glob("results/**/*") if path.is_file()) < 20e6


def test_the_table_of_reinforced_runs_is_that_of_their_histories():
    folder = ROOT / "results" / "toy" / "grpo-stability"
    script = module("lab/scripts/grpo_stability.py")
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
