"""Answers a second over HTTP: `colar serve` beside what one would use instead, in one run.

    python lab/benchmarks/serve.py --output runs/benchmarks/serve
    python lab/benchmarks/serve.py --smoke          tiny, a second a cell: does all of it run?

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
server answers one request after another.) What fails is a cell with an error, and the rest goes on. Each run is a line
of `runs.jsonl`: the same command again does what is left, and again what has failed. The table goes to stdout, then one
JSON line.
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
from statistics import median, quantiles
from typing import Any

import servers
import shared
from rich.console import Console
from servers import CHAIN, Times
from work import ANSWER, FACTOR, load_questions

from colar import progress

CLIENTS = (1, 8, 32)
DEFAULT = ("colar5", "colar5-hidden", "cot", "engine", "transformers", "llama-cpp")
SYSTEMS = (*DEFAULT, *servers.GRAPHS)
OURS = ("colar5", "colar5-hidden", "cot", "engine", *servers.GRAPHS)
WARM_CLIENTS = 2
"""Clients that ask once before a cell is measured: of a server that answers one after another, more would take long."""
CELL_SECONDS = 240.0
"""A cell that takes longer has failed."""

Ask = Callable[[str], Awaitable[Times]]
Cell = dict[str, Any]
"""Numbers by name, or "error"."""


def main() -> None:
    args = _arguments()
    if args.server:
        servers.serve(args.server, args)
        return
    if args.system:
        print(json.dumps(measure(args.system, args)))
        return
    runs = run_all(args)
    cells = medians(runs, args.systems)
    report = {
        "benchmark": "serve",
        "setting": setting(args) | {"rounds": args.rounds, "positions": servers.POSITIONS},
        "provenance": shared.provenance() | versions(),
        **ratios(cells),
        "cells": cells,
        "runs": runs,
    }
    shared.publish(report, args.output, show, ratios(cells))


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """What runs must have in common."""
    return {
        "backbone": args.backbone,
        "precision": "bfloat16",
        "chain": CHAIN,
        "answer": ANSWER,
        "slots": args.slots,
        "seconds": args.seconds,
        "clients": args.clients,
        "threads": args.threads,
    }


def versions() -> dict[str, str]:
    """Of the servers that are not ours, where they are installed."""
    packages = ("transformers", "xllamacpp")
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# Runs


def run_all(args: argparse.Namespace) -> list[shared.Run]:
    """All systems in turns, but for runs that an earlier command has done."""
    path = Path(args.output) / "runs.jsonl"
    done = _read(path, setting(args))
    order = [(number, system) for number in range(args.rounds) for system in args.systems]
    left = [each for each in order if each not in done]
    deadline = time.monotonic() + 60 * args.minutes
    for number, system in progress.track(left, "serve"):
        if time.monotonic() < deadline:
            run = {"system": system, "round": number, **_run(system)}
        else:
            run = {"system": system, "round": number, "cells": {}, "error": "not run, the time is up"}
        progress.say(f"{system}: {run.get('error') or _in_short(run)}")
        done[number, system] = run
        with path.open("a") as lines:
            lines.write(json.dumps({"setting": setting(args), **run}) + "\n")
    return [done[each] for each in order]


def _read(path: Path, wanted: dict[str, Any]) -> dict[tuple[int, str], shared.Run]:
    """Runs of the same setting that have succeeded."""
    found: dict[tuple[int, str], shared.Run] = {}
    if not path.exists():
        return found
    for line in path.read_text().splitlines():
        run = json.loads(line)
        if run.pop("setting") == wanted and not _errors(run):
            found[run["round"], run["system"]] = run
    return found


def _run(system: str) -> shared.Run:
    """A system's run in a process of its own, or its error."""
    started = time.perf_counter()
    try:
        return shared.run_in_process(__file__, system)
    except SystemExit as failed:
        last = str(failed).strip().splitlines()[-1:]
        return {"cells": {}, "error": " ".join(last)[:600], "seconds": time.perf_counter() - started}


def _errors(run: shared.Run) -> list[str]:
    """What has failed in a run."""
    cells = [cell["error"] for cell in run["cells"].values() if "error" in cell]
    return [run["error"], *cells] if "error" in run else cells


def _in_short(run: shared.Run) -> str:
    rates = [shared.shown(cell.get("answers_per_second")) or "failed" for cell in run["cells"].values()]
    return f"{' / '.join(rates)} answers/s, {run['seconds']:.0f} s"


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
    for cell in cells.values():
        cell["memory_gib"] = memory
    return {"cells": cells, "seconds": time.perf_counter() - started}


async def _engine_cells(questions: Sequence[str], args: argparse.Namespace) -> dict[str, Cell]:
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


async def _cells(ask: Ask, questions: Sequence[str], args: argparse.Namespace) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for clients in args.clients:
        try:
            async with asyncio.timeout(CELL_SECONDS):
                cell = await _cell(ask, questions, clients, args.seconds)
        except TimeoutError:
            cell = {"error": f"not done after {CELL_SECONDS:.0f} s"}
        except (RuntimeError, OSError) as error:
            cell = {"error": f"{type(error).__name__}: {error}"[:1000]}
        cells[f"clients/{clients}"] = cell
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


# Results


def medians(runs: Sequence[shared.Run], systems: Sequence[str]) -> dict[str, dict[str, Cell]]:
    """System -> cell -> quantity -> its median over the runs in which the cell succeeded, or the last error."""
    found: dict[str, dict[str, Cell]] = {}
    for system in systems:
        mine = [run for run in runs if run["system"] == system]
        names = {name: None for run in mine for name in run["cells"]}
        found[system] = {
            name: _median([run["cells"][name] for run in mine if name in run["cells"]]) for name in names
        }
        if not names:
            found[system] = {"all": {"error": mine[-1]["error"]}}
    return found


def _median(cells: Sequence[Cell]) -> Cell:
    good = [cell for cell in cells if "error" not in cell]
    if not good:
        return {"error": cells[-1]["error"]}
    return {"runs": len(good)} | {name: median(cell[name] for cell in good) for name in good[0]}


def ratios(cells: dict[str, dict[str, Cell]]) -> dict[str, float | None]:
    """The three numbers that the server is judged by; null where a system was not measured."""

    def rate(system: str, clients: int) -> float | None:
        found: float | None = cells.get(system, {}).get(f"clients/{clients}", {}).get("answers_per_second")
        return found

    def over(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else one / other

    kept = over(rate("colar5-hidden", 32), rate("engine", 32))
    return {
        "colar5_vs_transformers_serve_32": over(rate("colar5", 32), rate("transformers", 32)),
        "colar5_vs_transformers_serve_1": over(rate("colar5", 1), rate("transformers", 1)),
        "http_overhead_32": None if kept is None else 1 - kept,
    }


def show(report: dict[str, Any]) -> None:
    columns = ("system", "clients", "answers/s", "first p50", "first p95", "answer p50", "answer p95", "GiB")
    table = shared.table("Over HTTP, seconds", columns, ("system",))
    names = ("answers_per_second", "first_event_p50_seconds", "first_event_p95_seconds")
    names += ("answer_p50_seconds", "answer_p95_seconds", "memory_gib")
    for system, cells in report["cells"].items():
        for name, cell in cells.items():
            numbers = ["failed"] if "error" in cell else [shared.shown(cell[key]) for key in names]
            table.add_row(system, name.removeprefix("clients/"), *numbers)
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = shared.add_model_options(shared.parser(__file__, __doc__, SYSTEMS, rounds=3))
    parser.set_defaults(systems=list(DEFAULT))
    parser.add_argument("--clients", nargs="+", type=int, default=list(CLIENTS), help="clients at a time")
    parser.add_argument("--slots", type=int, default=32, help="rows that each system may run at a time")
    parser.add_argument("--seconds", type=float, default=4, help="how long clients of a cell ask")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny, one round, a second a cell, 1 and 2 clients"
    )
    parser.add_argument("--server", choices=(*OURS, "llama-cpp"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.backbone, args.rounds, args.seconds, args.clients = "tiny", 1, 1.0, [1, 2]
    Path(args.output).mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
