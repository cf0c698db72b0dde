"""The report against its records: rows by hand, invariance, intervals that are what their names say, plain errors."""

from __future__ import annotations

import io
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved_report
from rich.console import Console

from colar import files
from colar.data.example import Example
from colar.evaluation import picture, report, stats, tables
from colar.evaluation.records import RecordFiles, checked
from colar.evaluation.report_rows import System, system_name
from colar.evaluation.settings import asked_of, settings_of
from colar.evaluation.tables import print_tables

DESIGN_KEYS = (
    "model", "method", "label", "dataset", "params", "decoding", "train_seed", "seeds", "n", "accuracy",
    "accuracy_se", "unparsable", "length", "forward_passes", "seconds_per_question",
)  # fmt: skip


def params(c: float | None) -> dict[str, float]:
    return {} if c is None else {"compression_factor": c}


def record(model: str = "Fast", question: int = 0, answer: str | None = "7", **more: Any) -> dict[str, Any]:
    """The right answer is always 7. `c` is a speed."""
    c = more.pop("c", None)
    base = {
        "model": model, "method": model.lower(), "label": "", "dataset": "sums", "params": params(c),
        "decoding": "greedy", "train_seed": 0, "seed": 0, "id": f"sums/{question}", "completion": str(answer),
        "parsed": answer, "correct": answer == "7", "truncated": False, "length": 4, "forward_passes": 9,
        "seconds": 0.5,
    }  # fmt: skip
    return {**base, **more}


def system(model: str, answers: str, **more: Any) -> list[dict[str, Any]]:
    """One record a letter: 7 right, another digit wrong, - unparsable."""
    return [record(model, i, None if a == "-" else a, **more) for i, a in enumerate(answers)]


def fold(records: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """What report.json holds."""
    return report.fold(records, {"command": "test"}, **options).to_json()


def render(made: dict[str, Any], title: str = "t", pictures: Sequence[str] = ()) -> str:
    """report.md of what report.json holds: read back on the way."""
    return tables.render_markdown(saved_report.of_json(made), title, pictures)


def pick(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return found


def speed(row: dict[str, Any]) -> float | None:
    return row["params"].get("compression_factor")


def grid_of_systems() -> list[dict[str, Any]]:
    """Two datasets, greedy and three sampled seeds, CoT, one system at two speeds, a control of it."""
    generator = random.Random(3)
    records = []
    for dataset in ("sums", "tales"):
        for model, c, label in (
            ("CoT", None, ""),
            ("Fast", 1, ""),
            ("Fast", 2, ""),
            ("Fast", 2, "control-zeroed"),
        ):
            for decoding, seeds in (("greedy", [0]), ("sampled", [0, 1, 2])):
                for seed in seeds:
                    for question in range(8):
                        more = {"dataset": dataset, "c": c, "label": label, "decoding": decoding}
                        more |= {
                            "seed": seed,
                            "id": f"{dataset}/{question}",
                            "length": generator.randrange(30),
                        }
                        answer = generator.choice(["7", "7", "8", "9", None])
                        records.append(record(model, question, answer, **more))
    return records


def test_a_row_by_hand() -> None:
    records = system("CoT", "77-8")
    for r, length, seconds in zip(records, (2, 4, 6, 8), (0.1, 0.2, 0.3, 0.4), strict=True):
        r |= {"length": length, "seconds": seconds, "truncated": length == 8}
    row = pick(fold(records)["rows"], dataset="sums")
    assert tuple(row)[: len(DESIGN_KEYS)] == DESIGN_KEYS
    assert {key: row[key] for key in ("model", "seeds", "n", "samples", "train_seed")} == {
        "model": "CoT", "seeds": [0], "n": 4, "samples": 4, "train_seed": 0,
    }  # fmt: skip
    assert row["accuracy"] == 0.5
    assert row["accuracy_se"] == pytest.approx(math.sqrt(1 / 3) / 2)  # sd(ddof=1) of 1 1 0 0 over sqrt(4)
    assert (row["unparsable"], row["truncated"], row["length"], row["forward_passes"]) == (0.25, 0.25, 5, 9)
    assert row["length_se"] == pytest.approx(statistics.stdev([2, 4, 6, 8]) / 2)
    assert row["seconds_per_question"] == pytest.approx(0.25)
    assert (row["seeds_interval"], row["pass_at_k"], row["maj_at_k"]) == (None, None, None)


def test_several_seeds_by_hand() -> None:
    answers = {0: "778-", 1: "7789", 2: "7877"}  # seed -> the answers to questions 0..3
    sampled = {"decoding": "sampled"}
    row = pick(fold([r for s, a in answers.items() for r in system("CoT", a, seed=s, **sampled)])["rows"],
               dataset="sums")  # fmt: skip
    by_seed = [0.5, 0.5, 0.75]
    assert (row["seeds"], row["n"], row["samples"]) == ([0, 1, 2], 4, 12)
    assert row["accuracy"] == pytest.approx(7 / 12)
    assert row["seeds_interval"] == pytest.approx(4.3027 * statistics.stdev(by_seed) / math.sqrt(3), rel=1e-4)
    # questions: 777 right by vote; 778 right; 887 wrong; None, 9, 7 a tie of 9 and 7: one half
    assert row["maj_at_k"] == pytest.approx(2.5 / 4)
    assert row["pass_at_k"] == 1.0
    assert row["maj_at_k_se"] == pytest.approx(statistics.stdev([1, 1, 0, 0.5]) / 2)  # over questions
    assert row["pass_at_k_se"] == 0
    means = [1, 2 / 3, 1 / 3, 1 / 3]
    assert row["accuracy_se"] == pytest.approx(statistics.stdev(means) / 2)


def test_an_incomplete_cell_gives_no_numbers_that_need_all_of_it_and_says_so() -> None:
    records = [*system("CoT", "7788", seed=0), *system("CoT", "78", seed=1)]
    made = fold(records)
    row = pick(made["rows"], dataset="sums")
    assert (row["n"], row["samples"], row["accuracy"]) == (4, 6, 0.5)
    assert (row["seeds_interval"], row["pass_at_k"], row["maj_at_k"]) == (None, None, None)
    assert "Incomplete: CoT on sums has 6 of 8 records." in render(made)


def test_the_average_is_plain_over_datasets_and_its_error_a_root_of_summed_variances() -> None:
    records = [*system("CoT", "7777888888"), *system("CoT", "78", dataset="tales")]
    rows = fold(records)["rows"]
    one, two, average = (pick(rows, dataset=name) for name in ("sums", "tales", "average"))
    assert average["accuracy"] == pytest.approx(0.45)  # not 5 of 12
    assert average["accuracy_se"] == pytest.approx(math.hypot(one["accuracy_se"], two["accuracy_se"]) / 2)
    assert (average["n"], average["datasets"], average["train_seed"]) == (12, ["sums", "tales"], 0)


def test_the_averages_seeds_interval_is_over_the_seeds_averages() -> None:
    cells = {("sums", 0): "7788", ("sums", 1): "7778", ("tales", 0): "88", ("tales", 1): "78"}
    records = [r for (d, s), a in cells.items() for r in system("CoT", a, dataset=d, seed=s)]
    average = pick(fold(records)["rows"], dataset="average")
    assert average["seeds_interval"] == pytest.approx(
        12.7062 * statistics.stdev([0.25, 0.625]) / math.sqrt(2), rel=1e-4
    )


def test_the_averages_votes_have_the_error_of_independent_data_sets() -> None:
    cells = {("sums", 0): "7788", ("sums", 1): "7778", ("tales", 0): "888", ("tales", 1): "788"}
    records = [r for (d, s), a in cells.items() for r in system("CoT", a, dataset=d, seed=s)]
    rows = fold(records)["rows"]
    one, two, average = (pick(rows, dataset=name) for name in ("sums", "tales", "average"))
    assert two["pass_at_k_se"] == pytest.approx(statistics.stdev([1, 0, 0]) / math.sqrt(3))
    assert two["maj_at_k_se"] == pytest.approx(statistics.stdev([0.5, 0, 0]) / math.sqrt(3))  # a tie
    for key in ("pass_at_k_se", "maj_at_k_se"):
        assert average[key] == pytest.approx(math.hypot(one[key], two[key]) / 2)


@pytest.mark.parametrize(
    "cells",
    [
        {("sums", 0): "78", ("sums", 1): "77", ("tales", 0): "78", ("tales", 1): "7"},  # a question missing
        {("sums", 0): "78", ("sums", 1): "77", ("tales", 0): "78", ("tales", 2): "77"},  # other seeds
    ],
)
def test_the_average_has_no_seeds_interval_unless_all_datasets_have_the_same_seeds(
    cells: dict[tuple[str, int], str],
) -> None:
    records = [r for (d, s), a in cells.items() for r in system("CoT", a, dataset=d, seed=s)]
    rows = fold(records)["rows"]
    assert pick(rows, dataset="average")["seeds_interval"] is None
    assert pick(rows, dataset="sums")["seeds_interval"] is not None


def test_one_question_has_no_error_and_the_report_is_still_json(tmp_path: Path) -> None:
    made = report.write(tmp_path, system("CoT", "7"), provenance={}).to_json()
    assert pick(made["rows"], dataset="sums")["accuracy_se"] is None
    assert "100.0 |" in (tmp_path / "report.md").read_text()


def test_order_leaves_no_trace_down_to_the_last_bit() -> None:
    records = grid_of_systems()
    expected = json.dumps(fold(records))
    for seed in range(3):
        random.Random(seed).shuffle(records)
        assert json.dumps(fold(records)) == expected


def test_an_unrelated_system_changes_nothing() -> None:
    before = fold(grid_of_systems())
    after = fold([*grid_of_systems(), *system("Other", "7878"), *system("Other", "77", dataset="new")])
    for section in ("rows", "comparisons"):
        assert [row for row in after[section] if row["model"] != "Other"] == before[section]
    assert after["provenance"] == before["provenance"]


def test_paired_difference_by_hand() -> None:
    records = [*system("CoT", "7788"), *system("Fast", "78897", c=2)]
    found = pick(fold(records)["comparisons"], dataset="sums")
    assert found["baseline"] == {"model": "CoT", "method": "cot", "label": "", "params": {}}
    assert (found["model"], found["params"], found["n"]) == ("Fast", params(2), 4)  # question 4 is not shared
    assert found["difference"] == -0.25  # 0 -1 0 0
    assert found["se"] == pytest.approx(0.25)
    assert found["interval"] == pytest.approx([-0.25 - 0.48999, -0.25 + 0.48999], abs=1e-4)


def test_what_is_compared_with_what() -> None:
    records = grid_of_systems()
    pairs = {
        (r["model"], speed(r), r["label"], r["baseline"]["model"], speed(r["baseline"]))
        for r in fold(records)["comparisons"]
        if r["decoding"] == "greedy" and r["dataset"] == "sums"
    }
    assert pairs == {
        ("Fast", 1, "", "CoT", None), ("Fast", 2, "", "CoT", None), ("Fast", 2, "control-zeroed", "CoT", None),
        ("Fast", 2, "control-zeroed", "Fast", 2),
    }  # fmt: skip
    other_seed = fold([*system("CoT", "78", train_seed=1), *system("Fast", "78", train_seed=0)])
    assert other_seed["comparisons"] == []  # another training seed is another draw: not paired


def test_the_baseline_is_the_same_models_where_it_has_one_else_the_first() -> None:
    records = [*system("b", "77", method="cot"), *system("c", "78", method="cot"), *system("c", "88", method="fast"),
               *system("d", "88", method="fast")]  # fmt: skip
    against = {(r["model"], r["method"]): r["baseline"]["model"] for r in fold(records)["comparisons"]}
    assert against == {("c", "fast"): "c", ("d", "fast"): "b"}


def test_averaged_differences() -> None:
    comparisons = fold(grid_of_systems())["comparisons"]
    wanted = {"decoding": "sampled", "params": params(1)}
    parts = [pick(comparisons, dataset=name, **wanted) for name in ("sums", "tales")]
    average = pick(comparisons, dataset="average", **wanted)
    assert average["difference"] == pytest.approx(sum(part["difference"] for part in parts) / 2)
    assert average["se"] == pytest.approx(math.hypot(*(part["se"] for part in parts)) / 2)


def test_training_seeds_are_folded_apart_and_together() -> None:
    records = [r for s, a in enumerate(("7788", "7778", "7888")) for r in system("CoT", a, train_seed=s)]
    made = fold([*records, *system("Fast", "7788", train_seed=None)])
    assert [r["train_seed"] for r in made["rows"] if r["model"] == "CoT" and r["dataset"] == "sums"] == [
        0,
        1,
        2,
    ]
    runs = pick(made["pooled"], model="CoT", dataset="sums")
    assert (runs["train_seeds"], runs["accuracy"]) == ([0, 1, 2], 0.5)
    assert runs["runs_interval"] == pytest.approx(4.3027 * 0.25 / math.sqrt(3), rel=1e-4)
    text = render(made)
    assert "CoT, run" not in text  # a line for all runs
    assert "| CoT | 50.0 ± 42.2 | 4.0 | ± 62.1 |" in text
    assert "t interval of the last accuracy over training seeds" in text
    assert "Means over 1 or 3 training runs" in text


def test_runs_are_numbered_under_one_label_alone() -> None:
    first = System("m", "cot", "", (), "greedy", 0)
    other = first._replace(label="more rows", train_seed=11)
    control = first._replace(label="control-zeroed")
    again = first._replace(train_seed=1)

    def names(*systems: System) -> list[str]:
        return [system_name(system, systems) for system in systems]

    assert names(first, other, control) == ["m", "m (more rows)", "m (control-zeroed)"]
    assert names(first, again, other) == ["m, run 0", "m, run 1", "m (more rows)"]
    assert names(control, again) == ["m (control-zeroed), run 0", "m, run 1"]


def test_runs_together_by_hand() -> None:
    """A question's answers of all runs are one cluster; the seeds' interval is over means of runs, pass@k within one."""
    answers = {
        (0, 0): "77",
        (0, 1): "78",
        (1, 0): "88",
        (1, 1): "87",
    }  # (run, decoding seed) -> questions 0 and 1
    sampled = {"decoding": "sampled"}
    made = fold(
        [r for (t, s), a in answers.items() for r in system("CoT", a, train_seed=t, seed=s, **sampled)]
    )
    (row,) = [row for row in made["pooled"] if row["dataset"] == "sums"]
    assert (row["train_seed"], row["train_seeds"], row["n"], row["samples"]) == (None, [0, 1], 2, 8)
    assert row["accuracy"] == 0.5
    assert row["accuracy_se"] == pytest.approx(0)  # each question has 2 of 4
    assert row["runs_interval"] == pytest.approx(
        12.7062 * statistics.stdev([0.75, 0.25]) / math.sqrt(2), rel=1e-4
    )
    assert row["seeds_interval"] == pytest.approx(0)  # (1 + 0) / 2 and (0.5 + 0.5) / 2
    assert row["pass_at_k"] == pytest.approx((1 + 0.5) / 2)
    # Run 0 passes both questions, run 1 one of them: a question's runs are one cluster.
    assert row["pass_at_k_se"] == pytest.approx(statistics.stdev([1, 0.5]) / math.sqrt(2))
    average = pick(made["pooled"], dataset="average")
    assert (average["accuracy"], average["runs_interval"]) == (0.5, row["runs_interval"])


def test_runs_that_were_asked_different_data_sets_have_no_interval_of_their_averages() -> None:
    """The second run's average is higher by its data sets alone: that is no spread of training."""
    records = []
    for model, answers in {"CoT": "7788", "Fast": "7778"}.items():
        for run in (0, 1):
            records += system(model, "7777", dataset="easy", train_seed=run)
        records += system(model, answers, dataset="hard", train_seed=0)
    records = [{**row, "id": f"{row['dataset']}/{row['id']}"} for row in records]
    made = fold(records, pairs=[("Fast", "CoT")])
    average = pick(made["pooled"], model="CoT", dataset="average")
    assert (average["accuracy"], average["train_seeds"]) == (0.75, [0, 1])
    assert "runs_interval" not in average
    assert pick(made["pooled"], model="CoT", dataset="easy")["runs_interval"] == 0
    pair = pick(made["pairs"], dataset="average")
    assert (pair["difference"], pair["by_run"], pair.get("runs_interval")) == (0.125, [], None)


@pytest.mark.parametrize("once", ["easy", "hard"])
def test_runs_are_told_of_every_data_set_whichever_was_asked_once(once: str) -> None:
    """Data sets stand in the order of their names: the first one alone does not say how often a system was trained."""
    records = []
    for dataset in ("easy", "hard"):
        for run, answers in enumerate(("7788", "7778", "7888")[: 1 if dataset == once else 3]):
            more = {"dataset": dataset, "train_seed": run}
            records += [{**row, "id": f"{dataset}/{row['id']}"} for row in system("CoT", answers, **more)]
    made = fold(records)
    assert "Means over 1 or 3 training runs" in render(made)
    [row] = [line for line in render(made).splitlines() if line.startswith("| CoT | 50.0")]
    # Accuracy and #L of both and of their average; the average has no interval over runs: one data set has none.
    assert row.split("|")[-2].strip() == "–"


def test_runs_are_paired_together_and_one_run_each_pools_nothing() -> None:
    cot = {0: "7788", 1: "7878"}
    fast = {0: "7778", 1: "7777"}
    records = [r for t, a in cot.items() for r in system("CoT", a, train_seed=t)]
    records += [r for t, a in fast.items() for r in system("Fast", a, train_seed=t)]
    made = fold(records)
    found = pick(made["pooled_comparisons"], dataset="sums")
    assert (found["n"], found["train_seed"], found["difference"]) == (4, None, 0.375)
    assert found["se"] == pytest.approx(statistics.stdev([0, 0.5, 0.5, 0.5]) / 2)
    assert len([row for row in made["comparisons"] if row["dataset"] == "sums"]) == 2  # and run by run
    alone = fold([*system("CoT", "77", train_seed=0), *system("Fast", "78", train_seed=1)])
    assert (alone["pooled"], alone["pooled_comparisons"]) == ([], [])


def test_pairs_are_asked_for_by_name() -> None:
    """Two runs, two datasets: all runs' answers paired by question, and each run's difference by itself."""
    answers = {"CoT": {0: "7788", 1: "7878"}, "Fast": {0: "7778", 1: "7777"}}
    records = [
        row
        for model, runs in answers.items()
        for run, text in runs.items()
        for dataset in ("sums", "tales")
        for row in system(model, text, dataset=dataset, train_seed=run, id=None)
    ]
    records = [{**row, "id": f"{row['dataset']}/{i % 4}"} for i, row in enumerate(records)]
    made = fold([*records, *system("Other", "77", dataset="new")], pairs=[("Fast", "CoT"), ("CoT", "Fast")])
    found = pick(made["pairs"], dataset="sums", pair=["Fast", "CoT"])
    assert (found["n"], found["difference"], found["by_run"], found.get("runs_interval")) == (
        4,
        0.375,
        [],
        None,
    )
    average = pick(made["pairs"], dataset="average", pair=["Fast", "CoT"])
    assert (average["difference"], average["train_seeds"], average["by_run"]) == (0.375, [0, 1], [0.25, 0.5])
    assert average["se"] == pytest.approx(found["se"] / math.sqrt(2))
    assert average["runs_interval"] == pytest.approx(12.7062 * 0.125, rel=1e-4)
    assert pick(made["pairs"], dataset="average", pair=["CoT", "Fast"])["difference"] == -0.375
    text = render(made)
    assert (
        "| Fast | CoT | greedy | +37.5 ± 24.5 \\* | +37.5 ± 24.5 \\* | +37.5 ± 17.3 \\* | ± 158.8 |" in text
    )
    assert fold(records)["pairs"] == []
    assert "Pairs asked for" not in render(fold(records))
    one_run = fold([row for row in records if row["train_seed"] == 0], pairs=[("Fast", "CoT")])
    assert pick(one_run["pairs"], dataset="average")["difference"] == 0.25
    assert "| runs |" not in render(one_run)


def test_a_pair_that_cannot_be_says_what_there_is() -> None:
    records = [
        *system("CoT", "78"),
        *system("Fast", "78", c=2),
        *system("Other", "7", dataset="new"),
    ]
    with pytest.raises(ValueError, match="no system is called 'Fast'; there are CoT, Fast c=2, Other"):
        fold(records, pairs=[("Fast", "CoT")])
    with pytest.raises(ValueError, match="'Other' and 'CoT' have no question in common"):
        fold(records, pairs=[("Other", "CoT")])


def test_an_incomplete_run_is_seen_among_the_others() -> None:
    records = [r for t, a in enumerate(("7788", "77")) for r in system("CoT", a, train_seed=t)]
    made = fold(records)
    assert "Incomplete: CoT on sums has 6 of 8 records." in render(made)
    row = pick(fold([{**r, "seed": s} for r in records for s in (0, 1)])["pooled"], dataset="sums")
    assert (row["seeds_interval"], row["pass_at_k"]) == (None, 0.75)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"correct": "yes"}, "correct must be true or false"),
        ({"dataset": "average"}, "is no dataset's name"),
        ({"params": None}, "params must be an object, got None"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
    ],
)
def test_a_record_that_cannot_be_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        fold([record(), {**record(question=1), **change}])
    assert str(error.value).startswith("record 2: ")


def test_duplicates_and_nothing_are_errors() -> None:
    with pytest.raises(ValueError, match=r"record 3: a second record of CoT.*question sums/0"):
        fold([*system("CoT", "77"), record("CoT", 0, "8")])
    with pytest.raises(ValueError, match="at least one record"):
        fold([])


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def loaded(paths: list[Path]) -> list[dict[str, Any]]:
    return [record for _, record in checked(RecordFiles(paths))]


def test_write_and_recompute(tmp_path: Path) -> None:
    records = grid_of_systems()
    made = report.write(tmp_path, records, title="A title").to_json()
    assert {p.name for p in tmp_path.iterdir()} == {
        "report.json", "report.md", "accuracy_vs_length.png", "accuracy_vs_length-sampled.png",
    }  # fmt: skip
    stored = files.read_json(tmp_path / "report.json")
    assert stored == made
    assert set(stored["provenance"]) >= {"command", "versions", "commit"}
    again = report.fold(loaded([write_lines(tmp_path / "r.jsonl", *records)]), stored["provenance"])
    assert json.loads(json.dumps(again.to_json())) == stored
    assert saved_report.of_json(stored) == again


def test_a_picture_that_fails_leaves_the_report(tmp_path: Path) -> None:
    (tmp_path / "accuracy_vs_length.png").mkdir()
    with pytest.raises(IsADirectoryError):
        report.write(tmp_path, grid_of_systems())
    assert files.read_json(tmp_path / "report.json")["rows"]
    assert "| Fast c=1 |" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_markdown_says_what_was_measured_and_which_interval_it_shows(tmp_path: Path) -> None:
    made = fold(grid_of_systems())
    text = render(made, "A title", ["picture.png"])
    assert text.startswith("# A title\n")
    for line in (
        "Data: sums (8 questions), tales (8 questions), greedy decoding with seeds 0, sampled decoding with seeds 0, 1, 2, ",
        '"command": "test"',
        "![accuracy against reasoning length](picture.png)",
        "| system | sums Acc. | #L | tales Acc. | #L | average Acc. | #L |",
        "± is 1.96 x the standard error clustered by question.",
        "t interval over decoding seeds",
        "Fewer than 30 questions somewhere",
    ):
        assert line in text
    row = pick(made["rows"], model="Fast", params=params(2), label="", dataset="tales", decoding="greedy")
    cell = f"{100 * row['accuracy']:.1f} ± {100 * stats.Z95 * row['accuracy_se']:.1f} | {row['length']:.1f}"
    (line,) = [
        line for line in text.split("## Accuracy, sampled")[0].splitlines() if line.startswith("| Fast c=2 |")
    ]
    assert cell in line
    systems = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert systems[2:6] == ["| CoT", "| Fast c=1", "| Fast c=2", "| Fast c=2 (control-zeroed)"]


def test_the_baseline_comes_first_whatever_its_name() -> None:
    text = render(fold([*system("Zoo", "78", method="cot"), *system("Fast", "78")]))
    assert text.index("| Zoo |") < text.index("| Fast |")


def test_the_pictures_leave_controls_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr(picture, "accuracy_vs_length", lambda rows: rows)
    monkeypatch.setattr(picture, "save", lambda rows, path: drawn.update({path.name: rows}))
    report.write(tmp_path, grid_of_systems(), provenance={})
    assert set(drawn) == {"accuracy_vs_length.png", "accuracy_vs_length-sampled.png"}
    for rows in drawn.values():
        assert {row.system.label for row in rows} == {""}
    controls = [r for r in grid_of_systems() if r["label"] and r["decoding"] == "greedy"]
    report.write(tmp_path, controls, provenance={})
    assert {row.system.label for row in drawn["accuracy_vs_length.png"]} == {"control-zeroed"}


def test_a_value_that_is_not_the_default_is_compared_with_the_default_and_named() -> None:
    records = [
        *system("CoT", "78"), *system("Fast", "77", c=2),
        *system("Fast", "78", params={"compression_factor": 2, "confidence_threshold": 0.8}),
        *system("Fast", "78", params={"ratio": 0.5}, method="skip", label="DL"),
    ]  # fmt: skip
    made = fold(records)
    pairs = {
        (tuple(r["params"].values()), tuple(r["baseline"]["params"].values()))
        for r in made["comparisons"]
        if r["baseline"]["model"] == "Fast"
    }
    assert pairs == {((2, 0.8), (2,))}
    text = render(made)
    assert "| Fast fast c=2 (confidence_threshold=0.8) |" in text
    assert "| Fast skip (DL, ratio=0.5) |" in text


def test_differences_are_starred_only_where_the_interval_leaves_out_zero() -> None:
    clear = [*system("CoT", "7" * 12), *system("Fast", "8" * 11 + "7"), *system("Same", "7" * 11 + "8")]
    text = render(fold(clear)).split("## Paired")[1]
    assert "| Fast | CoT | -91.7 ± 16.3 \\* |" in text
    assert "| Same | CoT | -8.3 ± 16.3 |" in text


def test_an_average_over_fewer_datasets_is_left_blank() -> None:
    records = [*system("CoT", "77"), *system("CoT", "77", dataset="tales"), *system("Fast", "78")]
    text = render(fold(records))
    assert "| Fast | 50.0 ± 98.0 | 4.0 | – | – | – | – |" in text


def test_names_hold_what_tells_systems_apart() -> None:
    one_model = [*system("m", "78", method="cot"), *system("m", "78", method="fast", c=2)]
    assert "| fast c=2 |" in render(fold(one_model))
    assert "| cot |" in render(fold(one_model))
    two_models = [
        *one_model,
        *system("n", "78", method="cot"),
        *system("x|y", "78", method="cot", label="ablation-a"),
    ]
    text = render(fold(two_models))
    for name in ("| m fast c=2 |", "| m cot |", "| n |", "| x\\|y (ablation-a) |"):
        assert name in text


def test_the_console_shows_the_numbers_of_the_markdown() -> None:
    made = fold(grid_of_systems())
    out = io.StringIO()
    print_tables(tables.report_tables(saved_report.of_json(made)), Console(file=out, width=200))
    row = pick(made["rows"], model="CoT", dataset="sums", decoding="sampled")
    assert f"{100 * row['accuracy']:.1f} ± {100 * stats.Z95 * row['accuracy_se']:.1f}" in out.getvalue()
    assert "Paired differences, greedy decoding" in out.getvalue()
    narrow = io.StringIO()
    print_tables(tables.report_tables(saved_report.of_json(made)), Console(file=narrow, width=80))
    assert "…" not in narrow.getvalue()  # a narrow terminal never cuts a number
    shown = f"{100 * row['accuracy']:.1f} ± {100 * stats.Z95 * row['accuracy_se']:.1f}"
    (line,) = [line for line in narrow.getvalue().splitlines() if shown in line][:1]
    assert line.startswith("│ CoT")
    assert line.endswith("│")


def test_reference_length_is_the_reference_chain_at_that_speed() -> None:
    """Three questions with chains of 7 and 4 tokens and none: ceil(7 / 3), ceil(4 / 3); at no speed 7 and 4."""
    chains = (7, 4, None)
    slow = [record("Slow", i, gold_length=n) for i, n in enumerate(chains)]
    fast = [record("Fast", i, gold_length=n, c=3) for i, n in enumerate(chains)]
    bare = [record("Bare", i) for i in range(3)]
    rows = fold([*slow, *fast, *bare])["rows"]
    for dataset in ("sums", "average"):
        found = {row["model"]: row["reference_length"] for row in rows if row["dataset"] == dataset}
        assert found == {"Slow": 5.5, "Fast": 2.5, "Bare": None}
    # 21 / 1.4 is a little more than 15 in floats.
    (row, _) = fold([record("Odd", gold_length=21, c=1.4)])["rows"]
    assert row["reference_length"] == 15


def test_settings_of_several_evaluations_are_put_together(tmp_path: Path) -> None:
    """Models side by side, a value that all share once, values that differ in a list; digests of questions left out."""
    common = {"split": "test", "limits": {"max_latents": 4}}
    for name, own in (
        (
            "a",
            {"models": {"x": "1"}, "dtype": "float32", "sizes": {"n": 1}, "questions": {"d": [2, "00", "f"]}},
        ),
        (
            "b",
            {
                "models": {"y": "2"},
                "dtype": "bfloat16",
                "sizes": {"n": 2},
                "questions": {"d": [3, "01", "f"]},
            },
        ),
        ("c", {"models": {"y": "2"}, "dtype": "bfloat16", "sizes": {"n": 1}}),
    ):
        files.write_json(tmp_path / name / "evaluation.json", {**common, **own})
    (tmp_path / "d").mkdir()
    assert settings_of(tmp_path / name / "records.jsonl" for name in "abcd") == {
        **common,
        "models": {"x": "1", "y": "2"},
        "dtype": ["float32", "bfloat16"],
        "sizes": [{"n": 1}, {"n": 2}],
        "questions": {"d": 3},
    }


@pytest.mark.parametrize(("key", "before", "after"), [("split", "test", "validation"), ("data_seed", 0, 1)])
def test_questions_of_another_split_or_seed_are_an_error(
    key: str, before: Any, after: Any, tmp_path: Path
) -> None:
    """However many they are: their ids may be the same."""
    one, two = (
        {key: value, "models": {name: name}, "questions": {"d": [n, name, "f"]}}
        for value, name, n in ((before, "x", 100), (after, "y", 200))
    )
    with pytest.raises(
        ValueError, match=r"other questions under one name, d: .* --split, --data_seed and --options"
    ):
        settings_of(settings_files(tmp_path, one, two))
    two["questions"] = {"e": [200, "y", "f"]}
    assert settings_of(settings_files(tmp_path, one, two))["questions"] == {"d": 100, "e": 200}
    # The same questions, by their digest: the seed is that of another data set beside it.
    two["questions"] = {"d": [100, "x", "f"]}
    assert settings_of(settings_files(tmp_path, one, two))["questions"] == {"d": 100}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"limits": {"max_latents": 1}},
            r"other conditions for x on d \(limits .* 9\}, .* and .* 1\}, .*\); rename",
        ),
        ({"dtype": "bfloat16"}, r"other conditions for x on d \(.* dtype float32 and .* dtype bfloat16\)"),
        ({"judge": "my:fn", "judge_source": "1"}, r"other judges of d \(by kind and my:fn 1\); evaluate one"),
        ({"models": {"y": "2"}, "judge": "my:fn"}, "have other judges of d"),
    ],
)
def test_answers_that_would_pass_for_alike_are_an_error(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A model cut after one latent, or verdicts of another judge, beside the others in one table."""
    one = {
        "limits": {"max_latents": 9},
        "dtype": "float32",
        "models": {"x": "1"},
        "questions": {"d": [9, "0", "f"]},
    }
    with pytest.raises(ValueError, match=words):
        settings_of(settings_files(tmp_path, one, {**one, **change}))
    # Of another model, and other questions, they may differ.
    others = {**one, **change, "models": {"z": "3"}, "questions": {"e": [9, "0", "f"]}}
    assert settings_of(settings_files(tmp_path, one, others))["models"] == {"x": "1", "z": "3"}


def test_systems_of_another_training_seed_are_said_to_have_no_difference() -> None:
    def noted(seed: int, **options: Any) -> bool:
        answers = [record("m", method="cot"), record("m", method="colar", train_seed=seed, c=2)]
        return "another training seed (colar c=2): colar report" in render(fold(answers, **options))

    assert noted(1)
    assert not noted(1, pairs=[("colar c=2", "cot")])
    assert not noted(0)


def test_an_evaluation_that_was_killed_is_named() -> None:
    answers = [*system("m", "78", method="cot"), *system("m", "7", method="cot", decoding="sampled", seed=1)]
    for n, told in ((2, False), (3, True)):
        made = report.fold(answers, {"questions": {"sums": n, "tales": 5}}).to_json()
        assert (f"Incomplete: 2 of {n} questions of sums are answered." in render(made)) == told
        assert "Incomplete: 1 of" not in render(made)
        assert "Incomplete: 0 of 5 questions of tales are answered." in render(made)


@pytest.mark.parametrize("key", ["length", "forward_passes", "seconds"])
@pytest.mark.parametrize("value", [None, "4", math.nan, True])
def test_a_record_has_numbers_where_a_mean_is_made(key: str, value: Any) -> None:
    record, *_ = system("m", "78", method="cot")
    with pytest.raises(ValueError, match=f"record 1: {key} must be a number, got"):
        list(checked([{**record, key: value}]))


def test_other_questions_under_one_name_are_an_error(tmp_path: Path) -> None:
    """Two files of one name: the answers to their first rows would be compared as if they were to one question."""
    paths = [tmp_path / name / "records.jsonl" for name in "abc"]
    one, more, other = (
        {"rows": [20, "00", "f"]},
        {"rows": [20, "00", "f"], "d": [9, "02", "g"]},
        {"rows": [20, "01", "f"]},
    )
    for path, questions in zip(paths, (one, more, other), strict=True):
        files.write_json(path.parent / "evaluation.json", {"questions": questions})
    assert settings_of(paths[:2]) == {"questions": {"rows": 20, "d": 9}}
    with pytest.raises(
        ValueError, match=r"a/records.jsonl and .*c/records.jsonl have other questions .*, rows"
    ):
        settings_of(paths)


def test_other_first_questions_under_one_name_are_an_error(tmp_path: Path) -> None:
    """However many they are: a generated source with other options, or files of one name in two folders."""
    rows = [Example(f"d/test/{i}", f"{i} + 1?", (), str(i + 1)) for i in range(4)]
    others = [replace(row, question=f"Is it {row.question}") for row in rows]

    def settings(*asked: Any) -> dict[str, Any]:
        return settings_of(settings_files(tmp_path, *({"questions": {"d": each}} for each in asked)))

    assert settings(asked_of(rows), asked_of(rows[:3]))["questions"] == {"d": 4}
    for n in (3, 4):
        with pytest.raises(ValueError, match=r"other questions under one name, d: give one of them another"):
            settings(asked_of(rows), asked_of(others[:n]))


def test_a_label_is_one_cell_of_its_table() -> None:
    label = "a|b *c* <img src=x>\nd"
    text = render(fold([*system("m", "78", method="cot", label=label), *system("m", "78", method="cot")]))
    assert "a\\|b \\*c\\* \\<img src=x> d" in text


def settings_files(folder: Path, *each: dict[str, Any] | None) -> list[Path]:
    """Records beside these settings; None has no evaluation.json."""
    for i, settings in enumerate(each):
        if settings is not None:
            files.write_json(folder / str(i) / "evaluation.json", settings)
    return [folder / str(i) / "records.jsonl" for i in range(len(each))]


def test_other_checkpoints_under_one_name_are_an_error(tmp_path: Path) -> None:
    """Their records would be one system's."""
    one, two, other = ({"models": models} for models in ({"m": "1"}, {"n": "2", "m": "1"}, {"n": "3"}))
    paths = settings_files(tmp_path, one, two, {}, other, one)
    assert settings_of(paths[:3]) == {"models": {"m": "1", "n": "2"}}
    for order in (paths, paths[::-1]):
        with pytest.raises(
            ValueError, match=r"records.jsonl have other .* name, n \(. and .\); rename one: NAME=CHECKPOINT"
        ):
            settings_of(order)


@pytest.mark.parametrize(
    ("judges", "told"),
    [
        (("my:fn",), "my:fn"),
        (("my:fn", ""), ["my:fn", "by kind"]),
        (("", "my:fn", "", "my:gn"), ["by kind", "my:fn", "my:gn"]),
        (("", ""), None),
        # Of records without settings nobody knows the judge.
        (("my:fn", None), "my:fn"),
        ((None,), None),
    ],
)
def test_a_report_says_which_answers_were_judged_by_kind(
    judges: tuple[str | None, ...], told: Any, tmp_path: Path
) -> None:
    each = [None if j is None else {"split": "test", **({"judge": j} if j else {})} for j in judges]
    assert settings_of(settings_files(tmp_path, *each)).get("judge") == told


@pytest.mark.parametrize(("draws", "mean"), [((2, 3), None), ((2, 2), 1.0), ((3, 2, 3), None)])
def test_votes_of_runs_with_other_numbers_of_samples_have_no_mean(
    draws: tuple[int, ...], mean: float | None
) -> None:
    records = []
    for run, k in enumerate(draws):
        for dataset, seed in ((dataset, seed) for dataset in ("a", "b") for seed in range(k)):
            more = {"decoding": "sampled", "train_seed": run, "seed": seed, "dataset": dataset}
            records += [{**row, "id": f"{dataset}/{row['id']}"} for row in system("CoT", "77", **more)]
    for row in fold(records)["pooled"]:
        assert (row["pass_at_k"], row["maj_at_k"], row["runs_interval"]) == (mean, mean, 0)


def test_a_table_with_controls_says_that_their_thoughts_are_not_cut() -> None:
    plain = [row for row in grid_of_systems() if not row["label"]]
    assert "never cut" in render(fold(grid_of_systems()))
    assert "never cut" not in render(fold(plain))
