"""The end of `colar train auto`: every speed is compared with the run's own CoT on held-out questions.

records, seconds of single questions -> report -> table, picture                   OUTPUT/results
report -> the speed with the fewest thoughts that answers as well as CoT           OUTPUT/best
"""

import base64
import json
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
from colar.evaluation.records import RecordFiles, asked_of
from colar.evaluation.report_rows import Difference, ParamValues, Report, ReportRow, System
from colar.evaluation.stats import half_interval
from colar.evaluation.tables import PAIRED, points
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model import checkpoint
from colar.training.run_folder import AutoFolder

SPEEDS: tuple[Mapping[str, Any], ...] = (
    *({"compression_factor": c} for c in (1, 2, 3, 5)),
    # Groups of two that also end before a token of low confidence.
    {"compression_factor": 2, "confidence_threshold": 0.8},
)
"""Per-request values of the table, if the method has them and was trained with them."""
NO_CHAIN = "no chain"
"""Label of the CoT model that has to answer without a chain."""
DATASET = "held out"
WITHIN = 0.01
"""Accuracy that the default speed may lose to CoT: a point."""
LEARNT = 0.05
"""Accuracy of CoT below which other speeds are not compared with it."""
NARROW = 2.0
"""Half width of an interval, in points, below which a decimal is shown."""
TOO_WIDE = 0.05
"""Half width of a 95% interval from which rows are too few to choose by."""
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
    limits = {"max_latents": settings.max_latents, "max_completion_length": settings.max_completion_length}
    for name, trained in (("cot", cot), ("latents", last)):
        lm, method = pretrained.load_for_inference(trained, dtype)
        model = evaluate.EvaluatedModel(method.name, lm, method)
        params = params_of_speeds(method)
        records.append(folder.results / f"records-{name}.jsonl")
        models[method.name] = weights = processes.from_main(partial(checkpoint.digest, trained))
        asked = {"weights": weights, "questions": files.digest(map(repr, examples)), "dtype": dtype}
        asked |= judge_settings(examples[0].judge)
        _answer(records[-1], asked, model, params, examples, settings)
        # Of other questions, with other chains, the seconds of a speed would not compare with CoT's.
        most_seconds = MOST_SECONDS_SINGLY if name == "cot" else math.inf
        timed = partial(_time_singly, model, params, examples[:n_timed], settings, records[-1], most_seconds)
        alone, n_timed = processes.from_main(timed)
        seconds |= alone
        if name == "cot":
            records.append(folder.results / "records-no-chain.jsonl")
            at_once = replace(settings, max_latents=0)
            _answer(records[-1], asked, replace(model, label=NO_CHAIN), params, examples, at_once)
        # Freed before the next model is loaded, because a GPU may have room for one only.
        del lm, method, model

    def write() -> tuple[Report, dict[str, Any], str]:
        # A report over several runs then finds that their models and questions are others.
        origin = {
            "limits": limits,
            "dtype": dtype,
            "questions": {DATASET: asked_of(examples)},
            "models": models,
            **judge_settings(examples[0].judge),
        }
        files.write_json(folder.results / "evaluation.json", origin)
        title = f"{folder.path.name}: held-out questions"
        measured = report.write(folder.results, RecordFiles(records), title=title)
        default, sentence = choose(measured)
        publish(last, folder.best, default, settings)
        return measured, default, sentence

    measured, default, sentence = processes.from_main(write)
    return Outcome(folder.path, measured, default, sentence, speeds_table(measured, seconds, default))


def _answer(
    records: Path,
    asked: Mapping[str, Any],
    model: evaluate.EvaluatedModel,
    params: Sequence[Any],
    examples: Sequence[Example],
    settings: evaluate.AnswerSettings,
) -> None:
    """Append the missing answers at each of `params` to `records`.

    Records of other weights, questions or dtype (`asked`), or of other settings, are dropped first.
    """
    processes.from_main(partial(_drop_stale_records, records, {**asked, **asdict(settings)}))
    # One speed after another, because in shared batches their times could not be separated.
    for point in evaluate.make_grid(model, [DATASET], params, ["greedy"], [0]):
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
    model: evaluate.EvaluatedModel,
    params: Sequence[Any],
    examples: Sequence[Example],
    settings: evaluate.AnswerSettings,
    records: Path,
    most_seconds: float,
) -> tuple[dict[str, float], int]:
    """Median seconds of a question in isolation, by `system_key`, and the number of questions that were timed.

    Measured once, and stored with the records. After `most_seconds` of the first system no other question is timed.
    By the main process alone: others that answered meanwhile would take its cores.
    """
    path = records.with_suffix(".json")
    stored: dict[str, Any] = files.read_json(path)
    if "alone" in stored:
        return dict(stored["alone"]), stored.get("timed", len(examples))
    engine = Engine(model.lm, model.method, 1, cuda_graphs=False if settings.eager else None)
    medians: dict[str, float] = {}
    with progress.bar("timing, one question at a time", len(params) * len(examples)) as bar:
        for point in evaluate.make_grid(model, [DATASET], params, ["greedy"], [0]):
            seconds: list[float] = []
            for example in examples:
                [completion] = engine.generate([evaluate.make_request(point, example, settings)])
                seconds.append(completion.seconds)
                bar.update()
                # Long chains take minutes each, for which other processes would not wait.
                if not medians and sum(seconds) >= most_seconds:
                    break
            examples = examples[: len(seconds)]
            medians[system_key(point.cell.system)] = statistics.median(seconds)
    files.write_json(path, {**stored, "alone": medians, "timed": len(examples)})
    return medians, len(examples)


def publish(
    trained: Path, target: Path, default: Mapping[str, Any], settings: evaluate.AnswerSettings
) -> None:
    """Publish a checkpoint as `target`, with a default speed and limits; its weights are links to the same files."""
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
    """Hard-link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# The speed to ask at


def choose(report: Report) -> tuple[dict[str, Any], str]:
    """The default speed, and a sentence about it.

    Among the speeds within a point of both CoT and the slowest speed, it is the one with the fewest thoughts. It is the
    slowest (c = 1 if that was trained) if no speed is within a point, if CoT has not learnt, or if the rows are too few
    to tell.
    """
    cot, _, latent_rows, differences = _rows_of(report)
    percent = f"{100 * cot.accuracy:.{_decimals(cot.accuracy_se)}f}%"
    accuracy = f"CoT answers {percent} of {cot.n} held-out questions"
    slowest = min(latent_rows, key=lambda row: dict(row.system.params)["compression_factor"])
    safest = dict(slowest.system.params)
    if cot.accuracy < LEARNT:
        return safest, f"{accuracy}: it has hardly learnt, and no speed can be chosen by it."
    least = max(cot.accuracy, slowest.accuracy) - WITHIN - 1e-9
    within = [row for row in latent_rows if row.accuracy >= least]
    best = min(within, key=lambda row: row.length) if within else slowest
    difference = differences[best.system]
    # If all verdicts agree, their spread of 0 says nothing: by the rule of three, up to 3 / n may differ.
    half = max(half_interval(difference.se) or 0.0, 3 / cot.n)
    verdict = f"no speed is within a point of CoT: {_beside(best, cot, difference)}"
    # So far behind CoT that even a few rows show it.
    if not within and difference.difference + half < 0:
        more = f"--stages.{slowest.system.method}.training.num_train_epochs"
        return (
            safest,
            f"{accuracy}; {verdict}; more updates may help ({more}; after --grpo with a new --output).",
        )
    if half > TOO_WIDE:
        name = speed_name(slowest.system.params)
        few = f"These rows are too few to choose a speed by (± {100 * half:.0f} points), so {name} is the default"
        if best is slowest:
            return safest, f"{accuracy}. {few}: {_beside(best, cot, difference, name='it')}."
        return safest, f"{accuracy}. {few}; {_beside(best, cot, difference)}."
    if within:
        verdict = _beside(best, cot, difference, verb="answers as well as CoT,")
    return dict(best.system.params), f"{accuracy}; {verdict}."


def _beside(
    row: ReportRow, cot: ReportRow, difference: Difference, name: str | None = None, verb: str = "answers"
) -> str:
    """`c = 2 answers 0.4 ± 1.1 points less, with 58% of the thoughts and 66% of the time`."""
    side = "less" if difference.difference < 0 else "more"
    cost = (
        f"{row.length / cot.length:.0%} of the thoughts and "
        f"{row.seconds_per_question / cot.seconds_per_question:.0%} of the time"
        if cot.length
        else f"{row.length:.1f} thoughts"
    )
    gap = f"{_points(abs(difference.difference), difference.se or 0.0)} points {side}"
    return f"{name or speed_name(row.system.params)} {verb} {gap}, with {cost}"


def _rows_of(report: Report) -> tuple[ReportRow, ReportRow, list[ReportRow], dict[System, Difference]]:
    """Rows of CoT, of CoT without a chain and of the method's speeds, and the differences to CoT."""
    rows = [row for row in report.rows if row.dataset == DATASET]
    [cot] = [row for row in rows if row.system.method == "cot" and not row.system.label]
    [no_chain] = [row for row in rows if row.system.label == NO_CHAIN]
    latent_rows = [row for row in rows if row.system.method != "cot"]
    differences = [row for row in report.comparisons if row.dataset == DATASET]
    return cot, no_chain, latent_rows, {row.system: row for row in differences if row.baseline == cot.system}


def speed_name(params: ParamValues) -> str:
    """`c = 2 with threshold 0.8`."""
    values = dict(params)
    name = f"c = {values['compression_factor']:g}"
    threshold = values.get("confidence_threshold")
    return f"{name} with threshold {threshold:g}" if threshold else name


# The table


def system_key(system: System) -> str:
    """The key of a system's seconds: text, because JSON needs it."""
    return json.dumps([system.method, system.label, system.params])


def speeds_table(
    report: Report, seconds: Mapping[str, float], default: Mapping[str, Any]
) -> tables.TextTable:
    """Table of all speeds, CoT first; `seconds` are those of questions run one at a time, by `system_key`."""
    cot, no_chain, latent_rows, differences = _rows_of(report)
    rows = []
    for row in [cot, no_chain, *latent_rows]:
        difference = differences.get(row.system)
        mark = " (default)" if row in latent_rows and dict(row.system.params) == dict(default) else ""
        rows.append(
            [
                _name(row) + mark,
                _points(row.accuracy, row.accuracy_se),
                points(difference, _decimals(difference.se if difference else None)),
                f"{row.length:.0f}" if row.length >= 10 else f"{row.length:.2g}",
                _milliseconds(seconds.get(system_key(row.system))),
                _milliseconds(row.seconds_per_question),
            ]
        )
    head = ["", "accuracy %", "to CoT", "thoughts", "ms alone", "ms batch"]
    notes = [
        f"{cot.n} questions held out, greedy. ms is the time of a question, alone and in a batch.",
        f"{NO_CHAIN}: the model of CoT, cut before its first thought; it was not trained to answer so.",
        PAIRED,
    ]
    return tables.TextTable(f"Speeds of {latent_rows[0].system.method}", head, rows, notes)


def _points(share: float, se: float | None) -> str:
    """A share in % with 1.96 standard errors: `84 ± 7`; with a decimal where the interval is narrow, `52.4 ± 1.1`."""
    return tables.percent(share, half_interval(se or 0.0), _decimals(se))


def _decimals(se: float | None) -> int:
    return 0 if 100 * (half_interval(se) or 0.0) >= NARROW else 1


def _name(row: ReportRow) -> str:
    if row.system.method == "cot":
        return row.system.label or "CoT"
    return speed_name(row.system.params).replace(" with", ",")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return tables.BLANK
    return f"{1000 * seconds:.2g}" if seconds < 0.01 else f"{1000 * seconds:.0f}"
