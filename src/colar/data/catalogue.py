"""The published data sets: a table of the locations of their rows, and a parser for each published format.

One entry per source (arithmetic, which is generated, has its own file). Files are paths under `data_dir`, named as
upstream names them. Hub splits use the Hub's own syntax ("train+test"). `sources.py` finds and reads them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from colar.data import programs
from colar.data.data_files import Parser
from colar.data.example import (
    SPLITS,
    AnswerType,
    Fields,
    answer_of,
    filled,
    named_fields,
    question_hash,
    stripped,
    text_of,
)
from colar.data.judge.latex import extract_boxed
from colar.data.layouts import parse_solution

_EQUATION = re.compile(r"<<[^<>]*>>")
"""A mark of GSM8K's calculator, `<<21/7=3>>`; `reasoning.MARK` is stricter, because users' rows may hold programs."""
_PROMPT_SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."
_PARAGRAPH = re.compile(r"\n\s*\n")
_CLOSING = ".!?,;:"
_LETTERS = "ABCD"


class UpstreamFault(ValueError):
    """A row with a known fault in the published data: always left out, with a message on stderr."""


def gsm8k_aug(raw: Any) -> Fields:
    """Parse `question||<<21/7=3>> <<5*3=15>> #### 15`, each `<<...>>` a step, or a row of the Hub's copy."""
    if not isinstance(raw, str):
        return parse_solution(raw)
    question, bars, rest = raw.partition("||")
    if not bars:
        raise ValueError("no '||' between question and steps")
    chain, mark, answer = rest.partition("####")
    if not mark:
        raise ValueError("no '####' before the answer")
    # Text between the equations would be lost silently.
    outside = _EQUATION.sub("", chain).strip()
    if outside:
        raise ValueError(f"text outside <<...>> in the steps: {outside[:40]!r}")
    steps = tuple(_EQUATION.findall(chain))
    return Fields(filled(question, "question"), steps, filled(answer, "answer"))


def gsm8k(raw: Any) -> Fields:
    """Parse GSM8K's own rows: one step per line, then `#### answer`; the calculator's <<...>> marks are removed."""
    row = named_fields(raw)
    # Steps and answer are one text, "step\nstep\n#### 72".
    chain, mark, answer = text_of(row, "answer").rpartition("####")
    if not mark:
        raise ValueError("no '####' before the answer")
    steps = stripped(_EQUATION.sub("", chain).splitlines())
    return Fields(text_of(row, "question"), steps, filled(answer, "answer"))


def svamp(raw: Any) -> Fields:
    """Parse SVAMP: Body and Question make the problem, joined by ". " where the body has no final punctuation."""
    row = named_fields(raw)
    body = text_of(row, "Body")
    question = text_of(row, "Question")
    joint = " " if body[-1] in _CLOSING else ". "
    return Fields(body + joint + question, (), answer_of(row, "Answer"), text_of(row, "ID"))


def multiarith(raw: Any) -> Fields:
    """Parse MultiArith: `sQuestion` and `lSolutions` in its file, `question` and `final_ans` on the Hub."""
    row = named_fields(raw)
    question, answer = ("sQuestion", "lSolutions") if "sQuestion" in row else ("question", "final_ans")
    return Fields(text_of(row, question), (), answer_of(row, answer))


def hendrycks_math(raw: Any) -> Fields:
    """Parse MATH: the solution's paragraphs are the steps, its last box (braces matched) is the answer.

    Reads the publisher's columns (problem, solution) and the verl layout (`reward_model.ground_truth`), whose
    question carries a prompt suffix, which is removed, and whose `target` has lost its spaces, so it is not used.
    """
    row = named_fields(raw)
    if "reward_model" in row:  # the verl layout
        truth = named_fields(named_fields(row["reward_model"]).get("ground_truth"))
        problem = text_of(truth, "question").removesuffix(_PROMPT_SUFFIX)
        row = {**truth, "problem": problem}
    problem = text_of(row, "problem")
    solution = text_of(row, "solution")
    answer = extract_boxed(solution)
    if answer is None:
        # Two of the 7,500 training rows end in an empty box.
        raise UpstreamFault("no answer: the solution has no filled, closed \\boxed{}")
    return Fields(problem, stripped(_PARAGRAPH.split(solution)), answer)


def math_500(raw: Any) -> Fields:
    """Parse MATH-500: as MATH, with the answer in a column of its own and a `unique_id`."""
    row = named_fields(raw)
    # The caller prefixes the key with source and split, so that "test/" would occur twice.
    key = text_of(row, "unique_id").removeprefix("test/").removesuffix(".json")
    return Fields(
        text_of(row, "problem"),
        stripped(_PARAGRAPH.split(text_of(row, "solution"))),
        text_of(row, "answer"),
        key,
    )


def gpqa(raw: Any) -> Fields:
    """Parse GPQA: no steps; the answer is a letter of four choices, their order fixed by a hash of each."""
    row = named_fields(raw)
    question = text_of(row, "Question")
    correct = text_of(row, "Correct Answer")
    wrong = [text_of(row, f"Incorrect Answer {number}") for number in (1, 2, 3)]
    # The right answer is published first; sorting by hash moves it to a random place, the same on every machine.
    choices = sorted([correct, *wrong], key=lambda choice: question_hash(f"{question} {choice}"))
    lines = [question]
    for letter, choice in zip(_LETTERS, choices, strict=True):
        lines.append(f"({letter}) {choice}")
    return Fields("\n".join(lines), (), _LETTERS[choices.index(correct)])


# --- the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Location of one split."""

    file: str | None = None
    """A glob pattern: all files that match are read."""
    hub: str | None = None
    parts: tuple[str, ...] = ()
    """Files that together replace a missing `file`."""
    portion: Literal["all", "kept", "held"] = "all"
    """All rows, or those kept or held out by the hash of the question."""
    leave_out: frozenset[str] = frozenset()
    """Hashes of questions that also occur in the test set."""


@dataclass(frozen=True)
class Source:
    """One entry of the table. `order="key"`: sorted by the row's own id, or by the hash of its question."""

    about: str
    licence: str
    splits: Mapping[str, Split]
    parser: Parser | None = None
    """Parser of the published files and of the Hub's rows; None for a generated source."""
    hub: str | None = None
    hub_configs: tuple[str | None, ...] = (None,)
    order: Literal["upstream", "key"] = "upstream"
    answer_type: AnswerType = "number"


def _programs(
    about: str, licence: str, parser: Parser, file: str, hub: str | None = None, hub_split: str | None = None
) -> Source:
    """A source of training rows whose chains are programs."""
    # Ordered by hash, so that the first N rows mix the files of several models or several kinds of problem.
    return Source(about, licence, {"train": Split(file, hub_split)}, parser, hub, order="key")


def _coconut_splits(name: str) -> dict[str, Split]:
    """The three splits of a data set in Coconut's repository, which calls validation "valid"."""
    upstream = {"train": "train", "validation": "valid", "test": "test"}
    return {split: Split(f"{name}/{name}_{other}.json") for split, other in upstream.items()}


_MATH_TRAIN = Split(
    "math/train.parquet",
    hub="train",
    portion="kept",
    # The test set has this question too; the copies differ in white space.
    leave_out=frozenset({"98fc77ec11ec6bfc"}),
)
_MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip

SOURCES: Mapping[str, Source] = {
    "gsm8k-aug": Source(
        about="GSM8K augmented by GPT-4, steps as equations (the paper's training set)",
        licence="MIT",
        splits={
            "train": Split(
                "gsm8k_aug/train.txt",
                hub="train",
                # Available without the Hub: the head of the published file, and GSM8K's own training problems.
                parts=("gsm8k_aug/train_first3000.txt", "gsm8k_aug/train_no_aug_equations.txt"),
            ),
            "validation": Split("gsm8k_aug/valid.txt", hub="validation"),
            "test": Split("gsm8k_aug/test.txt", hub="test"),
        },
        parser=gsm8k_aug,
        hub="whynlp/gsm8k-aug",
    ),
    "gsm8k": Source(
        about="grade-school problems, steps in words",
        licence="MIT",
        splits={
            "train": Split("gsm8k/train.jsonl", hub="train"),
            "test": Split("gsm8k/test.jsonl", hub="test"),
        },
        parser=gsm8k,
        hub="openai/gsm8k",
        hub_configs=("main",),
    ),
    "gsm-hard": Source(
        about="GSM8K's test set with large numbers; a quarter of the answers are not integers",
        licence="MIT",
        # The Hub calls its only split "train"; it is made of GSM8K's test questions.
        splits={"test": Split("gsm_hard/gsmhardv2.jsonl", hub="train")},
        parser=parse_solution,
        hub="reasoning-machines/gsm-hard",
    ),
    "svamp": Source(
        about="one-step problems with distractors; all 1,000 are the test set, as in the paper",
        licence="MIT",
        # The Hub splits a set that was published, and is tested on in the paper, as a whole. MultiArith likewise.
        splits={"test": Split("svamp/SVAMP.json", hub="train+test")},
        parser=svamp,
        hub="ChilleD/SVAMP",
        order="key",
    ),
    "multiarith": Source(
        about="two-step problems; all 600 are the test set, as in the paper",
        licence="none stated",
        splits={"test": Split("multiarith/MultiArith.json", hub="train+test")},
        parser=multiarith,
        hub="ChilleD/MultiArith",
        order="key",
    ),
    "math": Source(
        about="competition problems, LaTeX answers; a tenth of train is held out as validation",
        licence="MIT",
        answer_type="latex",
        splits={
            "train": _MATH_TRAIN,
            # The same file and `leave_out`, because train and validation must partition one ranking.
            "validation": replace(_MATH_TRAIN, portion="held"),
            "test": Split("math/test.parquet", hub="test"),
        },
        parser=hendrycks_math,
        hub="EleutherAI/hendrycks_math",
        hub_configs=_MATH_SUBJECTS,
        order="key",
    ),
    "math-500": Source(
        about="500 of the MATH test problems",
        licence="MIT",
        answer_type="latex",
        splits={"test": Split("math500/test500.jsonl", hub="test")},
        parser=math_500,
        hub="HuggingFaceH4/MATH-500",
    ),
    # No files: its authors ask that no copy in plain text be published.
    "gpqa": Source(
        about="graduate-level science, four choices; gated on the Hub, never to be published in plain text",
        licence="CC-BY-4.0",
        answer_type="choice",
        splits={"test": Split(hub="train")},
        parser=gpqa,
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
        parser=parse_solution,
    ),
    "prontoqa": Source(
        about="true or false by deduction over made-up words (asaparov/prontoqa, as Coconut converts it)",
        licence="Apache-2.0",
        answer_type="choice",
        splits=_coconut_splits("prontoqa"),
        parser=parse_solution,
    ),
    # Training rows only. Of the last three no identical copy on the Hub is known: some copies hold test rows.
    "tinygsm": _programs(
        "questions by GPT-3.5, solved in Python by language models; answers are not checked; of the Hub's 11.8 "
        "million rows the first 100,000",
        "MIT",
        programs.tinygsm,
        "tinygsm/*/*.json",
        hub="TinyGSM/TinyGSM",
        hub_split="train[:100000]",
    ),
    "mathqa": _programs(
        "GRE and GMAT problems with formulas by people; lower case",
        "Apache-2.0",
        programs.mathqa,
        "mathqa/*.json",
        # The publisher's own copy is a script, which `datasets` no longer runs.
        hub="regisss/math_qa",
        hub_split="train+validation+test",
    ),
    "mathcamps": _programs(
        "problems by GPT-4 for the standards of school grades K to 8",
        "MIT",
        programs.mathcamps,
        "mathcamps/*.json",
    ),
    "dmath": _programs(
        "elementary-school problems by people, translated from Korean",
        "MIT",
        programs.dmath,
        "dmath/*.json",
    ),
    "mawps": _programs(
        "short problems by people, without the rows that MultiArith, SVAMP and others test on",
        "none stated",
        programs.mawps,
        "mawps/questions.json",
    ),
    # Generated: neither files nor Hub.
    "arithmetic": Source(
        about="generated here: chains of sums and products, no download",
        licence="Apache-2.0",
        splits={split: Split() for split in SPLITS},
    ),
}
