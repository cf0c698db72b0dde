"""Rows a second and peak memory of fine-tuning, ours beside a plain transformers `Trainer`, in one run.

    python lab/benchmarks/sft.py --output runs/benchmarks/sft

The same rows, the same SmolLM2-135M in bf16 autocast, the same batch size and AdamW for all:

    trainer         transformers' Trainer as its examples use it: padding to the longest of a random batch, logits
                    at every position, default attention
    cot             ours: rows of like length together, logits at labels only, layers compiled
    cot-uncompiled  the same without compilation
    colar-1|2|5     CoLaR-SFT at one compression factor
    colar           at factors drawn from 1..5, as in the paper: rows of like length in tokens are not in latents

A run goes twice over the rows in a process of its own. The first pass warms up (compilation, allocators, kernels
for each length) and is not timed. Peak memory is the GPU's or, without one, the process's, over both passes. Rounds
alternate between the systems, so that a noisy minute hits all of them.
The table goes to stdout, then one JSON line; report.json holds the raw runs.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import shared
import torch
from rich.console import Console
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from colar import recipe
from colar.training import preflight
from colar.training.config import TrainingConfig
from colar.training.objective import Objective
from colar.training.resumable_run import arguments
from colar.training.rows import RowSchedule, TrainingRows
from colar.training.run_folder import RunFolder
from colar.training.trainer import LatentTrainer

SYSTEMS: dict[str, dict[str, Any]] = {
    "trainer": {"plain": True, "attention": "sdpa"},
    "cot": {"method": "cot", "attention": "eager", "compile": True},
    "cot-uncompiled": {"method": "cot", "attention": "eager", "compile": False},
    "colar-1": {"method": "colar", "factor": 1, "attention": "eager", "compile": True},
    "colar-2": {"method": "colar", "factor": 2, "attention": "eager", "compile": True},
    "colar-5": {"method": "colar", "factor": 5, "attention": "eager", "compile": True},
    "colar": {"method": "colar", "attention": "eager", "compile": True},
}


class Passes(TrainerCallback):  # type: ignore[misc]
    """Notes the time at which each pass over the rows ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        shared.synchronize()
        self.ends.append(time.perf_counter())


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return

    def said(run: dict[str, Any]) -> str:
        return f"{run['rows_per_second']:.2f} rows/s, {run['peak_memory_gib']:.1f} GiB"

    runs = shared.run_systems(__file__, shared.rounds_of(args.systems, args.rounds), said, args.minutes)
    report = summarise(runs, args)
    rates = {name: found["rows_per_second"] for name, found in report["systems"].items()}
    shared.publish(report, args.output, show, rates)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run: rows and tokens a second of the second pass, peak memory of the process."""
    torch.set_num_threads(args.threads)
    settings = SYSTEMS[name]
    loaded = recipe.DataConfig(
        source=args.source, data_dir=args.data_dir, train_size=args.rows, validation_size=0
    )
    examples, _ = recipe.load_example_sets(loaded)
    passes = Passes()
    # Both return the positions fed to the backbone for all rows.
    run: Callable[..., int] = plain if settings.get("plain") else ours
    with tempfile.TemporaryDirectory() as folder:
        fed = run(settings, examples, args, passes, folder)
    seconds = passes.ends[1] - passes.ends[0]  # of the second pass
    return {
        "system": name,
        "rows_per_second": len(examples) / seconds,
        "fed_per_row": fed / len(examples),
        "seconds": seconds,
        "peak_memory_gib": shared.peak_gib(),
    }


def plain(
    settings: dict[str, Any], examples: list[Any], args: argparse.Namespace, passes: Passes, folder: str
) -> int:
    """transformers' Trainer on the same ids; returns the tokens of all rows."""
    lm, cot = _load({"method": "cot", "attention": settings["attention"]}, args)
    features = []
    for example in examples:
        row = cot.encode(lm.template, example, Random(0), 0.0)
        target = [*row.chain, *row.answer]
        labels = [-100] * len(row.question) + target  # transformers' mark of a position without a label
        features.append({"input_ids": [*row.question, *target], "labels": labels})
    training = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-5,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # Padding is masked and has no labels, so any token will do where the tokenizer has none for it.
    collate = DataCollatorForSeq2Seq(lm.tokenizer, padding=True)
    if lm.tokenizer.pad_token is None:
        lm.tokenizer.pad_token = lm.tokenizer.eos_token
    trainer = Trainer(
        lm.causal_lm, training, train_dataset=features, data_collator=collate, callbacks=[passes]
    )
    trainer.train()
    return sum(len(feature["input_ids"]) for feature in features)


def ours(
    settings: dict[str, Any], examples: list[Any], args: argparse.Namespace, passes: Passes, folder: str
) -> int:
    """The training of `colar train`, without validation and checkpoints; returns the positions of all rows."""
    lm, method = _load(settings, args)
    config = TrainingConfig(
        num_train_epochs=2,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-5,
        bf16=True,
        report_to="none",
        save_steps=10**6,
    )
    # As `training/sft.py` puts it together, but for the callbacks that validate and publish.
    examples = list(method.prepare(lm, examples))
    rows = TrainingRows(lm, method, examples, seed=0)
    lengths = [found[0] for found in rows.lengths()]
    schedule = RowSchedule(examples, lengths, seed=0, update_rows=args.batch_size)
    training = arguments(config, RunFolder(Path(folder)))
    training.save_strategy = "no"
    trainer = LatentTrainer(Objective(lm.to(training.device), method), training, config, rows, schedule)
    trainer.add_callback(passes)
    with preflight.prepared(lm, compiled=settings["compile"]):
        trainer.train()
    fed = 0
    for index in range(len(rows)):
        row = rows[0.0, index, 0]
        latents = math.ceil(len(row.chain) / getattr(row.params, "compression_factor", 1))
        fed += len(row.question) + latents + len(row.answer)
    return fed


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and the runs that they come from."""
    systems = {}
    for name in args.systems:
        mine = [run for run in runs if run["system"] == name and "error" not in run]
        if not mine:
            continue
        found = {}
        for key in ("rows_per_second", "fed_per_row", "peak_memory_gib"):
            found[key] = median(run[key] for run in mine)
        found["slowest"] = min(run["rows_per_second"] for run in mine)
        found["fastest"] = max(run["rows_per_second"] for run in mine)
        systems[name] = found
    return {
        "benchmark": "sft",
        "setting": {
            "backbone": args.backbone,
            "source": args.source,
            "rows": args.rows,
            "batch_size": args.batch_size,
            "rounds": args.rounds,
            "threads": args.threads,
            "precision": "bf16 autocast over float32 weights",
        },
        "provenance": shared.provenance(),
        "systems": systems,
        "runs": runs,
    }


def _load(settings: dict[str, Any], args: argparse.Namespace) -> tuple[Any, Any]:
    """Model and method as a recipe with these settings would make them."""
    method: dict[str, Any] = {"name": settings["method"]}
    if "factor" in settings:
        method["compression_factors"] = [settings["factor"]]
    attention = args.attention or settings["attention"]
    made = recipe.Recipe(
        output="unused",
        model=recipe.ModelConfig(backbone=args.backbone, attn_implementation=attention),
        method=method,
    )
    trained = recipe.load_method(made)
    return recipe.load_model(made, trained), trained


def show(report: dict[str, Any]) -> None:
    setting = report["setting"]
    title = (
        f"{setting['backbone']}, {setting['rows']} rows of {setting['source']}, batches of "
        f"{setting['batch_size']}, {setting['threads']} threads, medians of {setting['rounds']}"
    )
    columns = ("system", "rows/s", "slowest ... fastest", "x trainer", "positions/row", "peak GiB")
    table = shared.table(title, columns, texts=("system",))
    base = report["systems"].get("trainer", {}).get("rows_per_second")
    for name, found in report["systems"].items():
        table.add_row(
            name,
            f"{found['rows_per_second']:.2f}",
            f"{found['slowest']:.2f} ... {found['fastest']:.2f}",
            f"{found['rows_per_second'] / base:.2f}" if base else "-",
            f"{found['fed_per_row']:.0f}",
            f"{found['peak_memory_gib']:.1f}",
        )
    Console(width=100).print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.add_model_options(shared.parser(__file__, __doc__, list(SYSTEMS), rounds=3))
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--attention", help="of all systems, in place of each one's: sdpa on a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
