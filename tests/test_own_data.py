"""A user's own rows: files, layouts, splits, and what is said about rows that are wrong."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import time
import tracemalloc
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from colar import files
from colar.cli import main
from colar.cli.checkpoints import name_sources
from colar.data import data_files, layouts, reasoning, sources, user_rows
from colar.data.example import Example
from colar.data.held_out import divide
from colar.evaluation import answer_files
from colar.recipe import auto_run

ROWS = [
    {"question": f"What is {i} and 1?", "steps": [f"<<{i}+1={i + 1}>>"], "answer": f"{i + 1}"}
    for i in range(30)
]
CODE = 'def f():\n    """Seven bags of six."""\n    apples = 7 * 6\n    return (apples - 2) / 8\n'
THOUGHT = "Tom has 3 apples. Ann brings 2. In all these are 3 + 2 = 5."


def _read(row: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Example:
    return user_rows.read([row], columns).examples[0]


def test_untyped_test_rows_are_read_by_their_own_answers():
    """Where each training row names its type, none is inferred that theirs could be."""
    typed = [{"question": f"{i}?", "answer": "red", "answer_type": "text"} for i in range(30)]
    rows = user_rows.read(typed)
    test = [{"question": f"{i}!", "answer": colour} for i, colour in enumerate(["red", "green", "7"] * 10)]
    found = user_rows.read_held_out(typed, rows, test=test)["test"]
    assert found.answer_type == "text"
    assert len(found.examples) == 30
    # Inferred from training rows that name none, it holds for both.
    plain = user_rows.read([{"question": f"{i}?", "answer": str(i)} for i in range(30)])
    assert user_rows.read_held_out(typed, plain, test=test)["test"].answer_type == "number"


# --- layouts -----------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 and 2?"}]
LAYOUTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...], str]] = {
    "steps": ({"question": "q", "steps": ["<<1+1=2>>"], "answer": 2}, "q", ("<<1+1=2>>",), "2"),
    "steps as one text": ({"question": "q", "steps": "1+1", "answer": "2"}, "q", ("1+1",), "2"),
    "GSM8K": (
        {"question": "q", "answer": "He has 3*2=<<3*2=6>>6.\nThen 6+1=<<6+1=7>>7.\n#### 7"},
        "q",
        ("<<3*2=6>>", "<<6+1=7>>"),
        "7",
    ),
    "GSM8K without marks": (
        {"question": "q", "answer": "First six.\nThen seven.\n#### 7"},
        "q",
        ("First six.", "Then seven."),
        "7",
    ),
    "completion": ({"prompt": "q", "completion": "Two more. #### 7"}, "q", ("Two more.",), "7"),
    "completion as messages": (
        {"prompt": CHAT, "completion": [{"role": "assistant", "content": "<think>Add.</think>4"}]},
        "2 and 2?",
        ("Add.",),
        "4",
    ),
    "reasoning_content": (
        {"messages": [*CHAT, {"role": "assistant", "content": "4", "reasoning_content": "Add them."}]},
        "2 and 2?",
        ("Add them.",),
        "4",
    ),
    "a box behind thoughts": (
        {"messages": [*CHAT, {"role": "assistant", "content": "<think>Add.</think>So it is $\\boxed{4}$."}]},
        "2 and 2?",
        ("Add.",),
        "4",
    ),
    "thoughts without an opening tag": (
        {"messages": [*CHAT, {"role": "assistant", "content": "Add.</think>\n\n4"}]},
        "2 and 2?",
        ("Add.",),
        "4",
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "2 and 2?"}, {"from": "gpt", "value": "It is \\boxed{4}."}]},
        "2 and 2?",
        ("It is \\boxed{4}.",),
        "4",
    ),
    "Nemotron": ({"reasoning": "on", "messages": [*CHAT, {"role": "assistant", "content": "<think>Add.</think>\\boxed{4}"}]}, "2 and 2?", ("Add.",), "4"),
    "Nemotron's first": ({"input": "q", "output": "Add.\nSo \\boxed{4}.", "reasoning": "off"}, "q", ("Add.", "So \\boxed{4}."), "4"),
    "MetaMathQA": ({"query": "q", "response": "Add 2.\n#### 4\nThe answer is: 4"}, "q", ("Add 2.",), "4"),
    "OpenThoughts": (
        {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "<|begin_of_thought|>\n\nAdd.\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\nIt is \\boxed{4}.\n\n<|end_of_solution|>"}]},
        "q",
        ("Add.",),
        "4",
    ),
    "an answer in tags": ({"question": "q", "answer": "<think>\nAdd.\n</think>\n<answer>4</answer>"}, "q", ("Add.",), "4"),
    "tags in a column of reasoning": ({"question": "q", "reasoning": "<think>Add.</think>So 4.", "answer": "4"}, "q", ("Add.",), "4"),
    "words before an answer in tags": ({"question": "q", "answer": "<think>Add.</think>\nSo it is 4.\n<answer>4</answer>"}, "q", ("Add.",), "4"),
    "empty thoughts before an answer in tags": ({"question": "q", "answer": "<think>\n\n</think>\n\nAdd.\n<answer>4</answer>"}, "q", ("Add.",), "4"),
    "a passage": ({"question": "How many?", "context": "Tom has 4.", "answer": "4"}, "Tom has 4.\n\nHow many?", (), "4"),
    "an instruction and its passage": ({"instruction": "Add.", "input": "2 and 2", "context": "By hand.", "cot": "4.", "output": "4"}, "By hand.\n\nAdd.\n\n2 and 2", ("4.",), "4"),
    "empty thoughts": ({"question": "q", "answer": "<think>\n\n</think>\n\nAdd.\nSo \\boxed{4}."}, "q", ("Add.", "So \\boxed{4}."), "4"),
    "numpy's steps": ({"question": "q", "steps": np.array(["Add.", "2+2=4"], object), "answer": np.int64(4)}, "q", ("Add.", "2+2=4"), "4"),
    "numpy's messages": ({"messages": np.array([*CHAT, {"role": "assistant", "content": "4"}], object)}, "2 and 2?", (), "4"),
    "a box alone": ({"question": "q", "answer": " $\\boxed{4}$."}, "q", (), "4"),
    "a letter in a box": ({"question": "q", "answer": "\\boxed{b}"}, "q", (), "b"),
    "a box in a box": ({"question": "q", "answer": "\\fbox{\\boxed{\\frac{1}{2}}}"}, "q", (), "\\frac{1}{2}"),
    "a box before its reasons": ({"question": "q", "answer": "\\boxed{4} because 2 and 2 are 4."}, "q", ("\\boxed{4} because 2 and 2 are 4.",), "4"),
    "two boxes": ({"question": "q", "answer": "\\boxed{4} and \\boxed{5}"}, "q", ("\\boxed{4} and \\boxed{5}",), "5"),
    "a program": ({"question": "q", "code": CODE}, "q", ("<<7*6=42>>", "<<(42-2)/8=5>>"), "5"),
    "MathQA": (
        {
            "Problem": "a man buys 12 pens at 5 dollars each .",
            "linear_formula": "multiply(n0,n1)|add(#0,const_2)|",
            "options": "a ) 62 , b ) 60 , c ) 12 , d ) 5 , e ) none of these",
            "correct": "a",
        },
        "a man buys 12 pens at 5 dollars each.",
        ("<<12*5=60>>", "<<60+2=62>>"),
        "62",
    ),
    "MATH": ({"problem": "q", "solution": "Add.\n\nSo $x = \\boxed{\\frac{1}{2}}$."}, "q", ("Add.", "So $x = \\boxed{\\frac{1}{2}}$."), "\\frac{1}{2}"),
    "Alpaca": ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, "Add.\n\n2 and 2", (), "4"),
    "rationale": ({"question": "q", "rationale": THOUGHT, "answer": "5"}, "q", (THOUGHT,), "5"),
    "headings": ({"question": "q", "solution": "#### One\nAdd.\n#### Two\nSo it is \\boxed{4}."}, "q", ("#### One", "Add.", "#### Two", "So it is \\boxed{4}."), "4"),
    "headings before the answer": ({"question": "q", "answer": "#### One\nAdd.\n#### 4\n"}, "q", ("#### One", "Add."), "4"),
    "headings in the reasoning": ({"question": "q", "reasoning": "#### One\nAdd.\n#### Two\nIt is 4.", "answer": "4"}, "q", ("#### One", "Add.", "#### Two", "It is 4."), "4"),
    "smaller headings": ({"question": "q", "answer": "##### One\nIt is 4"}, "q", (), "##### One\nIt is 4"),
    "the answer below its mark": ({"question": "q", "answer": "Add.\n####\n4"}, "q", ("Add.",), "4"),
    "an empty column of reasoning": ({"question": "q", "reasoning": "", "steps": [], "answer": "Add. #### 4"}, "q", ("Add.",), "4"),
    "reasoning in the second column": ({"question": "q", "steps": "", "rationale": "Add.", "answer": "4"}, "q", ("Add.",), "4"),
    "a list in a CSV of pandas": ({"question": "q", "steps": str(["Tom's 2", "2+2=4"]), "answer": "4"}, "q", ("Tom's 2", "2+2=4"), "4"),
    "a list in a cell as JSON": ({"question": "q", "steps": '["2 and 2", "2+2=4"]', "answer": "4"}, "q", ("2 and 2", "2+2=4"), "4"),
    "a solution and its final answer": (
        {"question": "q", "answer": "2 and 2 are 4.", "final_answer": "4"},
        "q",
        ("2 and 2 are 4.",),
        "4",
    ),
    "a chain, an answer and its final answer": (
        {"question": "q", "steps": ["2+2=4"], "answer": "It is 4.", "final_answer": "4"},
        "q",
        ("2+2=4",),
        "4",
    ),
    "an empty list in a CSV, and reasoning in the answer": (
        {"question": "q", "steps": "[]", "answer": "Add 2.\n#### 4"},
        "q",
        ("Add 2.",),
        "4",
    ),
    "an empty list in a CSV of pandas": ({"question": "q", "steps": "[]", "answer": "4"}, "q", (), "4"),
    "pandas' empty cells": ({"question": "q", "steps": float("nan"), "context": np.float64("nan"), "answer": "4"}, "q", (), "4"),
    "a float of numpy's": ({"question": "q", "answer": np.float64(2.5)}, "q", (), "2.5"),
    "brackets that are no list": ({"question": "q", "steps": "[2 and 2] make 4", "answer": "4"}, "q", ("[2 and 2] make 4",), "4"),
    "an array of numpy's": ({"question": "q", "steps": "['2' '4']", "answer": "4"}, "q", ("['2' '4']",), "4"),
    "a prompt as messages": ({"prompt": CHAT, "solution": "4"}, "2 and 2?", (), "4"),
    "a code that is no program": ({"question": "q", "steps": ["1+1=2"], "answer": "2", "code": "MA 1"}, "q", ("1+1=2",), "2"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_as_people_have_them(name: str) -> None:
    row, question, steps, answer = LAYOUTS[name]
    spellings = (str,) if name in ("a program", "MathQA") else (str, str.title, str.upper, " {} ".format)
    for spelt in spellings:
        example = _read({spelt(column): value for column, value in row.items()})
        assert (example.question, example.steps, example.answer) == (question, steps, answer)


def test_columns_that_only_case_tells_apart_are_told_apart() -> None:
    assert _read({"Answer": "not this", "question": "q", "answer": "4", "ANSWER": "nor this"}).answer == "4"
    assert _read({"Answer": "4", "question": "q", "answer": None}).answer == "4"
    # Of a subject and its code there are many rows.
    for other in ("ID", "Code"):
        rows = user_rows.read([{"Question": f"{i}?", "Answer": "4", other: "algebra"} for i in range(2)])
        assert [row.id for row in rows.examples] == ["rows/train/0", "rows/train/1"]
    asked = answer_files.question_row("a.csv:2", {"Question": "q", "Topic": "sums", "ID": 7}, "1")
    assert asked == {"question": "q", "Topic": "sums", "ID": 7, "id": "1", "context": ()}
    with pytest.raises(ValueError, match="there are Answer, Ask"):
        _read({"Ask": "q", "Answer": "4"})
    # A name that the user gives is that of the file.
    assert _read({"Ask": "q", "Answer": "4"}, {"question": "Ask", "answer": "Answer"}).answer == "4"


def test_a_formula_beside_an_answer_is_not_mathqas() -> None:
    row = {"problem": "What is 2 + 3?", "linear_formula": "add(2,3)|", "rationale": "We add.", "answer": "5"}
    assert _read(row).steps == ("We add.",)


def test_a_column_that_a_question_may_need_is_named_as_the_file_does() -> None:
    found = user_rows.read([{"question": "q", "answer": "4", " Options ": "a) 4"}])
    assert found.summary()[1:] == ["1 of 1 rows have no reasoning", *found.unread()]
    assert found.unread() == ["the column  Options  is not read: write its text into the question"]
    row = {"Passage": "q", "Answer": "4"}
    assert user_rows.read([row], {"question": "Passage", "answer": "Answer"}).unread() == []


ASKED: dict[str, tuple[dict[str, Any], dict[str, str] | None]] = {
    "a passage": ({"question": "How many?", "context": "Tom has 4.", "answer": "4"}, None),
    "a program": ({"question": "How many?", "context": "Tom has 7 times 6.", "code": CODE}, None),
    "an instruction": ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, None),
    "a named instruction": (
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        {"question": "instruction", "answer": "output"},
    ),
    "turns": ({"question": "q", "context": [["system", "Be brief."]], "answer": "4"}, None),
    "a chat": ({"messages": [*CHAT, {"role": "assistant", "content": "4"}]}, None),
    "ShareGPT": (
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": "2 and 2?"}, {"from": "gpt", "value": "4"}],
        },
        None,
    ),
}


@pytest.mark.parametrize("key", ["steps", "answer"])
def test_a_chain_or_an_answer_in_the_column_context_is_not_in_the_question(key: str) -> None:
    row = {"q": "2 and 2?", "s": "Add.", "a": "4"}
    columns = {"question": "q", "steps": "s", "answer": "a"}
    row["context"] = row.pop(columns[key])
    example = _read(row, columns | {key: "context"})
    assert (example.question, example.steps, example.answer) == ("2 and 2?", ("Add.",), "4")


@pytest.mark.parametrize("name", ASKED)
def test_a_question_is_asked_as_it_was_trained(name: str) -> None:
    row, columns = ASKED[name]
    example = _read(row, columns)
    unanswered = {
        key: value[:-1] if key in ("messages", "conversations") else value
        for key, value in row.items()
        if key not in ("answer", "output")
    }
    for asked in (row, unanswered):
        found = answer_files.question_row("a.jsonl:1", asked, "1")
        assert (found["question"], found["context"]) == (example.question, example.context)


def test_a_system_message_in_a_column_of_its_own_is_context() -> None:
    turns = [{"from": "human", "value": "2 and 2?"}, {"from": "gpt", "value": "<think>Add.</think>4"}]
    assert _read({"conversations": turns, "system": " Be brief. "}).context == (("system", "Be brief."),)
    own = [{"from": "system", "value": "Think."}, *turns]
    assert _read({"conversations": own, "system": "Be brief."}).context == (("system", "Think."),)
    assert _read({"conversations": turns, "system": ""}).context == ()


def test_a_system_message_of_every_row_is_named() -> None:
    def rows(*texts: str) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "system", "content": text}, *turns]} for text in texts]

    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "1+1\n#### 2"}]
    told = "every row has the system message 'Solve.': requests need it as well"
    assert any(told in line for line in user_rows.read(rows("Solve.", "Solve.")).summary())
    assert not any("system message" in line for line in user_rows.read(rows("Solve.", "Add.")).summary())


def test_a_chat_of_several_turns_is_context_and_its_last_answer_is_learnt() -> None:
    turns = [
        *CHAT, {"role": "assistant", "content": "<think>Add.</think>4"}, {"role": "user", "content": "And 3 more?"},
        {"role": "assistant", "content": "<think>4 and 3.</think>7"}, {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    example = _read({"messages": turns})
    assert example.context == (("system", "Be brief."), ("user", "2 and 2?"), ("assistant", "4"))
    assert (example.question, example.steps, example.answer) == ("And 3 more?", ("4 and 3.",), "7")


def test_columns_can_be_named() -> None:
    row = {"ask": "q", "why": "Add them.", "so": "4", "question": "not this"}
    example = _read(row, {"question": "ask", "steps": "why", "answer": "so"})
    assert (example.question, example.steps, example.answer) == ("q", ("Add them.",), "4")


# --- steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One is 1. Two is 2.", ["One is 1.", "Two is 2."]),
        ("He pays $3.50 to Mr. Smith. Then he goes.", ["He pays $3.50 to Mr. Smith.", "Then he goes."]),
        ("We have $a. B = 2$. So b.", ["We have $a. B = 2$.", "So b."]),
        ("See \\(x. Y\\) here! What? Yes.", ["See \\(x. Y\\) here!", "What?", "Yes."]),
        ("1. Add. 2. Subtract.", ["1. Add.", "2. Subtract."]),
        ("no end", ["no end"]),
    ],
)
def test_sentences_end_outside_of_formulas(text: str, found: list[str]) -> None:
    assert reasoning.sentences(text) == found


@given(st.text(alphabet="aB1.?! $\\()[]\n", max_size=60))
def test_cutting_loses_no_character(text: str) -> None:
    assert "".join("".join(reasoning.cut(text)).split()) == "".join(text.split())


# --- files -------------------------------------------------------------------------------------------------


def _write(path: Path, kind: str) -> Path:
    flat = [{"question": row["question"], "reasoning": "Add.", "answer": row["answer"]} for row in ROWS]
    lines = "".join(json.dumps(row) + "\n" for row in flat)
    cells = [[*flat[0]], *([str(value) for value in row.values()] for row in flat)]
    path = path / f"mine.{kind}"
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "json":
        path.write_text(json.dumps({"version": 1, "rows": flat}))
    elif kind == "csv":
        path.write_text(
            "\n".join(",".join(f'"{cell}"' for cell in row) for row in cells), encoding="utf-8-sig"
        )
    elif kind == "tsv":
        path.write_text("\r\n".join("\t".join(row) for row in cells))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(flat), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet"])
def test_files_of_each_kind_hold_the_same_rows(kind: str, tmp_path: Path) -> None:
    path = _write(tmp_path, kind)
    path = path.rename(path.with_name(f"mine.v2.{kind}"))
    rows = user_rows.read(path)
    assert {example.answer_type for example in rows.examples} == {"number"}
    assert [example.question for example in rows.examples] == [row["question"] for row in ROWS]
    assert {example.steps for example in rows.examples} == {("Add.",)}
    assert rows.examples[0].id == "mine.v2/train/0"
    assert list(name_sources([str(path)])) == ["mine.v2"]


def test_a_data_set_in_memory_is_read() -> None:
    assert len(user_rows.read(datasets.Dataset.from_list(ROWS)).examples) == len(ROWS)


# --- judging -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("golds", "kind"),
    [
        (["4", "1,200", "3/4", "-2.5"], "number"),
        (["A", "B", "(C)", "d"], "choice"),
        (["\\frac{1}{2}", "x^2", "4", "12"], "latex"),
        (["Paris", "4", "a dog", "Rome"], "text"),
        (["4"] * 39 + ["four"], "number"),
        (["$4", "4 apples", "- 3", "5 dogs"], "number"),
        (["x = 4", "x = 5", "x=-3"], "number"),
        # Without the month, 5 May would be right for 5 June.
        (["January 5", "March 12", "May 3", "May 5"], "text"),
        (["5 May", "12 June", "3 may", "5 June"], "text"),
        (["5 PM", "11 AM", "3:00 p.m.", "4 am"], "text"),
        (["12% increase", "7% decrease", "3% increase", "4% decrease"], "text"),
        (["10am", "10pm", "11am", "12pm"], "text"),
        (["5 marbles", "3 apples", "2 decimeters", "8 lessons"], "number"),
        (["5 more", "4 more", "3 more apples", "2 more"], "number"),
        (["4 amps", "5 apples", "3 dogs", "6 maps"], "number"),
        (["A. 5", "B. 12", "C. 7", "D. 9"], "choice"),
        (["Option A: x", "Option B: y", "A: 3", "B) 4"], "choice"),
        (["$12.50", "Monday", "Paris", "Ann", "$3"], "text"),
        (["$x$", "$12.50$", "$5x$", "4"], "latex"),
    ],
)
def test_the_judge_is_chosen_from_the_answers(golds: list[str], kind: str) -> None:
    rows = user_rows.read([{"question": f"q{i}", "answer": gold} for i, gold in enumerate(golds)])
    assert {example.answer_type for example in rows.examples} == {kind}
    left_out = {reason.partition(":")[0]: len(places) for reason, places in rows.left_out.places.items()}
    assert left_out == ({"answer cannot be read as answer_type 'number'": 1} if "four" in golds else {})


def test_a_file_is_judged_alike_by_every_command(tmp_path: Path) -> None:
    """As a source of evaluate and recipes, and by `train auto`; a type that some rows name is theirs alone."""
    rows = [{"question": f"q{i}", "steps": ["Think."], "answer": "Paris"} for i in range(3)]
    path = files.write_jsonl(
        tmp_path / "my.jsonl", [*rows, {"question": "q", "answer": "4", "answer_type": "number"}]
    )
    found = [sources.load_examples(str(path), "train"), user_rows.read(path).examples]
    assert [[row.answer_type for row in rows] for rows in found] == [["text"] * 3 + ["number"]] * 2


def test_the_content_of_a_message_may_be_text_parts() -> None:
    """As OpenAI's API and processors of Hugging Face have it; an image is no text."""

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    answer = {"role": "assistant", "content": parts("<think>1 + 2 = 3</think>3")}
    chat = {"messages": [{"role": "user", "content": parts("1 + ", "2?")}, answer]}
    [row] = user_rows.read([chat]).examples
    assert (row.question, row.steps, row.answer) == ("1 + 2?", ("1 + 2 = 3",), "3")
    image = [*parts("1 + 2?"), {"type": "image"}]
    with pytest.raises(ValueError, match="the content of a message of 'user' must be text, is a list"):
        user_rows.read([{"messages": [{"role": "user", "content": image}, answer]}])


def test_a_chat_may_name_its_type() -> None:
    messages = [*CHAT, {"role": "assistant", "content": "4"}]
    assert _read({"messages": messages, "answer_type": "text"}).answer_type == "text"


@pytest.mark.parametrize("empty", ["", 0, False, []])
def test_an_empty_type_is_a_wrong_one(empty) -> None:
    """ "May 5" would equal "June 5" if it passed for a number."""
    rows = [{"question": f"{i}?", "answer": f"May {i}", "answer_type": empty} for i in range(1, 30)]
    with pytest.raises(ValueError, match="answer_type must be one of"):
        user_rows.read(rows)


def test_rows_that_name_their_types_are_summed_up_by_them() -> None:
    named = [("x^2", "latex"), ("Paris", "text"), ("a dog", "text")]
    rows = user_rows.read([{"question": gold, "answer": gold, "answer_type": kind} for gold, kind in named])
    assert rows.summary()[0].endswith("; answers are judged 2 as text, 1 as latex")


# --- splits ------------------------------------------------------------------------------------------------


def _examples(questions: list[str]) -> list[Example]:
    return [Example(str(i), question, (), "1") for i, question in enumerate(questions)]


@given(st.lists(st.integers(0, 200), min_size=40, max_size=400), st.randoms())
def test_no_question_is_on_two_sides_in_any_order(numbers: list[int], order: random.Random) -> None:
    rows = _examples([f"question {number}" for number in [*numbers, *range(201, 321)]])
    split = divide(rows)
    sides = [{row.question for row in part} for part in (split.train, split.validation, split.test)]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]
    # Every row of a training question is learnt, and of the others the first is asked.
    assert split.train == [row for row in rows if row.question in sides[0]]
    for part, side in ((split.validation, sides[1]), (split.test, sides[2])):
        questions = [row.question for row in rows]
        assert part == [rows[i] for i in sorted(map(questions.index, side))]
    assert split.also_held_out == len(rows) - sum(map(len, (split.train, split.validation, split.test)))
    shuffled = list(rows)
    order.shuffle(shuffled)
    again = divide(shuffled)
    assert [{row.question for row in part} for part in (again.train, again.validation, again.test)] == sides


@pytest.mark.parametrize(("n", "held"), [(20, 5), (100, 25), (400, 50), (2000, 100), (30_000, 500)])
def test_a_twentieth_is_held_out(n: int, held: int) -> None:
    split = divide(_examples([f"q{i}" for i in range(n)]))
    assert (len(split.train), len(split.validation), len(split.test)) == (n - 2 * held, held, held)


def test_questions_are_held_out_not_their_solutions() -> None:
    """With 16 solutions of each question 500 rows would be 32 questions, and a speed chosen by these."""
    split = divide(_examples([f"q{i % 600}" for i in range(9600)]))
    assert (len(split.train), len(split.validation), len(split.test)) == (16 * 500, 50, 50)
    assert len({row.question for row in split.test}) == 50
    assert split.also_held_out == 15 * 100


SPELLINGS = [
    str,
    str.upper,
    lambda text: unicodedata.normalize("NFD", text),
    lambda text: text.replace("’", "'").replace(" ", "\u00a0"),
    lambda text: text.replace("?", " ?"),
]


@given(st.lists(st.tuples(st.integers(0, 80), st.sampled_from(SPELLINGS)), min_size=20, max_size=200))
def test_spellings_of_one_question_are_on_one_side(drawn: list[tuple[int, Callable[[str], str]]]) -> None:
    asked = [(number, spell(f"Zoë’s café sells {number} more. How many?")) for number, spell in drawn]
    asked += [(number, f"Zoë’s café sells {number} more. How many?") for number in range(81, 121)]
    rows = _examples([question for _, question in asked])
    split = divide(rows)
    sides = [{asked[int(row.id)][0] for row in part} for part in (split.train, split.validation, split.test)]
    assert sum(map(len, sides)) == len({number for number, _ in asked})


@given(st.integers(20, 60), st.sets(st.integers(0, 59)), st.sets(st.integers(0, 59)), st.booleans())
def test_every_part_has_rows_or_there_is_an_error_before_training(
    n: int, validated: set[int], tested: set[int], both: bool
) -> None:
    rows = _examples([f"q{i}" for i in range(60)])
    given_test = [rows[i] for i in sorted(tested)] if both and tested else None
    own = set(range(n)) - validated - (tested if given_test else set())
    try:
        split = divide(rows[:n], [rows[i] for i in sorted(validated)], given_test)
    except ValueError:
        assert len(own) < 20 or not validated - (tested if given_test else set())
        return
    assert all((split.train, split.validation, split.test))


def test_rows_without_reasoning_are_held_out_but_not_trained_on() -> None:
    """Half of them, and a model answers without a thought: 0 thoughts and 52% right, where 74 were without these rows."""
    rows = [Example(str(i), f"q{i}", ("1 + 1 = 2",) if i % 2 else (), "2") for i in range(200)]
    split = divide(rows)
    assert all(row.steps for row in split.train)
    assert split.without_chain + len(split.train) == 100
    assert any(not row.steps for row in split.test)
    # Where no row has any, there is nothing else to train on.
    assert divide(_examples([f"q{i}" for i in range(200)])).without_chain == 0


def test_rows_that_share_an_id_are_all_read() -> None:
    rows = [{"id": i % 3, "question": f"q{i}", "steps": ["a"], "answer": "1"} for i in range(7)]
    found = user_rows.read(rows)
    assert [row.id for row in found.examples] == ["0", "1", "2", "0-2", "1-2", "2-2", "0-3"]
    assert not found.left_out.places


def test_a_stray_cell_or_another_name_of_a_column_costs_no_other_row() -> None:
    rows: list[dict[str, Any]] = [{"question": f"q{i}", "steps": ["a"], "answer": "1"} for i in range(200)]
    stray = [*rows[:51], {**rows[51], "final_answer": "2"}, *rows[52:]]
    assert len(user_rows.read(stray).examples) == 200
    others = [{"problem": f"p{i}", "steps": ["a"], "answer": "1"} for i in range(100)]
    for mixed in (rows[:150] + others, others + rows[:150], others + rows[:50]):
        assert len(user_rows.read(mixed).examples) == len(mixed)


def test_ids_are_numbered_in_one_pass() -> None:
    rows = [{"id": "a", "question": f"q{i}", "steps": ["a"], "answer": "1"} for i in range(20_000)]
    start = time.process_time()
    assert user_rows.read(rows).examples[-1].id == "a-20000"
    assert time.process_time() - start < 8


@pytest.mark.parametrize(
    "chain",
    [
        "if x << 2 then y >> 1\nso 4",
        "cin >> n;\ncout << n << endl; cin >> m;",
        "a << b\n1 >> 2",
        "cout << x; y = 3; cin >> n",
    ],
)
def test_a_program_has_no_marks(chain: str) -> None:
    assert reasoning.cut(chain) == tuple(chain.splitlines())


def test_one_column_is_not_named_for_chain_and_answer() -> None:
    rows = [{"q": "1 + 1?", "a": "It is two. So the answer is 2."}]
    with pytest.raises(ValueError, match="a cannot be steps and answer; .* end it with `#### 42`"):
        user_rows.read(rows, {"question": "q", "steps": "a", "answer": "a"})
    # The advice works.
    (row,) = user_rows.read(
        [{"q": "1 + 1?", "a": "It is two.\n#### 2"}], {"question": "q", "answer": "a"}
    ).examples
    assert (row.steps, row.answer) == (("It is two.",), "2")


PAIRS = [
    (names, first, later)
    for names in (layouts.QUESTION, layouts.ANSWER)
    for i, first in enumerate(names)
    for later in names[i + 1 :]
    # Alpaca's input is a part of its instruction.
    if (first, later) != ("instruction", "input")
]


@pytest.mark.parametrize(("names", "first", "later"), PAIRS)
def test_an_empty_cell_makes_no_other_column_question_or_answer(
    names: tuple[str, ...], first: str, later: str
) -> None:
    other = {"answer": "4"} if names is layouts.QUESTION else {"question": "2 + 2?"}
    whole: dict[str, Any] = {first: "what is first", later: "what comes later", **other}
    (expected,) = {(row.question, row.steps, row.answer) for row in user_rows.read([whole]).examples}
    null = {**whole, first: None}
    absent = {name: text for name, text in whole.items() if name != first}
    for place, lacking in itertools.product(range(3), (null, absent)):
        found = user_rows.read([lacking if i == place else whole for i in range(3)])
        assert [row.id for row in found.examples] == [f"rows/train/{i}" for i in range(3) if i != place]
        assert {(row.question, row.steps, row.answer) for row in found.examples} == {expected}
    # A column that is empty in every row is none.
    (row,) = user_rows.read([null]).examples
    assert "what comes later" in (row.question, row.answer)


def test_rows_that_are_given_are_held_out_and_no_others() -> None:
    rows = _examples([f"q{i}" for i in range(100)])
    validation, test = rows[5:20], rows[:10]
    split = divide(rows, validation, test)
    assert (split.validation, split.test) == (rows[10:20], test)
    assert (split.train, split.also_held_out) == (rows[20:], 20)
    split = divide(rows, validation)
    assert (split.validation, len(split.test), len(split.train)) == (validation, 21, 64)
    assert not {row.id for row in validation} & {row.id for row in (*split.train, *split.test)}
    split = divide(rows, test=test)
    assert (len(split.validation), len(split.train), split.also_held_out) == (22, 68, 10)
    with pytest.raises(
        ValueError, match=r"^0 different questions .* \(100 of 100 rows have a question that is held out\)"
    ):
        divide(rows, test=rows)


def test_auto_takes_a_folders_own_validation_and_test_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(i: int, answer: str = "") -> dict[str, str]:
        return {"question": f"What is {i} and 1?", "steps": f"{i}+1={i + 1}", "answer": answer or f"{i + 1}"}

    parts = {"train": range(60), "validation": range(58, 70), "test": range(70, 80)}
    for name, numbers in parts.items():
        files.write_jsonl(tmp_path / "rows" / f"{name}.jsonl", map(row, numbers))
    # Nearly all of the training rows are numbers: so is each answer of the test.
    files.write_jsonl(tmp_path / "rows" / "test.jsonl", [*map(row, parts["test"]), row(80, "a dozen")])
    call = auto_run.AutoCall("tiny", tmp_path / "rows", tmp_path / "run")
    auto_run.prepare_run(call)
    written = {name: sources.load_examples(str(tmp_path / "run" / "data"), name) for name in parts}
    asked = {name: {int(row.question.split()[2]) for row in rows} for name, rows in written.items()}
    assert asked == {"train": set(range(58)), "validation": set(range(58, 70)), "test": set(range(70, 80))}
    said = capsys.readouterr().err
    assert "left out 2: validation or test rows ask the same question" in said
    assert "rows/test: read 10 of 11 rows" in said
    assert "58 rows to train on, 12 to validate, 10 held out" in said
    # Another file for the test takes precedence over the folder's.
    other = files.write_jsonl(tmp_path / "other.jsonl", map(row, range(90, 93)))
    auto_run.prepare_run(auto_run.AutoCall("tiny", tmp_path / "rows", tmp_path / "run2", test=other))
    assert len(sources.load_examples(str(tmp_path / "run2" / "data"), "test")) == 3


def test_the_split_of_a_folder_is_shown_as_auto_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def split_line(*more: str) -> str:
        assert main(["data", "show", str(tmp_path), "--limit", "1", *more]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    files.write_jsonl(tmp_path / "train.jsonl", ROWS)
    assert split_line().startswith("split: 16 to train on, 7 to validate with, 7 for")
    files.write_jsonl(tmp_path / "test.jsonl", [{"question": f"{i}", "answer": f"{i}"} for i in range(5)])
    assert split_line().startswith("split: 23 to train on, 7 to validate with, 5 for")
    files.write_jsonl(tmp_path / "validation.jsonl", ROWS[:4])
    assert split_line().startswith("split: 26 to train on, 4 to validate with, 5 for")
    # No run is trained on another split.
    assert split_line("--split", "test").startswith("tokens of a chain")
    files.write_jsonl(tmp_path / "validation.jsonl", ROWS)
    assert split_line().startswith("colar train auto would not take it: 0 different questions")


# --- wrong inputs: one line that says what to do -----------------------------------------------------------

LINE = json.dumps(ROWS[0])
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
# Rows and files that are wrong in other ways: tests/test_sources.py.
WRONG: dict[str, tuple[str, bytes, str]] = {
    "an empty file": ("a.jsonl", b"", "a.jsonl: no rows"),
    "an empty list": ("a.json", b"[]", "a.json: no rows"),
    "one row": ("a.jsonl", LINE.encode(), "1 rows are too few to train on and to measure with: 20 or more"),
    "one question": ("a.jsonl", (LINE + "\n").encode() * 30, "1 different questions are too few"),
    "no answers": ("a.jsonl", b'{"question": "q"}\n' * 30, "cannot tell which columns are question and answer"),
    "columns that cannot be guessed": ("a.csv", b"x,y\n1,2\n", "(there are x, y): name them, --columns question=COLUMN,answer=COLUMN and perhaps steps=COLUMN; for a recipe, which has no such key, "),
    "a page in place of a file": ("a.json", b"<!DOCTYPE html><html></html>", "an HTML page, not rows: download"),
    "an LFS pointer": ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "mixed encodings": ("a.jsonl", LINES.encode() + "{\"question\": \"\xfc\"}".encode("latin-1"), "a.jsonl:31: not UTF-8"),
    "UTF-16": ("a.json", "[]".encode("utf-16"), "not UTF-8 text: invalid start byte; save it as UTF-8, not as UTF-16"),
    "answers that are lists": ("a.jsonl", b'{"question": "q", "answer": [1, 2]}\n' * 30, "answer must be text, is a list"),
    "answers that are null": ("a.jsonl", b'{"question": "q", "answer": null}\n' * 30, "not of layout solution (a question, an answer, perhaps its reasoning): it has question; empty: answer"),
    "empty questions": ("a.jsonl", b'{"question": "", "answer": "1"}\n' * 30, "empty question"),
    "a number for a question": ("a.jsonl", b'{"question": 3, "answer": "1"}\n' * 30, "question must be text, is a int"),
    "2 MB in a question": ("a.jsonl", json.dumps({"question": "x" * 2_000_000, "answer": "1"}).encode(), "question has more than 100,000 characters"),
    "a chat without an answer": ("a.jsonl", b'{"messages": [{"role": "user", "content": "q"}]}\n' * 30, "a chat without an answer: no message of 'assistant'"),
    "a chat of texts": ("a.jsonl", b'{"messages": ["hello", "4"]}\n' * 30, "a chat must be a list of messages, each with a role and a content"),
    "an unknown role": ("a.jsonl", b'{"messages": [{"role": "tool", "content": "q"}]}\n' * 30, "the role 'tool' of a message is none of system, user"),
    "two answers running": ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "q"}, {"role": "assistant", "content": "4"}]}\n', "must be of 'user'"),
    "content that is no text": ("a.jsonl", b'{"messages": [{"role": "user", "content": [1]}, {"role": "assistant", "content": "4"}]}\n', "content of a message of 'user' must be text, is a list"),
    "an unknown ending": ("a.xlsx", b"PK", "a data file must end in .json, .jsonl, .csv"),
    "text, compressed": ("a.txt.gz", b"", "a data file must end in .json, .jsonl, .csv, .tsv, .parquet, perhaps"),
    "broken gzip": ("a.jsonl.gz", b"\x1f\x8bxxxx", "not a whole .gz file"),
    "a CSV without names": ("a.csv", b"q,q\n1,2\n", "a.csv:1: the first line must name the columns, each once"),
    "a CSV with names that differ in spaces": ("a.csv", b"q, q\n1,2\n", "a.csv:1: the first line must name the columns, each once"),
    "a row with more cells": ("a.csv", b"question,answer\nq,1,2\n", "a.csv:2: 3 cells, and the first line names 2 columns"),
    "an open quote": ("a.csv", b'question,answer\n"q,1\n', "a.csv:2: not valid CSV"),
    "lines in a .json": ("a.json", b'{"question": "q"}\n{"question": "r"}', "Extra data (an object on each line: call it .jsonl)"),
    "a list of texts": ("a.json", b'["q", "r"]', "not valid JSON"),
    "a list of numbers": ("a.json", b"[1, 2]", "must be an object with named fields, is a int"),
    "not JSON": ("a.jsonl", b"question: q\n" * 30, "a.jsonl:1: not valid JSON"),
    "programs that loop": ("a.jsonl", json.dumps({"question": "q", "code": "while True: pass"}).encode(), "no assignment of arithmetic: While"),
    "programs that are wrong": ("a.jsonl", json.dumps({"question": "q", "code": CODE, "answer": "9"}).encode(), "its program gives another answer than the row"),
    "a code that is no program": ("a.jsonl", b'{"question": "q", "answer": "4", "code": "MA 1"}\n' * 30, "in layout program, a question and a Python program; for other columns: --columns question="),
}  # fmt: skip


def _train(capsys: pytest.CaptureFixture[str], folder: Path, data: object, *more: str) -> str:
    """The line that `colar train auto` ends with."""
    words = ["train", "auto", "--model", "tiny", "--data", str(data), "--output", str(folder / "run"), *more]
    assert main(words) == 2
    found = capsys.readouterr().err.strip().splitlines()
    assert "Traceback" not in "".join(found)
    assert not (folder / "run" / "recipe.yaml").exists()
    return found[-1]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, data, part = WRONG[case]
    (tmp_path / name).write_bytes(data)
    assert part in _train(capsys, tmp_path, tmp_path / name)


@pytest.mark.parametrize(
    ("data", "more", "part"),
    [
        ("good.jsonl", ["--columns", "question=ask,answer=answer"], "no column 'ask' for question"),
        ("good.jsonl", ["--columns", "question=question"], "--columns must name question and answer"),
        ("good.jsonl", ["--columns", "gold=answer"], "--columns gold: must be question, steps, answer"),
        ("good.jsonl", ["--columns", "question"], "--columns takes KEY=COLUMN"),
        ("god.jsonl", [], "there is no such file or folder, did you mean 'good.jsonl'?"),
        ("good.jsonl", ["--test", "none.jsonl"], "no data at"),
        (
            "good.jsonl",
            ["--test", "gsm8"],
            "no data at gsm8: there is no such file or folder, did you mean 'gsm8k'?",
        ),
        (
            "good.jsonl",
            ["--test", "gsm8k"],
            "gsm8k is a published source: write its rows, colar data prepare gsm8k",
        ),
        ("empty", [], "split 'train'"),
        ("good.jsonl", ["--template", "chat"], "the tokenizer of tiny has no chat template"),
        ("good.jsonl", ["--model", "no/such-model"], "cannot load backbone 'no/such-model'"),
    ],
)
def test_a_wrong_option_is_one_line(
    data: str,
    more: list[str],
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "good.jsonl").write_text(LINES)
    (tmp_path / "empty").mkdir()
    words = [str(tmp_path / word) if word == "none.jsonl" else word for word in more]
    assert part in _train(capsys, tmp_path, tmp_path / data, *words)


def test_a_data_set_that_the_hub_does_not_give_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for data, name in (("someone/rows:train", "someone/rows"), ("openai/gsm8k/main", "openai/gsm8k/main")):
        line = _train(capsys, tmp_path, data)
        told = f"cannot load the data set {name}, split 'train', from the Hub (a private or gated one needs:"
        assert told in line
    # A folder that exists has no such file in it.
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "no data at runs/mine/rows" in _train(capsys, tmp_path, "runs/mine/rows")


def test_a_first_row_with_an_empty_cell_is_left_out_alone(tmp_path: Path) -> None:
    path = tmp_path / "my.csv"
    path.write_text("problem,rationale,result\n1 + 1?,1 + 1 = 2,\n" + "2 + 2?,2 + 2 = 4,4\n" * 3)
    rows = user_rows.read(path)
    assert [example.answer for example in rows.examples] == ["4"] * 3
    [(reason, places)] = rows.left_out.places.items()
    assert reason.endswith("; empty: result")
    assert places == [f"{path}:2"]


def test_the_nameless_column_of_pandas_index_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "my.csv"
    path.write_text(",problem,rationale,result\n0,2 + 2?,2 + 2 = 4,4\n1,1 + 2?,1 + 2 = 3,3\n")
    assert [example.answer for example in user_rows.read(path).examples] == ["4", "3"]


LEFT_OUT = "not of layout solution (a question, an answer, perhaps its reasoning): it has messages"


def test_rows_of_several_layouts_are_left_out_and_counted() -> None:
    rows = user_rows.read([*ROWS, {"messages": CHAT}, {"question": "q", "steps": [], "answer": "1", "id": 7}])
    assert len(rows.examples) == len(ROWS) + 1
    [(reason, places)] = rows.left_out.places.items()
    assert (reason, places) == (LEFT_OUT, ["row 31"])
    assert rows.summary()[1] == f"left out 1: {LEFT_OUT} (row 31)"


def test_how_a_file_is_understood_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"q{i}", "code": f"x = {i} * 6"} for i in range(40)]
    rows += [{"question": "r", "code": code} for code in ("for i in x: y = 1", "while x: y = 1", "x = 1 / 3")]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(rows))
    assert main(["data", "show", str(path), "--limit", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:4] == [" question  q0", "     step  <<0*6=0>>", "   answer  0", ""]
    assert (
        shown[4]
        == "mine: 40 rows, layout program (a question and a Python program); answers are judged as number"
    )
    assert shown[5].startswith(
        "left out 2: a statement that is no assignment of arithmetic: 2 different ones ("
    )
    assert shown[6].startswith("left out 1: a value that has too many decimals to be written (")
    assert re.fullmatch(r"tokens of a chain, by the tokenizer of tiny: \d+ to \d+, median \d+", shown[7])
    assert len(shown) == 9
    assert shown[-1] == "split: 20 to train on, 10 to validate with, 10 for the table at the end"
    path.write_text(json.dumps([*rows, {"question": "why " * 1100, "code": "x = 2 * 3"}]))
    assert main(["data", "show", str(path), "--limit", "1"]) == 0
    assert re.fullmatch(
        r"1 of 41 rows are too long to train on \(mine/train/43: the row needs \d+ positions, the model's context is 1024\): "
        "choose a --model with a longer context",
        capsys.readouterr().out.splitlines()[-2],
    )


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["1", "2"], "as number"),
        (["A", "B"], "as choice"),
        (["x^2", "a $b$"], "as latex"),
        (["a dozen", "2"], "as text"),
    ],
)
def test_how_a_source_is_judged_is_said_where_it_was_guessed(
    answers: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
    path = str(files.write_jsonl(tmp_path / "mine.jsonl", rows))
    sources.load_examples(path, "train")
    assert capsys.readouterr().err.splitlines() == [
        f"mine: 2 rows, layout solution (question from question, answer from answer); answers are judged {said}"
    ]
    # Rows that name a type, as all that `prepare` writes do, need no guess.
    sources.prepare(path, ["train"], tmp_path / "prepared")
    capsys.readouterr()
    sources.load_examples(str(tmp_path / "prepared"), "train")
    assert capsys.readouterr().err == ""


CUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "with a box": (
        {"question": "q", "answer": "<think>\nSo \\boxed{7}? Wait, that is wrong"},
        {"question": "q", "answer": "<think>Two.</think>4"},
    ),
    "without": (
        {"question": "q", "answer": "<|begin_of_thought|>So it"},
        {"question": "q", "answer": "<|begin_of_thought|>Two.<|end_of_thought|>4"},
    ),
    "in a column of its own": (
        {"question": "q", "reasoning": "<think>So it", "answer": "4"},
        {"question": "q", "reasoning": "<think>Two.</think>", "answer": "4"},
    ),
    "in a chat": (
        {"messages": [*CHAT, {"role": "assistant", "content": "<think>So it"}]},
        {"messages": [*CHAT, {"role": "assistant", "content": "<think>Two.</think>4"}]},
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_reasoning_that_was_cut_is_left_out(case: str) -> None:
    """Its last box is no answer, and without a box the whole thought would be one."""
    cut, whole = CUT[case]
    read = user_rows.read([whole, cut, whole])
    assert [(row.steps, row.answer) for row in read.examples] == [(("Two.",), "4")] * 2
    assert "left out 1: the reasoning is cut: its <think> is not closed (row 2)" in read.summary()


READ_AS = {
    "a number of steps": (
        {"question": "q", "solution": "Add.\n#### 4", "answer": "4", "steps": "3"},
        "question from question, steps from steps, answer from answer; not read: solution",
    ),
    "a subject": (
        {"Question": "q", "reasoning": "arithmetic", "Solution": "Add.", "Answer": "4", "id": 7},
        "question from question, steps from reasoning, answer from answer; not read: Solution",
    ),
    "a passage under another name": (
        {"question": "Compute", "input": "2 + 2", "answer": "4"},
        "question from question, answer from answer; not read: input",
    ),
    "an instruction's input": (
        {"instruction": "Compute", "input": "2 + 2", "output": "4"},
        "question from instruction, answer from output",
    ),
    "choices": (
        {"question": "q", "answer": "Add.\n#### A", "A": "4", "B": "5"},
        "question from question, steps and answer from answer; not read: A, B",
    ),
    "a subject's id": (
        {"question": "q", "answer": "4", "Id": 7},
        "question from question, answer from answer; not read: Id",
    ),
    "a chat": (
        {"messages": [*CHAT, {"role": "assistant", "content": "4"}], "level": 1},
        "messages, conversations, or",
    ),
}


@pytest.mark.parametrize("case", READ_AS)
def test_the_columns_that_were_read_are_named(case: str) -> None:
    """A column of another meaning would otherwise be learnt without a word."""
    row, told = READ_AS[case]
    assert f"({told}" in user_rows.read([row] * 3).summary()[0]


def test_named_columns_are_named_and_the_others_too() -> None:
    row = {"problem": "q", "answer": "4", "question": "7", "Context": "x", "id": 1}
    read = user_rows.read([row] * 3, {"question": "problem", "answer": "answer"})
    assert "(question from problem, answer from answer; not read: question, Context)" in read.summary()[0]


def test_a_column_that_few_rows_have_is_named_too() -> None:
    rows = [
        {"question": "q", "answer": "4", **({"steps": ["2+2=4"]} if i % 3 == 0 else {})} for i in range(30)
    ]
    told = "(question from question, steps from steps, answer from answer)"
    assert told in user_rows.read(rows).summary()[0]


UNMARKED = {
    "GSM8K": {"question": "q", "answer": "So 3+4=<<3+4=7>>7.\nThat is all.\n#### 7"},
    "a column": {"question": "q", "rationale": "Count.\n<<3+4=7>>\n", "answer": "7"},
    "a thought": {"messages": [CHAT[1], {"role": "assistant", "content": "<think>Hm.\n<<3+4=7>></think>7"}]},
}
MARKED = [
    {"question": "q", "answer": "So 3+4=<<3+4=7>>7.\n\nThen 7-1=<<7-1=6>>6.\n#### 6"},
    {"question": "q", "answer": "First.\nThen.\n#### 6"},
    {"question": "q", "answer": "The 3 and 4 are <<3+4=7>>7. Lost. #### 7", "steps": ["Count.", "<<3+4=7>>"]},
    {"question": "q", "answer": "So <<3+4=7>>7.\nThat is all. #### 7", "steps": '["Count.", "<<3+4=7>>"]'},
]


@pytest.mark.parametrize("kind", UNMARKED)
def test_rows_that_lose_lines_without_a_mark_are_counted(kind: str, tmp_path: Path) -> None:
    row = UNMARKED[kind]
    found = user_rows.read([row, row])
    assert found.examples[0].steps == ("<<3+4=7>>",)
    assert found.summary()[0].endswith("as number; lines without a <<...>> mark are left out of 2 chains")


def test_rows_that_lose_no_line_are_not_counted() -> None:
    found = user_rows.read(MARKED)
    assert [len(row.steps) for row in found.examples] == [2, 2, 2, 2]
    assert found.summary()[0].endswith("as number")


def test_a_source_in_another_layout_has_its_judge(tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    row = {"problem": "Half?", "solution": "So it is $\\boxed{x^2+1}$."}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    [first, *others] = sources.load_examples(str(path), "train")
    assert (first.answer, first.answer_type) == ("x^2+1", "latex")
    assert {other.cluster for other in others} == {first.id}


CHAINED = [{"problem": f"Question {i}?", "rationale": f"{i}+1={i + 1}", "result": i + 1} for i in range(24)]
BARE = [{"problem": row["problem"], "why": row["rationale"], "result": row["result"]} for row in CHAINED]


@pytest.mark.parametrize("gold", [True, False])
def test_an_answer_may_be_true_or_false(gold: bool) -> None:
    rows = user_rows.read([{"question": f"Is it {i}?", "steps": ["So."], "answer": gold} for i in range(3)])
    assert {(row.answer, row.answer_type) for row in rows.examples} == {(str(gold), "choice")}


def test_a_frame_of_pandas_is_named() -> None:
    frame = type("DataFrame", (list,), {})(["question", "answer"])
    with pytest.raises(ValueError, match=r'got DataFrame: give its rows, data.to_dict\("records"\)'):
        user_rows.read(frame)


def test_a_chain_is_not_lost_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column that no row has is an error, and so are rows of which none has a chain."""
    named = {"question": "problem", "steps": "ration", "answer": "result"}
    with pytest.raises(ValueError, match="no column 'ration' for steps, did you mean 'rationale'"):
        user_rows.read(CHAINED, named)
    found = user_rows.read(CHAINED)
    assert found.examples[3].steps == ("3+1=4",)
    found.require_chains()
    # Some rows may lack one.
    some = user_rows.read([{**CHAINED[0], "rationale": None}, *CHAINED[1:]], {**named, "steps": "rationale"})
    assert some.summary()[-1] == "1 of 24 rows have no reasoning"
    some.require_chains()
    # Rows to be answered need none.
    named["steps"] = "rationale"
    bare = [{"problem": "Question 99?", "result": 100}]
    assert [row.steps for row in user_rows.read_held_out(CHAINED, some, named, bare)["test"].examples] == [()]
    with pytest.raises(ValueError, match="no column 'result' for answer"):
        user_rows.read_held_out(CHAINED, some, named, [{"problem": "Question 99?"}])
    with pytest.raises(
        ValueError, match=r"no row has reasoning \(columns: problem, why, result\): name its column"
    ):
        user_rows.read(BARE).require_chains()
    path = files.write_jsonl(tmp_path / "bare.jsonl", BARE)
    assert main(["data", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Question 0?" in shown
    assert "24 of 24 rows have no reasoning" in shown
    assert "colar train auto would not take it: bare: no row has reasoning" in shown
    assert main(["train", "auto", "--model", "tiny", "--data", str(path), "--output", f"{tmp_path}/run"]) == 2
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_a_file_has_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files.write_jsonl(tmp_path / "mine.jsonl", ROWS)
    assert main(["data", "show", str(path), "--options", "x=1"]) == 2
    assert "unknown file option 'x'; allowed: none" in capsys.readouterr().err


def test_a_file_of_two_rows_is_shown_before_it_is_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.csv").write_text("question;steps;answer\n1 + 1?;1+1=2;2\n2 + 2?;2+2=4;4\n")
    assert main(["data", "show", str(tmp_path / "few.csv")]) == 0
    shown = capsys.readouterr().out
    assert "2 + 2?" in shown
    assert "would not take it: 2 rows are too few to train on" in shown


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_table_is_not_read_into_memory_at_once(tmp_path: Path, ending: str) -> None:
    n, text = 20_000, "x" * 500
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        parquet.write_table(pyarrow.table({"question": [f"{i} {text}" for i in range(n)]}), path)
    else:
        lines = [f'{{"question": "{i} {text}"}}' if ending == "jsonl" else f"{i} {text}" for i in range(n)]
        path.write_text("\n".join([*(["question"] if ending == "csv" else []), *lines]))
    next(data_files.read(path))  # what is imported and cached at first is no part of it
    tracemalloc.start()
    assert sum(1 for _ in data_files.read(path)) == n
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The texts alone take 10 MB.
    assert peak < 3e6
