"""Seconds a question takes at each speed and confidence threshold: does ending groups early pay in wall-clock, too?

    python lab/benchmarks/gates.py --cot runs/arena/seed0/cot/best --gated runs/sequential/seed0/half/best
    python lab/benchmarks/gates.py --cot runs/smollm2-135m/cot-more/best \
      --gated runs/smollm2-135m/sequential/gated/best --source gsm8k-aug --dtype bfloat16 \
      --max-latents 128 --max-completion-length 16 --output runs/benchmarks/gates-smollm2

Two checkpoints answer the same questions greedily: a chain in tokens (CoT), and a sequential head at each c, with each
threshold. Threshold 0 is the fixed speed. Cells are timed with one request at a time (`b1`) and with 32 (`b32`). Each
system runs in a process of its own, and rounds alternate between the two; medians are shown. The table goes to stdout,
then one JSON line; report.json holds the raw runs.

`--votes 8` draws as many answers to each question, all at the same time and one question after another (`votes8`): the
majority's accuracy, and how long a question then takes beside CoT's one row (`times CoT` is over `cot/b1`).

Accuracy is counted on the same questions. It is that of one model and few questions, and is there to see that the
timed work is the real one; lab/reproduce/sequential.sh measures it. Steps of results/speed/gates-smollm2 were compiled,
an option of commit c901c920.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import shared
import torch
from rich.console import Console
from work import best_device

from colar.data import sources
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.evaluation import stats
from colar.evaluation.evaluate import (
    AnswerSettings,
    EvaluatedModel,
    GridPoint,
    Question,
    make_record,
    make_request,
)
from colar.methods import pretrained

SYSTEMS = ("cot", "gated")
ROWS = (1, 32)


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return

    def said(run: dict[str, Any]) -> str:
        seconds = sum(cell["ms"] * cell["questions"] for cell in run["cells"].values()) / 1e3
        return f"{len(run['cells'])} cells, {seconds:.0f} s"

    runs = shared.run_systems(__file__, shared.rounds_of(args.systems, args.rounds), said)
    report = summarise(runs, args)
    ratios = {name: round(ratio, 3) for name, ratio in report["speedup_over_cot"].items()}
    shared.publish(report, args.output, show, ratios)


def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """One system's milliseconds a question, thoughts and accuracy, cell by cell."""
    torch.set_num_threads(args.threads)
    path = args.cot if system == "cot" else args.gated
    lm, method = pretrained.load_for_inference(path, args.dtype, device=best_device())
    model = EvaluatedModel(system, lm, method)
    options = {"steps": [2, 4]} if args.source == "arithmetic" else {}
    examples = sources.load_examples(
        args.source, "test", data_dir=args.data_dir, limit=args.limit, skip_malformed=True, options=options
    )
    cells = {}
    for rows in ROWS:
        engine = Engine(lm, method, rows)
        limits = AnswerSettings(args.max_latents, args.max_completion_length, rows)
        for name, params in _params(system, method, args):
            asked = examples if rows > 1 else examples[: args.limit_alone]
            # Not counted: kernels, caches and the memory of this width.
            timed(engine, model, params, asked[: 2 * rows], limits)
            cells[f"{name}/b{rows}"] = timed(engine, model, params, asked, limits)
    if args.votes and system != "cot":
        engine = Engine(lm, method, args.votes)
        limits = AnswerSettings(args.max_latents, args.max_completion_length, args.votes)
        for name, params in _params(system, method, args):
            asked = examples[: args.limit_alone]
            voted(engine, model, params, asked[:2], limits)
            cells[f"{name}/votes{args.votes}"] = voted(engine, model, params, asked, limits)
    return {"system": system, "cells": cells, "peak_memory_gib": shared.peak_gib()}


def _params(system: str, method: Any, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The name and the params of each cell."""
    if system == "cot":
        yield "cot", method.Params()
        return
    for c in args.compression_factor:
        for threshold in args.confidence_threshold:
            # A group of one has nothing to end early.
            if c > 1 or threshold == 0:
                yield f"c={c:g}/{threshold:g}", method.Params(c, confidence_threshold=threshold)


def timed(
    engine: Engine, model: EvaluatedModel, params: Any, examples: Sequence[Example], limits: AnswerSettings
) -> dict[str, float]:
    """Answer the questions, as many at a time as the engine has rows."""
    point = GridPoint(model, "questions", params, "greedy", seed=0)
    questions = [Question(point, example, make_request(point, example, limits)) for example in examples]
    started = time.perf_counter()
    completions = engine.generate([question.request for question in questions])
    seconds = time.perf_counter() - started
    records = [make_record(*pair) for pair in zip(questions, completions, strict=True)]
    return _cell(records, len(records), seconds, sum(record["correct"] for record in records))


def voted(
    engine: Engine, model: EvaluatedModel, params: Any, examples: Sequence[Example], limits: AnswerSettings
) -> dict[str, float]:
    """Draw an answer in each of the engine's rows to one question after another; the majority's is judged."""
    points = [
        GridPoint(model, "questions", params, "sampled", seed=seed) for seed in range(limits.batch_size)
    ]
    records = []
    majority = 0.0
    seconds = 0.0
    for example in examples:
        asked = [Question(point, example, make_request(point, example, limits)) for point in points]
        started = time.perf_counter()
        completions = engine.generate([question.request for question in asked])
        seconds += time.perf_counter() - started
        drawn = [make_record(*pair) for pair in zip(asked, completions, strict=True)]
        answers = [record["parsed"] for record in drawn]
        majority += majority_is_right(answers, [record["correct"] for record in drawn])
        records += drawn
    return _cell(records, len(examples), seconds, majority)


def majority_is_right(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Expected correctness of the majority answer; None is an answer that could not be parsed."""
    numbers = {answer: number for number, answer in enumerate(answers)}
    known = [-1 if answer is None else numbers[answer] for answer in answers]
    return float(stats.majorities(np.array([known]), np.array([correct]))[0])


def _cell(
    records: Sequence[dict[str, Any]], questions: int, seconds: float, correct: float
) -> dict[str, float]:
    length = sum(record["length"] for record in records)
    # A few rows of GSM8k-Aug have no chain to compare with.
    with_chain = [record for record in records if record["gold_length"] is not None]
    gold_length = sum(record["gold_length"] for record in with_chain)
    thoughts = sum(record["length"] for record in with_chain)
    return {
        "ms": 1e3 * seconds / questions,
        "thoughts": length / len(records),
        "mean_c": gold_length / max(1, thoughts),
        "accuracy": correct / questions,
        "questions": questions,
    }


def summarise(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The report: medians, and how many times faster than CoT each cell is."""
    cells: dict[str, dict[str, float]] = {}
    for of_system in shared.medians(runs, args.systems).values():
        cells.update(of_system)
    speedups = {}
    for name, cell in cells.items():
        rows = name.rpartition("/")[2]
        # Draws of one question are an answer to it, beside one chain of thought.
        rows = "b1" if rows.startswith("votes") else rows
        if f"cot/{rows}" in cells and not name.startswith("cot"):
            speedups[name] = cells[f"cot/{rows}"]["ms"] / cell["ms"]
    return {
        "cells": cells,
        "speedup_over_cot": speedups,
        "rounds": args.rounds,
        "threads": args.threads,
        "source": args.source,
        "dtype": args.dtype,
        "provenance": shared.provenance(),
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    columns = ("cell", "ms a question", "times CoT", "thoughts", "mean c", "accuracy %")
    table = shared.table("Wall-clock over speeds and thresholds", columns, texts={"cell"})
    for name, cell in report["cells"].items():
        table.add_row(
            name,
            shared.shown(cell["ms"]),
            shared.shown(report["speedup_over_cot"].get(name)),
            shared.shown(cell["thoughts"]),
            shared.shown(cell["mean_c"]),
            f"{100 * cell['accuracy']:.1f}",
        )
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.parser(__file__, __doc__, SYSTEMS, rounds=3)
    parser.add_argument("--cot", required=True, help="checkpoint of CoT")
    parser.add_argument("--gated", required=True, help="checkpoint of the sequential head")
    parser.add_argument("--compression-factor", nargs="+", type=float, default=[1, 1.5, 2, 3])
    parser.add_argument(
        "--confidence-threshold", nargs="+", type=float, default=[0, 0.5, 0.7, 0.8, 0.9, 0.99]
    )
    parser.add_argument("--source", default="arithmetic", help="a source (`colar data list`) or a file")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--max-latents", type=int, default=64)
    parser.add_argument("--max-completion-length", type=int, default=8)
    parser.add_argument("--votes", type=int, default=0, help="answers drawn to a question; 0: none")
    parser.add_argument("--limit", type=int, default=500, help="questions at 32 rows")
    parser.add_argument("--limit-alone", type=int, default=100, help="questions at one row, and of votes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
