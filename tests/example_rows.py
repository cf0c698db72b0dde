"""Rows of a report for tests that look at a few of their numbers."""

from __future__ import annotations

from typing import Any

from colar.evaluation.report_rows import ReportRow, System


def report_row(
    model: str = "m",
    dataset: str = "average",
    factor: float | None = None,
    accuracy: float = 0.5,
    length: float = 9.0,
    *,
    label: str = "",
    values: dict[str, float] | None = None,
    decoding: str = "greedy",
    train_seed: int | None = 0,
    **numbers: Any,
) -> ReportRow:
    """A row of 50 questions; numbers that are not given are arbitrary or unknown."""
    arbitrary: dict[str, Any] = {
        "seeds": [0], "n": 50, "accuracy_se": 0.02, "unparsable": 0.0, "forward_passes": 9.0, "truncated": 0.0,
        "seconds_per_question": 0.1, "length_se": None, "reference_length": None,
        "samples": 50, "seeds_interval": None, "pass_at_k": None, "maj_at_k": None,
    }  # fmt: skip
    params = () if factor is None else (("compression_factor", factor),)
    params += tuple((values or {}).items())
    system = System(model, model.lower(), label, params, decoding, train_seed)
    return ReportRow(system, dataset, accuracy=accuracy, length=length, **{**arbitrary, **numbers})
