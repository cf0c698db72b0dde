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
from colar.checks import check_known
from colar.data import formats, tables
from colar.data.example import SPLITS, AnswerType
from colar.data.formats import Parser
from colar.data.tables import Entries

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
    under = folder(data_dir)
    # A folder that was named stands in for the Hub, for every source that has files at all.
    if source.file_parser is not None and under is not None:
        return _from_files(name, source, plan, under), source.file_parser
    if source.hub is None or source.hub_parser is None or plan.hub is None:
        raise ValueError(
            f"{name} is read from files only: put {_wanted(plan)} under a folder and name it with --data-dir or "
            f"{DATA_DIR_VARIABLE}"
        )
    return from_hub(source.hub, source.hub_configs, plan.hub), source.hub_parser


def is_own_file(name: str | Path) -> bool:
    """True if a path is called as a user's data file is, in small letters or capitals."""
    return tables.is_table(Path(name)) and tables.ending(Path(name)) != ".txt"


def splits_in(own_folder: Path) -> list[str]:
    """The splits that a user's folder of `<split>.jsonl` and `<split>.json` files has, by name."""
    splits = set()
    for path in own_folder.iterdir():
        # Other JSON files beside the rows are common: settings, descriptions.
        if path.suffix.lower() == ".jsonl" or (is_own_file(path) and path.stem in SPLITS):
            splits.add(path.stem)
    return sorted(splits)


def split_file(own_folder: Path, split: str) -> Path | None:
    """The file of a split in a user's folder. ValueError where there are several."""
    found = sorted(path for path in own_folder.iterdir() if is_own_file(path) and path.stem == split)
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise ValueError(f"{own_folder} has {names}, two files for one split: keep one of them")
    return found[0] if found else None


def entries_of_path(path: Path, split: str) -> Entries:
    """The entries of a user's file, or of the split's file in a user's folder."""
    if path.is_dir():
        file = split_file(path, split)
        if file is None:
            check_known(f"{path} split", [split], splits_in(path))
        path = file or path / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(f"no file {path}")
    return tables.read(path)


def from_hub(hub: str, configs: tuple[str | None, ...], split: str) -> Entries:
    """The entries of a Hub data set's configurations, one after the other. `hub` may be a local folder."""
    import datasets  # slow to import: only a load from the Hub waits for it

    # Each subject of MATH is a configuration of its own; most data sets have one, or none to name.
    for config in configs:
        try:
            table = datasets.load_dataset(hub, config, split=split)
        except Exception as error:  # offline, gated, renamed: every library below has classes of its own
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"cannot load {hub} from the Hub ({type(error).__name__}: {reason}). Log in with `hf auth login` "
                f"if it is gated; without a network, name a folder of upstream files with --data-dir or "
                f"{DATA_DIR_VARIABLE}"
            ) from error
        label = f"{hub}/{config}" if config else hub
        for number, row in enumerate(table, start=1):
            yield f"{label}[{split}]: row {number}", row


def _from_files(name: str, source: Source, plan: Split, under: Path) -> Entries:
    paths = present(plan, under)
    if paths is None:
        # The user named a folder: a download in place of a file that is not there would go unnoticed.
        otherwise = f", or name no folder to load {source.hub} from the Hub" if source.hub else ""
        raise ValueError(f"{name}: no {_wanted(plan)} under {under}{otherwise}")
    if len(paths) == 1:
        return tables.read(paths[0])
    parts = " and ".join(path.name for path in paths)
    progress.say(f"{name}: no {plan.files[0][0]} under {under}, reading {parts}")
    return _distinct(name, paths)


def _distinct(name: str, paths: list[Path]) -> Entries:
    """The lines of several iCoT files, each question once: the question is what stands before "||"."""
    seen: set[str] = set()
    dropped = 0
    for path in paths:
        for place, line in tables.read(path):
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
    """The split's files as an error names them: "a, or b + c" has two alternatives."""
    alternatives = [" + ".join(names) for names in plan.files]
    return " or ".join(alternatives)
