"""Milliseconds a step and questions a second of thinking, ours beside what one would use instead, in one run.

    python lab/benchmarks/generate.py --output runs/benchmarks/generate

SmolLM2-135M in bfloat16, real GSM8K questions, greedy. Chains are forced to given lengths and answers to `ANSWER`
tokens, so that all systems do the same work. A chain of L tokens is L/5 latents for CoLaR at c = 5.

    colar5      ours, latents at c = 5
    cot         ours, the chain in tokens
    colar2      as colar5, at c = 2
    sequential2, sequential5    the sequential method at c = 2 and 5: every thought is c tokens, chosen one by one
    sequential2-shortlist, sequential5-shortlist    the same, a group's tokens behind its first chosen among those of
                the source's training chains
    hf-cot      transformers' `generate`, same weights, the chain in tokens: a static batch until its last row ends
    published   the latent loop as it was published, c = 5: left-padded static batch until all are done, logits at every
                prompt position, all hidden states, and the answer by `generate` over everything again

On request only (--systems, --cells):

    b256/100    a cell for a GPU
    cot-graphs, ...     each of ours without a shortlist, its steps recorded as CUDA graphs
    hf-cot-static       hf-cot with a static cache, which transformers compiles on a GPU
    cot-float32, cot-int8, cot-int4     weights in float32; linear layers of the model in float32 quantised to int8;
                those of the model in bfloat16 to int4 (torchao)

In committed records the steps of ours were compiled (an option of commit c901c920), unless a name ends in `-eager`.
They also have systems and cells that no page shows: sampling, growth, bare matrix products (commit ee806d3b has them).

Every system runs all cells in a process of its own. Rounds alternate between the systems, so that a noisy minute hits
all of them. Medians over the rounds. Thinking is timed from the prefilled question to the last latent, or token of the
chain, and again with the prefill. The table goes to stdout, then one JSON line; report.json holds the raw runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import shared
import torch
from rich.console import Console
from work import (
    ANSWER,
    FACTOR,
    Cell,
    Job,
    best_device,
    hf_cot,
    load_chains,
    load_model,
    load_questions,
    make_job,
    ours,
    published,
)

from colar.data.example import Example
from colar.model import quantized
from colar.model.latent_lm import LatentLM

OURS = ("cot", "colar2", "colar5", "sequential2", "sequential5")
DEFAULT = (*OURS, "sequential2-shortlist", "sequential5-shortlist", "hf-cot", "published")
WEIGHTS = {"float32": ("float32", None), "int8": ("float32", "int8"), "int4": ("bfloat16", "int4")}
"""Of systems that have this in their name, dtype and quantised weights."""
PRECISIONS = tuple(f"cot-{name}" for name in WEIGHTS)
SYSTEMS = (*DEFAULT, "hf-cot-static", *(f"{name}-graphs" for name in OURS), *PRECISIONS)
CELLS = (
    Cell("b1/25", 1, 25),
    Cell("b1/100", 1, 100),
    Cell("b32/25", 32, 25),
    Cell("b32/100", 32, 100),
    Cell("b32/mixed", 32, None),
    Cell("b256/100", 256, 100),
)


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return
    order = shared.rounds_of(args.systems, args.rounds)
    runs = shared.run_systems(
        __file__, order, lambda run: f"{run['seconds']:.0f} s, {steps_of(run)}", args.minutes
    )
    report = summarise(runs, args)
    shared.publish(report, args.output, show, report["cells"])


def steps_of(run: dict[str, Any]) -> str:
    """Milliseconds of a step in each cell of a run."""
    return ", ".join(
        f"{cell} {shared.shown(found['ms_per_step'])} ms" for cell, found in run["cells"].items()
    )


@torch.inference_mode()
def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """One system's run over all its cells."""
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    # Of hf-cot the first part is the library.
    name = system.removeprefix("hf-").split("-")[0]
    thinks_in_tokens = name == "cot"
    method_name = name.rstrip("25") if name in OURS else "colar"
    config: dict[str, Any] = {}
    chains: list[Example] = []
    if system.endswith("-shortlist"):
        config["shortlist"] = True
        chains = load_chains(args.source, args.data_dir)
    device = best_device()
    dtype, weights = next((how for key, how in WEIGHTS.items() if f"-{key}" in system), ("bfloat16", None))
    lm, method = load_model(args.backbone, dtype, method_name, device, config=config, chains=chains)
    if weights is not None:
        quantized.quantize(lm, weights, torch.device(device))
    work = _work_of(system)
    compression_factor = 2 if name.endswith("2") else FACTOR
    if thinks_in_tokens:
        compression_factor = 1
    examples = load_questions(args.source, args.data_dir)
    # Not counted: kernels and caches.
    for size in (1, 8):
        small = Cell("", size, 10)
        work(lm, method, small, make_job(lm, method, examples, small, 1))

    cells = {}
    for cell in CELLS:
        if cell.name not in args.cells:
            continue
        job = make_job(lm, method, examples, cell, compression_factor)
        shared.reset_peak()
        found = work(lm, method, cell, job)
        found["peak_memory_gib"] = shared.peak_gib()
        found["questions_per_second"] = len(job.requests) / found["seconds"]
        cells[cell.name] = found
    run = {"system": system, "cells": cells, "seconds": time.perf_counter() - started}
    if chains:
        run["shortlist"] = {"rows": len(chains), "tokens": len(method.config.shortlist_ids)}
    return run


def _work_of(system: str) -> Callable[[LatentLM, Any, Cell, Job], dict[str, float]]:
    """The function that does a system's jobs."""
    if system.startswith("hf-cot"):
        return partial(hf_cot, static=system.endswith("-static"))
    if system == "published":
        return published
    return partial(ours, cuda_graphs=system.endswith("-graphs"))


# The report


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and the runs that they come from."""
    counted = [run["shortlist"] for run in runs if "shortlist" in run]
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
            "shortlist": counted[0] if counted else None,
        },
        "provenance": shared.provenance(),
        "cells": shared.medians(runs, args.systems),
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    setting = report["setting"]
    title = (
        f"{setting['backbone']}, {setting['precision']}, {setting['threads']} threads, medians of {setting['rounds']}; "
        f"a cell is batch/tokens of a chain (latents at c = {setting['compression_factor']}: a fifth)"
    )
    columns = ("cell", "system", "questions/s", "ms/step", "thinking s", "first answer token s", "peak GiB")
    quantities = (
        "questions_per_second",
        "ms_per_step",
        "thinking_seconds",
        "first_answer_token_seconds",
        "peak_memory_gib",
    )
    table = shared.table(title, columns, texts=("cell", "system"))
    names = []
    for cells in report["cells"].values():
        names += [name for name in cells if name not in names]
    for name in names:
        for system, cells in report["cells"].items():
            if name in cells:
                numbers = [shared.shown(cells[name].get(quantity)) for quantity in quantities]
                table.add_row(name, system, *numbers)
        table.add_section()
    Console(width=110).print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.add_model_options(shared.parser(__file__, __doc__, SYSTEMS, rounds=5))
    names = [cell.name for cell in CELLS]
    usual = [name for name in names if not name.startswith("b256")]
    parser.add_argument("--cells", nargs="+", choices=names, default=usual, help="only these")
    parser.set_defaults(systems=list(DEFAULT))
    return parser.parse_args()


if __name__ == "__main__":
    main()
