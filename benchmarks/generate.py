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
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import shared
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from colar import files, progress
from colar.data import sources
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import base, registry
from colar.methods.base import ThinkState, Thought
from colar.model import backbones
from colar.model.latent_lm import LatentLM

ANSWER = 4
"""Tokens of an answer."""
FACTOR = 5
ALL = ("colar5", "cot", "hf-cot", "published")


@dataclass(frozen=True)
class Cell:
    """One piece of work: `questions` in a batch of `slots`, each `samples` times, with chains of `length` tokens
    (None: as long as the questions' own)."""

    name: str
    slots: int
    questions: int
    length: int | None
    samples: int = 1
    systems: tuple[str, ...] = ALL


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


class Unending(base.Base):
    """A method that never stops by itself: `max_latents` ends every chain where it should."""

    name = "unending"

    def __init__(self, method: Any) -> None:
        super().__init__(method.config)
        self.method, self.Params = method, method.Params

    def prompt(self, params: Any) -> str:
        return str(self.method.prompt(params))

    def think(self, lm: LatentLM, state: ThinkState) -> Thought:
        thought = self.method.think(lm, state)
        return Thought(thought.embeds, torch.zeros_like(thought.done), thought.token_ids, thought.info)

    def encode(self, *args: Any) -> Any:
        raise NotImplementedError("for inference")

    loss = encode


@dataclass
class Job:
    """A cell's rows: prompts and how many embeddings each emits while thinking."""

    requests: list[Request]
    ids: list[list[int]]
    lengths: list[int]


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
    registry.attach(lm, method, 0)
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
        e for e in sources.load(args.source, "test", data_dir=_folder(args), skip_malformed=True) if e.steps
    ]
    cells = {}
    for cell in [c for c in CELLS if system in c.systems and (not args.cells or c.name in args.cells)]:
        job = _job(lm, method, examples, cell, 1 if cot else FACTOR)
        for size in () if cells else (1, 8):  # kernels, caches, and a graph for one row and one for several
            work(
                lm, method, Cell("", size, size, 10), _job(lm, method, examples, Cell("", size, size, 10), 1)
            )
        _reset_peak()
        cells[cell.name] = work(lm, method, cell, job) | {"peak_memory_gib": _peak()}
        cells[cell.name]["questions_per_second"] = len(job.requests) / cells[cell.name]["seconds"]
    return {"system": system, "cells": cells, "seconds": time.perf_counter() - started}


def _job(lm: LatentLM, method: Any, examples: Sequence[Any], cell: Cell, factor: int) -> Job:
    requests, lengths = [], []
    for index in range(cell.questions):
        example = examples[index % len(examples)]
        length = cell.length or sum(map(len, lm.template.steps(example.steps)))
        for sample in range(cell.samples):
            decoding = Decoding(max_latents=-(-length // factor), max_completion_length=ANSWER)
            params = method.Params(**({"compression_factor": factor} if factor > 1 else {}))
            requests.append(
                Request(f"{index}", example.question, params, decoding, seed=index, sample=sample)
            )
            lengths.append(decoding.max_latents)
    ids = [lm.template.question(r.question, method.prompt(r.params)) for r in requests]
    return Job(requests, ids, lengths)


# The systems


def ours(lm: LatentLM, method: Any, cell: Cell, job: Job, compile: bool = True) -> dict[str, float]:
    """The engine. A step counts where nobody joined, and all slots were busy if ever they are."""
    engine = Engine(lm, Unending(method), cell.slots, compile=compile)
    started = time.perf_counter()
    for request in job.requests:
        engine.submit(request)
    steps, first, thoughts = [], {}, []
    while engine.busy:
        before, waiting = time.perf_counter(), len(engine.scheduler)
        rows = 0 if engine.rows is None else len(engine.rows)
        events = engine.step()
        now = time.perf_counter()
        if len(engine.scheduler) == waiting and rows == min(cell.slots, len(job.requests)):
            steps.append(now - before)
        for event in events:
            if event.kind == "thought":
                thoughts.append(now - started)
            elif event.kind == "token":
                first.setdefault((event.request.id, event.request.sample), now - started)
            assert event.kind != "finished" or event.reason == "length", "an answer ended by itself"
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "first_answer_token_seconds": median(first.values()),
        **_thinking(steps, thoughts[0], thoughts[-1]),
    }


def _thinking(steps: Sequence[float], first: float, last: float) -> dict[str, float]:
    """From the times at which the first and the last thought were there."""
    return {
        "ms_per_step": 1e3 * median(steps),
        "thinking_seconds": last - first + median(steps),
        "reading_and_thinking_seconds": last,
    }


class Times(StoppingCriteria):  # type: ignore[misc]
    """When each token of `generate` was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def hf_cot(lm: LatentLM, method: Any, cell: Cell, job: Job) -> dict[str, float]:
    """transformers' `generate`: left-padded, until the longest row has its answer."""
    ids, mask = left_padded(job.ids, lm.device)
    n, times = max(job.lengths) + 1 + ANSWER, Times()
    config = lm.causal_lm.generation_config
    config.eos_token_id = None  # the work is given
    started = time.perf_counter()
    lm.causal_lm.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([times]),
    )
    seconds = time.perf_counter() - started
    steps = [b - a for a, b in zip(times.times, times.times[1:], strict=False)]
    return {
        "seconds": seconds,
        "first_answer_token_seconds": median(times.times[length + 1] - started for length in job.lengths),
        **_thinking(steps, times.times[0] - started, times.times[max(job.lengths) - 1] - started),
    }


def published(lm: LatentLM, method: Any, cell: Cell, job: Job) -> dict[str, float]:
    """The latent loop as published, with our weights and heads."""
    ids, mask = left_padded(job.ids, lm.device)
    question = lm.embed(ids)
    fed, steps = [question], []
    started = time.perf_counter()
    out = lm.causal_lm(inputs_embeds=question, attention_mask=mask, output_hidden_states=True, use_cache=True)
    read = time.perf_counter() - started
    for _ in range(max(job.lengths)):
        before = time.perf_counter()
        out.logits[:, -1].argmax(-1)  # stop or go on
        mean, _ = lm.extra["latent_head"](out.hidden_states[-1][:, -1])
        fed.append((mean * method.sigma_e)[:, None].to(question))
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        out = lm.causal_lm(
            inputs_embeds=fed[-1],
            attention_mask=mask,
            past_key_values=out.past_key_values,
            output_hidden_states=True,
            use_cache=True,
        )
        steps.append(time.perf_counter() - before)
    thinking = time.perf_counter() - started
    separator = lm.embed(torch.full((len(job.ids), 1), lm.template.separator_id, device=lm.device))
    times = Times()
    lm.causal_lm.generation_config.eos_token_id = None
    lm.causal_lm.generate(
        inputs_embeds=torch.cat([*fed, separator], dim=1),
        attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
        max_new_tokens=ANSWER,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([times]),
    )
    return {
        "seconds": time.perf_counter() - started,
        "first_answer_token_seconds": times.times[0] - started,
        **_thinking(steps, read + steps[0], thinking),
    }


def floor(lm: LatentLM, n: int) -> float:
    """Milliseconds of a step's matrix products with n rows, each weight read once, LM head included."""
    head = lm.causal_lm.get_output_embeddings().weight
    embedding = lm.causal_lm.get_input_embeddings().weight
    weights = [p for p in lm.causal_lm.parameters() if p.ndim == 2 and p is not embedding and p is not head]
    weights.append(head)
    inputs = {w.shape[1]: torch.randn(n, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        if lm.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 1e3 * median(seconds[2:])


def left_padded(ids: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=device)
    return padded, mask


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
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for system in args.systems:
        mine = [run["cells"] for run in runs if run["system"] == system]
        cells[system] = {
            name: {key: median(run[name][key] for run in mine) for key in mine[0][name]} for name in mine[0]
        }

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
        "provenance": files.provenance()
        | {"command": shared.command(__file__), "accelerator": shared.accelerator()},
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


def _folder(args: argparse.Namespace) -> Path | None:
    return Path(args.data_dir) if args.data_dir else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="results/bench-generate", help="folder for report.json")
    parser.add_argument("--backbone", default="smollm2-135m", help="a name, a folder or a Hub id")
    parser.add_argument("--source", default="gsm8k-aug", help="a source (`colar data list`) or a file")
    parser.add_argument("--data-dir", default=None, help="folder with upstream files; else $COLAR_DATA_DIR")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each system; medians are shown")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="only these")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
