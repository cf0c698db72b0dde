"""Where a decode step's time goes: the torch profiler's self times by kind of work, at several numbers of rows.

    python lab/benchmarks/profile_step.py --output results/speed/generate

SmolLM2-135M in bfloat16 thinking in latents at c = 5 over real GSM8K questions, compiled as `colar evaluate --compile`
runs it; with `--eager`, not compiled. The profiler itself takes a little time, so read the shares. Table to stdout,
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
from torch.profiler import ProfilerActivity, profile
from work import FACTOR, Cell, Unending, load_model, load_questions, make_job

from colar import files, progress
from colar.engine.engine import Engine

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "aten::linear", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "fused kernels": ("## Call CompiledFxGraph",),
    "guards and wrappers": ("TorchDynamo", "Torch-Compiled", "Pregraph", "AOTDispatcher", "colar::"),
}
"""Kind -> beginnings of the profiler's names; any other name is one of the "other small kernels"."""
WARMUP = 10
"""Steps before those that count: the first ones also touch slots for the first time."""
STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="results/speed/generate", help="folder for the JSON file")
    shared.add_model_options(parser)
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
    lm, method = load_model(args.backbone, "bfloat16", "colar")
    examples = load_questions(args.source, args.data_dir)
    engine = Engine(lm, Unending(method), n, compile=not args.eager)
    # Chains of 60 latents: no row ends before the last profiled step.
    for request in make_job(lm, method, examples, Cell("", n, n, 300), FACTOR).requests:
        engine.submit(request)

    # Timed without the profiler, which makes steps slower, then profiled.
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
        kind = kind_of(event.key)
        times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total
    whole = sum(times.values())
    found = {"ms_per_step": 1e3 * median(seconds[WARMUP:])}
    for kind, spent in sorted(times.items()):
        found[kind] = spent / whole
    return found


def kind_of(event: str) -> str:
    """The kind of work that an event of the profiler belongs to, by the beginning of its name."""
    for kind, beginnings in KINDS.items():
        if event.startswith(beginnings):
            return kind
    return "other small kernels"


def show(found: dict[int, dict[str, float]]) -> None:
    table = shared.table("A step's time", ["", *(f"{n} rows" for n in found)], texts=("",))
    names: list[str] = []
    for row in found.values():
        names += [name for name in row if name not in names]
    for name in names:
        form = ".1f" if name == "ms_per_step" else ".0%"
        table.add_row(name, *(format(row.get(name, 0.0), form) for row in found.values()))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
