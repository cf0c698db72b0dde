"""Killed at random: does a run of two processes come to its end, and to the same end, however often one is killed?

    python lab/benchmarks/kill.py --output runs/benchmarks/kill

Three commands on the toy backbone, each by two processes on the CPU (gloo): SFT, GRPO, evaluation. Each is run once
without a kill. Then in a new folder one of the two processes, drawn at random, gets kill -9 at a random moment of that
time, ten times over: the other one must end by itself, with one line that says why. The same command then goes on from
what is on disk. At the end history, weights and records must be those of the run without a kill. Where a run ends
before its kill comes, it counts for nothing, and begins anew.

The processes are forked from a server that has the libraries in memory, as in the tests (tests/launch.py); torchrun
would end the survivor by a signal. The table goes to stdout, then one JSON line; the exit code is 1 where a survivor
did not end, said nothing or more than one line, or where a result differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from colar import files, progress
from colar.evaluation.provenance import collect_provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from launch import Group  # the server of processes is the tests'

TIMEOUT_S = 600
SMALL = (
    "--data.validation_size", "8", "--training.save_steps", "2",
    "--training.logging_steps", "1", "--training.report_to", "none", "--training.ddp_timeout", "120",
    "--validation.limits.max_latents", "8", "--validation.page_size", "0",
)  # fmt: skip
SFT = (
    "train",
    "tiny/cot",
    *SMALL,
    "--training.per_device_train_batch_size",
    "4",
    "--training.warmup_steps",
    "2",
)
GRPO_RECIPE = str(Path(__file__).resolve().parents[1] / "recipes" / "tiny" / "grpo-cot.yaml")
GRPO = (
    "train", GRPO_RECIPE, *SMALL, "--training.per_device_train_batch_size", "8", "--training.max_steps", "8",
    "--training.eval_steps", "4", "--grpo.num_iterations", "2", "--grpo.max_latents", "8",
)  # fmt: skip
EVALUATION = (
    "--limit", "120", "--decoding", "greedy", "sampled", "--seeds", "0", "1", "--max_latents", "12",
    "--timeout", "120",
)  # fmt: skip


@dataclass
class Run:
    """A command that two processes run, and the words that name its folder."""

    name: str
    words: tuple[str, ...]

    def start(self, folder: Path) -> Group:
        return Group(2, folder / "processes", command, [*self.words, "--output", str(folder / "out")])

    def result(self, folder: Path) -> dict[str, Any]:
        """All that must not depend on kills."""
        out = folder / "out"
        if self.name == "evaluation":
            records = [record for _, record in files.read_jsonl(out / "records.jsonl")]
            return {"records": sorted(json.dumps({**record, "seconds": 0}) for record in records)}
        history = []
        for row in files.read_json(out / "history.json"):
            history.append({key: value for key, value in row.items() if not of_the_last_start(key)})
        weights = {}
        for path in sorted((out / "best").glob("*.safetensors")):
            weights.update({name: value.tolist() for name, value in load_file(path).items()})
        return {"history": history, "weights": weights}


def of_the_last_start(key: str) -> bool:
    """Whether a quantity is a time or a speed, or Trainer's mean over the updates since the last start."""
    return "second" in key or "runtime" in key or key == "train_loss"


def command(words: Sequence[str]) -> int:
    """`colar` in a process of the group."""
    from colar.cli import main

    code = main(words)
    if code:
        sys.exit(code)
    return code


def kills(
    run: Run, n: int, whole: dict[str, Any], seconds: float, folder: Path, rng: Random
) -> dict[str, Any]:
    """Kill one of the two processes `n` times, finish the run, and compare it with `whole`."""
    found: list[dict[str, Any]] = []
    early = 0
    while len(found) < n:
        group = run.start(folder)
        rank = rng.randrange(2)
        moment = rng.uniform(0, seconds)
        time.sleep(moment)
        group.processes[rank].kill()
        killed = time.monotonic()
        outcomes = group.wait(TIMEOUT_S)
        # It had come to its end: only a run that goes on can be killed.
        if outcomes[1 - rank].code == 0:
            early += 1
            shutil.rmtree(folder)
            continue
        lines = [line for line in outcomes[1 - rank].stderr.splitlines() if line.startswith("colar ")]
        found.append(
            {
                "rank": rank,
                "after_seconds": round(moment, 2),
                "survivor_ended_after_seconds": round(time.monotonic() - killed, 2),
                "survivor_code": outcomes[1 - rank].code,
                "lines": lines,
            }
        )
        progress.say(f"{run.name}: kill {len(found)} of {n}: {lines}")
    outcomes = run.start(folder).wait(TIMEOUT_S)
    ended = [outcome.code for outcome in outcomes] == [0, 0]
    return {
        "run": run.name,
        "seconds_without_a_kill": round(seconds, 2),
        "kills": found,
        "ended_before_the_kill": early,
        "came_to_its_end": ended,
        "same_result": ended and run.result(folder) == whole,
    }


def is_good(row: dict[str, Any]) -> bool:
    """Every survivor ended with one line, and the result is the same."""
    told = all(len(each["lines"]) == 1 for each in row["kills"])
    return bool(row["same_result"] and told)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="runs/benchmarks/kill", help="folder for report.json")
    parser.add_argument("--work", default="runs/bench-kill", help="folder for the runs, emptied first")
    parser.add_argument("--kills", type=int, default=10, help="kills of each run")
    parser.add_argument("--rows", type=int, default=96, help="training rows of SFT and GRPO")
    parser.add_argument("--runs", type=int, default=3, help="the first N of SFT, GRPO and evaluation")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    output = files.require_writable(args.output)
    work = Path(args.work)
    shutil.rmtree(work, ignore_errors=True)

    # GRPO and evaluation take the checkpoint of the SFT run that nobody killed.
    best = str(work / "sft" / "whole" / "out" / "best")
    rows = ("--data.train_size", str(args.rows))
    runs = [
        Run("sft", (*SFT, *rows)),
        Run("grpo", (*GRPO, *rows, "--model.init_from", best)),
        Run("evaluation", ("evaluate", best, *EVALUATION)),
    ]
    rng = Random(args.seed)
    found = []
    for run in runs[: args.runs]:
        started = time.monotonic()
        outcomes = run.start(work / run.name / "whole").wait(TIMEOUT_S)
        seconds = time.monotonic() - started
        if [outcome.code for outcome in outcomes] != [0, 0]:
            raise SystemExit(f"{run.name} failed without a kill:\n{outcomes[0].stderr}\n{outcomes[1].stderr}")
        # The first start also waits for the server's imports: a second one tells the time of a run.
        if run is runs[0] and args.kills:
            started = time.monotonic()
            run.start(work / run.name / "again").wait(TIMEOUT_S)
            seconds = time.monotonic() - started
        whole = run.result(work / run.name / "whole")
        found.append(kills(run, args.kills, whole, seconds, work / run.name / "killed", rng))

    table = Table("run", "seconds", "kills", "one line", "same result")
    for row in found:
        lines = sum(len(each["lines"]) == 1 for each in row["kills"])
        table.add_row(
            row["run"],
            f"{row['seconds_without_a_kill']:.1f}",
            str(len(row["kills"])),
            str(lines),
            str(row["same_result"]),
        )
    Console().print(table)
    files.write_json(
        output / "report.json", {"provenance": collect_provenance(), "seed": args.seed, "rows": found}
    )
    good = all(is_good(row) for row in found)
    summary = {row["run"]: {"kills": len(row["kills"]), "same_result": row["same_result"]} for row in found}
    print(json.dumps({**summary, "good": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
