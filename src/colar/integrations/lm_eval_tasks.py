"""Functions that the task files in `tasks/` call: documents from our data loader, and both judges' verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.metrics import exact_match_hf_evaluate

from colar.data import sources
from colar.data.judge.answers import judge

COLUMNS = ("id", "question", "answer", "answer_type")
IGNORED = (",", r"\$", r"\.$")
"""Text that lm-eval's own tasks of this kind (gsm8k) delete before they compare."""


def documents(
    source: str | None = None, data: str | None = None, split: str = "test", **others: Any
) -> dict[str, Any]:
    """The questions of a source, or of a file of one's own (`data`), as lm-eval's documents.

    Found as `colar evaluate` finds them: under `data_dir`, else under COLAR_DATA_DIR, else on the Hub. lm-eval passes
    all model arguments too, which are left alone. ValueError where neither is given, and those of the loader.
    """
    named = source or data
    if named is None:
        raise ValueError("task colar_file needs its file: --metadata data=questions.jsonl")
    # `data` is a file: the loader would take the name of a source as well.
    if data is not None and source is None and not Path(data).exists():
        raise ValueError(f"--metadata data={data}: no such file")
    rows = sources.load(named, split, data_dir=others.get("data_dir"))
    table = [{column: getattr(row, column) for column in COLUMNS} for row in rows]
    # "test" for any split: the task files have `test_split: test`.
    return {"test": datasets.Dataset.from_list(table)}


def verdicts(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """`judged`: our judge. `exact_match`: lm-eval's, on the whole answer, as its gsm8k task compares."""
    completion = results[0]
    judged = judge(completion, doc["answer"], doc["answer_type"])
    exact = exact_match_hf_evaluate(
        predictions=[completion], references=[doc["answer"]], regexes_to_ignore=IGNORED, ignore_case=True
    )
    return {"judged": float(judged.correct), "exact_match": float(exact["exact_match"])}
