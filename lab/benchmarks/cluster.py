"""A Ray cluster on one machine: faults, an input larger than the object store, and growth with the number of actors.

    python lab/benchmarks/cluster.py kills memory growth serve-kills --output runs/benchmarks/ray

The commands are `colar generate --ray` and `colar serve --ray` with an untrained toy model; machines and workers are
those of the tests, and a machine's death is noticed after Ray's 15 seconds.

kills     an actor, one of two machines, or the driver gets kill -9 at a random moment of a run's time, ten times each.
          The same command runs until it says that it is done: answers must be those of one process, each once, in whole
          files, and the one row that cannot be answered must be named.
memory    files of questions beyond the model's context, together larger than the object store, with questions that
          can be answered between them: the most memory of driver, workers and store.
growth    the forward pass is a sleep, so that two cores are not the limit: rows a second by the number of actors,
          and the time of the driver, Ray's own processes included, that a row costs.

Each part writes a JSON of its own, after each of its runs. The exit code is 1 where an answer is missing, is there
twice, or differs, and where a request ended in another way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch

from colar import files, progress
from colar.cli import main as colar
from colar.evaluation.provenance import collect_provenance
from colar.integrations import ray_answers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import ray_workers  # the machines are the tests'
from benchmarks.cluster_driver import Driver, workers
from benchmarks.cluster_serve import KINDS, serve_kill_runs
from families import save_untrained

STEP_S = 0.05
"""Of a simulated forward pass."""
BATCH = 4
LIMITS = ["--max_latents", "12", "--max_completion_length", "12", "--decoding", "sampled"]
STORE_BYTES = 80 * 2**20
"""Ray's least is 75 MiB."""
SMALL_PARTS = "from colar.integrations import ray_answers\nray_answers.PART_ROWS = 4"


def write_questions(path: Path, n: int) -> Path:
    return files.write_jsonl(
        path, ({"question": f"Tom has {i} toys. How many are {i} times {i}?"} for i in range(n))
    )


def rows_of(paths: list[Path]) -> list[dict[str, Any]]:
    """Answers without their times; ValueError where a file is torn."""
    found = []
    for path in paths:
        if not path.read_text().endswith("\n"):
            raise ValueError(f"{path} is torn")
        found += [{**row, "seconds": 0} for _, row in files.read_jsonl(path)]
    return found


def judged(folder: Path, alone: dict[str, Any]) -> dict[str, Any]:
    """The state of an output: rows, rows that are there twice, torn files, rows that differ from one process's."""
    found = rows_of(ray_answers.parts(folder))
    times = Counter(row["id"] for row in found)
    others = {path.name for path in folder.iterdir()} - {path.name for path in ray_answers.parts(folder)}
    return {
        "rows": len(found),
        "missing": len(alone.keys() - times.keys()),
        "twice": sum(n > 1 for n in times.values()),
        "different": sum(row != alone.get(row["id"]) for row in found),
        "torn": len(others - {".lock", "failed.jsonl"}),
    }


def kill_runs(
    cluster: Any, checkpoint: Path, work: Path, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The state of an output after each kill and what followed."""
    rng = Random(args.seed)
    source = write_questions(work / "questions.jsonl", args.rows)
    alone = alone_answers(checkpoint, source, work)
    with open(source, "a") as stream:
        stream.write(json.dumps({"id": "poison", "question": "1 + " * 5000}) + "\n")

    def start(folder: Path) -> Driver:
        words = on_cluster(cluster, generate(checkpoint, source, folder / "out"), 2)
        return Driver(folder, words, SMALL_PARTS)

    def machine() -> Any:
        return cluster.add_node(num_cpus=1, setup_worker_path=ray_workers.__file__)

    second = machine()
    started = time.monotonic()
    done = start(work / "whole").wait()
    seconds = time.monotonic() - started
    if "1 rows have no answer" not in done:
        raise SystemExit(f"a run without a kill failed: {done}")
    for kind in ("actor", "machine", "driver"):
        n = 0
        while n < args.kills:
            folder = work / f"{kind}-{time.monotonic_ns()}"
            driver = start(folder)
            moment = rng.uniform(0, seconds)
            time.sleep(moment)
            while kind == "actor" and not workers("Answerer") and driver.process.poll() is None:
                time.sleep(0.02)
            if driver.process.poll() is not None:
                continue
            parts = len(ray_answers.parts(folder / "out")) if (folder / "out").exists() else 0
            if kind == "actor":
                for each in workers("Answerer")[:1]:
                    each.kill()
            elif kind == "machine":
                second.kill_raylet()
            else:
                driver.kill()
            last, runs = driver.wait(), 1
            if kind == "machine":
                cluster.remove_node(second)
                cluster.wait_for_nodes()
                second = machine()
            while "1 rows have no answer" not in last and runs < 5:
                last, runs = start(folder).wait(), runs + 1
            n += 1
            state = judged(folder / "out", alone)
            yield {
                "killed": kind,
                "after_seconds": round(moment, 2),
                "parts_then": parts,
                "runs": runs,
                **state,
            }


def generate(checkpoint: Path, source: Path, output: Path, batch: int = BATCH) -> list[str]:
    """The words of `colar generate` on one process."""
    words = ["generate", str(checkpoint), "--input", str(source), "--output", str(output), *LIMITS]
    return [*words, "--batch_size", str(batch)]


def on_cluster(cluster: Any, words: list[str], actors: int) -> list[str]:
    return [*words, "--ray", cluster.address, "--ray_actors", str(actors)]


def alone_answers(checkpoint: Path, source: Path, work: Path) -> dict[str, Any]:
    """The answers of one process, by id."""
    path = work / "alone.jsonl"
    assert colar(generate(checkpoint, source, path)) == 0
    return {row["id"]: row for row in rows_of([path])}


def memory_run(cluster: Any, checkpoint: Path, work: Path, megabytes: int, rows: int) -> dict[str, Any]:
    """Answer a folder of `megabytes`, and watch memory."""
    alone = alone_answers(checkpoint, write_questions(work / "short.jsonl", rows), work)
    source, long = work / "large", "1 + " * 25_000
    given = [row for _, row in files.read_jsonl(work / "short.jsonl")]
    n = 10 * megabytes
    for part in range(4):
        mine = []
        for i in range(part, n, 4):
            mine.append({"id": f"long-{i}", "question": long})
            mine += [{"id": str(k + 1), **given[k]} for k in range(i, rows, n)]
        files.write_jsonl(source / f"{part}.jsonl", mine)
    peak: dict[str, float] = Counter()
    ended = threading.Event()

    def watch() -> None:
        mine = psutil.Process()
        while not ended.wait(0.2):
            now: dict[str, float] = {"driver_mib": mine.memory_info().rss / 2**20}
            for each in (*workers("raylet"), *workers("ray::")):
                with contextlib.suppress(psutil.Error):
                    used = each.memory_info()
                    # The store is the raylet's shared memory.
                    if each.name() == "raylet":
                        now["store_mib"] = max(now.get("store_mib", 0), used.shared / 2**20)
                    else:
                        own = (used.rss - used.shared) / 2**20
                        now["largest_worker_mib"] = max(now.get("largest_worker_mib", 0), own)
            for name, value in now.items():
                peak[name] = max(peak[name], round(value, 1))

    words = on_cluster(cluster, generate(checkpoint, source, work / "out"), 1)
    before = psutil.Process().memory_info().rss / 2**20
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    code = colar(words)
    seconds = time.monotonic() - started
    ended.set()
    watcher.join()
    failed = sum(1 for _ in files.read_jsonl(work / "out" / "failed.jsonl"))
    return {
        "input_mib": round(sum(path.stat().st_size for path in source.iterdir()) / 2**20, 1),
        "object_store_mib": STORE_BYTES / 2**20,
        "seconds": round(seconds, 1),
        "code": code,
        "failed": failed,
        "driver_mib_before": round(before, 1),
        **peak,
        **judged(work / "out", alone),
    }


class Simulated(ray_answers.Answerer):
    """An actor whose forward passes are sleeps: the engine around them is the real one."""

    def __init__(self, job: ray_answers.Job) -> None:
        super().__init__(job)

        def hidden(embeds_BTD: torch.Tensor, *others: Any) -> torch.Tensor:
            time.sleep(STEP_S)
            return embeds_BTD

        self.engine.engine.lm.hidden = hidden  # type: ignore[method-assign]


def growth_run(
    cluster: Any, checkpoint: Path, work: Path, actors: int, batch: int, each: int
) -> dict[str, Any]:
    """`each` rows an actor: their times at the driver, and its CPU time."""
    source = write_questions(work / "questions.jsonl", each * actors)
    times: list[float] = []
    real: Callable[..., Iterator[ray_answers.Done]] = ray_answers.answers

    def timed(*given: Any) -> Iterator[ray_answers.Done]:
        for done in real(*given):
            times.append(time.monotonic())
            yield done

    of_ray = workers("/raylet/raylet --") + workers("/gcs_server --")
    ray_answers.Answerer, answerer = Simulated, ray_answers.Answerer  # type: ignore[misc]
    ray_answers.answers = timed

    def cpu() -> tuple[float, float]:
        used = [sum(each.cpu_times()[:2]) for each in of_ray]
        return time.process_time(), sum(used)

    try:
        before, started = cpu(), time.monotonic()
        words = generate(checkpoint, source, work / "out", batch)
        assert colar(on_cluster(cluster, words, actors)) == 0
        after, seconds = cpu(), time.monotonic() - started
    finally:
        ray_answers.Answerer, ray_answers.answers = answerer, real  # type: ignore[misc]
    n = len(times)
    steps = [row["length"] for row in rows_of(ray_answers.parts(work / "out"))]
    # Of the middle half: all actors are at work there.
    first, last = times[n // 4], times[3 * n // 4]
    return {
        "actors": actors,
        "batch": batch,
        "rows": n,
        "rows_per_second": round((3 * n // 4 - n // 4) / max(last - first, 1e-9), 3),
        "thoughts": sum(steps) / n,
        "seconds_to_first_answer": round(times[0] - started, 2),
        "seconds": round(seconds, 2),
        "driver_cpu_ms_per_row": round(1000 * (after[0] - before[0]) / n, 3),
        "ray_cpu_ms_per_row": round(1000 * (after[1] - before[1]) / n, 3),
    }


def memory_runs(
    cluster: Any, checkpoint: Path, work: Path, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The one large input."""
    yield memory_run(cluster, checkpoint, work, args.megabytes, args.rows)


def growth_runs(
    cluster: Any, checkpoint: Path, work: Path, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """By the number of actors; then the largest number again with larger chunks."""
    settings = [(n, BATCH) for n in args.actors] + [(max(args.actors), 8 * BATCH)]
    for i, (n, batch) in enumerate(settings):
        yield growth_run(cluster, checkpoint, work / str(i), n, batch, args.each * batch // BATCH)


PARTS = {
    "kills": kill_runs,
    "memory": memory_runs,
    "growth": growth_runs,
    "serve-kills": serve_kill_runs,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--output", default="runs/benchmarks/ray", help="folder for the JSON of each part")
    parser.add_argument("--kills", type=int, default=10, help="kills of each kind")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is killed under a server's clients"
    )
    parser.add_argument(
        "--rows", type=int, default=96, help="questions of a run with kills, and of the large input"
    )
    parser.add_argument("--megabytes", type=int, default=120, help="size of the large input")
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--each", type=int, default=40, help="rows an actor where growth is measured")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    output = files.require_writable(args.output)
    bad = 0
    for part in args.parts:
        report = {"provenance": collect_provenance(), "seed": args.seed, "step_seconds": STEP_S, "rows": []}
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            checkpoint = save_untrained(work / "checkpoint")
            cpus = max(args.actors) if part == "growth" else 1
            # With Ray's own settings, which are not those of the tests.
            with ray_workers.cluster(
                work, cpus, object_store_memory=STORE_BYTES, _system_config={}
            ) as cluster:
                for row in PARTS[part](cluster, checkpoint, work, args):
                    report["rows"].append(row)
                    # As it goes: an end by force loses one run.
                    files.write_json(output / f"{part}.json", report)
                    progress.say(f"{part}: {row}")
                    bad += sum(
                        row.get(name, 0) for name in ("missing", "twice", "different", "torn", "wrong")
                    )
        print(json.dumps({"part": part, "rows": len(report["rows"]), "bad": bad}))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
