"""The table of data sources, and where the rows of each are found: under a data folder, in a file, or on the Hub.

One entry a source, and nothing about sources anywhere else. `files` are paths under `data_dir`, named as upstream
names them; several alternatives are tried in order, and one that lists several files is their concatenation.
Hub splits use the Hub's own syntax ("train+test").
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from colar import progress
from colar.data import data_files, published_rows
from colar.data.data_files import Entries
from colar.data.example import SPLITS, AnswerType
from colar.data.fields import Parser, coconut

DATA_DIR_VARIABLE = "COLAR_DATA_DIR"


@dataclass(frozen=True)
class Split:
    """Location of one split.

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

    `equations`: the published steps are equations alone, which `renumber/` can run on other numbers.
    """

    about: str
    licence: str
    answer_type: AnswerType
    splits: Mapping[str, Split]
    parser: Parser | None = None
    """Of the published files, and of the Hub's rows; None for a generated source."""
    hub: str | None = None
    hub_parser: Parser | None = None
    """Of the Hub's rows, where these are others."""
    hub_configs: tuple[str | None, ...] = (None,)
    order: Literal["upstream", "key"] = "upstream"
    equations: bool = False


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
            parser=published_rows.icot_line,
            hub_parser=coconut,
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
            parser=published_rows.gsm8k,
            hub="openai/gsm8k",
            hub_configs=("main",),
        ),
        "gsm-hard": Source(
            about="GSM8K's test set with large numbers; a quarter of the answers are not integers",
            licence="MIT",
            answer_type="number",
            # The Hub calls its only split "train"; it is made of GSM8K's test questions.
            splits={"test": _one_file("gsm_hard/gsmhardv2.jsonl", hub="train")},
            parser=published_rows.columns("input", "target"),
            hub="reasoning-machines/gsm-hard",
        ),
        "svamp": Source(
            about="one-step problems with distractors; all 1,000 are the test set, as in the paper",
            licence="MIT",
            answer_type="number",
            # The Hub splits what was published, and is tested on in the paper, as one set. So with MultiArith.
            splits={"test": _one_file("svamp/SVAMP.json", hub="train+test")},
            parser=published_rows.svamp,
            hub="ChilleD/SVAMP",
            order="key",
        ),
        "multiarith": Source(
            about="two-step problems; all 600 are the test set, as in the paper",
            licence="none stated",
            answer_type="number",
            splits={"test": _one_file("multiarith/MultiArith.json", hub="train+test")},
            parser=published_rows.columns("sQuestion", "lSolutions"),
            hub_parser=published_rows.columns("question", "final_ans"),
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
            parser=published_rows.hendrycks_math,
            hub="EleutherAI/hendrycks_math",
            hub_configs=_MATH_SUBJECTS,
            order="key",
        ),
        "math-500": Source(
            about="500 of the MATH test problems",
            licence="MIT",
            answer_type="latex",
            splits={"test": _one_file("math500/test500.jsonl", hub="test")},
            parser=published_rows.math_500,
            hub="HuggingFaceH4/MATH-500",
        ),
        # No files: its authors ask that no copy in plain text be published.
        "gpqa": Source(
            about="graduate-level science, four choices; gated on the Hub, never to be published in plain text",
            licence="CC-BY-4.0",
            answer_type="choice",
            splits={"test": Split(hub="train")},
            parser=published_rows.gpqa,
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
            parser=coconut,
        ),
        "prontoqa": Source(
            about="true or false by deduction over made-up words (asaparov/prontoqa, as Coconut converts it)",
            licence="Apache-2.0",
            answer_type="choice",
            splits=_coconut_splits("prontoqa"),
            parser=coconut,
        ),
        # No files and no Hub: it is made.
        "arithmetic": Source(
            about="generated here: chains of sums and products, no download",
            licence="Apache-2.0",
            answer_type="number",
            splits={split: Split() for split in SPLITS},
        ),
    }
)


# --- the raw rows of a split: under a data folder, in a user's own file, or on the Hub --------------------


def folder(data_dir: str | Path | None) -> Path | None:
    """The data folder: `data_dir`, else the one that COLAR_DATA_DIR names, else None (the Hub)."""
    named = data_dir
    if named is None:
        named = os.environ.get(DATA_DIR_VARIABLE) or None  # set but empty counts as not set
    if named is None:
        return None
    if not Path(named).is_dir():
        raise ValueError(f"the data folder {named} does not exist (--data-dir or {DATA_DIR_VARIABLE})")
    return Path(named)


def present(plan: Split, under: Path) -> list[Path] | None:
    """The first alternative of the split's files that is all there."""
    for names in plan.files:
        paths = [under / name for name in names]
        # One part of a training set is not a training set.
        if all(path.exists() for path in paths):
            return paths
    return None


def entries_of_source(
    name: str, source: Source, plan: Split, data_dir: str | Path | None
) -> tuple[Entries, Parser]:
    """The entries of a source's split, and the parser that they need."""
    assert source.parser is not None
    under = folder(data_dir)
    # A folder that was named stands in for the Hub, for every source that has files at all.
    if plan.files and under is not None:
        return _from_files(name, source, plan, under), source.parser
    if source.hub is None or plan.hub is None:
        raise ValueError(
            f"{name} is read from files only: put {_wanted(plan)} under a folder and name it with --data-dir or "
            f"{DATA_DIR_VARIABLE}"
        )
    return data_files.from_hub(source.hub, source.hub_configs, plan.hub), source.hub_parser or source.parser


def found(source: Source, data_dir: str | Path | None) -> str:
    """ "built in", the Hub id, or the folder, with the splits whose files are not there."""
    under = folder(data_dir)
    plans = {name: plan for name, plan in source.splits.items() if plan.files}
    if plans and under is not None:
        missing = ", ".join(name for name, plan in plans.items() if present(plan, under) is None)
        return f"{under} (not there: {missing})" if missing else f"{under}"
    if source.hub is not None:
        return f"Hub {source.hub}"
    return f"files only: name a folder (--data-dir, {DATA_DIR_VARIABLE})" if plans else "built in"


def _from_files(name: str, source: Source, plan: Split, under: Path) -> Entries:
    paths = present(plan, under)
    if paths is None:
        # The user named a folder: a download in place of a file that is not there would go unnoticed.
        otherwise = f", or name no folder to load {source.hub} from the Hub" if source.hub else ""
        raise ValueError(f"{name}: no {_wanted(plan)} under {under}{otherwise}")
    if len(paths) == 1:
        return data_files.read(paths[0])
    parts = " and ".join(path.name for path in paths)
    progress.say(f"{name}: no {plan.files[0][0]} under {under}, reading {parts}")
    return _distinct(name, paths)


def _distinct(name: str, paths: list[Path]) -> Entries:
    """The lines of several iCoT files, each question once: the question is what stands before "||"."""
    seen: set[str] = set()
    dropped = 0
    for path in paths:
        for place, line in data_files.read(path):
            question = line.partition("||")[0].strip()
            # The parts overlap: both have some of GSM8K's own training problems.
            if question in seen:
                dropped += 1
                continue
            seen.add(question)
            yield place, line
    if dropped:
        progress.say(f"{name}: dropped {dropped} rows whose question had come before")


def _wanted(plan: Split) -> str:
    """The split's files as an error names them: "a or b + c" has two alternatives."""
    return " or ".join(" + ".join(names) for names in plan.files)
