"""A reference from outside: llama.cpp's decode of the same model beside our CoT and CoLaR, in one run.

    pip install xllamacpp gguf        # llama.cpp as a wheel; `make smollm2` brings the model
    python lab/benchmarks/llama_cpp.py --output runs/benchmarks/llama-cpp
    python lab/benchmarks/llama_cpp.py --cells b1/100 --systems llama.cpp llama.cpp-q8 llama.cpp-q4 cot cot-int8 \
        cot-int4 --output runs/benchmarks/llama-cpp-quantised

The work is that of `lab/benchmarks/generate.py` (cells b1/100 and b32/100: GSM8K questions, chains of 100 tokens, or 20
latents at c = 5, then 4 tokens of an answer). The packaged model is a GGUF file in 4 bits, `llama.cpp-q4`; it is
written again with bfloat16 matrices, the precision that ours computes in, and in 8 bits, `llama.cpp-q8`. llama.cpp
decodes tokens; no serving engine feeds latents back. Committed records of ours are named as those of `generate`.
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
from work import ANSWER, load_questions

from colar import files
from colar.model import backbones

CELLS = {"b1/100": 1, "b32/100": 32}
SYSTEMS = ("llama.cpp", "cot", "colar5")
FILES = {"llama.cpp": "BF16", "llama.cpp-q8": "Q8_0", "llama.cpp-q4": None}
"""llama.cpp's systems, and the type in which their matrices are written again; None: as they are."""
TOKENS = 100 + 1 + ANSWER
"""Tokens of a chain, the separator and an answer."""


def main() -> None:
    args = _arguments()
    if args.system:
        print(json.dumps(measure(args)))
        return
    # Our own systems do without it.
    versions = {"xllamacpp": _version()} if any(name in FILES for name in args.systems) else {}
    order = shared.rounds_of(args.systems, args.rounds)
    runs = shared.run_systems(__file__, order, lambda run: f"{run['seconds']:.0f} s")
    cells = shared.medians(runs, args.systems)
    setting = {
        "rounds": args.rounds,
        "threads": args.threads,
        "precision": "bfloat16",
        "tokens": TOKENS,
    }
    report = {
        "benchmark": "llama_cpp",
        "setting": setting,
        "provenance": shared.provenance() | versions,
        "cells": cells,
        "runs": runs,
    }
    shared.publish(report, args.output, show, cells)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One system's run over the cells."""
    if args.system not in FILES:
        return generate.measure(args.system, args)
    started = time.perf_counter()
    questions = [example.question for example in load_questions(args.source, args.data_dir)]
    model = model_file(FILES[args.system])
    cells = {name: llama_cpp(model, questions, CELLS[name], args.threads) for name in args.cells}
    return {"system": args.system, "cells": cells, "seconds": time.perf_counter() - started}


def llama_cpp(model: Path, questions: Sequence[str], slots: int, threads: int) -> dict[str, float]:
    """`slots` questions at once through llama.cpp's server, in this process; as many others warm it up."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel = slots
    params.n_ctx = slots * 512  # shared by all slots
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
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

    # A thread for each question: the server puts what waits at the same time into one batch.
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


def model_file(matrices: str | None) -> Path:
    """The packaged GGUF file, or the same with matrices of another type; written once into the cache."""
    import gguf

    if matrices is None:
        return Path(backbones.smollm2_gguf())
    target = files.cache_folder() / f"smollm2-135m-{matrices.lower()}.gguf"
    if target.exists():
        return target
    reader = gguf.GGUFReader(backbones.smollm2_gguf())
    partial = target.with_suffix(".partial")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(partial, architecture)
    # The metadata as it is. GGUF.* and the architecture are the writer's own.
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    # Vectors (norms) stay in float32, as llama.cpp's own converter leaves them.
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType[matrices if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


def show(report: dict[str, Any]) -> None:
    columns = ("cell", "system", "questions/s", "ms/step")
    table = shared.table("One model", columns, texts=("cell", "system"))
    for name in next(iter(report["cells"].values())):
        for system, cells in report["cells"].items():
            cell = cells[name]
            questions = shared.shown(cell["questions_per_second"])
            table.add_row(name, system, questions, shared.shown(cell["ms_per_step"]))
    Console(width=80).print(table)


def _version() -> str:
    """llama.cpp's wheel; SystemExit where something that it needs is not installed."""
    try:
        import gguf  # noqa: F401
        import xllamacpp
    except ImportError as error:
        raise SystemExit(f"this benchmark needs {error.name}: pip install xllamacpp gguf") from None
    return str(xllamacpp.__version__)


def _arguments() -> argparse.Namespace:
    every = sorted({*SYSTEMS, *FILES, *generate.PRECISIONS})
    parser = shared.add_model_options(shared.parser(__file__, __doc__, every, rounds=3))
    parser.set_defaults(systems=list(SYSTEMS))
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    args = parser.parse_args()
    if any(name in FILES for name in args.systems) and args.backbone != "smollm2-135m":
        raise SystemExit("llama.cpp reads smollm2-135m alone: name --systems without it for another backbone")
    return args


if __name__ == "__main__":
    main()
