"""The speed that a run of `colar train auto` is asked at, from its report, and its table of speeds.

rows of the report, differences to CoT -> speed of the fewest thoughts that answers as well as CoT, in one sentence
rows of the report, seconds of single questions -> table
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from colar.evaluation import text_table
from colar.evaluation.report_rows import Difference, ParamValues, Report, ReportRow, System
from colar.evaluation.stats import half_interval
from colar.evaluation.tables import PAIRED, points

SPEEDS: tuple[Mapping[str, Any], ...] = tuple({"compression_factor": c} for c in (1, 2, 3, 5))
"""Compression factors of the table, where they were trained."""
NO_CHAIN = "no chain"
"""Label of the CoT model that answers at once."""
DATASET = "held out"
WITHIN = 0.01
"""Accuracy that the default speed may lose to CoT: a point."""
LEARNT = 0.05
"""Accuracy of CoT below which other speeds are not compared with it."""
NARROW = 2.0
"""Points of half an interval below which a decimal is shown."""
TOO_WIDE = 0.05
"""Half of a 95% interval from which rows are too few to choose by."""


def choose(report: Report) -> tuple[dict[str, Any], str]:
    """The speed of the fewest thoughts within a point of CoT and of the slowest speed, and a sentence about it.

    It is the slowest, c = 1 if that was trained, where there is no such speed, where CoT has not learnt, and where the
    rows are too few to tell.
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
    half = half_interval(difference.se) or 0.0
    verdict = f"no speed is within a point of CoT: {_beside(best, cot, difference)}"
    # Far enough behind to be sure, with however few rows.
    if best is slowest and difference.difference + half < 0:
        return safest, f"{accuracy}; {verdict}; more updates may help (--training.num_train_epochs)."
    if half > TOO_WIDE:
        name = speed_name(slowest.system.params)
        few = f"These rows are too few to choose a speed by (± {100 * half:.0f} points), so {name} is the default"
        it = _beside(best, cot, difference, name="it") if best is slowest else _beside(best, cot, difference)
        return safest, f"{accuracy}. {few}{':' if best is slowest else ';'} {it}."
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
    """The rows of CoT, of CoT without a chain and of the method's own speeds, and the differences to CoT."""
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


# --- the table ---------------------------------------------------------------------------------------------


def system_key(system: System) -> str:
    """The key of a system's seconds, a text as JSON needs."""
    return json.dumps([system.method, system.label, system.params])


def speeds_table(
    report: Report, seconds: Mapping[str, float], default: Mapping[str, Any]
) -> text_table.TextTable:
    """The rows of all speeds, CoT's first; `seconds` of questions computed one at a time, by `system_key`."""
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
                f"{row.length:.2g}",
                _milliseconds(seconds.get(system_key(row.system))),
                _milliseconds(row.seconds_per_question),
            ]
        )
    head = ["", "accuracy %", "to CoT", "thoughts", "ms alone", "ms batch"]
    columns = "ms is the time of a question, alone and in a batch."
    no_chain_note = (
        f"{NO_CHAIN}: the model of CoT, cut before its first thought; it was not trained to answer so."
    )
    notes = [f"{cot.n} questions held out, greedy. {columns}", no_chain_note, PAIRED]
    return text_table.TextTable(f"Speeds of {latent_rows[0].system.method}", head, rows, notes)


def _points(share: float, se: float | None) -> str:
    """A share in % with 1.96 standard errors: `84 ± 7`; with a decimal where the interval is narrow, `52.4 ± 1.1`."""
    return text_table.percent(share, half_interval(se or 0.0), _decimals(se))


def _decimals(se: float | None) -> int:
    return 0 if 100 * (half_interval(se) or 0.0) >= NARROW else 1


def _name(row: ReportRow) -> str:
    if row.system.method == "cot":
        return row.system.label or "CoT"
    return speed_name(row.system.params).replace(" with", ",")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return text_table.BLANK
    return f"{1000 * seconds:.2g}" if seconds < 0.01 else f"{1000 * seconds:.0f}"
