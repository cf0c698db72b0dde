"""lab/scripts/rejudge.py on a folder of results made here: verdicts, clusters, the report, and what stays as it was."""

import gzip
import json
from pathlib import Path

import pytest
from script_files import module

from colar import files
from colar.data import sources
from colar.data.sources import load_examples
from colar.evaluation import report
from colar.evaluation.records import RecordFiles, checked

ROOT = Path(__file__).resolve().parent.parent
PROVENANCE = {"command": "colar evaluate x", "time": "2026-11-21T00:00:00Z", "commit": "abc", "split": "test"}

STAMP = {"command": "python lab/scripts/rejudge.py mine", "time": "2026-11-22T00:00:00Z"}


@pytest.fixture
def rejudge():
    return module("lab/scripts/rejudge.py")


@pytest.fixture
def golds(tmp_path, monkeypatch):
    """A data folder of four GSM-Hard and three MultiArith questions, of which the last repeats the first."""
    monkeypatch.setenv("COLAR_DATA_DIR", str(tmp_path / "data"))
    hard = [{"input": f"h{n}", "target": target} for n, target in enumerate((14053029.666666666, 7, 0.5, 3))]
    arith = [{"sQuestion": text, "lSolutions": [7.0]} for text in ("one?", "two?", " one? ")]
    (tmp_path / "data/gsm_hard").mkdir(parents=True)
    (tmp_path / "data/multiarith").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in hard)
    (tmp_path / "data/gsm_hard/gsmhardv2.jsonl").write_text(text)
    (tmp_path / "data/multiarith/MultiArith.json").write_text(json.dumps(arith))
    return {
        name: {example.id: example for example in load_examples(name, "test")}
        for name in ("gsm-hard", "multiarith")
    }


def record(model, dataset, question, completion, correct):
    return {
        "model": model, "method": model, "label": "", "dataset": dataset, "params": {},
        "decoding": "greedy", "train_seed": 0, "seed": 0, "id": question, "completion": completion,
        "parsed": completion, "correct": correct, "truncated": False, "length": 4, "forward_passes": 9,
        "seconds": 0.5, "gold_length": 3,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path, golds):
    """As an earlier judge left it: 14053100 passed for 14053029.67, and no record has a cluster."""
    records = []
    for model, answer in (("cot", "14053100"), ("colar", "14053029.6667")):
        hard = zip(golds["gsm-hard"], (answer, "7", "0.5", "4"), (True, True, True, False), strict=True)
        records += [record(model, "gsm-hard", *line) for line in hard]
        for example in golds["multiarith"].values():
            answer = "8" if example.question == "two?" else "7"
            records += [record(model, "multiarith", example.id, answer, answer == "7")]
        records += [record(model, "other", "other/0", "8", True)]
    path = tmp_path / "results" / "mine"
    pairs = [("colar", "cot")]
    report.write(path, records, title="My title", provenance=PROVENANCE, pairs=pairs)
    text = "".join(json.dumps(each) + "\n" for each in records)
    (path / "records.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return path


def test_verdicts_and_clusters_are_todays_and_all_else_is_as_it_was(rejudge, golds, folder):
    """And a second time nothing changes."""
    before = [each for _, each in checked(RecordFiles([folder / "records.jsonl.gz"]))]
    saved = files.read_json(folder / "report.json")
    assert rejudge.refold(folder, golds, STAMP)
    after = [each for _, each in checked(RecordFiles([folder / "records.jsonl.gz"]))]

    changed = {(was["model"], was["id"]) for was, now in zip(before, after, strict=True) if was != now}
    first, second = (key for key in golds["multiarith"] if golds["multiarith"][key].question == "one?")
    assert changed == {("cot", "gsm-hard/test/0"), ("cot", second), ("colar", second)}
    for was, now in zip(before, after, strict=True):
        assert now.get("cluster") == (first if now["id"] == second else None)
        assert {**was, "correct": None} == {
            k: v for k, v in {**now, "correct": None}.items() if k != "cluster"
        }
    wrong = next(now for now in after if (now["model"], now["id"]) == ("cot", "gsm-hard/test/0"))
    assert (wrong["parsed"], wrong["correct"]) == ("14053100", False)
    # Of a data set that was not judged again even a false verdict stays.
    assert all(now["correct"] for now in after if now["dataset"] == "other")

    made = files.read_json(folder / "report.json")
    stamp = made["provenance"].pop("rejudged")
    assert made["provenance"] == PROVENANCE
    assert stamp == STAMP
    folded = report.fold(after, PROVENANCE, [("colar", "cot")])
    assert made == json.loads(json.dumps(folded.to_json()))
    assert made["rows"] != saved["rows"]
    assert (folder / "report.md").read_text().startswith("# My title\n")
    # GSM-Hard: 1 1 1 0, then 0 1 1 0. MultiArith: 1 1 0 in three clusters, then 1 1 in one and 0 in another:
    # the clusters' sums over 3 are 2/9 and -2/9, and CR1 gives 2 * 2 * (2/9)^2.
    accuracies = {
        (row["model"], row["dataset"]): (row["accuracy"], row["accuracy_se"]) for row in made["rows"]
    }
    assert accuracies["cot", "gsm-hard"] == pytest.approx((0.5, 0.2887), abs=1e-4)
    assert accuracies["colar", "gsm-hard"] == pytest.approx((0.75, 0.25), abs=1e-4)
    assert accuracies["cot", "multiarith"] == pytest.approx((0.6667, 0.4444), abs=1e-4)
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert not rejudge.refold(folder, golds, STAMP)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == left
    assert left["records.jsonl.gz"][4:8] == b"\0" * 4  # no time in the header


def test_records_of_other_data_are_refused(rejudge, golds, folder):
    del golds["gsm-hard"]["gsm-hard/test/3"]
    before = (folder / "records.jsonl.gz").read_bytes()
    with pytest.raises(ValueError, match="gsm-hard has no question gsm-hard/test/3"):
        rejudge.refold(folder, golds, STAMP)
    assert (folder / "records.jsonl.gz").read_bytes() == before


PUBLISHED = set(sources.SOURCES) - {"arithmetic"}


def published_in(folder):
    """The published test sets that a folder of results has answers to."""
    rows = files.read_json(folder / "report.json")["rows"]
    return {row["dataset"] for row in rows} & PUBLISHED


RESULTS = sorted(
    path.parent for path in ROOT.glob("results/*/*/records.jsonl.gz") if published_in(path.parent)
)


@pytest.mark.parametrize("folder", RESULTS, ids=lambda path: path.name)
def test_committed_records_have_todays_verdicts_and_clusters(rejudge, real_data, folder):
    # Checked they are where their report is folded again (test_results.py).
    records = list(RecordFiles([folder / "records.jsonl.gz"]))
    golds = {}
    for name in published_in(folder):
        golds[name] = {example.id: example for example in load_examples(name, "test", data_dir=real_data)}
    assert rejudge.rejudge(records, golds) == records
