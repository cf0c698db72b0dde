"""Answers a second over HTTP: `colar serve` beside what one would use instead, in one run.

    python lab/benchmarks/serve.py --output runs/benchmarks/serve

SmolLM2-135M in bfloat16, GSM8K questions, greedy, lengths as in `lab/benchmarks/generate.py` (`servers.py` has them).

    colar5          colar serve at c = 5, thoughts read as text
    colar5-hidden   the same with include_reasoning false: nothing is read
    cot             colar serve, the chain in tokens
    colar5-graphs, cot-graphs   the same with CUDA graphs; on request (--systems), for a GPU
    engine          the engine of colar5 alone, the same clients without HTTP: what HTTP costs
    transformers    `transformers serve` with continuous batching, the chain in tokens
    llama-cpp       llama.cpp's own server, the chain in tokens, continuous batching

Memory is the GPU's that is in use at the end, or without one the most that the server's process had.
Each server runs in a process of its own, the clients in another one. Clients ask one question after another, streamed,
for `--seconds`; what has begun by then is finished and counted. Times are to the first event and to the whole answer.
All systems run in turns, `--rounds` times; cells are medians over the rounds. All of it is a quarter of an hour on two
cores with AMX.

llama.cpp comes as a wheel: pip install xllamacpp gguf. (llama-cpp-python is compiled for an hour on two cores, and its
server answers one request after another.) A cell that fails is left out, with its error in `runs`, and the rest goes
on. The table goes to stdout, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import quantiles
from typing import Any

import servers
import shared
from rich.console import Console
from servers import CHAIN, Times
from work import ANSWER, FACTOR, load_questions

CLIENTS = (1, 8, 32)
DEFAULT = ("colar5", "colar5-hidden", "cot", "engine", "transformers", "llama-cpp")
SYSTEMS = (*DEFAULT, *servers.GRAPHS)
OURS = ("colar5", "colar5-hidden", "cot", "engine", *servers.GRAPHS)
WARM_CLIENTS = 2
"""Clients that ask once before a cell is measured: of a server that answers one after another, more would take long."""
CELL_SECONDS = 240.0
"""A cell that takes longer has failed."""

Ask = Callable[[str], Awaitable[Times]]
Cell = dict[str, float]


def main() -> None:
    args = _arguments()
    if args.server:
        servers.serve(args.server, args)
        return
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return
    order = shared.rounds_of(args.systems, args.rounds)
    runs = shared.run_systems(__file__, order, in_short, args.minutes)
    setting = {"backbone": args.backbone, "precision": "bfloat16", "chain": CHAIN, "answer": ANSWER}
    setting |= {"slots": args.slots, "positions": servers.POSITIONS, "seconds": args.seconds}
    setting |= {"clients": args.clients, "threads": args.threads, "rounds": args.rounds}
    report = {
        "benchmark": "serve",
        "setting": setting,
        "provenance": shared.provenance() | versions(),
        "cells": shared.medians(runs, args.systems),
        "runs": runs,
    }
    shared.publish(report, args.output, show, report["cells"])


def in_short(run: shared.Run) -> str:
    rates = [f"{shared.shown(cell['answers_per_second'])} answers/s" for cell in run["cells"].values()]
    return f"{', '.join([*rates, *run['failed'].values()])}; {run['seconds']:.0f} s"


def versions() -> dict[str, str]:
    """Of the servers that are not ours, where they are installed."""
    packages = ("transformers", "xllamacpp")
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# Runs


def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """One system's run over all numbers of clients."""
    started = time.perf_counter()
    questions = [example.question for example in load_questions(args.source, args.data_dir, limit=400)]
    if system == "engine":
        cells = asyncio.run(_engine_cells(questions, args))
        memory = shared.used_gib()
    else:
        with servers.running(system, args) as (port, model, process):

            async def ask(question: str) -> Times:
                return await servers.ask(port, system, model, question)

            cells = asyncio.run(_cells(ask, questions, args))
            memory = shared.used_gib(process)
    run = {"system": system, "cells": {}, "failed": {}, "seconds": time.perf_counter() - started}
    for name, cell in cells.items():
        if isinstance(cell, str):
            run["failed"][name] = f"{name}: {cell}"
        else:
            run["cells"][name] = cell | {"memory_gib": memory}
    return run


async def _engine_cells(questions: Sequence[str], args: argparse.Namespace) -> dict[str, Cell | str]:
    """The same clients on the engine itself."""
    from colar.engine.async_engine import AsyncEngine, run_in_temporary_thread
    from colar.engine.request import Request

    engine, method, decoding = run_in_temporary_thread(partial(servers.engine, "engine", args))
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


async def _cells(ask: Ask, questions: Sequence[str], args: argparse.Namespace) -> dict[str, Cell | str]:
    """The cell of each number of clients, or why it failed."""
    cells: dict[str, Cell | str] = {}
    for clients in args.clients:
        name = f"clients/{clients}"
        try:
            async with asyncio.timeout(CELL_SECONDS):
                cells[name] = await _cell(ask, questions, clients, args.seconds)
        except TimeoutError:
            cells[name] = f"not done after {CELL_SECONDS:.0f} s"
        except (RuntimeError, OSError) as error:
            cells[name] = f"{type(error).__name__}: {error}"[:1000]
    return cells


async def _cell(ask: Ask, questions: Sequence[str], clients: int, seconds: float) -> Cell:
    # Warm: weights are read, and kernels chosen. Other questions than are measured:
    # none may be answered from a cache of prompts.
    await asyncio.gather(*map(ask, questions[-min(clients, WARM_CLIENTS) :]))
    started = time.perf_counter()

    async def client(number: int) -> list[Times]:
        mine: list[Times] = []
        while not mine or time.perf_counter() - started < seconds:
            place = number + clients * len(mine)
            mine.append(await ask(questions[place % len(questions)]))
        return mine

    found = await asyncio.gather(*map(client, range(clients)))
    times = [each for mine in found for each in mine]
    return {
        "answers": len(times),
        "answers_per_second": len(times) / (time.perf_counter() - started),
        **_percentiles("first_event", [each.first for each in times]),
        **_percentiles("answer", [each.whole for each in times]),
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 19
    return {f"{name}_p50_seconds": cuts[9], f"{name}_p95_seconds": cuts[18]}


def show(report: dict[str, Any]) -> None:
    columns = ("system", "clients", "answers/s", "first p50", "first p95", "answer p50", "answer p95", "GiB")
    table = shared.table("Over HTTP, seconds", columns, ("system",))
    names = ("answers_per_second", "first_event_p50_seconds", "first_event_p95_seconds")
    names += ("answer_p50_seconds", "answer_p95_seconds", "memory_gib")
    for system, cells in report["cells"].items():
        for name, cell in cells.items():
            numbers = [shared.shown(cell[key]) for key in names]
            table.add_row(system, name.removeprefix("clients/"), *numbers)
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.add_model_options(shared.parser(__file__, __doc__, SYSTEMS, rounds=3))
    parser.set_defaults(systems=list(DEFAULT))
    parser.add_argument("--clients", nargs="+", type=int, default=list(CLIENTS), help="clients at a time")
    parser.add_argument("--slots", type=int, default=32, help="rows that each system may run at a time")
    parser.add_argument("--seconds", type=float, default=4, help="how long clients of a cell ask")
    parser.add_argument("--server", choices=(*OURS, "llama-cpp"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
