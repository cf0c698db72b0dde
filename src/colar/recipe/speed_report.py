"""The report of `colar train auto`: the default speed, a sentence about it, and the table of all speeds."""

import json
from collections.abc import Mapping
from typing import Any

from colar.evaluation import tables
from colar.evaluation.report_rows import Difference, ParamValues, Report, ReportRow, System
from colar.evaluation.stats import half_interval

DATASET = "held out"
NO_CHAIN = "no chain"
"""Label of the CoT model that has to answer without a chain."""
WITHIN = 0.01
"""Accuracy that the default speed may lose to CoT: a point."""
LEARNT = 0.05
"""Accuracy of CoT below which other speeds are not compared with it."""
TOO_WIDE = 0.05
"""Half width of a 95% interval from which rows are too few to choose by."""
NARROW = 2.0
"""Half width of an interval, in points, below which a decimal is shown."""


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
                tables.points(difference, _decimals(difference.se if difference else None)),
                f"{row.length:.0f}" if row.length >= 10 else f"{row.length:.2g}",
                _milliseconds(seconds.get(system_key(row.system))),
                _milliseconds(row.seconds_per_question),
            ]
        )
    head = ["", "accuracy %", "to CoT", "thoughts", "ms alone", "ms batch"]
    notes = [
        f"{cot.n} questions held out, greedy. ms is the time of a question, alone and in a batch.",
        f"{NO_CHAIN}: the model of CoT, cut before its first thought; it was not trained to answer so.",
        tables.PAIRED,
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
