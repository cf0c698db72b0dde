"""Where the time of a decode step and of a training update goes, by the torch profiler, at several numbers of rows.

    python lab/benchmarks/profile_step.py --output runs/benchmarks/generate
    python lab/benchmarks/profile_step.py --work decode update --method cot sequential --how eager graphs --rows 32 256

SmolLM2-135M in bfloat16 over real GSM8K questions. `decode` is a step of thinking, at c = 5 where a method has c.
`update` is forward, backward and AdamW under LoRA on all linears, in autocast, as the recipes of smollm2-135m train.

    eager       not compiled
    compiled    as by `training.compile`, for updates alone
    graphs      CUDA graphs, for decoding alone

The compiled steps in results/speed/generate/profile.json were an option of commit c901c920.

On a CPU: the shares of a step's self times by kind of work. On a GPU: its kernels, the share of the step during which
the GPU is busy, and the ten kernels that take longest. A step is timed without the profiler, which makes it slower.
Table to stdout, then one JSON line; profile.json into the output folder, which is written after each profile.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import shared
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile
from work import FACTOR, Cell, Unending, best_device, load_chains, load_model, load_questions, make_job

from colar import files, progress
from colar.engine.engine import Engine
from colar.methods.base import Batch
from colar.model.latent_lm import LoraSettings
from colar.training import preflight
from colar.training.objective import Objective

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::linear", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "fused kernels": ("## Call CompiledFxGraph",),
    "guards and wrappers": ("TorchDynamo", "Torch-Compiled", "Pregraph", "AOTDispatcher"),
}
"""Kind -> beginnings of the profiler's names; any other name is one of the "other small kernels"."""
WARMUP = 10
"""Steps before those that count: the first ones also touch slots for the first time."""
STEPS = 20
UPDATES = 3
"""Steps and updates that are timed, and as many that are profiled. An update has ten thousand operations."""
LONGEST = 10
"""Kernels that are named."""


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    path = files.require_writable(args.output) / "profile.json"
    cells = list(itertools.product(args.work, args.method, args.how, args.rows))
    found: dict[str, dict[str, Any]] = {}
    for work, method, how, n in progress.track(cells, "profile"):
        if (work, how) in (("update", "graphs"), ("decode", "compiled")):
            continue
        found[f"{work}/{method}/{how}/{n}"] = measure(work, method, how, n, args)
        report = {"benchmark": "profile_step", "provenance": shared.provenance(), "cells": found}
        files.write_json(path, report)
    show(found)
    print(json.dumps(found))
    progress.say(f"wrote {path}")


def measure(work: str, method: str, how: str, n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step or an update with n rows, and what it consists of."""
    if work == "decode":
        return profiled(decoding(method, how, n, args), WARMUP, STEPS)
    with updating(method, how, n, args) as step:
        return profiled(step, UPDATES, UPDATES)


def profiled(step: Callable[[], None], warmup: int, steps: int) -> dict[str, Any]:
    """Time some steps behind those that warm up, and profile as many more."""
    seconds = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        step()
        shared.synchronize()
        seconds.append(time.perf_counter() - started)
    found = {"ms_per_step": 1e3 * median(seconds[warmup:])}
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
        shared.synchronize()
    if on_gpu:
        return found | of_gpu(kernels(profiler), steps, found["ms_per_step"])
    return found | of_cpu(profiler)


def kernels(profiled: Any) -> list[tuple[str, float, float]]:
    """Kernels and copies of a device under `torch.profiler.profile`: name, begin and end in seconds."""
    spans = []
    for event in profiled.events():
        # An annotation spans the kernels below it.
        if event.device_type.name != "CPU" and not event.is_user_annotation:
            spans.append((event.name, event.time_range.start / 1e6, event.time_range.end / 1e6))
    return spans


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the intervals (begin, end) runs: kernels of several streams overlap."""
    busy = 0.0
    latest = float("-inf")
    for begin, end in sorted(intervals):
        busy += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return busy


def of_gpu(spans: list[tuple[str, float, float]], steps: int, ms_per_step: float) -> dict[str, Any]:
    """Of one step: its kernels, the share in which the GPU is busy, and the kernels that take longest."""
    busy = 1e3 * busy_seconds((begin, end) for _, begin, end in spans) / steps
    times: dict[str, float] = {}
    for name, begin, end in spans:
        times[name] = times.get(name, 0.0) + 1e3 * (end - begin) / steps
    return {
        "kernels": len(spans) / steps,
        "busy_ms": busy,
        "busy": busy / ms_per_step,
        "longest": dict(sorted(times.items(), key=lambda each: -each[1])[:LONGEST]),
    }


def of_cpu(profiler: Any) -> dict[str, float]:
    """The share of each kind of work."""
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        kind = kind_of(event.key)
        times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total
    whole = sum(times.values())
    return {kind: spent / whole for kind, spent in sorted(times.items())}


def kind_of(event: str) -> str:
    """The kind of work that an event of the profiler belongs to, by the beginning of its name."""
    for kind, beginnings in KINDS.items():
        if event.startswith(beginnings):
            return kind
    return "other small kernels"


# The work


def decoding(name: str, how: str, n: int, args: argparse.Namespace) -> Callable[[], Any]:
    """A step of an engine with n rows."""
    lm, method = load_model(args.backbone, "bfloat16", name, best_device())
    examples = load_questions(args.source, args.data_dir)
    engine = Engine(lm, Unending(method), n, cuda_graphs=how == "graphs")
    factor = 1 if name == "cot" else FACTOR
    # Chains of 60 thoughts: no row ends before the last profiled step.
    for request in make_job(lm, method, examples, Cell("", n, 60 * factor), factor).requests:
        engine.submit(request)

    @torch.inference_mode()
    def step() -> None:
        engine.step()

    return step


@contextlib.contextmanager
def updating(name: str, how: str, n: int, args: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """An update of an adapter by n rows, inside the block."""
    lora = LoraSettings(r=16, lora_alpha=32, target_modules="all-linear")
    lm, method = load_model(args.backbone, "bfloat16", name, best_device(), lora)
    # Rows end with a token that there is.
    lm.template.eos_id = lm.template.separator_id
    examples = [example for example in load_chains(args.source, args.data_dir)[: 2 * n] if example.steps]
    rows = [method.encode(lm.template, each, Random(0), 0.0) for each in examples[:n]]
    tensors = {key: column.to(lm.device) for key, column in Batch.collate(rows).tensors().items()}
    objective = Objective(lm, method).train()
    optimizer = torch.optim.AdamW([weight for weight in lm.parameters() if weight.requires_grad], lr=1e-4)
    with preflight.prepared(lm, compiled=how == "compiled"):

        def step() -> None:
            with torch.autocast(lm.device.type, dtype=torch.bfloat16):
                loss = objective(num_items_in_batch=len(rows), **tensors)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step


# The report


def show(found: dict[str, dict[str, Any]]) -> None:
    table = shared.table("A step's time", ["", *found], texts=("",))
    names: list[str] = []
    for row in found.values():
        names += [name for name in row if name not in (*names, "longest")]
    for name in names:
        form = ",.1f" if name in ("ms_per_step", "busy_ms", "kernels") else ".0%"
        table.add_row(name, *(format(row.get(name, 0.0), form) for row in found.values()))
    console = Console(width=100)
    console.print(table)
    for cell, row in found.items():
        for name, ms in row.get("longest", {}).items():
            console.print(f"{cell}  {ms:8.3f} ms  {name[:60]}", highlight=False, markup=False)


def _arguments() -> argparse.Namespace:
    parser = shared.add_model_options(shared.options(__doc__, "generate"))
    parser.add_argument("--data-dir", type=Path, help="folder with upstream files; else $COLAR_DATA_DIR")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--work", nargs="+", choices=("decode", "update"), default=["decode"])
    parser.add_argument("--method", nargs="+", choices=("cot", "colar", "sequential"), default=["colar"])
    parser.add_argument("--how", nargs="+", choices=("compiled", "eager", "graphs"), default=["eager"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
