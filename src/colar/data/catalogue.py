"""The table of data sources: where each lies, on the Hub and under a data folder, and how its rows are read.

One entry a source, and nothing about sources anywhere else. `files` are paths under `data_dir`, named as upstream
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
    """One entry of the table. `order="key"`: sorted by the row's own id, or by the hash of its question.

    `equations`: the published steps are equations alone, which `renumber.py` can run on other numbers.
    """

    about: str
    licence: str
    answer_type: AnswerType
    splits: Mapping[str, Split]
    file_parser: Parser | None = None
    hub_parser: Parser | None = None
    hub: str | None = None
    hub_configs: tuple[str | None, ...] = (None,)
    order: Literal["upstream", "key"] = "upstream"
    equations: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # name -> default


def _one_file(path: str, hub: str | None) -> Split:
    return Split(files=((path,),), hub=hub)


def _coconut_splits(name: str) -> dict[str, Split]:
    """The three splits of a data set in Coconut's repository, which says "valid" for validation."""
    return {
        "train": _one_file(f"{name}/{name}_train.json", hub=None),
        "validation": _one_file(f"{name}/{name}_valid.json", hub=None),
        "test": _one_file(f"{name}/{name}_test.json", hub=None),
    }


_GSM8K_AUG_TRAIN = Split(
    files=(
        ("gsm8k_aug/train.txt",),
        # What can be had without the Hub: the head of the published file, and GSM8K's own training problems.
        ("gsm8k_aug/train_first3000.txt", "gsm8k_aug/train_no_aug_equations.txt"),
    ),
    hub="train",
)
_MATH_TRAIN = Split(
    files=(("math/train.parquet",),),
    hub="train",
    part="kept",
    # This question is asked by the test set too; the copies differ in white space.
    leave_out=frozenset({"98fc77ec11ec6bfc"}),
)
_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)

SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "gsm8k-aug": Source(
            about="GSM8K augmented by GPT-4, steps as equations (the paper's training set)",
            licence="MIT",
            answer_type="number",
            splits={
                "train": _GSM8K_AUG_TRAIN,
                "validation": _one_file("gsm8k_aug/valid.txt", hub="validation"),
                "test": _one_file("gsm8k_aug/test.txt", hub="test"),
            },
            file_parser=formats.icot_line,
            hub_parser=formats.columns("question", "answer", steps="steps"),
            hub="whynlp/gsm8k-aug",
            equations=True,
        ),
        "gsm8k": Source(
            about="grade-school problems, steps in words",
            licence="MIT",
            answer_type="number",
            splits={
                "train": _one_file("gsm8k/train.jsonl", hub="train"),
                "test": _one_file("gsm8k/test.jsonl", hub="test"),
            },
            file_parser=formats.gsm8k,
            hub_parser=formats.gsm8k,
            hub="openai/gsm8k",
            hub_configs=("main",),
            options={"keep_marks": False},
        ),
        "gsm-hard": Source(
            about="GSM8K's test set with large numbers; a quarter of the answers are not integers",
            licence="MIT",
            answer_type="number",
            # The Hub calls its only split "train"; it is made of GSM8K's test questions.
            splits={"test": _one_file("gsm_hard/gsmhardv2.jsonl", hub="train")},
            file_parser=formats.columns("input", "target"),
            hub_parser=formats.columns("input", "target"),
            hub="reasoning-machines/gsm-hard",
        ),
        "svamp": Source(
            about="one-step problems with distractors; all 1,000 are the test set, as in the paper",
            licence="MIT",
            answer_type="number",
            # The Hub splits what was published, and is tested on in the paper, as one set. So with MultiArith.
            splits={"test": _one_file("svamp/SVAMP.json", hub="train+test")},
            file_parser=formats.svamp,
            hub_parser=formats.svamp,
            hub="ChilleD/SVAMP",
            order="key",
        ),
        "multiarith": Source(
            about="two-step problems; all 600 are the test set, as in the paper",
            licence="none stated",
            answer_type="number",
            splits={"test": _one_file("multiarith/MultiArith.json", hub="train+test")},
            file_parser=formats.columns("sQuestion", "lSolutions"),
            hub_parser=formats.columns("question", "final_ans"),
            hub="ChilleD/MultiArith",
            order="key",
        ),
        "math": Source(
            about="competition problems, LaTeX answers; a tenth of train is held out as validation",
            licence="MIT",
            answer_type="latex",
            splits={
                "train": _MATH_TRAIN,
                # The same file with the same rows left out: the two parts must divide one ranking.
                "validation": replace(_MATH_TRAIN, part="held"),
                "test": _one_file("math/test.parquet", hub="test"),
            },
            file_parser=formats.hendrycks_math,
            hub_parser=formats.hendrycks_math,
            hub="EleutherAI/hendrycks_math",
            hub_configs=_MATH_SUBJECTS,
            order="key",
        ),
        "math-500": Source(
            about="500 of the MATH test problems",
            licence="MIT",
            answer_type="latex",
            splits={"test": _one_file("math500/test500.jsonl", hub="test")},
            file_parser=formats.math_500,
            hub_parser=formats.math_500,
            hub="HuggingFaceH4/MATH-500",
        ),
        # No files: its authors ask that no copy in plain text be published.
        "gpqa": Source(
            about="graduate-level science, four choices; gated on the Hub, never to be published in plain text",
            licence="CC-BY-4.0",
            answer_type="choice",
            splits={"test": Split(hub="train")},
            hub_parser=formats.gpqa,
            hub="Idavidrein/gpqa",
            hub_configs=("gpqa_main",),
            order="key",
        ),
        # No copy of these two on the Hub is known to be the one Coconut used: files only.
        "prosqa": Source(
            about="paths in a graph of made-up words (facebookresearch/coconut, data/)",
            licence="MIT",
            answer_type="text",
            splits=_coconut_splits("prosqa"),
            file_parser=formats.coconut,
        ),
        "prontoqa": Source(
            about="true or false by deduction over made-up words (asaparov/prontoqa, as Coconut converts it)",
            licence="Apache-2.0",
            answer_type="choice",
            splits=_coconut_splits("prontoqa"),
            file_parser=formats.coconut,
        ),
        # No files and no Hub: these are made, `generators.py` says by what.
        "arithmetic": Source(
            about="generated here: chains of sums and products, no download",
            licence="Apache-2.0",
            answer_type="number",
            splits={split: Split() for split in SPLITS},
        ),
        "prosqa-made": Source(
            about="generated here by the rules of ProsQA: paths in a graph of made-up words",
            licence="Apache-2.0",
            answer_type="text",
            splits={split: Split() for split in SPLITS},
        ),
        "prontoqa-made": Source(
            about="generated here by the rules of ProntoQA: true or false by deduction over made-up words",
            licence="Apache-2.0",
            answer_type="choice",
            splits={split: Split() for split in SPLITS},
        ),
    }
)
