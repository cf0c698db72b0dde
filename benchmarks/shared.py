"""What the benchmarks share: options, runs in processes of their own, medians, and what they say of the machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from colar import files


def parser(script: str, doc: str | None, systems: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """The options of all of them; `--system` is how a script runs one of its systems in a process of its own."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = f"results/bench-{Path(script).stem.replace('_', '-')}"
    made.add_argument("--output", default=folder, help="folder for report.json")
    made.add_argument("--data-dir", type=Path, help="folder with upstream files; else $COLAR_DATA_DIR")
    made.add_argument("--rounds", type=int, default=rounds, help="runs of each system; medians are shown")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    made.add_argument("--systems", nargs="+", choices=systems, default=list(systems))
    made.add_argument("--system", choices=systems, help=argparse.SUPPRESS)
    return made


def any_model(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options of those that run with any backbone and any questions."""
    parser.add_argument("--backbone", default="smollm2-135m", help="a name, a folder or a Hub id")
    parser.add_argument("--source", default="gsm8k-aug", help="a source (`colar data list`) or a file")
    return parser


def in_a_process(script: str, system: str) -> dict[str, Any]:
    """The run of one system, by the script with its own arguments and `--system`: the JSON of its last line."""
    command = [sys.executable, script, *sys.argv[1:], "--system", system]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def medians(runs: Sequence[dict[str, Any]], systems: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """System -> cell -> quantity -> its median over the system's runs."""
    found = {}
    for system in systems:
        mine = [run["cells"] for run in runs if run["system"] == system]
        found[system] = {
            cell: {key: median(run[cell][key] for run in mine) for key in mine[0][cell]} for cell in mine[0]
        }
    return found


def provenance() -> dict[str, Any]:
    """The command, versions, machine and commit behind a report."""
    return files.provenance() | {"accelerator": accelerator()}


def accelerator() -> str | None:
    """The GPU, or whether the processor multiplies bfloat16 matrices in hardware; null for neither."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    path = Path("/proc/cpuinfo")
    found = path.read_text() if path.exists() else ""
    return ", ".join(flag for flag in ("avx512_bf16", "amx_bf16") if flag in found) or None
