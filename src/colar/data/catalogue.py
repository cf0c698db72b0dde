"""The table of data sources: where each lies, on the Hub and under a data folder, and how its rows are read.

A line per source, and nothing about sources anywhere else. `files` are paths under `data_dir`, named as upstream
names them; several alternatives are tried in order, and one that lists several files is their concatenation.
Hub splits use the Hub's own syntax ("train+test").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from colar.data import formats
from colar.data.example import AnswerType
from colar.data.formats import Parser

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """Where one split lies.

    `part`: all rows, or the rows kept or held out by the hash of the question. `leave_out`: hashes of questions
    that the test set asks too.
    """

    files: tuple[tuple[str, ...], ...] = ()
    hub: str | None = None
    part: Literal["all", "kept", "held"] = "all"
    leave_out: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """One line of the table. `order="key"`: sorted by the row's own id, or by the hash of its question."""

    about: str
    licence: str
    answer_type: AnswerType
    splits: Mapping[str, Split]
    file_parser: Parser | None = None
    hub_parser: Parser | None = None
    hub: str | None = None
    hub_configs: tuple[str | None, ...] = (None,)
    order: Literal["upstream", "key"] = "upstream"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # name -> default


def _one(path: str, hub: str | None) -> Split:
    return Split(((path,),), hub)


def _coconut_files(name: str) -> dict[str, Split]:
    upstream = {"train": "train", "validation": "valid", "test": "test"}
    return {split: _one(f"{name}/{name}_{word}.json", None) for split, word in upstream.items()}


_GSM8K_AUG_TRAIN = Split(
    (("gsm8k_aug/train.txt",), ("gsm8k_aug/train_first3000.txt", "gsm8k_aug/train_no_aug_equations.txt")),
    "train",
)
_MATH_TRAIN = Split((("math/train.parquet",),), "train", "kept", frozenset({"98fc77ec11ec6bfc"}))
_MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip

SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "gsm8k-aug": Source(
            "GSM8K augmented by GPT-4, steps as equations (the paper's training set)", "MIT", "number",
            {
                "train": _GSM8K_AUG_TRAIN,
                "validation": _one("gsm8k_aug/valid.txt", "validation"),
                "test": _one("gsm8k_aug/test.txt", "test"),
            },
            formats.icot_line, formats.columns("question", "answer", steps="steps"), "whynlp/gsm8k-aug",
        ),
        "gsm8k": Source(
            "grade-school problems, steps in words", "MIT", "number",
            {"train": _one("gsm8k/train.jsonl", "train"), "test": _one("gsm8k/test.jsonl", "test")},
            formats.gsm8k, formats.gsm8k, "openai/gsm8k", ("main",), options={"keep_marks": False},
        ),
        "gsm-hard": Source(
            "GSM8K's test set with large numbers; a quarter of the answers are no integers", "MIT", "number",
            {"test": _one("gsm_hard/gsmhardv2.jsonl", "train")},
            formats.columns("input", "target"), formats.columns("input", "target"), "reasoning-machines/gsm-hard",
        ),
        "svamp": Source(
            "one-step problems with distractors; all 1,000 are the test set, as in the paper", "MIT", "number",
            {"test": _one("svamp/SVAMP.json", "train+test")},
            formats.svamp, formats.svamp, "ChilleD/SVAMP", order="key",
        ),
        "multiarith": Source(
            "two-step problems; all 600 are the test set, as in the paper", "none stated", "number",
            {"test": _one("multiarith/MultiArith.json", "train+test")},
            formats.columns("sQuestion", "lSolutions"), formats.columns("question", "final_ans"),
            "ChilleD/MultiArith", order="key",
        ),
        "math": Source(
            "competition problems, LaTeX answers; a tenth of train is held out as validation", "MIT", "latex",
            {
                "train": _MATH_TRAIN,
                "validation": replace(_MATH_TRAIN, part="held"),
                "test": _one("math/test.parquet", "test"),
            },
            formats.hendrycks_math, formats.hendrycks_math, "EleutherAI/hendrycks_math", _MATH_SUBJECTS, "key",
        ),
        "math-500": Source(
            "500 of the MATH test problems", "MIT", "latex",
            {"test": _one("math500/test500.jsonl", "test")},
            formats.math_500, formats.math_500, "HuggingFaceH4/MATH-500",
        ),
        "gpqa": Source(
            "graduate-level science, four choices; gated on the Hub, never to be published in plain text",
            "CC-BY-4.0", "choice", {"test": Split(hub="train")},
            None, formats.gpqa, "Idavidrein/gpqa", ("gpqa_main",), "key",
        ),
        # No copy of these two on the Hub is known to be the one Coconut used: files only.
        "prosqa": Source(
            "paths in a graph of made-up words (facebookresearch/coconut, data/)", "MIT", "text",
            _coconut_files("prosqa"), formats.coconut,
        ),
        "prontoqa": Source(
            "true or false by deduction over made-up words (asaparov/prontoqa, as Coconut converts it)",
            "Apache-2.0", "choice",
            _coconut_files("prontoqa"), formats.coconut,
        ),
        "arithmetic": Source(
            "generated here: chains of sums and products, no download", "Apache-2.0", "number",
            {split: Split() for split in SPLITS},
        ),
    }
)  # fmt: skip
