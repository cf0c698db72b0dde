"""What the scripts and benchmarks beside the package compute, and that they run."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from example_rows import report_row
from script_files import module

from colar import files
from colar.data import sources
from colar.evaluation.report import write as write_report
from colar.evaluation.report_rows import Difference, Report, System
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.training.run_folder import WHOLE

ROOT = Path(__file__).resolve().parent.parent


def records(correct, length=3.0, decoding="greedy"):
    return [
        {"id": f"q{i}", "correct": bool(hit), "length": length, "decoding": decoding}
        for i, hit in enumerate(correct)
    ]


def test_differences_over_training_seeds_by_hand():
    report = module("lab/scripts/grpo_report.py")
    tests = {
        "rl": {0: records([1, 1, 1, 0], 2.0), 1: records([1, 1, 0, 1], 2.0)},
        "nll": {0: records([1, 0, 0, 0]), 1: records([1, 0, 0, 1])},
    }
    for system in tests.values():
        for found in system.values():
            found += [{**record, "decoding": "sampled"} for record in found]
    rows = report.compare(tests)
    assert [(row["system"], row["baseline"], row["decoding"]) for row in rows] == [
        ("CoLaR-NLL-RL", "CoLaR-NLL", "greedy"),
        ("CoLaR-NLL-RL", "CoLaR-NLL", "sampled"),
    ]
    accuracy, length = rows[0]["accuracy"], rows[0]["length"]
    assert accuracy["by_train_seed"] == [0.5, 0.25]
    # By question, over both seeds: 0, 1, 0.5, 0; mean 0.375, sd(ddof=1) 0.4787, over sqrt(4).
    assert accuracy["difference"] == pytest.approx(0.375)
    assert accuracy["interval"] == pytest.approx((0.375 - 1.96 * 0.23936, 0.375 + 1.96 * 0.23936), abs=1e-3)
    assert accuracy["train_seeds_interval"] == pytest.approx(12.706 * 0.125, rel=1e-3)  # t(1), sd / sqrt(2)
    assert (length["difference"], length["by_train_seed"]) == (-1, [-1, -1])
    text = report.markdown(rows, [], [0, 1])
    assert (
        "| CoLaR-NLL-RL | CoLaR-NLL | greedy | +37.5 [-9.4, +84.4] | -1.00 [-1.00, -1.00] | ± 158.8 |" in text
    )


def test_a_decoding_that_was_not_tested_has_no_row():
    report = module("lab/scripts/grpo_report.py")
    tests = {"rl": {0: records([1, 1])}, "nll": {0: records([1, 0])}}
    (row,) = report.compare(tests)
    assert (row["decoding"], row["accuracy"]["difference"]) == ("greedy", 0.5)
    # Nor has one of which some run has no answers.
    tests["rl"][0] += records([1, 0], decoding="sampled")
    assert len(report.compare(tests)) == 1


def test_pairs_are_of_runs_that_have_names():
    report = module("lab/scripts/grpo_report.py")
    for pair in report.PAIRS:
        assert set(pair) <= set(report.NAMES)


def test_ends_of_a_run_are_its_first_and_last_fifth():
    report = module("lab/scripts/grpo_report.py")
    history = [{"step": i, "reward": float(i)} for i in range(10)] + [{"step": 10, "eval_accuracy": 1.0}]
    assert report.ends(history, "reward") == [0.5, 8.5]


def test_what_latents_alone_explore_by_hand():
    """16 groups an update: 0, 2 and 1 of them with spread."""
    report = module("lab/scripts/grpo_report.py")
    history = [
        {"step": i + 1, "frac_reward_zero_std": share, "grad_norm": norm}
        for i, (share, norm) in enumerate([(1.0, 0.0), (0.875, 0.5), (0.9375, 0.25)])
    ]
    found = report.explored(history, 16)
    assert found == {"groups": 48, "spread": 3, "gradient": 0.5}
    text = report.markdown([], [{"name": "CoLaR, latents alone", "seed": 2, **found}], [2])
    assert "| CoLaR, latents alone | 2 | 48 | 3 | 0.5 |" in text


def test_reinforced_runs_side_by_side(tmp_path, monkeypatch, capsys):
    """The first and last fifth of five logs, and medians, by hand."""
    script = module("lab/scripts/grpo_stability.py")
    history = [{"step": 0, "eval_accuracy": 0.5, "eval_length": 14.0}]
    for step in range(1, 6):
        logged = {
            "reward": step / 10,
            "latents/mean_length": 10.0,
            **dict.fromkeys(script.METRICS, float(step**2)),
        }
        history.append({"step": step, **logged})
    history += [
        {"step": 3, "eval_accuracy": 0.8, "eval_length": 12.0},
        {"step": 5, "eval_accuracy": 0.25, "eval_length": 13.0},
    ]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "history.json").write_text(json.dumps(history))
    monkeypatch.setattr(
        sys,
        "argv",
        ["", *(str(tmp_path / n) for n in ("first", "second")), "--output", str(tmp_path / "out")],
    )
    script.main()
    capsys.readouterr()
    table = (tmp_path / "out" / "report.md").read_text()
    for name in ("first", "second"):
        row = "5 | 50.0 → 25.0 | 80.0 | 14.00 → 13.00 | 0.10 → 0.50 | 9.000 | 9.00 | 9.000 | 9 |"
        assert f"| {name} | {row}" in table
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000


def test_tables_of_docs_by_hand(tmp_path, monkeypatch):
    """A line a system, the best first; a control beside what it was made from; pairs with their runs."""
    script = module("lab/scripts/write_tables.py")
    monkeypatch.setattr(script, "ROOT", tmp_path)

    def answers(method, text, run, **more):
        base = {"model": "m", "method": method, "label": "", "dataset": "sums", "params": {}, "seed": 0,
                "decoding": "greedy", "train_seed": run, "completion": "", "truncated": False, "length": 4,
                "forward_passes": 9, "seconds": 0.5}  # fmt: skip
        return [
            {**base, **more, "id": str(i), "parsed": digit, "correct": digit == "7"}
            for i, digit in enumerate(text)
        ]

    records = [row for run in (0, 1) for row in answers("cot", "7778", run)]
    records += [row for run, text in ((0, "7888"), (1, "7788")) for row in answers("fast", text, run)]
    for label in ("control-zeroed", "control-cut-3"):
        records += [row for run in (0, 1) for row in answers("fast", "8888", run, label=label)]
    for label in ("snap", "control-zeroed, snap"):  # a method all of whose requests have a label
        records += [row for run in (0, 1) for row in answers("snappy", "7888", run, label=label)]
    cut = [row for row in records if row["label"] == "control-zeroed, snap"][:2]
    cut[0]["truncated"] = cut[1]["truncated"] = True
    write_report(tmp_path / "results" / "here", records, provenance={}, pairs=[("cot", "fast")])
    page = "before\n" + "".join(
        f"<!-- results/here {kind} -->\nstale\n<!-- end -->\nbetween\n"
        for kind in ("averages", "datasets", "controls", "pairs", "notes")
    )
    (tmp_path / "results" / "here" / "notes.md").write_text(
        "# A page\n\n| as | it |\n| --- | --- |\n| is | – |\n\n| no |\n"
    )
    filled = script.filled(page)
    assert script.filled(filled) == filled
    assert "stale" not in filled
    lines = [line for line in filled.splitlines() if line.startswith("|") and "---" not in line]
    assert lines == [
        "| system | #L | average | runs |",
        "| cot | 4.0 | 75.0 ± 49.0 | ± 0.0 |",
        "| fast | 4.0 | 37.5 ± 46.9 | ± 158.8 |",
        "| snappy (snap) | 4.0 | 25.0 ± 49.0 | ± 0.0 |",
        "| system | #L | sums | average |",
        "| cot | 4.0 | 75.0 | 75.0 ± 49.0 |",
        "| fast | 4.0 | 37.5 | 37.5 ± 46.9 |",
        "| snappy (snap) | 4.0 | 25.0 | 25.0 ± 49.0 |",
        "| system | #L | its own | zeroed |",
        "| fast | 4.0 | 37.5 ± 46.9 | 0.0 ± 0.0 (0.0) |",
        "| snappy (snap) | 4.0 | 25.0 ± 49.0 | 25.0 ± 49.0 (25.0) |",
        "| system | baseline | greedy | runs |",
        "| cot | fast | +37.5 ± 46.9 | ± 158.8 |",
        "| as | it |",
        "| is | – |",
    ]


def test_a_control_stands_beside_its_system_on_the_same_data_sets():
    """Its system's own average may be over more data sets, over others, or not be there at all."""

    def asked(name, label, **accuracies):
        rows = [report_row(name, dataset, None, share, label=label) for dataset, share in accuracies.items()]
        mean = sum(accuracies.values()) / len(accuracies)
        return [*rows, report_row(name, "average", None, mean, label=label, datasets=list(accuracies))]

    rows = asked("wide", "", one=0.9, two=0.5) + asked("wide", "control-zeroed", two=0.1)
    rows += asked("same", "", one=0.8, two=0.6) + asked("same", "control-zeroed", two=0.2, one=0.4)
    rows += asked("apart", "", one=0.9) + asked("apart", "control-zeroed", two=0.1)
    rows += asked("never", "control-shuffled", two=0.05)
    grid = module("lab/scripts/write_tables.py").controls(Report({}, rows=rows, comparisons=[], pooled=[]))
    assert list(grid.head) == ["system", "#L", "its own", "zeroed", "shuffled"]
    cells = [[cell.split()[0] for cell in line] for line in grid.rows]
    assert [(line[0], *line[2:]) for line in cells] == [
        ("wide", "50.0", "10.0", "–"),
        ("same", "70.0", "30.0", "–"),
        ("apart", "–", "10.0", "–"),
        ("never", "–", "–", "5.0"),
    ]


def test_what_several_samples_gain_by_hand():
    def row(**more):
        return report_row(factor=2, accuracy_se=0.01, **more)

    several = {"decoding": "sampled", "seeds": [0, 1, 2], "seeds_interval": 0.02}
    rows = [row(dataset="sums", accuracy=0.7)]
    errors = {"maj_at_k_se": 0.05, "pass_at_k_se": 0.02}
    rows += [row(dataset="sums", accuracy=0.6, maj_at_k=0.75, pass_at_k=0.9, **errors, **several)]
    # Never asked greedily:
    rows += [row(dataset="more", accuracy=0.3, maj_at_k=0.4, pass_at_k=0.5, **several)]
    rows += [row(dataset="once", accuracy=0.3, decoding="sampled")]
    rows += [row(dataset="average", accuracy=0.45, maj_at_k=0.5, pass_at_k=0.7, **several)]
    grid = module("lab/scripts/write_tables.py").samples(Report({}, rows=rows, comparisons=[], pooled=[]))
    assert list(grid.head) == ["system", "dataset", "#L", "greedy", "k", "avg@k", "maj@k", "pass@k"]
    assert [line[1:2] + line[3:] for line in grid.rows] == [
        ["sums", "70.0 ± 2.0", "3", "60.0 ± 2.0", "75.0 ± 9.8", "90.0 ± 3.9"],
        ["more", "–", "3", "30.0 ± 2.0", "40.0", "50.0"],
    ]


def test_pairs_that_were_not_drawn_from_alike_have_a_column_a_data_set():
    def pair(name, decoding, **differences):
        system = System(name, "colar", "", (("compression_factor", 2),), decoding, None)
        rows = []
        for dataset, points in differences.items():
            interval = [points - 0.02, points + 0.02]
            rows.append(Difference(system, dataset, system, 10, points, 0.01, interval, pair=[name, "cot"]))
        return rows

    def grid(pairs):
        report = Report({}, rows=[], comparisons=[], pooled=[], pairs=pairs)
        return module("lab/scripts/write_tables.py").pairs(report)

    both = pair("a", "greedy", one=0.1, two=0.3, average=0.2) + pair(
        "a", "sampled", one=0.1, two=0.2, average=0.15
    )
    alike = grid(both)
    assert list(alike.head) == ["system", "baseline", "greedy", "runs", "sampled"]
    assert alike.rows[0][-1].startswith("+15.0")
    one = pair("b", "greedy", one=0.5, average=0.5) + pair("b", "sampled", one=0.4, average=0.4)
    never = pair("c", "greedy", one=0.5, average=0.5)
    apart = grid(both + one + never)
    assert list(apart.head) == ["system", "baseline", "greedy", "runs", "sampled, one", "sampled, two"]
    assert [[cell.split()[0] for cell in [line[2], *line[4:]]] for line in apart.rows] == [
        ["+20.0", "+10.0", "+20.0"],
        ["+50.0", "+40.0", "–"],
        ["+50.0", "–", "–"],
    ]


def test_a_line_a_factor_and_a_column_a_label_by_hand():
    def row(factor, label, accuracy, **more):
        numbers = {"accuracy": accuracy, "accuracy_se": 0.01, "runs_interval": 0.02}
        return report_row(factor=factor, label=label, **numbers, **more)

    rows = [row(5, "", 0.4), row(1, "", 0.9), row(1, "one c", 0.95), row(1, "", 0.1, dataset="sums")]
    rows += [row(1, "", 0.2, decoding="sampled")]
    grid = module("lab/scripts/write_tables.py").factors(Report({}, rows=[], comparisons=[], pooled=rows))
    assert list(grid.head) == ["c", "random c", "one c"]
    assert [[cell.split()[0] for cell in line] for line in grid.rows] == [
        ["1", "90.0", "95.0"],
        ["5", "40.0", "–"],
    ]
    assert grid.rows[0][1].endswith("± 2.0")


def test_times_are_shares_of_the_cot_that_was_timed_beside_them(tmp_path):
    def cell(ms, thoughts=10):
        return {"ms": ms, "thoughts": thoughts}

    cells = {"cot/b1": cell(200, 20), "cot/b32": cell(40, 20.5)}
    cells |= {"c=2/0/b1": cell(100), "c=2/0/b32": cell(30), "c=2/0/votes8": cell(500, 11)}
    for threshold, ms in (("0.5", 1), ("0.8", 150), ("0.95", 1)):  # the first from 0.7 on is shown
        cells |= {f"c=2/{threshold}/b1": cell(ms), f"c=2/{threshold}/b32": cell(ms)}
    files.write_json(tmp_path / "report.json", {"cells": cells})
    later = {"cot/b1": cell(400), "cot/b32": cell(40), "c=2/0/b1": cell(100), "c=2/0/b32": cell(10)}
    files.write_json(tmp_path / "report_rl.json", {"cells": later})
    assert module("lab/scripts/speed_tables.py").times(tmp_path).rows == [
        ["CoT", "200", "40", "100%", "100%", "20.5"],
        ["c = 2", "100", "30", "50%", "75%", "10"],
        ["c = 2, eight draws", "500", "–", "250%", "–", "11"],
        ["c = 2, threshold 0.8", "150", "150", "75%", "375%", "10"],
        ["CoT", "400", "40", "100%", "100%", "10"],
        ["c = 2, after GRPO", "100", "10", "25%", "25%", "10"],
    ]


def write_clock(run, steps, seconds):
    folder = run / "checkpoints" / f"checkpoint-{steps}"
    folder.mkdir(parents=True)
    clock = {"Clock": {"args": {}, "attributes": {"seconds": seconds, "rows_per_update": 16}}}
    state = {"global_step": steps, "max_steps": steps, "stateful_callbacks": clock}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / WHOLE).touch()


def test_updates_that_fit_into_the_time_of_another_run(tmp_path, monkeypatch, capsys):
    for name, steps, seconds in (("sft", 1000, 50.0), ("rl", 300, 125.0)):
        write_clock(tmp_path / name, steps, seconds)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "sft"), "--as-long-as", str(tmp_path / "rl")])
    module("lab/scripts/updates_in.py").main()
    assert capsys.readouterr().out == "2500\n"


def benchmark(name, words, folder, monkeypatch, capsys):
    """(report, what was printed) of a benchmark that is run whole, in this process."""
    monkeypatch.syspath_prepend(ROOT / "lab" / "benchmarks")
    words = [*words, "--here", "--rounds", "1", "--threads", "1", "--output", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    importlib.import_module(name).main()
    return files.read_json(folder / "out" / "report.json"), capsys.readouterr().out


def test_the_rollout_benchmark_measures_the_same_work_in_all_systems(tmp_path, monkeypatch, capsys):
    words = "--backbone tiny --source arithmetic --questions 2 --num-generations 2 --batch 2"
    report, printed = benchmark("rollout", words.split(), tmp_path, monkeypatch, capsys)
    cells = report["cells"]
    assert set(cells) == {"ours", "merged", "rescored", "published"}
    update = cells["ours"]["c=5"]["update_seconds"]
    for system in cells:
        for name, latents in (("c=2", 12.5), ("c=5", 5.5)):  # the first two test problems: 28 and 21 tokens
            assert cells[system][name]["latents"] == latents
        cell = cells[system]["c=5"]
        assert cell["completions_per_second"] == pytest.approx(4 / cell["seconds"])
        assert cell["rollout_share"] == pytest.approx(cell["seconds"] / (cell["seconds"] + update))
    assert "published" in printed


def test_the_benchmark_of_gates_times_every_speed_and_threshold(tmp_path, monkeypatch, capsys):
    # Untrained weights would think to the end of any limit.
    words = (
        "--limit 3 --limit-alone 2 --compression-factor 1 2 --confidence-threshold 0 1 --votes 3 --max-latents 4 "
        f"--max-completion-length 3 --cot {tmp_path}/cot --gated {tmp_path}/sequential"
    ).split()
    for name, config in (("cot", {}), ("sequential", {"confidence_thresholds": [0, 0.5]})):
        lm, method = LatentLM.from_backbone(backbones.load("tiny")), registry.build(name, config)
        pretrained.attach(lm, method, seed=0)
        pretrained.save(lm, method, tmp_path / name, {}, "card")
    report, printed = benchmark("gates", words, tmp_path, monkeypatch, capsys)
    cells = report["cells"]
    # A group of one has nothing to end early.
    names = ["cot", "c=1/0", "c=2/0", "c=2/1"]
    assert set(cells) == {f"{name}/b{rows}" for name in names for rows in (1, 32)} | {
        f"{name}/votes3" for name in names[1:]
    }
    assert [cells[f"c=2/0/b{rows}"]["questions"] for rows in (1, 32)] == [2, 3]
    ratio = cells["cot/b32"]["ms"] / cells["c=2/1/b32"]["ms"]
    assert report["speedup_over_cot"]["c=2/1/b32"] == pytest.approx(ratio)
    assert cells["c=2/1/votes3"]["questions"] == 2
    ratio = cells["cot/b1"]["ms"] / cells["c=2/1/votes3"]["ms"]
    assert report["speedup_over_cot"]["c=2/1/votes3"] == pytest.approx(ratio)
    assert "c=2/1/b32" in printed


def test_how_long_a_model_thinks_at_a_factor_left_out(tmp_path, monkeypatch):
    found = module("lab/scripts/left_out.py")
    lengths = {1: [4, 6, 8], 3: [2, 2, 3], 2: [2, 3, 8]}  # at c = 2: as at 3, as asked, as at 1
    rows = [
        {
            "model": "m",
            "method": "colar",
            "label": "odd",
            "dataset": "d",
            "decoding": "greedy",
            "train_seed": 0,
        }
        | {"params": {"compression_factor": c}, "seed": 0, "id": f"q{i}"}
        | {"length": length, "gold_length": [4, 6, 8][i]}
        for c, row in lengths.items()
        for i, length in enumerate(row)
    ]
    assert found.shares(rows, [1, 3]) == [
        {"asked": 1, "expected": 1.0, "as_at": {1: 1.0, 3: 0.0}},
        {"asked": 2, "expected": 2 / 3, "as_at": {1: 1 / 3, 3: 1 / 3}},
        {"asked": 3, "expected": 1.0, "as_at": {1: 0.0, 3: 1.0}},
    ]
    without = [
        row for row in rows if (row["id"], row["params"]["compression_factor"]) != ("q2", 3)
    ]  # unanswered there
    assert found.shares(without, [1, 3])[1] == {"asked": 2, "expected": 1.0, "as_at": {1: 0.0, 3: 0.5}}
    committed = ROOT / "results/toy/factors"
    given = [committed / "records.jsonl.gz", "--label", "c in 1 3 5 7", "--trained", 1, 3, 5, 7]
    monkeypatch.setattr(sys, "argv", ["left_out.py", *map(str, given), "--output", str(tmp_path)])
    found.main()
    for name in ("lengths.md", "lengths.json"):
        assert (tmp_path / name).read_bytes() == (committed / name).read_bytes()


def test_the_toys_of_other_sizes_load_and_are_drawn_from_their_seed(tmp_path, monkeypatch, capsys):
    toys = module("lab/scripts/toy_backbones.py")
    args = ["toy_backbones.py", "--sizes", "0.1m", "0.4m", "--seeds", "0", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", args)
    toys.main()
    assert json.loads((tmp_path / "parameters.json").read_text()) == {"0.1m": 113_616, "0.4m": 386_208}
    first, other = (backbones.load(str(tmp_path / f"0.1m-{seed}")) for seed in (0, 1))
    assert first.lm.config.num_attention_heads == 4
    assert first.lm.model.embed_tokens.weight.std().item() == pytest.approx(0.7 / 48**0.5, rel=0.05)
    assert not torch.equal(first.lm.model.embed_tokens.weight, other.lm.model.embed_tokens.weight)
    assert first.tokenizer("<<3*4=12>>").input_ids == backbones.load("tiny").tokenizer("<<3*4=12>>").input_ids
    # What is there stays; the same seed would give the same weights.
    again = toys.build(*toys.SIZES["0.1m"], seed=0)
    assert torch.equal(again.model.embed_tokens.weight, first.lm.model.embed_tokens.weight)
    (tmp_path / "0.1m-0" / "mark").touch()
    toys.main()
    assert (tmp_path / "0.1m-0" / "mark").exists()


def test_a_system_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "lab" / "benchmarks")
    shared = importlib.import_module("shared")
    script = tmp_path / "bench.py"
    script.write_text(
        "import sys, time\n"
        "if sys.argv[-1] == 'bad': sys.exit('no memory')\n"
        "if sys.argv[-1] == 'slow': time.sleep(60)\n"
        'print(\'{"system": "good", "cells": {"b1": {"ms": 3.0}}}\')\n'
    )
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    order = ["bad", "good", "slow", "late"]
    runs = shared.run_systems(str(script), order, str, minutes=1.5 / 60)
    assert [run["system"] for run in runs] == order
    assert "no memory" in runs[0]["error"]
    assert "stopped after" in runs[2]["error"]
    assert "not run, the time is up" in runs[3]["error"]
    assert shared.medians(runs, order) == {"good": {"b1": {"ms": 3.0}}}
    with pytest.raises(SystemExit, match="without a result: bad, slow, late"):
        shared.publish({"runs": runs}, str(tmp_path / "out"), lambda report: None, None)
    assert (tmp_path / "out" / "report.json").exists()
    with pytest.raises(SystemExit, match="no system has a result"):
        shared.run_systems(str(script), ["bad"], str)


def test_what_a_gpu_did_in_a_step_by_hand(monkeypatch):
    """Two steps of 10 ms. Kernels of two streams overlap: of 8 ms of kernels 6 are busy time."""
    monkeypatch.syspath_prepend(ROOT / "lab" / "benchmarks")
    profile_step = importlib.import_module("profile_step")
    kernels = [("gemm", 0.0, 0.004), ("copy", 0.002, 0.004), ("gemm", 0.010, 0.012)]
    found = profile_step.of_gpu(kernels, 2, 10.0)
    assert found["kernels"] == 1.5
    assert found["busy_ms"] == pytest.approx(3)
    assert found["busy"] == pytest.approx(0.3)
    assert list(found["longest"]) == ["gemm", "copy"]
    assert found["longest"]["gemm"] == pytest.approx(3)


def test_questions_with_other_numbers_are_paired(tmp_path, monkeypatch, capsys):
    others = module("lab/scripts/other_numbers.py")
    folder = tmp_path / "upstream"
    files.write_text(folder / "gsm8k_aug/test.txt", "Ann has 3 pens and buys 4.||<<3+4=7>> #### 7\n")
    halloween = {
        "sQuestion": "Debby had 32 sweets and ate 5. How many are left?",
        "lEquations": ["X=32.0-5.0"],
    }
    unknown = {"sQuestion": "How many are there?", "lEquations": ["a+b=3.0"], "lSolutions": [1.0]}
    twice = halloween | {"lSolutions": [27.0]}
    files.write_json(folder / "multiarith/MultiArith.json", [twice, twice, unknown])
    svamp = {"ID": "chal-1", "Body": "Ben had 8 cups", "Question": "He sold 3 cups. How many are left?"}
    files.write_json(folder / "svamp/SVAMP.json", [svamp | {"Equation": "( 8.0 - 3.0 )", "Answer": 5.0}])
    data = tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["x", "write", str(data), "--data_dir", str(folder)])
    others.main()
    assert "multiarith: 1 of 3 questions" in capsys.readouterr().out
    for name, question in (("multiarith", "ate 5"), ("svamp", "He sold 3 cups")):
        own, other = (json.loads((data / f"{name}{end}.jsonl").read_text()) for end in ("", "-other"))
        assert own["id"] == other["id"]
        assert question in own["question"]
        assert own["question"] != other["question"]
        assert own["steps"] != other["steps"]


def test_differences_between_own_and_other_numbers_by_hand(tmp_path, monkeypatch):
    others = module("lab/scripts/other_numbers.py")
    # The two files of a set have different orders.
    answers = {
        ("m", "d"): {"q0": 1, "q1": 1, "q2": 1, "q3": 0},
        ("m", "d-other"): {"q3": 1, "q2": 0, "q1": 0, "q0": 1},
        ("m", "e"): {"q0": 1, "q1": 1},
        ("m", "e-other"): {"q0": 1, "q1": 0},
        ("base", "d"): {"q0": 1, "q1": 1, "q2": 1, "q3": 1},
        ("base", "d-other"): {"q0": 0, "q1": 1, "q2": 1, "q3": 1},
        ("base", "e"): {"q0": 1, "q1": 1},
        ("base", "e-other"): {"q0": 1, "q1": 1},
    }

    def table(*options, left_out=()):
        rows = [
            {"model": model, "method": "cot", "label": "", "dataset": dataset, "params": {}}
            | {"decoding": "greedy", "train_seed": 0, "seed": 0, "id": key, "completion": "1", "parsed": "1"}
            | {"correct": bool(right), "truncated": False, "length": 3, "forward_passes": 5, "seconds": 0.1}
            | {"gold_length": None}
            for (model, dataset), by_id in answers.items()
            if (model, dataset) not in left_out
            for key, right in by_id.items()
        ]
        files.write_text(tmp_path / "records.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        arguments = ["x", "table", str(tmp_path), "--output", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        others.main()
        return (tmp_path / "differences.md").read_text()

    # m's changes are 0, -1, -1, 1 in d and 0, -1 in e: means -0.25 and -0.5, errors sd / sqrt(n) 0.479 and 0.5, and
    # the error of their mean is half the root of their summed squares. Less base's, d's are 1, -1, -1, 1: mean 0, error
    # 0.577.
    found = table("--baseline", "base")
    assert "| system | questions | own numbers | other numbers | d | e | difference | beyond base |" in found
    assert "| base | 6 | 100.0 | 87.5 | -25.0 ± 49.0 | +0.0 ± 0.0 | -12.5 ± 24.5 | – |" in found
    assert "| m | 6 | 87.5 | 50.0 | -25.0 ± 93.8 | -50.0 ± 98.0 | -37.5 ± 67.8 | -25.0 ± 74.8 |" in found
    one_set = [key for key in answers if key[1].startswith("e")]
    assert "| m | 4 | 75.0 | 50.0 | -25.0 ± 93.8 | -25.0 ± 93.8 |" in table(left_out=one_set)
    # Averages over different sets cannot be compared.
    with pytest.raises(ValueError, match="base has no answers to e with both numbers"):
        table(left_out=[("base", "e-other")])
    with pytest.raises(ValueError, match="--baseline cot is none of base, m"):
        table("--baseline", "cot")
    with pytest.raises(ValueError, match="-other behind its name"):
        table(left_out=[key for key in answers if key[1].endswith("-other")])


def test_renumbered_rows_are_a_file_of_examples(tmp_path, monkeypatch, capsys):
    """The rows themselves, then those by other numbers, without what another split or a test set asks."""
    script = module("lab/scripts/renumber_rows.py")
    own = [{"question": f"Ann has {n} pens and loses 2. How many has she?", "steps": [f"<<{n}-2={n - 2}>>"]}
           | {"answer": str(n - 2)} for n in (20, 31, 47)]  # fmt: skip
    files.write_jsonl(tmp_path / "own" / "train.jsonl", [*own, {"question": "Why?", "answer": "42"}])
    arguments = [
        "x",
        str(tmp_path / "own"),
        "--versions",
        "2",
        "--seed",
        "1",
        "--output",
        str(tmp_path / "new.jsonl"),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(script, "TEST_SETS", ())

    def written():
        script.main()
        return sources.load_examples(str(tmp_path / "new.jsonl"), "train")

    rows = written()
    assert "new rows from 3 of 4" in capsys.readouterr().err
    assert rows[:4] == sources.load_examples(str(tmp_path / "own"), "train")
    assert [row.id for row in rows[4:]] == [
        f"own/train/{n}~{version}" for n in range(3) for version in (1, 2)
    ]
    assert len({row.question for row in rows}) == 10
    validated, tested = rows[5], rows[8]
    files.write_jsonl(tmp_path / "own" / "validation.jsonl", [validated.as_row()])
    assert written() == [row for row in rows if row != validated]
    monkeypatch.setattr(script, "TEST_SETS", ("gsm8k",))
    monkeypatch.setattr(sys, "argv", [*arguments, "--data_dir", str(tmp_path)])
    files.write_jsonl(tmp_path / "gsm8k" / "test.jsonl", [{"question": tested.question, "answer": "#### 1"}])
    assert written() == [row for row in rows if row not in (validated, tested)]


def test_the_tiny_tokenizers_are_those_that_their_script_trains():
    script = module("scripts/train_tiny_tokenizers.py")
    for name, digits in script.MOST_DIGITS.items():
        assert script.trained(digits).to_str() == (script.FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert set(script.MOST_DIGITS) == set(backbones.TINY)


def test_seconds_in_which_a_device_is_busy_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "lab" / "benchmarks")
    import profile_step

    cases = [
        ([], 0.0),
        ([(2.0, 2.5), (0.0, 1.0)], 1.5),
        # Of two streams: overlapping, one inside the other, and one that begins as another ends.
        ([(0.0, 2.0), (1.0, 3.0)], 3.0),
        ([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0)], 5.0),
        ([(0.0, 1.0), (1.0, 1.5)], 1.5),
    ]
    for intervals, seconds in cases:
        assert profile_step.busy_seconds(intervals) == pytest.approx(seconds)
    # Kernels are those of the device, without annotations.
    span = SimpleNamespace(start=1_000_000.0, end=1_500_000.0)
    places = [("aten::mm", "CPU", False), ("gemm", "CUDA", False), ("step", "CUDA", True)]
    events = [
        SimpleNamespace(
            name=name, device_type=SimpleNamespace(name=place), is_user_annotation=user, time_range=span
        )
        for name, place, user in places
    ]
    assert profile_step.kernels(SimpleNamespace(events=lambda: events)) == [("gemm", 1.0, 1.5)]
