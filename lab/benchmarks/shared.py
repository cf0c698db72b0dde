"""Common to the benchmarks: options, runs in processes of their own, medians, tables, and the machine's description."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from rich.table import Table

from colar import files, progress
from colar.evaluation.provenance import collect_provenance

Run = dict[str, Any]
"""The JSON of one system's run: "system" and the numbers that it measured."""


HERE = "--here"


def options(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The options of every benchmark: its output folder and the threads."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", default=f"runs/benchmarks/{name}", help="folder for what is measured")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    return made


def parser(script: str, doc: str | None, systems: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """The options of a benchmark of systems; by `--system` a script runs one of them in a process of its own."""
    made = options(doc, Path(script).stem.replace("_", "-"))
    made.add_argument("--data-dir", type=Path, help="folder with upstream files; else $COLAR_DATA_DIR")
    made.add_argument("--rounds", type=int, default=rounds, help="runs of each system; medians are shown")
    made.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="time for all runs: what is left then is named, and not run",
    )
    made.add_argument("--systems", nargs="+", choices=systems, default=list(systems))
    made.add_argument("--system", choices=systems, help=argparse.SUPPRESS)
    made.add_argument(
        HERE, action="store_true", help="run the systems in this process: to try the script, not to measure"
    )
    return made


def add_model_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options of the benchmarks that run with any backbone and any questions."""
    parser.add_argument("--backbone", default="smollm2-135m", help="a name, a folder or a Hub id")
    parser.add_argument("--source", default="gsm8k-aug", help="a source (`colar data list`) or a file")
    return parser


def run_systems(
    script: str, order: Sequence[str], said: Callable[[Run], str], minutes: float = math.inf
) -> list[Run]:
    """Run the systems in this order, each in a process of its own; `said` is what to print of a run.

    A system that fails, or that the minutes do not suffice for, is a run with an "error"; the others go on.
    """
    runs: list[Run] = []
    deadline = time.monotonic() + 60 * minutes
    for system in progress.track(order, Path(script).stem):
        try:
            run = run_in_process(script, system, deadline - time.monotonic())
            progress.say(f"{system}: {said(run)}")
        except SystemExit as failed:
            run = {"system": system, "error": str(failed)}
            progress.say(str(failed))
        runs.append(run)
    if all("error" in run for run in runs):
        raise SystemExit("no system has a result")
    return runs


def run_in_process(script: str, system: str, seconds: float = math.inf) -> Run:
    """Run one system by the script with its own arguments and `--system`: the JSON of its last line.

    SystemExit where it fails, or is not done in time.
    """
    if seconds <= 0:
        raise SystemExit(f"{system}: not run, the time is up")
    words = [script, *sys.argv[1:], "--system", system]
    if HERE in words:
        output = _run_here(words)
    else:
        # A process of its own: no system inherits another one's compiled code, memory or threads.
        limit = None if math.isinf(seconds) else seconds
        try:
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{system}: stopped after {seconds:.0f} s, the time is up") from None
        if done.returncode:
            raise SystemExit(f"{system} failed (exit code {done.returncode}):\n{done.stderr[-4000:]}")
        output = done.stdout
    # Libraries print above it.
    last_line = output.strip().splitlines()[-1]
    result: Run = json.loads(last_line)
    return result


def _run_here(words: list[str]) -> str:
    """Run a script in this process; returns what it prints to stdout."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(printed):
        runpy.run_path(words[0], run_name="__main__")
    return printed.getvalue()


def rounds_of(systems: Sequence[str], rounds: int) -> list[str]:
    """All systems, then all of them again: a noisy minute of the machine hits every system alike."""
    return list(systems) * rounds


def medians(runs: Sequence[Run], systems: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """System -> cell -> quantity -> its median over the runs that have the cell; without the systems that failed."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for system in systems:
        mine: dict[str, list[dict[str, float]]] = {}
        for run in runs:
            if run["system"] == system:
                for name, cell in run.get("cells", {}).items():
                    mine.setdefault(name, []).append(cell)
        if mine:
            found[system] = {
                name: {key: median(cell[key] for cell in cells) for key in cells[0]}
                for name, cells in mine.items()
            }
    return found


def publish(
    report: dict[str, Any], output: str, show: Callable[[dict[str, Any]], None], summary: object
) -> None:
    """Write report.json, print the table, then `summary` as one line of JSON. Exit code 1 where a run has failed."""
    path = files.require_writable(output) / "report.json"
    files.write_json(path, report)
    show(report)
    print(json.dumps(summary))
    progress.say(f"wrote {path}")
    failed = [run["system"] for run in report.get("runs", []) if "error" in run]
    if failed:
        raise SystemExit(f"without a result: {', '.join(failed)}")


def table(title: str, columns: Sequence[str], texts: Collection[str]) -> Table:
    """An empty table; the columns named in `texts` are aligned left, numbers right."""
    made = Table(title=title)
    for column in columns:
        made.add_column(column, justify="left" if column in texts else "right")
    return made


def shown(value: float | None) -> str:
    """Three digits; empty where a system has no such number."""
    return "" if value is None else f"{value:.3g}"


def reset_peak() -> None:
    """Start to measure peak memory anew (Linux lets a process do so)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def synchronize() -> None:
    """Wait until a GPU has done all that was asked of it: a time that is taken before is that of asking."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """GiB: of the GPU's memory, or of this process since the last reset."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return used_gib()


def used_gib(process: int | str = "self") -> float:
    """GiB that are in use on the GPU, by whichever process, or that a process of the CPU had at most."""
    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        return (whole - free) / 2**30
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def provenance() -> dict[str, Any]:
    """The command, versions, machine, commit and GPU (null without one) behind a report."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return collect_provenance() | {"accelerator": gpu}
