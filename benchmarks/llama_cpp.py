"""A reference from outside: llama.cpp's decode of the same model, in bfloat16, beside our CoT and CoLaR, in one run.

    pip install xllamacpp gguf        # llama.cpp as a wheel; `make smollm2` brings the model
    python benchmarks/llama_cpp.py --output results/bench-llama-cpp

The work is that of `benchmarks/generate.py` (cells b1/100 and b32/100: GSM8K questions, chains of 100 tokens, or 20
latents at c = 5, then 4 tokens of an answer). The packaged model is a quantised GGUF file; it is written anew with
bfloat16 matrices, which is what ours computes in. llama.cpp decodes tokens; no serving engine feeds latents back.
Table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import generate
import shared
from rich.console import Console
from rich.table import Table
from work import ANSWER

from colar import files, progress
from colar.data import sources
from colar.model import backbones

CELLS = {"b1/100": 1, "b32/100": 32}
SYSTEMS = ("llama.cpp", "cot", "colar5")
TOKENS = 100 + 1 + ANSWER
"""Of a chain, the separator, an answer."""


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args)))
        return
    _require("xllamacpp", "gguf")
    runs = []
    for system in progress.track(args.systems * args.rounds, "llama_cpp"):
        runs.append(shared.in_a_process(__file__, system))
        progress.say(f"{system}: {runs[-1]['seconds']:.0f} s")
    cells = shared.medians(runs, args.systems)
    import xllamacpp

    report = {
        "benchmark": "llama_cpp",
        "setting": {
            "rounds": args.rounds,
            "threads": args.threads,
            "precision": "bfloat16",
            "tokens": TOKENS,
        },
        "provenance": shared.provenance() | {"xllamacpp": xllamacpp.__version__},
        "cells": cells,
        "runs": runs,
    }
    path = files.require_writable(args.output) / "report.json"
    files.write_json(path, report)
    show(cells)
    print(json.dumps(cells))
    progress.say(f"wrote {path}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One system's run over both cells."""
    if args.system != "llama.cpp":
        return generate.measure(args.system, args)
    started = time.perf_counter()
    examples = [
        e for e in sources.load("gsm8k-aug", "test", data_dir=args.data_dir, skip_malformed=True) if e.steps
    ]
    questions = [e.question for e in examples]
    model = bfloat16_model()
    cells = {name: llama_cpp(model, questions, n, args.threads) for name, n in CELLS.items()}
    return {"system": args.system, "cells": cells, "seconds": time.perf_counter() - started}


def llama_cpp(model: Path, questions: Sequence[str], slots: int, threads: int) -> dict[str, float]:
    """`slots` questions at once through llama.cpp's server, in this process, after as many for warming up."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel, params.n_ctx = slots, slots * 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def complete(question: str, n: int) -> dict[str, Any]:
        asked = {
            "prompt": question,
            "n_predict": n,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer: dict[str, Any] = server.handle_completions(asked)
        return answer

    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(lambda question: complete(question, 10), questions[slots : 2 * slots]))
        started = time.perf_counter()
        answers = list(pool.map(lambda question: complete(question, TOKENS), questions[:slots]))
        seconds = time.perf_counter() - started
    times = [answer["timings"] for answer in answers]
    assert all(timing["predicted_n"] == TOKENS for timing in times), "an answer ended by itself"
    return {
        "seconds": seconds,
        "questions_per_second": slots / seconds,
        # Of a row that reads last: the others' steps are slowed by questions that are still being read.
        "ms_per_step": min(timing["predicted_per_token_ms"] for timing in times),
    }


def bfloat16_model() -> Path:
    """The packaged GGUF file once more, with bfloat16 in place of its quantised matrices."""
    import gguf

    target = backbones.cache_folder() / "smollm2-135m-bf16.gguf"
    if target.exists():
        return target
    reader = gguf.GGUFReader(backbones.smollm2_gguf())
    partial = target.with_suffix(".partial")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(partial, architecture)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.BF16 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


def show(cells: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title="SmolLM2-135M, bfloat16")
    for column in ("cell", "system", "questions/s", "ms/step"):
        table.add_column(column, justify="left" if column in ("cell", "system") else "right")
    for name in CELLS:
        for system, found in cells.items():
            shown = (found[name][key] for key in ("questions_per_second", "ms_per_step"))
            table.add_row(name, system, *(f"{value:.3g}" for value in shown))
    Console(width=80).print(table)


def _require(*packages: str) -> None:
    for package in packages:
        try:
            __import__(package)
        except ImportError:
            raise SystemExit(f"this benchmark needs {package}: pip install xllamacpp gguf") from None


def _arguments() -> argparse.Namespace:
    args = shared.parser(__file__, __doc__, SYSTEMS, rounds=3).parse_args()
    args.backbone, args.source, args.cells = "smollm2-135m", "gsm8k-aug", list(CELLS)
    return args


if __name__ == "__main__":
    main()
