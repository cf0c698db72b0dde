"""Evaluation: models x data sets x params x decodings x seeds, as one record per question in a JSONL file.

Records are appended as requests finish, so a killed evaluation resumes where it stopped. The report is a fold over
records in any order (`report.py`). The judge is that of validation and rewards. A request's seed is a function of
(seed, question id), so that two systems see the same noise on the same question, and several processes produce the
same records as one.
"""

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from colar import files, processes, progress
from colar.checks import check_number
from colar.data.example import Example
from colar.data.judge import verdict
from colar.engine.completion import Completion, completions_of
from colar.engine.engine import Engine
from colar.engine.request import DECODINGS, Decoding, Request, prompt_ids
from colar.evaluation.records import RecordKey, keys_in
from colar.evaluation.report_rows import Cell, System, cell_to_json, param_values, system_name, texts
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from


@dataclass(frozen=True)
class AnswerSettings:
    """Settings for answering the questions of an evaluation: limits of generation, and how the engine runs."""

    max_latents: int = 128
    """Most embeddings between the two separators (a CoT's tokens too)."""
    max_completion_length: int = 64
    """Most tokens of the answer."""
    batch_size: int = 32
    """Requests that run at once."""
    eager: bool = False
    """Run decode steps on a GPU without CUDA graphs, which avoid launch overhead."""

    def __post_init__(self) -> None:
        # Built here, because a decoding checks its limits; the error would otherwise come with the first question.
        self.decoding("greedy")
        check_number("batch_size", self.batch_size, 1, whole=True)

    def decoding(self, name: str) -> Decoding:
        """The decoding of that name, greedy or sampled, cut at the limits."""
        return replace(
            DECODINGS[name], max_latents=self.max_latents, max_completion_length=self.max_completion_length
        )


@dataclass(frozen=True)
class EvaluatedModel:
    """A loaded model and its method, with the names that its rows have."""

    name: str
    lm: LatentLM
    method: Method
    label: str = ""
    train_seed: int | None = None


@dataclass(frozen=True)
class GridPoint:
    """A model on all questions of one data set, with one value of its params, one decoding and one seed."""

    model: EvaluatedModel
    dataset: str
    params: Any
    decoding: str
    """greedy or sampled."""
    seed: int

    @property
    def cell(self) -> Cell:
        """The row of the report that aggregates the records of this point and of other seeds."""
        system = System(
            model=self.model.name,
            method=self.model.method.name,
            label=self.model.label,
            params=param_values(self.params),
            decoding=self.decoding,
            train_seed=self.model.train_seed,
        )
        return Cell(system, self.dataset)

    def record_key(self, example: Example) -> RecordKey:
        """The key of one question's record."""
        return RecordKey(self.cell, self.seed, example.id)


@dataclass(frozen=True)
class Question:
    """A question of a grid point, with its request to the engine."""

    point: GridPoint
    example: Example
    request: Request


def make_grid(
    model: EvaluatedModel,
    datasets: Iterable[str],
    params: Iterable[Any],
    decodings: Iterable[str],
    seeds: Sequence[int],
) -> list[GridPoint]:
    """The grid of one model, each point once."""
    points = {}
    # Options may repeat a value (`--seeds 0 0`); a second record of a question would make the file unreadable.
    for dataset, param, decoding in itertools.product(datasets, params, decodings):
        # Greedy decoding draws nothing: every seed would give the same answers, and count as several samples.
        for seed in [0] if decoding == "greedy" else seeds:
            point = GridPoint(model, dataset, param, decoding, seed)
            points[point.cell, seed] = point
    return list(points.values())


RecordMaker = Callable[[EvaluatedModel, Sequence[Question], AnswerSettings], Iterator[dict[str, Any]]]
"""Yields one record per question of a model, in any order: `make_records`, or engines on other machines."""


def evaluate(
    grid: Sequence[GridPoint],
    datasets: Mapping[str, Sequence[Example]],
    records: Path,
    settings: AnswerSettings,
    make: RecordMaker | None = None,
) -> int:
    """Answer the questions of one model's grid that have no record in `records` yet, and append to it. Returns their
    number.

    All questions are checked against the model's context before the first one is answered. Processes that have joined
    call it together and divide the questions.
    """
    done = keys_in(records)
    # The draws of a question one after another, so that the engine prefills it once for those that run together.
    by_cell: defaultdict[Cell, list[GridPoint]] = defaultdict(list)
    for point in grid:
        by_cell[point.cell].append(point)
    unanswered = []
    for points in by_cell.values():
        for example in datasets[points[0].dataset]:
            left = [point for point in points if point.record_key(example) not in done]
            if left:
                unanswered.append([Question(p, example, make_request(p, example, settings)) for p in left])
    # A question that does not fit must stop the evaluation now, not after hours of this model's answers.
    processes.split_and_gather([draws[0] for draws in unanswered], _check_fit)
    if unanswered:
        _write_answers(unanswered, records, settings, make or make_records)
    return sum(map(len, unanswered))


def _write_answers(
    questions: Sequence[Sequence[Question]], records: Path, settings: AnswerSettings, make: RecordMaker
) -> None:
    """Answer the questions, a list of draws each, and append to `records`; with several processes, the main one writes
    the records of all."""
    model = questions[0][0].point.model
    system, *others = {draws[0].point.cell.system for draws in questions}
    note = f"evaluate {model.name if others else system_name(system, [system])}"
    state = PartialState()
    n = state.num_processes
    # Records are gathered and written once per round: a kill loses the answers of the current one.
    per_round = settings.batch_size if n > 1 else 1
    # Every n-th question, because neighbours in the grid take about equally long.
    shares = [list(itertools.chain.from_iterable(questions[process::n])) for process in range(n)]
    mine = make(model, shares[state.process_index], settings)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress.bar(note, sum(map(len, questions))))
        write = stack.enter_context(files.append_jsonl(records)) if state.is_main_process else None
        for _ in range(math.ceil(max(map(len, shares)) / per_round)):
            for record in gather_object(list(itertools.islice(mine, per_round))):
                if write is not None:
                    write(record)
                bar.update()


def _check_fit(questions: Sequence[Question]) -> Iterator[None]:
    """ValueError for a question that does not fit the context of its model."""
    for question in questions:
        model = question.point.model
        prompt_ids(model.lm, model.method, question.request)
        yield None


def make_records(
    model: EvaluatedModel, questions: Sequence[Question], settings: AnswerSettings
) -> Iterator[dict[str, Any]]:
    """Yield one record per question, in the order in which they finish.

    Raises NonFiniteError if the model's numbers are NaN or infinite, because a wrong answer would be recorded for good.
    Questions of several grid points share batches, so that a point's last questions do not run in a half-empty batch.
    """
    cuda_graphs = False if settings.eager else None
    engine = Engine(model.lm, model.method, settings.batch_size, cuda_graphs=cuda_graphs)
    # Named in the error, because the usual cause is a dtype with too small a range.
    dtype = str(model.lm.causal_lm.dtype).removeprefix("torch.")
    events = engine.stream([question.request for question in questions])
    for completion in completions_of(model.lm, events):
        question = questions[completion.number]
        completion.require_answer(f"{model.name} on {question.point.dataset}, {dtype}")
        yield make_record(question, completion)


def answer_all(
    lm: LatentLM,
    method: Method,
    requests: Sequence[Request],
    batch_size: int = 32,
    note: str = "think",
    eager: bool = False,
) -> list[Completion]:
    """Completions in the order of the requests, with a progress bar. Raises NonFiniteError as `make_records` does."""
    completions = []
    events = Engine(lm, method, batch_size, cuda_graphs=False if eager else None).stream(requests)
    for completion in progress.track(completions_of(lm, events), note, len(requests)):
        completion.require_answer()
        completions.append(completion)
    # Requests finish in any order.
    return sorted(completions, key=lambda completion: completion.number)


def make_record(question: Question, completion: Completion) -> dict[str, Any]:
    """The record of an answered question: see `records.py`."""
    point, example = question.point, question.example
    return {
        **cell_to_json(point.cell),
        "seed": point.seed,
        "id": example.id,
        **grade(completion, example),
        "gold_length": gold_length(point.model.lm, example),
    }


def grade(completion: Completion, example: Example) -> dict[str, Any]:
    """The fields of a record after its question's id: cluster, completion, the judge's verdict, lengths and time."""
    judged = verdict(completion.text, example)
    # Only repeated questions have the key: all others are their own cluster.
    cluster = {"cluster": example.cluster} if example.cluster else {}
    return {
        **cluster,
        "completion": completion.text,
        "parsed": judged.parsed,
        "correct": judged.correct,
        "truncated": completion.truncated,
        "length": completion.length,
        "forward_passes": completion.forward_passes,
        "seconds": round(completion.seconds, 6),
    }


def gold_length(lm: LatentLM, example: Example) -> int | None:
    """L_r, the number of tokens of the reference chain, to compare #L with; None if the example has no chain."""
    try:
        steps = lm.template.steps(example.steps)
    except ValueError:
        # The separator occurs in the chain. Such a row cannot be trained on, but it can be tested on.
        return None
    tokens = sum(len(step) for step in steps)
    return tokens if tokens > 0 else None


def make_request(point: GridPoint, example: Example, settings: AnswerSettings) -> Request:
    """The engine's request for a question of a grid point. Its noise depends on seed and question alone."""
    decoding = settings.decoding(point.decoding)
    return Request.of(example, point.params, decoding, seed_of(example, point.seed))


def seed_of(example: Example, seed: int = 0) -> int:
    """The seed of a question's request under the evaluation's `seed`."""
    # A function of the question's id, not its position, so that another --limit or order changes no draw.
    return seed_from(seed, example.id)


def validate(
    lm: LatentLM,
    method: Method,
    examples: Sequence[Example],
    params: Sequence[Any],
    decoding: str,
    settings: AnswerSettings,
) -> dict[str, float]:
    """Validate a model: mean accuracy and #L over all `params`, and at each of them (`accuracy/compression_factor=2`).

    Processes that have joined call it together and divide the questions; all get the same numbers.
    """
    model = EvaluatedModel("validation", lm, method)
    by_suffix = {_metric_suffix(param, is_alone=len(params) == 1): param for param in params}
    metrics: dict[str, float] = {}
    for suffix, param in by_suffix.items():
        point = GridPoint(model, "validation", param, decoding, seed=0)
        questions = [Question(point, example, make_request(point, example, settings)) for example in examples]
        # The same code as in an evaluation, so that the best checkpoint is chosen by the numbers reported later.
        records = processes.split_and_gather(questions, lambda share: make_records(model, share, settings))
        # Sums of whole numbers do not depend on how the questions were divided.
        metrics[f"accuracy{suffix}"] = sum(record["correct"] for record in records) / len(records)
        metrics[f"length{suffix}"] = sum(record["length"] for record in records) / len(records)
    # The plain names are means over params, every speed weighted equally. They choose the best checkpoint.
    for name in ("accuracy", "length"):
        metrics[name] = sum(metrics[f"{name}{suffix}"] for suffix in by_suffix) / len(by_suffix)
    return metrics


def _metric_suffix(param: Any, is_alone: bool) -> str:
    """The end of a metric's name: `/compression_factor=2/confidence_threshold=0.8`.

    Params at their defaults, of a method without a speed, have no suffix if they are the only ones. Among others
    their suffix is `/default`, because the plain name is the mean's.
    """
    suffix = "".join(f"/{text}" for text in texts(param_values(param)))
    return suffix if suffix or is_alone else "/default"
