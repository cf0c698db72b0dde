"""What the benchmarks share: runs in processes of their own, and what they say of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def in_a_process(script: str, system: str) -> dict[str, Any]:
    """The run of one system, by the script with its own arguments and `--system`: the JSON of its last line."""
    command = [sys.executable, script, *sys.argv[1:], "--system", system]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def command(script: str) -> str:
    return " ".join(["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]])


def accelerator() -> str | None:
    """The GPU, or whether the processor multiplies bfloat16 matrices in hardware; null for neither."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    path = Path("/proc/cpuinfo")
    found = path.read_text() if path.exists() else ""
    return ", ".join(flag for flag in ("avx512_bf16", "amx_bf16") if flag in found) or None
