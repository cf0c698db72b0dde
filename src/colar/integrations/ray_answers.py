"""Answers from the engines of a Ray cluster: `colar generate` and `colar evaluate` with `--ray ADDRESS`.

    input files -> chunks (Ray tasks, one a file)  ->  Answerer (Ray actors, an engine each)  ->  parts (this process)

Ray Data does scheduling, retries and back-pressure. A row of its data set is a chunk of requests, which is sent to an
actor, and sent again if the actor is killed. A chunk is returned as a whole, so that no answer is returned twice.

    OUTPUT/part-000001.jsonl    answers, rows as `colar generate` writes them; a part is written whole or not at all
    OUTPUT/failed.jsonl         rows of the last run without an answer, with the reason; the next run tries them again

`make_records` is that of `evaluate.py` with these actors in place of an engine: they return completions, which this
process judges. It has the model too, on its CPU, to check that questions fit and to tokenise reference chains.
"""

import asyncio
import contextlib
import functools
import itertools
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from colar import files, processes, progress
from colar.data import data_files
from colar.engine.async_engine import AsyncEngine, run_in_temporary_thread
from colar.engine.completion import Completion
from colar.engine.engine import Engine
from colar.engine.request import Request
from colar.evaluation import answer_files
from colar.evaluation.evaluate import AnswerSettings, EvaluatedModel, Question, make_record
from colar.integrations import ray_cluster
from colar.integrations.ray_cluster import ray
from colar.methods import pretrained
from colar.model.latent_lm import LatentLM

Keys = npt.NDArray[np.uint64]
"""Keys of answers, sorted: ten million require 80 MB, once on each machine."""
PART_ROWS = 10_000
"""Most answers of a part."""
PART_SECONDS = 30.0
"""Time after which a part is written even if it is not full: about as much work is lost if the driver is killed."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings by which an actor loads a checkpoint and starts its engine."""

    checkpoint: str
    """A folder that every machine sees, or a Hub id."""
    dtype: str
    backbone: str | None
    device: str | None
    quantization: str | None
    batch_size: int
    eager: bool

    def start(self) -> AsyncEngine:
        # In a temporary thread: this thread's OpenMP threads would compete with the engine's (`async_engine.py`).
        lm, method = run_in_temporary_thread(
            lambda: pretrained.load_for_inference(
                self.checkpoint, self.dtype, self.backbone, self.device, self.quantization
            )
        )
        return AsyncEngine(Engine(lm, method, self.batch_size, cuda_graphs=False if self.eager else None))


@dataclass(frozen=True)
class Job:
    """All that an actor needs to answer requests."""

    engine: EngineSettings
    make_row: Callable[[LatentLM, Completion, Any], dict[str, Any]]
    """Makes the row that is returned, from the actor's model, a completion and `Task.extra`."""


@dataclass(frozen=True)
class FileJob(Job):
    """A job whose requests come from files."""

    make_requests: Callable[[list[dict[str, Any]]], list[Request]]
    """Makes the requests of rows that `question_row` has made."""
    settings: Mapping[str, Any]
    """Everything that an answer depends on, apart from its request."""
    columns: Mapping[str, str] | None = None
    """Columns that a user has named, of `question_row`."""


class Task(NamedTuple):
    """A request on its way to an actor."""

    place: str
    """File and line, or the name of the question."""
    request: Request
    extra: Any
    """Input of `make_row` beside the completion: the expected answer, or the number of the question."""


class Done(NamedTuple):
    """A row of the output, or of failed.jsonl; on its way to an actor, an input row that is no valid request."""

    row: dict[str, Any]
    failed: bool


def run(job: FileJob, source: str, output: str, pool: ray_cluster.Pool) -> None:
    """Answer the requests that have no answer in `output` yet.

    ValueError before any work if the input, the output, the cluster or one of its machines fails a check, and at the
    end if rows have failed.
    """
    paths = input_files(Path(source))
    folder = files.require_writable(output)
    if Path(source).resolve() == folder.resolve():
        raise ValueError(f"--output must be another folder than --input, got {output} for both")
    with processes.locked(folder):
        answered = _keys_answered(folder, job.settings)
        with ray_cluster.joined(pool, job.engine.device, [job.engine.checkpoint], list(paths)) as actors:
            _answer(job, paths, folder, answered, actors)


def input_files(source: Path) -> dict[str, str]:
    """Absolute path of each file to read -> prefix of its rows' default ids: in a folder, the file's name."""
    if not source.exists():
        raise ValueError(f"--input must be a file or a folder, and there is none at {source}")
    named = source.is_dir()
    paths = sorted(filter(data_files.is_user_file, source.iterdir() if named else [source]))
    if not paths:
        endings = ", ".join(data_files.USER_ENDINGS)
        raise ValueError(f"--input: {source} is, or holds, no file that ends in {endings}")
    return {str(path.resolve()): f"{path.name}:" if named else "" for path in paths}


def _keys_answered(folder: Path, settings: Mapping[str, Any]) -> Keys:
    """Keys of the answers in a folder. ValueError if another checkpoint, seed or decoding gave them."""
    keys = (answer_files.find_answers(str(part), settings) for part in parts(folder))
    numbers = (int(key, 16) for key in itertools.chain.from_iterable(keys))
    return np.sort(np.fromiter(numbers, dtype=np.uint64))


def parts(folder: Path) -> list[Path]:
    """The files of a folder of answers, the oldest first."""
    return sorted(folder.glob("part-*.jsonl"))


@contextlib.contextmanager
def append_parts(folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give a function that writes answers into new parts of a folder, numbered after the existing ones."""
    # Left by a run that was killed while it wrote a part.
    for torn in folder.glob(".part-*"):
        torn.unlink()
    number = max((int(part.stem.removeprefix("part-")) for part in parts(folder)), default=0)
    rows: list[dict[str, Any]] = []
    started = 0.0

    def write(row: dict[str, Any]) -> None:
        nonlocal started
        if not rows:
            started = time.monotonic()
        rows.append(row)
        if len(rows) >= PART_ROWS or time.monotonic() - started >= PART_SECONDS:
            write_part()

    def write_part() -> None:
        nonlocal number
        number += 1
        files.write_jsonl(folder / f"part-{number:06d}.jsonl", rows)
        rows.clear()

    try:
        yield write
    finally:
        # Also after Ctrl-C, so that these requests are not answered again.
        if rows:
            write_part()


def _answer(
    job: FileJob, paths: Mapping[str, str], folder: Path, answered: Keys, actors: ray_cluster.Actors
) -> None:
    """Write an answer for each request that has none, or the reason for its failure."""
    failures = folder / "failed.jsonl"
    failures.unlink(missing_ok=True)
    written: set[str] = set()
    failed = repeated = 0
    with (
        append_parts(folder) as write_answer,
        files.append_jsonl(failures) as write_failed,
        progress.bar("generate") as bar,
    ):
        chunks = chunks_of(job, paths, ray.put(answered), actors.n)
        for done in answers(job, chunks, actors):
            bar.update()
            if done.failed:
                failed += 1
                write_failed(done.row)
                bar.set_postfix_str(f"{failed} failed", refresh=False)
            elif done.row["key"] in written:
                repeated += 1
            else:
                written.add(done.row["key"])
                write_answer(done.row)
    twice = f", {repeated} rows are there twice" if repeated else ""
    progress.say(f"wrote {folder} ({len(written)} new answers, {len(answered)} were there{twice})")
    if failed:
        raise ValueError(
            f"{failed} rows have no answer: {failures} says why; the same command tries them again"
        )
    failures.unlink()


def chunks_of(job: FileJob, paths: Mapping[str, str], answered: Any, n: int) -> Any:
    """The data set of the files' chunks, which are read on demand."""
    entries = [{"path": path, "prefix": prefix} for path, prefix in paths.items()]
    read = functools.partial(chunks_of_file, job=job, answered=answered)
    # No CPU is reserved for reading, because the actors may hold all that are left after machines are lost.
    readers = ray.data.TaskPoolStrategy(size=min(n, len(entries)))
    source = ray.data.from_items(entries, override_num_blocks=len(entries))
    return source.flat_map(read, compute=readers, num_cpus=0)


def answers(job: Job, chunks: Any, actors: ray_cluster.Actors) -> Iterator[Done]:
    """Yield the rows that the actors make from a data set of chunks, in the order in which chunks are answered."""
    # While the last rows of a chunk finish, those of the next one fill the engine's batch; a third one waits.
    pool = ray.data.ActorPoolStrategy(
        size=actors.n, max_concurrent_calls_per_actor=2, max_tasks_in_flight_per_actor=3
    )
    done_chunks = chunks.map(Answerer, fn_constructor_args=(job,), compute=pool, **actors.reserved)
    for chunk in done_chunks.iter_rows():
        yield from pickle.loads(chunk["done"])


def chunks_of_file(entry: Mapping[str, str], job: FileJob, answered: Any) -> Iterator[dict[str, bytes]]:
    """The requests of a file that have no answer yet, in chunks of an engine's batch."""
    tasks = _tasks(entry["path"], entry["prefix"], job, ray.get(answered))
    while chunk := list(itertools.islice(tasks, job.engine.batch_size)):
        yield {"tasks": pickle.dumps(chunk)}


def _tasks(path: str, prefix: str, job: FileJob, answered: Keys) -> Iterator[Task | Done]:
    try:
        for number, (place, given) in enumerate(data_files.read(Path(path)), start=1):
            try:
                row = answer_files.question_row(place, given, f"{prefix}{number}", job.columns)
                requests = job.make_requests([row])
            except ValueError as error:
                yield Done({"place": place, "reason": str(error)}, failed=True)
                continue
            for request in requests:
                key = np.uint64(int(answer_files.answer_key(request, job.settings), 16))
                i = np.searchsorted(answered, key)
                if key not in answered[i : i + 1]:
                    yield Task(place, request, row.get("answer"))
    except (ValueError, OSError) as error:
        # Rows after a fault in a file's format cannot be read.
        yield Done({"place": path, "reason": f"{error}; the rest of this file was not read"}, failed=True)


class Answerer:
    """Ray actor: an engine that answers chunks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.engine = job.engine.start()

    async def __call__(self, chunk: Mapping[str, bytes]) -> dict[str, bytes]:
        done = await asyncio.gather(*(self._answer(task) for task in pickle.loads(chunk["tasks"])))
        if self.engine.closed:
            # The engine has died, of a GPU fault for instance, and would fail all remaining requests. Ray replaces an
            # actor that exits, and sends its chunks to another.
            os._exit(1)
        return {"done": pickle.dumps(done)}

    async def _answer(self, task: Task | Done) -> Done:
        """Answer one request; one that cannot be answered does not stop the others."""
        if isinstance(task, Done):
            return task
        try:
            completion = await self.engine.generate(task.request)
            completion.require_answer()
            make = functools.partial(self.job.make_row, self.engine.engine.lm, completion, task.extra)
            # In the engine's thread, because `make_row` may compare thoughts with the model's embeddings.
            return Done(await self.engine.run(make), failed=False)
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return Done({"place": task.place, "id": task.request.id, "reason": reason}, failed=True)


# Evaluation


def make_row(lm: LatentLM, completion: Completion, number: int) -> dict[str, Any]:
    """The row that an actor returns for a question. It is judged by the caller, where a user's judge can be found."""
    return {"number": number, "completion": completion}


def make_records(
    engine: EngineSettings,
    actors: ray_cluster.Actors,
    model: EvaluatedModel,
    questions: Sequence[Question],
    settings: AnswerSettings,
) -> Iterator[dict[str, Any]]:
    """Yield the record of each question that has an answer, in the order in which they arrive.

    ValueError at the end if some have none: it names the first one and the reason. The same command retries them.
    """
    tasks = [
        Task(f"{question.point.dataset} {question.example.id}", question.request, number)
        for number, question in enumerate(questions)
    ]
    # Small enough for each actor to have a chunk, even if there are few questions.
    size = min(settings.batch_size, math.ceil(len(questions) / actors.n))
    chunks = [{"tasks": pickle.dumps(tasks[i : i + size])} for i in range(0, len(tasks), size)]
    data = ray.data.from_items(chunks, override_num_blocks=len(chunks))
    failed = []
    for done in answers(Job(engine, make_row), data, actors):
        if done.failed:
            failed.append(done.row)
        else:
            yield make_record(questions[done.row["number"]], done.row["completion"])
    if failed:
        first = failed[0]
        raise ValueError(
            f"{model.name}: {len(failed)} of {len(questions)} questions have no answer, and the same command asks them "
            f"again; {first['place']}: {first['reason']}"
        )
