"""The end of `colar train auto`: every speed is compared with the run's own CoT on held-out questions.

records, seconds of single questions -> report -> table, picture                   OUTPUT/results
report -> the default speed (`speed_report.py`)                                     OUTPUT/best
"""

import base64
import math
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from colar import files, processes, progress
from colar.data.example import Example
from colar.data.judge import judge_settings
from colar.engine.engine import Engine
from colar.evaluation import evaluate, report, tables
from colar.evaluation.records import RecordFiles
from colar.evaluation.report_rows import Report
from colar.evaluation.settings import asked_of
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import checkpoint
from colar.recipe import speed_report
from colar.recipe.speed_report import DATASET, NO_CHAIN
from colar.training.run_folder import AutoFolder

SPEEDS: tuple[Mapping[str, Any], ...] = (
    *({"compression_factor": c} for c in (1, 2, 3, 5)),
    # Groups of two that also end before a token of low confidence.
    {"compression_factor": 2, "confidence_threshold": 0.8},
)
"""Per-request values of the table, if the method has them and was trained with them."""
TIMED_SINGLY = 16
"""Most questions that are timed one at a time."""
MOST_SECONDS_SINGLY = 60.0
"""Seconds of such questions of CoT after which no other one is timed; a speed has the same questions."""


@dataclass(frozen=True)
class Outcome:
    """The speeds of a run on questions held out."""

    output: Path
    """The run's folder, which also loads as a checkpoint."""
    report: Report
    default: Mapping[str, Any]
    """The per-request values that `best` uses if a request names none."""
    sentence: str
    speeds_table: tables.TextTable

    @property
    def table(self) -> str:
        """The table as Markdown."""
        return tables.markdown(self.speeds_table)

    @property
    def picture(self) -> Path:
        """Accuracy against the number of thoughts."""
        return AutoFolder(self.output).results / f"{report.PICTURE}.png"

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.sentence}"

    def _repr_markdown_(self) -> str:
        picture = ""
        if self.picture.exists():
            data = base64.b64encode(self.picture.read_bytes()).decode()
            picture = f"\n\n![accuracy against the number of thoughts](data:image/png;base64,{data})"
        return f"{self}{picture}"


def measure_and_publish(
    folder: AutoFolder,
    cot: Path,
    last: Path,
    examples: Sequence[Example],
    settings: evaluate.AnswerSettings,
    dtype: str,
) -> Outcome:
    """Evaluate the checkpoints `cot` and `last` on the held-out `examples`, and write the run's `results` and `best`.

    Existing answers are reused. Processes that have joined call it together.
    """
    records: list[Path] = []
    seconds: dict[str, float] = {}
    models: dict[str, str] = {}
    n_timed = TIMED_SINGLY
    judge = judge_settings(examples[0].judge)
    for name, trained in (("cot", cot), ("latents", last)):
        lm, method = pretrained.load_for_inference(trained, dtype)
        model = evaluate.EvaluatedModel(method.name, lm, method)
        grid = _grid(model)
        records.append(folder.results / f"records-{name}.jsonl")
        models[method.name] = weights = processes.from_main(partial(checkpoint.digest, trained))
        asked = {"weights": weights, "questions": files.digest(map(repr, examples)), "dtype": dtype, **judge}
        _answer(records[-1], asked, grid, examples, settings)
        # Of other questions, with other chains, the seconds of a speed would not compare with CoT's.
        most_seconds = MOST_SECONDS_SINGLY if name == "cot" else math.inf
        alone, n_timed = processes.from_main(
            partial(_time_singly, grid, examples[:n_timed], settings, records[-1], most_seconds)
        )
        seconds |= alone
        if name == "cot":
            records.append(folder.results / "records-no-chain.jsonl")
            at_once = replace(settings, max_latents=0)
            _answer(records[-1], asked, _grid(replace(model, label=NO_CHAIN)), examples, at_once)
        # Freed before the next model is loaded, because a GPU may have room for one only.
        del lm, method, model, grid

    def write() -> tuple[Report, dict[str, Any], str]:
        limits = limits_of(settings)
        # A report over several runs then finds that their models and questions are others.
        origin = {
            "limits": limits,
            "dtype": dtype,
            "questions": {DATASET: asked_of(examples)},
            "models": models,
        }
        files.write_json(folder.results / "evaluation.json", origin | judge)
        title = f"{folder.path.name}: held-out questions"
        measured = report.write(folder.results, RecordFiles(records), title=title)
        default, sentence = speed_report.choose(measured)
        publish(last, folder.best, {"params": default, "limits": limits})
        return measured, default, sentence

    measured, default, sentence = processes.from_main(write)
    table = speed_report.speeds_table(measured, seconds, default)
    return Outcome(folder.path, measured, default, sentence, table)


def limits_of(settings: evaluate.AnswerSettings) -> dict[str, int]:
    """The limits of generation, as a checkpoint and a report store them."""
    return {"max_latents": settings.max_latents, "max_completion_length": settings.max_completion_length}


def _grid(model: evaluate.EvaluatedModel) -> list[evaluate.GridPoint]:
    """Every speed of a model, greedy, on the held-out questions."""
    return evaluate.make_grid(model, [DATASET], params_of_speeds(model.method), ["greedy"], [0])


def _answer(
    records: Path,
    asked: Mapping[str, Any],
    grid: Sequence[evaluate.GridPoint],
    examples: Sequence[Example],
    settings: evaluate.AnswerSettings,
) -> None:
    """Append the missing answers at each speed of `grid` to `records`.

    Records of other weights, questions or dtype (`asked`), or of other settings, are dropped first.
    """
    processes.from_main(partial(_drop_stale_records, records, {**asked, **asdict(settings)}))
    # One speed after another, because in shared batches their times could not be separated.
    for point in grid:
        evaluate.evaluate([point], {DATASET: list(examples)}, records, settings)


def params_of_speeds(method: Method) -> list[Any]:
    """The values in `SPEEDS` that the method was trained with, or else its own default."""
    names = set(registry.param_names(method))
    possible = registry.possible_params(method, [values for values in SPEEDS if names.issuperset(values)])
    # The default is chosen from these, so speeds for which the method warns are left out.
    trained = [params for params in possible if method.check_params(params) is None]
    return trained or [registry.make_params(method, {})]


def _drop_stale_records(records: Path, asked: dict[str, Any]) -> None:
    """Drop answers and times of other values than `asked`: a stage may have been trained again, a limit changed."""
    path = records.with_suffix(".json")
    before = files.read_json(path) if path.exists() else {}
    # The times of single questions, on which no answer depends.
    for name in ("alone", "timed"):
        before.pop(name, None)
    if before != asked:
        records.unlink(missing_ok=True)
        files.write_json(path, asked)


def _time_singly(
    grid: Sequence[evaluate.GridPoint],
    examples: Sequence[Example],
    settings: evaluate.AnswerSettings,
    records: Path,
    most_seconds: float,
) -> tuple[dict[str, float], int]:
    """Median seconds of a question in isolation, by `speed_report.system_key`, and the number of questions timed.

    Measured once, and stored with the records. After `most_seconds` of the first system no other question is timed.
    By the main process alone: others that answered meanwhile would take its cores.
    """
    path = records.with_suffix(".json")
    stored: dict[str, Any] = files.read_json(path)
    if "alone" in stored:
        return dict(stored["alone"]), stored.get("timed", len(examples))
    model = grid[0].model
    engine = Engine(model.lm, model.method, 1, cuda_graphs=False if settings.eager else None)
    medians: dict[str, float] = {}
    with progress.bar("timing, one question at a time", len(grid) * len(examples)) as bar:
        for point in grid:
            seconds: list[float] = []
            for example in examples:
                [completion] = engine.generate([evaluate.make_request(point, example, settings)])
                seconds.append(completion.seconds)
                bar.update()
                # Long chains take minutes each, for which other processes would not wait.
                if not medians and sum(seconds) >= most_seconds:
                    break
            examples = examples[: len(seconds)]
            medians[speed_report.system_key(point.cell.system)] = statistics.median(seconds)
    files.write_json(path, {**stored, "alone": medians, "timed": len(examples)})
    return medians, len(examples)


def publish(trained: Path, target: Path, defaults: Mapping[str, Any]) -> None:
    """Publish a checkpoint as `target`, with default `params` and `limits`; its weights are links to the same files."""
    info = files.read_json(trained / "colar.json")
    info["method"] |= defaults
    with files.replace_folder(target) as folder:
        rewritten = shutil.ignore_patterns("colar.json")
        shutil.copytree(trained, folder, copy_function=_link, ignore=rewritten, dirs_exist_ok=True)
        files.write_json(folder / "colar.json", info)


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
