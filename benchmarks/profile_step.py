"""Where a decode step's time goes: the torch profiler's self times by kind of work, at several numbers of rows.

    python benchmarks/profile_step.py --output results/bench-generate

SmolLM2-135M in bfloat16 thinking in latents at c = 5 over real GSM8K questions, compiled as `colar evaluate --compile`
runs it, and with `--eager` without. The profiler itself costs a little: shares are what to read. Table to stdout,
then one JSON line; profile.json (profile-eager.json) into the output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import shared
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from work import Cell, Unending, make_job

from colar import files, progress
from colar.data import sources
from colar.engine.engine import Engine
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "aten::linear", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "fused kernels": ("## Call CompiledFxGraph",),
    "guards and wrappers": ("TorchDynamo", "Torch-Compiled", "Pregraph", "AOTDispatcher", "colar::"),
}
"""Kind -> beginnings of the profiler's names; what has none of them is "other small kernels"."""
WARMUP, STEPS = 10, 20
"""The first steps also touch slots for the first time."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="results/bench-generate", help="folder for the JSON file")
    parser.add_argument("--backbone", default="smollm2-135m", help="a name, a folder or a Hub id")
    parser.add_argument("--data-dir", type=Path, help="folder with upstream files; else $COLAR_DATA_DIR")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {n: measure(n, args) for n in progress.track(args.rows, "profile")}
    report = {
        "benchmark": "profile_step",
        "provenance": shared.provenance(),
        "rows": found,
    }
    name = "profile-eager.json" if args.eager else "profile.json"
    path = files.require_writable(args.output) / name
    files.write_json(path, report)
    show(found)
    print(json.dumps(found))
    progress.say(f"wrote {path}")


@torch.inference_mode()
def measure(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step with n rows, and the share of each kind of work."""
    lm = LatentLM.from_backbone(backbones.load(args.backbone, "bfloat16", 0)).eval()
    method = registry.build("colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    examples = [
        e for e in sources.load("gsm8k-aug", "test", data_dir=args.data_dir, skip_malformed=True) if e.steps
    ]
    engine = Engine(lm, Unending(method), n, compile=not args.eager)
    for request in make_job(lm, method, examples, Cell("", n, n, 300), 5).requests:
        engine.submit(request)
    seconds = []
    for _ in range(WARMUP + STEPS):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            engine.step()
    times: dict[str, float] = {}
    for event in profiled.key_averages():
        kind = next((k for k, names in KINDS.items() if event.key.startswith(names)), "other small kernels")
        times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total
    whole = sum(times.values())
    return {"ms_per_step": 1e3 * median(seconds[WARMUP:])} | {k: v / whole for k, v in sorted(times.items())}


def show(found: dict[int, dict[str, float]]) -> None:
    table = Table(title="A step's time")
    for column in ("", *(f"{n} rows" for n in found)):
        table.add_column(column, justify="right" if column else "left")
    names = dict.fromkeys(name for row in found.values() for name in row)
    for name in names:
        values = [row.get(name, 0.0) for row in found.values()]
        table.add_row(name, *(f"{v:.1f}" if name == "ms_per_step" else f"{v:.0%}" for v in values))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
