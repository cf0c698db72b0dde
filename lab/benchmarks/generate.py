"""Milliseconds a step and questions a second of thinking, ours beside what one would use instead, in one run.

    python lab/benchmarks/generate.py --output runs/benchmarks/generate

SmolLM2-135M in bfloat16, real GSM8K questions, greedy where no other is named. Chains are forced to given lengths and
answers to `ANSWER` tokens, so that all systems do the same work. A chain of L tokens is L/5 latents for CoLaR at c = 5.

    colar5      ours, latents at c = 5
    cot         ours, the chain in tokens
    colar2      as colar5, at c = 2
    sequential2, sequential5    the sequential method at c = 2 and 5: every thought is c tokens, chosen one by one
    sequential2-shortlist, sequential5-shortlist    the same, a group's tokens behind its first chosen among those of
                the source's training chains
    hf-cot      transformers' `generate`, same weights, the chain in tokens: a static batch until its last row ends
    hf-cot-static  the same with a static cache, which transformers compiles on a GPU
    published   the latent loop as it was published, c = 5: left-padded static batch until all are done, logits at every
                prompt position, all hidden states, and the answer by `generate` over everything again
    colar5-sampled, cot-sampled    ours at temperature 1 (and latent_temperature 1): each step draws
    colar5-nucleus, cot-nucleus    the same at top_p 0.9
    colar5-growth, cot-growth   ours again: longer chains, longer queues; in every fourth round, from the first on
    floor       the bare matrix products of a step, LM head included

For a GPU, on request only: `b256/...` cells, and each of cot, colar2, colar5, sequential2 and sequential5 with
`-graphs` (its steps recorded as CUDA graphs) behind its name. On request as well:

    cot-float32, cot-int8, cot-int4     weights in float32; linear layers of the model in float32 quantised to int8;
                those of the model in bfloat16 to int4 (torchao)

In committed records the steps of ours were compiled (an option of commit c901c920), unless a name ends in `-eager`.

Every system runs all cells in a process of its own. Rounds alternate between the systems, so that a noisy minute hits
all of them. Medians over the rounds. Thinking is timed from the question read to the last latent, or token of the
chain, and again with the reading. The table goes to stdout, then one JSON line; report.json holds the raw runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import shared
import torch
from rich.console import Console
from work import (
    ALL,
    ANSWER,
    FACTOR,
    Cell,
    Job,
    best_device,
    floor,
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

SEQUENTIAL = ("sequential2", "sequential5", "sequential2-shortlist", "sequential5-shortlist")
OURS = ("cot", "colar2", "colar5", "sequential2", "sequential5")
WEIGHTS = {"float32": ("float32", None), "int8": ("float32", "int8"), "int4": ("bfloat16", "int4")}
"""Of systems that have this in their name, dtype and quantised weights."""
PRECISIONS = tuple(f"cot-{name}" for name in WEIGHTS)
ON_REQUEST = (*(f"{name}-graphs" for name in OURS), *PRECISIONS)
LONG = (*ALL, "hf-cot-static", "colar2", *SEQUENTIAL, *ON_REQUEST)
TOP_P = {"colar5-sampled": 1.0, "cot-sampled": 1.0, "colar5-nucleus": 0.9, "cot-nucleus": 0.9}
"""Systems that draw at temperature 1, and their top_p; all others are greedy."""
CELLS = (
    Cell("b1/25", 1, 1, 25, systems=LONG),
    Cell("b1/100", 1, 1, 100, systems=LONG),
    Cell("b8/25", 8, 8, 25),
    Cell("b32/25", 32, 32, 25, systems=(*ALL, *PRECISIONS)),
    Cell("b32/100", 32, 32, 100, systems=(*LONG, *TOP_P)),
    Cell("b32/mixed", 32, 32, None),
    Cell("b64/25", 64, 64, 25),
    Cell("b256/25", 256, 256, 25, systems=LONG),
    Cell("b256/100", 256, 256, 100, systems=LONG),
    Cell("group8", 32, 4, 25, samples=8),
    # Growth: with the number of latents, and with the length of the queue.
    *(Cell(f"latents/{n}", 32, 32, FACTOR * n, systems=("colar5-growth",)) for n in (10, 30, 100, 300)),
    *(Cell(f"queue/{n}", 32, n, None, systems=("colar5-growth", "cot-growth")) for n in (64, 128, 256)),
)
SYSTEMS = (
    "colar5",
    "cot",
    "colar2",
    *SEQUENTIAL,
    *TOP_P,
    "hf-cot",
    "published",
    "floor",
    "colar5-growth",
    "cot-growth",
    "hf-cot-static",
    *ON_REQUEST,
)
DEFAULT = tuple(name for name in SYSTEMS if name not in ("hf-cot-static", *ON_REQUEST))


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return
    runs = shared.run_systems(
        __file__, _order(args), lambda run: f"{run['seconds']:.0f} s, {steps_of(run)}", args.minutes
    )
    report = summarise(runs, args)
    shared.publish(report, args.output, show, report["ratios"])


def steps_of(run: dict[str, Any]) -> str:
    """Milliseconds of a step in each cell of a run."""
    return ", ".join(
        f"{cell} {shared.shown(found['ms_per_step'])} ms" for cell, found in run["cells"].items()
    )


def _order(args: argparse.Namespace) -> list[str]:
    """The systems round by round; those of growth take long and are in every fourth round."""
    order = []
    for i in range(args.rounds):
        for system in args.systems:
            if i % 4 == 0 or not system.endswith("-growth"):
                order.append(system)
    return order


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
    if system == "floor":
        cells = {f"b{n}": {"ms_per_step": floor(lm, n)} for n in (1, 8, 32, 64, 256)}
        return {"system": system, "cells": cells, "seconds": time.perf_counter() - started}

    work = _work_of(system)
    top_p = TOP_P.get(system)
    compression_factor = 2 if name.endswith("2") else FACTOR
    if thinks_in_tokens:
        compression_factor = 1
    examples = load_questions(args.source, args.data_dir)
    # Not counted: kernels and caches.
    for size in (1, 8):
        small = Cell("", size, size, 10)
        work(lm, method, small, make_job(lm, method, examples, small, 1, top_p))

    cells = {}
    for cell in CELLS:
        if cell.name not in args.cells or system not in cell.systems:
            continue
        job = make_job(lm, method, examples, cell, compression_factor, top_p)
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


class Ratio(NamedTuple):
    """One quantity of a system and cell over that of another, times a constant."""

    quantity: str
    over: tuple[str, str]
    under: tuple[str, str]
    times: float = 1.0


RATIOS = {
    "step_over_floor_b1": Ratio("ms_per_step", ("colar5", "b1/100"), ("floor", "b1")),
    "step_over_floor_b32": Ratio("ms_per_step", ("colar5", "b32/100"), ("floor", "b32")),
    "vs_published_b32_mixed": Ratio("seconds", ("published", "b32/mixed"), ("colar5", "b32/mixed")),
    "vs_published_group8": Ratio("seconds", ("published", "group8"), ("colar5", "group8")),
    "colar5_vs_hf_cot_b1": Ratio("seconds", ("hf-cot", "b1/100"), ("colar5", "b1/100")),
    "colar5_vs_hf_cot_b32_mixed": Ratio("seconds", ("hf-cot", "b32/mixed"), ("colar5", "b32/mixed")),
    "own_cot_vs_hf_cot_b32": Ratio("seconds", ("hf-cot", "b32/100"), ("cot", "b32/100")),
    "own_cot_vs_hf_cot_b1": Ratio("seconds", ("hf-cot", "b1/100"), ("cot", "b1/100")),
    # What drawing costs: a step in tokens, each of them drawn, and a step in latents, drawn with the stop.
    "sampled_vs_greedy_b32": Ratio("ms_per_step", ("cot-sampled", "b32/100"), ("cot", "b32/100")),
    "nucleus_vs_greedy_b32": Ratio("ms_per_step", ("cot-nucleus", "b32/100"), ("cot", "b32/100")),
    "sampled_vs_greedy_latent_b32": Ratio(
        "ms_per_step", ("colar5-sampled", "b32/100"), ("colar5", "b32/100")
    ),
    "nucleus_vs_greedy_latent_b32": Ratio(
        "ms_per_step", ("colar5-nucleus", "b32/100"), ("colar5", "b32/100")
    ),
    # A fifth of the steps should take a fifth of the time: 1 is what the length alone gives.
    "colar5_vs_own_cot_thinking_over_length_ratio": Ratio(
        "thinking_seconds", ("cot", "b32/100"), ("colar5", "b32/100"), 1 / FACTOR
    ),
    "colar5_vs_own_cot_thinking_over_length_ratio_b1": Ratio(
        "thinking_seconds", ("cot", "b1/100"), ("colar5", "b1/100"), 1 / FACTOR
    ),
    "colar5_vs_own_cot_reading_and_thinking_over_length_ratio": Ratio(
        "reading_and_thinking_seconds", ("cot", "b32/100"), ("colar5", "b32/100"), 1 / FACTOR
    ),
    "colar5_vs_own_cot_reading_and_thinking_over_length_ratio_b1": Ratio(
        "reading_and_thinking_seconds", ("cot", "b1/100"), ("colar5", "b1/100"), 1 / FACTOR
    ),
}
# Chains of the same tokens: how much sooner the last of them is there, and what a step costs beside the paper's head's.
for c in (2, 5):
    for rows in (1, 32):
        cell = f"b{rows}/100"
        for suffix in ("", "-shortlist"):
            name = f"sequential{c}{suffix}"
            key = suffix.replace("-", "_")
            RATIOS[f"sequential{c}_vs_own_cot_thinking_b{rows}{key}"] = Ratio(
                "thinking_seconds", ("cot", cell), (name, cell)
            )
            RATIOS[f"sequential{c}_vs_gaussian{c}_step_b{rows}{key}"] = Ratio(
                "ms_per_step", (name, cell), (f"colar{c}", cell)
            )


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, the ratios that matter, and the runs that they come from."""
    cells = shared.medians(runs, args.systems)

    def value(system: str, cell: str, quantity: str) -> float | None:
        return cells.get(system, {}).get(cell, {}).get(quantity)

    ratios = {}
    for key, ratio in RATIOS.items():
        over = value(*ratio.over, ratio.quantity)
        under = value(*ratio.under, ratio.quantity)
        # Absent where --systems or --cells left one of them out.
        if over is not None and under is not None:
            ratios[key] = over / under * ratio.times
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
        "ratios": ratios,
        "cells": cells,
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
