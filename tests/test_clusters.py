"""Repeated questions: from the source through the records to the standard error, with numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from colar.data.example import collapsed
from colar.data.sources import load_examples, prepare
from colar.evaluation import report
from colar.evaluation.evaluate import grade
from colar.evaluation.records import cluster_of


def questions(folder: Path, *texts: str) -> Path:
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps({"question": text, "answer": "7"}) + "\n" for text in texts))
    return path


def record(model: str, question: int, correct: bool, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "method": model, "label": "", "dataset": "sums", "params": {},
        "decoding": "greedy", "train_seed": 0, "seed": 0, "id": f"sums/{question}", "completion": "7",
        "parsed": "7", "correct": correct, "truncated": False, "length": 4, "forward_passes": 9, "seconds": 0.5,
        **more,
    }  # fmt: skip


def answers(model: str, correct: list[bool], repeats: dict[int, int]) -> list[dict[str, Any]]:
    """A record a question; `repeats` maps a question to the earlier one that it repeats."""
    made = []
    for question, right in enumerate(correct):
        more = {"cluster": f"sums/{repeats[question]}"} if question in repeats else {}
        made.append(record(model, question, right, **more))
    return made


def test_a_repeated_question_has_the_first_ones_id_as_its_cluster(tmp_path: Path) -> None:
    path = questions(tmp_path, "one?", "two?", " one? ", "One?", "one?", "two\n?")
    found = load_examples(str(path), "test")
    assert [example.cluster for example in found] == ["", "", "own/test/0", "", "own/test/0", ""]
    assert len({example.id for example in found}) == 6


def test_a_prepared_file_has_the_clusters_of_its_source(tmp_path: Path) -> None:
    source = str(questions(tmp_path, "one?", "two?", "one?"))
    (written,) = prepare(source, ["test"], tmp_path / "out")
    assert "cluster" not in written.read_text()
    assert load_examples(str(written), "test") == load_examples(source, "test")
    assert [example.cluster for example in load_examples(str(written), "test")] == ["", "", "own/test/0"]


def test_multiarith_has_20_repeats_in_600_questions(real_data: Path) -> None:
    found = load_examples("multiarith", "test", data_dir=real_data)
    repeats = [example for example in found if example.cluster]
    assert (len(found), len(repeats)) == (600, 20)
    by_id = {example.id: example for example in found}
    for example in repeats:
        first = by_id[example.cluster]
        assert first.cluster == ""
        assert collapsed(first.question) == collapsed(example.question)


@pytest.mark.parametrize("name", ["gsm8k-aug", "gsm-hard", "svamp"])
def test_the_other_test_sets_ask_each_question_once(real_data: Path, name: str) -> None:
    assert not any(example.cluster for example in load_examples(name, "test", data_dir=real_data))


def test_a_record_has_its_cluster_only_where_it_differs(tmp_path: Path) -> None:
    class Done:
        text, truncated, length, forward_passes, seconds = "7", False, 1, 2, 0.1

    first, second = load_examples(str(questions(tmp_path, "one?", "one?")), "test")
    assert "cluster" not in grade(Done, first)  # type: ignore[arg-type]
    assert grade(Done, second)["cluster"] == "own/test/0"  # type: ignore[arg-type]


def test_the_cluster_of_an_old_record_is_its_id() -> None:
    assert cluster_of(record("a", 3, True)) == "sums/3"
    assert cluster_of(record("a", 3, True, cluster="sums/1")) == "sums/1"


def test_a_repeat_counts_as_a_question_and_not_as_a_cluster() -> None:
    """Right, wrong, right, right: mean 3/4, so +1/4, -3/4, +1/4, +1/4 from it. The last repeats the first.

    Clusters' sums over 4: 2/16, -3/16, 1/16; CR1: 3/2 * (4 + 9 + 1) / 256 = 21/256.
    """
    row = report.fold(answers("cot", [True, False, True, True], {3: 0}), {}).to_json()["rows"][0]
    assert (row["n"], row["samples"], row["accuracy"]) == (4, 4, 0.75)
    assert row["accuracy_se"] == pytest.approx(math.sqrt(21 / 256))
    plain = report.fold(answers("cot", [True, False, True, True], {}), {}).to_json()["rows"][0]
    assert plain["accuracy_se"] == pytest.approx(math.sqrt(4 / 3 * (1 + 9 + 1 + 1) / 256))


@pytest.mark.parametrize("repeats_of_other", [{3: 0}, {}], ids=["both new", "baseline without clusters"])
def test_a_paired_difference_counts_questions_and_clusters_repeats(repeats_of_other: dict[int, int]) -> None:
    """The other system is always wrong: the same residuals as above. Its records may be from before clusters."""
    records = answers("fast", [True, False, True, True], {3: 0})
    records += answers("cot", [False, False, False, False], repeats_of_other)
    (row, _) = report.fold(records, {}).to_json()["comparisons"]
    assert (row["n"], row["difference"]) == (4, 0.75)
    assert row["se"] == pytest.approx(math.sqrt(21 / 256))


def test_a_paired_difference_leaves_out_a_repeat_that_one_side_was_not_asked() -> None:
    records = answers("fast", [True, False, True, True], {3: 0})
    records += answers("cot", [False, False, False], {})
    (row, _) = report.fold(records, {}).to_json()["comparisons"]
    assert (row["n"], row["difference"]) == (3, pytest.approx(2 / 3))
    # +1/3, -2/3, +1/3 over 3: 3/2 * (1 + 4 + 1) / 81
    assert row["se"] == pytest.approx(math.sqrt(1 / 9))
