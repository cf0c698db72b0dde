"""Answers a second over HTTP: `colar serve` beside what one would use instead, in one run.

    python benchmarks/serve.py --output results/bench-serve

SmolLM2-135M in bfloat16, GSM8K questions, greedy, lengths as in `benchmarks/generate.py`: chains of `CHAIN` tokens (for
CoLaR at c = 5 a fifth as many latents), then `ANSWER` tokens. Clients ask one question after another, streamed.

    colar5          colar serve at c = 5, thoughts read as text
    colar5-hidden   the same with include_reasoning false: nothing is read
    cot             colar serve, the chain in tokens
    engine          the engine of colar5 alone, the same clients without HTTP: what HTTP costs
    transformers    `transformers serve` with continuous batching, the chain in tokens
    llama-cpp       llama-cpp-python's server, the chain in tokens (pip install 'llama-cpp-python[server]')

Each server runs in a process of its own, the clients in another one. Systems that are not installed are left out,
which the report and stderr say. Times are to the first event and to the whole answer; medians over the rounds. The
table goes to stdout, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import shared
from rich.console import Console
from work import ANSWER, FACTOR, Unending, load_model, load_questions

from colar import progress

CHAIN = 100
TOKENS = CHAIN + 1 + ANSWER
"""What a system makes that thinks in tokens: a chain, the separator, an answer."""
CLIENTS = (1, 8, 32)
SYSTEMS = ("colar5", "colar5-hidden", "cot", "engine", "transformers", "llama-cpp")
NEEDS = {"transformers": "transformers", "llama-cpp": "llama_cpp_python"}
"""The package of a system that may not be installed. The benchmark beside this file has llama.cpp's other name."""
READY_SECONDS = 300.0


@dataclass(frozen=True)
class Times:
    """Of one answer, in seconds since it was asked for."""

    first: float
    whole: float


Ask = Callable[[str], Awaitable[Times]]


def main() -> None:
    args = _arguments()
    if args.server:
        serve(args.server, args)
        return
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return
    missing = [system for system in args.systems if not _is_there(system)]
    for system in missing:
        progress.say(f"NOT MEASURED: {system} is not installed; the report has no cell of it")
    systems = [system for system in args.systems if system not in missing]
    order = shared.rounds_of(systems, args.rounds)
    runs = shared.run_systems(__file__, order, lambda run: f"{run['seconds']:.0f} s")
    cells = shared.medians(runs, systems)
    report = {
        "benchmark": "serve",
        "setting": {
            "backbone": args.backbone,
            "precision": "bfloat16",
            "chain": CHAIN,
            "answer": ANSWER,
            "requests": args.requests,
            "rounds": args.rounds,
            "threads": args.threads,
            "compile": args.compile,
        },
        "provenance": shared.provenance(),
        "missing": missing,
        **ratios(cells),
        "cells": cells,
        "runs": runs,
    }
    shared.publish(report, args.output, show, ratios(cells))


def ratios(cells: dict[str, dict[str, dict[str, float]]]) -> dict[str, float | None]:
    """The three numbers that the server is judged by; null where a system was not measured."""

    def rate(system: str, clients: int) -> float | None:
        cell = cells.get(system, {}).get(f"clients/{clients}")
        return None if cell is None else cell["answers_per_second"]

    def over(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else one / other

    kept = over(rate("colar5-hidden", 32), rate("engine", 32))
    return {
        "colar5_vs_transformers_serve_32": over(rate("colar5", 32), rate("transformers", 32)),
        "colar5_vs_transformers_serve_1": over(rate("colar5", 1), rate("transformers", 1)),
        "http_overhead_32": None if kept is None else 1 - kept,
    }


def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """One system's run over all numbers of clients."""
    started = time.perf_counter()
    questions = [example.question for example in load_questions(args.source, args.data_dir, limit=400)]
    if system == "engine":
        cells = asyncio.run(_engine_cells(questions, args))
    else:
        with running(system, args) as port:
            cells = asyncio.run(_cells(lambda question: ask_http(port, system, question), questions, args))
    return {"system": system, "cells": cells, "seconds": time.perf_counter() - started}


async def _cells(ask: Ask, questions: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    cells = {}
    for clients in args.clients:
        # Warm: weights are read, kernels chosen, and with --compile the step is made.
        await _round(ask, questions, clients, 1)
        started = time.perf_counter()
        times = await _round(ask, questions, clients, args.requests)
        seconds = time.perf_counter() - started
        cells[f"clients/{clients}"] = {
            "answers_per_second": len(times) / seconds,
            **_percentiles("first_event", [each.first for each in times]),
            **_percentiles("answer", [each.whole for each in times]),
        }
    return cells


async def _round(ask: Ask, questions: Sequence[str], clients: int, requests: int) -> list[Times]:
    """Every client asks its questions one after another."""

    async def client(number: int) -> list[Times]:
        places = [(number + clients * i) % len(questions) for i in range(requests)]
        return [await ask(questions[place]) for place in places]

    found = await asyncio.gather(*map(client, range(clients)))
    return [times for each in found for times in each]


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 19
    return {f"{name}_p50_seconds": cuts[9], f"{name}_p95_seconds": cuts[18]}


# Clients


def body_of(system: str, question: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request that makes all systems do the same work."""
    if system in ("transformers", "llama-cpp"):
        body: dict[str, Any] = {"model": "model", "prompt": question, "stream": True, "max_tokens": TOKENS}
        if system == "transformers":
            # No token has this id: the answer ends at its limit.
            fixed = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": -1}
            body |= {"model": _model_folder(), "generation_config": json.dumps(fixed)}
        else:
            body |= {"temperature": 0, "logit_bias": {"0": -100, "2": -100}}
        return "/v1/completions", body
    body = {"model": "model", "messages": [{"role": "user", "content": question}], "stream": True}
    if system == "colar5-hidden":
        body["include_reasoning"] = False
    return "/v1/chat/completions", body


async def ask_http(port: int, system: str, question: str) -> Times:
    """Ask once, on a connection of its own. RuntimeError for anything but a whole stream."""
    path, body = body_of(system, question)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    first = 0.0
    said = b""
    while part := await reader.read(65536):
        said += part
        if not first and b"data:" in said:
            first = time.perf_counter() - started
    writer.close()
    if not said.startswith(b"HTTP/1.1 200") or b"[DONE]" not in said[-200:]:
        raise RuntimeError(f"{system}: {said[:2000]!r} ... {said[-300:]!r}")
    return Times(first, time.perf_counter() - started)


async def _engine_cells(questions: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The same clients on the engine itself."""
    from colar.engine.async_engine import AsyncEngine
    from colar.engine.request import Request

    engine, method, decoding = _engine("colar5", args)
    running_engine = AsyncEngine(engine)
    params = method.Params(compression_factor=FACTOR)

    async def ask(question: str) -> Times:
        started = time.perf_counter()
        first = 0.0
        async for _ in running_engine.stream(Request("x", question, params, decoding)):
            first = first or time.perf_counter() - started
        return Times(first, time.perf_counter() - started)

    cells = await _cells(ask, questions, args)
    await running_engine.close()
    return cells


# Servers


@contextlib.contextmanager
def running(system: str, args: argparse.Namespace) -> Iterator[int]:
    """A server in a process of its own; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(Path(args.output) / f"{system}.log", "wb") as log:
        process = subprocess.Popen(_command(system, port, args), stdout=log, stderr=log)
        try:
            _wait(process, port, system)
            yield port
        finally:
            process.terminate()
            process.wait(60)


def _command(system: str, port: int, args: argparse.Namespace) -> list[str]:
    if system == "transformers":
        program = str(Path(sys.executable).parent / "transformers")
        options = ["--continuous-batching", "--device", "cpu", "--dtype", "bfloat16", "--port", str(port)]
        return [program, "serve", _model_folder(), "--host", "127.0.0.1", *options]
    if system == "llama-cpp":
        from llama_cpp import bfloat16_model

        options = ["--model", str(bfloat16_model()), "--port", str(port), "--n_threads", str(args.threads)]
        return [sys.executable, "-m", "llama_cpp.server", *options, "--model_alias", "model"]
    more = ["--compile"] if args.compile else []
    options = ["--server", system, "--port", str(port), "--threads", str(args.threads), *more]
    return [sys.executable, __file__, *options, "--backbone", args.backbone]


def _wait(process: subprocess.Popen[bytes], port: int, system: str) -> None:
    """Until the server accepts connections."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"{system} ended with {process.returncode}: see its log")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise SystemExit(f"{system} was not ready after {READY_SECONDS:.0f} s: see its log")


def _model_folder() -> str:
    """The backbone as a Hugging Face folder."""
    from colar.model import backbones

    folder = backbones.cache_folder() / "smollm2-135m"
    if not folder.exists():
        backbones.load("smollm2-135m", "bfloat16")
    return str(folder)


def _engine(system: str, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The engine of one of ours, its method, and the lengths of the work."""
    import torch

    from colar.engine.engine import Engine
    from colar.engine.request import Decoding

    torch.set_num_threads(args.threads)
    thinks_in_tokens = system == "cot"
    lm, method = load_model(args.backbone, "bfloat16", "cot" if thinks_in_tokens else "colar")
    thoughts = CHAIN if thinks_in_tokens else CHAIN // FACTOR
    decoding = Decoding(max_latents=thoughts, max_completion_length=ANSWER)
    return Engine(lm, Unending(method), max(CLIENTS), compile=args.compile), method, decoding


class Fixed(Unending):
    """A served method at one factor: what `colar serve` reads of a method is the wrapped one's."""

    def __init__(self, method: Any) -> None:
        super().__init__(method)
        self.latent = method.latent

    def choices(self) -> dict[str, Any]:
        return {"compression_factor": [FACTOR]} if self.latent else {}


def serve(system: str, args: argparse.Namespace) -> None:
    """Be the server of one of ours, as `colar serve` is."""
    from colar.serve import app, server
    from colar.serve.keys import Keys
    from colar.serve.limits import Limits
    from colar.serve.logs import Log
    from colar.serve.served import Served

    engine, method, decoding = _engine(system, args)
    limits, log = Limits(), Log()
    served = Served("model", engine.lm, Fixed(method), engine, decoding, limits.max_waiting)
    bound = server.bind("127.0.0.1", args.port)
    server.run(server.make(app.build([served], limits, Keys([]), log), limits, log), bound)


def show(report: dict[str, Any]) -> None:
    columns = ("system", "clients", "answers/s", "first p50", "first p95", "answer p50", "answer p95")
    table = shared.table("Over HTTP, seconds", columns, ("system",))
    names = ("answers_per_second", "first_event_p50_seconds", "first_event_p95_seconds")
    names += ("answer_p50_seconds", "answer_p95_seconds")
    for system, cells in report["cells"].items():
        for cell, quantities in cells.items():
            numbers = [shared.shown(quantities[name]) for name in names]
            table.add_row(system, cell.removeprefix("clients/"), *numbers)
    for system in report["missing"]:
        table.add_row(system, "not installed")
    Console().print(table)


def _is_there(system: str) -> bool:
    try:
        return system not in NEEDS or bool(importlib.metadata.version(NEEDS[system]))
    except importlib.metadata.PackageNotFoundError:
        return False


def _arguments() -> argparse.Namespace:
    parser = shared.add_model_options(shared.parser(__file__, __doc__, SYSTEMS, rounds=3))
    parser.add_argument("--clients", nargs="+", type=int, default=list(CLIENTS), help="clients at a time")
    parser.add_argument("--requests", type=int, default=4, help="questions of each client")
    parser.add_argument("--compile", action="store_true", help="compile our decode step")
    parser.add_argument("--server", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
