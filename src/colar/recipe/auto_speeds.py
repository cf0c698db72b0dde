"""The end of `colar train auto`: every speed is measured beside the run's own CoT on questions held out.

records, seconds -> report -> table, picture, the speed to ask at (`auto_choice.py`) -> OUTPUT/best
"""

from __future__ import annotations

import base64
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from colar import files, processes, progress
from colar.data.auto_folder import AutoFolder
from colar.data.example import Example
from colar.engine.engine import Engine
from colar.evaluation import evaluate, report, text_table
from colar.evaluation.records import RecordFiles
from colar.evaluation.report_rows import Report
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import checkpoint
from colar.recipe.auto_choice import DATASET, NO_CHAIN, SPEEDS, choose, speeds_table, system_key

WITH_THRESHOLD: Mapping[str, Any] = {"compression_factor": 2, "confidence_threshold": 0.8}
"""Groups of two that also end before a token of low confidence, of a method that has these."""
TIMED_SINGLY = 16
"""Questions that are timed one at a time."""


@dataclass(frozen=True)
class Outcome:
    """The speeds of a run on questions held out."""

    output: Path
    """The run's folder; also a checkpoint by its name."""
    report: Report
    default: Mapping[str, Any]
    """The per-request values that `best` is asked with where a request names none."""
    sentence: str
    speeds_table: text_table.TextTable

    @property
    def table(self) -> str:
        """The table as Markdown."""
        return text_table.markdown(self.speeds_table)

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
    """Ask the checkpoints `cot` and `last` the held-out questions, and write the run's `results` and `best`.

    What was answered before is not asked again. Processes that have joined call it together.
    """
    records: list[Path] = []
    seconds: dict[str, float] = {}
    for name, trained in (("cot", cot), ("latents", last)):
        lm, method = pretrained.load_for_inference(trained, dtype)
        model = evaluate.EvaluatedModel(method.name, lm, method)
        params = params_of_speeds(method)
        records.append(folder.results / f"records-{name}.jsonl")
        _answer(records[-1], trained, model, params, examples, settings)
        seconds |= _time_singly(model, params, examples[:TIMED_SINGLY], settings, records[-1])
        if name == "cot":
            records.append(folder.results / "records-no-chain.jsonl")
            at_once = replace(settings, max_latents=0)
            _answer(records[-1], trained, replace(model, label=NO_CHAIN), params, examples, at_once)

    def write() -> tuple[Report, dict[str, Any], str]:
        title = f"{folder.path.name}: held-out questions"
        measured = report.write(folder.results, RecordFiles(records), title=title)
        default, sentence = choose(measured)
        publish(last, folder.best, default, settings)
        return measured, default, sentence

    measured, default, sentence = processes.from_main(write)
    return Outcome(folder.path, measured, default, sentence, speeds_table(measured, seconds, default))


def _answer(
    records: Path,
    trained: Path,
    model: evaluate.EvaluatedModel,
    params: Sequence[Any],
    examples: Sequence[Example],
    settings: evaluate.AnswerSettings,
) -> None:
    """Append to `records` the answers of the checkpoint `trained` at each of `params` that are not there yet."""
    processes.from_main(partial(_drop_stale_records, records, trained))
    # One after another: batches that several speeds share would share their time.
    for point in evaluate.make_grid(model, [DATASET], params, ["greedy"], [0]):
        evaluate.evaluate([point], {DATASET: list(examples)}, records, settings)


def params_of_speeds(method: Method) -> list[Any]:
    """The per-request values of the table: those of `SPEEDS` and `WITH_THRESHOLD` that the method was trained with, or
    else its own default."""
    names = set(registry.param_names(method))
    speeds = [values for values in [*SPEEDS, WITH_THRESHOLD] if names.issuperset(values)]
    possible = registry.possible_params(method, speeds)
    # A default is chosen among them: no speed that a warning goes with.
    trained = [params for params in possible if method.check_params(params) is None]
    return trained or [registry.make_params(method, {})]


def _drop_stale_records(records: Path, trained: Path) -> None:
    """Drop the answers of other weights than `trained`, and their times: a stage was trained again."""
    path = records.with_suffix(".json")
    weights_digest = checkpoint.digest(trained)
    if not path.exists() or files.read_json(path)["weights"] != weights_digest:
        records.unlink(missing_ok=True)
        files.write_json(path, {"weights": weights_digest})


def _time_singly(
    model: evaluate.EvaluatedModel,
    params: Sequence[Any],
    examples: Sequence[Example],
    settings: evaluate.AnswerSettings,
    records: Path,
) -> dict[str, float]:
    """Median seconds of a question that is computed by itself, by the system that answered it.

    They are measured once, and stored beside the records.
    """
    path = records.with_suffix(".json")
    stored: dict[str, Any] = files.read_json(path)
    if "alone" in stored:
        return dict(stored["alone"])
    engine = Engine(model.lm, model.method, 1)
    medians = {}
    with progress.bar("timing, one question at a time", len(params) * len(examples)) as bar:
        for point in evaluate.make_grid(model, [DATASET], params, ["greedy"], [0]):
            seconds = []
            for example in examples:
                [completion] = engine.generate([evaluate.make_request(point, example, settings)])
                seconds.append(completion.seconds)
                bar.advance()
            medians[system_key(point.cell.system)] = statistics.median(seconds)
    processes.from_main(lambda: files.write_json(path, {**stored, "alone": medians}))
    return medians


def publish(
    trained: Path, target: Path, default: Mapping[str, Any], settings: evaluate.AnswerSettings
) -> None:
    """Write a checkpoint as `target` with a speed and limits of its own; its weights are links to the same files."""
    info = files.read_json(trained / "colar.json")
    info["method"] |= {
        "params": dict(default),
        "limits": {
            "max_latents": settings.max_latents,
            "max_completion_length": settings.max_completion_length,
        },
    }
    with files.replace_folder(target) as folder:
        rewritten = shutil.ignore_patterns("colar.json")
        shutil.copytree(trained, folder, copy_function=_link, ignore=rewritten, dirs_exist_ok=True)
        files.write_json(folder / "colar.json", info)


def _link(source: str, target: str) -> None:
    """A second name of a file, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
