"""Milliseconds a step and questions a second of thinking, ours beside what one would use instead, in one run.

    python benchmarks/generate.py --output results/bench-generate

SmolLM2-135M in bfloat16, real GSM8K questions, greedy; chains are forced to given lengths and answers to `ANSWER`
tokens, so that all systems do the same work. A chain of L tokens is L/5 latents for CoLaR at c = 5.

    colar5      ours, latents at c = 5, the step compiled
    colar5-eager  the same, not compiled
    cot         ours, the chain in tokens, the step compiled
    hf-cot      transformers' `generate`, same weights, the chain in tokens: a static batch until its last row ends
    published   the latent loop as it was published, c = 5: left-padded static batch until all are done, logits at every
                prompt position, all hidden states, and the answer by `generate` over everything again
    colar5-growth, cot-growth   ours again: longer chains, longer lines; in every fourth round, from the first on
    floor       the bare matrix products of a step, LM head included

Every system runs all cells in a process of its own; rounds alternate between the systems, so that a noisy minute hits
all. Medians over the rounds. Thinking is timed from the question read to the last latent, or token of the chain, and
again with the reading. The table goes to stdout, then one JSON line; the raw runs into the output folder.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import shared
import torch
from rich.console import Console
from rich.table import Table
from work import ALL, ANSWER, FACTOR, Cell, Job, floor, hf_cot, make_job, ours, published

from colar import files, progress
from colar.data import sources
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM

CELLS = (
    Cell("b1/25", 1, 1, 25),
    Cell("b1/100", 1, 1, 100, systems=(*ALL, "colar5-eager")),
    Cell("b8/25", 8, 8, 25),
    Cell("b32/25", 32, 32, 25),
    Cell("b32/100", 32, 32, 100, systems=(*ALL, "colar5-eager")),
    Cell("b32/mixed", 32, 32, None, systems=(*ALL, "colar5-eager")),
    Cell("b64/25", 64, 64, 25),
    Cell("group8", 32, 4, 25, samples=8),
    # Growth: with the number of latents, and with the line.
    *(Cell(f"latents/{n}", 32, 32, FACTOR * n, systems=("colar5-growth",)) for n in (10, 30, 100, 300)),
    *(Cell(f"queue/{n}", 32, n, None, systems=("colar5-growth", "cot-growth")) for n in (64, 128, 256)),
)
SYSTEMS = ("colar5", "colar5-eager", "cot", "hf-cot", "published", "floor", "colar5-growth", "cot-growth")


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return
    runs = []
    for system in progress.track(_turns(args), "generate"):
        runs.append(shared.in_a_process(__file__, system))
        progress.say(f"{system}: {runs[-1]['seconds']:.0f} s")
    report = summarise(runs, args)
    path = files.require_writable(args.output) / "report.json"
    files.write_json(path, report)
    show(report)
    print(json.dumps(report["ratios"]))
    progress.say(f"wrote {path}")


def _turns(args: argparse.Namespace) -> list[str]:
    return [
        system
        for i in range(args.rounds)
        for system in args.systems
        if i % 4 == 0 or not system.endswith("-growth")
    ]


@torch.inference_mode()
def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """One system's run over all its cells."""
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = LatentLM.from_backbone(backbones.load(args.backbone, "bfloat16", 0)).to(device).eval()
    lm.template.eos_id = -1  # no token's: answers end at their limit
    cot = system in ("cot", "cot-growth", "hf-cot")
    method = registry.build("cot" if cot else "colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    if system == "floor":
        cells = {f"b{n}": {"ms_per_step": floor(lm, n)} for n in (1, 8, 32, 64)}
        return {"system": system, "cells": cells, "seconds": time.perf_counter() - started}
    work: Callable[[LatentLM, Any, Cell, Job], dict[str, float]] = {
        "hf-cot": hf_cot,
        "published": published,
        "colar5-eager": partial(ours, compile=False),
    }.get(system, ours)
    examples = [
        e for e in sources.load(args.source, "test", data_dir=args.data_dir, skip_malformed=True) if e.steps
    ]
    cells = {}
    for cell in [c for c in CELLS if system in c.systems and (not args.cells or c.name in args.cells)]:
        job = make_job(lm, method, examples, cell, 1 if cot else FACTOR)
        for size in () if cells else (1, 8):  # kernels, caches, and a graph for one row and one for several
            work(
                lm,
                method,
                Cell("", size, size, 10),
                make_job(lm, method, examples, Cell("", size, size, 10), 1),
            )
        _reset_peak()
        cells[cell.name] = work(lm, method, cell, job) | {"peak_memory_gib": _peak()}
        cells[cell.name]["questions_per_second"] = len(job.requests) / cells[cell.name]["seconds"]
    return {"system": system, "cells": cells, "seconds": time.perf_counter() - started}


# The report

RATIOS: dict[str, tuple[tuple[str, str, str], tuple[str, str, str], float]] = {
    # key: (system, cell, quantity) over (system, cell, quantity), times
    "step_over_floor_b1": (("colar5", "b1/100", "ms_per_step"), ("floor", "b1", "ms_per_step"), 1.0),
    "step_over_floor_b32": (("colar5", "b32/100", "ms_per_step"), ("floor", "b32", "ms_per_step"), 1.0),
    "vs_published_b32_mixed": (("published", "b32/mixed", "seconds"), ("colar5", "b32/mixed", "seconds"), 1.0),
    "vs_published_group8": (("published", "group8", "seconds"), ("colar5", "group8", "seconds"), 1.0),
    "colar5_vs_hf_cot_b1": (("hf-cot", "b1/100", "seconds"), ("colar5", "b1/100", "seconds"), 1.0),
    "colar5_vs_hf_cot_b32_mixed": (("hf-cot", "b32/mixed", "seconds"), ("colar5", "b32/mixed", "seconds"), 1.0),
    "own_cot_vs_hf_cot_b32": (("hf-cot", "b32/100", "seconds"), ("cot", "b32/100", "seconds"), 1.0),
    "own_cot_vs_hf_cot_b1": (("hf-cot", "b1/100", "seconds"), ("cot", "b1/100", "seconds"), 1.0),
    "colar5_vs_own_cot_thinking_over_length_ratio": (
        ("cot", "b32/100", "thinking_seconds"), ("colar5", "b32/100", "thinking_seconds"), 1 / FACTOR,
    ),
    "colar5_vs_own_cot_thinking_over_length_ratio_b1": (
        ("cot", "b1/100", "thinking_seconds"), ("colar5", "b1/100", "thinking_seconds"), 1 / FACTOR,
    ),
    "colar5_vs_own_cot_reading_and_thinking_over_length_ratio": (
        ("cot", "b32/100", "reading_and_thinking_seconds"),
        ("colar5", "b32/100", "reading_and_thinking_seconds"), 1 / FACTOR,
    ),
    "colar5_vs_own_cot_reading_and_thinking_over_length_ratio_b1": (
        ("cot", "b1/100", "reading_and_thinking_seconds"),
        ("colar5", "b1/100", "reading_and_thinking_seconds"), 1 / FACTOR,
    ),
}  # fmt: skip


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, the ratios that matter, and everything that they come from."""
    cells = shared.medians(runs, args.systems)

    def value(where: tuple[str, str, str]) -> float | None:
        system, cell, quantity = where
        return cells.get(system, {}).get(cell, {}).get(quantity)

    ratios = {}
    for key, (over, under, times) in RATIOS.items():
        a, b = value(over), value(under)
        if a is not None and b is not None:
            ratios[key] = a / b * times
    return {
        "benchmark": "generate",
        "setting": {
            "backbone": args.backbone,
            "source": args.source,
            "rounds": args.rounds,
            "threads": args.threads,
            "precision": "bfloat16",
            "answer_tokens": ANSWER,
            "compression_factor": FACTOR,
        },
        "provenance": shared.provenance(),
        "ratios": ratios,
        "cells": cells,
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    setting = report["setting"]
    table = Table(
        title=f"{setting['backbone']}, {setting['precision']}, {setting['threads']} threads, chains of so many "
        f"tokens (c = {setting['compression_factor']}: a fifth as many latents), medians of {setting['rounds']}"
    )
    columns = ("cell", "system", "questions/s", "ms/step", "thinking s", "first answer token s", "peak GiB")
    for column in columns:
        table.add_column(column, justify="left" if column in ("cell", "system") else "right")
    names = dict.fromkeys(name for cells in report["cells"].values() for name in cells)
    for name in names:
        for system, cells in report["cells"].items():
            if name in cells:
                c = cells[name]
                shown = [c.get("questions_per_second"), c["ms_per_step"], c.get("thinking_seconds")]
                shown += [c.get("first_answer_token_seconds"), c.get("peak_memory_gib")]
                table.add_row(name, system, *("" if v is None else f"{v:.3g}" for v in shown))
        table.add_section()
    Console(width=110).print(table)


def _reset_peak() -> None:
    """Start to measure peak memory anew (Linux lets a process do so)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak() -> float:
    """GiB: of the GPU's memory, or of this process since the last reset."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _arguments() -> argparse.Namespace:
    parser = shared.any_model(shared.parser(__file__, __doc__, SYSTEMS, rounds=5))
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="only these")
    return parser.parse_args()


if __name__ == "__main__":
    main()
