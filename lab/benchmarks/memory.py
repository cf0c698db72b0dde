"""Peak memory of a training step and of its loss alone: logits in chunks beside all logits at once, in one run.

    python lab/benchmarks/memory.py --threads 1

    before    the logits of all labels at once, as they were made before `model/head.py`
    ours      in chunks, as `colar train` makes them
    parts     ours, and the batch in parts (`training.tokens_per_batch`)
    torch     torch.nn.functional.linear_cross_entropy with chunks, beside ours

    loss/N    cross-entropy of N labels, forward and backward: V = 128,256, D = 256, a frozen LM head in bfloat16
    score/N   log-probs and entropies of N actions of CoT's outputs (GRPO), likewise
    smollm2   an update of SmolLM2-135M on real rows of CoT-SFT: LoRA on a bfloat16 backbone, gradient checkpointing
    slice     the same with two random layers in Llama-3.2-1B's vocabulary (V = 128,256, D = 512), rows of random tokens

Every cell runs in a process of its own. `peak_gib` is the most that the tensors of the step took at one time, counted
by torch's profiler on a CPU and by the allocator on a GPU: weights and inputs are there before, and not counted.
`before` at 37,035 labels would need about 60 GB. Its peak there is computed: a straight line through its measured
cells. The table goes to stdout, then one JSON line. The committed report also has the process's own peak, ratios, and
how far `ours` is from `before` in its values (commit ee806d3b has them; tests/test_chunks.py compares the values).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from random import Random
from statistics import linear_regression
from typing import Any

import shared
import torch
from loss_parts import D, V, inputs, part_alone
from rich.console import Console
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from work import best_device

from colar import recipe
from colar.methods import pretrained, registry
from colar.methods.base import Batch, NoParams, Row
from colar.model import backbones
from colar.model.head import CHUNK_BYTES_ON_CPU
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training.objective import Objective, part_indices, take

LONGEST = 37_035
"""Labels of the longest batch of llama-3.2-1b/cot-math while one pool held all rows."""
MEASURED = (1024, 2048, 3072)
TOKENS = 1024
"""`training.tokens_per_batch` of the system `parts`."""
CELLS: dict[str, list[str]] = {
    "loss/1024": ["before"],
    "loss/2048": ["before"],
    "loss/3072": ["before", "ours"],
    f"loss/{LONGEST}": ["ours"],
    "score/1024": ["before", "ours"],
    "slice/cot": ["before", "ours"],
    "smollm2/cot": ["before", "parts", "ours"],
}
SYSTEMS = [f"{system}:{cell}" for cell, systems in CELLS.items() for system in systems]
SYSTEMS.append("torch:loss/3072")


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return

    def said(run: dict[str, Any]) -> str:
        cell = run["cells"][run["system"]]
        return f"{cell['peak_gib']:.3g} GiB, {cell['seconds']:.0f} s"

    runs = shared.run_systems(__file__, args.systems, said, args.minutes)
    report = summarise(runs, args)
    shared.publish(report, args.output, show, report["cells"])


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run: the peak of the step above what was there before, and its seconds."""
    torch.set_num_threads(args.threads)
    system, cell = name.split(":")
    kind, of = cell.split("/")
    if kind in ("loss", "score"):
        # Its tensors are made where it runs.
        with torch.device(best_device()):
            given = inputs(int(of), torch.bfloat16)

        def step() -> None:
            with torch.device(best_device()):
                part_alone(kind, system, *given)

    else:
        step = update(kind, of, system, args)
    started = time.perf_counter()
    peak = peak_on_gpu(step) if torch.cuda.is_available() else peak_on_cpu(step)
    seconds = time.perf_counter() - started
    return {"system": name, "cells": {name: {"peak_gib": peak / 2**30, "seconds": seconds}}}


def peak_on_gpu(step: Callable[[], None]) -> int:
    """The most bytes that were allocated on the GPU above what was before the step."""
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


def peak_on_cpu(step: Callable[[], None]) -> int:
    """The most bytes of tensors that were alive at one time, of those that the step made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    changes = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    alive = 0
    most = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        alive += change
        most = max(most, alive)
    return most


# An update


def update(kind: str, method: str, system: str, args: argparse.Namespace) -> Callable[[], None]:
    """Forward, backward and AdamW over one batch, in bfloat16 autocast."""
    lm, rows, made = smollm2(method, args) if kind == "smollm2" else llama_slice(method)
    objective = Objective(lm, made)
    if system == "before":
        # One chunk of any size: what was done before, operation for operation.
        lm.chunk_bytes = 2**62
    lm.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm.to(best_device()).train()
    batch = Batch.collate(rows)
    parts = part_indices(batch.positions(), TOKENS if system == "parts" else None)
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        for index in parts:
            part = {name: column.to(lm.device) for name, column in take(batch.tensors(), index).items()}
            with torch.autocast(lm.device.type, dtype=torch.bfloat16):
                outputs = objective(num_items_in_batch=len(rows), **part)
            outputs["loss"].backward()
        optimizer.step()

    return step


def smollm2(method: str, args: argparse.Namespace) -> tuple[LatentLM, list[Row], Any]:
    """The backbone with the adapter of SmolLM2's recipes, and rows of the source."""
    made = recipe.Recipe(
        output="unused",
        model=recipe.ModelConfig(
            backbone=args.backbone,
            dtype="bfloat16",
            lora=LoraSettings(r=16, lora_alpha=32, target_modules="all-linear"),
        ),
        method={"name": method},
    )
    trained = recipe.load_method(made)
    lm = recipe.load_model(made, trained)
    # The longest rows of a pool: what an update may meet.
    data = recipe.DataConfig(
        source=args.source, data_dir=args.data_dir, train_size=args.pool, validation_size=0
    )
    examples, _ = recipe.load_example_sets(data)
    rows = [trained.encode(lm.template, each, Random(0), 0.0) for each in trained.prepare(lm, examples)]
    return lm, sorted(rows, key=len)[-args.rows :], trained


def llama_slice(method: str) -> tuple[LatentLM, list[Row], Any]:
    """Two random layers in Llama-3.2-1B's vocabulary, and 8 rows of 64 + 192 + 8 random tokens: 1,600 labels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    tokenizer = backbones.load("tiny").tokenizer
    backbone = backbones.Backbone("llama-slice", LlamaForCausalLM(config).to(torch.bfloat16), tokenizer)
    lm = LatentLM.from_backbone(backbone, lora=LoraSettings())
    made = registry.build(method, {})
    pretrained.attach(lm, made, 0)
    rng = Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(V) for _ in range(n)]

    rows = [Row(tokens(64), [tokens(192)], tokens(8), NoParams(), seed) for seed in range(8)]
    return lm, rows, made


# The report


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Every cell, and the computed one."""
    cells: dict[str, dict[str, float]] = {}
    for found in shared.medians(runs, args.systems).values():
        cells |= found
    report: dict[str, Any] = {
        "benchmark": "memory",
        "setting": {
            "vocabulary": V,
            "width": D,
            "chunk_bytes": CHUNK_BYTES_ON_CPU,
            "backbone": args.backbone,
            "source": args.source,
            "rows": args.rows,
            "tokens_per_batch": TOKENS,
            "threads": args.threads,
        },
        "provenance": shared.provenance(),
        "cells": cells,
        "runs": runs,
    }
    if all(f"before:loss/{n}" in cells for n in MEASURED):
        points = [(n, cells[f"before:loss/{n}"]["peak_gib"]) for n in MEASURED]
        report["before_at_longest"] = {"labels": LONGEST, "computed_gib": line(points, LONGEST)}
    return report


def line(points: list[tuple[int, float]], at: int) -> float:
    """The value at `at` of the straight line of least squares through some points."""
    slope, intercept = linear_regression(*zip(*points, strict=True))
    return slope * at + intercept


def show(report: dict[str, Any]) -> None:
    columns = ["cell"]
    for system in ("before", "ours", "parts", "torch"):
        columns += [f"{system} GiB", f"{system} s"]
    table = shared.table("Peak memory of a step, above what was held before it", columns, texts=("cell",))
    for cell in CELLS:
        row = [cell]
        for system in ("before", "ours", "parts", "torch"):
            found = report["cells"].get(f"{system}:{cell}", {})
            row += [shared.shown(found.get("peak_gib")), shared.shown(found.get("seconds"))]
        table.add_row(*row)
    Console(width=110).print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.add_model_options(shared.parser(__file__, __doc__, SYSTEMS, rounds=1))
    parser.add_argument("--rows", type=int, default=16, help="rows of an update of the backbone")
    parser.add_argument("--pool", type=int, default=192, help="training rows that these are the longest of")
    return parser.parse_args()


if __name__ == "__main__":
    main()
